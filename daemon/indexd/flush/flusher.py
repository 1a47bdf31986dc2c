"""Flusher: the one place where written becomes durable and is then written down (ARCHITECTURE.md, decision 5).

Witness: notes single frames of what is built, and tells when the log no longer holds them (decision 7).

Outputs: all builders behind one call, and what they have come to.

A batch goes through every builder before the progress moves, so the progress covers what is in all of them.

Building: the builders and the flusher of one data directory, and what passes between them.

Plain steps in the order in which a daemon takes them; who calls them, from which thread and how often is the caller's.
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

import numpy as np

from indexd import __version__
from indexd.commitlog.batcher import DispatchBatch
from indexd.commitlog.evidence import WATCHED_SIZE, Evidence, FrameReader, Stretch, newest, thinned
from indexd.commitlog.reader import Skipped
from indexd.commitlog.segments import SegmentList
from indexd.consumequeue.store import ConsumeQueueStore, QueuesProgress
from indexd.errors import DiskError, DisturbedError, MissingStoreError
from indexd.flush.frontier import UNPROVEN, Frontier, StoreCheckpoint, Uncovered, add_uncovered, write_frontier
from indexd.index.file import IndexMark, IndexService
from indexd.sparse.service import SparseProgress, SparseService
from indexd.storage.disk import Disk, Stamp
from indexd.storage.names import DataFiles

# So many files are synced one after the other; of more, so many at once.
_MANY = 64
_SYNC_THREADS = 8


@dataclass(frozen=True, slots=True)
class Progress:
    """How far building has come at one moment: the outputs' marks and the physical offset that they cover."""

    index: IndexMark
    queues: QueuesProgress | None
    sparse: SparseProgress | None
    begin_offset: int
    phy_offset: int
    store_timestamp: int
    messages: int
    uncovered: tuple[Uncovered, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    #: Less than ``phy_offset`` while queues and sparse indexes are built after the key index.
    refill_offset: int | None = None
    newest_timestamp: int | None = None
    stale_head: bytes | None = None

    @property
    def beside(self) -> tuple[QueuesProgress | SparseProgress, ...]:
        """The outputs besides the key index."""
        return tuple(output for output in (self.queues, self.sparse) if output is not None)

    @property
    def filled_offset(self) -> int:
        """All outputs hold every message before this physical offset."""
        return self.phy_offset if self.refill_offset is None else self.refill_offset

    @property
    def has_expired(self) -> bool:
        """Files wait for a frontier that does not name them, to be removed."""
        return bool(self.index.expired) or any(output.expired for output in self.beside)

    def without(self, done: Progress) -> Progress:
        """What is left to do of this newer one once ``done`` is durable, full files closed and expired ones removed."""
        names = {mark.name for mark in done.index.files if mark.full}
        full = {file for file in done.index.unsynced if file.path.name in names}
        index = replace(
            self.index,
            unsynced=tuple(file for file in self.index.unsynced if file not in full),
            expired=tuple(name for name in self.index.expired if name not in done.index.expired),
        )
        queues, sparse = self.queues, self.sparse
        if queues is not None and done.queues is not None:
            gone = set(done.queues.expired)
            queues = replace(queues, expired=tuple(path for path in queues.expired if path not in gone))
        if sparse is not None and done.sparse is not None:
            left = set(done.sparse.expired)
            sparse = replace(sparse, expired=tuple(name for name in sparse.expired if name not in left))
        return replace(self, index=index, queues=queues, sparse=sparse)


@dataclass(slots=True)
class FlushCounters:
    """Plain numbers that only grow; times in seconds."""

    flushes: int = 0
    files_synced: int = 0
    seconds: float = 0.0
    last_seconds: float = 0.0


class Flusher:
    """Owns checkpoint and frontier. A DiskError of ``persist`` must end the process: nothing is known after it."""

    def __init__(self, disk: Disk, files: DataFiles, frontier: Frontier) -> None:
        self._disk = disk
        self._files = files
        self.frontier = frontier
        self.counters = FlushCounters()
        #: When the last scrub that went through everything began, ms: in the next frontier.
        self.scrubbed_at = frontier.scrubbed_at
        #: Name -> stamp of what was written down last; empty while that is being replaced.
        self.written: dict[str, Stamp] = {}

    def __repr__(self) -> str:
        return f"Flusher(durable={self.frontier.phy_offset}, files={len(self.frontier.index)}, {self.counters})"

    def persist(self, progress: Progress) -> None:
        """Sync the files of ``progress``, then replace the checkpoint, then the frontier."""
        started = time.monotonic()
        self._sync(progress)
        self.written = {}
        full = [mark for mark in progress.index.files if mark.full]
        has_queues = progress.queues is not None and progress.filled_offset == progress.phy_offset
        StoreCheckpoint(
            physic_msg_timestamp=progress.store_timestamp,
            logics_msg_timestamp=progress.store_timestamp if has_queues else 0,
            index_msg_timestamp=full[-1].header.end_timestamp if full else 0,
            confirm_phy_offset=progress.phy_offset,
        ).write(self._disk, self._files.checkpoint)
        frontier = replace(
            self.frontier,
            begin_offset=progress.begin_offset,
            phy_offset=progress.phy_offset,
            store_timestamp=progress.store_timestamp,
            messages=progress.messages,
            newest_timestamp=progress.newest_timestamp,
            stale_head=progress.stale_head,
            uncovered=progress.uncovered,
            index=progress.index.files,
            queues=progress.queues.marks if progress.queues is not None else None,
            queues_limit=progress.queues.limit if progress.queues is not None else None,
            sparse=progress.sparse.mark if progress.sparse is not None else None,
            refill_offset=progress.refill_offset,
            evidence=progress.evidence,
            scrubbed_at=self.scrubbed_at,
        )
        write_frontier(self._disk, self._files.frontier, frontier, __version__)
        self.frontier = frontier
        stamps = self._disk.stamps(self._files.data)
        names = (self._files.checkpoint.name, self._files.frontier.name)
        self.written = {name: stamps[name] for name in names if name in stamps}
        self.counters.flushes += 1
        self.counters.last_seconds = time.monotonic() - started
        self.counters.seconds += self.counters.last_seconds

    def _sync(self, progress: Progress) -> None:
        for file in progress.index.unsynced:
            file.file.fsync()
            self._count()
        for output in progress.beside:
            sync_files(self._disk, output.unsynced_files, self._count)
            # The names after what they name: a file that is found is whole.
            sync_dirs(self._disk, output.unsynced_directories)

    def _count(self) -> None:
        # One by one: whoever watches sees that a long flush goes on.
        self.counters.files_synced += 1


def sync_files(disk: Disk, paths: Sequence[Path], count: Callable[[], object] = lambda: None) -> None:
    """Make files durable; DisturbedError if one is not there. Thousands at a time: disks sync several together.

    ``count`` is called for each, in this thread.
    """
    _each(lambda path: _sync_file(disk, path), paths, count)


def sync_dirs(disk: Disk, paths: Sequence[Path]) -> None:
    """Make the names in directories durable; thousands at a time as well."""
    _each(disk.sync_dir, paths)


def _each(sync: Callable[[Path], None], paths: Sequence[Path], count: Callable[[], object] = lambda: None) -> None:
    if len(paths) < _MANY:
        for path in paths:
            sync(path)
            count()
        return
    with ThreadPoolExecutor(_SYNC_THREADS, "sync") as pool:
        for done in [pool.submit(sync, path) for path in paths]:
            done.result()
            count()


def _sync_file(disk: Disk, path: Path) -> None:
    try:
        with disk.open_write(path) as file:
            file.fsync()
    except DiskError as error:
        if not error.is_missing:
            raise
        raise DisturbedError(f"{path} was removed by somebody else") from error


# Frames are noted at least so far apart, but for the last one of all: catching up must not wait for reads.
_NOTE_EVERY = 64 << 10
_POINTS_MAX = 8192
# And it looks at every byte of the newest ones: there a log that is cut by a little is written on.
_TAIL_SIZE = 256 << 10
# Of the points each look takes only one in so many, in turn: an idle daemon is to stay idle.
_TURNS = 4
# The first frame of so many segments is kept, however close they lie.
_SEGMENTS_NOTED = 64


class Witness:
    """Keeps the evidence of one data directory; ``list_log`` lists the segments as they are now.

    Raises DisturbedError when the log was cut or rewritten, DiskError when it cannot be read.
    """

    def __init__(self, disk: Disk, list_log: Callable[[], SegmentList]) -> None:
        self._disk = disk
        self._list_log = list_log
        self._log = SegmentList((), ())
        self._points: list[Evidence] = []
        # The newest bytes that were built, without a gap or with one.
        self._tail: deque[Stretch] = deque()
        self._turn = 0
        # The newest message that was built: physical offset, store timestamp, messages before it.
        self._newest: tuple[int, int, int] | None = None

    def __repr__(self) -> str:
        return f"Witness({len(self._points)} points, last={self._points[-1] if self._points else None})"

    def take_over(self, points: tuple[Evidence, ...], tail: Iterable[Stretch]) -> None:
        """Go on from evidence that was kept and is still true, and from the bytes that it was compared with."""
        self._points = list(points)
        self._tail = deque(tail)
        self._trim()

    def saw(self, batch: DispatchBatch, messages: int) -> None:
        """``batch`` is built, and ``messages`` are counted with it."""
        self._saw_bytes(batch)
        if not batch.rows:
            return
        offsets, times = batch.columns.phy_offset, batch.columns.store_timestamp
        before = messages - batch.rows

        def message(row: int) -> tuple[int, int, int]:
            return int(offsets[row]), int(times[row]), before + row

        # Where the clock goes back, frames of an older and longer log may begin: a writer would go on right there.
        back = np.flatnonzero(np.diff(times[: batch.rows]) < 0)
        if self._newest is not None and times[0] < self._newest[1]:
            self._note(*self._newest)
            self._note(*message(0))
        elif not self._points or self._begins_segment(int(offsets[0])):
            self._note(*message(0))
        if len(back):
            self._note(*message(int(back[-1])))
            self._note(*message(int(back[-1]) + 1))
        self._newest = message(batch.rows - 1)
        if not self._points or self._newest[0] - self._points[-1].phy_offset >= _NOTE_EVERY:
            self._note(*self._newest)

    def points(self) -> tuple[Evidence, ...]:
        """All of it, the newest message included, thinned."""
        if self._newest is not None:
            # Without it there is less evidence, and what is built is no less true: a stop must not depend on the log.
            with suppress(DiskError, MissingStoreError):
                self._note(*self._newest)
        if self._points:
            self._thin()
        return tuple(self._points)

    def remember_tail(self, end: int) -> None:
        """All before physical offset ``end`` is built: remember its last bytes, if they were not noted as they came.

        Also those in between that could not be read: a broker may cut its log there, and write on.
        """
        tail: deque[Stretch] = deque()
        for stretch in self._tail:
            if tail:
                tail.extend(self._standing(tail[-1].end, stretch.begin))
            tail.append(stretch)
        tail.extend(self._standing(tail[-1].end if tail else 0, end))
        self._tail = tail

    def _standing(self, begin: int, end: int) -> list[Stretch]:
        # The last bytes of [begin, end), as they are now.
        if begin >= end:
            return []
        if self._log.at(end - 1) is None:
            self._list()
        segment = self._log.at(end - 1)
        if segment is None:
            return []
        begin = max(begin, end - _TAIL_SIZE, segment.base)
        with FrameReader(self._disk, self._log) as frames:
            return [Stretch(begin, end, zlib.crc32(frames.read(begin, end)))]

    def check(self) -> None:
        """Look at the newest bytes and at some of the newest points; DisturbedError if the log has changed there."""
        if not self._points:
            return
        self._list()
        with FrameReader(self._disk, self._log) as frames:
            self._tail = deque(self._checked(frames, run) for run in self._runs())
            self._turn = (self._turn + 1) % _TURNS
            for point in newest(tuple(self._points), WATCHED_SIZE)[self._turn :: _TURNS]:
                if not self._has_expired(point.phy_offset) and not frames.holds(point):
                    self._doubt(point.phy_offset)

    def _saw_bytes(self, batch: DispatchBatch) -> None:
        if batch.crc is None:
            self._tail.clear()
            return
        self._tail.append(Stretch(batch.begin_offset, batch.end_offset, batch.crc))
        self._trim()

    def _trim(self) -> None:
        while self._tail and self._tail[-1].end - self._tail[0].end >= _TAIL_SIZE:
            self._tail.popleft()

    def _runs(self) -> list[list[Stretch]]:
        # What is left of the tail, joined where it has no gap and is of one segment.
        runs: list[list[Stretch]] = []
        for stretch in self._tail:
            if self._has_expired(stretch.begin):
                continue
            if (
                runs
                and runs[-1][-1].end == stretch.begin
                and self._log.at(runs[-1][0].begin) == self._log.at(stretch.begin)
            ):
                runs[-1].append(stretch)
            else:
                runs.append([stretch])
        return runs[-2:]

    def _checked(self, frames: FrameReader, run: list[Stretch]) -> Stretch:
        begin, end = run[0].begin, run[-1].end
        data = frames.read(begin, end)
        for stretch in run:
            if zlib.crc32(data[stretch.begin - begin : stretch.end - begin]) != stretch.crc:
                self._doubt(stretch.begin)
        kept = data[-_TAIL_SIZE:]
        return Stretch(end - len(kept), end, zlib.crc32(kept))

    def _note(self, phy_offset: int, store_timestamp: int, messages: int) -> None:
        if self._points and self._points[-1].phy_offset >= phy_offset:
            return
        if self._log.at(phy_offset) is None:
            self._list()
        with FrameReader(self._disk, self._log) as frames:
            point = frames.evidence(phy_offset, messages)
        if point is None or point.store_timestamp != store_timestamp:
            self._doubt(phy_offset)
            return
        self._points.append(point)
        if len(self._points) > _POINTS_MAX:
            self._thin()

    def _begins_segment(self, phy_offset: int) -> bool:
        # Where the log begins once the segments before have expired: from there on it is compared and counted.
        if self._log.at(phy_offset) is None:
            self._list()
        segment = self._log.at(phy_offset)
        return segment is not None and segment.base == phy_offset

    def _thin(self) -> None:
        bases = {segment.base for segment in self._log.segments[-_SEGMENTS_NOTED:]}
        self._points = list(thinned(self._points, self._points[-1].phy_offset, bases))

    def _list(self) -> None:
        self._log = self._list_log()
        if not self._log.segments:
            raise MissingStoreError("the commitlog holds no segment any more", "mount or restore it")

    def _has_expired(self, phy_offset: int) -> bool:
        return self._log.min_offset is not None and phy_offset < self._log.min_offset

    def _doubt(self, phy_offset: int) -> None:
        # Segments expire between a look at the list and a look into them.
        self._list()
        if not self._has_expired(phy_offset):
            raise DisturbedError(f"the log was cut or rewritten: at offset {phy_offset} it is not what was indexed")


class Outputs:
    """Applies the log, stretch by stretch, to the builders. One owner, no locks; raises DiskError."""

    def __init__(
        self,
        index: IndexService,
        queues: ConsumeQueueStore | None,
        sparse: SparseService | None,
        frontier: Frontier,
        witness: Witness,
    ) -> None:
        self.index = index
        self.queues = queues
        self.sparse = sparse
        self.witness = witness
        self._builders: tuple[Callable[[DispatchBatch], None], ...] = (
            index.build_index,
            *(output.put_batch for output in self.beside),
        )
        # How many of them have the batch that the disk interrupted.
        self._built = 0
        self.begin_offset = frontier.begin_offset
        self.phy_offset = frontier.phy_offset
        self.store_timestamp = frontier.store_timestamp
        self.messages = frontier.messages
        self.newest_timestamp = frontier.newest_timestamp
        self.uncovered = frontier.uncovered
        self.stale_head = frontier.stale_head

    def __repr__(self) -> str:
        return f"Outputs([{self.begin_offset}, {self.phy_offset}), messages={self.messages}, {self.index})"

    @property
    def beside(self) -> tuple[ConsumeQueueStore | SparseService, ...]:
        """The outputs besides the key index."""
        return tuple(output for output in (self.queues, self.sparse) if output is not None)

    def apply(self, item: DispatchBatch | Skipped) -> None:
        """Take the next stretch of the log. After a DiskError the same item may be given again."""
        if isinstance(item, Skipped):
            self.uncovered = add_uncovered(self.uncovered, Uncovered(item.begin, item.end, item.reason))
            if item.is_expired and self.queues is not None:
                self.queues.begin_anew()
            self.phy_offset, self.stale_head = item.end, None
            return
        if item.end_offset > self.phy_offset:  # else it is built, and only the log could not be looked at
            for build in self._builders[self._built :]:
                build(item)
                self._built += 1
            self._built = 0
            self.phy_offset = item.end_offset
            self.store_timestamp = item.last_store_timestamp or self.store_timestamp
            self.messages += item.rows
        self._note_unproven(item)
        self.witness.saw(item, self.messages)

    def _note_unproven(self, batch: DispatchBatch) -> None:
        if batch.newest_timestamp is not None:
            self.newest_timestamp = batch.newest_timestamp
        self.stale_head = batch.stale_head
        reason = next((gap.reason for gap in self.uncovered if gap.is_unproven), UNPROVEN)
        self.uncovered = tuple(gap for gap in self.uncovered if not gap.is_unproven)
        if batch.unproven_from is not None:
            self.uncovered = add_uncovered(self.uncovered, Uncovered(batch.unproven_from, batch.end_offset, reason))

    def leave_out(self, gap: Uncovered) -> None:
        """A range of what is built already cannot be read any more."""
        self.uncovered = reduce(add_uncovered, sorted((*self.uncovered, gap), key=lambda one: one.begin), ())

    def check_log(self) -> None:
        """DisturbedError if the log no longer says what was built from it, as far as a quick look tells."""
        self.witness.check()

    def remember_log(self) -> None:
        """For the next ``check_log``: what stands now at the end of what is built."""
        self.witness.remember_tail(self.phy_offset)

    def expire(self, min_phy_offset: int) -> list[str]:
        """The log begins at ``min_phy_offset`` now: drop what only points before it; the names of removed files."""
        self.uncovered = tuple(gap for gap in self.uncovered if gap.end > min_phy_offset)
        expired = self.index.delete_expired_file(min_phy_offset)
        for output in self.beside:
            expired += output.delete_expired(min_phy_offset)
        return expired

    def progress(self) -> Progress:
        """What stands now, for the flusher."""
        return Progress(
            index=self.index.mark(),
            queues=self.queues.mark() if self.queues is not None else None,
            sparse=self.sparse.mark() if self.sparse is not None else None,
            begin_offset=self.begin_offset,
            phy_offset=self.phy_offset,
            store_timestamp=self.store_timestamp,
            messages=self.messages,
            newest_timestamp=self.newest_timestamp,
            stale_head=self.stale_head,
            uncovered=self.uncovered,
            evidence=self.witness.points(),
        )

    def flush(self) -> None:
        """Bring the open files into the form a clean stop leaves."""
        self.index.flush()

    def synced(self, progress: Progress) -> None:
        """``progress`` is durable: what is full there is closed, and what no frontier names any more is removed."""
        names = {mark.name for mark in progress.index.files if mark.full}
        self.index.synced(tuple(file for file in progress.index.unsynced if file.path.name in names))
        self.index.remove_expired(progress.index.expired)
        if self.queues is not None and progress.queues is not None:
            self.queues.synced(progress.queues)
            self.queues.remove_expired(progress.queues.expired)
        if self.sparse is not None and progress.sparse is not None:
            self.sparse.synced(progress.sparse)
            self.sparse.remove_expired(progress.sparse.expired)

    def close(self) -> None:
        """Close what is open; writes nothing."""
        self.index.close()
        for output in self.beside:
            output.close()


Item = DispatchBatch | Skipped


class Building:
    """``apply``, ``persisted`` and ``finish`` belong to the building thread, ``persist`` to any one other.

    ``progress`` is what a ``persist`` may be given: all that has been built, published. Raises DiskError.
    """

    def __init__(self, outputs: Outputs, flusher: Flusher) -> None:
        self.outputs = outputs
        self.flusher = flusher
        self.progress = outputs.progress()

    def __repr__(self) -> str:
        return f"Building({self.outputs}, {self.flusher})"

    def apply(self, items: list[Item], log_begin: int) -> list[str]:
        """Build ``items`` and drop what only points before ``log_begin``; the names of files that can go.

        Items that are done are removed, so that after a DiskError the same list goes on where it failed.
        """
        try:
            while items:
                self.outputs.apply(items[0])
                items.pop(0)
        except DiskError:
            # What was built before the disk failed can be found, and made durable, while it waits.
            self.progress = self.outputs.progress()
            raise
        expired = self.outputs.expire(log_begin)
        self.progress = self.outputs.progress()
        return expired

    def persist(self, progress: Progress) -> None:
        """Make ``progress`` durable; tell ``persisted`` afterwards. A failed fsync must end the process."""
        self.flusher.persist(progress)

    def persisted(self, progress: Progress) -> None:
        """Close what is durable to its end and remove what no frontier names any more.

        Building has gone on meanwhile: a file that was open in ``progress`` may be full by now, but not durable to its
        end; and what is to be persisted next was marked before these files are closed.
        """
        self.outputs.synced(progress)
        self.progress = self.progress.without(progress)

    def finish(self) -> None:
        """Bring everything into the form a clean stop leaves, durably, and close it."""
        self.outputs.flush()
        progress = self.outputs.progress()
        self.persist(progress)
        self.outputs.synced(progress)
        self.outputs.close()
