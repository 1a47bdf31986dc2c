"""Keeps the figures of a running daemon (lag, events, DATA/state), and watches its data directory for others' changes.

LagMeter: how far what can be found is behind the log, in bytes, milliseconds and messages; any thread, no locks. Each
figure is read once, what is built before what waits and what waits before what was read; so nothing is counted
negative, and what passes from one to the other meanwhile is counted as behind.

DATA/state says where the daemon stands. It is replaced whole at every drain and never synced. It is believed only while
the process that wrote it holds the lock of the directory: after a crash the frontier alone counts.

Index files that somebody else removed, cut, replaced or wrote are for recovery to mend: DisturbedError. So are files of
queues and of sparse indexes that were removed or cut, and their newest ones if they were replaced; there may be
thousands, so a few are looked at each time. What the daemon can make again at once, it does: the abort flag, the lock;
frontier and checkpoint with the next flush.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from indexd.commitlog.batcher import UNREADABLE_TIMESTAMP
from indexd.commitlog.format import Corrupt
from indexd.commitlog.reader import LogReader, Skipped
from indexd.consumequeue.format import UNIT_SIZE, QueuesMark, file_name, queue_directory
from indexd.dispatch.reput import DispatchQueue, Item, ReputState, oldest_timestamp
from indexd.errors import DiskError, DisturbedError, IndexdError
from indexd.flush.frontier import Frontier, write_abort
from indexd.flush.pipeline import Pipeline
from indexd.serve.daemon_status import Histogram, Row
from indexd.service.instance import Logger
from indexd.sparse.format import (
    OFFSET_ENTRY_SIZE,
    TIME_ENTRY_SIZE,
    SparseMark,
    index_name,
    time_index_name,
)
from indexd.storage.disk import Disk, Stamp
from indexd.storage.names import DataFiles

# The tail loop looks many times a second; if it has not for so long, the log may have gone on unseen.
_FRESH_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Lag:
    """``log_end``: how far the log goes, as far as is known; the rest is behind it, ``milliseconds`` by the clock."""

    log_end: int
    bytes: int
    milliseconds: int
    messages: int


class LagMeter:
    """What is known of the log's end and of what is on its way; ``measure`` makes a Lag of it."""

    def __init__(self, messages: int, clock: Callable[[], float] = time.time) -> None:
        #: Messages that were built before the reader began.
        self._messages = messages
        self._clock = clock
        self._started = clock()
        #: The log's end by a look that did not read it; the reader's own look is exact and counts when it is there.
        self.seen_end = 0
        #: Where whole messages stand that the reader may not believe, for some time; None: nowhere.
        self.held_at: int | None = None
        # When the reader last stood at the end of the log, and when it looked at all; Unix time.
        self._at_end = 0.0
        #: The reader's last look found it at the end of the log.
        self.is_at_end = False
        self._is_waiting = False
        self._looked = self._started
        # The store timestamp of the first message that is being built.
        self._taken: int | None = None

    @property
    def is_waiting(self) -> bool:
        """The reader's last look, just now, found nothing that it may take."""
        return self._is_waiting and self._clock() - self._looked <= _FRESH_SECONDS

    def looked(self, position: int, *, is_at_end: bool) -> None:
        """The reader has looked at the log and stands at ``position``; in its thread.

        It is not at the end where it is held.
        """
        self._looked = now = self._clock()
        self._is_waiting = is_at_end
        self.is_at_end = is_at_end and position != self.held_at
        if self.is_at_end:
            self._at_end, self.seen_end = now, position

    def take(self, items: list[Item]) -> None:
        """These are being built; none: all that was taken is."""
        self._taken = oldest_timestamp(items)

    def measure(self, built: Frontier, queue: DispatchQueue, reader: LogReader, reput: ReputState) -> Lag:
        """How far ``built`` is behind.

        Exact while the reader stands at the end of the log. While it is behind, the bytes are those up to
        ``seen_end``; the milliseconds are at most: since it last stood at the end or, if that is later, since the
        newest message that it read; and what it has not read counts as messages of the size of those it has read.
        """
        known = [stamp for stamp in (self._taken, queue.waiting.store_timestamp) if stamp is not None]
        counters, position, newest = reader.counters, reader.position, reader.newest_timestamp
        if newest == UNREADABLE_TIMESTAMP:
            newest = reader.last_timestamp
        read_messages, read_bytes = counters.messages, counters.bytes
        now = self._clock()
        end = max(self.seen_end, position)
        behind = max(end - built.phy_offset, 0)
        messages = max(self._messages + read_messages - built.messages, 0)
        if end > position and read_bytes:
            messages += round((end - position) * read_messages / read_bytes)
        if known and behind:  # else they were built a moment ago
            millis = int(now * 1000) - min(known)
        elif (
            end > position
            or (behind > 0 and not self.is_at_end)  # what was read a moment ago is not waiting yet
            or reput.problem is not None
            or now - self._looked > _FRESH_SECONDS
        ):
            since = max(self._at_end, newest / 1000, 0.0) or self._started
            millis = int((now - since) * 1000)
        else:
            millis = 0
        return Lag(end, behind, max(millis, 0), messages)


