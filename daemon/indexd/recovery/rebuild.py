"""A whole data directory from a commitlog, at full speed: one thread reads and decodes, the other builds and writes.

Everything is made beside the target and renamed at the end, so the target is there whole or not at all. An interrupted
rebuild leaves a ``.building`` directory that the next one replaces.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from indexd.commitlog.format import Corrupt
from indexd.commitlog.reader import LogReader
from indexd.commitlog.segments import NOBODY, LogLimit, list_segments
from indexd.config import Config
from indexd.config.load import check_outside
from indexd.dispatch.reput import Item
from indexd.errors import BusyError, UsageError
from indexd.flush.pipeline import LogChangeDetector, Pipeline, all_outputs, sync_files
from indexd.recovery.open import check_store, decode_rules, fresh_frontier, load_kernels, reader_options
from indexd.recovery.recover import WholeLog, once
from indexd.storage.disk import Disk
from indexd.storage.lock import DirectoryLock, owner_pid
from indexd.storage.names import DataFiles, absolute, building_of

# Batches that are read ahead: enough that neither thread waits for the other's hiccups, some tens of MiB.
_BATCHES_AHEAD = 8
# Threads that decode; one more builds. More than two find nothing to do: building is in order.
_WORKERS = 2
# A read that takes longer waits for the newest frame to settle.
_QUIET_SECONDS = 0.01
# 40 MiB of entries.
_ENTRIES_PER_SYNC = 2 << 20


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What a rebuild came to: ``bytes`` of log in ``seconds``, from the first byte read to the last rename."""

    messages: int
    entries: int
    bytes: int
    seconds: float
    files: int
    begin_offset: int
    phy_offset: int
    skipped_bytes: int
    left_out_messages: int
    unreadable: Corrupt | None
    #: Log bytes whose messages may have been removed from it: see ``flush.frontier.UNPROVEN``.
    unproven_bytes: int = 0


def rebuild(
    config: Config, disk: Disk, out: Path, on_progress: Callable[[int, int], None], log_limit: LogLimit = NOBODY
) -> Rebuilt:
    """Build ``out`` from the store; ``on_progress`` gets (bytes done, bytes in all) from the building thread.

    ``log_limit`` is asked about suspects.
    """
    store = check_store(config)
    list_segments(disk, config.store.commit_log_directories, config.store.segment_size)
    with built_beside(config, disk, out) as files:
        outputs = [output for output, is_wanted in all_outputs(config, disk, files.data) if is_wanted]
        for output in outputs:
            disk.make_dir(output.directory)
        options = replace(once(reader_options(config)), check_tail=False, take_older=True, workers=_WORKERS)
        reader = LogReader(disk, config.store.commit_log_directories, decode_rules(config), options)
        load_kernels(config)
        reader.log_limit = log_limit
        reader.refresh()
        reader.position = reader.log.min_offset or 0
        frontier = replace(fresh_frontier(config, store), begin_offset=reader.position, phy_offset=reader.position)
        pipeline = Pipeline(disk, files, outputs, frontier, LogChangeDetector(disk, lambda: reader.log))
        started = time.monotonic()
        unreadable = _build(disk, reader, pipeline, on_progress)
        pipeline.finish()
    seconds = time.monotonic() - started
    built = pipeline.frontier
    figures = {name: value for output in outputs for name, value in output.figures().items()}
    return Rebuilt(
        messages=built.messages,
        entries=figures["indexEntries"],
        bytes=built.phy_offset - built.begin_offset,
        seconds=seconds,
        files=len(built.index),
        begin_offset=built.begin_offset,
        phy_offset=built.phy_offset,
        skipped_bytes=sum(gap.end - gap.begin for gap in built.uncovered if not gap.is_unproven),
        left_out_messages=figures.get("batchMessages", 0) + figures.get("leftOutMessages", 0),
        unreadable=unreadable,
        unproven_bytes=sum(gap.end - gap.begin for gap in built.uncovered if gap.is_unproven),
    )


