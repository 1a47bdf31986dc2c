"""What the reader needs at the end of the log, where the broker writes: what counts yet, and what may be stale.

Bytes at the end count when a second look finds them unchanged (Settling).

A suspect is a message of the segment being written that is older than one before it: the clock went back, or a longer
log that was cut has left it behind its new end. A later message that is not older proves it: that was written after it
and after the one before. Times alone say no more than that. Behind a frame that cannot be read every message is one:
that frame may be the only one that was written after a cut.

Behind a log that was cut may stand whole frames of the longer one, which prove themselves as any other. Who writes the
log is the only one that knows where it ends: LogLimit asks the broker. What it has named was written whole before.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from indexd.commitlog.decoder import walk_frame
from indexd.commitlog.format import STAMPED_SIZE
from indexd.commitlog.lookup import FrameReader


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
    parts = walk_frame(data, int.from_bytes(data[4:8], "big"))
    return parts is not None and (b"\0" in parts[2] or b"\0" in parts[3])


NEVER = -(1 << 63)
#: What cannot be read may have been written after everything else: every later message of the segment is a suspect.
UNREADABLE_TIMESTAMP = (1 << 63) - 1


class TailState(NamedTuple):
    """``newest``: what later messages are compared with, ms; from ``unproven_from`` on, if not None, are suspects."""

    newest: int = NEVER
    unproven_from: int | None = None

    def after(self, first: int, behind: TailState) -> TailState:
        """The stand behind messages from offset ``first`` on that alone come to ``behind``."""
        if behind.newest >= self.newest:
            return behind
        return TailState(self.newest, first if self.unproven_from is None else self.unproven_from)


#: Before the first message.
AT_FIRST = TailState()


def stand_of(times: NDArray[np.int64], offsets: NDArray[np.int64]) -> TailState:
    """What so many messages, one at least, come to by themselves."""
    last = len(times) - int(times[::-1].argmax())
    return TailState(int(times[last - 1]), int(offsets[last]) if last < len(times) else None)


def first_older(times: NDArray[np.int64], newest: int) -> int | None:
    """The first of ``times`` that is before ``newest`` or before one before it."""
    older = times < np.maximum.accumulate(np.concatenate((np.array([newest]), times[:-1])))
    first = int(older.argmax())
    return first if older[first] else None


# Between two looks whether the broker has answered.
_PAUSE = 0.002


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
    head = frames.read(end, end + STAMPED_SIZE)
    while head and limit.ask(end, head) == end:
        if limit.ends_at(end, head):
            return head
        time.sleep(_PAUSE)
    return None
