"""What stands around an index at one moment: the lock, the abort file, the checkpoint, where each segment begins.

Small facts, read before the log is, that say why keys are not findable and what a crash would cost.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from indexd.audit.plan import index_folder
from indexd.commitlog.format import FLAG_BORN_HOST_V6, HEAD_SIZE, MAGIC_V1, MAGIC_V2
from indexd.commitlog.segments import Segment, list_segments
from indexd.config import Config
from indexd.config.units import RemotePath
from indexd.errors import CorruptDataError, DiskError
from indexd.flush.frontier import StoreCheckpoint
from indexd.storage.disk import Disk
from indexd.storage.lock import BrokerLock, look_at_lock

#: How the folder of a repair is called, before its time.
REPAIR_PREFIX = "indexd-repair-"
# Behind the born host, which has 8 or 20 bytes.
_STORE_TIMESTAMP_AT = (56, 68)


@dataclass(frozen=True, slots=True)
class SegmentStart:
    """Segment ``[begin, end)``; ``store_timestamp`` of its first frame, ms, None when no frame stands there."""

    begin: int
    end: int
    store_timestamp: int | None


@dataclass(frozen=True, slots=True)
class Standing:
    """``checkpoint`` is None where there is none, or too short a one; ``looked_at`` is a wall clock, ms.

    ``repairs`` are the names of folders beside the index that indexd repair has made, the oldest first.
    """

    lock: BrokerLock
    has_lock_file: bool
    has_abort: bool
    checkpoint: StoreCheckpoint | None
    segments: tuple[SegmentStart, ...]
    looked_at: int
    has_index_folder: bool = True
    repairs: tuple[str, ...] = ()

    @property
    def is_live(self) -> bool:
        """Whether a broker runs or loads, as far as that can be told."""
        return self.lock.alive is True


def look_around(disk: Disk, config: Config) -> Standing:
    """Look once. Raises UsageError, UnsafeStoreError and DiskError, and what listing the log raises."""
    store = index_folder(config).parent
    log = list_segments(disk, config.store.commit_log_directories, config.store.segment_size)
    return Standing(
        lock=_lock(store),
        has_lock_file=disk.exists(store / "lock"),
        has_abort=disk.exists(store / "abort"),
        checkpoint=_checkpoint(disk, config),
        segments=tuple(_start(disk, segment) for segment in log.segments),
        looked_at=int(time.time() * 1000),
        has_index_folder=disk.exists(store / "index"),
        repairs=_repairs(disk, store),
    )


def _lock(store: Path) -> BrokerLock:
    if isinstance(store, RemotePath):
        return BrokerLock(False, None, "none", f"{store} is a copy behind a URI")
    return look_at_lock(store / "lock")


def _repairs(disk: Disk, store: Path) -> tuple[str, ...]:
    try:
        return tuple(name for name in disk.list_dirs(store) if name.startswith(REPAIR_PREFIX))
    except DiskError as error:
        if not (error.is_missing or error.is_forbidden):
            raise
        return ()  # evidence, if it is there: all else can be read without


def _checkpoint(disk: Disk, config: Config) -> StoreCheckpoint | None:
    assert config.store.store is not None
    path = config.store.store / "checkpoint"
    try:
        return StoreCheckpoint.unpack(disk.read(path), path)
    except CorruptDataError:
        return None
    except DiskError as error:
        if not error.is_missing:
            raise
        return None


def _start(disk: Disk, segment: Segment) -> SegmentStart:
    size = _STORE_TIMESTAMP_AT[1] + 8
    try:
        with disk.open_read(segment.path) as file:
            head = file.pread(size, 0)
    except DiskError as error:
        if not error.is_missing:
            raise
        head = b""
    magic, said = int.from_bytes(head[4:8], "big"), int.from_bytes(head[28:HEAD_SIZE], "big")
    if len(head) < size or magic not in (MAGIC_V1, MAGIC_V2) or said != segment.base:
        return SegmentStart(segment.base, segment.end, None)
    at = _STORE_TIMESTAMP_AT[bool(head[39] & FLAG_BORN_HOST_V6)]
    return SegmentStart(segment.base, segment.end, int.from_bytes(head[at : at + 8], "big", signed=True))
