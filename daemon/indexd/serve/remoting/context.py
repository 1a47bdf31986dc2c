"""What the connections of one remoting server share: counters, the memory budget, the log, and what answers them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from indexd.serve.remoting.command import RemotingCommand, RequestCode, ResponseCode

#: Why one that came was not let in; why one that was in was closed by us.
REFUSALS = ("allow", "full", "tls")
CLOSURES = ("bytes", "slow", "idle", "untaken", "memory")
#: How a request ended, the label ``result`` of its metric.
RESULTS = ("ok", "empty", "refused", "error")
#: The label of requests whose code has no name here: a client could make any number of them.
OTHER = "other"

_NAMES = {int(code): code.name for code in RequestCode}
_EMPTY = frozenset(
    {
        ResponseCode.QUERY_NOT_FOUND,
        ResponseCode.TOPIC_NOT_EXIST,
        ResponseCode.PULL_NOT_FOUND,
        ResponseCode.PULL_RETRY_IMMEDIATELY,
        ResponseCode.PULL_OFFSET_MOVED,
    }
)
_REFUSED = frozenset(
    {
        ResponseCode.NO_PERMISSION,
        ResponseCode.SYSTEM_BUSY,
        ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
        ResponseCode.SERVICE_NOT_AVAILABLE,
    }
)


class RemotingCounts:
    """One for a server: it begins anew when the outlet does. Bytes are those of the protocol, without TLS."""

    def __init__(self) -> None:
        self.connections = 0
        self.connections_total = 0
        self.refused = dict.fromkeys(REFUSALS, 0)
        self.closed = dict.fromkeys(CLOSURES, 0)
        self.requests: Counter[tuple[str, str]] = Counter()
        self.received_bytes = 0
        self.sent_bytes = 0

    def __repr__(self) -> str:
        return f"RemotingCounts({self.connections} connections, {self.requests.total()} requests)"

    def ended(self, request: int, response: int | None, times: int = 1) -> None:
        """So many requests are over; ``response``: the code of their answers, None for one that gets none."""
        self.requests[_NAMES.get(request, OTHER), result_of(request, response)] += times

    def row(self, address: str) -> dict[str, Any]:
        """What the board shows: {"address": .., "requests": {"QUERY_MESSAGE": {"ok": 7}}, ...}; never changed later."""
        requests: dict[str, dict[str, int]] = {}
        for (code, result), count in sorted(self.requests.items()):
            requests.setdefault(code, {})[result] = count
        return {
            "address": address,
            "connections": self.connections,
            "connectionsTotal": self.connections_total,
            "refused": dict(self.refused),
            "closed": dict(self.closed),
            "requests": requests,
            "receivedBytes": self.received_bytes,
            "sentBytes": self.sent_bytes,
        }


def result_of(request: int, response: int | None) -> str:
    """ok, empty (nothing is there), refused (no right, busy, not supported, nobody behind us) or error."""
    if response is None or response == ResponseCode.SUCCESS:
        return "ok"
    if response in _EMPTY:
        return "empty"
    # The broker too has no other code for an offset where no message is.
    if request == RequestCode.VIEW_MESSAGE_BY_ID and response == ResponseCode.SYSTEM_ERROR:
        return "empty"
    return "refused" if response in _REFUSED else "error"


HELD_MAX = 256 << 20
UNTAKEN_MAX = 256 << 20
# MemoryBudget is made for more than the one that has just asked, or each of the next would look at all again.
_MAKE_RATIO = 0.75
# What a task takes, whatever its request holds; and its fields, as objects, beside their bytes.
_TASK_SIZE = 4096
_FIELD_SIZE = 16
_HEADER_MASK = 0xFFFFFF


class Measured(Protocol):
    """A connection as MemoryBudget sees it, which alone changes both numbers."""

    held: int
    untaken: int

    def weigh(self) -> int:
        """How much of its answers it has not taken, now."""

    def end(self, reason: str) -> None:
        """Close it at once; it calls ``leave`` by itself, later."""


class MemoryBudget:
    """Sizes in bytes: ``held`` are requests, unfinished and under way; ``untaken`` answers, as of each one's last look.

    What a connection leaves behind (requests under way when it closed) is held until it ends.
    """

    def __init__(self, held_max: int = HELD_MAX, untaken_max: int = UNTAKEN_MAX) -> None:
        self._held_max, self._untaken_max = held_max, untaken_max
        self.clients: set[Measured] = set()
        self.held = self.untaken = 0

    def __repr__(self) -> str:
        return f"MemoryBudget({len(self.clients)} connections, {self.held} bytes held, {self.untaken} untaken)"

    @property
    def is_tight(self) -> bool:
        """Whether half of what may be held is."""
        return 2 * self.held > self._held_max

    def enter(self, client: Measured) -> None:
        """It may hold something from now on."""
        self.clients.add(client)

    def leave(self, client: Measured) -> None:
        """Its answers are gone with it; what it holds still is given back by ``hold``."""
        self.clients.discard(client)
        self.untaken -= client.untaken
        client.untaken = 0

    def hold(self, client: Measured, size: int) -> None:
        """So much more, or less."""
        client.held += size
        self.held += size
        if size > 0 and self.held > self._held_max:
            self._make(lambda one: one.held, self.held - int(_MAKE_RATIO * self._held_max))

    def keep(self, client: Measured, untaken: int) -> None:
        """So much it has not taken now."""
        self.untaken += untaken - client.untaken
        client.untaken = untaken
        if self.untaken > self._untaken_max:
            for one in self.clients:
                size = one.weigh()
                self.untaken += size - one.untaken
                one.untaken = size
            if self.untaken > self._untaken_max:
                self._make(lambda one: one.untaken, self.untaken - int(_MAKE_RATIO * self._untaken_max))

    def _make(self, size_of: Callable[[Measured], int], size: int) -> None:
        for client in sorted(self.clients, key=size_of, reverse=True):
            if size <= 0:
                return
            size -= size_of(client)
            client.end("memory")


def weight_of(frame: bytes | bytearray) -> int:
    """What a request holds while it runs: a task, its bytes, and its header's fields as objects beside them."""
    header_size = int.from_bytes(frame[:4], "big") & _HEADER_MASK
    return _TASK_SIZE + len(frame) + _FIELD_SIZE * header_size


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
        """The answers to as many requests at the begin of ``data`` as one compiled call can answer. Never raises."""

    async def process(self, client: Client, command: RemotingCommand) -> RemotingCommand | None:
        """The answer, or None: a one-way request, a client's response. Cancelled when the client goes.

        Requests of one connection begin in their order and may end in any. What it raises closes nothing: the client
        is told SYSTEM_ERROR.
        """

    def row(self) -> Mapping[str, Any] | None:
        """What the board shows of the way upstream; None where there is none."""

    async def close(self) -> None:
        """Let go of everything; after the last connection has ended."""


_LOG_SECONDS = 60.0


class RateLimitedLog:
    """For the events of one outlet: their names are few and fixed, so nothing here grows."""

    def __init__(self, log: Any) -> None:
        self._log = log
        self._said: dict[str, tuple[float, int]] = {}  # event -> (when, left out since)

    def warning(self, event: str, **fields: object) -> None:
        """As structlog's, with ``left_out``: such lines since the one before, where there were any."""
        now = time.monotonic()
        at, left_out = self._said.get(event, (-_LOG_SECONDS, 0))
        if now - at < _LOG_SECONDS:
            self._said[event] = (at, left_out + 1)
            return
        self._said[event] = (now, 0)
        if left_out:
            fields["left_out"] = left_out
        self._log.warning(event, **fields)


@dataclass(frozen=True, slots=True)
class ServerContext:
    """``frame_max``: bytes of a request, its length field not counted; ``idle_seconds`` without any sign of life.

    ``under_way_max``: requests that run at once for one connection, long polls among them.
    """

    processor: Processor
    memory: MemoryBudget
    counts: RemotingCounts
    log: RateLimitedLog
    frame_max: int
    idle_seconds: float
    under_way_max: int
