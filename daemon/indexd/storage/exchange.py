"""Two names that change places in one step: renameat2 with RENAME_EXCHANGE, which ``os`` does not offer.

Linux has it since 3.15, and ext4, xfs, btrfs, tmpfs and overlayfs know it; others answer EINVAL.
"""

from __future__ import annotations

import ctypes
import errno
import os

_RENAME_EXCHANGE = 2


def exchange_names(here: int, one: str, there: int, other: str) -> None:
    """``one`` in the open directory ``here``, ``other`` in ``there``.

    Raises OSError: EINVAL or ENOSYS where it is not known, EXDEV between file systems, EBUSY for a mount point.
    """
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if renameat2(here, os.fsencode(one), there, os.fsencode(other), _RENAME_EXCHANGE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
