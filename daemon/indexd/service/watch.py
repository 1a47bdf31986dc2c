"""Watch: what somebody else does to the data directory of a running daemon.

Index files that were removed, cut, replaced or written by another are for recovery to mend: DisturbedError. So are
files of queues and of sparse indexes that were removed or cut, and their newest ones if they were replaced; there may
be thousands, so a few are looked at each time. What the daemon can make again at once, it does: the abort flag, the
lock; frontier and checkpoint with the next flush.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from indexd.consumequeue.format import UNIT_SIZE, QueueMark, file_name, queue_directory
from indexd.errors import DiskError, DisturbedError
from indexd.flush.abort import write_abort
from indexd.flush.building import Building
from indexd.flush.frontier import Frontier
from indexd.index.format import FileMark
from indexd.sparse.format import OFFSET_ENTRY_SIZE, TIME_ENTRY_SIZE, SegmentMark, index_name, time_index_name
from indexd.storage.disk import Disk, Stamp
from indexd.storage.lock import DirectoryLock
from indexd.storage.names import DataFiles

M = TypeVar("M")

# Queues, and segments, that one look takes.
_LOOKS = 16


class Watch:
    """Looks once a drain, in the building thread, when nothing is being written. Raises DiskError and BusyError."""

    def __init__(self, disk: Disk, files: DataFiles, lock: DirectoryLock, frontier: Frontier) -> None:
        self._disk = disk
        self._files = files
        self._lock = lock
        self._file_size = frontier.layout.file_size
        self._queue_file_size = frontier.queue_file_size
        # What is looked at next, by kind.
        self._turns: dict[str, int] = {}
        self._inodes: dict[str, int] = {}
        # Name and inode of the newest file of each queue, and of each kind of sparse index, at the last look.
        self._newest: dict[str, tuple[str, int]] = {}

    def keep_lock(self) -> list[str]:
        """Take the lock again if its file is gone; BusyError if another instance has it by now. First of all."""
        if self._lock.is_held():
            return []
        self._lock.renew()
        return [self._files.lock.name]

    def check_index(self, building: Building) -> None:
        """Every file that was built must be as it was left after the last drain."""
        stamps = self._disk.stamps(self._files.index) if self._disk.exists(self._files.index) else {}
        marks = building.progress.index.files
        for mark in marks:
            what = self._what_happened(mark, stamps.get(mark.name))
            if what is not None:
                raise DisturbedError(f"index file {self._files.index / mark.name} was {what} by somebody else")
        self._inodes = {mark.name: stamps[mark.name].inode for mark in marks}

    def check_beside(self, building: Building) -> None:
        """The files of some queues and segments, in turn, must be there in their size."""
        progress = building.progress
        if progress.queues is not None:
            for mark in self._next("queues", progress.queues.marks):
                self._check_queue(mark)
        if progress.sparse is not None:
            for segment in self._next("segments", progress.sparse.mark.sealed):
                self._check_pair(segment, is_growing=False)
            if progress.sparse.mark.active is not None:
                self._check_pair(progress.sparse.mark.segments[-1], is_growing=True)

    def restore(self, building: Building) -> list[str]:
        """Put back what is missing; the names. Of ``frontier`` and ``checkpoint`` the caller has to write new ones."""
        gone = []
        if not self._disk.exists(self._files.abort):
            write_abort(self._disk, self._files.abort)
            gone.append(self._files.abort.name)
        written = building.flusher.written
        stamps = self._disk.stamps(self._files.data)
        if building.flusher.written is written:  # else they are being replaced right now
            gone += [name for name, stamp in written.items() if stamps.get(name) != stamp]
        return gone

    def _what_happened(self, mark: FileMark, stamp: Stamp | None) -> str | None:
        if stamp is None:
            return "removed"
        if stamp.size != self._file_size:
            return f"cut to {stamp.size} bytes"
        if self._inodes.get(mark.name, stamp.inode) != stamp.inode:
            return "replaced"
        return "written" if mark.mtime_ns and stamp.mtime_ns != mark.mtime_ns else None

    def _next(self, what: str, marks: tuple[M, ...]) -> tuple[M, ...]:
        begin = self._turns.get(what, 0)
        self._turns[what] = begin + _LOOKS if begin + _LOOKS < len(marks) else 0
        return marks[begin : begin + _LOOKS]

    def _check_queue(self, mark: QueueMark) -> None:
        directory = queue_directory(self._files.consumequeue, mark.topic, mark.queue_id)
        size = self._queue_file_size
        try:
            stamps = self._disk.stamps(directory)
        except DiskError as error:
            if not error.is_missing:
                raise
            stamps = {}
        first, end = mark.first_offset * UNIT_SIZE, mark.max_offset * UNIT_SIZE
        for begin in range(first // size * size, end, size):
            stamp = stamps.get(file_name(begin))
            if stamp is None or stamp.size != size:
                what = "removed" if stamp is None else f"cut to {stamp.size} bytes"
                raise DisturbedError(f"{directory / file_name(begin)} was {what} by somebody else")
            if begin + size >= end:
                self._check_newest(str(directory), directory / file_name(begin), stamp)

    def _check_pair(self, segment: SegmentMark, *, is_growing: bool) -> None:
        for path, size in (
            (self._files.sparse / index_name(segment.base), segment.offset_entries * OFFSET_ENTRY_SIZE),
            (self._files.sparse / time_index_name(segment.base), segment.time_entries * TIME_ENTRY_SIZE),
        ):
            try:
                with self._disk.open_read(path) as file:
                    stamp = file.stamp()
            except DiskError as error:
                if not error.is_missing:
                    raise
                raise DisturbedError(f"{path} was removed by somebody else") from error
            if stamp.size < size or (stamp.size > size and not is_growing):
                raise DisturbedError(f"{path} was cut to {stamp.size} bytes by somebody else")
            if is_growing:
                self._check_newest(path.suffix, path, stamp)

    def _check_newest(self, key: str, path: Path, stamp: Stamp) -> None:
        # A descriptor of it may be open: what is written from now on would be in a file that has no name.
        name, inode = self._newest.get(key, (path.name, stamp.inode))
        if name == path.name and inode != stamp.inode:
            raise DisturbedError(f"{path} was replaced by somebody else")
        self._newest[key] = (path.name, stamp.inode)
