"""serve_http: the application (the API, the page for people, the guard around both) on a socket that listens already.

HTTP itself is uvicorn's. A client has so many seconds for a whole request, and so many to take an answer; each
connection is looked at once a second. Connections beyond the bound are reset.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from email.utils import formatdate
from functools import partial
from typing import Any

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from indexd.config import Config
from indexd.dispatch.reput import pause
from indexd.errors import IndexdError
from indexd.serve.access_files import HttpAccess, read_http_access
from indexd.serve.daemon_status import DaemonStatus
from indexd.serve.http.answers import json_response
from indexd.serve.http.endpoints import Api, add_figures, add_files, add_messages
from indexd.serve.http.guard import Guard, ProblemError, problem_of
from indexd.serve.queries import NotAnsweredError, Queries
from indexd.serve.web.page import ASSETS, SearchForm, answer_to, asset, problem_section, render_page

# Together with what closing the queries takes, less than the outlet is given (serve.server).
_LEAVE_SECONDS = 2.0
_OPEN = "give http_token_file, and http_tls_cert with http_tls_key, or listen on 127.0.0.1"
# Scripts, styles and data from here alone, none of them inside the page; nobody may frame it.
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What clients may take, in seconds and bytes."""

    #: For a whole request, headers and all; for an answer, once it is all written; until TLS has begun.
    request_seconds: float = 10.0
    answer_seconds: float = 60.0
    handshake_seconds: float = 5.0
    #: Address and headers of a request, which its parser keeps.
    head_bytes: int = 33 << 10
    #: Answers that clients do not take: beyond this the largest go.
    untaken_bytes: int = 64 << 20


def create_app(
    config: Config, status: DaemonStatus, queries: Queries, access: HttpAccess, log: Any, stop: asyncio.Event
) -> ASGIApp:
    """The application; streams end when ``stop`` is set. ``queries`` are the caller's to close."""
    api, body_max = Api(), config.http.http_body_max
    add_messages(api, queries, body_max)
    add_files(api, queries)
    add_figures(api, status, stop)
    described = json.dumps(api.schema(with_token=access.token is not None)).encode()

    async def openapi(_: Request) -> Response:
        return json_response(described)

    async def page(request: Request) -> Response:
        # Whoever has no token where one is needed gets the page without figures and answers.
        may_see, code = bool(request.scope["state"]["authorized"]), 200
        form, answer = SearchForm.of(request.query_params), None
        if form.is_anything and may_see:
            try:
                answer, _ = await queries.query(lambda data: answer_to(data, form, body_max), lambda shown: shown[1])
            except (NotAnsweredError, IndexdError) as error:
                problem = problem_of(error)
                hint = "search again in a moment" if problem.status == 503 else "journalctl -u indexd may say more"
                answer = problem_section(IndexdError(problem.detail, str(problem.members.get("hint", hint))))
                code = problem.status
        text = render_page(form, answer, status.row() if may_see else None).encode("utf-8", "replace")
        return Response(text, code, _HEADERS, "text/html")

    async def static(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in ASSETS:
            raise ProblemError(404, "not-found", f"there is no file {name[:80]!r}")
        return Response(asset(name), 200, _HEADERS, ASSETS[name])

    own = [Route("/openapi.json", openapi), Route("/", page), Route("/static/{name}", static)]
    guarded = Guard(Router([*api.routes, *own], redirect_slashes=False, default=_not_found), access, log)
    origins, allowed = config.http.http_cors_origins, ("Authorization", "Last-Event-ID")
    return CORSMiddleware(guarded, origins, ("GET", "HEAD"), allowed) if origins else guarded


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG001 - an ASGI application
    raise ProblemError(404, "not-found", "there is nothing under this path")


class HttpConnection(HttpToolsProtocol):
    """uvicorn's protocol for one client, with bounds: what is no request in time or in size is cut off."""

    def __init__(self, limits: Limits, most: int, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._limits, self._most = limits, most
        # Of a request that is not whole: since when it comes, and its bytes.
        self._asking_since: float | None = self.loop.time()
        self._head_bytes = 0
        self._leaving_since: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # of a socket
        """It is open, with TLS where that is spoken."""
        super().connection_made(transport)
        if len(self.connections) > self._most:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Count what a head takes before it is whole: the parser keeps all of it."""
        if self.cycle is None or self.cycle.response_complete:
            self._asking_since = self._asking_since or self.loop.time()
            self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > self._limits.head_bytes:
            self.transport.close()

    def on_headers_complete(self) -> None:
        """A request is whole: there are no bodies."""
        self._asking_since, self._head_bytes = None, 0
        super().on_headers_complete()

    def look(self, now: float) -> int:
        """Close it if its client takes too long; how many bytes of answers that has not taken."""
        untaken: int = self.transport.get_write_buffer_size()
        self._leaving_since = None if untaken == 0 else self._leaving_since or now
        for since, most in (
            (self._asking_since, self._limits.request_seconds),
            (self._leaving_since, self._limits.answer_seconds),
        ):
            if since is not None and now - since > most:
                self.transport.abort()
        return untaken


async def serve_http(
    config: Config,
    status: DaemonStatus,
    log: Any,
    listening: socket.socket,
    stop: asyncio.Event,
    limits: Limits = Limits(),
) -> None:
    """Serve until ``stop``; what is under way then is finished, or broken off after seconds.

    ``listening`` stays open for another try. UsageError if token or certificate cannot be used.
    """
    access, loop, state = read_http_access(config), asyncio.get_running_loop(), ServerState()
    if access.is_open:
        log.warning(
            "http_open", http=config.http.http, token=access.token is not None, tls=access.tls is not None, hint=_OPEN
        )
    # Nothing of it is a line of our log; without a handler Python would print it as it is.
    logging.getLogger("uvicorn.error").disabled = True
    queries = Queries(config, status, config.http.http_queries_max)
    app = create_app(config, status, queries, access, log, stop)
    settings = uvicorn.Config(
        app, ws="none", log_config=None, access_log=False, proxy_headers=False, timeout_keep_alive=30
    )
    make = partial(HttpConnection, limits, config.http.http_connections_max, settings, state, {})
    handshake = None if access.tls is None else limits.handshake_seconds
    server = await loop.create_server(make, sock=listening.dup(), ssl=access.tls, ssl_handshake_timeout=handshake)
    try:
        while not stop.is_set():
            state.default_headers = [(b"date", formatdate(time.time(), usegmt=True).encode())]
            _look(list(state.connections), loop.time(), limits.untaken_bytes)
            await pause(stop, 1.0)
    finally:
        server.close()
        queries.stop()
        await asyncio.sleep(0)  # until who was just accepted is one of the connections
        for connection in list(state.connections):
            connection.shutdown()
        await asyncio.sleep(0.1)  # until those are closed that were idle
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*state.tasks), _LEAVE_SECONDS)
        # In another thread: a query may be under way, and it is waited for.
        left = await asyncio.to_thread(queries.close)
        if left:
            log.warning("queries_left_behind", queries=left)


def _look(connections: Collection[Any], now: float, untaken_max: int) -> None:
    untaken = {connection: connection.look(now) for connection in connections}
    total = sum(untaken.values())
    for connection in sorted(untaken, key=untaken.__getitem__, reverse=True):
        if total > untaken_max:
            total -= untaken[connection]
            connection.transport.abort()
