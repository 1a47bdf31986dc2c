"""Pipeline: all outputs of one data directory, from a batch of the log to durable files and a frontier that names them.

OUTPUTS says which outputs there are. A batch goes through every one before the position moves, so what is marked covers
what is in all of them. What is marked is made durable by another thread while building goes on: first the files, then
the checkpoint, then the frontier (ARCHITECTURE.md, decision 5).

LogChangeDetector notes single frames of what is built, and tells when the log no longer holds them (decision 7).
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np

from indexd import __version__
from indexd.commitlog.batcher import UNREADABLE_TIMESTAMP, DispatchBatch
from indexd.commitlog.lookup import WATCHED_SIZE, Evidence, FrameReader, RangeChecksum, newest, thinned
from indexd.commitlog.reader import Skipped
from indexd.commitlog.segments import Segment, SegmentList
from indexd.config import Config
from indexd.consumequeue.store import ConsumeQueueStore
from indexd.errors import DiskError, DisturbedError, MissingStoreError
from indexd.flush.frontier import DOUBTED, UNPROVEN, Frontier, StoreCheckpoint, Uncovered, add_uncovered, write_frontier
from indexd.index.file import IndexService
from indexd.output import Output, OutputMark
from indexd.sparse.service import SparseService
from indexd.storage.disk import Disk, Stamp
from indexd.storage.names import DataFiles

Item = DispatchBatch | Skipped
#: The key index is the first: where it stands, all others are to stand. Another output is one more line here.
OUTPUTS: tuple[type[Output[Any]], ...] = (
    IndexService,
    ConsumeQueueStore,
    SparseService,
)

# So many files are synced one after the other; of more, so many at once.
_MANY = 64
_SYNC_THREADS = 8
# Frames are noted at least so far apart, but for the last one of all: catching up must not wait for reads.
NOTE_EVERY = 64 << 10
_POINTS_MAX = 8192
# And it looks at every byte of the newest ones: there a log that is cut by a little is written on.
_TAIL_SIZE = 256 << 10
# Of the points each look takes only one in so many, in turn: an idle daemon is to stay idle.
_TURNS = 4
# The first frame of so many segments is kept, however close they lie.
_SEGMENTS_NOTED = 64


@dataclass(frozen=True, slots=True)
class BuildProgress:
    """How far building has come at one moment: the frontier that is true once the files of ``marks`` are durable."""

    frontier: Frontier
    marks: tuple[OutputMark[Any], ...]


class Pipeline:
    """``apply``, ``persisted`` and ``finish`` belong to the building thread, ``persist`` to any one other.

    ``built`` is the frontier as it would be of all that is built, ``progress`` what a ``persist`` may be given,
    published; ``frontier`` is durable. Raises DiskError; one of ``persist`` must end the process if it is an fsync's:
    nothing is known after it.
    """

    def __init__(
        self,
        disk: Disk,
        files: DataFiles,
        outputs: Sequence[Output[Any]],
        frontier: Frontier,
        detector: LogChangeDetector,
    ) -> None:
        self._disk, self._files = disk, files
        self.outputs = tuple(outputs)
        self.frontier = self.built = frontier
        self.detector = detector
        #: Plain numbers for whoever shows them: flushes and files that were synced; seconds that the last flush took.
        self.flushes = self.files_synced = 0
        self.last_seconds = 0.0
        #: When the last scrub that went through everything began, ms: in the next frontier.
        self.scrubbed_at = frontier.scrubbed_at
        #: Name -> stamp of what was written down last; empty while that is being replaced.
        self.written: dict[str, Stamp] = {}
        # How many outputs have the batch that the disk interrupted.
        self._done = 0
        self.progress = self.mark()

    @property
    def index(self) -> IndexService:
        """The first output."""
        index = self.outputs[0]
        assert isinstance(index, IndexService)
        return index

    @property
    def is_ahead(self) -> bool:
        """Whether ``progress`` says more than the frontier, or has files to remove."""
        known, found = self.frontier, self.progress.frontier
        stands = known.phy_offset, known.uncovered, known.stale_head
        has_expired = any(mark.expired for mark in self.progress.marks)
        return has_expired or stands != (found.phy_offset, found.uncovered, found.stale_head)

    def apply(self, items: list[Item], log_begin: int) -> list[str]:
        """Build ``items`` and drop what only points before ``log_begin``; the names of files that can go.

        Items that are done are removed, so that after a DiskError the same list goes on where it failed.
        """
        with missing_is_disturbed(self.outputs):
            try:
                while items:
                    self.build(items[0])
                    items.pop(0)
            except DiskError:
                # What was built before the disk failed can be found, and made durable, while it waits.
                self.progress = self.mark()
                raise
            uncovered = tuple(gap for gap in self.built.uncovered if gap.end > log_begin)
            self.built = replace(self.built, uncovered=uncovered)
            expired = [name for output in self.outputs for name in output.expire(log_begin)]
            self.progress = self.mark()
            return expired

    def build(self, item: Item) -> None:
        """Take the next range of the log. After a DiskError the same item may be given again."""
        if isinstance(item, Skipped):
            if item.is_expired:
                for output in self.outputs:
                    output.begin_anew()
            uncovered = add_uncovered(self.built.uncovered, Uncovered(item.begin, item.end, item.reason))
            self.built = replace(self.built, uncovered=uncovered, phy_offset=item.end, stale_head=None)
            return
        if item.end_offset > self.built.phy_offset:  # else it is built, and only the log could not be looked at
            for output in self.outputs[self._done :]:
                output.build(item)
                self._done += 1
            self._done = 0
            self.built = replace(
                self.built,
                phy_offset=item.end_offset,
                store_timestamp=item.last_store_timestamp or self.built.store_timestamp,
                messages=self.built.messages + item.rows,
            )
        self._note_unproven(item)
        self.detector.saw(item, self.built.messages)

    def _note_unproven(self, batch: DispatchBatch) -> None:
        first = DOUBTED if batch.newest_timestamp == UNREADABLE_TIMESTAMP else UNPROVEN
        reason = next((gap.reason for gap in self.built.uncovered if gap.is_unproven), first)
        uncovered = tuple(gap for gap in self.built.uncovered if not gap.is_unproven)
        if batch.unproven_from is not None:
            uncovered = add_uncovered(uncovered, Uncovered(batch.unproven_from, batch.end_offset, reason))
        newest = self.built.newest_timestamp if batch.newest_timestamp is None else batch.newest_timestamp
        self.built = replace(self.built, uncovered=uncovered, newest_timestamp=newest, stale_head=batch.stale_head)

    def leave_out(self, gap: Uncovered) -> None:
        """A range of what is built already cannot be read any more."""
        gaps = sorted((*self.built.uncovered, gap), key=lambda one: one.begin)
        self.built = replace(self.built, uncovered=reduce(add_uncovered, gaps, ()))

    def mark(self) -> BuildProgress:
        """What stands now."""
        marks = tuple(output.mark() for output in self.outputs)
        held = {output.name: mark.held for output, mark in zip(self.outputs, marks, strict=True)}
        evidence = self.detector.points()
        return BuildProgress(replace(self.built, outputs=held, evidence=evidence, refill_offset=None), marks)

    def persist(self, progress: BuildProgress) -> None:
        """Make ``progress`` durable; ``persisted`` is told afterwards."""
        started = time.monotonic()
        progress = replace(progress, frontier=replace(progress.frontier, scrubbed_at=self.scrubbed_at))
        with missing_is_disturbed(self.outputs):
            for mark in progress.marks:
                sync_files(self._disk, mark.unsynced, self._count)
                # The names after what they name: a file that is found is whole.
                sync_dirs(self._disk, mark.directories)
        self.written = {}
        write_down(self._disk, self._files, progress.frontier)
        self.frontier = progress.frontier
        names = self._files.checkpoint.name, self._files.frontier.name
        self.written = {name: stamp for name, stamp in self._disk.stamps(self._files.data).items() if name in names}
        self.flushes += 1
        self.last_seconds = time.monotonic() - started

    def _count(self) -> None:
        # One by one: whoever watches sees that a long flush goes on.
        self.files_synced += 1

    def persisted(self, progress: BuildProgress) -> None:
        """Close what is durable to its end and remove what no frontier names any more.

        Building has gone on meanwhile: what is to be persisted next was marked before these files are closed.
        """
        for output, mark in zip(self.outputs, progress.marks, strict=True):
            output.synced(mark)

    def finish(self) -> None:
        """Bring everything into the form a clean stop leaves, durably, and close it."""
        with missing_is_disturbed(self.outputs):
            for output in self.outputs:
                output.flush()
            progress = self.mark()
        self.persist(progress)
        self.persisted(progress)
        self.close()

    def close(self) -> None:
        """Close what is open; writes nothing."""
        for output in self.outputs:
            output.close()


def all_outputs(config: Config, disk: Disk, data: Path) -> list[tuple[Output[Any], bool]]:
    """Each, and whether it is asked for; the files of others go."""
    return [(kind.of(config, disk, data / kind.folder), kind.is_wanted(config)) for kind in OUTPUTS]


@contextmanager
def missing_is_disturbed(outputs: Sequence[Output[Any]]) -> Iterator[None]:
    """Raises DisturbedError where something of an output's is not there: nobody would put it back, however long."""
    try:
        yield
    except DiskError as error:
        if not (error.is_missing and any(error.path.is_relative_to(output.directory) for output in outputs)):
            raise
        raise DisturbedError(f"{error.path} was removed by somebody else") from error


