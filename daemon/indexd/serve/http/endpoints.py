"""Endpoints: what is answered under which path of the API, each registered once with what it takes.

From that OpenAPI's description is made too. The parameters of a question are its own model within HTTP's bounds, read
strictly: nothing is guessed.

Annotations here are read when the module runs: no postponed annotations in this file.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import parse_qsl

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from indexd import __version__
from indexd.config.units import wrong_fields
from indexd.dispatch.reput import pause
from indexd.errors import UsageError
from indexd.query import QUESTIONS, Data, NotFound
from indexd.query.message import message_fields
from indexd.query.questions import ByKey, ByMessage, ByQueueOffset, ByUniqueKey, Count, Question, Whole, make_question
from indexd.query.source import IndexSnapshot, OpenIndexFile, topics_of
from indexd.serve.daemon_status import DaemonStatus
from indexd.serve.http.answers import (
    OF_LISTS,
    Bodies,
    Row,
    coverage_row,
    json_response,
    key_answer,
    plain_answer,
    queue_answer,
    text64,
    to_json,
)
from indexd.serve.http.guard import MEDIA_TYPE, ProblemError, wrong_values
from indexd.serve.metrics import render
from indexd.serve.queries import EMPTY_COVERED, FOUND, Queries

M = TypeVar("M", bound=BaseModel)
Handler = Callable[[Request, Any], Awaitable[Response]]
_JSON, _EVENT_STREAM = "application/json", "text/event-stream"
_ALWAYS = (401, 405, 413, 421, 422, 500, 503)
_WORDS = {
    401: "A token is needed (http_token_file)",
    404: "There is no such thing",
    405: "Everything here is only read: GET and HEAD",
    409: "The parameters contradict each other",
    413: "Requests have no body here",
    421: "The Host header names another host",
    422: "A parameter is wrong, unknown or missing",
    500: "The index is damaged, or a defect",
    503: "Not now: it recovers, or too much is asked at once; Retry-After says when",
}
_DESCRIPTION = """\
Finds messages of an Apache RocketMQ broker by key, unique key, queue offset, time and physical offset, and says how the
index stands. Everything is read only. Whole numbers of 64 bits are texts. Whatever is no answer is an
`application/problem+json` object. A parameter that is not known here is an error, never passed over.
"""
_WHERE = {
    "name": "where",
    "in": "path",
    "required": True,
    "description": "Its physical offset, or its offset message id of 32 or 56 hex digits",
    "schema": {"type": "string", "pattern": "^([0-9]{1,18}|[0-9A-Fa-f]{32}|[0-9A-Fa-f]{56})$"},
    "example": "0",
}
_PARAMETERS_MAX = 32
_SEGMENTS_MAX = 1000
_LAG = ("dispatchBehindBytes", "dispatchBehindMilliseconds")
_RETRY = 5
#: Streams at once; each costs a row a second.
LIVE_MAX = 32
#: How an answer is written, if not as its ``to_json`` says; these show bodies.
_WRITERS: dict[type[Question], Callable[[Data, Any, Bodies], tuple[bytes, str]]] = {
    ByKey: key_answer,
    ByUniqueKey: key_answer,
    ByQueueOffset: queue_answer,
}

_MAX = Field(ge=1, le=1000)
# Of any letters, so that all of it goes into an address (server._HEAD_MAX).
_BOUNDS = {"topic": Field(max_length=255), "key": Field(max_length=1024), "id": Field(max_length=1024), "max": _MAX}
BodyForm = Annotated[
    Literal["none", "text", "json", "hex", "base64"],
    Field(
        description="How bodies are shown: text and json where they are such, else base64; together they are no"
        " longer than http_body_max",
        examples=["text"],
    ),
]


class NoParameters(BaseModel):
    """No parameters at all, and the base of those that are no question's."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class OneMessage(NoParameters):
    """How one message is shown."""

    body: BodyForm = "text"


class TopicsBegin(NoParameters):
    """Which topics."""

    begin: str = Field("", max_length=255, description="What their names begin with, in letters of any case")
    max: Annotated[Whole, _MAX] = Field(50, description="Most topics of the answer")


class EventsParameters(NoParameters):
    """Which events."""

    since: Count = Field(0, description="Only events behind this number")


class Thresholds(NoParameters):
    """How far behind is still ready."""

    lag_ms: Count = Field(60_000, description="Not ready when the oldest message that is not indexed is older, in ms")
    lag_bytes: Count | None = Field(None, description="Not ready when more bytes of log are not indexed yet")


