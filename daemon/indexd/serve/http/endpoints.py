"""Endpoints: messages, files, figures and health: what is answered under which path of the API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from indexd import __version__
from indexd.query import QUESTIONS, Data, NotFound
from indexd.query.questions import ByKey, ByMessage, ByQueueOffset, ByTime, ByUniqueKey, Question, make_question
from indexd.query.source import Look, OpenIndexFile, topics_of
from indexd.serve.daemon_status import DaemonStatus, Event
from indexd.serve.http import answers
from indexd.serve.http.answers import OF_LISTS, Bodies, Row, coverage_row, json_response, to_json
from indexd.serve.http.api import Api, NoParameters, OneMessage, Since, Thresholds, TopicsBegin, over_http
from indexd.serve.http.problem import ProblemError
from indexd.serve.metrics import render
from indexd.serve.queries import EMPTY_COVERED, FOUND, Queries

_WHERE = {
    "name": "where",
    "description": "Its physical offset, or its offset message id of 32 or 56 hex digits",
    "schema": {"type": "string", "pattern": "^([0-9]{1,18}|[0-9A-Fa-f]{32}|[0-9A-Fa-f]{56})$"},
    "example": "0",
}
_FILE_NAME = {"name": "name", "description": "The file's name", "schema": {"type": "string"}, "example": "2" * 17}
_ID_LENGTH_MIN = 32
_SEGMENTS_MAX = 1000
_LAG = ("dispatchBehindBytes", "dispatchBehindMilliseconds")
_RETRY = 5
#: Streams at once; each costs a row a second.
LIVE_MAX = 32
_LIVE_SECONDS = 1.0
_LIVE_RETRY = 10
_EVENT_STREAM = "text/event-stream"
#: How an answer is written, if not as its ``to_json`` says; those with ``messages`` show bodies.
_WRITERS: dict[type[Question], Callable[[Data, Any, Bodies], tuple[bytes, str]]] = {
    ByKey: answers.key_answer,
    ByUniqueKey: answers.key_answer,
    ByQueueOffset: answers.queue_answer,
    ByTime: answers.time_answer,
}


def add_messages(api: Api, queries: Queries, body_max: int) -> None:
    """Each question with how its answer is written, and the one message at a place of the log."""
    for model in QUESTIONS:
        if model.path is not None:
            _add_question(api, queries, model, body_max)

    @api.get(
        "/api/v1/messages/{where}", "The message at a physical offset, or with an offset message id", 404,
        query=OneMessage, piece=_WHERE,
    )  # fmt: skip
    async def one_message(request: Request, asked: OneMessage) -> Response:
        """Every field, the properties, and the body as text where it is such."""
        where: str = request.path_params["where"]
        asked_for = make_question(ByMessage, {"id" if len(where) >= _ID_LENGTH_MIN else "offset": where})

        def find(data: Data) -> tuple[bytes | str, str]:
            found = data.message(asked_for.id or asked_for.offset or 0)
            if isinstance(found, NotFound):
                return found.reason, EMPTY_COVERED  # it was the log itself that was asked
            return answers.message_answer(found, Bodies(asked.body, body_max)), FOUND

        body, result = await queries.query(find, lambda found: found[1])
        if isinstance(body, str):
            raise ProblemError(404, "no-message", body, {"result": result})
        return json_response(body)


def _add_question(api: Api, queries: Queries, model: type[Question], body_max: int) -> None:
    write = _WRITERS.get(model, answers.plain_answer)

    async def handler(_: Request, asked: Any) -> Response:
        bodies = Bodies(getattr(asked, "body", "none"), body_max)

        def find(data: Data) -> tuple[bytes, str]:
            # Made into bytes where it was found: the event loop has others to serve.
            return write(data, asked.answer(data.index), bodies)

        return json_response((await queries.query(find, lambda found: found[1]))[0])

    handler.__name__ = str(model.path).replace("-", "_")
    asked = over_http(model, has_bodies=write in (answers.key_answer, answers.queue_answer))
    api.get(f"/api/v1/messages/{model.path}", str(model.__doc__), 409, query=asked)(handler)


def add_files(api: Api, board: DaemonStatus, queries: Queries) -> None:
    """What lies in the data directory: index files with their headers, coverage, recovery, frontier."""

    @api.get("/api/v1/index-files", "All index files with their headers")
    async def index_files(*_: object) -> Response:
        """As they stand now, the newest still growing."""
        return json_response(to_json(await queries.ask(_index_files), OF_LISTS))

    @api.get("/api/v1/index-files/{name}", "One index file", 404, piece=_FILE_NAME)
    async def index_file(request: Request, _: NoParameters) -> Response:
        """The numbers of its header, and how full it is."""
        name = request.path_params["name"]
        for row in (await queries.ask(_index_files))["indexFiles"]:
            if row["name"] == name:
                return json_response(to_json(row, OF_LISTS))
        raise ProblemError(404, "no-file", f"there is no index file {name[:80]!r}")

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

    @api.get("/api/v1/recovery", "The recovery that is under way, and the last one")
    async def recovery(*_: object) -> Response:
        """Answered while it goes on, too; ``recovering`` is null when none is under way."""
        row = board.row()
        found = {name: row.get(name) for name in ("phase", "recovering", "recoveries", "lastRecovery")}
        found |= {f"remaining{unit}": row.get(f"recoveryRemaining{unit}") for unit in ("Bytes", "Files")}
        return json_response(to_json(found))

    @api.get("/api/v1/frontier", "What is durable")
    async def frontier(*_: object) -> Response:
        """What a crash now would leave: DATA/frontier, with its long lists counted."""
        return json_response(to_json(await queries.ask(_frontier)))


def _index_files(data: Data) -> Row:
    look = data.index.look()
    rows = [_file_row(found, look) for found in data.index.newest_first(look)]
    return {"indexFiles": rows[::-1], "coverage": coverage_row(look.coverage)}


def _file_row(found: OpenIndexFile, look: Look) -> Row:
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


def _frontier(data: Data) -> Row:
    row = data.index.look().frontier.to_json(__version__)
    row["uncovered"] = [{"begin": begin, "end": end, "reason": reason} for begin, end, reason in row["uncovered"]]
    row["evidence"] = {"count": len(row["evidence"])}
    for name in ("consumeQueue", "sparse"):
        if row[name] is not None:
            row[name] = {
                key: {"count": len(value)} if isinstance(value, list) else value for key, value in row[name].items()
            }
    return row


def add_figures(api: Api, board: DaemonStatus, stop: asyncio.Event) -> None:
    """Metrics, status, events, and the last two live; streams end when ``stop`` is set."""
    streams: set[object] = set()

    @api.get("/metrics", "Metrics for Prometheus", media="text/plain")
    async def metrics(request: Request, _: NoParameters) -> Response:
        """What Accept asks for: Prometheus's text format, or OpenMetrics."""
        body, kind = render(board, request.headers.get("accept"))
        return Response(body, headers={"content-type": kind})

    @api.get("/api/v1/status", "All figures")
    async def status(*_: object) -> Response:
        """Where the daemon stands: what ``indexd status --json`` shows."""
        return json_response(to_json(board.row()))

    @api.get("/api/v1/events", "What happened lately", query=Since)
    async def events(_: Request, asked: Since) -> Response:
        """Events are numbered from 1 in each life of the daemon (``bootId``); the last thousand are kept."""
        rows = [event_row(event) for event in board.events.since(asked.since)]
        return json_response(to_json({"bootId": board.boot_id, "last": board.events.last, "events": rows}))

    @api.get("/api/v1/live", "Figures and events as they come", media=_EVENT_STREAM)
    async def live(request: Request, _: NoParameters) -> Response:
        """Server-sent events: ``status`` each second, ``event`` for each event, the objects of ``/api/v1/status`` and
        ``/api/v1/events``. It ends when the daemon stops.
        """
        if request.method == "HEAD":
            head = Response(media_type=_EVENT_STREAM)
            del head.headers["content-length"]  # a stream has none
            return head
        if len(streams) >= LIVE_MAX:  # and from here on nobody else is asked until this one is counted
            raise ProblemError(503, "busy", f"{LIVE_MAX} streams are open", retry=_LIVE_RETRY, closes=True)
        return _Live(_stream(board, stop), streams)


