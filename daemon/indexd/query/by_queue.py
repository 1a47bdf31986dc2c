"""Messages by queue offset: the units of a ConsumeQueue, each with its message, read and checked (spec 5.5, 5.6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from indexd.commitlog.decoder import Message
from indexd.commitlog.lookup import LogView
from indexd.consumequeue.format import Unit
from indexd.consumequeue.reader import ConsumeQueueReader
from indexd.errors import UsageError
from indexd.query.message import HasHits, Hit
from indexd.query.source import (
    ABSENT,
    BEHIND_LAST,
    EXPIRED,
    Coverage,
    Look,
    QueryIndex,
    gaps_in_words,
    why_no_queue,
    with_queue,
)

FOUND = "FOUND"
NO_MATCHED_LOGIC_QUEUE = "NO_MATCHED_LOGIC_QUEUE"
NO_MESSAGE_IN_QUEUE = "NO_MESSAGE_IN_QUEUE"
OFFSET_TOO_SMALL = "OFFSET_TOO_SMALL"
OFFSET_OVERFLOW_ONE = "OFFSET_OVERFLOW_ONE"
OFFSET_OVERFLOW_BADLY = "OFFSET_OVERFLOW_BADLY"
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

    def to_json(self) -> dict[str, Any]:
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

    def answer(look: Look, queue: ConsumeQueueReader | None) -> OffsetAnswer:
        if queue is None:
            why = why_no_queue(index, look, query.topic)
            return OffsetAnswer(query, (), NO_MATCHED_LOGIC_QUEUE, 0, 0, 0, look.queue_coverage, why=why)
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
        return NO_MESSAGE_IN_QUEUE
    if offset < low:
        return OFFSET_TOO_SMALL
    if offset == high:
        return OFFSET_OVERFLOW_ONE
    return FOUND if offset < high else OFFSET_OVERFLOW_BADLY


def _read(
    log: LogView, queue: ConsumeQueueReader, query: OffsetQuery, first: int
) -> tuple[tuple[QueueHit, ...], int, int]:
    # (hits, next offset, expired)
    hits: list[QueueHit] = []
    expired, offset = 0, first
    units: list[Unit] = []
    while len(hits) < query.max_num:
        units = units or queue.get(offset, min(_UNITS_PER_READ, query.max_num - len(hits)))[::-1]
        if not units:
            break
        unit = units.pop()
        found = None if unit.is_blank else log.at(unit.phy_offset)
        if unit.is_blank:
            offset += 1
        elif found is None and log.has_expired(unit.phy_offset):
            # The log has lost its oldest segments since it was looked at.
            queue.correct_min_offset(log.begin or 0)
            next_offset, units = max(offset + 1, queue.min_offset), []
            expired += next_offset - offset
            offset = next_offset
        else:
            hits.append(queue_hit(unit, found, query.topic, query.queue_id, offset))
            offset += 1
    return tuple(hits), offset, expired


def why_no_hits(coverage: Coverage, queue: ConsumeQueueReader, first: int, expired: int = 0) -> str:
    """Why nothing is found in a queue from ``first`` on, where ``expired`` messages were passed over."""
    is_gone = expired or (first >= queue.max_offset and 0 < queue.max_offset == queue.min_offset)
    reasons = ([EXPIRED] if is_gone else []) + gaps_in_words(coverage)
    return "; ".join(reasons) or (BEHIND_LAST if first >= queue.max_offset > 0 else ABSENT)
