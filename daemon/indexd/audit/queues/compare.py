"""The messages of one queue held against its units, both of one block of the log. Decides, and reads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from indexd.audit.queues.seen import KEPT_MAX, Difference
from indexd.audit.queues.units import Units
from indexd.consumequeue.format import EXT_ADDRESS_MAX


class Messages(NamedTuple):
    """The messages of one queue that enter it, in the order of the log; columns of one length."""

    phy_offset: NDArray[np.int64]
    size: NDArray[np.int32]
    queue_offset: NDArray[np.int64]
    tags_code: NDArray[np.int64]

    def rows(self, rows: NDArray[Any]) -> Messages:
        """Those of some rows, or where a mask says so."""
        return Messages(self.phy_offset[rows], self.size[rows], self.queue_offset[rows], self.tags_code[rows])


NO_MESSAGES = Messages(np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, np.int64))


def joined(parts: Sequence[Messages]) -> Messages:
    """One after the other."""
    phy_offsets, sizes, queue_offsets, tags_codes = zip(*parts, strict=True)
    return Messages(
        np.concatenate(phy_offsets), np.concatenate(sizes), np.concatenate(queue_offsets), np.concatenate(tags_codes)
    )


class Compared(NamedTuple):
    """By kind, how many differences and the first of them; ``missing`` rows of messages without a unit.

    ``wrong_units``: the places of all units that differ. ``ext_units``: whose tags codes are addresses.
    """

    differences: dict[str, tuple[int, list[Difference]]]
    missing: NDArray[np.int64]
    wrong_units: NDArray[np.int64]
    ext_units: int


def compare(messages: Messages, found: Units, begins: NDArray[np.int64]) -> Compared:
    """``begins`` are where the block's messages begin, those of all queues, in order."""
    units, offsets = found
    none = np.empty(0, dtype=np.int64)
    is_ext = units["tags_code"] <= EXT_ADDRESS_MAX
    if (
        len(units) == len(messages.phy_offset)
        and (units["phy_offset"] == messages.phy_offset).all()
        and (offsets == messages.queue_offset).all()
        and (units["size"] == messages.size).all()
        and (is_ext | (units["tags_code"] == messages.tags_code)).all()
    ):
        return Compared({}, none, none, int(is_ext.sum()))
    return _differences(messages, units, offsets, begins)


def _differences(
    messages: Messages, units: NDArray[np.void], offsets: NDArray[np.int64], begins: NDArray[np.int64]
) -> Compared:
    phy_offsets = units["phy_offset"].astype(np.int64)
    # The message that each unit stands for; one in its own place comes before others for the same message.
    row, is_known = _find(phy_offsets, messages.phy_offset)
    place = messages.queue_offset[row] if len(messages.phy_offset) else offsets
    order = np.lexsort((offsets, np.abs(offsets - place), phy_offsets))
    units, offsets, phy_offsets = units[order], offsets[order], phy_offsets[order]
    row, is_known = row[order], is_known[order]
    again = np.zeros(len(units), dtype=np.bool_)
    again[1:] = phy_offsets[1:] == phy_offsets[:-1]
    _, is_begin = _find(phy_offsets, begins)
    is_own = is_known & ~again
    differences: dict[str, tuple[int, list[Difference]]] = {}
    wrong = np.zeros(len(units), dtype=np.bool_)

    def note(what: str, mask: NDArray[np.bool_], values: NDArray[np.int64], wanted: NDArray[np.int64] | None) -> None:
        nonlocal wrong
        at = np.flatnonzero(mask)
        if not len(at):
            return
        wrong |= mask
        at = at[np.lexsort((offsets[at], phy_offsets[at]))]
        due = [0] * KEPT_MAX if wanted is None else wanted[row[at[:KEPT_MAX]]].tolist()
        rows = zip(phy_offsets[at].tolist(), offsets[at].tolist(), values[at].tolist(), due, strict=False)
        differences[what] = (len(at), [Difference(*one) for one in rows])

    note("unit-without-message", ~is_known & ~is_begin, phy_offsets, None)
    note("unit-of-another-queue", ~is_known & is_begin, phy_offsets, None)
    note("unit-twice", is_known & again, phy_offsets, None)
    ext = units["tags_code"] <= EXT_ADDRESS_MAX
    for what, values, wanted, counts in (
        ("unit-place", offsets, messages.queue_offset, True),
        ("unit-size", units["size"].astype(np.int64), messages.size.astype(np.int64), True),
        ("unit-tags-code", units["tags_code"].astype(np.int64), messages.tags_code, ~ext),
    ):
        differs = np.zeros(len(units), dtype=np.bool_)
        differs[is_own] = values[is_own] != wanted[row[is_own]]
        note(what, differs & counts, values, wanted)
    missing = np.flatnonzero(~_find(messages.phy_offset, phy_offsets)[1])
    if len(missing):
        differences["unit-missing"] = (len(missing), _missing(messages, missing))
    return Compared(differences, missing, offsets[wrong], int((ext & is_own).sum()))


def _missing(messages: Messages, rows: NDArray[np.int64]) -> list[Difference]:
    rows = rows[:KEPT_MAX]
    pairs = zip(messages.phy_offset[rows].tolist(), messages.queue_offset[rows].tolist(), strict=True)
    return [Difference(phy_offset, offset) for phy_offset, offset in pairs]


def _find(values: NDArray[np.int64], among: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    # The row of each value among rising ones, and whether it is there; row 0 where it is not.
    if not len(among):
        return np.zeros(len(values), dtype=np.int64), np.zeros(len(values), dtype=np.bool_)
    row = np.minimum(among.searchsorted(values), len(among) - 1)
    is_there = among[row] == values
    return np.where(is_there, row, 0), is_there
