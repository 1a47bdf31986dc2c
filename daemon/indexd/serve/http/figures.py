"""Schemas: the answers as OpenAPI describes them. Nothing passes through these models: they are the documentation.

Annotations here are read when the module runs: no postponed annotations in this file.

Figures: status, events, both live, and metrics.

Annotations here are read when the module runs: no postponed annotations in this file.

Files: what lies in the data directory: index files with their headers, coverage, recovery, frontier.

Annotations here are read when the module runs: no postponed annotations in this file.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from indexd import __version__
from indexd.query import Data
from indexd.query.source import Look, OpenIndexFile, topics_of
from indexd.serve.board import Board, Event
from indexd.serve.http.app import ProblemError, StrictRoute, documented, documented_text
from indexd.serve.http.guard import HEAD_ONLY
from indexd.serve.http.messages import Queries, coverage_row, json_response, text64, to_json
from indexd.serve.http.parameters import IndexFileName, Since, TopicsBegin
from indexd.serve.metrics import render

Text64 = Annotated[
    str, Field(pattern=r"^-?[0-9]{1,20}$", description="A whole number of 64 bits, as text", examples=["1700000000000"])
]
Result = Annotated[
    Literal["found", "empty_covered", "empty_uncovered"],
    Field(
        description="empty_covered: there is none, and the index speaks for the whole log; empty_uncovered: none was"
        " found, and ``why`` says what of the log the answer does not speak for"
    ),
]
Why = Annotated[
    str | None, Field(description="Why the answer is empty: absent, not yet indexed, expired, ...", examples=["absent"])
]


class Camel(BaseModel):
    """Its fields have RocketMQ's names, snake_cased here as everywhere and camelCased in the JSON."""

    model_config = ConfigDict(alias_generator=to_camel)


class Open(Camel):
    """With further members."""

    model_config = ConfigDict(extra="allow")


class Problem(Open):
    """Every answer that is none (RFC 9457)."""

    type: str = Field(examples=["urn:rocketmq-indexd:problem:parameters"])
    title: str
    status: int
    detail: str = Field(description="What is the matter, in words")
    instance: str = Field(description="The path that was asked for")
    hint: str | None = Field(None, description="What an operator does next")
    problems: list[str] = Field([], description="What is wrong with the parameters, one by one")


class Gap(Camel):
    """Log bytes ``[begin, end)`` whose messages are not in the index."""

    begin: Text64
    end: Text64
    reason: str


class CoverageRow(Camel):
    """Which part of the log an answer speaks for."""

    begin: Text64
    end: Text64
    log_begin: Text64 | None
    complete: bool = Field(
        description="Nothing that the log still holds is missing from ``[begin, end)``, nothing stands before or behind"
        " it that may be a message, and the answer was not cut off"
    )
    why: str | None = Field(description="Why it is not complete")
    uncovered: list[Gap]
    daemon_pid: int | None


class BodyRow(Camel):
    """A message's body, where it was asked for."""

    body: Any = Field(None, description="Text, or a JSON value where ``bodyEncoding`` says so")
    body_encoding: Literal["utf-8", "json", "hex", "base64"] | None = None
    body_size: int | None = Field(None, description="Bytes of the whole body; null where it was not unpacked whole")
    body_truncated: bool = False
    body_unpacked: bool = Field(False, description="It is stored compressed and shown unpacked")
    compression: str | None = None


class HitRow(Camel):
    """One message without its body; null where it could not be read."""

    phy_offset: Text64
    topic: str | None
    queue_id: int | None
    queue_offset: Text64 | None
    store_timestamp: Text64 | None
    born_timestamp: Text64 | None
    tags: str | None
    keys: str | None = Field(description="The property KEYS, as the producer wrote it")
    uniq_key: str | None
    size: int | None
    sys_flag: int | None
    born_host: str | None = Field(examples=["127.0.0.1:50936"])
    store_host: str | None


class QueueHitRow(HitRow):
    """The same by its place in a queue; with a ``problem``, only what the queue knows of the message."""

    problem: str | None = Field(None, description="What does not fit between queue and log")


class MessageHitRow(HitRow, BodyRow):
    """The same with its body, where it was asked for."""


