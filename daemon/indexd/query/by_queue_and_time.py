"""Queries by queue offset and by time.

``query_offset``: the units of a ConsumeQueue, each with its message, read and checked (spec 5.5, 5.6).
``query_time`` is RocketMQ's getOffsetInQueueByTime with a boundary, step by step (spec 5.7). ``query_log_time`` is
Kafka's findOffsetByTimestamp, exactly: of all messages with that store time or a later one, the first in the order of
the log; where the broker's clock fell, later messages may be older again (spec kafka-index 9).

Both that and ``time_bound`` ask the sparse indexes where in the log messages of a time can stand, and the log confirms.
A time entry (T, o) is made together with an offset entry, the first at or behind the message o, and says that no
message up to there has a larger store time than T, and that o was the first of that time. So from that offset entry on
a scan for later times misses nothing, however the clock fell (spec kafka-index 8, 9); where it fell, it may be the rest
of one segment that is scanned, otherwise it is an interval or little more.

A bit may flip on a disk, and an exact answer must not lose messages by it. So the entries are held against the frames
between that offset entry and the one before it: their number, where the last begins, that the first of the largest time
is o, and that this time is T. One wrong bit in the two files of a segment cannot move the bound too far:

- in T: the log has another time at o;
- in o: it can only name a later message of the same time that was the largest of its interval too, and then it still
  stands before the next time entry, up to whose offset entry T is the largest time;
- in an offset entry: the number of frames, or where they lead, is another; also when it misled the search, because what
  is found then is that entry or its neighbour;
- in any other time entry: the search ends at an entry before, or at that one.

What does not hold, is missing or cannot be read gives no bound: the segment is scanned whole.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from struct import Struct
from typing import Any, Literal

from indexd.commitlog.decoder import FrameHead, Message
from indexd.commitlog.lookup import LogView
from indexd.consumequeue.format import Unit
from indexd.consumequeue.reader import ConsumeQueueReader
from indexd.errors import CorruptDataError, DiskError, UsageError
from indexd.flush.frontier import Uncovered
from indexd.query.message import HasHits, Hit
from indexd.query.source import (
    ABSENT,
    BEHIND_LAST,
    EXPIRED,
    Coverage,
    IndexSnapshot,
    QueryIndex,
    gaps_in_words,
    why_empty,
    why_no_queue,
    with_queue,
)
from indexd.sparse.format import (
    INT64_MAX,
    NO_TIMESTAMP,
    OFFSET_ENTRY,
    TIME_ENTRY,
    SegmentMark,
    index_name,
    time_index_name,
)
from indexd.storage.disk import DiskFile

Boundary = Literal["lower", "upper"]
FOUND = "FOUND"
_UNITS_PER_READ = 1024


@dataclass(frozen=True, slots=True)
class OffsetQuery:
    """``max_num`` messages of a queue from ``queue_offset`` on."""

    topic: str
    queue_id: int
    queue_offset: int
    max_num: int = 32


@dataclass(frozen=True, slots=True)
class QueueHit:
    """One unit. ``hit`` is the message it names, None if none stands there; ``problem`` says what does not fit."""

    queue_offset: int
    unit: Unit
    hit: Hit | None
    problem: str | None = None

    def to_json(self) -> dict[str, Any]:
        """One object; ``problem`` only where there is one."""
        hit = self.hit
        row: dict[str, Any] = {
            "queueOffset": self.queue_offset,
            "phyOffset": self.unit.phy_offset,
            "size": self.unit.size,
            "tagsCode": self.unit.tags_code,
            "storeTimestamp": None if hit is None else hit.store_timestamp,
            "keys": None if hit is None else hit.keys,
            "uniqKey": None if hit is None else hit.uniq_key,
            "tags": None if hit is None else hit.tags,
        }
        return row if self.problem is None else row | {"problem": self.problem}

    def to_dict(self, topic: str, queue_id: int) -> dict[str, Any]:
        """As every hit is shown. With a ``problem``, only what the queue itself knows of the message."""
        if self.problem is None and self.hit is not None:
            return self.hit.to_dict()
        known = Hit(self.unit.phy_offset, None, queue_id, self.queue_offset, self.unit.size, topic=topic)
        return known.to_dict() | {"problem": self.problem}


@dataclass(frozen=True, slots=True)
class OffsetAnswer(HasHits[QueueHit]):
    """``hits`` in the order of the queue, those with a ``problem`` included. ``status`` is RocketMQ's GetMessageStatus.

    The queue holds ``[min_offset, max_offset)``: asked for less, the answer begins at ``min_offset``
    (OFFSET_TOO_SMALL), and for more it is empty. ``next_offset`` goes on behind the answer, whatever is added.
    ``expired`` counts units that were passed over because their messages have gone. ``why`` is there without hits.
    ``begin_offset`` is where the queue once began.
    """

    query: OffsetQuery
    hits: tuple[QueueHit, ...]
    status: str
    min_offset: int
    max_offset: int
    next_offset: int
    coverage: Coverage
    expired: int = 0
    why: str | None = None
    begin_offset: int = 0

    @property
    def truncated(self) -> bool:
        """Whether the queue goes on behind the answer."""
        return self.next_offset < self.max_offset

    @property
    def problems(self) -> int:
        """How many units name what is not their message."""
        return sum(hit.problem is not None for hit in self.hits)

    def to_dict(self) -> dict[str, Any]:
        """One object; members that do not apply are left out."""
        row = {
            "topic": self.query.topic,
            "queueId": self.query.queue_id,
            "queueOffset": self.query.queue_offset,
            "status": self.status,
            "messages": [hit.to_json() for hit in self.hits],
            "hits": [hit.to_dict(self.query.topic, self.query.queue_id) for hit in self.hits],
            "minOffset": self.min_offset,
            "maxOffset": self.max_offset,
            "nextOffset": self.next_offset,
            "truncated": self.truncated,
            "expired": self.expired or None,
            "problems": self.problems or None,
            "why": self.why,
            "coverage": self.coverage.to_json(),
        }
        return {name: value for name, value in row.items() if value is not None}


def query_offset(index: QueryIndex, query: OffsetQuery) -> OffsetAnswer:
    """Ascending, at most ``query.max_num``; UsageError if that is more than ``query_max_num``, or without queues."""
    limit = index.config.query.query_max_num
    if query.max_num > limit:
        raise UsageError(f"a query may ask for {limit} messages, not {query.max_num}", "raise --query-max-num")

    def answer(look: IndexSnapshot, queue: ConsumeQueueReader | None) -> OffsetAnswer:
        if queue is None:
            why = why_no_queue(index, look, query.topic)
            return OffsetAnswer(query, (), "NO_MATCHED_LOGIC_QUEUE", 0, 0, 0, look.queue_coverage, why=why)
        low, high = queue.min_offset, queue.max_offset
        status, first = _status(query.queue_offset, low, high), min(max(query.queue_offset, low), high)
        hits, next_offset, expired = _read(index.log, queue, query, first)
        low, coverage = queue.min_offset, index.coverage_of_queue(look, query.topic, query.queue_id)
        has_why = not hits and query.max_num > 0
        reason = why_no_hits(coverage, queue, first, expired) if has_why else None
        mark = index.queue_mark(look, query.topic, query.queue_id)
        begin = low if mark is None else mark.begin_offset  # a queue so new has lost nothing yet
        return OffsetAnswer(query, hits, status, low, high, next_offset, coverage, expired, reason, begin)

    return with_queue(index, query.topic, query.queue_id, answer)


def queue_hit(unit: Unit, found: object, topic: str, queue_id: int, queue_offset: int) -> QueueHit:
    """The hit of a queue offset, ``found`` being what stands where ``unit`` says, be it its message or not."""
    if not isinstance(found, Message):
        return QueueHit(queue_offset, unit, None, "no message stands there")
    rows = (
        ("topic", found.topic, topic),
        ("queue id", found.queue_id, queue_id),
        ("queue offset", found.queue_offset, queue_offset),
        ("size", found.size, unit.size),
    )
    wrong = (f"the message there has {name} {is_}" for name, is_, wanted in rows if is_ != wanted)
    return QueueHit(queue_offset, unit, Hit.of(found), next(wrong, None))


def _status(offset: int, low: int, high: int) -> str:
    if high == 0:
        return "NO_MESSAGE_IN_QUEUE"
    if offset < low:
        return "OFFSET_TOO_SMALL"
    if offset == high:
        return "OFFSET_OVERFLOW_ONE"
    return FOUND if offset < high else "OFFSET_OVERFLOW_BADLY"


def _read(
    log: LogView, queue: ConsumeQueueReader, query: OffsetQuery, first: int
) -> tuple[tuple[QueueHit, ...], int, int]:
    # (hits, next offset, expired)
    hits: list[QueueHit] = []
    expired, offset = 0, first
    while units := queue.get(offset, min(_UNITS_PER_READ, query.max_num - len(hits))):
        for unit in units:
            found = None if unit.is_blank else log.at(unit.phy_offset)
            # The log may have lost its oldest segments since it was looked at.
            is_gone = found is None and log.has_expired(unit.phy_offset)
            expired += is_gone and not unit.is_blank
            if not is_gone and not unit.is_blank:
                hits.append(queue_hit(unit, found, query.topic, query.queue_id, offset))
            offset += 1
    return tuple(hits), offset, expired


def why_no_hits(coverage: Coverage, queue: ConsumeQueueReader, first: int, expired: int = 0) -> str:
    """Why nothing is found in a queue from ``first`` on, where ``expired`` messages were passed over."""
    is_gone = expired or (first >= queue.max_offset and 0 < queue.max_offset == queue.min_offset)
    reasons = ([EXPIRED] if is_gone else []) + gaps_in_words(coverage)
    return "; ".join(reasons) or (BEHIND_LAST if first >= queue.max_offset > 0 else ABSENT)


@dataclass(frozen=True, slots=True)
class QueueTimeAnswer(HasHits[QueueHit]):
    """``queue_offset`` is the broker's answer, inside ``[min_offset, max_offset]``, None without a queue.

    lower: the first message of that time or later; upper: the last of that time or earlier; both as the broker's search
    finds them, which takes a queue's store times to rise. ``phy_offset`` and ``store_timestamp`` are of the message at
    that offset, None where there is none; ``why`` then says why. ``hits`` is that message, or empty.
    """

    topic: str
    queue_id: int
    timestamp: int
    boundary: Boundary
    queue_offset: int | None
    min_offset: int
    max_offset: int
    phy_offset: int | None
    store_timestamp: int | None
    coverage: Coverage
    why: str | None = None
    hits: tuple[QueueHit, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """One object; ``why`` only where it applies."""
        row: dict[str, Any] = {
            "topic": self.topic,
            "queueId": self.queue_id,
            "timestamp": self.timestamp,
            "boundary": self.boundary,
            "queueOffset": self.queue_offset,
            "minOffset": self.min_offset,
            "maxOffset": self.max_offset,
            "phyOffset": self.phy_offset,
            "storeTimestamp": self.store_timestamp,
            "hits": [hit.to_dict(self.topic, self.queue_id) for hit in self.hits],
        }
        return row | ({} if self.why is None else {"why": self.why}) | {"coverage": self.coverage.to_json()}


def query_time(
    index: QueryIndex, topic: str, queue_id: int, timestamp: int, boundary: Boundary = "lower"
) -> QueueTimeAnswer:
    """The queue offset of a store time in ms; UsageError if no queues are built."""

    def answer(look: IndexSnapshot, queue: ConsumeQueueReader | None) -> QueueTimeAnswer:
        coverage = index.coverage_of_queue(look, topic, queue_id)
        found = QueueTimeAnswer(topic, queue_id, timestamp, boundary, None, 0, 0, None, None, coverage)
        if queue is None:
            return replace(found, why=why_no_queue(index, look, topic))
        begin = coverage.log_begin or 0
        unread: list[int] = []

        def store_time(phy_offset: int) -> int:
            time = index.log.store_timestamp(phy_offset)
            unread.extend([phy_offset] if time == -1 and phy_offset >= begin else ())
            return time

        offset = offset_by_time(queue, store_time, timestamp, boundary, begin)
        if unread:
            coverage = replace(coverage, is_cut_off=True)
        low, high = queue.min_offset, queue.max_offset
        found = replace(found, queue_offset=offset, min_offset=low, max_offset=high, coverage=coverage)
        if not low <= offset < high:
            return replace(found, why=why_no_hits(coverage, queue, offset))
        unit = queue.unit(offset)
        message = index.log.at(unit.phy_offset)
        known = message.store_timestamp if isinstance(message, Message) else None
        hit = queue_hit(unit, message, topic, queue_id, offset)
        return replace(found, phy_offset=unit.phy_offset, store_timestamp=known, hits=(hit,))

    return with_queue(index, topic, queue_id, answer)


def offset_by_time(
    queue: ConsumeQueueReader, store_time: Callable[[int], int], timestamp: int, boundary: Boundary, min_phy_offset: int
) -> int:
    """RocketMQ's answer, in units.

    ``store_time`` of a message's physical offset, -1 if the log has no such; the log begins at ``min_phy_offset``.
    """
    found = _search(queue, store_time, timestamp, boundary == "lower", min_phy_offset)
    return min(max(found, queue.min_offset), queue.max_offset)


def _search(
    queue: ConsumeQueueReader, store_time: Callable[[int], int], timestamp: int, is_lower: bool, min_phy_offset: int
) -> int:
    def time(offset: int) -> int:
        return store_time(queue.unit(offset).phy_offset)

    start = _choose_file(queue, time, timestamp, is_lower)
    if start is None:
        return 0
    ceiling = min(start + queue.file_units, queue.max_offset) - 1
    if ceiling < start:  # the broker made the file and put nothing into it
        return 0
    low = floor = max(queue.min_offset, start)
    if time(ceiling) < timestamp:
        return ceiling + 1 if is_lower else ceiling
    if floor > ceiling:
        return 0
    if time(floor) > timestamp:
        return start if is_lower else 0
    high, left, right = ceiling, None, None
    while high >= low:
        # Half of the sum of the positions in the file, not in the queue: that decides which of two it rounds to.
        middle = start + (low - start + high - start) // 2
        if queue.unit(middle).phy_offset < min_phy_offset:
            low, left = middle + 1, middle
            continue
        found = time(middle)
        if found < 0:
            return 0
        if found == timestamp:
            step = -1 if is_lower else 1
            while floor <= middle + step <= ceiling and time(middle + step) == timestamp:
                middle += step
            return middle
        if found > timestamp:
            high, right = middle - 1, middle
        else:
            low, left = middle + 1, middle
    nearest = right if is_lower else left
    # What was not seen is position -1 of the file: the unit before it, or the first of all.
    return nearest if nearest is not None else max(start - 1, 0)


def _choose_file(queue: ConsumeQueueReader, time: Callable[[int], int], timestamp: int, is_lower: bool) -> int | None:
    # The broker keeps the times of a file's ends, and no time that is not above 0.
    files, size = range(queue.first_offset, queue.max_offset, queue.file_units), queue.file_units
    if is_lower:
        ends = ((start, time(start + size - 1)) for start in files[:-1])
        return next((start for start, end in ends if 0 < end >= timestamp), files[-1] if files else None)
    return next((start for start in files[::-1] if start >= queue.max_offset or time(start) <= timestamp), None)


class FrameScan:
    """Walks the log; ``unreadable`` counts places where no frame stood, so that the rest of a segment was left out.

    A segment that is missing behind the log's begin is such a place too, and zeros before the end that was asked for.
    """

    def __init__(self, log: LogView, gaps: Sequence[Uncovered] = ()) -> None:
        self._log, self._gaps = log, gaps
        self.unreadable = 0

    def frames(self, begin: int, end: int) -> Iterator[FrameHead]:
        """The frames that start in ``[begin, end)``, without those in the gaps; ``begin`` must be a frame's start."""
        position = begin
        while position < end:
            found = self._log.frame_head(position)
            if isinstance(found, FrameHead):
                yield found
                position += found.size
                continue
            gap = next((gap for gap in self._gaps if gap.begin <= position < gap.end), None)
            if gap is not None:
                position = gap.end
                continue
            is_known = found > 0 or (found == 0 and self._log.has_expired(position))
            self.unreadable += not is_known
            position += self._log.segment_size - position % self._log.segment_size