class EventReporter:
    """Says what the stages meet, each once, and counts it; plain figures, written by one thread each.

    ``log`` says which logger: a HUP makes another.
    """

    def __init__(self, log: Callable[[], Logger]) -> None:
        self._log = log
        #: Stage -> what keeps it waiting; replaced whole.
        self.problems: Mapping[str, IndexdError] = {}
        #: Times that the reader came to stand at bytes that are no frame.
        self.corrupt_found = 0
        self._left_out: set[str] = set()
        self._is_state_written = True
        self._stalled: frozenset[str] = frozenset()

    def problem(self, stage: str, error: IndexdError | None, retry_seconds: float = 0.0) -> None:
        """A stage has to wait, or (None) goes on; on the event loop."""
        others = {name: known for name, known in self.problems.items() if name != stage}
        if error is not None:
            self.problems = {**others, stage: error}
            self._log().error("degraded", stage=stage, problem=error.line(), retry_seconds=retry_seconds)
        elif stage in self.problems:
            self.problems = others
            self._log().info("healed", stage=stage)

    def log_event(self, event: Corrupt | Skipped | None, position: int) -> None:
        """The reader met this, or (None) has left what it stood at, and is at ``position`` now."""
        if event is None:
            self._log().info("corrupt_left", offset=position)
        elif isinstance(event, Corrupt):
            self.corrupt_found += 1
            hint = "indexing waits here and reads again; --on-corrupt skip goes on at the next proven frame"
            self._log().error("corrupt", offset=event.offset, file=str(event.path), reason=event.reason, hint=hint)
        else:
            given = {"begin": event.begin, "end": event.end, "bytes": event.end - event.begin}
            self._log().warning("skipped", **given, reason=event.reason)

    def left_out(self, reasons: Mapping[str, int]) -> None:
        """Once a reason, when the first such message comes; how many there are stands in the state."""
        for reason in {reason for reason, count in reasons.items() if count} - self._left_out:
            self._left_out.add(reason)
            self._log().warning("left_out", reason=reason, hint="it is found by key, and in no consume queue")

    def state_written(self, error: IndexdError | None) -> None:
        """DATA/state was written, or not: queries then go by the frontier. Said once, not at every drain."""
        if error is not None and self._is_state_written:
            self._log().error("state_not_written", problem=error.line())
        self._is_state_written = error is None

    def stalled(self, stages: Mapping[str, float]) -> None:
        """These do not move, since so many seconds; said when others do than before."""
        names = frozenset(stages)
        if names - self._stalled:
            self._log().error("stalled", stages=sorted(names), seconds=max(stages.values()))
        elif self._stalled and not names:
            self._log().info("moves_again", stages=sorted(self._stalled))
        self._stalled = names


