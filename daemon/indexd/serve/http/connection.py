"""Connection: uvicorn's HTTP/1.1, with bounds on what a client may keep waiting, and problems in place of plain words.

A client has so many seconds for a whole request, and so many to take an answer; each connection is looked at once a
second. Of connections beyond the bound some are told so, and all others are closed at once.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from indexd.serve.http.guard import HEADERS_MAX, TARGET_MAX
from indexd.serve.http.problem import MEDIA_TYPE, ProblemError

if TYPE_CHECKING:
    from uvicorn import Config
    from uvicorn.server import ServerState

#: For a whole request, headers and all; for an answer, once it is all written.
REQUEST_SECONDS, ANSWER_SECONDS = 10.0, 60.0
#: Connections beyond the bound that are still answered: 503.
SURPLUS_MAX = 32
_HEAD_MAX = TARGET_MAX + HEADERS_MAX + 1024
_HEADERS_COUNT_MAX = 100
_RETRY = 5

# What clients do wrong is answered, not logged; what goes wrong here is logged by the guard.
_QUIET = logging.Logger("quiet", logging.CRITICAL + 1)
_QUIET.addHandler(logging.NullHandler())


class Connection(HttpToolsProtocol):
    """One client. ``Config.limit_concurrency`` is the bound on connections."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._connections_max = self.limit_concurrency or 1
        self.limit_concurrency = None  # uvicorn's own way to refuse is no problem+json
        self.logger = _QUIET
        self._problem: ProblemError | None = None
        self._head_bytes = 0
        self._headers_count = 0
        self._is_in_head = True
        # Since when a request is on its way, and since when an answer lies here; None if none.
        self._asking_since: float | None = None
        self._leaving_since: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Too many: the next request is refused, or this one is closed at once."""
        super().connection_made(transport)
        surplus = len(self.connections) - self._connections_max
        if surplus > SURPLUS_MAX:
            transport.abort()
            return
        if surplus > 0:
            self._problem = ProblemError(
                503, "too-many-connections", f"there are {self._connections_max} connections already", retry=_RETRY
            )
        self._asking_since = self.loop.time()

    def data_received(self, data: bytes) -> None:
        """Count what a head takes before it is whole: the parser keeps all of it."""
        if self._asking_since is None:
            self._asking_since = self.loop.time()
        if self._problem is not None:
            self.send_400_response("")
            return
        super().data_received(data)
        if self._is_in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > _HEAD_MAX:
                self._problem = _too_long(self.url)
                self.send_400_response("")

    def on_message_begin(self) -> None:
        """A request's first bytes."""
        super().on_message_begin()
        self._asking_since = self.loop.time()
        self._is_in_head, self._head_bytes, self._headers_count = True, 0, 0

    def on_url(self, url: bytes) -> None:
        """A piece of the address; the parser cannot take one of more than 64 KiB apart."""
        super().on_url(url)
        if len(self.url) > 2 * TARGET_MAX:
            self._problem = _too_long(self.url)
            raise ValueError(self._problem.detail)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header, whole."""
        self._headers_count += 1
        if self._headers_count > _HEADERS_COUNT_MAX:
            self._problem = ProblemError(431, "headers-too-long", f"there are more than {_HEADERS_COUNT_MAX} headers")
            raise ValueError(self._problem.detail)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._is_in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The request is whole."""
        self._asking_since = None
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's words are replaced
        """Refuse what has come, and close."""
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()  # in the middle of an answer to another request
            return
        problem = self._problem or ProblemError(400, "bad-request", "this is no HTTP request")
        self.transport.write(_plain_answer(problem, dict(self.server_state.default_headers)))
        self.transport.close()

    def look(self, now: float) -> None:
        """Close it if its client takes too long."""
        if self.transport.get_write_buffer_size() == 0:
            self._leaving_since = None
        elif self._leaving_since is None:
            self._leaving_since = now
        elif now - self._leaving_since > ANSWER_SECONDS:
            self.transport.abort()
        if self._asking_since is not None and now - self._asking_since > REQUEST_SECONDS:
            self._problem = ProblemError(408, "request-timeout", f"no request within {REQUEST_SECONDS:.0f} s")
            self.send_400_response("")
            self._asking_since = None


def _too_long(url: bytes) -> ProblemError:
    if len(url) > TARGET_MAX:
        return ProblemError(414, "uri-too-long", f"path and query are longer than {TARGET_MAX} bytes")
    return ProblemError(431, "headers-too-long", f"the headers are longer than {HEADERS_MAX} bytes")


def _plain_answer(problem: ProblemError, defaults: dict[bytes, bytes]) -> bytes:
    # The bytes of an answer to what never came to be a request.
    body = problem.body("")
    headers = {name.encode(): value.encode() for name, value in problem.headers().items()}
    headers |= defaults | {
        b"content-type": MEDIA_TYPE.encode(),
        b"content-length": b"%d" % len(body),
        b"connection": b"close",
        b"x-content-type-options": b"nosniff",
        b"cache-control": b"no-store",
    }
    lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers.items())
    return b"HTTP/1.1 %d %s\r\n%s\r\n%s" % (problem.status, problem.title.encode(), lines, body)
