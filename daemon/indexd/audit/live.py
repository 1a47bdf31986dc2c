"""Whether a broker is at work in a store: it holds a lock on the first byte of STORE/lock from its start to its end."""

from __future__ import annotations

from pathlib import Path

from indexd.errors import DiskError
from indexd.storage.disk import Disk
from indexd.storage.lock import OURS, lock_holder


def is_live(disk: Disk, store: Path) -> bool:
    """Whether somebody holds the broker's lock now; it is asked for, never taken. A copy of a store is not live."""
    try:
        with disk.open_read(store / "lock") as file:
            if file.fileno() < 0:
                return False  # behind a URI lies a copy
            return lock_holder(file.fileno()) not in (None, OURS)
    except DiskError as error:
        if not (error.is_missing or error.is_forbidden):
            raise
        return not error.is_missing
    except OSError:
        return True