class DaemonState:
    """The figures of one opened data directory. ``row`` may be called from any thread at any time.

    Everything it looks at is a number, or an object that is replaced and never changed.
    """

    def __init__(
        self,
        reader: LogReader,
        pipeline: Pipeline,
        queue: DispatchQueue,
        reput: ReputState,
        reporter: EventReporter,
        drains: Histogram,
    ) -> None:
        self.pipeline, self.reput, self.reporter = pipeline, reput, reporter
        self._reader, self._queue, self._drains = reader, queue, drains
        self.meter = LagMeter(pipeline.built.messages)

    def row(self) -> Row:
        """The object that is written: of what is built only what is published, so that a query can rely on it."""
        pipeline, reader, reporter, waiting = self.pipeline, self._reader, self.reporter, self._queue.waiting
        corrupt, is_held = self.reput.corrupt, self.meter.held_at == reader.position
        built, frontier = pipeline.progress.frontier, pipeline.frontier
        begin, position, read = reader.log.min_offset or 0, reader.position, reader.counters
        lag = self.meter.measure(built, self._queue, reader, self.reput)
        return {
            **{key: value for output in pipeline.outputs for key, value in output.figures().items()},
            "pid": os.getpid(),
            "writtenAt": int(time.time() * 1000),
            "beginOffset": built.begin_offset,
            "phyOffset": built.phy_offset,
            "filledOffset": built.filled_offset,
            "storeTimestamp": built.store_timestamp,
            "durableOffset": frontier.phy_offset,
            "readOffset": position,
            "commitLogMinOffset": begin,
            "commitLogMaxOffset": lag.log_end,
            "caughtUp": self.reput.caught_up and not is_held and not reader.is_undecided,
            "dispatchBehindBytes": lag.bytes,
            "dispatchBehindMilliseconds": lag.milliseconds,
            "dispatchBehindMessages": lag.messages,
            "outputs": self._outputs(built, frontier, lag),
            "messages": built.messages,
            "flushes": pipeline.flushes,
            "lastFlushMilliseconds": round(pipeline.last_seconds * 1000, 3) if pipeline.flushes else None,
            "queueRows": waiting.rows,
            "queueBytes": waiting.bytes,
            "queueOldestMilliseconds": int(1000 * (time.monotonic() - waiting.since)) if waiting.since else 0,
            "readMessages": read.messages,
            "readBytesTotal": read.bytes,
            "expiredBytes": read.expired_bytes,
            "corruptBytes": read.corrupt_bytes,
            "skippedBytes": read.expired_bytes + read.corrupt_bytes,
            # Those that were stood at, and those that were passed over at once.
            "corruptRecords": reporter.corrupt_found + read.corrupt_found,
            "drains": self._drains.count,
            "lastDrainMilliseconds": round(self._drains.last * 1000, 3) if self._drains.count else None,
            "uncovered": [[gap.begin, gap.end, gap.reason] for gap in built.uncovered],
            "staleHead": None if built.stale_head is None else built.stale_head.hex(),
            "uncoveredBytes": sum(max(gap.end - max(gap.begin, begin), 0) for gap in built.uncovered),
            "corrupt": None if corrupt is None else {"offset": corrupt.offset, "reason": corrupt.reason},
            "problems": {stage: error.line() for stage, error in reporter.problems.items()},
        }

    def _outputs(self, built: Frontier, frontier: Frontier, lag: Lag) -> list[Row]:
        # A batch goes through all outputs before any progress is published, so they are behind alike.
        rows: list[Row] = []
        for output in self.pipeline.outputs:
            offsets = (built.filled_offset, frontier.filled_offset) if rows else (built.phy_offset, frontier.phy_offset)
            rows.append(
                {
                    "output": output.label,
                    "phyOffset": offsets[0],
                    "durableOffset": offsets[1],
                    **output.totals(built.outputs[output.name]),
                    "behindBytes": max(lag.log_end - offsets[0], 0),
                    "behindMilliseconds": lag.milliseconds,
                    "behindMessages": lag.messages,
                }
            )
        return rows


