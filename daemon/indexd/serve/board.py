"""Board: all that a running daemon shows of itself. Its threads write plain figures; whoever serves them reads."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from indexd import __version__
from indexd.config import Config
from indexd.serve.events import Events
from indexd.serve.histogram import Histogram

Row = dict[str, Any]
#: How a query ended, the label ``result`` of its metric.
RESULTS = ("found", "empty_covered", "empty_uncovered", "error")


class Board:
    """One for a process, made before recovery begins; ``row()`` may be called from any thread at any time."""

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
        #: What is known of the broker, see service.broker_watch.
        self.broker: Mapping[str, Any] = {}
        #: What the outlets say of themselves, by name: {"mqtt": {"connected": True, "dropped": 0}}.
        self.outlets: dict[str, Mapping[str, Any]] = {}
        self._identity = {
            "version": __version__,
            "pid": os.getpid(),
            "bootId": self.boot_id,
            "startedAt": int(self.started * 1000),
            "cluster": config.node.cluster or "DefaultCluster",
            "nodeId": config.node.node_id or socket.gethostname(),
            "mode": config.store.run_mode,
            "flavour": config.index.flavour,
            "store": str(config.store.store or config.store.commit_log_directories[0].parent),
            "data": str(config.store.data),
            "hashSlotNum": config.index.hash_slot_num,
            "indexNum": config.index.index_num,
        }
        self._phase = "opening"
        self._progress: Row | None = None
        self._source: Callable[[], Row] | None = None

    def __repr__(self) -> str:
        return f"Board({self._phase}, {self.events})"

    def recovering(self, step: str, done: int, total: int) -> None:
        """How far the recovery is; ``done`` and ``total`` are in the step's own unit."""
        self._phase, self._source = "recovering", None
        self._progress = {"step": step, "done": done, "total": total}

    def running(self, source: Callable[[], Row]) -> None:
        """The daemon tails; ``source`` makes its row whenever one is asked for."""
        self._progress, self._source, self._phase = None, source, "running"

    def leaving(self, phase: str = "stopping") -> None:
        """It stops, or (``opening``) is opened again: no row of its own from now on."""
        self._source, self._phase = None, phase

    def row(self) -> Row:
        """Everything, as one flat object with camelCase keys; ARCHITECTURE.md lists them. Offsets are ints."""
        source = self._source
        return {
            **self._identity,
            "phase": self._phase,
            "http": self.http,
            "broker": dict(self.broker),
            **({} if self._progress is None else {"recovering": self._progress}),
            "lastEvent": self.events.last,
            **{name: dict(outlet) for name, outlet in self.outlets.items()},
            **(source() if source is not None else {}),
        }
