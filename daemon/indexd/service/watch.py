"""Watch: what somebody else does to the data directory of a running daemon.

Index files that were removed, cut, replaced or written by another are for recovery to mend: DisturbedError. What the
daemon can make again at once, it does: the abort flag, the lock; frontier and checkpoint with the next flush.
"""

from __future__ import annotations

from indexd.errors import DisturbedError
from indexd.flush.abort import write_abort
from indexd.flush.building import Building
from indexd.index.format import FileMark
from indexd.storage.disk import Disk, Stamp
from indexd.storage.lock import DirectoryLock
from indexd.storage.names import DataFiles


class Watch:
    """Looks once a drain, in the building thread, when nothing is being written. Raises DiskError and BusyError."""

    def __init__(self, disk: Disk, files: DataFiles, lock: DirectoryLock, file_size: int) -> None:
        self._disk = disk
        self._files = files
        self._lock = lock
        self._file_size = file_size
        self._inodes: dict[str, int] = {}

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