class KeyAnswer(Camel):
    """Messages, the newest first."""

    topic: str
    key: str
    index_type: str | None
    result: Result
    why: Why
    messages: list[MessageHitRow] = Field(description="The ``hits``, with bodies where they were asked for")
    hits: list[HitRow]
    truncated: bool
    truncated_by: str | None
    cursor: Text64 | None = Field(description="``before`` of the query that goes on where this answer was cut off")
    expired: int = Field(description="Entries of this hash whose messages have gone with the oldest log")
    unreadable: int = Field(description="Entries of this hash that point to what is no message")
    coverage: CoverageRow


class QueueMessageRow(MessageHitRow):
    """One message of a queue; ``problem`` says what does not fit between queue and log."""

    tags_code: Text64
    problem: str | None


class QueueAnswer(Camel):
    """Messages in the order of the queue, which holds ``[minOffset, maxOffset)``."""

    topic: str
    queue_id: int
    queue_offset: Text64
    status: str = Field(description="RocketMQ's GetMessageStatus", examples=["FOUND"])
    result: Result
    why: Why
    messages: list[QueueMessageRow]
    hits: list[QueueHitRow]
    min_offset: Text64
    max_offset: Text64
    next_offset: Text64
    truncated: bool
    expired: int
    coverage: CoverageRow


class TimeAnswer(Camel):
    """Where a time is. Of a queue: the queue offset as the broker's search finds it; else the first message."""

    timestamp: Text64
    result: Result
    why: Why
    phy_offset: Text64 | None
    store_timestamp: Text64 | None
    topic: str | None = None
    queue_id: int | None = None
    boundary: str | None = None
    queue_offset: Text64 | None = None
    min_offset: Text64 | None = None
    max_offset: Text64 | None = None
    segment: Text64 | None = None
    scanned: Text64 | None = None
    unreadable: Text64 | None = None
    hits: list[QueueHitRow] = Field(description="The message that stands there, or none")
    coverage: CoverageRow


class MessageRow(BodyRow):
    """One message, whole, under RocketMQ's names."""

    phy_offset: Text64
    size: int
    offset_msg_id: str
    topic: str
    queue_id: int
    queue_offset: Text64
    store_timestamp: Text64
    born_timestamp: Text64
    store_host: str
    born_host: str
    keys: list[str]
    uniq_key: str | None
    tags: str | None
    tags_code: Text64
    flag: int
    sys_flag: int
    reconsume_times: int
    prepared_transaction_offset: Text64
    magic: int
    body_crc: int
    properties: dict[str, str]


class IndexFileRow(Camel):
    """An index file and its header."""

    name: str
    size: Text64
    full: bool
    durable: bool = Field(description="The frontier names it: it was there at the last checkpoint")
    entries: int
    fill_ratio: float
    begin_timestamp: Text64
    end_timestamp: Text64
    begin_phy_offset: Text64
    end_phy_offset: Text64
    used_slot_count: int
    index_count: int
    hash_slot_num: int
    index_num: int


class Topics(Camel):
    """Topics in the order of their names."""

    topics: list[str]
    total: int = Field(description="How many begin so")


class IndexFiles(Camel):
    """All index files, the oldest first."""

    index_files: list[IndexFileRow]
    coverage: CoverageRow


class SegmentRow(Camel):
    """One file of the log that is there."""

    begin: Text64
    end: Text64


class CoverageAnswer(Camel):
    """The log as the index sees it: what is there, indexed, durable, left out, and no more."""

    coverage: CoverageRow
    durable_offset: Text64
    segment_size: Text64
    segments: list[SegmentRow] = Field(description="The newest thousand")
    segments_left_out: int


class Recovery(Open):
    """The recovery that is under way, and the last one."""

    phase: str
    recovering: dict[str, Any] | None
    remaining_bytes: Text64 | None
    last_recovery: dict[str, Any] | None


class FrontierRow(Open):
    """What is durable: the index is trusted so far after a crash."""

    phy_offset: Text64
    begin_offset: Text64
    store_timestamp: Text64
    messages: Text64
    flavour: str
    uncovered: list[Gap]


class StatusRow(Open):
    """All figures of the daemon. Whole numbers are texts, but for those of 32 bits (pid, hashSlotNum, ...)."""

    version: str
    pid: int
    boot_id: str
    phase: str = Field(examples=["running"])


