"""Events say what happened lately, numbered and bounded: the oldest go.

With the daemon's boot id a number says which event it is, across restarts: numbers begin anew with each process.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

_KEPT_MAX = 1000
# What happens every few seconds must not push out what happens once a night.
_FREQUENT_MAX = 100
#: An event of the log -> the kind under which it is published (spec/users-and-peers.md section 4).
KINDS = {
    "rolled": "roll",
    "flushed": "flush",
    "created": "recover",
    "recovered": "recover",
    "opened": "recover",
    "disturbed": "recover",
    "frontier_unreadable": "recover",
    "restored": "recover",
    "expired_files": "expire",
    "skipped": "hole",
    "left_out": "hole",
    "corrupt": "corrupt",
    "corrupt_left": "corrupt",
    "degraded": "disk",
    "healed": "disk",
    "state_not_written": "disk",
    "broker": "broker",
    "broker_unsafe": "broker",
    "stalled": "stall",
    "moves_again": "stall",
    "reloaded": "reload",
    "reload_refused": "reload",
    "stopping": "stop",
}


@dataclass(frozen=True, slots=True)
class Event:
    """One event: ``number`` counts from 1 in each life of a daemon, ``at`` is in milliseconds."""

    number: int
    at: int
    kind: str
    name: str
    fields: Mapping[str, Any] = field(default_factory=dict)


class Events:
    """The last thousand, of frequent kinds the last hundred. Any thread may add.

    Readers ask for what came after the number they have seen.
    """

    def __init__(self) -> None:
        self._kept: deque[Event] = deque(maxlen=_KEPT_MAX)
        self._frequent: deque[Event] = deque(maxlen=_FREQUENT_MAX)
        self._lock = threading.Lock()
        #: The number of the newest; 0 without any.
        self.last = 0

    def tell(self, name: str, fields: Mapping[str, Any]) -> None:
        """Add one, if its name has a kind."""
        kind = KINDS.get(name)
        if kind is None:
            return
        with self._lock:
            event = Event(self.last + 1, int(time.time() * 1000), kind, name, dict(fields))
            (self._frequent if kind == "flush" else self._kept).append(event)
            self.last = event.number

    def since(self, number: int) -> list[Event]:
        """Those behind ``number`` that are still kept, in order; a gap in the numbers is what is not kept any more."""
        with self._lock:
            found = [event for kept in (self._frequent, self._kept) for event in kept if event.number > number]
        return sorted(found, key=attrgetter("number"))

    def tap(self, _: object, __: str, row: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """A processor of structlog that copies what passes, before lines are left out by their level."""
        fields = {key: value for key, value in row.items() if key not in ("event", "timestamp", "level")}
        self.tell(str(row.get("event")), fields)
        return row
