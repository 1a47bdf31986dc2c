"""ReadPages: reads much without taking memory from others; pages that only we brought into the cache are given back.

The page cache belongs to the broker and its consumers. Before a sealed file is read, ``mincore`` says which of its
pages are there already; behind the reader those that were not are dropped (``POSIX_FADV_DONTNEED``). The kernel itself
keeps what a process has touched through a mapping, as a broker does, so what a consumer wants meanwhile stays as well.
For 1 GiB the question takes some 15 ms and the dropping 5 ms.

``mincore`` tells the truth only to those who own the file or may write it; to others all pages seem to be there, and
nothing is dropped. The same where a file system cannot map. A thread can take the lowest priority, too: what others
leave of processor and disk.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import threading
from contextlib import suppress

from indexd.errors import DiskError
from indexd.storage.disk import DiskFile, libc

_PAGE = mmap.PAGESIZE
# So much is read before it is given back.
_STEP_SIZE = 16 << 20
# Memory is kept in pieces of several pages, and one that reaches over the end of a step stays until the next.
_OVERLAP_SIZE = 4 << 20
_ABSENT_PAGES = re.compile(rb"\x00+")
_RESIDENT_BIT = bytes(value & 1 for value in range(256))
_MAP_FAILED = ctypes.c_void_p(-1).value

libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class ReadPages:
    """The pages of one sealed file that is read from front to back."""

    def __init__(self, file: DiskFile, size: int) -> None:
        self._file = file
        self._given_back = 0
        #: ``[begin, end)`` in bytes of what was not in the cache before.
        self._absent: list[tuple[int, int]] = []
        with suppress(OSError, DiskError):  # a file behind a URI has no pages
            fd = file.fileno()
            pages = resident_pages(fd, size)
            self._absent = [(run.start() * _PAGE, run.end() * _PAGE) for run in _ABSENT_PAGES.finditer(pages)]
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_NOREUSE)

    def give_back(self, until: int, *, is_last: bool = False) -> int:
        """Everything before position ``until`` was read; how many bytes are given back now.

        In steps of some MiB, or all of it when this is the last call.
        """
        until = -(-until // _PAGE) * _PAGE if is_last else until - until % _PAGE
        if until <= self._given_back or (until - self._given_back < _STEP_SIZE and not is_last):
            return 0
        begin, dropped = max(self._given_back - _OVERLAP_SIZE, 0), 0
        while self._absent and self._absent[0][1] <= begin:
            self._absent.pop(0)
        for run_begin, run_end in self._absent:
            if run_begin >= until:
                break
            first, end = max(run_begin, begin), min(run_end, until)
            with suppress(OSError):
                os.posix_fadvise(self._file.fileno(), first, end - first, os.POSIX_FADV_DONTNEED)
                dropped += max(end - max(first, self._given_back), 0)
        self._given_back = until
        return dropped


def resident_pages(fd: int, size: int) -> bytes:
    """A byte for each page of a file's first ``size`` bytes, 1 where it is in the page cache; raises OSError."""
    address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), "mmap")
    try:
        answer = ctypes.create_string_buffer(-(-size // _PAGE))
        if libc.mincore(address, size, answer) != 0:
            raise OSError(ctypes.get_errno(), "mincore")
    finally:
        libc.munmap(address, size)
    return answer.raw.translate(_RESIDENT_BIT)


def take_lowest_priority() -> None:
    """Of the calling thread, for the processor and, by the kernel's default, for the disk, too.

    Where a sandbox does not allow it, it stays as it is.
    """
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
