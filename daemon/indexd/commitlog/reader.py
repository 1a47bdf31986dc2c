"""LogReader: from a position of the log to the next DispatchBatch, or the reason why there is none.

The log is another process's memory. A segment behind which another one is in use is closed: its frames are read once.
In the segment being written only that is taken which cannot change any more (ARCHITECTURE.md, decision 3): first the
heads are walked, then everything before the last head is read again, CRC and all; the last frame itself counts when a
second read after the settle time is identical. What stands in the log is returned; only a store that must not be read
at all is raised.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from indexd.commitlog.dispatch import DispatchBatch, TopicTable, make_columns, trimmed
from indexd.commitlog.format import (
    BLANK_SIZE,
    FLAG_BORN_HOST_V6,
    FLAG_STORE_HOST_V6,
    HEAD_SIZE,
    MAGIC_V1,
    Corrupt,
    NotYetWritten,
    Outcome,
    Reason,
)
from indexd.commitlog.kernel import Rules, decode_frames, find_frame, last_head
from indexd.commitlog.segments import Segment, SegmentList, list_segments
from indexd.errors import DiskError, UnsafeStoreError
from indexd.storage.disk import Disk, DiskFile

_U64 = np.uint64
# A frame whose topic or properties hold a NUL may be one whose last bytes are not there yet: wait this much longer.
_NUL_SETTLE_FACTOR = 20
# How much is searched for a head ahead of the position while catching up: longer than most frames.
_PROBE_SIZE = 32 << 10


@dataclass(frozen=True, slots=True)
class Skipped:
    """``[begin, end)`` of the log was passed over: it expired, it is missing, or it is corrupt and policy says skip."""

    begin: int
    end: int
    reason: str


Poll = DispatchBatch | NotYetWritten | Corrupt | Skipped


@dataclass(frozen=True, slots=True)
class ReaderOptions:
    """How the reader reads; times in seconds, sizes in bytes."""

    segment_size: int
    read_size: int = 4 << 20
    rows_max: int = 65536
    settle: float = 0.05
    corrupt_after: float = 5.0
    skip_corrupt: bool = False
    verify_crc: bool = False
    #: CRC of every frame of the segment being written; a rebuild leaves it to the newest frame.
    check_tail: bool = True
    list_interval: float = 10.0


@dataclass(slots=True)
class ReaderCounters:
    """What the reader met; plain numbers that only grow."""

    messages: int = 0
    bytes: int = 0
    segments_opened: int = 0
    segments_twice: int = 0
    expired_bytes: int = 0
    corrupt_bytes: int = 0
    corrupt_found: int = 0
    settled: int = 0


@dataclass(slots=True)
class _Pending:
    """Bytes at the end of the log that have to prove themselves by not changing."""

    offset: int = -1
    data: bytes = b""
    since: float = 0.0
    is_frame: bool = False


class LogReader:
    """Reads on from ``position``; one owner, no locks. ``rules.check_crc`` is set per segment here."""

    def __init__(
        self,
        disk: Disk,
        directories: tuple[Path, ...],
        rules: Rules,
        options: ReaderOptions,
        position: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._disk = disk
        self._directories = directories
        self._checked_rules = rules._replace(check_crc=True)
        self._fast_rules = rules._replace(check_crc=False)
        self._options = options
        self._clock = clock
        self.position = position
        self.counters = ReaderCounters()
        self.topics = TopicTable()
        self.log = SegmentList((), ())
        self.refresh_due = 0.0
        #: Segments that end at or below this are CRC-checked too: recovery reads the log as RocketMQ's does.
        self.check_until = 0
        self._segment: Segment | None = None
        self._file: DiskFile | None = None
        self._closed_segment = False
        self._buffer = np.empty(options.read_size, dtype=np.uint8)
        self._columns = make_columns(options.rows_max, 8 * options.rows_max)
        self._pending = _Pending()
        # Frames before this were complete when a head behind them was seen.
        self._complete_until = 0
        # The last batch filled the buffer, so there is more: the reader is catching up.
        self._is_streaming = False
        self._probe = np.empty(_PROBE_SIZE, dtype=np.uint8)

    def __repr__(self) -> str:
        name = self._segment.path.name if self._segment else None
        return f"LogReader(position={self.position}, segment={name}, closed={self._closed_segment}, {self.counters})"

    def poll(self) -> Poll:
        """The next stretch of the log. A DispatchBatch moves ``position`` behind it; so does Skipped."""
        if self._clock() >= self.refresh_due:
            self.refresh()
        if self._segment is None or not self._segment.base <= self.position < self._segment.end:
            problem = self._open_segment()
            if problem is not None:
                return problem
        assert self._segment is not None
        if not self._closed_segment:
            self._closed_segment = self._next_is_in_use()
        return self._read_closed() if self._closed_segment else self._read_tail()

    def set_options(self, options: ReaderOptions) -> None:
        """Read on with other options; the segment size must stay."""
        self._options = options

    @property
    def is_settling(self) -> bool:
        """A whole frame stands at ``position`` and only has to stay as it is for the settle time."""
        return self._pending.is_frame and self._pending.offset == self.position

    def refresh(self) -> None:
        """List the segments again: new ones, expired ones."""
        self.log = list_segments(self._disk, self._directories, self._options.segment_size)
        self.counters.segments_twice = len(self.log.twice)
        self.refresh_due = self._clock() + self._options.list_interval

    def close(self) -> None:
        """Close the open segment."""
        if self._file is not None:
            self._file.close()
        self._file = self._segment = None

    # Finding the segment.

    def _open_segment(self) -> NotYetWritten | Corrupt | Skipped | None:
        self.close()
        segment = self.log.at(self.position)
        if segment is None:
            self.refresh()
            segment = self.log.at(self.position)
        if segment is None:
            return self._no_segment()
        try:
            self._file = self._disk.open_read(segment.path)
        except DiskError as error:
            if not error.is_missing:
                raise
            # It expired between the listing and the opening.
            self.refresh()
            return NotYetWritten(self.position)
        self._segment = segment
        self._closed_segment = False
        self._complete_until = 0
        self._pending = _Pending()
        self.counters.segments_opened += 1
        return None

    def _no_segment(self) -> NotYetWritten | Corrupt | Skipped:
        first = self.log.min_offset
        if first is None:
            return NotYetWritten(self.position)
        if self.position < first:
            self.counters.expired_bytes += first - self.position
            return self._skip_to(first, "the log begins behind it: its segments have expired")
        later = self.log.after(self.position)
        if later is None:
            if self.position > self.log.segments[-1].end:
                raise UnsafeStoreError(
                    f"the log ends at {self.log.segments[-1].end}, before {self.position} which is already indexed",
                    "if this is another store or its log was cut, give a fresh --data, or remove the old one",
                )
            return NotYetWritten(self.position)
        if not self._options.skip_corrupt:
            return self._corrupt(f"the segments between here and {later.path} are missing", None)
        self.counters.corrupt_bytes += later.base - self.position
        return self._skip_to(later.base, "segments are missing")

    def _next_is_in_use(self) -> bool:
        assert self._segment is not None
        later = self.log.after(self._segment.end)
        if later is None:
            return False
        try:
            with self._disk.open_read(later.path) as file:
                return any(file.pread(BLANK_SIZE, 0))
        except DiskError as error:
            if not error.is_missing:
                raise
            self.refresh()
            return False

    # Reading.

    def _fill(self, size: int) -> int:
        # Bytes of the log at hand from the position on, at most ``size`` of them.
        assert self._segment is not None
        assert self._file is not None
        size = min(size, self._segment.end - self.position)
        if size > len(self._buffer):
            self._buffer = np.empty(size, dtype=np.uint8)
        return self._file.pread_into(self._buffer[:size].data, self.position - self._segment.base)

    def _decode(self, limit: int, rules: Rules) -> tuple[Outcome, Reason, int, int, DispatchBatch | None]:
        # Frames of the buffer up to ``limit`` bytes; (outcome, reason, bytes taken, total of the next, batch).
        assert self._segment is not None
        while True:
            outcome, reason, taken, total, rows, keys = decode_frames(
                self._buffer,
                _U64(0),
                _U64(limit),
                _U64(self.position),
                _U64(self._segment.end),
                rules,
                self._columns,
                self.topics.arrays,
            )
            if outcome != Outcome.BATCH_FULL or rows:
                break
            self.topics = self.topics.grown()
        taken, rows = int(taken), int(rows)
        batch = None
        if rows:
            columns = trimmed(self._columns, rows, int(keys))
            batch = DispatchBatch(columns, rows, self.position, self.position + taken, self.topics)
        return Outcome(outcome), Reason(reason), taken, int(total), batch

    def _take(self, batch: DispatchBatch) -> DispatchBatch:
        self.counters.messages += batch.rows
        size = batch.end_offset - batch.begin_offset
        self.counters.bytes += size
        self._is_streaming = 2 * size >= self._options.read_size
        self.position = batch.end_offset
        return batch

    def _read_closed(self) -> Poll:
        assert self._segment is not None
        checked = self._options.verify_crc or self._segment.end <= self.check_until
        rules = self._checked_rules if checked else self._fast_rules
        size = self._options.read_size
        while True:
            limit = self._fill(size)
            outcome, reason, _, total, batch = self._decode(limit, rules)
            if batch is not None:
                return self._take(batch)
            if outcome is Outcome.END_OF_FILE:
                return self._end_of_segment()
            at_end = self.position + limit >= self._segment.end
            if outcome is Outcome.NOT_YET_WRITTEN and total > limit and not at_end:
                size = total
                continue
            if outcome is Outcome.NOT_YET_WRITTEN:
                reason = Reason.CUT_OFF if total or limit < BLANK_SIZE else Reason.ZEROS_BEFORE_END
            return self._meet_corrupt(reason)

    def _read_tail(self) -> Poll:
        assert self._segment is not None
        rules = self._checked_rules if self._options.check_tail or self._options.verify_crc else self._fast_rules
        if self.position >= self._complete_until:
            batch = self._read_up_to_probe(rules)
            if batch is not None:
                return self._take(batch)
            limit = self._fill(self._options.read_size)
            end, largest = _U64(self._segment.end), self._checked_rules.frame_size_max
            head = int(last_head(self._buffer, _U64(0), _U64(limit), _U64(self.position), end, largest))
            if head == 0:
                return self._read_newest(limit)
            # Heads behind them: these frames are complete by now, so read what they are NOW.
            self._complete_until = self.position + head
        whole = self._complete_until - self.position
        limit = self._fill(min(whole, self._options.read_size))
        _, reason, _, total, batch = self._decode(limit, rules)
        if batch is None and limit < total <= whole:
            _, reason, _, _, batch = self._decode(self._fill(total), rules)
        return self._take(batch) if batch is not None else self._doubt(reason, min(limit, HEAD_SIZE))

    def _read_up_to_probe(self, rules: Rules) -> DispatchBatch | None:
        # While much is left to read, one read is enough: look for a head some MiB ahead FIRST, then read up to it. If
        # the frames lead exactly there, that head is theirs, and they were complete when it was seen.
        assert self._segment is not None
        assert self._file is not None
        at = self.position + self._options.read_size - _PROBE_SIZE
        if not self._is_streaming or at + _PROBE_SIZE > self._segment.end:
            return None
        count = self._file.pread_into(self._probe.data, at - self._segment.base)
        head = at + int(find_frame(self._probe, _U64(0), _U64(count), _U64(at)))
        if head < at + count:
            limit = self._fill(head - self.position)
            _, _, taken, _, batch = self._decode(limit, rules)
            if self.position + taken == head:
                return batch
        return None

    def _read_newest(self, limit: int) -> Poll:
        # Nothing is known to stand behind the frame at the position.
        outcome, reason, taken, total, batch = self._decode(limit, self._checked_rules)
        if outcome is Outcome.NOT_YET_WRITTEN and batch is None and total > limit:
            limit = self._fill(total)
            outcome, reason, taken, total, batch = self._decode(limit, self._checked_rules)
        if batch is not None:
            return self._settle(batch, taken)
        if outcome is Outcome.END_OF_FILE:
            return self._end_of_segment()
        if outcome is Outcome.CORRUPT:
            return self._doubt(reason, min(limit, max(total, HEAD_SIZE)))
        self._pending = _Pending()
        return NotYetWritten(self.position)

    def _end_of_segment(self) -> Poll:
        assert self._segment is not None
        self.position = self._segment.end
        self._pending = _Pending()
        self.close()
        return self.poll()

    # The end of the log, where the writer is.

    def _settle(self, batch: DispatchBatch, taken: int) -> DispatchBatch | NotYetWritten:
        # The newest frame: no CRC covers its topic and properties, so it must stay as it is for a while.
        data = self._buffer[:taken].tobytes()
        settle = self._options.settle
        if _has_nul(data, batch):
            settle *= _NUL_SETTLE_FACTOR
        if not self._unchanged_for(data, settle):
            self._pending.is_frame = True
            return NotYetWritten(self.position)
        self.counters.settled += 1
        return self._take(batch)

    def _doubt(self, reason: Reason, size: int) -> Poll:
        # Bytes that are no frame, where a frame may be half written: corrupt only when they stay so.
        data = self._buffer[:size].tobytes()
        if reason is not Reason.DLEDGER and not self._unchanged_for(data, self._options.corrupt_after):
            return NotYetWritten(self.position)
        return self._meet_corrupt(reason)

    def _unchanged_for(self, data: bytes, seconds: float) -> bool:
        pending, now = self._pending, self._clock()
        if pending.offset != self.position or pending.data != data:
            self._pending = _Pending(self.position, data, now)
            return False
        return now - pending.since >= seconds

    # Corruption.

    def _meet_corrupt(self, reason: Reason) -> Corrupt | Skipped:
        assert self._segment is not None
        path = self._segment.path
        if reason is Reason.DLEDGER:
            raise UnsafeStoreError(
                f"{path} is a DLedger log, which is not read",
                "point --store at a broker that runs without enableDLegerCommitLog",
            )
        if self._options.skip_corrupt:
            target = self._next_proven()
            if target is not None:
                self.counters.corrupt_found += 1
                self.counters.corrupt_bytes += target - self.position
                return self._skip_to(target, reason.text)
        return self._corrupt(reason.text, path)

    def _corrupt(self, reason: str, path: Path | None) -> Corrupt:
        return Corrupt(self.position, reason, path)

    def _next_proven(self) -> int | None:
        # The offset of the next frame that proves itself, or the next segment; None at the open end of the log.
        assert self._segment is not None
        begin, window = self.position, self._options.read_size
        try:
            self.position += 1
            while self.position < self._segment.end:
                limit = self._fill(window)
                at = int(find_frame(self._buffer, _U64(0), _U64(limit), _U64(self.position)))
                if at >= limit:
                    # Heads that straddle two windows are found in the second.
                    self.position += max(limit - HEAD_SIZE + 1, 1)
                    continue
                self.position += at
                limit = self._fill(window)
                outcome, _, _, total, batch = self._decode(limit, self._checked_rules)
                if batch is None and outcome is Outcome.NOT_YET_WRITTEN and total > limit:
                    _, _, _, _, batch = self._decode(self._fill(total), self._checked_rules)
                if batch is not None:
                    return self.position
                self.position += 1
            return self._segment.end if self._closed_segment else None
        finally:
            self.position = begin

    def _skip_to(self, target: int, reason: str) -> Skipped:
        skipped = Skipped(self.position, target, reason)
        self.position = target
        self._pending = _Pending()
        return skipped


def _has_nul(data: bytes, batch: DispatchBatch) -> bool:
    # A NUL in topic or properties, which no CRC need cover: a sane producer sends none, preallocated bytes are all NUL.
    flags = int(batch.columns.sys_flag[0])
    body = 72 + (20 if flags & FLAG_BORN_HOST_V6 else 8) + (20 if flags & FLAG_STORE_HOST_V6 else 8)
    topic_size = body + max(int.from_bytes(data[body - 4 : body], "big", signed=True), 0)
    topic = topic_size + (1 if int.from_bytes(data[4:8], "big") == MAGIC_V1 else 2)
    topic_end = topic + int.from_bytes(data[topic_size:topic], "big")
    return b"\0" in data[topic:topic_end] or b"\0" in data[topic_end + 2 :]