class EventRow(Camel):
    """One event of the log; its other fields are in ``fields``."""

    number: int
    at: Text64
    kind: str
    name: str
    fields: dict[str, Any]


class EventsAnswer(Camel):
    """Events behind a number, the oldest first; numbers that are left out have been dropped."""

    boot_id: str
    last: int
    events: list[EventRow]


class Health(Open):
    """It is well."""

    status: Literal["ok"]
    phase: str


#: Streams at once; each costs a row a second.
LIVE_MAX = 32
_LIVE_SECONDS = 1.0
_RETRY = 10
_EVENT_STREAM = "text/event-stream"


def figure_router(board: Board, stop: asyncio.Event) -> APIRouter:
    """The routes; streams end when ``stop`` is set."""
    router = APIRouter(route_class=StrictRoute, tags=["figures"])
    streams: set[object] = set()

    @router.get("/metrics", summary="Metrics for Prometheus", **documented_text("text/plain", "Text, or OpenMetrics"))
    async def metrics(request: Request) -> Response:
        """What Accept asks for: Prometheus's text format, or OpenMetrics."""
        body, kind = render(board, request.headers.get("accept"))
        return Response(body, headers={"content-type": kind})

    @router.get("/api/v1/status", summary="All figures", **documented(StatusRow, "One flat object"))
    async def status() -> Response:
        """Where the daemon stands: what ``indexd status --json`` shows."""
        return json_response(text64(board.row()))

    @router.get("/api/v1/events", summary="What happened lately", **documented(EventsAnswer, "The oldest first"))
    async def events(asked: Annotated[Since, Query()]) -> Response:
        """Events are numbered from 1 in each life of the daemon (``bootId``); the last thousand are kept."""
        found = board.events.since(asked.since)
        rows = [event_row(event) for event in found]
        return json_response({"bootId": board.boot_id, "last": board.events.last, "events": rows})

    @router.get(
        "/api/v1/live",
        summary="Figures and events as they come",
        **documented_text(_EVENT_STREAM, "Server-sent events: ``status`` each second, ``event`` for each event"),
    )
    async def live(request: Request) -> Response:
        """The objects of ``/api/v1/status`` and ``/api/v1/events``. It ends when the daemon stops."""
        if request.scope.get("state", {}).get(HEAD_ONLY):
            head = Response(media_type=_EVENT_STREAM)
            del head.headers["content-length"]  # a stream has none
            return head
        if len(streams) >= LIVE_MAX:  # and from here on nobody else is asked until this one is counted
            raise ProblemError(503, "busy", f"{LIVE_MAX} streams are open", retry=_RETRY, closes=True)
        return _Live(_stream(board, stop), streams)

    return router


def event_row(event: Event) -> dict[str, Any]:
    """An event of the log."""
    row: dict[str, Any] = text64(
        {"number": event.number, "at": event.at, "kind": event.kind, "name": event.name, "fields": dict(event.fields)}
    )
    return row


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


async def _stream(board: Board, stop: asyncio.Event) -> AsyncIterator[bytes]:
    last = board.events.last
    while not stop.is_set():
        for event in board.events.since(last):
            last = event.number
            yield b"event: event\nid: %d\ndata: %s\n\n" % (event.number, to_json(event_row(event)))
        yield b"event: status\ndata: %s\n\n" % to_json(text64(board.row()))
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _LIVE_SECONDS)


_SEGMENTS_MAX = 1000