def check_target(disk: Disk, out: Path) -> None:
    """Refuse an ``--out`` that is not an empty directory, or no directory yet: UsageError, BusyError."""
    if out.is_symlink():  # whoever made it says where root writes
        raise UsageError(f"--out {out} is a link", "name the directory itself")
    if disk.exists(out) and not out.is_dir():
        raise UsageError(f"--out {out} is a file", "name a directory that is empty or not there")
    if out.is_dir():
        pid = owner_pid(DataFiles(out).lock)
        if pid is not None:
            raise BusyError(f"{out} is in use by indexd, pid {pid}")
        if any(out.iterdir()):
            raise UsageError(f"--out {out} is not empty", "name a directory that is empty or not there")


@contextmanager
def built_beside(config: Config, disk: Disk, out: Path) -> Iterator[DataFiles]:
    """An empty directory beside ``out``, which gets its name when the body has ended well.

    Raises UsageError for an ``out`` that cannot be built, BusyError while another rebuild is at work there.
    """
    check_outside(config, out, "--out")
    check_target(disk, out)
    out = absolute(out)
    files = DataFiles(building_of(out))
    disk.make_dir(files.data)
    lock = DirectoryLock(files.lock)
    lock.acquire()
    try:
        # What an interrupted rebuild left; the lock is ours, so no one else is at work in it.
        for path in [path for path in files.data.iterdir() if path != files.lock]:
            if path.is_dir() and not path.is_symlink():
                disk.remove_tree(path)
            else:
                disk.unlink(path)
        yield files
        disk.unlink(files.lock)
        if disk.exists(out):
            disk.remove_dir(out)
        disk.rename(files.data, out)
        disk.sync_dir(out.parent)
    finally:
        lock.release()


def _build(
    disk: Disk, reader: LogReader, pipeline: Pipeline, on_progress: Callable[[int, int], None]
) -> Corrupt | None:
    begin, log = reader.position, WholeLog(reader)
    total = reader.log.segments[-1].end - begin if reader.log.segments else 0
    with closing(reader), _Syncer(disk, pipeline) as syncer, ThreadPoolExecutor(1, "reader") as pool:
        for item in _read_ahead(log, pool, syncer.while_quiet):
            pipeline.build(item)
            syncer.after_batch()
            on_progress(pipeline.built.phy_offset - begin, total)
        syncer.last.result()
    return log.unreadable


def _read_ahead(log: WholeLog, pool: ThreadPoolExecutor, while_quiet: Callable[[], None]) -> Iterator[Item]:
    items = iter(log)
    reads = deque(pool.submit(next, items, None) for _ in range(_BATCHES_AHEAD))
    while True:
        if not wait([reads[0]], _QUIET_SECONDS).done:
            while_quiet()
        item = reads.popleft().result()
        if item is None:
            return
        reads.append(pool.submit(next, items, None))
        yield item


class _Syncer(ThreadPoolExecutor):
    """Syncs the files being built from a thread of its own, so that the disk works while the processor does."""

    def __init__(self, disk: Disk, pipeline: Pipeline) -> None:
        super().__init__(1, "sync")
        self._disk, self._pipeline = disk, pipeline
        self._synced_entries = 0
        #: The last sync: what its ``result`` raises the rebuild has to raise.
        self.last = self.submit(sync_files, disk, ())

    def after_batch(self) -> None:
        """Start a sync every so often; raises what the last one raised."""
        entries = self._pipeline.index.entries
        if entries - self._synced_entries >= _ENTRIES_PER_SYNC and self.last.done():
            self._start()

    def while_quiet(self) -> None:
        """The reader lets the newest frame settle: write and sync what has to be written and synced anyway."""
        if self.last.done():
            self._pipeline.index.publish()
            self._start()

    def _start(self) -> None:
        self.last.result()
        self._synced_entries = self._pipeline.index.entries
        files = [path for output in self._pipeline.outputs for path in output.unsynced.files]
        self.last = self.submit(sync_files, self._disk, files)
