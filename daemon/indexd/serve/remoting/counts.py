"""RemotingCounts: what the connections did since the start, in plain numbers that the event loop alone changes."""

from __future__ import annotations

from collections import Counter
from typing import Any

from indexd.serve.remoting.codes import RequestCode, ResponseCode

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
