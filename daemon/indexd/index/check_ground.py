"""What a check of one index file is told, and what its entries come to."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from indexd.index.flavour import Flavour
from indexd.index.format import FileMark, IndexEntry, IndexHeader, IndexLayout

_INT_MAX = (1 << 31) - 1


class Condition(enum.Enum):
    """What may be asked of a file besides its durable entries."""

    #: No one writes into it, and the last stop was clean or it is full: all of it is as the frontier says.
    AT_REST = "at rest"
    #: A daemon builds into it: header and slots may know more than the frontier.
    GROWING = "growing"
    #: The daemon died while it built: slots, header and what lies behind the durable entries may be anything.
    CUT_SHORT = "cut short"


@dataclass(frozen=True, slots=True)
class Place:
    """Which file is checked and how: ``name`` is what findings call it, ``before`` the header of the file before it.

    Without ``before`` it is not known from which time entry 1 counts, so nothing is asked of its time difference.
    """

    name: str
    mark: FileMark
    before: IndexHeader | None
    layout: IndexLayout
    flavour: Flavour
    condition: Condition

    @property
    def count(self) -> int:
        """The number behind the last entry that is checked: the mark's, within what the layout has room for."""
        return min(max(self.mark.header.index_count, 1), self.layout.index_num)


@dataclass(slots=True)
class Seen:
    """What the entries of a file come to: the slots as they must be, and the numbers that belong into the header."""

    slots: NDArray[np.uint32]
    used_slot_count: int = 0
    first: IndexEntry | None = None
    last: IndexEntry | None = None


def time_difference(store_timestamp: int, begin_timestamp: int) -> int:
    """What an entry stores of a time: whole seconds since ``begin_timestamp``, in 31 bits (spec rocketmq-store 3.4)."""
    if begin_timestamp <= 0:
        return 0
    difference = (store_timestamp - begin_timestamp + (1 << 63)) % (1 << 64) - (1 << 63)  # a Java long wraps
    return min(max(difference, 0) // 1000, _INT_MAX)
