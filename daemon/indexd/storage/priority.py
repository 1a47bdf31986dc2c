"""A thread that takes what others leave of processor and disk."""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from contextlib import suppress

_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_WHO_PROCESS, _THIS_THREAD = 1, 0
_CLASS_IDLE = 3 << 13
_NICE_MAX = 19


def take_lowest_priority() -> None:
    """Of the calling thread; where a sandbox does not allow it, it stays as it is."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE_MAX)
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None).syscall(number, _WHO_PROCESS, _THIS_THREAD, _CLASS_IDLE)
