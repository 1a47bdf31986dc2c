"""What the system keeps of files in memory."""

from __future__ import annotations

import os
from pathlib import Path


def forget(path: Path) -> None:
    """Out of memory with it."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
