"""What the system keeps of files in memory, and what was asked of it.

What nobody maps may go from the page cache at any time, a few pages or many: not for want of memory alone, kernels are
also told to take what has not been looked at for a while (DAMON). So tests go by what the kernel said and was asked,
and what has to stay there is mapped.
"""

from __future__ import annotations

import mmap
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from indexd.storage import page_cache
from indexd.storage.page_cache import resident_pages

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

PAGE = mmap.PAGESIZE


def forget(path: Path) -> None:
    """Out of memory with it."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def resident(path: Path) -> bytes:
    """A byte for each page of a file, 1 where it is in the page cache."""
    with path.open("rb") as file:
        return resident_pages(file.fileno(), path.stat().st_size)


@contextmanager
def in_use(path: Path, begin: int = 0, end: int | None = None) -> Iterator[None]:
    """Somebody else has a stretch of a file in the page cache, mapped; and nothing of what is around it."""
    size = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as mapping:
        mapping.madvise(mmap.MADV_RANDOM)
        stretch = slice(begin, end, PAGE)
        assert len(mapping[stretch]) == -(-((end or size) - begin) // PAGE)
        yield


class Watched:
    """What ReadPages is told by the kernel and asks of it from now on, as bytes of pages like ``resident``'s."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        #: Which pages were there when a file was first looked at.
        self.seen: dict[Path, bytes] = {}
        self._asked: dict[Path, bytearray] = {}
        advise = os.posix_fadvise

        def look(fd: int, size: int) -> bytes:
            found = resident_pages(fd, size)
            self.seen[_path(fd)] = found
            return found

        def drop(fd: int, begin: int, size: int, advice: int) -> None:
            if advice == os.POSIX_FADV_DONTNEED:
                pages = self.asked(_path(fd))
                pages[begin // PAGE : -(-(begin + size) // PAGE)] = b"\1" * -(-size // PAGE)
            advise(fd, begin, size, advice)

        monkeypatch.setattr(page_cache, "resident_pages", look)
        monkeypatch.setattr(os, "posix_fadvise", drop)

    def asked(self, path: Path) -> bytearray:
        """Which pages of a file the kernel was asked to drop."""
        return self._asked.setdefault(path, bytearray(-(-path.stat().st_size // PAGE)))

    def absent(self, path: Path) -> bytes:
        """Which pages were not there when the file was first looked at."""
        return bytes(1 - page for page in self.seen[path])


def _path(fd: int) -> Path:
    return Path(f"/proc/self/fd/{fd}").readlink()
