"""File names: what RocketMQ's mean, and how ours are made (spec rocketmq-store 1.2).

A commitlog segment is named by the physical offset of its first byte, 20 decimal digits. A broker whose JVM runs
under a locale with digits of its own writes those digits, so every Unicode decimal digit is read. An index file is
named by the time it was made, ``yyyyMMddHHmmssSSS``; the name is an identifier and a sort key and nothing else.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

SEGMENT_DIGITS = 20
INDEX_DIGITS = 17


def segment_base(name: str) -> int | None:
    """The physical offset that a segment's name says, or None if it is no segment's name."""
    return int(name) if len(name) == SEGMENT_DIGITS and name.isdecimal() else None


def segment_name(base: int) -> str:
    """The name of the segment that begins at physical offset ``base``."""
    return f"{base:0{SEGMENT_DIGITS}d}"


def is_index_name(name: str) -> bool:
    """True for the 17 digits of an index file; other files in the folder are not ours to touch."""
    return len(name) == INDEX_DIGITS and name.isascii() and name.isdecimal()


def next_index_name(now: float, last: str | None) -> str:
    """A name for a new index file: ``now`` (Unix seconds) in local time, and always behind ``last``.

    RocketMQ takes the clock as it is, so two rolls in a millisecond share a file and a clock that steps back sorts a
    new file before older ones. Here the number goes on from ``last`` in both cases.
    """
    millis = int(now * 1000)
    name = f"{time.strftime('%Y%m%d%H%M%S', time.localtime(millis // 1000))}{millis % 1000:03d}"
    if last is not None and name <= last:
        return f"{int(last) + 1:0{INDEX_DIGITS}d}"
    return name


def absolute(path: Path) -> Path:
    """From the root on, without ``..``; links stay, for the disk judges each one on the way."""
    return Path(os.path.abspath(path))  # noqa: PTH100 - Path's own follow links


def building_of(out: Path) -> Path:
    """The directory beside ``out`` in which a rebuild makes it."""
    return Path(f"{absolute(out)}.building")


class DataFiles:
    """Where each thing lies in a data directory. Nothing else is ever written there."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.index = data / "index"
        self.consumequeue = data / "consumequeue"
        self.sparse = data / "sparse"
        self.checkpoint = data / "checkpoint"
        self.frontier = data / "frontier"
        self.state = data / "state"
        self.abort = data / "abort"
        self.starts = data / "starts"
        self.lock = data / "lock"
