"""What a broker answers over its own protocol: QUERY_MESSAGE, VIEW_MESSAGE_BY_ID, PULL_MESSAGE and a queue's bounds.

Messages are sent as whole frames, as they stand in the log, found by the broker's rules (spec 5.5, 9.3-9.5, 9.8). Each
frame is checked before it is sent: magic, own physical offset, lengths, CRCs. A broker checks none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from indexd.commitlog.decoder import Message
from indexd.commitlog.format import NotYetWritten
from indexd.commitlog.lookup import LogView
from indexd.consumequeue.reader import ConsumeQueueReader
from indexd.query.by_key import KeyQuery, LastUpdate, query_exact, query_offsets
from indexd.query.by_queue_and_time import FOUND, OffsetQuery, query_offset
from indexd.query.message import NotFound, not_found
from indexd.query.source import ABSENT, QueryIndex, expired_in_words, gaps_in_words, with_queue

NO_MATCHED_MESSAGE = "NO_MATCHED_MESSAGE"
MESSAGE_WAS_REMOVING = "MESSAGE_WAS_REMOVING"
# maxTransferCountOnMessageInMemory: what a broker hands out in one pull.
_PULL_MAX_NUM = 32
_ROUNDS = 3


class FoundFrames(NamedTuple):
    """``frames`` ascending. ``remark``: why there are none, or what was left out of them; None when that is all.

    ``last_update``: zeros when the index named nothing. ``is_covered``: the index speaks for the whole log, and
    everything that it named could be read.
    """

    frames: tuple[bytes, ...]
    last_update: LastUpdate
    is_covered: bool
    remark: str | None = None


@dataclass(frozen=True, slots=True)
class PulledFrames:
    """``status`` is RocketMQ's GetMessageStatus; without FOUND there are no frames. Offsets count messages."""

    status: str
    frames: tuple[bytes, ...]
    next_begin_offset: int
    min_offset: int
    max_offset: int
    is_covered: bool


def query_message(index: QueryIndex, query: KeyQuery, size_max: int) -> FoundFrames:
    """The broker's own answer, collisions, repeats and misses included, of at most ``size_max`` bytes (spec 9.5).

    As it does, it asks again with an earlier end, twice at most, while nothing that the index names can be read.
    """
    look = index.look()
    max_num = min(query.max_num, index.config.query.max_msgs_num_batch)
    last_update, end = LastUpdate(), query.end
    frames = _Frames(index.log, size_max)
    for _ in range(_ROUNDS):
        offsets, found_update = query_offsets(index, look, query, max_num, end)
        if not offsets:
            break
        last_update = found_update
        frames.add(sorted(offsets))
        if frames.found:
            break
        oldest = index.log.at(min(offsets))
        if not isinstance(oldest, Message) or oldest.store_timestamp == end or oldest.store_timestamp < query.begin:
            break  # the same, or nothing, would be asked once more
        end = oldest.store_timestamp
    remark = frames.left_out()
    if not frames.named:
        words = "the index names no such message", *gaps_in_words(look.coverage), expired_in_words(look.coverage)
        remark = "; ".join(filter(None, words))
    return FoundFrames(tuple(frames.found), last_update, look.coverage.complete and not frames.unknown, remark)


def query_message_exact(index: QueryIndex, query: KeyQuery, size_max: int) -> FoundFrames:
    """Every message that matches, none that does not, each once; of more than may be asked for, the newest."""
    answer = query_exact(index, query._replace(max_num=min(query.max_num, index.config.query.query_max_num)))
    frames = _Frames(index.log, size_max)
    frames.add(sorted(hit.phy_offset for hit in answer.hits))
    remark, last_update = frames.left_out(), LastUpdate()
    if answer.hits:
        newest = next(index.newest_first(index.look())).reader.header()
        last_update = LastUpdate(newest.end_timestamp, newest.end_phy_offset)
    else:
        why = answer.why or f"no answer: cut off by {answer.truncated}"
        remark = "; ".join(filter(None, (why, expired_in_words(answer.coverage))))
    is_covered = answer.why == ABSENT and not frames.unknown
    return FoundFrames(tuple(frames.found), last_update, is_covered, remark)


