"""Bounds on what clients of the remoting server may take, the memory that they share, and counts of what they did."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from indexd.serve.remoting.command import RequestCode, ResponseCode

_LOG_SECONDS = 60.0
_NAMES = {int(code): code.name for code in RequestCode}
_RESULTS: dict[int, str] = {
    ResponseCode.QUERY_NOT_FOUND: "empty",
    ResponseCode.TOPIC_NOT_EXIST: "empty",
    ResponseCode.PULL_NOT_FOUND: "empty",
    ResponseCode.PULL_RETRY_IMMEDIATELY: "empty",
    ResponseCode.PULL_OFFSET_MOVED: "empty",
    ResponseCode.NO_PERMISSION: "refused",
    ResponseCode.SYSTEM_BUSY: "refused",
    ResponseCode.REQUEST_CODE_NOT_SUPPORTED: "refused",
    ResponseCode.SERVICE_NOT_AVAILABLE: "refused",
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What clients may take, in seconds and bytes."""

    #: Between two looks at each connection, and after a failure to accept one.
    look_seconds: float = 1.0
    accept_pause: float = 1.0
    #: Until TLS has begun, and until a client has sent its first frame; later the idle time-out counts.
    handshake_seconds: float = 5.0
    first_seconds: float = 30.0
    #: For a whole frame, and one second more for each so many bytes of it that have come.
    frame_seconds: float = 10.0
    frame_bytes_per_second: int = 1 << 18
    #: Without a byte of an answer being taken.
    untaken_seconds: float = 60.0
    #: Requests that run at once for one connection. A consumer has a long poll under way for each of its queues.
    under_way: int = 256
    under_way_upstream: int = 4096
    #: What they hold; what all connections hold.
    under_way_bytes: int = 32 << 20
    held_bytes: int = 512 << 20


class RateLimitedLog:
    """Logs each event once a minute; their names are few and fixed, so nothing here grows."""

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


class RemotingCounts:
    """One for a server: it begins anew when the outlet does. Bytes are those of the protocol, without TLS."""

    def __init__(self) -> None:
        self.connections = self.connections_total = self.received_bytes = self.sent_bytes = 0
        #: Why a client was not let in; why a connection was closed by us.
        self.refused = {"allow": 0, "full": 0, "tls": 0}
        self.closed = {"bytes": 0, "slow": 0, "idle": 0, "untaken": 0, "memory": 0}
        self.requests: Counter[tuple[str, str]] = Counter()

    def ended(self, request: int, response: int | None, times: int = 1) -> None:
        """So many requests are over; ``response``: the code of their answers, None for one that gets none.

        Counted as ok, empty (nothing is there), refused (no right, busy, not supported, nobody behind us) or error.
        A code without a name here is ``other``: a client could make any number of them.
        """
        result = _RESULTS.get(response, "error") if response else "ok"
        if (request, response) == (RequestCode.VIEW_MESSAGE_BY_ID, ResponseCode.SYSTEM_ERROR):
            result = "empty"  # the broker too has no other code for an offset where no message is
        self.requests[_NAMES.get(request, "other"), result] += times

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


class MemoryBudget:
    """What all connections hold together: requests, unfinished or under way, and answers that were not taken.

    Over budget, the connections that hold most are closed until a quarter of it is free.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.held = 0
        self.connections: set[Any] = set()

    def hold(self, connection: Any, size: int) -> None:
        """It holds so many bytes now; it has ``held``, which is the budget's, ``is_closed`` and ``end``."""
        has_grown = size > connection.held and not connection.is_closed
        self.held += size - connection.held
        connection.held = size
        if size or not connection.is_closed:
            self.connections.add(connection)
        else:
            self.connections.discard(connection)
        if has_grown and self.held > self._most:
            for one in sorted(self.connections, key=lambda one: one.held, reverse=True):
                if 4 * self.held <= 3 * self._most:
                    break
                one.end("memory")