def read_query(model: type[M], query: bytes) -> M:
    """The parameters of a request; ProblemError names those that are wrong, unknown, doubled or no UTF-8, and those
    that contradict each other (409).
    """
    try:
        pairs = parse_qsl(query.decode(), keep_blank_values=True, errors="strict", max_num_fields=_PARAMETERS_MAX)
    except ValueError:
        raise wrong_values([f"parameters are UTF-8, and {_PARAMETERS_MAX} at most"]) from None
    given = dict(pairs)
    if len(given) < len(pairs):
        raise wrong_values(["a parameter is there twice"])
    try:
        return model.model_validate(given)
    except UsageError as error:
        raise ProblemError(409, "parameters", str(error.args[0])) from None
    except ValidationError as error:
        problems, is_one = wrong_fields(error), bool(error.errors()[0]["loc"])
    raise wrong_values(problems) if is_one else ProblemError(409, "parameters", problems[0])


class Api:
    """A handler takes the request and the model of its parameters; its docstring describes it."""

    def __init__(self) -> None:
        self.routes: list[Route] = []
        self._paths: dict[str, dict[str, dict[str, Any]]] = {}

    def get(
        self, path: str, summary: str, *problems: int, query: type[BaseModel] = NoParameters, media: str = _JSON
    ) -> Callable[[Handler], Handler]:
        """Register what answers GET and HEAD, with ``media``."""

        def register(handler: Handler) -> Handler:
            async def endpoint(request: Request) -> Response:
                return await handler(request, read_query(query, request.scope["query_string"]))

            self.routes.append(Route(path, endpoint))
            answer = {media: {"schema": {"type": "object" if media == _JSON else "string"}}}
            problem = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
            responses = {str(one): {"description": _WORDS[one], "content": problem} for one in (*_ALWAYS, *problems)}
            operation = {
                "summary": summary,
                "description": " ".join((handler.__doc__ or summary).split()),
                "operationId": handler.__name__,
                "parameters": ([_WHERE] if "{where}" in path else []) + _parameters(query),
                "responses": {"200": {"description": "The answer", "content": answer}, **responses},
            }
            self._paths[path] = {"get": operation}
            return handler

        return register

    def schema(self, *, with_token: bool) -> dict[str, Any]:
        """OpenAPI's description of all that was registered."""
        texts = ("type", "title", "detail", "instance")
        members = {name: {"type": "string"} for name in (*texts, "hint")} | {
            "status": {"type": "integer"},
            "problems": {"type": "array", "items": {"type": "string"}},
        }
        words = "Every answer that is none (RFC 9457)"
        problem = {"type": "object", "description": words, "properties": members, "required": texts}
        schema: Row = {
            "openapi": "3.1.0",
            "info": {
                "title": "indexd",
                "version": __version__,
                "description": _DESCRIPTION,
                "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            },
            "paths": self._paths,
            "components": {"schemas": {"Problem": problem}},
        }
        if with_token:
            schema["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            schema["security"] = [{"token": []}]
            self._paths["/livez"]["get"]["security"] = []
        return schema


def _parameters(model: type[BaseModel]) -> list[dict[str, Any]]:
    schema = model.model_json_schema()
    found = []
    for name, kind in schema.get("properties", {}).items():
        # A parameter that is not given is null; none is ever given as such.
        shown = next((one for one in kind.pop("anyOf", ()) if one.get("type") != "null"), {}) | kind
        # Bounds behind a validator of our own are left as pydantic calls them.
        shown = {{"ge": "minimum", "le": "maximum"}.get(key, key): value for key, value in shown.items()}
        if shown.get("default", "") is None:
            del shown["default"]
        is_needed, words = name in schema.get("required", ()), shown.pop("description")
        found.append({"name": name, "in": "query", "required": is_needed, "description": words, "schema": shown})
    return found


def add_messages(api: Api, queries: Queries, body_max: int) -> None:
    """Each question with how its answer is written, and the one message at a place of the log."""
    for model in QUESTIONS:
        if model.path is not None:
            _add_question(api, queries, model, body_max)

    @api.get(
        "/api/v1/messages/{where}", "The message at a physical offset, or with an offset message id", 404,
        query=OneMessage,
    )  # fmt: skip
    async def one_message(request: Request, asked: OneMessage) -> Response:
        """Every field, the properties, and the body as text where it is such."""
        where: str = request.path_params["where"]
        asked_for = make_question(ByMessage, {"id" if len(where) >= 32 else "offset": where})

        def find(data: Data) -> tuple[bytes | str, str]:
            found = asked_for.answer(data.index)
            if isinstance(found, NotFound):
                return found.reason, EMPTY_COVERED  # it was the log itself that was asked
            return to_json(message_fields(found) | Bodies(asked.body, body_max).of(found), OF_LISTS), FOUND

        body, result = await queries.query(find, lambda found: found[1])
        if isinstance(body, str):
            raise ProblemError(404, "no-message", body, {"result": result})
        return json_response(body)


def _add_question(api: Api, queries: Queries, model: type[Question], body_max: int) -> None:
    write = _WRITERS.get(model, plain_answer)

    async def handler(_: Request, asked: Any) -> Response:
        bodies = Bodies(getattr(asked, "body", "none"), body_max)

        def find(data: Data) -> tuple[bytes, str]:
            # Made into bytes where it was found: the event loop has others to serve.
            return write(data, asked.answer(data.index), bodies)

        return json_response((await queries.query(find, lambda found: found[1]))[0])

    handler.__name__ = str(model.path).replace("-", "_")
    fields: dict[str, Any] = {
        name: (Annotated[info.annotation, _BOUNDS[name]], info)
        for name, info in model.model_fields.items()
        if name in _BOUNDS
    }
    if model in _WRITERS:
        fields["body"] = (BodyForm, "none")
    over_http = create_model(model.__name__, __base__=model, **fields)
    api.get(f"/api/v1/messages/{model.path}", str(model.__doc__), 409, query=over_http)(handler)


def add_files(api: Api, queries: Queries) -> None:
    """What lies in the data directory: index files with their headers, coverage, topics."""

    @api.get("/api/v1/index-files", "All index files with their headers")
    async def index_files(*_: object) -> Response:
        """As they stand now, the newest still growing."""
        return json_response(to_json(await queries.ask(_index_files), OF_LISTS))

    @api.get("/api/v1/coverage", "Which part of the log is indexed")
    async def coverage(*_: object) -> Response:
        """Every message of ``[begin, end)`` is in the index, but for those of ``uncovered``."""
        return json_response(to_json(await queries.ask(_coverage), OF_LISTS))

    @api.get("/api/v1/topics", "Topics with a queue", 404, query=TopicsBegin)
    async def topics(_: Request, asked: TopicsBegin) -> Response:
        """For a field that completes what is typed; ``total`` counts those that ``max`` leaves out, too."""
        names = await queries.ask(lambda data: topics_of(data.index))
        if names is None:
            raise ProblemError(404, "not-built", "no ConsumeQueues are built (consume_queue = false)")
        found = [name for name in names if name.lower().startswith(asked.begin.lower())]
        return json_response(to_json({"topics": found[: asked.max], "total": len(found)}, OF_LISTS))


def _index_files(data: Data) -> Row:
    look = data.index.look()
    rows = [_file_row(found, look) for found in data.index.newest_first(look)]
    return {"indexFiles": rows[::-1], "coverage": coverage_row(look.coverage)}


def _file_row(found: OpenIndexFile, look: IndexSnapshot) -> Row:
    header, layout = found.reader.header(), look.layout
    return {
        "name": found.reader.file.path.name,
        "size": str(layout.file_size),
        "full": header.index_count >= layout.index_num,
        "durable": found.mark is not None,
        "entries": header.entries,
        "fillRatio": round(header.entries / (layout.index_num - 1), 6),
        "beginTimestamp": header.begin_timestamp,
        "endTimestamp": header.end_timestamp,
        "beginPhyOffset": header.begin_phy_offset,
        "endPhyOffset": header.end_phy_offset,
        "usedSlotCount": header.used_slot_count,
        "indexCount": header.index_count,
        "hashSlotNum": layout.hash_slot_num,
        "indexNum": layout.index_num,
    }


def _coverage(data: Data) -> Row:
    look, log = data.index.look(), data.index.log
    return {
        "coverage": coverage_row(look.coverage),
        "durableOffset": look.frontier.phy_offset,
        "segmentSize": log.segment_size,
        "segments": [{"begin": part.base, "end": part.end} for part in log.segments[-_SEGMENTS_MAX:]],
        "segmentsLeftOut": max(len(log.segments) - _SEGMENTS_MAX, 0),
    }


def add_figures(api: Api, status: DaemonStatus, stop: asyncio.Event) -> None:
    """Metrics, status, events, the last two live, and health; streams end when ``stop`` is set."""
    streams: set[object] = set()

    @api.get("/metrics", "Metrics for Prometheus", media="text/plain")
    async def metrics(request: Request, _: NoParameters) -> Response:
        """What Accept asks for: Prometheus's text format, or OpenMetrics."""
        body, kind = render(status, request.headers.get("accept"))
        return Response(body, headers={"content-type": kind})

    @api.get("/api/v1/status", "All figures")
    async def figures(*_: object) -> Response:
        """Where the daemon stands: what ``indexd status --json`` shows."""
        return json_response(to_json(status.row()))

    @api.get("/api/v1/events", "What happened lately", query=EventsParameters)
    async def events(_: Request, asked: EventsParameters) -> Response:
        """Events are numbered from 1 in each life of the daemon (``bootId``); the last thousand are kept."""
        rows = [asdict(event) for event in status.events.since(asked.since)]
        return json_response(to_json({"bootId": status.boot_id, "last": status.events.last, "events": rows}))

    @api.get("/api/v1/live", "Figures and events as they come", media=_EVENT_STREAM)
    async def live(request: Request, _: NoParameters) -> Response:
        """Server-sent events: ``status`` each second, ``event`` for each event, the objects of ``/api/v1/status`` and
        ``/api/v1/events``. It ends when the daemon stops.
        """
        if request.method == "HEAD":
            return StreamingResponse(iter(()), media_type=_EVENT_STREAM)
        if len(streams) >= LIVE_MAX:  # and from here on nobody else is asked until this one is counted
            raise ProblemError(503, "busy", f"{LIVE_MAX} streams are open", retry=10, closes=True)
        return _Live(_stream(status, stop), streams)

    @api.get("/livez", "Is it alive?")
    async def livez(*_: object) -> Response:
        """200 unless a stage of the indexing (read, build, flush) stands still, which a restart may help.

        A full disk or an unreadable log is no reason: it is waited for, and a restart helps nothing.
        """
        row = status.row()
        if row["stalled"] and row["phase"] == "running":
            words = ", ".join(f"{stage} for {seconds:.0f} s" for stage, seconds in row["stalled"].items())
            members = {"phase": row["phase"], "stalled": row["stalled"]}
            raise ProblemError(503, "stalled", f"the indexing does not move: {words}", members, retry=_RETRY)
        return json_response(to_json({"status": "ok", "phase": row["phase"]}))

    @api.get("/readyz", "Is the index near enough to the end of the log?", query=Thresholds)
    async def readyz(_: Request, asked: Thresholds) -> Response:
        """200 while it runs, within the thresholds, and can read on; else 503 with the numbers and why.

        Where the log goes on behind bytes that are no frame, no threshold is waited for.
        """
        row = status.row()
        facts = text64({name: row.get(name) for name in ("phase", *_LAG, "caughtUp")})
        if reasons := _not_ready(row, asked):
            raise ProblemError(503, "not-ready", "; ".join(reasons), facts, retry=_RETRY)
        return json_response(to_json({"status": "ok", **facts}))


class _Live(StreamingResponse):
    """A stream that is counted from the moment it is granted to its end."""

    def __init__(self, content: AsyncIterator[bytes], streams: set[object]) -> None:
        super().__init__(content, media_type=_EVENT_STREAM)
        self._streams = streams
        streams.add(self)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._streams.discard(self)


async def _stream(status: DaemonStatus, stop: asyncio.Event) -> AsyncIterator[bytes]:
    last = status.events.last
    while not stop.is_set():
        for event in status.events.since(last):
            last = event.number
            yield b"event: event\nid: %d\ndata: %s\n\n" % (event.number, to_json(asdict(event)))
        yield b"event: status\ndata: %s\n\n" % to_json(status.row())
        await pause(stop, 1.0)


def _not_ready(row: Row, asked: Thresholds) -> list[str]:
    if row["phase"] != "running":
        return [f"it is {row['phase']}"]
    reasons = []
    for name, most, unit in ((_LAG[0], asked.lag_bytes, "bytes"), (_LAG[1], asked.lag_ms, "ms")):
        found = row.get(name)
        if most is not None and (found is None or found > most):
            reasons.append(f"it is {'an unknown number of' if found is None else found} {unit} behind")
    corrupt = row.get("corrupt")
    if corrupt and (reasons or row.get(_LAG[0])):
        reasons.insert(0, f"it stands at bytes that are no frame, at {corrupt['offset']}: {corrupt['reason']}")
    return reasons
