"""Health: is it alive, and is it near enough to the end of the log?

Annotations here are read when the module runs: no postponed annotations in this file.

The page: what people see at ``/``, whole and searchable without a script, and the files that make it live.

create_app: what is answered under which path.
"""

import asyncio
import hashlib
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from indexd import __version__
from indexd.config import Config
from indexd.errors import IndexdError
from indexd.pages.markup import Html
from indexd.serve.board import Board
from indexd.serve.http.figures import figure_router, file_router
from indexd.serve.http.guard import Access, Guard, read_access
from indexd.serve.http.messages import Queries, json_response, message_router, text64
from indexd.serve.http.parameters import Thresholds
from indexd.serve.http.problem import ProblemError, documented, of_status, of_values
from indexd.serve.http.route import StrictRoute
from indexd.serve.http.schemas import Health, Problem
from indexd.serve.web.answer import answer_to, problem_section
from indexd.serve.web.shell import ASSETS, Asked, asset, assets_version, render_page

_RETRY = 5
_LAG = ("dispatchBehindBytes", "dispatchBehindMilliseconds")


def health_router(board: Board) -> APIRouter:
    """The routes."""
    router = APIRouter(route_class=StrictRoute, tags=["health"])

    @router.get("/livez", summary="Is it alive?", **documented(Health, "It is"))
    async def livez() -> Response:
        """200 unless a stage of the indexing (read, build, flush) stands still, which a restart may help.

        A full disk or an unreadable log is no reason: it is waited for, and a restart helps nothing.
        """
        row = board.row()
        stalled = row["stalled"]
        if stalled and row["phase"] == "running":
            words = ", ".join(f"{stage} for {seconds:.0f} s" for stage, seconds in stalled.items())
            members = {"phase": row["phase"], "stalled": stalled}
            raise ProblemError(503, "stalled", f"the indexing does not move: {words}", members, retry=_RETRY)
        return json_response({"status": "ok", "phase": row["phase"]})

    @router.get("/readyz", summary="Is the index near enough to the end of the log?", **documented(Health, "It is"))
    async def readyz(asked: Annotated[Thresholds, Query()]) -> Response:
        """200 while it runs, within the thresholds, and can read on; else 503 with the numbers and why.

        Where the log goes on behind bytes that are no frame, no threshold is waited for.
        """
        row = board.row()
        lag = {name: row.get(name) for name in _LAG}
        facts: dict[str, Any] = text64({"phase": row["phase"], **lag, "caughtUp": row.get("caughtUp")})
        is_running = row["phase"] == "running"
        reasons = [] if is_running else [f"it is {row['phase']}"]
        for name, most, unit in ((_LAG[0], asked.lag_bytes, "bytes"), (_LAG[1], asked.lag_ms, "ms")):
            found = lag[name]
            if most is not None and is_running and (found is None or found > most):
                reasons.append(f"it is {'an unknown number of' if found is None else found} {unit} behind")
        corrupt = row.get("corrupt") if is_running else None
        if corrupt and (reasons or lag[_LAG[0]]):
            reasons.insert(0, f"it stands at bytes that are no frame, at {corrupt['offset']}: {corrupt['reason']}")
        if reasons:
            raise ProblemError(503, "not-ready", "; ".join(reasons), facts, retry=_RETRY)
        return json_response({"status": "ok", **facts})

    return router


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


_DESCRIPTION = """\
Finds messages of an Apache RocketMQ broker by key, unique key, queue offset, time and physical offset, and says how the
index stands. Everything is read only. Whole numbers of 64 bits are texts. Whatever is no answer is an
`application/problem+json` object. A parameter that is not known here is an error, never passed over.
"""


def create_app(
    config: Config, board: Board, log: Any = None, stop: asyncio.Event | None = None, access: Access | None = None
) -> FastAPI:
    """The application; streams end when ``stop`` is set. ``app.state.queries`` has to be closed. UsageError."""
    app = FastAPI(
        title="indexd", version=__version__, description=_DESCRIPTION, docs_url=None, redoc_url=None,
        redirect_slashes=False, license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
    )  # fmt: skip
    queries = app.state.queries = Queries(config, board)
    access = access or read_access(config)
    direct: dict[str, ASGIApp] = {}
    app.add_middleware(Guard, access=access, direct=direct, log=log)

    @app.exception_handler(ProblemError)
    async def on_problem(request: Request, problem: ProblemError) -> Response:
        return problem.response(request.scope["path"])

    @app.exception_handler(HTTPException)
    async def on_status(request: Request, error: HTTPException) -> Response:
        detail = "there is nothing under this path" if error.status_code == 404 else str(error.detail)
        return of_status(error.status_code, detail).response(request.scope["path"])

    @app.exception_handler(RequestValidationError)
    async def on_values(request: Request, error: RequestValidationError) -> Response:
        problem = of_values(f"{found['loc'][-1]}: {found['msg']}" for found in error.errors())
        return problem.response(request.scope["path"])

    for router in (
        message_router(config, queries),
        file_router(board, queries),
        health_router(board),
        figure_router(board, stop or asyncio.Event()),
    ):
        app.include_router(router)
        direct |= {
            route.path: route.app for route in router.routes if isinstance(route, StrictRoute) and "{" not in route.path
        }
    app.include_router(page_router(config, board, queries))
    _describe_problems(app, with_token=access.token is not None)
    return app


def _describe_problems(app: FastAPI, *, with_token: bool) -> None:
    # FastAPI knows of no answers that are no JSON; this adds their schema, and the token where there is one.
    make = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = make()
            parts = schema.setdefault("components", {})
            parts.setdefault("schemas", {})["Problem"] = Problem.model_json_schema(by_alias=True)
            if with_token:
                parts["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
                schema["security"] = [{"token": []}]
                schema["paths"]["/livez"]["get"]["security"] = []
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI's documentation has it
