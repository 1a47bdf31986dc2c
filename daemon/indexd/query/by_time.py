"""Queue offsets by store time: RocketMQ's getOffsetInQueueByTime with a boundary, step by step (spec 5.7)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from indexd.consumequeue.reader import UnitSource
from indexd.errors import CorruptDataError, DiskError
from indexd.query.answer import HasHits
from indexd.query.by_queue import QueueHit, queue_hit
from indexd.query.coverage import BEHIND_LAST, EXPIRED, Coverage, gaps_in_words
from indexd.query.queues import open_queue, why_no_queue
from indexd.query.source import QueryIndex

Boundary = Literal["lower", "upper"]
BOUNDARIES: tuple[Boundary, ...] = get_args(Boundary)
StoreTime = Callable[[int, int], int]
_UNKNOWN = -1
_LOOKS_MAX = 2


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

    def to_json(self) -> dict[str, Any]:
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
        if self.why is not None:
            row["why"] = self.why
        return row | {"coverage": self.coverage.to_json()}


def query_time(
    index: QueryIndex, topic: str, queue_id: int, timestamp: int, boundary: Boundary = "lower"
) -> QueueTimeAnswer:
    """The queue offset of a store time in ms; UsageError if no queues are built."""
    for left in reversed(range(_LOOKS_MAX)):
        try:
            return _query(index, topic, queue_id, timestamp, boundary)
        except DiskError as error:
            if not error.is_missing:
                raise
            if left == 0:
                raise CorruptDataError(f"queue file {error.path} is missing") from error
    raise AssertionError("unreachable")


def offset_by_time(
    queue: UnitSource, store_time: StoreTime, timestamp: int, boundary: Boundary, min_phy_offset: int
) -> int:
    """RocketMQ's answer, in units.

    ``store_time`` of a message's physical offset and size, -1 if the log has no such; the log begins at
    ``min_phy_offset``.
    """
    found = _search(queue, store_time, timestamp, boundary == "lower", min_phy_offset)
    return min(max(found, queue.min_offset), queue.max_offset)


def _query(index: QueryIndex, topic: str, queue_id: int, timestamp: int, boundary: Boundary) -> QueueTimeAnswer:
    look = index.look()
    coverage = look.queue_coverage
    queue = open_queue(index, look, topic, queue_id)
    if queue is None:
        none = why_no_queue(index, look, topic)
        return QueueTimeAnswer(topic, queue_id, timestamp, boundary, None, 0, 0, None, None, coverage, none)
    with queue:
        begin = coverage.log_begin or 0
        offset = offset_by_time(queue, index.log.store_timestamp, timestamp, boundary, begin)
        phy_offset = store_timestamp = None
        why: str | None = None
        hits: tuple[QueueHit, ...] = ()
        if queue.min_offset <= offset < queue.max_offset:
            unit = queue.unit(offset)
            phy_offset = unit.phy_offset
            time = index.log.store_timestamp(unit.phy_offset, unit.size)
            hits = (queue_hit(unit, index.log.at(unit.phy_offset), topic, queue_id, offset),)
            store_timestamp = time if time != _UNKNOWN else None
        else:
            gaps = gaps_in_words(coverage, index.log)
            is_gone = 0 < queue.max_offset == queue.min_offset
            why = "; ".join(([EXPIRED] if is_gone else []) + gaps) or BEHIND_LAST
        bounds = (queue.min_offset, queue.max_offset)
    return QueueTimeAnswer(
        topic, queue_id, timestamp, boundary, offset, *bounds, phy_offset, store_timestamp, coverage, why, hits
    )


def _search(queue: UnitSource, store_time: StoreTime, timestamp: int, is_lower: bool, min_phy_offset: int) -> int:
    def time(offset: int) -> int:
        unit = queue.unit(offset)
        return store_time(unit.phy_offset, unit.size)

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
            return _outermost(time, middle, timestamp, floor, ceiling, is_lower)
        if found > timestamp:
            high, right = middle - 1, middle
        else:
            low, left = middle + 1, middle
    nearest = right if is_lower else left
    # What was not seen is position -1 of the file: the unit before it, or the first of all.
    return nearest if nearest is not None else max(start - 1, 0)


def _choose_file(queue: UnitSource, time: Callable[[int], int], timestamp: int, is_lower: bool) -> int | None:
    files = queue.file_offsets()
    if is_lower:
        older = files[:-1]
        first = next((start for start in older if _known(time(start + queue.file_units - 1)) >= timestamp), None)
        return first if first is not None or not files else files[-1]
    for start in reversed(files):
        first = _known(time(start)) if start < queue.max_offset else _UNKNOWN
        if first <= timestamp:
            return start
    return None


def _known(time: int) -> int:
    # The broker keeps the times of a file's ends, and no time that is not above 0.
    return time if time > 0 else _UNKNOWN


def _outermost(time: Callable[[int], int], hit: int, timestamp: int, floor: int, ceiling: int, is_lower: bool) -> int:
    step = -1 if is_lower else 1
    while floor <= hit + step <= ceiling and time(hit + step) == timestamp:
        hit += step
    return hit
