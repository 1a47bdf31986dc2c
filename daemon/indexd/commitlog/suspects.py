"""Suspects: messages of the segment being written that are older than one before them.

The clock went back, or a longer log that was cut has left them behind its new end. A later message that is not older
proves them: it was written after them and after the one before. Times alone say no more than that.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NEVER = -(1 << 63)


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
