"""Figures: status, events, both live, and metrics.

Annotations here are read when the module runs: no postponed annotations in this file.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from indexd.serve.board import Board
from indexd.serve.events import Event
from indexd.serve.http.answers import json_response, text64, to_json
from indexd.serve.http.documented import documented, documented_text
from indexd.serve.http.guard import HEAD_ONLY
from indexd.serve.http.parameters import Since
from indexd.serve.http.problem import ProblemError
from indexd.serve.http.route import StrictRoute
from indexd.serve.http.schemas import EventsAnswer, StatusRow
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
