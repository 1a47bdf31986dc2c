"""What the tests let Spark's workers do: functions that a worker can import."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from indexd.errors import CorruptDataError, DiskError


def square(number: int) -> int:
    """The plainest work."""
    return number * number


def where(_: int) -> dict[str, object]:
    """What this worker is, seen from inside."""
    return {
        "executable": sys.executable,
        "cache": os.environ.get("NUMBA_CACHE_DIR"),
    }


def raise_ours(number: int) -> int:
    """Fail with one of indexd's own errors, whose constructor asks for more than a message."""
    if number == 3:
        raise DiskError("open", Path("/no/such/segment"), FileNotFoundError(2, "No such file or directory"))
    return number


def raise_corrupt(number: int) -> int:
    """Fail with one that has a hint of its own."""
    if number == 1:
        raise CorruptDataError(f"split {number} does not hold", "look at it")
    return number


def raise_internal(_: int) -> int:
    """Fail as a defect would."""
    nobody: dict[str, int] = {}
    return nobody["a key that nobody has"]


def die(number: int) -> int:
    """End the process, as the kernel does when memory is out."""
    if number == 1:
        os._exit(137)
    return number


def touch_then_wait(folder: Path, number: int, *, seconds: float = 0.2) -> int:
    """Leave a mark that this item was begun, with the worker's pid in it."""
    (folder / f"{number}-{os.getpid()}-{time.monotonic_ns()}").touch()
    time.sleep(seconds)
    return number


def wait(number: int, *, seconds: float) -> int:
    """Take some time."""
    time.sleep(seconds)
    return number
