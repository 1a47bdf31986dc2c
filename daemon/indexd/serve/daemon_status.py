"""DaemonStatus: all that a running daemon shows of itself. Its threads write plain figures; whoever serves them reads.

Events say what happened lately, numbered and bounded: the oldest go. With its boot id a number says which event
it is, across restarts: numbers begin anew with each process. Histogram counts how long things took, as Prometheus does;
any thread may write, any may read.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from indexd import __version__
from indexd.config import Config
from indexd.dispatch.reput import resident_bytes
from indexd.findings import findings_of
from indexd.index.format import IndexLayout
from indexd.serve.status import summary_of

_KEPT_MAX = 1000
# What happens every few seconds must not push out what happens once a night.
_FREQUENT = frozenset({"flush"})
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
            (self._frequent if kind in _FREQUENT else self._kept).append(event)
            self.last = event.number

    def since(self, number: int) -> list[Event]:
        """Those behind ``number`` that are still kept, in order; a gap in the numbers is what is not kept any more."""
        if number >= self.last:
            return []
        with self._lock:
            found = [event for kept in (self._frequent, self._kept) for event in kept if event.number > number]
        return sorted(found, key=attrgetter("number"))

    def tap(self, _: object, __: str, row: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """A processor of structlog that copies what passes, before lines are left out by their level."""
        fields = {key: value for key, value in row.items() if key not in ("event", "timestamp", "level")}
        self.tell(str(row.get("event")), fields)
        return row


# Seconds. Drains take milliseconds, a flush on a busy disk seconds.
BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Histogram:
    """Counts by upper bound, the last of all that is longer; ``total`` is their sum in seconds."""

    def __init__(self, bounds: tuple[float, ...] = BOUNDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        """How many were observed."""
        return sum(list(self.counts))

    def observe(self, seconds: float, times: int = 1) -> None:
        """Count one, or so many that took as long; what is exactly a bound belongs to it."""
        with self._lock:
            self.counts[bisect_left(self.bounds, seconds)] += times
            self.total += seconds * times

    def cumulative(self) -> list[tuple[str, int]]:
        """(upper bound as Prometheus writes it, how many took no longer); the last is ``+Inf``."""
        found, count = [], 0
        for bound, own in zip((*map(str, self.bounds), "+Inf"), list(self.counts), strict=True):
            count += own
            found.append((bound, count))
        return found


Row = dict[str, Any]
#: How a query ended, the label ``result`` of its metric.
RESULTS = ("found", "empty_covered", "empty_uncovered", "error")
# Steps of a recovery that count index files; the others count bytes of log.
_FILE_STEPS = frozenset({"replay"})


@dataclass(frozen=True, slots=True)
class _Standing:
    # Where the process is; replaced whole, so that a reader never sees a phase with another one's figures. ``steps`` of
    # a recovery are rows, each with when it began (monotonic, seconds).
    phase: str
    began: float
    steps: tuple[tuple[Row, float], ...] = ()
    source: Callable[[], Row] | None = None
    problems: Mapping[str, str] = field(default_factory=dict)

    def step_rows(self, now: float) -> list[Row]:
        # Each step ends where the next one begins.
        ends = [*(began for _, began in self.steps), now][1:]
        return [row | {"seconds": round(end - at, 3)} for (row, at), end in zip(self.steps, ends, strict=True)]


class DaemonStatus:
    """One for a process, made before recovery begins; ``row()`` may be called from any thread at any time.

    Mappings that are handed to it are replaced by their writers, never changed.
    """

    def __init__(self, config: Config) -> None:
        self.boot_id = str(uuid.uuid4())
        self.started = time.time()
        self.events = Events()
        self.drain_seconds = Histogram()
        self.flush_seconds = Histogram()
        self.query_seconds = Histogram()
        self.queries = dict.fromkeys(RESULTS, 0)
        #: Where HTTP is served, once it is: ``127.0.0.1:9577``.
        self.http: str | None = None
        #: Where the remoting protocol is spoken, the same way.
        self.remoting: str | None = None
        #: What is known of the broker, see service.broker.
        self.broker: Mapping[str, Any] = {}
        #: By name, what makes the row of an outlet in any thread: of "mqtt", and of "remoting" with its "address".
        self.outlets: dict[str, Callable[[], Row]] = {}
        #: How the run before this one ended; None until it is known.
        self.last_shutdown_clean: bool | None = None
        #: The kernels are being compiled, at the first start of a version.
        self.is_compiling = False
        #: How full the file system of DATA is, and how full it may get.
        self.disk_used_ratio: float | None = None
        self.disk_used_max = config.limits.disk_used_max
        #: What scrubs came to since the start: bytes read, how many found damage (those that found something to mend),
        #: how many in a row ended before they were through; when the last one began and ended, ms.
        self.scrub: Mapping[str, Any] = {"beganAt": None, "endedAt": None, "bytes": 0, "damaged": 0, "brokenOff": 0}
        self._index_file_size = IndexLayout(config.index.hash_slot_num, config.index.index_num).file_size
        self._identity = _identity(config) | {"bootId": self.boot_id, "startedAt": int(self.started * 1000)}
        self._standing = _Standing("opening", time.monotonic())
        self._recoveries = 0
        self._last_recovery: Row | None = None

    @property
    def phase(self) -> str:
        """opening, recovering, running or stopping."""
        return self._standing.phase

    def recovering(self, step: str, done: int, total: int) -> None:
        """How far the recovery is; ``done`` and ``total`` are files of ``replay``, else bytes of the log."""
        now, before = time.monotonic(), self._standing
        steps, began = (before.steps, before.began) if before.phase == "recovering" else ((), now)
        row, at = {"step": step, "unit": "files" if step in _FILE_STEPS else "bytes", "done": done, "total": total}, now
        if steps and steps[-1][0]["step"] == step:
            steps, at = steps[:-1], steps[-1][1]
        self._standing = _Standing("recovering", began, (*steps, (row, at)))

    def waiting(self, stage: str, problem: str) -> None:
        """The opening has to wait, and will begin anew."""
        self._standing = _Standing("opening", time.monotonic(), problems={stage: problem})

    def recovered(self, event: str, facts: Row) -> None:
        """An opening is over and came to ``facts``; ``event``: created, opened or recovered."""
        steps = self._standing.step_rows(time.monotonic())
        self._last_recovery = {"event": event, "endedAt": int(time.time() * 1000), **facts, "steps": steps}
        self._recoveries += 1

    def running(self, source: Callable[[], Row]) -> None:
        """The daemon tails; ``source`` makes its row whenever one is asked for, in any thread."""
        self._standing = _Standing("running", time.monotonic(), source=source)

    def stopping(self) -> None:
        """A signal said stop; what is shown goes on to be true until the end."""
        self._standing = _Standing("stopping", time.monotonic(), source=self._standing.source)

    def leaving(self, phase: str = "stopping") -> None:
        """It has stopped, or (``opening``) is opened again: no row of its own from now on."""
        self._standing = _Standing(phase, time.monotonic())

    def row(self) -> Row:
        """Everything, as one flat object with camelCase keys; ARCHITECTURE.md lists them. Offsets are ints."""
        standing, broker = self._standing, self.broker
        row = {
            **self._identity,
            "phase": standing.phase,
            "compiling": self.is_compiling,
            "http": self.http,
            "remoting": None if self.remoting is None else {"address": self.remoting},
            "broker": dict(broker),
            "lastEvent": self.events.last,
            "queries": dict(self.queries),
            "memoryBytes": resident_bytes(),
            "diskUsedRatio": self.disk_used_ratio,
            "diskUsedMax": self.disk_used_max,
            "lastShutdownClean": self.last_shutdown_clean,
            "recoveries": self._recoveries,
            "lastRecovery": self._last_recovery,
            "scrub": dict(self.scrub),
            "stalled": {},
            "problems": dict(standing.problems),
            **self._recovery_row(standing),
            **{name: outlet() for name, outlet in tuple(self.outlets.items())},
            **_source_row(standing.source),
        }
        return row | {"summary": summary_of(row), "findings": findings_of(row)}

    def _recovery_row(self, standing: _Standing) -> Row:
        if standing.phase != "recovering":
            # Before the first step nobody knows what there is to do.
            left = None if standing.phase == "opening" else 0
            return {"recoveryRemainingBytes": left, "recoveryRemainingFiles": left}
        now = time.monotonic()
        steps = standing.step_rows(now)
        left = max(steps[-1]["total"] - steps[-1]["done"], 0)
        is_files = steps[-1]["unit"] == "files"
        return {
            "recoveryRemainingBytes": left * self._index_file_size if is_files else left,
            "recoveryRemainingFiles": left if is_files else 0,
            "recovering": {**steps[-1], "seconds": round(now - standing.began, 3), "steps": steps},
        }


def _source_row(source: Callable[[], Row] | None) -> Row:
    if source is None:
        return {}
    try:
        return source()
    except Exception as error:  # noqa: BLE001 - a figure that cannot be made ends neither the index nor the page
        return {"rowProblem": repr(error)}


def _identity(config: Config) -> Row:
    return {
        "version": __version__,
        "pid": os.getpid(),
        "cluster": config.node.cluster or "DefaultCluster",
        "nodeId": config.node.node_id or socket.gethostname(),
        "mode": config.store.run_mode,
        "flavour": config.index.flavour,
        "store": str(config.store.store or next((path.parent for path in config.store.commit_log_directories), "")),
        "data": str(config.store.data),
        "hashSlotNum": config.index.hash_slot_num,
        "indexNum": config.index.index_num,
    }