def time_bound(index: QueryIndex, look: IndexSnapshot, timestamp: int) -> int:
    """A physical offset before which all messages that are still in the log are older than ``timestamp``.

    0 where none is known. What has expired may have been of any time.
    """
    begin = max(look.coverage.begin, look.coverage.log_begin or 0)
    found = scan_start(index, look, timestamp, begin)
    return found if found > begin else 0  # at its very begin it says nothing about what came before


def scan_start(index: QueryIndex, look: IndexSnapshot, timestamp: int, begin: int) -> int:
    """A message's start from which a scan for store times of ``timestamp`` and later misses none behind ``begin``.

    The end of the coverage if there is none; ``begin`` is a message's start too. Segments that have no sparse index, or
    one that is in doubt, are to be scanned whole, and so are all for times before 1970.
    """
    size, end, sparse = index.log.segment_size, look.queue_coverage.end, look.frontier.sparse
    if timestamp <= 0 or sparse is None:  # no time entry tells of earlier messages
        return min(begin, end)
    marks, sealed = {mark.base: mark for mark in sparse.segments}, frozenset(mark.base for mark in sparse.sealed)
    largest_times = index.largest_times.get()
    for base in range(begin - begin % size, end, size):
        position = 0  # what a daemon has added since the last flush, the log itself has to answer
        if base in sealed and largest_times.get(base, INT64_MAX) < timestamp:
            continue
        if base in marks:
            with suppress(CorruptDataError, DiskError):  # expired, not made yet, or damaged: so has the log
                position, largest = _older_until(index, look, marks[base], timestamp, is_sealed=base in sealed)
                if position == size:
                    largest_times[base] = largest
                    continue
        return min(max(base + position, begin), end)
    return end