def event_row(event: Event) -> Row:
    """An event of the log."""
    return {"number": event.number, "at": event.at, "kind": event.kind, "name": event.name, "fields": {**event.fields}}


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


async def _stream(board: DaemonStatus, stop: asyncio.Event) -> AsyncIterator[bytes]:
    last = board.events.last
    while not stop.is_set():
        for event in board.events.since(last):
            last = event.number
            yield b"event: event\nid: %d\ndata: %s\n\n" % (event.number, to_json(event_row(event)))
        yield b"event: status\ndata: %s\n\n" % to_json(board.row())
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _LIVE_SECONDS)


def add_health(api: Api, board: DaemonStatus) -> None:
    """Is it alive, and is it near enough to the end of the log?"""

    @api.get("/livez", "Is it alive?")
    async def livez(*_: object) -> Response:
        """200 unless a stage of the indexing (read, build, flush) stands still, which a restart may help.

        A full disk or an unreadable log is no reason: it is waited for, and a restart helps nothing.
        """
        row = board.row()
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
        row = board.row()
        facts = answers.text64({name: row.get(name) for name in ("phase", *_LAG, "caughtUp")})
        if reasons := _not_ready(row, asked):
            raise ProblemError(503, "not-ready", "; ".join(reasons), facts, retry=_RETRY)
        return json_response(to_json({"status": "ok", **facts}))


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
