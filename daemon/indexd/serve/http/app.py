"""create_app: the ASGI application: the API, the page at / for people, and the guard around both."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from indexd.config import Config
from indexd.errors import IndexdError
from indexd.serve.daemon_status import DaemonStatus
from indexd.serve.http.answers import json_response
from indexd.serve.http.api import Api
from indexd.serve.http.endpoints import add_figures, add_files, add_health, add_messages
from indexd.serve.http.guard import Access, Guard
from indexd.serve.http.problem import ProblemError, problem_of
from indexd.serve.queries import NotAnsweredError, Queries
from indexd.serve.web.page import ASSETS, SearchForm, answer_to, asset, problem_section, render_page

# Scripts, styles and data from here alone, none of them inside the page; nobody may frame it.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {"content-security-policy": _POLICY}


def create_app(
    config: Config, board: DaemonStatus, queries: Queries, access: Access, log: Any, stop: asyncio.Event
) -> ASGIApp:
    """The application; streams end when ``stop`` is set. ``queries`` are the caller's to close."""
    api = Api()
    add_messages(api, queries, config.http.http_body_max)
    add_files(api, board, queries)
    add_health(api, board)
    add_figures(api, board, stop)
    described = json.dumps(api.schema(with_token=access.token is not None)).encode()

    async def openapi(_: Request) -> Response:
        return json_response(described)

    async def page(request: Request) -> Response:
        # Whoever has no token where one is needed gets the page without figures and answers.
        may_see, status = bool(request.scope["state"]["authorized"]), 200
        form, answer = SearchForm.of(request.query_params), None
        if form.is_anything and may_see:
            try:
                answer, _ = await queries.query(
                    lambda data: answer_to(data, form, config.http.http_body_max), lambda shown: shown[1]
                )
            except (NotAnsweredError, IndexdError) as error:
                problem = problem_of(error)
                hint = "search again in a moment" if problem.status == 503 else "journalctl -u indexd may say more"
                answer = problem_section(IndexdError(problem.detail, str(problem.members.get("hint", hint))))
                status = problem.status
        text = render_page(form, answer, board.row() if may_see else None)
        return Response(text.encode("utf-8", "replace"), status, _HEADERS, "text/html")

    async def static(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in ASSETS:
            raise ProblemError(404, "not-found", f"there is no file {name[:80]!r}")
        return Response(asset(name), 200, _HEADERS, ASSETS[name])

    own = [Route("/openapi.json", openapi), Route("/", page), Route("/static/{name}", static)]
    guarded = Guard(Router([*api.routes, *own], redirect_slashes=False, default=_not_found), access, log)
    origins, allowed = config.http.http_cors_origins, ("Authorization", "Last-Event-ID")
    return CORSMiddleware(guarded, origins, ("GET", "HEAD"), allowed) if origins else guarded


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG001 - an ASGI application
    raise ProblemError(404, "not-found", "there is nothing under this path")
