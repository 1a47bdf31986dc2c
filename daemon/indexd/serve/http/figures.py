"""Figures: status, events, both live, and metrics.

Annotations here are read when the module runs: no postponed annotations in this file.

Files: what lies in the data directory: index files with their headers, coverage, recovery, frontier.

Annotations here are read when the module runs: no postponed annotations in this file.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from indexd import __version__
from indexd.query import Data
from indexd.query.source import Look, OpenIndexFile, topics_of
from indexd.serve.board import Board, Event
from indexd.serve.http.guard import HEAD_ONLY
from indexd.serve.http.messages import Queries, coverage_row, json_response, text64, to_json
from indexd.serve.http.parameters import IndexFileName, Since, TopicsBegin
from indexd.serve.http.problem import ProblemError, documented, documented_text
from indexd.serve.http.route import StrictRoute
from indexd.serve.http.schemas import (
    CoverageAnswer,
    EventsAnswer,
    FrontierRow,
    IndexFileRow,
    IndexFiles,
    Recovery,
    StatusRow,
    Topics,
)
from indexd.serve.metrics import render

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