def file_router(board: Board, queries: Queries) -> APIRouter:
    """The routes."""
    router = APIRouter(prefix="/api/v1", route_class=StrictRoute, tags=["files"])

    @router.get(
        "/index-files",
        summary="All index files with their headers",
        **documented(IndexFiles, "The files, the oldest first"),
    )
    async def index_files() -> Response:
        """As they stand now, the newest still growing."""
        return json_response(await queries.ask(_index_files))

    @router.get("/index-files/{name}", summary="One index file", **documented(IndexFileRow, "Its size and header", 404))
    async def index_file(name: IndexFileName) -> Response:
        """The numbers of its header, and how full it is."""
        for row in (await queries.ask(_index_files))["indexFiles"]:
            if row["name"] == name:
                return json_response(row)
        raise ProblemError(404, "no-file", f"there is no index file {name}")

    @router.get(
        "/coverage",
        summary="Which part of the log is indexed",
        **documented(CoverageAnswer, "The log: what is there, indexed, durable, left out"),
    )
    async def coverage() -> Response:
        """Every message of ``[begin, end)`` is in the index, but for those of ``uncovered``."""
        return json_response(await queries.ask(_coverage))

    @router.get("/topics", summary="Topics with a queue", **documented(Topics, "Their names, in order", 404))
    async def topics(asked: Annotated[TopicsBegin, Query()]) -> Response:
        """For a field that completes what is typed; ``total`` counts those that ``max`` leaves out, too."""
        return json_response(_topics(await queries.ask(lambda data: topics_of(data.index)), asked))

    @router.get(
        "/recovery",
        summary="The recovery that is under way, and the last one",
        **documented(Recovery, "How far it is; ``recovering`` is null when none is under way"),
    )
    async def recovery() -> Response:
        """Answered while it goes on, too."""
        row = board.row()
        found = {
            "phase": row["phase"],
            "recovering": row.get("recovering"),
            "remainingBytes": row.get("recoveryRemainingBytes"),
            "remainingFiles": row.get("recoveryRemainingFiles"),
            "recoveries": row.get("recoveries"),
            "lastRecovery": row.get("lastRecovery"),
        }
        return json_response(text64(found))

    @router.get("/frontier", summary="What is durable", **documented(FrontierRow, "The last checkpoint in full"))
    async def frontier() -> Response:
        """What a crash now would leave: DATA/frontier, with its long lists counted."""
        return json_response(await queries.ask(_frontier))

    return router


def _topics(names: list[str] | None, asked: TopicsBegin) -> dict[str, Any]:
    if names is None:
        raise ProblemError(404, "not-built", "no ConsumeQueues are built (consume_queue = false)")
    found = [name for name in names if name.lower().startswith(asked.begin.lower())]
    return {"topics": found[: asked.max], "total": len(found)}


def _index_files(data: Data) -> dict[str, Any]:
    look = data.index.look()
    rows = [_file_row(found, look) for found in data.index.newest_first(look)]
    return {"indexFiles": rows[::-1], "coverage": coverage_row(look.coverage)}


def _file_row(found: OpenIndexFile, look: Look) -> dict[str, Any]:
    header, layout = found.reader.header(), look.layout
    return {
        "name": found.reader.file.path.name,
        "size": str(layout.file_size),
        "full": header.index_count >= layout.index_num,
        "durable": found.mark is not None,
        "entries": header.entries,
        "fillRatio": round(header.entries / (layout.index_num - 1), 6),
        "beginTimestamp": str(header.begin_timestamp),
        "endTimestamp": str(header.end_timestamp),
        "beginPhyOffset": str(header.begin_phy_offset),
        "endPhyOffset": str(header.end_phy_offset),
        "usedSlotCount": header.used_slot_count,
        "indexCount": header.index_count,
        "hashSlotNum": layout.hash_slot_num,
        "indexNum": layout.index_num,
    }


def _coverage(data: Data) -> dict[str, Any]:
    look = data.index.look()
    log = data.index.log
    return {
        "coverage": coverage_row(look.coverage),
        "durableOffset": str(look.frontier.phy_offset),
        "segmentSize": str(log.segment_size),
        "segments": [{"begin": str(part.base), "end": str(part.end)} for part in log.segments[-_SEGMENTS_MAX:]],
        "segmentsLeftOut": max(len(log.segments) - _SEGMENTS_MAX, 0),
    }


def _frontier(data: Data) -> dict[str, Any]:
    row = data.index.look().frontier.to_json(__version__)
    queues, sparse = row["consumeQueue"], row["sparse"]
    row["uncovered"] = [{"begin": begin, "end": end, "reason": reason} for begin, end, reason in row["uncovered"]]
    row["evidence"] = {"count": len(row["evidence"])}
    if queues is not None:
        queues["queues"] = {"count": len(queues["queues"])}
    if sparse is not None:
        row["sparse"] = {
            name: {"count": len(value)} if isinstance(value, list) else value for name, value in sparse.items()
        }
    found: dict[str, Any] = text64(row)
    return found