def write_down(disk: Disk, files: DataFiles, frontier: Frontier) -> None:
    """Replace the checkpoint, then the frontier; what it names has been synced."""
    disk.write_atomically(files.checkpoint, StoreCheckpoint.of(frontier).pack())
    write_frontier(disk, files.frontier, frontier, __version__)


def sync_files(disk: Disk, files: Sequence[Path], count: Callable[[], object] = lambda: None) -> None:
    """Make files durable; thousands at a time: disks sync several together. ``count`` is called for each, here."""

    def sync(file: Path) -> None:
        with disk.open_write(file) as opened:
            opened.fsync()

    _each(sync, files, count)


def sync_dirs(disk: Disk, paths: Sequence[Path]) -> None:
    """Make the names in directories durable; thousands at a time as well."""
    _each(disk.sync_dir, paths, lambda: None)


def _each(sync: Callable[[Path], None], paths: Sequence[Path], count: Callable[[], object]) -> None:
    with ThreadPoolExecutor(_SYNC_THREADS, "sync") as pool:
        for _ in (map if len(paths) < _MANY else pool.map)(sync, paths):
            count()


class LogChangeDetector:
    """Keeps the evidence of one data directory; ``list_log`` lists the segments as they are now.

    ``points`` are evidence that was kept and is still true, ``tail`` the bytes that it was compared with. Raises
    DisturbedError when the log was cut or rewritten, DiskError when it cannot be read.
    """

    def __init__(
        self,
        disk: Disk,
        list_log: Callable[[], SegmentList],
        points: Iterable[Evidence] = (),
        tail: Iterable[RangeChecksum] = (),
    ) -> None:
        self._disk, self._list_log = disk, list_log
        self._log = SegmentList()
        self._points = list(points)
        # The newest bytes that were built, without a gap or with one.
        self._tail = deque(tail)
        self._turn = 0
        # The newest message that was built: physical offset, store timestamp, messages before it.
        self._newest: tuple[int, int, int] | None = None
        self._trim()

    def saw(self, batch: DispatchBatch, messages: int) -> None:
        """``batch`` is built, and ``messages`` are counted with it."""
        if batch.crc is None:
            self._tail.clear()
        else:
            self._tail.append(RangeChecksum(batch.begin_offset, batch.end_offset, batch.crc))
            self._trim()
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
            # Where the log begins once the segments before have expired: from there on it is compared and counted.
            self._note(*message(0))
        if len(back):
            self._note(*message(int(back[-1])))
            self._note(*message(int(back[-1]) + 1))
        self._newest = message(batch.rows - 1)
        if not self._points or self._newest[0] - self._points[-1].phy_offset >= NOTE_EVERY:
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
        tail: deque[RangeChecksum] = deque()
        for stretch in self._tail:
            if tail:
                tail.extend(self._as_it_stands(tail[-1].end, stretch.begin))
            tail.append(stretch)
        tail.extend(self._as_it_stands(tail[-1].end if tail else 0, end))
        self._tail = tail

    def _as_it_stands(self, begin: int, end: int) -> list[RangeChecksum]:
        # The last bytes of [begin, end), as they are now.
        segment = self._segment_at(end - 1) if begin < end else None
        if segment is None:
            return []
        begin = max(begin, end - _TAIL_SIZE, segment.base)
        with FrameReader(self._disk, self._log) as frames:
            return [RangeChecksum(begin, end, zlib.crc32(frames.read(begin, end)))]

    def check(self) -> None:
        """Look at the newest bytes and at some of the newest points; DisturbedError if the log has changed there."""
        if not self._points:
            return
        self._list()
        with FrameReader(self._disk, self._log) as frames:
            self._check_tail(frames)
            self._turn = (self._turn + 1) % _TURNS
            for point in newest(tuple(self._points), WATCHED_SIZE)[self._turn :: _TURNS]:
                if not self._has_expired(point.phy_offset) and not frames.holds(point):
                    self._doubt(point.phy_offset)

    def _check_tail(self, frames: FrameReader) -> None:
        # What is left of it, joined where it has no gap and is of one segment.
        runs: list[tuple[int, bytearray]] = []
        for begin, end, crc in self._tail:
            if self._has_expired(begin):
                continue
            data = frames.read(begin, end)
            if zlib.crc32(data) != crc:
                self._doubt(begin)
                continue
            first, run = runs[-1] if runs else (-1, bytearray())
            if first + len(run) != begin or self._log.at(first) != self._log.at(begin):
                runs.append((begin, bytearray(data)))
            else:
                run += data
        self._tail.clear()
        for first, run in runs[-2:]:
            end, kept = first + len(run), run[-_TAIL_SIZE:]
            self._tail.append(RangeChecksum(end - len(kept), end, zlib.crc32(kept)))

    def _trim(self) -> None:
        while self._tail and self._tail[-1].end - self._tail[0].end >= _TAIL_SIZE:
            self._tail.popleft()

    def _note(self, phy_offset: int, store_timestamp: int, messages: int) -> None:
        if self._points and self._points[-1].phy_offset >= phy_offset:
            return
        self._segment_at(phy_offset)
        with FrameReader(self._disk, self._log) as frames:
            point = frames.evidence(phy_offset, messages)
        if point is None or point.store_timestamp != store_timestamp:
            self._doubt(phy_offset)
            return
        self._points.append(point)
        if len(self._points) > _POINTS_MAX:
            self._thin()

    def _segment_at(self, phy_offset: int) -> Segment | None:
        if self._log.at(phy_offset) is None:
            self._list()
        return self._log.at(phy_offset)

    def _begins_segment(self, phy_offset: int) -> bool:
        segment = self._segment_at(phy_offset)
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
