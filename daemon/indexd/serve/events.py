"""Events: what happened lately, numbered, for whoever shows or publishes it. Bounded; the oldest go."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

_KEPT_MAX = 1000
#: An event of the log -> the kind under which it is published (spec/users-and-peers.md section 4).
KINDS = {
    "rolled": "roll",
    "flushed": "flush",
    "created": "recover",
    "recovered": "recover",
    "opened": "recover",
    "disturbed": "recover",
    "skipped": "hole",
    "corrupt": "corrupt",
    "corrupt_left": "corrupt",
    "degraded": "disk",
    "healed": "disk",
    "broker": "broker",
    "reloaded": "reload",
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
    """The last thousand. Any thread may add; readers ask for what came after the number they have seen."""

    def __init__(self) -> None:
        self._kept: deque[Event] = deque(maxlen=_KEPT_MAX)
        self._lock = threading.Lock()
        self.last = 0

    def __repr__(self) -> str:
        return f"Events({self.last}, {len(self._kept)} kept)"

    def tell(self, name: str, fields: Mapping[str, Any]) -> None:
        """Add one, if its name has a kind."""
        kind = KINDS.get(name)
        if kind is None:
            return
        with self._lock:
            self.last += 1
            self._kept.append(Event(self.last, int(time.time() * 1000), kind, name, dict(fields)))

    def since(self, number: int) -> list[Event]:
        """Those behind ``number`` that are still kept; a gap in the numbers is what was lost."""
        with self._lock:
            return [event for event in self._kept if event.number > number]

    def tap(self, _: object, __: str, row: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """A processor of structlog that copies what passes."""
        fields = {key: value for key, value in row.items() if key not in ("event", "timestamp", "level")}
        self.tell(str(row.get("event")), fields)
        return row
