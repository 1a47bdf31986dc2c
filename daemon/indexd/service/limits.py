"""DiskWatermark: indexing stops before the broker's disk is so full that the broker minds.

A broker cleans up early at 75 % (diskMaxUsedSpaceRatio), deletes what is not expired yet at 85 %
(diskSpaceCleanForciblyRatio) and refuses messages at 90 % (diskSpaceWarningLevelRatio). Below its first line the index
gives way: it is derived, and can be built later.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from indexd.errors import DiskError

# How far it has to fall below the mark before indexing goes on: an index file that is allocated must not undo it.
_HYSTERESIS = 0.01


class DiskWatermark:
    """Whether the data directory's file system is too full to index; remembers that it was."""

    def __init__(self, data: Path, used_max: float) -> None:
        self._data = data
        self._used_max = used_max
        #: Indexing has to wait, as of the last check.
        self.is_over = False

    def check(self) -> None:
        """Raise DiskError, a transient one, while it is fuller than ``used_max``, and then until it is 1 % less full.

        A ``used_max`` of 1 means never.
        """
        ratio = used_ratio(self._data)
        self.is_over = self._used_max < 1 and ratio > self._used_max - (_HYSTERESIS if self.is_over else 0.0)
        if self.is_over:
            text = f"its file system is {ratio:.1%} full and disk_used_max is {self._used_max:.1%}"
            raise DiskError("index into", self._data, OSError(errno.ENOSPC, text))


def used_ratio(path: Path) -> float:
    """How full the file system of ``path`` is, as the broker and ``df`` count it: of what is not kept for root alone.

    Raises DiskError.
    """
    try:
        status = os.statvfs(path)
    except OSError as error:
        raise DiskError("stat", path, error) from error
    used = status.f_blocks - status.f_bfree
    return used / (used + status.f_bavail) if used + status.f_bavail else 0.0
