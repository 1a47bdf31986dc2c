"""Client and Processor: what a connection is to those who answer, and what they are to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from indexd.serve.remoting.command import RemotingCommand


class Answered(NamedTuple):
    """Requests of one code whose answers have one code: how many, how many bytes of what came, and the answers."""

    request_code: int
    response_code: int
    requests: int
    size: int
    answers: bytes


class Client(Protocol):
    """One connection, in the event loop's thread. Nothing here raises when it is closed already."""

    @property
    def peer(self) -> str:
        """Who it is: ``127.0.0.1:53122``, IPv6 in brackets, an IPv4-mapped address as IPv4."""

    @property
    def local(self) -> str:
        """Our address as this client has reached it: ``127.0.0.1:10976``."""

    @property
    def is_closed(self) -> bool:
        """Whether nothing that is sent can arrive any more."""

    def send(self, command: RemotingCommand) -> None:
        """A request to the client, or an answer that comes late; dropped when it is closed."""

    def on_close(self, call: Callable[[], None]) -> None:
        """Call it once when the connection ends, however it ends; at once if it has ended."""


class Processor(Protocol):
    """What answers. One for all connections."""

    def process_together(self, data: bytes, frame_max: int) -> Answered | None:
        """The same for as many requests at the begin of ``data`` as can be answered by one call. Never raises."""

    def process_at_once(self, client: Client, command: RemotingCommand) -> RemotingCommand | None:
        """The answer to a request that waits for nothing, and takes a moment; None: ``process`` it. Never raises."""

    async def process(self, client: Client, command: RemotingCommand) -> RemotingCommand | None:
        """The answer, or None: a one-way request, a client's response. Cancelled when the client goes.

        Requests of one connection begin in their order and may end in any. What it raises closes nothing: the client
        is told SYSTEM_ERROR.
        """

    def row(self) -> Mapping[str, Any] | None:
        """What the board shows of the way upstream; None where there is none."""

    async def close(self) -> None:
        """Let go of everything; after the last connection has ended."""
