"""create_app: the ASGI application: the API, the page at / for people, and the guard around both."""

from __future__ import annotations

import asyncio
import hashlib
import json
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from indexd.config import Config
from indexd.errors import IndexdError
from indexd.serve.board import Board
from indexd.serve.http.answers import json_response
from indexd.serve.http.endpoints import add_figures, add_files, add_health, add_messages
from indexd.serve.http.guard import Access, Guard
from indexd.serve.http.openapi import Api
from indexd.serve.http.problem import ProblemError, problem_of
from indexd.serve.queries import NotAnsweredError, Queries
from indexd.serve.web.answer import answer_to, problem_section
from indexd.serve.web.page import ASSETS, asset, assets_version, render_page
from indexd.serve.web.search_form import SearchForm

# Scripts, styles and data from here alone, none of them inside the page; nobody may frame it.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {"content-security-policy": _POLICY}
_FOREVER = "public, max-age=31536000, immutable"


def create_app(
    config: Config, board: Board, queries: Queries, access: Access, log: Any = None, stop: asyncio.Event | None = None
) -> ASGIApp:
    """The application; streams end when ``stop`` is set. ``queries`` are the caller's to close."""
    api = Api()
    add_messages(api, config, queries)
    add_files(api, board, queries)
    add_health(api, board)
    add_figures(api, board, stop or asyncio.Event())
    described = json.dumps(api.schema(with_token=access.token is not None)).encode()

    async def openapi(_: Request) -> Response:
        return json_response(described)

    page = _Page(config, board, queries)
    routes = [
        *api.routes, Route("/openapi.json", openapi), Route("/", page.page),
        Route("/static/{version}/{name}", page.static),
    ]  # fmt: skip
    guarded = Guard(Router(routes, redirect_slashes=False, default=_not_found), access, log)
    origins, allowed = config.http.http_cors_origins, ("Authorization", "Last-Event-ID")
    return CORSMiddleware(guarded, origins, ("GET", "HEAD"), allowed) if origins else guarded


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG001 - an ASGI application
    raise ProblemError(404, "not-found", "there is nothing under this path")


class _Page:
    """What people see. Whoever has no token where one is needed gets the page without figures and answers."""

    def __init__(self, config: Config, board: Board, queries: Queries) -> None:
        self._config, self._board, self._queries = config.http, board, queries

    async def page(self, request: Request) -> Response:
        """The page, whole and searchable without a script."""
        form, answer, status = SearchForm.of(request.query_params), None, 200
        may_see = self._config.http_token_file is None or bool(request.scope["state"].get("authorized"))
        if form.is_anything and may_see:
            try:
                shown = await self._queries.query(
                    lambda data: answer_to(data, form, self._config.http_body_max), lambda shown: shown.result
                )
                answer = shown.html
            except (NotAnsweredError, IndexdError) as error:
                problem = problem_of(error)
                assert problem is not None
                hint = "search again in a moment; what it is doing stands above" if problem.status == 503 else ""
                hint = str(problem.members.get("hint", hint or "the daemon's log may say more: journalctl -u indexd"))
                answer, status = problem_section(IndexdError(problem.detail, hint)), problem.status
        address = f"{request.scope.get('scheme', 'http')}://{request.headers.get('host', '')}"
        text = render_page(form, answer, self._board.row() if may_see else None, address)
        return Response(text.encode("utf-8", "replace"), status, _HEADERS, "text/html")

    async def static(self, request: Request) -> Response:
        """The files that make it live."""
        version, name = request.path_params["version"], request.path_params["name"]
        if name not in ASSETS:
            raise ProblemError(404, "not-found", f"there is no file {name[:80]!r}")
        found = asset(name)
        tag = f'"{hashlib.sha256(found).hexdigest()[:16]}"'
        # A page of another version asks under another name, which must not be kept for this one's content.
        headers = _HEADERS | {"etag": tag, "cache-control": _FOREVER if version == assets_version() else "no-cache"}
        if request.headers.get("if-none-match") == tag:
            return Response(None, 304, headers)
        return Response(found, 200, headers, ASSETS[name])
