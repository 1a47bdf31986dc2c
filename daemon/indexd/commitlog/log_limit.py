"""How far the broker vouches for its log.

Behind a log that was cut may stand whole frames of the longer one, which prove themselves as any other: who writes the
log is the only one that knows where it ends. What he has named was written whole before he named it.
"""

from __future__ import annotations

from typing import Protocol

from indexd.commitlog.cursor import SegmentCursor
from indexd.commitlog.format import HEAD_SIZE


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


def limit_at(limit: LogLimit | None, cursor: SegmentCursor, position: int) -> int | None:
    """How far a reader at ``position`` may go; to be taken before the bytes are read that it allows."""
    if limit is None:
        return None
    offset = limit.offset
    if (offset is not None and offset > position) or not cursor.has_bytes(position):
        return offset
    return limit.ask(position, cursor.buffer[: cursor.fill(position, HEAD_SIZE)].tobytes())


def allows(limit: LogLimit | None, position: int) -> bool:
    """Whether a message at ``position`` may be believed."""
    return limit is None or not limit.bounds or limit.offset is None or position < limit.offset
