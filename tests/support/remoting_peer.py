"""Peer: a stand-in for a name server or a broker, which answers remoting requests as a test tells it.

>>> with Peer({106: lambda request: {"body": b"{}"}}) as broker:
...     broker.address, broker.requests

A handler returns members of Command for the answer (``code`` 0 unless told), or None: no answer. What has no handler
is answered with code 3.
"""

from __future__ import annotations

import itertools
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Self

from support.remoting import Command, encode, read_command

Handler = Callable[[Command], Mapping[str, Any] | None]
_SECONDS = 10.0


def _refuse(_: Command) -> Mapping[str, Any]:
    return {"code": 3, "remark": "no handler"}


class Peer:
    """For a ``with`` block. ``requests``: what came, in order, with the number of the connection it came on."""

    def __init__(
        self, handlers: Mapping[int, Handler] | None = None, *, port: int = 0, tls: ssl.SSLContext | None = None
    ) -> None:
        self.handlers = dict(handlers or {})
        self.requests: list[tuple[int, Command]] = []
        #: What clients answered to ``ask_client``.
        self.responses: list[Command] = []
        self.connections = 0
        self._tls = tls
        self._listener = socket.create_server(("127.0.0.1", port))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: dict[int, socket.socket] = {}
        self._opaque = itertools.count(1_000_000)
        self._changed = threading.Condition()

    @property
    def port(self) -> int:
        """Of its address."""
        return int(self.address.rpartition(":")[2])

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """As a process that ends."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.hang_up()

    def hang_up(self) -> None:
        """Close every connection."""
        for connection in list(self._open.values()):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def open_connections(self) -> list[int]:
        """The numbers of those that are open."""
        return sorted(self._open)

    def codes(self) -> list[int]:
        """The codes of the requests that came."""
        return [command.code for _, command in self.requests]

    def wait(self, condition: Callable[[Peer], object]) -> None:
        """Until ``condition`` holds: it is asked after each event; an assertion ends the wait after ten seconds."""
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self), _SECONDS), self.codes()[-100:]

    def ask_client(self, connection: int, code: int, *, is_oneway: bool = False, **more: Any) -> Command:
        """Send a request to who holds that connection."""
        command = Command(code, next(self._opaque), 2 if is_oneway else 0, **more)
        self._open[connection].sendall(encode(command))
        return command

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections += 1
                threading.Thread(target=self._serve, args=(connection, self.connections), daemon=True).start()

    def _serve(self, connection: socket.socket, number: int) -> None:
        with suppress(OSError, EOFError), connection if self._tls is None else self._wrap(connection) as connection:
            self._note(partial(self._open.__setitem__, number, connection))
            try:
                with connection.makefile("rb") as stream:
                    while True:
                        self._take(connection, number, read_command(stream))
            finally:
                self._note(lambda: self._open.pop(number))

    def _wrap(self, connection: socket.socket) -> socket.socket:
        assert self._tls is not None
        with connection:  # what is wrapped takes its descriptor along
            return self._tls.wrap_socket(connection, server_side=True)

    def _take(self, connection: socket.socket, number: int, command: Command) -> None:
        if command.is_answer:
            self._note(lambda: self.responses.append(command))
            return
        self._note(lambda: self.requests.append((number, command)))
        handler = self.handlers.get(command.code, _refuse)
        members = handler(command)
        if members is not None and not command.is_oneway:
            answer = Command(**{"code": 0, "opaque": command.opaque, "flag": 1, "form": command.form, **members})
            connection.sendall(encode(answer))

    def _note(self, change: Callable[[], object]) -> None:
        with self._changed:
            change()
            self._changed.notify_all()
