"""What the reader needs at the end of the log, where the broker writes: what counts yet, and what may be stale.

Bytes at the end count when a second look finds them unchanged (Settling).

A suspect is a message of the segment being written that is older than one before it: the clock went back, or a longer
log that was cut has left it behind its new end. A later message that is not older proves it: that was written after it
and after the one before. Times alone say no more than that. Behind a frame that cannot be read every message is one:
that frame may be the only one that was written after a cut.

Behind a log that was cut may stand whole frames of the longer one, which prove themselves as any other. Who writes the
log is the only one that knows where it ends: LogLimit asks the broker. What it has named was written whole before.

Behind damage the log goes on at the next frame that proves itself by its own offset, its lengths and its checksums.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from indexd.commitlog.batcher import Batcher
from indexd.commitlog.cursor import SegmentCursor
from indexd.commitlog.evidence import FrameReader
from indexd.commitlog.format import FLAG_BORN_HOST_V6, FLAG_STORE_HOST_V6, HEAD_SIZE, MAGIC_V1, Outcome
from indexd.commitlog.kernel import Rules, find_frame


class Settling:
    """The bytes at one offset, and since when they have been as they are."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.clear()

    def clear(self) -> None:
        """Forget: the reader has moved on."""
        self.offset = -1
        self.is_frame = False
        self._data = b""
        self._since = 0.0

    def size_at(self, offset: int) -> int:
        """How many bytes of whole frames settle at ``offset``; 0 for none."""
        return len(self._data) if self.is_frame and self.offset == offset else 0

    def unchanged_for(self, offset: int, data: bytes, seconds: float, *, is_frame: bool) -> bool:
        """Whether ``data`` has stood at ``offset`` for so long; remembers it otherwise."""
        now = self._clock()
        if self.offset != offset or self._data != data:
            self.offset, self._data, self._since = offset, data, now
        self.is_frame = is_frame
        return self._data == data and self._since < now and now - self._since >= seconds


def has_nul(data: bytes) -> bool:
    """Whether the topic or properties of a whole frame hold a NUL.

    No CRC need cover them; a sane producer sends none, and preallocated bytes are nothing else.
    """
    flags = int.from_bytes(data[36:40], "big")
    body = 72 + (20 if flags & FLAG_BORN_HOST_V6 else 8) + (20 if flags & FLAG_STORE_HOST_V6 else 8)
    topic_size = body + max(int.from_bytes(data[body - 4 : body], "big", signed=True), 0)
    topic = topic_size + (1 if int.from_bytes(data[4:8], "big") == MAGIC_V1 else 2)
    topic_end = topic + int.from_bytes(data[topic_size:topic], "big")
    return b"\0" in data[topic:topic_end] or b"\0" in data[topic_end + 2 :]


NEVER = -(1 << 63)
#: What cannot be read may have been written after everything else: every later message of the segment is a suspect.
UNREADABLE_TIMESTAMP = (1 << 63) - 1


class Stand(NamedTuple):
    """``newest``: what later messages are compared with, ms; from ``unproven_from`` on, if not None, are suspects."""

    newest: int = NEVER
    unproven_from: int | None = None

    def after(self, first: int, behind: Stand) -> Stand:
        """The stand behind messages from offset ``first`` on that alone come to ``behind``."""
        if behind.newest >= self.newest:
            return behind
        return Stand(self.newest, first if self.unproven_from is None else self.unproven_from)


#: Before the first message.
AT_FIRST = Stand()


def stand_of(times: NDArray[np.int64], offsets: NDArray[np.int64]) -> Stand:
    """What so many messages, one at least, come to by themselves."""
    last = len(times) - int(times[::-1].argmax())
    return Stand(int(times[last - 1]), int(offsets[last]) if last < len(times) else None)


def first_older(times: NDArray[np.int64], newest: int) -> int | None:
    """The first of ``times`` that is before ``newest`` or before one before it."""
    older = times < np.maximum.accumulate(np.concatenate((np.array([newest]), times[:-1])))
    first = int(older.argmax())
    return first if older[first] else None


