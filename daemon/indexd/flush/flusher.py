"""Flusher: the one place where written becomes durable and is then written down (ARCHITECTURE.md, decision 5)."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from indexd import __version__
from indexd.commitlog.evidence import Evidence
from indexd.flush.checkpoint import StoreCheckpoint
from indexd.flush.frontier import Frontier, Uncovered, write_frontier
from indexd.index.service import IndexMark
from indexd.storage.disk import Disk, Stamp
from indexd.storage.names import DataFiles


@dataclass(frozen=True, slots=True)
class Progress:
    """How far building has come at one moment: the outputs' marks and the physical offset that they cover."""

    index: IndexMark
    begin_offset: int
    phy_offset: int
    store_timestamp: int
    messages: int
    uncovered: tuple[Uncovered, ...] = ()
    evidence: tuple[Evidence, ...] = ()


@dataclass(slots=True)
class FlushCounters:
    """Plain numbers that only grow; times in seconds."""

    flushes: int = 0
    files_synced: int = 0
    seconds: float = 0.0
    last_seconds: float = 0.0


class Flusher:
    """Owns checkpoint and frontier. A DiskError of ``persist`` must end the process: nothing is known after it."""

    def __init__(self, disk: Disk, files: DataFiles, frontier: Frontier) -> None:
        self._disk = disk
        self._files = files
        self.frontier = frontier
        self.counters = FlushCounters()
        #: Name -> stamp of what was written down last; empty while that is being replaced.
        self.written: dict[str, Stamp] = {}

    def __repr__(self) -> str:
        return f"Flusher(durable={self.frontier.phy_offset}, files={len(self.frontier.index)}, {self.counters})"

    def persist(self, progress: Progress) -> None:
        """Sync the files of ``progress``, then replace the checkpoint, then the frontier."""
        started = time.monotonic()
        for file in progress.index.unsynced:
            file.file.fsync()
        self.written = {}
        full = [mark for mark in progress.index.files if mark.full]
        StoreCheckpoint(
            physic_msg_timestamp=progress.store_timestamp,
            index_msg_timestamp=full[-1].header.end_timestamp if full else 0,
            confirm_phy_offset=progress.phy_offset,
        ).write(self._disk, self._files.checkpoint)
        frontier = replace(
            self.frontier,
            begin_offset=progress.begin_offset,
            phy_offset=progress.phy_offset,
            store_timestamp=progress.store_timestamp,
            messages=progress.messages,
            uncovered=progress.uncovered,
            index=progress.index.files,
            evidence=progress.evidence,
        )
        write_frontier(self._disk, self._files.frontier, frontier, __version__)
        self.frontier = frontier
        stamps = self._disk.stamps(self._files.data)
        names = (self._files.checkpoint.name, self._files.frontier.name)
        self.written = {name: stamps[name] for name in names if name in stamps}
        self.counters.flushes += 1
        self.counters.files_synced += len(progress.index.unsynced)
        self.counters.last_seconds = time.monotonic() - started
        self.counters.seconds += self.counters.last_seconds
