"""Problems: every answer that is none, as application/problem+json (RFC 9457), from whatever went wrong.

How a route's answers are described in OpenAPI.

StrictRoute: FastAPI documents what a function takes; reading it is done here, strictly and in a quarter of the time.

A function takes any of: a model of parameters (``Annotated[ByKey, Query()]``), pieces of the path
(``Annotated[str, Path(pattern=...)]``), and the Request itself. It returns a Response.

Health: is it alive, and is it near enough to the end of the log?

Annotations here are read when the module runs: no postponed annotations in this file.

The page: what people see at ``/``, whole and searchable without a script, and the files that make it live.

create_app: what is answered under which path.
"""

import asyncio
import hashlib
import inspect
import json
from collections.abc import Callable, Coroutine, Iterable, Mapping
from http import HTTPStatus
from typing import Annotated, Any, get_args, get_origin

from fastapi import APIRouter, FastAPI, Request
from fastapi import Query as FastapiQuery
from fastapi.exceptions import RequestValidationError
from fastapi.params import Path, Query
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from indexd import __version__
from indexd.config import Config
from indexd.errors import CorruptDataError, DiskError, DisturbedError, IndexdError, UnsafeStoreError, UsageError
from indexd.pages.markup import Html
from indexd.serve.board import Board
from indexd.serve.http.figures import Health, Problem, figure_router, file_router
from indexd.serve.http.guard import Access, Guard, read_access
from indexd.serve.http.messages import Queries, json_response, message_router, text64
from indexd.serve.http.parameters import Nothing, Thresholds, read_path, read_query
from indexd.serve.web.answer import answer_to, problem_section
from indexd.serve.web.shell import ASSETS, Asked, asset, assets_version, render_page

MEDIA_TYPE = "application/problem+json"
ALLOWED = "GET, HEAD"
_INSTANCE_MAX = 200
_STOPPING_RETRY = 5
_TYPE = "urn:rocketmq-indexd:problem:"


class ProblemError(Exception):
    """An answer that is none. ``slug`` ends its type, ``members`` go into its object, ``retry`` is in seconds.

    ``closes``: the connection is not kept, so that those who are refused hold none. ``is_refusal``: nothing failed, it
    was only not the time to ask.
    """

    def __init__(
        self,
        status: int,
        slug: str,
        detail: str,
        members: Mapping[str, Any] | None = None,
        retry: int | None = None,
        *,
        closes: bool = False,
        is_refusal: bool = False,
    ) -> None:
        super().__init__(detail)
        self.status, self.slug, self.detail, self.retry = status, slug, detail, retry
        self.closes, self.is_refusal = closes, is_refusal
        self.members = dict(members or {})

    @property
    def title(self) -> str:
        """The status in words."""
        return HTTPStatus(self.status).phrase

    def body(self, instance: str) -> bytes:
        """The object; ``instance`` is the path that was asked for, of which the beginning is enough."""
        row = {
            "type": _TYPE + self.slug,
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
            "instance": instance[:_INSTANCE_MAX],
        }
        return json.dumps(row | self.members).encode()

    def headers(self) -> dict[str, str]:
        """Those that belong to the status."""
        headers = {} if self.retry is None else {"retry-after": str(self.retry)}
        if self.status == HTTPStatus.METHOD_NOT_ALLOWED:
            headers["allow"] = ALLOWED
        if self.closes:
            headers["connection"] = "close"
        return headers

    def response(self, instance: str) -> Response:
        """The whole answer."""
        return Response(self.body(instance), self.status, self.headers(), MEDIA_TYPE)


def of_status(status: int, detail: str) -> ProblemError:
    """The problem that a framework's error is."""
    return ProblemError(status, HTTPStatus(status).phrase.lower().replace(" ", "-"), detail)


def of_values(problems: Iterable[str]) -> ProblemError:
    """Parameters that cannot be used, each with why."""
    listed = list(problems)
    return ProblemError(422, "parameters", "; ".join(listed), {"problems": listed})


