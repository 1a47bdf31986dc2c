"""What both sides of ``lookup`` are given, as files of int64 numbers, big-endian: entries in pairs, and targets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from indexd.sparse.format import OFFSET_ENTRY_SIZE, TIME_ENTRY_SIZE
from indexd.sparse.searching import WARM_SIZE

Int64s = NDArray[np.int64]

#: Kafka's default, segment.index.bytes.
INDEX_SIZE = 10 << 20
BASE = 3_000_000_000
TARGETS = 500_000
#: The targets that are looked up: anywhere, and among the newest 8 KiB, as nearly all of a broker's are.
TARGET_FILES = ("random", "end")
_FIRST_TIME = 1_700_000_000_000
# Targets go so far beyond the first and the last key.
_BEYOND = 1000
_FILE_TYPE = np.dtype(">i8")


@dataclass(frozen=True, slots=True)
class LookupData:
    """One index of ``kind`` offset or time, as many ``entries`` as it takes, in files of ``directory``."""

    kind: str
    directory: Path
    entries: int


def make(kind: str, directory: Path) -> LookupData:
    """Write the files; the same ones each time."""
    directory.mkdir(parents=True)
    choice = np.random.default_rng(1)
    if kind == "time":
        # The last slot is kept for the roll.
        entries, size = INDEX_SIZE // TIME_ENTRY_SIZE - 1, TIME_ENTRY_SIZE
        keys = _FIRST_TIME + choice.integers(1, 40, entries).cumsum()
        values = BASE + choice.integers(1, 2400, entries).cumsum()
    else:
        entries, size = INDEX_SIZE // OFFSET_ENTRY_SIZE, OFFSET_ENTRY_SIZE
        keys = BASE + choice.integers(1, 1600, entries).cumsum()
        values = choice.integers(1, 1600, entries).cumsum()
    first, warm, last = int(keys[0]), int(keys[-WARM_SIZE // size]), int(keys[-1])
    write(directory / "entries", np.stack((keys, values), axis=1))
    write(directory / "random", choice.integers(first - _BEYOND, last + _BEYOND, TARGETS))
    write(directory / "end", choice.integers(warm, last + _BEYOND, TARGETS))
    return LookupData(kind, directory, entries)


def write(path: Path, numbers: Int64s) -> None:
    """One of the files."""
    path.write_bytes(as_bytes(numbers))


def read(path: Path) -> Int64s:
    """The numbers of one of the files."""
    return np.fromfile(path, dtype=_FILE_TYPE).astype(np.int64)


def as_bytes(numbers: Int64s) -> bytes:
    """Numbers as both sides take the digest of them."""
    return numbers.astype(_FILE_TYPE).tobytes()
