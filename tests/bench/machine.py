"""What the machine itself allows: reading the log from the page cache and bringing an index's bytes to the disk."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from bench.ground import SEGMENT_SIZE
from bench.report import BenchError

_BLOCK = 4 << 20


@dataclass(frozen=True, slots=True)
class Limit:
    """Seconds of one thread for each half: nobody who reads and writes these bytes one after the other is faster."""

    read_seconds: float
    write_seconds: float

    @property
    def seconds(self) -> float:
        """Both halves."""
        return self.read_seconds + self.write_seconds


def measure_limit(store: Path, log_end: int, index_bytes: int, scratch: Path) -> Limit:
    """The log up to ``log_end`` with pread of 4 MiB blocks, and ``index_bytes`` with pwrite and fsync."""
    return Limit(_read_log(store / "commitlog", log_end), _write_index(scratch, index_bytes))


def _read_log(directory: Path, log_end: int) -> float:
    block = memoryview(bytearray(_BLOCK))
    began = time.perf_counter()
    for base in range(0, log_end, SEGMENT_SIZE):
        fd = os.open(directory / f"{base:020d}", os.O_RDONLY)
        try:
            end = min(SEGMENT_SIZE, log_end - base)
            position = 0
            while position < end:
                position += _at_least_one(os.preadv(fd, [block[: end - position]], position))
        finally:
            os.close(fd)
    return time.perf_counter() - began


def _write_index(path: Path, size: int) -> float:
    block = memoryview(os.urandom(_BLOCK))
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)
        os.fsync(fd)
        began = time.perf_counter()
        position = 0
        while position < size:
            position += os.pwrite(fd, block[: size - position], position)
        os.fsync(fd)
        return time.perf_counter() - began
    finally:
        os.close(fd)
        path.unlink()


def _at_least_one(done: int) -> int:
    if done <= 0:
        raise BenchError("the log is shorter than the index says")
    return done