def _older_until(
    index: QueryIndex, look: IndexSnapshot, mark: SegmentMark, timestamp: int, *, is_sealed: bool
) -> tuple[int, int]:
    # The byte position of a message of the segment before which all are older, and the largest of their times; the
    # segment's size where all of a sealed one are. CorruptDataError for entries that the log contradicts.
    size, disk, files = index.log.segment_size, index.disk, index.files
    doubt = CorruptDataError(f"the sparse index of segment {mark.base} does not fit the log")

    def place(slot: int) -> tuple[int, int]:
        # (ordinal, position) of an offset entry; before the first one, of the first message.
        if slot < 0:
            return 0, max(look.coverage.begin - mark.base, 0)
        ordinal, position = _entry(offsets, OFFSET_ENTRY, slot)
        if slot >= mark.offset_entries or ordinal < 0 or not 0 <= position < size:
            raise doubt
        return ordinal, position

    with (
        disk.open_read(files.sparse / index_name(mark.base)) as offsets,
        disk.open_read(files.sparse / time_index_name(mark.base)) as times,
    ):
        slot = bisect_left(range(mark.time_entries), timestamp, key=lambda at: _entry(times, TIME_ENTRY, at)[0]) - 1
        if slot < 0:
            return 0, NO_TIMESTAMP
        largest, ordinal = _entry(times, TIME_ENTRY, slot)
        made = bisect_left(range(mark.offset_entries), ordinal, key=lambda slot: _entry(offsets, OFFSET_ENTRY, slot)[0])
        is_last = is_sealed and slot == mark.time_entries - 1
        # The last time entry of a sealed segment may be made when it is sealed, and stands for all the rest then.
        is_rest = is_last and made == mark.offset_entries
        first, begin = place(made - 1)
        last, end = (mark.messages - 1, size - 1) if is_rest else place(made)
        if not is_last and slot + 1 < mark.time_entries:
            later, behind = _entry(times, TIME_ENTRY, slot + 1)
            if later <= largest or behind <= last:
                raise doubt
    # The frames from one offset entry up to the next one, which was made together with this time entry.
    count, position, newest, found = first, begin, NO_TIMESTAMP, -1
    scan = FrameScan(index.log, look.coverage.passed_over)
    for frame in scan.frames(mark.base + begin, mark.base + end + 1):
        if frame.store_timestamp > newest:
            newest, found = frame.store_timestamp, count
        count, position = count + 1, frame.phy_offset - mark.base
    is_there = is_rest or position == end
    if (count - 1, newest, found) != (last, largest, ordinal) or not is_there:
        raise doubt
    return size if is_last else end, largest


