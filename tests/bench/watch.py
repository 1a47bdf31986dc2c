"""Watches a daemon from outside while it runs: every state it publishes, its memory, and the lag that follows.

The lag at a moment is the age of the oldest readable message that no published drain holds. Messages are written
without a pause, so the oldest one that is missing was written when the newest one that is there was, or later: the lag
is at most the time since the store timestamp in DATA/state. That bound is what is reported. It rises until the next
state appears, so its peaks stand just before each one.
"""

from __future__ import annotations

import json
import os
import struct
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.indexd import Daemon, Usage
from bench.report import BenchError, percentile

_STATE_SECONDS = 0.02
_USAGE_SECONDS = 0.1
_STORE_TIMESTAMP = struct.Struct(">q")
_STORE_TIMESTAMP_POSITION = 56


@dataclass(frozen=True, slots=True)
class Published:
    """One state: when it appeared, and the newest message it covers; times in seconds of the wall clock."""

    at: float
    phy_offset: int
    store_time: float
    messages: int


@dataclass(frozen=True, slots=True)
class Lag:
    """Seconds; ``tail`` is from the last message's store time to the state that covers it, ``peaks`` one a drain."""

    max: float
    p50: float
    p99: float
    tail: float
    peaks: tuple[float, ...]


class Watch(threading.Thread):
    """Samples until ``stop``; ``error`` is what ended it before."""

    def __init__(self, daemon: Daemon) -> None:
        super().__init__(name="watch", daemon=True)
        self._daemon = daemon
        self._ended = threading.Event()
        self.states: list[Published] = []
        self.usages: list[tuple[float, Usage]] = []
        self.error: Exception | None = None

    def run(self) -> None:
        """The loop of the thread."""
        identity: tuple[int, int] | None = None
        usage_due = 0.0
        try:
            while not self._ended.wait(_STATE_SECONDS):
                identity = self._look(identity)
                if time.monotonic() >= usage_due:
                    usage_due = time.monotonic() + _USAGE_SECONDS
                    self.usages.append((time.time(), self._daemon.usage()))
        except (OSError, ValueError, KeyError) as error:
            self.error = error

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()
        self.join()

    def wait_for_offset(self, phy_offset: int, seconds: float) -> None:
        """Until a published state reaches the offset."""
        deadline = time.monotonic() + seconds
        while not self.states or self.states[-1].phy_offset < phy_offset:
            self._daemon.check_running()
            if self.error is not None:
                raise BenchError(f"indexd could not be watched: {self.error}")
            if time.monotonic() > deadline:
                raise BenchError(f"indexd did not reach offset {phy_offset} within {seconds:.0f} s: {self.states[-1:]}")
            time.sleep(_STATE_SECONDS)

    def _look(self, identity: tuple[int, int] | None) -> tuple[int, int] | None:
        # The file is replaced whole: the time of its last change is when its bytes were written.
        try:
            with (self._daemon.data / "state").open("rb") as file:
                found = os.fstat(file.fileno())
                if (found.st_ino, found.st_mtime_ns) == identity:
                    return identity
                row: dict[str, Any] = json.loads(file.read())
        except FileNotFoundError:
            return identity
        if "phyOffset" not in row:  # how far a recovery is
            return found.st_ino, found.st_mtime_ns
        at = max(found.st_mtime_ns / 1e9, row["writtenAt"] / 1000)
        self.states.append(Published(at, row["phyOffset"], row["storeTimestamp"] / 1000, row["messages"]))
        return found.st_ino, found.st_mtime_ns


def first_store_time(store: Path) -> float:
    """When the first message of the log was stored, in seconds of the wall clock."""
    with (store / "commitlog" / f"{0:020d}").open("rb") as file:
        file.seek(_STORE_TIMESTAMP_POSITION)
        millis: int = _STORE_TIMESTAMP.unpack(file.read(_STORE_TIMESTAMP.size))[0]
    return millis / 1000


def lag_of(states: list[Published], first: float, end_offset: int) -> Lag:
    """From the states of one run over a log from ``first`` to ``end_offset``; percentiles of time, not of drains."""
    covered, offset = first, 0
    moments: list[float] = []
    peaks: list[float] = []
    clock = first
    for state in states:
        if state.phy_offset <= offset:
            continue
        peaks.append(state.at - covered)
        while clock < state.at:
            moments.append(clock - covered)
            clock += _STATE_SECONDS
        covered, offset = state.store_time, state.phy_offset
        if offset >= end_offset:
            tail = state.at - state.store_time
            return Lag(max(peaks), percentile(moments, 50), percentile(moments, 99), tail, tuple(peaks))
    raise BenchError("the states of the daemon do not reach the end of the log")
