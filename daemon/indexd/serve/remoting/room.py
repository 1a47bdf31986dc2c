"""Room: what all connections together may hold of this process's memory. Where it is too much, the largest goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

HELD_MAX = 256 << 20
UNTAKEN_MAX = 256 << 20
# Room is made for more than the one that has just asked, or each of the next would look at all again.
_MAKE_RATIO = 0.75
# What a task takes, whatever its request holds; and its fields, as objects, beside their bytes.
_TASK_SIZE = 4096
_FIELD_SIZE = 16
_HEADER_MASK = 0xFFFFFF


class Guest(Protocol):
    """A connection, as the room sees it; both numbers are the room's to keep."""

    held: int
    untaken: int

    def weigh(self) -> int:
        """How much of its answers it has not taken, now."""

    def end(self, reason: str) -> None:
        """Close it at once; it leaves the room by itself, later."""


class Room:
    """Sizes in bytes: ``held`` are requests, unfinished and under way; ``untaken`` answers, as of each one's last look.

    What a connection leaves behind (requests under way when it closed) is held until it ends.
    """

    def __init__(self, held_max: int = HELD_MAX, untaken_max: int = UNTAKEN_MAX) -> None:
        self._held_max, self._untaken_max = held_max, untaken_max
        self.guests: set[Guest] = set()
        self.held = self.untaken = 0

    def __repr__(self) -> str:
        return f"Room({len(self.guests)} connections, {self.held} bytes held, {self.untaken} untaken)"

    @property
    def is_tight(self) -> bool:
        """Whether half of what may be held is."""
        return 2 * self.held > self._held_max

    def enter(self, guest: Guest) -> None:
        """It may hold something from now on."""
        self.guests.add(guest)

    def leave(self, guest: Guest) -> None:
        """Its answers are gone with it; what it holds still is given back by ``hold``."""
        self.guests.discard(guest)
        self.untaken -= guest.untaken
        guest.untaken = 0

    def hold(self, guest: Guest, size: int) -> None:
        """So much more, or less."""
        guest.held += size
        self.held += size
        if size > 0 and self.held > self._held_max:
            self._make(lambda one: one.held, self.held - int(_MAKE_RATIO * self._held_max))

    def keep(self, guest: Guest, untaken: int) -> None:
        """So much it has not taken now."""
        self.untaken += untaken - guest.untaken
        guest.untaken = untaken
        if self.untaken > self._untaken_max:
            for one in self.guests:
                size = one.weigh()
                self.untaken += size - one.untaken
                one.untaken = size
            if self.untaken > self._untaken_max:
                self._make(lambda one: one.untaken, self.untaken - int(_MAKE_RATIO * self._untaken_max))

    def _make(self, size_of: Callable[[Guest], int], size: int) -> None:
        for guest in sorted(self.guests, key=size_of, reverse=True):
            if size <= 0:
                return
            size -= size_of(guest)
            guest.end("memory")


def weight_of(frame: bytes | bytearray) -> int:
    """What a request holds while it runs: a task, its bytes, and its header's fields as objects beside them."""
    header_size = int.from_bytes(frame[:4], "big") & _HEADER_MASK
    return _TASK_SIZE + len(frame) + _FIELD_SIZE * header_size