def write_state(disk: Disk, files: DataFiles, row: Row) -> None:
    """Replace DATA/state; raises DiskError."""
    disk.write_atomically(files.state, json.dumps(row).encode() + b"\n", durable=False)


M = TypeVar("M")

# Queues, and segments, that one look takes.
_LOOKS = 16


class DirectoryWatch:
    """Looks once a drain, in the building thread, when nothing is being written. Raises DiskError."""

    def __init__(self, disk: Disk, files: DataFiles, frontier: Frontier) -> None:
        self._disk = disk
        self._files = files
        self._file_size = frontier.layout.file_size
        # What is looked at next, by kind.
        self._turns: dict[str, int] = {}
        # Of each kind of file and of each queue the newest file and its inode, at the last look.
        self._newest: dict[str, tuple[Path, int]] = {}

    def check_index(self, pipeline: Pipeline) -> None:
        """Every file that was built must be as it was left after the last drain."""
        marks = pipeline.progress.frontier.index
        for mark in marks:
            path = self._files.index / mark.name
            stamp = self._check(path, self._file_size, "index" if mark is marks[-1] else None)
            if mark.mtime_ns and stamp.mtime_ns != mark.mtime_ns:
                raise DisturbedError(f"{path} was written by somebody else")

    def check_beside(self, pipeline: Pipeline) -> None:
        """The files of some queues and segments, in turn, must be there in their size."""
        frontier = pipeline.progress.frontier
        queues = frontier.queues_mark or QueuesMark(0)
        size = queues.file_size
        for mark in self._next("queues", queues.queues):
            directory = queue_directory(self._files.consumequeue, mark.topic, mark.queue_id)
            first, end = mark.first_offset * UNIT_SIZE, mark.max_offset * UNIT_SIZE
            for begin in range(first // size * size, end, size):
                self._check(directory / file_name(begin), size, str(directory) if begin + size >= end else None)
        sparse = frontier.sparse or SparseMark(0)
        growing = () if sparse.active is None else sparse.segments[-1:]
        for segment in (*self._next("segments", sparse.sealed), *growing):
            for name, entries_size in (
                (index_name(segment.base), segment.offset_entries * OFFSET_ENTRY_SIZE),
                (time_index_name(segment.base), segment.time_entries * TIME_ENTRY_SIZE),
            ):
                path = self._files.sparse / name
                self._check(path, entries_size, path.suffix if segment in growing else None)

    def restore(self, pipeline: Pipeline) -> list[str]:
        """Put back what is missing; the names. Of ``frontier`` and ``checkpoint`` the caller has to write new ones."""
        gone = []
        if not self._disk.exists(self._files.abort):
            write_abort(self._disk, self._files.abort)
            gone.append(self._files.abort.name)
        written = pipeline.written
        stamps = self._disk.stamps(self._files.data)
        if pipeline.written is written:  # else they are being replaced right now
            gone += [name for name, stamp in written.items() if stamps.get(name) != stamp]
        return gone

    def _next(self, what: str, marks: tuple[M, ...]) -> tuple[M, ...]:
        begin = self._turns.get(what, 0)
        self._turns[what] = begin + _LOOKS if begin + _LOOKS < len(marks) else 0
        return marks[begin : begin + _LOOKS]

    def _check(self, path: Path, size: int, newest_of: str | None) -> Stamp:
        # ``newest_of``: a descriptor of it may be open; what is written from now on would be in a file without a name.
        try:
            stamp = self._disk.stamp(path)
        except DiskError as error:
            if not error.is_missing:
                raise
            raise DisturbedError(f"{path} was removed by somebody else") from None
        if stamp.size < size:
            raise DisturbedError(f"{path} was cut to {stamp.size} bytes by somebody else")
        if newest_of is not None:
            before = self._newest.get(newest_of)
            self._newest[newest_of] = (path, stamp.inode)
            if before is not None and before[0] == path and before[1] != stamp.inode:
                raise DisturbedError(f"{path} was replaced by somebody else")
        return stamp