# Between two looks whether the broker has answered.
_PAUSE = 0.002
# A frame up to its store timestamp, however long its hosts.
_STAMPED_SIZE = 76


def head_at(cursor: SegmentCursor, position: int) -> bytes:
    """The first bytes at ``position`` of the open segment, so many that a frame which is written there changes them."""
    return cursor.buffer[: cursor.fill(position, _STAMPED_SIZE)].tobytes()


class LogLimit(Protocol):
    """Whoever can ask the broker; without one, the bytes alone decide."""

    @property
    def bounds(self) -> bool:
        """Nothing behind ``offset`` is believed; else it is asked about suspects alone, and nobody doubts the rest."""

    @property
    def offset(self) -> int | None:
        """The physical offset behind the broker's last message, as it was named last; None: it has not answered."""

    def ask(self, position: int, head: bytes = b"") -> int | None:
        """``offset``, perhaps newer: bytes stand at ``position``, which is not before it. May take a second or two.

        ``head`` is how they begin: while it stays the same, nothing was written there.
        """

    def ends_at(self, position: int, head: bytes) -> bool:
        """Whether the broker, asked when ``head`` stood at ``position`` already, named that offset."""


def ask_what_stands(limit: LogLimit, frames: FrameReader, end: int) -> bytes | None:
    """How the bytes at ``end`` begin, if the broker names that offset though they stand there; for no reader.

    None if it names another, does not answer, or if there are none.
    """
    head = frames.read(end, end + _STAMPED_SIZE)
    while head and limit.ask(end, head) == end:
        if limit.ends_at(end, head):
            return head
        time.sleep(_PAUSE)
    return None


def limit_at(limit: LogLimit | None, cursor: SegmentCursor, position: int) -> int | None:
    """How far a reader at ``position`` may go; to be taken before the bytes are read that it allows."""
    if limit is None or not limit.bounds:
        return None
    offset = limit.offset
    if (offset is not None and offset > position) or not cursor.has_bytes(position):
        return offset
    return limit.ask(position, head_at(cursor, position))


def allows(limit: LogLimit | None, position: int) -> bool:
    """Whether a message at ``position`` may be believed."""
    return limit is None or not limit.bounds or limit.offset is None or position < limit.offset


def next_proven(
    cursor: SegmentCursor, batcher: Batcher, rules: Rules, begin: int, window: int, not_before: int
) -> int | None:
    """The offset of the next proven frame behind ``begin`` in the open segment, or None.

    Frames with a store timestamp below ``not_before`` do not count: in a segment that is being written they are what an
    older and longer log has left behind.
    """
    assert cursor.segment is not None
    offset = begin + 1
    while offset < cursor.segment.end:
        limit = cursor.fill(offset, window)
        at = int(find_frame(cursor.buffer, np.uint64(0), np.uint64(limit), np.uint64(offset)))
        if at >= limit:
            # A head that straddles two windows is found in the second.
            offset += max(limit - HEAD_SIZE + 1, 1)
            continue
        offset += at
        if _is_frame(cursor, batcher, rules, offset, window, not_before):
            return offset
        offset += 1
    return None


def _is_frame(cursor: SegmentCursor, batcher: Batcher, rules: Rules, offset: int, window: int, not_before: int) -> bool:
    assert cursor.segment is not None
    limit = cursor.fill(offset, window)
    found = batcher.decode(cursor.buffer, limit, offset, cursor.segment.end, rules)
    if found.batch is None and found.outcome is Outcome.NOT_YET_WRITTEN and found.total > limit:
        limit = cursor.fill(offset, found.total)
        found = batcher.decode(cursor.buffer, limit, offset, cursor.segment.end, rules)
    return found.batch is not None and int(found.batch.columns.store_timestamp[0]) >= not_before