def view_message(index: QueryIndex, phy_offset: int, size_max: int) -> bytes | NotFound:
    """The frame at a physical offset. A broker sends whatever stands there."""
    index.look()
    found = index.log.frame(phy_offset, size_max)
    if isinstance(found, bytes):
        return found
    if isinstance(found, NotYetWritten) and found.needed > size_max:
        return NotFound(
            f"the message at physical offset {phy_offset} has {found.needed} bytes, and an answer {size_max} at most"
        )
    return not_found(index.log, phy_offset, found)


def pull_message(
    index: QueryIndex, topic: str, queue_id: int, queue_offset: int, max_num: int, size_max: int
) -> PulledFrames:
    """Messages of a queue from ``queue_offset`` on, one at least if there is one, and never waited for."""
    limit = min(max(max_num, 1), _PULL_MAX_NUM, index.config.query.query_max_num)
    answer = query_offset(index, OffsetQuery(topic, queue_id, queue_offset, limit))
    bounds = answer.min_offset, answer.max_offset
    is_covered = answer.coverage.complete
    if answer.status != FOUND:
        # Where a broker sends whoever asks outside of a queue.
        next_offset = min(max(queue_offset, answer.min_offset), answer.max_offset)
        return PulledFrames(answer.status, (), next_offset, *bounds, is_covered)
    frames, next_offset = _Frames(index.log, size_max), answer.next_offset
    for hit in answer.hits:
        if hit.problem is None:
            frames.add([hit.unit.phy_offset])
        if frames.found and frames.missed.get(hit.unit.phy_offset) == frames.too_long:
            next_offset = hit.queue_offset
            break
    nothing = MESSAGE_WAS_REMOVING if answer.expired else NO_MATCHED_MESSAGE
    return PulledFrames(FOUND if frames.found else nothing, tuple(frames.found), next_offset, *bounds, is_covered)


def queue_bounds(index: QueryIndex, topic: str, queue_id: int) -> tuple[int, int]:
    """The first message of a queue that is still in the log, and behind the last one; 0 and 0 without such a queue.

    UsageError if no ConsumeQueues are built.
    """
    return with_queue(
        index, topic, queue_id, lambda _, queue: (0, 0) if queue is None else (queue.min_offset, queue.max_offset)
    )


def earliest_time(index: QueryIndex, topic: str, queue_id: int) -> int:
    """The store time of the first message that is still in the log, in ms; -1 where there is none."""

    def time(_: object, queue: ConsumeQueueReader | None) -> int:
        if queue is None or queue.min_offset >= queue.max_offset:
            return -1
        return index.log.store_timestamp(queue.unit(queue.min_offset).phy_offset)

    return with_queue(index, topic, queue_id, time)


class _Frames:
    """Frames that are being gathered, and what was left out of them."""

    def __init__(self, log: LogView, size_max: int) -> None:
        self._log, self._left = log, size_max
        self.found: list[bytes] = []
        # Their offsets: a broker's rounds name the same message more than once.
        self.named: set[int] = set()
        #: Of those that are not found: why.
        self.missed: dict[int, str] = {}
        #: A message is there that did not fit in any more.
        self.too_long = f"too long for an answer of {size_max} bytes"

    @property
    def unknown(self) -> int:
        """How many were named and are no message: whether they were asked for nobody can tell."""
        return sum(why != self.too_long for why in self.missed.values())

    def add(self, offsets: Sequence[int]) -> None:
        """The frames at these physical offsets, each as often as it is named."""
        found, read = self.found, self._log.frame
        self.named.update(offsets)
        for offset in offsets:
            frame = read(offset, self._left)
            if isinstance(frame, bytes):
                found.append(frame)
                self._left -= len(frame)
            elif isinstance(frame, NotYetWritten) and frame.needed > self._left:
                self.missed[offset] = self.too_long
            else:
                has_expired = frame is None and self._log.has_expired(offset)
                self.missed[offset] = "expired" if has_expired else "unreadable"

    def left_out(self) -> str | None:
        """Which of the messages that were named are not among those found; None if all are."""
        if not self.missed:
            return None
        left = ", ".join(f"{count} {why}" for why, count in sorted(Counter(self.missed.values()).items()))
        return f"of {len(self.named)} messages that the index names: {left}"
