"""The page: what people see at ``/``, whole and searchable without a script, and the files that make it live."""

from __future__ import annotations

import hashlib
from http import HTTPStatus

from fastapi import APIRouter, Request, Response

from indexd.config import Config
from indexd.errors import IndexdError
from indexd.pages.markup import Html
from indexd.serve.board import Board
from indexd.serve.http.problem import ProblemError
from indexd.serve.http.queries import Queries
from indexd.serve.web.answer import answer_to, problem_section
from indexd.serve.web.asked import Asked
from indexd.serve.web.shell import ASSETS, asset, assets_version, render_page

# Scripts, styles and data from here alone, none of them inside the page; nobody may frame it.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
_FOREVER = "public, max-age=31536000, immutable"


def page_router(config: Config, board: Board, data: Queries) -> APIRouter:
    """The page's routes. Whoever has no token where one is needed gets the page without figures and answers."""
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    async def page(request: Request) -> Response:
        asked, may_see = Asked.of(request.query_params), _may_see(request, config)
        answer: Html | None = None
        status = 200
        if asked.is_anything and may_see:
            answer, status = await _answer(config, data, asked)
        text = render_page(asked, answer, board.row() if may_see else None, _address(request))
        headers = _HEADERS | {"cache-control": "no-store"}
        return Response(text.encode("utf-8", "replace"), status, headers, "text/html")

    @router.get("/static/{version}/{name}")
    async def static(request: Request, version: str, name: str) -> Response:
        if name not in ASSETS:
            raise ProblemError(HTTPStatus.NOT_FOUND, "not-found", f"there is no file {name[:80]!r}")
        found = asset(name)
        tag = f'"{hashlib.sha256(found).hexdigest()[:16]}"'
        # A page of another version asks under another name, which must not be kept for this one's content.
        headers = _HEADERS | {"etag": tag, "cache-control": _FOREVER if version == assets_version() else "no-cache"}
        if request.headers.get("if-none-match") == tag:
            return Response(None, 304, headers)
        return Response(found, 200, headers, ASSETS[name])

    return router


def _may_see(request: Request, config: Config) -> bool:
    return config.http.http_token_file is None or bool(request.scope.get("state", {}).get("authorized"))


def _address(request: Request) -> str:
    return f"{request.scope.get('scheme', 'http')}://{request.headers.get('host', '')}"


async def _answer(config: Config, data: Queries, asked: Asked) -> tuple[Html, int]:
    size_max = config.http.http_body_max
    try:
        shown = await data.query(lambda opened: answer_to(opened, asked, size_max), lambda shown: shown.result)
    except ProblemError as problem:
        error = IndexdError(problem.detail, str(problem.members.get("hint", _hint_of(problem))))
        return problem_section(error), problem.status
    return shown.html, 200


def _hint_of(problem: ProblemError) -> str:
    if problem.status == HTTPStatus.SERVICE_UNAVAILABLE:
        return "search again in a moment; what it is doing stands above"
    return "the daemon's log may say more: journalctl -u indexd"
