"""An audit beside a broker that works: a bounded rate of reading, no memory taken from others, the lowest priority.

The log's reader gives back its pages itself (``storage/page_cache.py``); here is what that leaves: the rate of all that
is read, index files, and the priority of this process.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from indexd.audit.ground import BrokerFile
from indexd.config import Config
from indexd.errors import DiskError
from indexd.index.format import IndexLayout
from indexd.storage.disk import Disk, DiskFile, Stamp
from indexd.storage.page_cache import ReadPages

if TYPE_CHECKING:
    from indexd.storage.disk import Buffer

# A burst that is not paid for, and how long one read may take at the allowed rate: a wait is never much longer.
_BURST_SECONDS = 0.1
_PIECE_SECONDS = 0.25
_PIECE_SIZE_MIN = 64 << 10
# A task that can be kept is so much reading, and never so little that index files are read over and over for it.
_TASK_SECONDS = 120
_TASK_SIZE = 16 << 30
_FILES_PER_TASK = 8
_NICE = 19
# ioprio_set of Linux: the system call's number by machine, this process, class idle.
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_WHO_PROCESS, _IOPRIO_IDLE = 1, 3 << 13


class Pace:
    """So many bytes a second at most, over all threads that ask."""

    def __init__(
        self,
        rate: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.rate = rate
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        # When all that was asked for until now would have been read at the allowed rate.
        self._paid_at = clock()

    def __repr__(self) -> str:
        return f"Pace({self.rate} bytes a second)"

    def wait(self, size: int) -> None:
        """Until so many bytes more may be read."""
        with self._lock:
            now = self._clock()
            self._paid_at = max(self._paid_at, now - _BURST_SECONDS) + size / self.rate
            left = self._paid_at - now
        if left > 0:
            self._sleep(left)


class PacedFile(DiskFile):
    """An open file that is read at a pace, in pieces."""

    def __init__(self, file: DiskFile, pace: Pace) -> None:
        super().__init__(file.path, -1)
        self._inner, self._pace = file, pace
        self._piece = max(int(pace.rate * _PIECE_SECONDS), _PIECE_SIZE_MIN)

    def size(self) -> int:
        """Bytes."""
        return self._inner.size()

    def stamp(self) -> Stamp:
        """Size, time of the last write and inode."""
        return self._inner.stamp()

    def pread(self, size: int, position: int) -> bytes:
        """Up to ``size`` bytes; fewer only at the end of the file."""
        self._pace.wait(size)
        return self._inner.pread(size, position)

    def pread_into(self, buffer: Buffer, position: int) -> int:
        """Fill ``buffer``; the number of bytes read, fewer than asked only at the end of the file."""
        done = 0
        with memoryview(buffer) as raw, raw.cast("B") as view:
            while done < len(view):
                piece = view[done : done + self._piece]
                self._pace.wait(len(piece))
                count = self._inner.pread_into(piece, position + done)
                done += count
                if count < len(piece):
                    break
        return done

    def next_data(self, position: int) -> int:
        """The first byte from ``position`` on that may not be zero."""
        return self._inner.next_data(position)

    def fileno(self) -> int:
        """The descriptor."""
        return self._inner.fileno()

    def close(self) -> None:
        """Close once; a second call does nothing."""
        self._inner.close()


class _Beside(Disk):
    # Another disk, read in another way; looks at names and sizes are its own.

    def __init__(self, disk: Disk) -> None:
        self._inner = disk

    def exists(self, path: Path) -> bool:
        """Whether anything has that name."""
        return self._inner.exists(path)

    def stamp(self, path: Path) -> Stamp:
        """The stamp of what has that name."""
        return self._inner.stamp(path)

    def stamps(self, path: Path) -> dict[str, Stamp]:
        """The stamp of each plain file in ``path``, by name."""
        return self._inner.stamps(path)

    def list_dirs(self, path: Path) -> list[str]:
        """The names of the directories in ``path``, in order."""
        return self._inner.list_dirs(path)


class PacedDisk(_Beside):
    """Another disk, whose files are read at a pace; looks at names and sizes cost nothing."""

    def __init__(self, disk: Disk, pace: Pace) -> None:
        super().__init__(disk)
        self.pace = pace

    def open_read(self, path: Path) -> DiskFile:
        """Open for reading only."""
        return PacedFile(self._inner.open_read(path), self.pace)


class ScatteredDisk(_Beside):
    """Another disk, for reads here and there: the kernel brings no more into the page cache than what is asked for.

    It reads ahead by megabytes else, and what is in the cache before a file is read for good is never given back.
    """

    def open_read(self, path: Path) -> DiskFile:
        """Open for reading only."""
        file = self._inner.open_read(path)
        with suppress(OSError, DiskError):  # behind a URI there is no cache
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        return file


def paced(disk: Disk, config: Config) -> Disk:
    """``disk`` at the rate of ``limits.read_rate_max``; itself without one."""
    rate = config.limits.read_rate_max
    return PacedDisk(disk, Pace(rate)) if rate else disk


def piece_size(config: Config) -> int:
    """Bytes of log after which a stretch is cut at a segment, so that a task that is kept takes minutes at most."""
    rate = config.limits.read_rate_max
    return max(rate * _TASK_SECONDS if rate else _TASK_SIZE, _FILES_PER_TASK * _layout_of(config).file_size)


def _layout_of(config: Config) -> IndexLayout:
    return IndexLayout(config.index.hash_slot_num, config.index.index_num)


class IndexPages:
    """The page cache of an index file that is about to be read; what was there before, and what a broker uses, stays.

    The newest files are the broker's: nothing of them is given back. Close it after the last read.
    """

    def __init__(self, disk: Disk, config: Config, folder: Path, file: BrokerFile, newest: str) -> None:
        self._size = _layout_of(config).file_size
        self._file: DiskFile | None = None
        self._pages: ReadPages | None = None
        if config.limits.drop_cache and file.is_full and file.name != newest:
            with suppress(DiskError):
                self._file = disk.open_read(folder / file.name)
                self._pages = ReadPages(self._file, self._size)

    def give_back(self, until: int) -> None:
        """Everything before position ``until`` has been read for the last time."""
        if self._pages is not None:
            self._pages.give_back(until)

    def close(self) -> None:
        """Give back what is left of it."""
        if self._pages is not None:
            self._pages.give_back(self._size, is_last=True)
        if self._file is not None:
            self._file.close()
        self._pages = self._file = None


def lower_priority() -> str:
    """Give this process, and threads that it starts from now on, the lowest priority; in words, which it is."""
    os.nice(_NICE)
    number = _IOPRIO_SET.get(os.uname().machine)
    if number is None or ctypes.CDLL(None).syscall(number, _IOPRIO_WHO_PROCESS, 0, _IOPRIO_IDLE) != 0:
        return "at the lowest priority of the CPU"
    return "at the lowest priority of CPU and disk"
