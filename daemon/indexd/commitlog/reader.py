"""Reads the commitlog: LogReader goes from a position to the next DispatchBatch, or says why there is none.

The log is another process's memory. A segment behind which another one is in use is closed: its frames are read once.
In the segment being written only that is taken which cannot change any more (ARCHITECTURE.md, decision 3): first the
heads are walked, then everything before the last head is read again, CRC and all; the last frame itself counts when a
second read after the settle time is identical. What stands in the log is returned: messages, an end, what was passed
over, damage. Only a store that must not be read at all is raised.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from indexd.commitlog.batcher import (
    NEVER,
    UNREADABLE_TIMESTAMP,
    Batcher,
    DispatchBatch,
    TailState,
    first_older,
    no_messages,
    tail_state,
    within,
)
from indexd.commitlog.cursor import ReadAhead, SegmentCursor
from indexd.commitlog.decoder import read_head, walk_frame
from indexd.commitlog.format import (
    BLANK_SIZE,
    HEAD_SIZE,
    MAGIC_BLANK,
    MAGIC_V1,
    MAGIC_V2,
    STAMPED_SIZE,
    Corrupt,
    NotYetWritten,
    Outcome,
    Reason,
)
from indexd.commitlog.kernel import Rules, last_head, store_timestamp_at
from indexd.commitlog.segments import NOBODY, LogLimit, SegmentList
from indexd.errors import DisturbedError, UnsafeStoreError
from indexd.storage.disk import Disk


@dataclass(frozen=True, slots=True)
class Skipped:
    """``[begin, end)`` of the log was passed over: it expired, it is missing, or it is corrupt and policy says skip."""

    begin: int
    end: int
    reason: str
    #: It expired, and everything before it.
    is_expired: bool = False


@dataclass(frozen=True, slots=True)
class ReaderOptions:
    """How the reader reads; times in seconds, sizes in bytes."""

    segment_size: int
    read_size: int = 4 << 20
    rows_max: int = 65536
    settle: float = 0.05
    corrupt_after: float = 5.0
    skip_corrupt: bool = False
    #: Frames behind bytes that are none are of the log even if they are older than what stands before: nobody can rule
    #: it out who reads the log once. Else they are what a longer log that was cut has left.
    take_older: bool = False
    verify_crc: bool = False
    #: CRC of every frame of the segment being written; a rebuild leaves it to the newest frame.
    check_tail: bool = True
    #: Threads that read and decode ahead while catching up: for a rebuild, which has the machine to itself.
    workers: int = 0
    list_interval: float = 10.0
    #: Of segments that end so much before the log's last one, the page cache that reading takes is given back.
    drop_behind: int | None = None


@dataclass(slots=True)
class ReaderCounters:
    """What the reader met; plain numbers that only grow."""

    messages: int = 0
    bytes: int = 0
    expired_bytes: int = 0
    corrupt_bytes: int = 0
    corrupt_found: int = 0
    settled: int = 0
    #: Page cache given back.
    dropped_bytes: int = 0


class Settling:
    """The bytes at one offset, and since when they have been as they are."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.clear()

    def clear(self) -> None:
        """Forget: the reader has moved on."""
        self.offset = -1
        self.is_frame = False
        self.data = b""
        self._since = 0.0

    def unchanged_for(self, offset: int, data: bytes, seconds: float, *, is_frame: bool) -> bool:
        """Whether ``data`` has stood at ``offset`` for so long; remembers it otherwise."""
        now = self._clock()
        if self.offset != offset or self.data != data:
            self.offset, self.data, self._since = offset, data, now
        self.is_frame = is_frame
        return self._since < now and now - self._since >= seconds


def has_nul(data: bytes) -> bool:
    """Whether the topic or properties of a whole frame hold a NUL.

    No CRC need cover them; a sane producer sends none, and preallocated bytes are nothing else.
    """
    parts = walk_frame(data, int.from_bytes(data[4:8], "big"))
    return parts is not None and (b"\0" in parts[2] or b"\0" in parts[3])


SEGMENTS_MISSING = "segments are missing"