def _entry(file: DiskFile, form: Struct, slot: int) -> tuple[int, int]:
    data = file.pread(form.size, slot * form.size)
    if len(data) < form.size:
        raise CorruptDataError(f"sparse index {file.path} has no entry {slot}, but the frontier says so")
    first, second = form.unpack(data)
    return first, second


@dataclass(frozen=True, slots=True)
class LogTimeAnswer(HasHits[Hit]):
    """``phy_offset``, ``store_timestamp`` and the base of the segment, all None if there is none; ``why`` then is set.

    ``scanned`` counts the messages that were looked at. ``unreadable`` counts places of the covered log where bytes are
    no frame, and a message might have been. ``hits`` is the message, or empty.
    """

    timestamp: int
    phy_offset: int | None
    store_timestamp: int | None
    segment: int | None
    scanned: int
    unreadable: int
    coverage: Coverage
    why: str | None = None
    hits: tuple[Hit, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """One object; members that do not apply are left out."""
        row: dict[str, Any] = {
            "timestamp": self.timestamp,
            "phyOffset": self.phy_offset,
            "storeTimestamp": self.store_timestamp,
            "segment": self.segment,
            "scanned": self.scanned,
            "hits": [hit.to_dict() for hit in self.hits],
        }
        said = {"unreadable": self.unreadable or None, "why": self.why, "coverage": self.coverage.to_json()}
        return row | {name: value for name, value in said.items() if value is not None}


def query_log_time(index: QueryIndex, timestamp: int) -> LogTimeAnswer:
    """The first covered message with a store time of at least ``timestamp`` ms; UsageError without sparse indexes."""
    look = index.look()
    if look.frontier.sparse is None:
        raise UsageError(
            f"{index.files.data} holds no sparse indexes", "run the daemon with sparse = true to have them built"
        )
    coverage, size = look.queue_coverage, index.log.segment_size
    scan = FrameScan(index.log, coverage.passed_over)
    begin, scanned = max(coverage.begin, coverage.log_begin or 0), 0
    while begin < coverage.end:
        begin = scan_start(index, look, timestamp, begin)
        base = begin - begin % size
        for frame in scan.frames(begin, min(base + size, coverage.end)):
            scanned += 1
            if frame.store_timestamp >= timestamp:
                found = index.log.at(frame.phy_offset)
                known = Hit(frame.phy_offset, frame.store_timestamp, size=frame.size)
                hits = (Hit.of(found) if isinstance(found, Message) else known,)
                place = (frame.phy_offset, frame.store_timestamp, base)
                return LogTimeAnswer(timestamp, *place, scanned, scan.unreadable, coverage, hits=hits)
        begin = base + size
    why = why_empty(coverage, expired=0, unreadable=scan.unreadable)
    return LogTimeAnswer(timestamp, None, None, None, scanned, scan.unreadable, coverage, why)
