"""One range of a plan built into new index files, as RocketMQ would write them, and made durable.

The messages are read as the audit reads them, so what it will look for is what is put in. Full files are synced by a
thread of its own while the next one is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from indexd.audit.ground import LogProbe
from indexd.audit.part import Gap
from indexd.audit.plan import layout_of
from indexd.audit.stretch import Rows, Stretch
from indexd.commitlog.dispatch import DispatchBatch
from indexd.commitlog.reading import Skipped
from indexd.commitlog.segments import list_segments
from indexd.config import Config
from indexd.errors import CorruptDataError
from indexd.index.file import IndexFile
from indexd.index.flavour import FLAVOURS, Flavour
from indexd.index.format import HEADER_SIZE, FileMark, IndexHeader
from indexd.index.service import IndexService
from indexd.recovery.replay import phy_offset_of, read_entries
from indexd.repair.plan import RepairPlan, RepairRange
from indexd.storage.disk import Disk

# Behind the two times and the offset where the file begins.
_END_PHY_OFFSET_AT = 24


@dataclass(frozen=True, slots=True)
class BuiltRange:
    """``files`` are the names of what was made, oldest first, none where the log has no keys; ``gaps``: unreadable."""

    files: tuple[str, ...]
    entries: int
    gaps: tuple[Gap, ...]


def build_range(
    disk: Disk,
    config: Config,
    folder: Path,
    plan: RepairPlan,
    wanted: RepairRange,
    on_bytes: Callable[[int], None],
    *,
    workers: int = 2,
) -> BuiltRange:
    """Build ``wanted`` into ``folder``, which is there and has no file of its names; files and folder are synced.

    ``on_bytes`` is told how many bytes of log more have been read. Raises DiskError, CorruptDataError.
    """
    builder = _Builder(disk, config, folder, wanted)
    try:
        for stretch in _stretches(disk, config, plan, wanted):
            done = stretch.begin
            for item in stretch.read(disk, config, workers):
                builder.take(item, FLAVOURS[stretch.flavour])
                on_bytes(stretch.position - done)
                done = stretch.position
        return builder.finish()
    finally:
        builder.close()


def mark_end(disk: Disk, config: Config, path: Path) -> None:
    """Have the last index file say that it ends one byte behind where its last message begins, and sync it.

    A broker that starts indexes the message again at which its last file says it ends (spec rocketmq-store 4.2, step
    2), and now there is none. To be called for the last file by name, once all before it and all of the tail is there;
    never for a file that another directory has a link to. Does nothing to a file without entries or so marked already.
    """
    layout = layout_of(config)
    with disk.open_write(path) as file:
        header = IndexHeader.unpack(file.pread(HEADER_SIZE, 0))
        if header.index_count <= 1:
            return
        last = phy_offset_of(read_entries(file, layout, header.index_count - 1, 1)[0])
        if header.end_phy_offset != last + 1:
            file.pwrite((last + 1).to_bytes(8, "big"), _END_PHY_OFFSET_AT)
            file.fsync()


def _stretches(disk: Disk, config: Config, plan: RepairPlan, wanted: RepairRange) -> Iterator[Stretch]:
    # One a flavour. With keys of the message at the end, that is read, too.
    end = wanted.end + (1 if wanted.end_key else 0)
    switches = [era.begin for era in plan.eras if wanted.begin < era.begin < end]
    for begin, stop in pairwise([wanted.begin, *switches, end]):
        flavour = [era.flavour for era in plan.eras if era.begin <= begin][-1]
        aligned = wanted.aligned if begin == wanted.begin else aligned_at(disk, config, begin)
        yield Stretch(begin, stop, aligned, flavour)


def aligned_at(disk: Disk, config: Config, offset: int) -> int:
    """From where a stretch that begins at ``offset`` is read: there, if a message is, else the begin of its segment."""
    log = list_segments(disk, config.store.commit_log_directories, config.store.segment_size)
    segment = log.at(offset)
    if segment is None or LogProbe(disk, log).frame_end(offset) is not None:
        return offset
    return segment.base


class _Builder:
    def __init__(self, disk: Disk, config: Config, folder: Path, wanted: RepairRange) -> None:
        self._disk, self._folder, self._wanted = disk, folder, wanted
        self._service = IndexService(disk, folder, layout_of(config), FLAVOURS["5.4"], names=self._names())
        self._made: list[str] = []
        self._gaps: list[Gap] = []
        if wanted.before is not None:
            # Full or not: the first new file inherits its end, and nothing more is put there.
            self._service.load((FileMark("", wanted.before, full=True),))
        self._thread = ThreadPoolExecutor(1, "sync")
        self._syncing: tuple[Future[None], tuple[IndexFile, ...]] | None = None

    def take(self, item: Rows | Skipped, flavour: Flavour) -> None:
        if isinstance(item, Skipped):
            self._gaps.append(Gap(item.begin, item.end, item.reason))
            return
        batch = self._clip(item, flavour)
        if batch is None:
            return
        self._service.flavour = flavour
        self._service.build_index(batch)
        rolled = self._service.rolled()
        if rolled and (self._syncing is None or rolled[-1] not in self._syncing[1]):
            self._synced()
            rolled = self._service.rolled()
            self._syncing = self._thread.submit(_sync, rolled), rolled

    def finish(self) -> BuiltRange:
        self._synced()
        self._service.flush()
        _sync(self._service.rolled())
        self._disk.sync_dir(self._folder)
        return BuiltRange(tuple(self._made), self._service.counters.entries, tuple(self._gaps))

    def close(self) -> None:
        self._thread.shutdown()
        self._service.close()

    def _synced(self) -> None:
        if self._syncing is not None:
            running, files = self._syncing
            running.result()
            self._service.synced(files)
            self._syncing = None

    def _names(self) -> Iterator[str]:
        for name in self._wanted.names:
            self._made.append(name)
            yield name
        raise CorruptDataError(
            f"the log from {self._wanted.begin} to {self._wanted.end} has more keys than the audit met",
            "audit the store again, or give --all to build the whole index anew",
        )

    def _clip(self, rows: Rows, flavour: Flavour) -> DispatchBatch | None:
        # The first and last keys that belong here. Messages without keys at both ends go, too: a broker would make
        # another file for them where one is full, and it would stay empty.
        batch, columns, wanted = rows.batch, rows.batch.columns, self._wanted
        part = slice(rows.first, rows.last)
        offsets = columns.phy_offset[part]
        starts = columns.key_start[rows.first : rows.last + 1].copy()
        if wanted.end_key and offsets[-1] == wanted.end:
            starts[-1] = starts[-2] + wanted.end_key
        if wanted.begin_key and offsets[0] == wanted.begin:
            starts[0] += wanted.begin_key
        skipped = flavour.skip_mask >> (columns.sys_flag[part] & 0xC) & 1
        keyed = np.flatnonzero((np.diff(starts) > 0) & (skipped == 0))
        if len(keyed) == 0:
            return None
        first, behind = int(keyed[0]), int(keyed[-1]) + 1
        kept = columns._replace(
            phy_offset=offsets[first:behind],
            store_timestamp=columns.store_timestamp[part][first:behind],
            sys_flag=columns.sys_flag[part][first:behind],
            key_start=starts[first : behind + 1],
        )
        return replace(batch, columns=kept, rows=behind - first)


def _sync(files: tuple[IndexFile, ...]) -> None:
    for file in files:
        file.file.fsync()