def stopping() -> ProblemError:
    """What is asked, or not answered yet, when the daemon stops."""
    detail = "the daemon stops: ask again when it is back"
    return ProblemError(503, "stopping", detail, retry=_STOPPING_RETRY, closes=True, is_refusal=True)


def of_error(error: IndexdError) -> ProblemError:
    """What a query raised: the caller's fault, the state of things, or damage; with the hint an operator is given."""
    detail, hint = str(error.args[0]), {"hint": error.hint} if error.hint else {}
    if isinstance(error, UsageError):
        return ProblemError(422, "parameters", detail, hint)
    if isinstance(error, DisturbedError | UnsafeStoreError) or (isinstance(error, DiskError) and error.is_transient):
        return ProblemError(503, "not-now", detail, hint, retry=1)
    if isinstance(error, CorruptDataError):
        return ProblemError(500, "corrupt-data", detail, hint)
    return ProblemError(500, "internal", detail, hint)


Responses = dict[int | str, dict[str, Any]]
_PROBLEM = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
_WORDS = {
    401: "A token is needed (http_token_file)",
    404: "There is no such thing",
    409: "The parameters contradict each other",
    413: "Requests have no body here",
    414: "The address is too long",
    421: "The Host header names another host",
    422: "A parameter is wrong, unknown or missing",
    431: "The headers are too long",
    500: "The index is damaged, or a defect",
    503: "Not now: it recovers, or too much is asked at once; Retry-After says when",
}
_ALWAYS = (401, 405, 413, 414, 421, 422, 431, 500, 503)
_WORDS[405] = "Everything here is only read: GET and HEAD"


def documented(model: type[BaseModel], description: str, *problems: int) -> dict[str, Any]:
    """Arguments of a route: what it answers, and which problems beside those of every route."""
    answers: Responses = {200: {"model": model, "description": description}}
    answers |= {status: {"description": _WORDS[status], "content": _PROBLEM} for status in (*_ALWAYS, *problems)}
    return {"response_model": None, "responses": answers}


def documented_text(kind: str, description: str) -> dict[str, Any]:
    """The same for an answer that is no JSON; ``kind`` is its media type."""
    found = documented(BaseModel, description)
    found["responses"][200] = {"description": description, "content": {kind: {"schema": {"type": "string"}}}}
    return found


Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class StrictRoute(APIRoute):
    """A route whose parameters are read by ``read_query`` and ``read_path``; one without parameters accepts none."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        answer = self.get_route_handler()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            # Without what FastAPI does for dependencies, of which there are none.
            response = await answer(Request(scope, receive, send))
            await response(scope, receive, send)

        self.app = app

    def get_route_handler(self) -> Handler:
        """What answers a request."""
        endpoint = self.endpoint
        model: type[BaseModel] = Nothing
        model_name = request_name = None
        pieces: list[tuple[str, TypeAdapter[Any]]] = []
        for name, parameter in inspect.signature(endpoint, eval_str=True).parameters.items():
            kind = parameter.annotation
            marks = get_args(kind)[1:] if get_origin(kind) is Annotated else ()
            if kind is Request:
                request_name = name
            elif any(isinstance(mark, Query) for mark in marks):
                model_name, model = name, get_args(kind)[0]
            elif any(isinstance(mark, Path) for mark in marks):
                pieces.append((name, TypeAdapter(kind)))
            else:
                raise TypeError(f"{endpoint.__qualname__} takes {name}, which is neither of the query nor of the path")

        async def handle(request: Request) -> Response:
            values: dict[str, Any] = {}
            asked = read_query(model, request.scope["query_string"])
            for name, adapter in pieces:
                values[name] = read_path(adapter, name, request.path_params[name])
            if model_name is not None:
                values[model_name] = asked
            if request_name is not None:
                values[request_name] = request
            answer: Response = await endpoint(**values)
            return answer

        return handle


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
    async def readyz(asked: Annotated[Thresholds, FastapiQuery()]) -> Response:
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