_U64 = np.uint64
# A frame whose topic or properties hold a NUL may be one whose last bytes are not there yet: wait this much longer.
_NUL_SETTLE_FACTOR = 20
_TAIL_SIZE_MIN = 4096
# So much of what the broker does not know must stay as it is: most frames are shorter.
_STALE_SIZE = 64 << 10
# At a quiet end only the next bytes are looked at, so many times; then everything that may have changed.
_QUIET_LOOKS = 9
# Seconds between two listings of the segments while the reader stands at a blank record.
_NEXT_SEGMENT_SECONDS = 0.1
_SUMMED_SEGMENTS = 3  # where a broker that recovers cuts its log; the newest may be one that it has made ahead

Poll: TypeAlias = DispatchBatch | NotYetWritten | Corrupt | Skipped


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
        self._cursor = SegmentCursor(disk, directories, options.segment_size, options.read_size, options.drop_behind)
        self._checked_rules = rules._replace(check_crc=True)
        self._fast_rules = rules._replace(check_crc=False)
        #: May be replaced by others; the segment size must stay.
        self.options = options
        self._clock = clock
        self.position = position
        self.counters = ReaderCounters()
        self.refresh_due = 0.0
        #: How far the broker vouches for its log, or who is asked about suspects alone.
        self.log_limit: LogLimit = NOBODY
        #: Segments that end at or below this are CRC-checked too, as RocketMQ's own recovery does it.
        self.check_until = 0
        self._is_closed = False
        self._batcher = Batcher(options.rows_max)
        self._settling = Settling(clock)
        # Frames before this were complete when a head behind them was seen.
        self._complete_until = 0
        #: The store timestamp of the newest message that is known to be of the log, not of an older and longer one.
        self.newest_timestamp = NEVER
        #: Where suspects begin that were taken because nobody could be asked about them; None without any.
        self.unproven_from: int | None = None
        #: Of the last message that was taken.
        self.last_timestamp = NEVER
        self._taken_until: int | None = None
        # Nothing before this is a suspect: the broker has named it.
        self._vouched_until = 0
        # What stands where the broker's log ends: where, and how it begins; and what was told of that.
        self._denied: tuple[int, bytes] | None = None
        self._told: tuple[int, bytes] | None = None
        # What was seen is to be looked at once more, or the broker is still to be asked about it.
        self._is_open = False
        # The listing since which it was looked what stands behind a quiet end.
        self._looked_behind = 0.0
        # How much is read at the end of the log: little while it is quiet, as much as there may be when catching up.
        self._tail_size = _TAIL_SIZE_MIN
        self._quiet_looks = 0
        self._ahead = ReadAhead(self._cursor, options.read_size, options.workers)

    @property
    def log(self) -> SegmentList:
        """The segments as they were last listed."""
        return self._cursor.log

    def poll(self) -> Poll:
        """The next stretch of the log. A DispatchBatch moves ``position`` behind it; so does Skipped."""
        self._is_open = False
        if (proven := self._proven()) is not None:
            return proven
        if self._clock() >= self.refresh_due:
            self.refresh()
        elif self._quiet_looks and self._cursor.holds(self.position) and not any(self._head_here()):
            self._quiet_looks -= 1
            return NotYetWritten(self.position)
        self._quiet_looks = 0
        is_entered = not self._cursor.holds(self.position)
        if is_entered:
            self._ahead.stop()
            if not self._cursor.open(self.position):
                return self._meet_gap()
            self._is_closed = False
            self._complete_until = 0
            self._settling.clear()
        if not self._is_closed:
            self._is_closed = self._cursor.next_is_in_use()
            if is_entered and self._is_closed:
                self._cursor.spare_pages()
        limit = self._limit()
        self._vouched_until = limit or 0
        if limit is None or limit >= self._cursor.segment.end:
            return self._read_closed() if self._is_closed else self._read_tail(limit)
        return self._read_tail(limit) if self.position < limit else self._stay()

    def _limit(self) -> int | None:
        # How far the bytes may be believed, asked before those are read that it allows; None: they decide.
        limit = self.log_limit
        vouched = limit.offset if limit.bounds else None
        if limit.bounds and (vouched is None or vouched <= self.position) and any(self._head_here()):
            vouched = limit.ask(self.position, self._head_here())
        if vouched is None and self._denied is not None and self._denied == (self.position, self._head_here()):
            vouched = limit.ask(*self._denied)
            return self.position if vouched is None else vouched  # so it stays while the broker is silent
        return vouched

    def deny(self, head: bytes) -> None:
        """What stands at ``position`` and begins with ``head`` is no message of the log: the broker has said so."""
        self._denied = self._told = self.position, head

    def _stay(self) -> DispatchBatch | NotYetWritten:
        # Where the log ends by the broker's word: told once, when it named this very end and was asked after the bytes
        # stood here, for so long that no message is being written in their place.
        limit, here = self.log_limit, (self.position, self._head_here())
        is_empty = not any(here[1]) and here != self._denied
        if limit.offset != self.position or here == self._told or is_empty:
            self._settling.clear()
            return NotYetWritten(self.position)
        if not limit.ends_at(*here):
            self._is_open = not limit.bounds  # whose last word holds, however old it is
            return NotYetWritten(self.position)
        data = self._cursor.buffer[: self._cursor.fill(self.position, _STALE_SIZE)].tobytes()
        wait = self.options.settle * _NUL_SETTLE_FACTOR
        if not self._settling.unchanged_for(self.position, data, wait, is_frame=False):
            return NotYetWritten(self.position)
        self._settling.clear()
        self._told = here
        return no_messages(self.position, self._batcher.topics, unproven_from=self.unproven_from, stale_head=here[1])

    def _is_end(self) -> bool:
        # Whether the broker says that its log ends here, whatever stands here.
        here = self.position, self._head_here()
        vouched = self.log_limit.ask(*here)
        if vouched is None or vouched > self.position:
            return False
        self._denied = here
        self._settling.clear()
        return True

    @property
    def settling_size(self) -> int:
        """Bytes of whole frames at ``position`` that only have to stay as they are for the settle time; 0 for none."""
        return len(self._settling.data) if self._settling.is_frame and self._settling.offset == self.position else 0

    @property
    def is_undecided(self) -> bool:
        """Bytes stand at ``position`` that only time or the broker will tell from a frame, or a frame has to settle."""
        return self._is_open or self._settling.offset == self.position

    def refresh(self) -> None:
        """List the segments again: new ones, expired ones."""
        self._cursor.refresh()
        if self._cursor.is_replaced():
            self.close()
        self.refresh_due = self._clock() + self.options.list_interval

    def close(self) -> None:
        """Close the segment."""
        self._ahead.stop()
        self._cursor.close()

    def _meet_gap(self) -> NotYetWritten | Corrupt | Skipped:
        # No segment holds the position; DisturbedError for a log that ends before what was read of it.
        position, log, later = self.position, self.log, self.log.after(self.position)
        if position < (log.min_offset or 0):
            what = "the log begins behind it: its segments have expired"
            return self._skip_to(Skipped(position, log.min_offset or 0, what, is_expired=True))
        if later and self.options.skip_corrupt:
            return self._skip_to(Skipped(position, later[0].base, SEGMENTS_MISSING))
        if later:
            what = f"the segments between here and {later[0].path} are missing, or links to no plain file"
            return Corrupt(position, what, None)
        if log.segments and position > log.segments[-1].end:
            end = log.segments[-1].end
            raise DisturbedError(f"the log was cut: it ends at {end}, before {position}, which was read")
        return NotYetWritten(position)

    def _head_here(self) -> bytes:
        # So many bytes that a frame which is written here changes them.
        return self._cursor.buffer[: self._cursor.fill(self.position, STAMPED_SIZE)].tobytes()

    def frames_follow(self) -> bool:
        """Whether the log goes on behind unreadable bytes at ``position``, as far as can be told (``take_older``)."""
        return self._cursor.holds(self.position) and (self._is_closed or self._next_of_log() is not None)

    def pass_over(self, until: int) -> None:
        """Go on behind what cannot be read: at the next proven frame or segment, at ``until`` at the latest."""
        if self._cursor.holds(self.position):
            found = self._next_proven(NEVER)
            begin = self._cursor.segment.end if found is None else found
        else:
            begin = next((later.base for later in self.log.after(self.position)), until)
        self.position = min(begin, until)
        self._settling.clear()

    def _next_of_log(self) -> int | None:
        # The next proven frame, if it is of this log: the broker knows it or, while that is silent, a later one is not
        # older than what was read, or what stands here is a damaged frame and no cut.
        found = self._next_proven(NEVER)
        if found is None or self._is_closed:
            return found
        timestamp = int(store_timestamp_at(self._cursor.buffer, _U64(0)))
        vouched = None if self.log_limit.bounds else self.log_limit.ask(found)
        if vouched is not None:
            return found if found < vouched else None
        if timestamp >= self.newest_timestamp or self._next_proven(self.newest_timestamp) is not None:
            return found
        is_wanted = self.options.take_older or timestamp >= self.last_timestamp or self._is_damaged_frame(found)
        return found if is_wanted else None

    def _is_damaged_frame(self, end: int) -> bool:
        # Something is left of the head of a frame that ended at ``end``. Not so where a cut log ends: there the
        # position lies inside a frame of the longer one, or at the blank record that ended its segment.
        head = read_head(self._head_here())
        if head is None:  # so few bytes are left that no frame ended there
            return False
        is_blank = head.magic == MAGIC_BLANK and head.size == self._cursor.segment.end - self.position
        is_known = head.magic in (MAGIC_V1, MAGIC_V2, MAGIC_BLANK) and not is_blank
        return head.size == end - self.position or head.phy_offset == self.position or is_known

    def _next_proven(self, not_before: int) -> int | None:
        window = self.options.read_size
        found = self._cursor.next_proven(self._batcher, self._checked_rules, self.position, window, not_before)
        vouched = self.log_limit.offset if self.log_limit.bounds else None
        is_known = found is None or vouched is None or found < vouched
        return found if is_known else None

    def _take_new(self, batch: DispatchBatch) -> DispatchBatch | NotYetWritten:
        """Take as much of a batch of the segment being written as is the log's: about suspects the broker is asked."""
        if (batch.begin_offset if self._taken_until is None else self._taken_until) <= self._cursor.segment.base:
            # A segment behind another is begun when that is over.
            self.newest_timestamp, self.unproven_from = self.last_timestamp, None
        times, offsets = batch.columns.store_timestamp[: batch.rows], batch.columns.phy_offset[: batch.rows]
        first = first_older(times, self.newest_timestamp)
        if first is None or batch.end_offset <= self._vouched_until:
            return self._take_proven(batch)
        if first and self.log_limit is not NOBODY:
            return self._take_proven(within(batch, self.position, int(offsets[first])))
        vouched = self.log_limit.ask(self.position, self._head_here())
        if vouched is not None and vouched >= batch.end_offset:
            return self._take_proven(batch)
        if vouched is not None:
            # What stands behind the last message that the broker knows was there before it said that its log ends.
            end = int(offsets[max(int(np.searchsorted(offsets, vouched, side="right")) - 1, 0)])
            taken = self._take_proven(within(batch, self.position, end)) if end > self.position else None
            self._denied = self.position, self._head_here()
            self._settling.clear()
            return self._stay() if taken is None else taken
        state = TailState(self.newest_timestamp, self.unproven_from)
        self.newest_timestamp, self.unproven_from = state.after(batch.begin_offset, tail_state(times, offsets))
        return self._take(batch)

    def _proven(self) -> DispatchBatch | None:
        # The broker answers at last: what was taken without it is the log's, or is not.
        vouched = None if self.unproven_from is None else self.log_limit.ask(self.position)
        if vouched is None:
            return None
        if vouched < self.position:
            raise DisturbedError(
                f"the broker's log ends at {vouched}: messages of a longer one, which was cut, were read up to "
                f"{self.position}"
            )
        self.unproven_from = None
        if self.newest_timestamp == UNREADABLE_TIMESTAMP:
            self.newest_timestamp = self.last_timestamp
        return no_messages(self.position, self._batcher.topics)

    def _take_proven(self, batch: DispatchBatch) -> DispatchBatch:
        newest = batch.last_store_timestamp
        is_first = self._is_closed or self.newest_timestamp == UNREADABLE_TIMESTAMP
        self.newest_timestamp = newest if is_first else max(newest, self.newest_timestamp)
        self.unproven_from = None
        return self._take(batch)

    def _take(self, batch: DispatchBatch) -> DispatchBatch:
        self.counters.messages += batch.rows
        self.last_timestamp, self._taken_until = batch.last_store_timestamp, batch.end_offset
        size = batch.end_offset - batch.begin_offset
        self.counters.bytes += size
        if 2 * size >= self._tail_size < self.options.read_size:
            self._tail_size *= 4
        self.position = batch.end_offset
        self.counters.dropped_bytes += self._cursor.give_back(self.position)
        return replace(batch, unproven_from=self.unproven_from, newest_timestamp=self.newest_timestamp)

    def _read_closed(self) -> Poll:
        checked = self.options.verify_crc or self._cursor.segment.end <= self.check_until
        rules = self._checked_rules if checked else self._fast_rules
        # What the broker writes anew while it waits to be built is told by the sum of its bytes alone.
        sum_up = self.options.check_tail and self._cursor.segment in self.log.segments[-_SUMMED_SEGMENTS:]
        is_behind = self.options.workers > 0 or self._tail_size >= self.options.read_size
        batch = self._ahead.take(self.position, rules, sum_up=sum_up) if is_behind else None
        if batch is not None:
            return self._take_proven(batch)
        limit, (outcome, reason, _, total, batch) = self._cursor.decode(
            self._batcher, rules, self.position, self.options.read_size, sum_up=sum_up
        )
        if batch is not None:
            return self._take_proven(batch)
        if outcome is Outcome.END_OF_FILE:
            return self._meet_corrupt(Reason.BLANK_BEFORE_FRAMES) if self._hides_frames() else self._end_of_segment()
        if outcome is Outcome.NOT_YET_WRITTEN:
            reason = Reason.CUT_OFF if total or limit < BLANK_SIZE else Reason.ZEROS_BEFORE_END
        return self._meet_corrupt(reason)

    def _read_tail(self, vouched: int | None = None) -> Poll:
        if vouched is not None:
            self._complete_until = min(vouched, self._cursor.segment.end)
        rules = self._checked_rules if self.options.check_tail or self.options.verify_crc else self._fast_rules
        if self.position >= self._complete_until:
            is_behind = self._tail_size >= self.options.read_size and not self.is_undecided
            batch = self._ahead.take(self.position, rules) if is_behind else None
            if batch is not None:
                return self._take_new(batch)
            size = min(self._tail_size, self.options.read_size)
            limit = self._cursor.fill(self.position, size)
            end, largest = _U64(self._cursor.segment.end), self._checked_rules.frame_size_max
            head = int(last_head(self._cursor.buffer, _U64(0), _U64(limit), _U64(self.position), end, largest))
            if head == 0:
                return self._read_newest(size)
            # Heads behind them: these frames are complete by now, so read what they are NOW.
            self._complete_until = self.position + head
        whole = self._complete_until - self.position
        size = min(whole, self.options.read_size)
        limit, (outcome, reason, _, _, batch) = self._cursor.decode(self._batcher, rules, self.position, size, whole)
        if batch is not None:
            return self._take_new(batch)
        if outcome is Outcome.CORRUPT:
            return self._doubt(reason, min(limit, HEAD_SIZE))
        if outcome is Outcome.END_OF_FILE:  # no head follows it, but the broker has named a later offset
            return self._end_of_segment()
        # What was seen is gone: the log was cut back, or is being written anew. Look again.
        self._complete_until, self._is_open = 0, vouched is None
        return NotYetWritten(self.position)

    def _read_newest(self, size: int) -> Poll:
        # Nothing is known to stand behind the frame at the position, or what does is older and proves nothing: it has
        # to settle, and with it, at once, all that stands behind it now.
        size = self.settling_size or size
        limit, (outcome, reason, taken, total, batch) = self._cursor.decode(
            self._batcher, self._checked_rules, self.position, size
        )
        if batch is not None:
            return self._settle(batch, taken)
        if outcome is Outcome.CORRUPT:
            return self._doubt(reason, min(limit, max(total, HEAD_SIZE)))
        # A blank record counts once the next segment is in use: a longer log that was cut has left one, too.
        is_blank = outcome is Outcome.END_OF_FILE
        if is_blank and self.options.take_older and self._cursor.next_is_in_use(anywhere=True):
            return self._end_of_segment()
        is_due, self._looked_behind = self._looked_behind != self.refresh_due, self.refresh_due  # once a listing
        if is_due and not is_blank and self._cursor.is_written(self.position) and self._is_end():
            return self._stay()
        if is_blank:  # which may not be listed yet
            self.refresh_due = min(self.refresh_due, self._clock() + _NEXT_SEGMENT_SECONDS)
        claimed = 0 if self.options.take_older else total  # who reads once does not believe what half a frame claims
        if self._is_before_frames(BLANK_SIZE if is_blank else claimed, is_due=is_due):
            reason = Reason.BLANK_BEFORE_FRAMES if is_blank else Reason.UNFINISHED
            return self._doubt(reason, self._cursor.fill(self.position, HEAD_SIZE))
        self._settling.clear()
        self._tail_size, self._quiet_looks = _TAIL_SIZE_MIN, 0 if is_blank else _QUIET_LOOKS
        return NotYetWritten(self.position)

    def _hides_frames(self) -> bool:
        # A broker ends a segment where the next message has no room. Where that has room, and frames stand behind the
        # blank record, it is none of the broker's; else they are what a longer log that was cut has left.
        room = self._cursor.segment.end - self.position - BLANK_SIZE
        return 0 < self._cursor.next_total_size() <= room and self._next_proven(NEVER) is not None

    def _end_of_segment(self) -> Poll:
        self.position = self._cursor.segment.end
        self.counters.dropped_bytes += self._cursor.give_back(self.position)
        self._settling.clear()
        self.close()
        return self.poll()

    def _settle(self, batch: DispatchBatch, taken: int) -> DispatchBatch | NotYetWritten:
        # The newest frame: no CRC covers its topic and properties, so it must stay as it is for a while. It is the last
        # one of these, or the first: then the others are stale.
        data = self._cursor.buffer[:taken].tobytes()
        last = int(batch.columns.phy_offset[batch.rows - 1]) - self.position
        is_long = has_nul(data[: int.from_bytes(data[:4], "big")]) or has_nul(data[last:])
        settle = self.options.settle * (_NUL_SETTLE_FACTOR if is_long else 1)
        if not self._settling.unchanged_for(self.position, data, settle, is_frame=True):
            return NotYetWritten(self.position)
        self.counters.settled += 1
        return self._take_new(batch)

    def _doubt(self, reason: Reason, size: int) -> Poll:
        # Bytes that are no frame, where a frame may be half written: corrupt only when they stay so.
        data = self._cursor.buffer[:size].tobytes()
        wait = 0.0 if reason is Reason.DLEDGER else self.options.corrupt_after
        if wait and not self._settling.unchanged_for(self.position, data, wait, is_frame=False):
            return NotYetWritten(self.position)
        is_end = reason is not Reason.DLEDGER and self._is_end()
        return self._stay() if is_end else self._meet_corrupt(reason)

    def _meet_corrupt(self, reason: Reason) -> Corrupt | Skipped:
        path = self._cursor.segment.path
        if reason is Reason.DLEDGER:
            raise UnsafeStoreError(
                f"{path} is a DLedger log, which is not read",
                "point --store at a broker that runs without enableDLegerCommitLog",
            )
        target = self._next_of_log() if self.options.skip_corrupt else None
        if target is None and self.options.skip_corrupt and self._is_closed:
            target = self._cursor.segment.end
        if target is None:
            return Corrupt(self.position, reason.text, path)
        if not self._is_closed:
            vouched = self.log_limit.offset if self.log_limit.bounds else self.log_limit.ask(target)
            if vouched is None or target >= vouched:
                self.newest_timestamp, self._taken_until = UNREADABLE_TIMESTAMP, target
        self.counters.corrupt_found += 1
        return self._skip_to(Skipped(self.position, target, reason.text))

    def _is_before_frames(self, size: int, *, is_due: bool) -> bool:
        # Zeros, half a frame or a blank record, of ``size`` bytes, are the end of the log, or damage: who writes behind
        # has written here before.
        if self.is_undecided and not self._settling.is_frame:
            return True
        behind = self.position + size
        if not (is_due or self.options.take_older) or behind >= self._cursor.segment.end:
            return False
        is_written = self._cursor.is_written(behind)
        return is_written and (not self.options.take_older or self._next_of_log() is not None)

    def _skip_to(self, skipped: Skipped) -> Skipped:
        size, counters = skipped.end - skipped.begin, self.counters
        counters.expired_bytes += size if skipped.is_expired else 0
        counters.corrupt_bytes += 0 if skipped.is_expired else size
        self.position = skipped.end
        self._settling.clear()
        return skipped
