"""The chains that an index of a layout would have: exact, file by file, without building one.

Entry ``n`` of the log stands in file ``n // (index_num - 1)``, whatever the splits are (spec rocketmq-store 3.2), so a
first pass counts the entries of each split and ``plan_groups`` says which task counts which files. A task reads from
the split in which its first file begins to the entry where its last one ends: only where one ends and the next begins
is a split read twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from indexd.commitlog.batcher import DispatchBatch
from indexd.errors import DisturbedError
from indexd.index.format import Flavour, IndexLayout
from indexd.spark.stats.chains_kernel import (
    DONE,
    FILE_OVER,
    GROW,
    NO_FRAME,
    STATE,
    Kept,
    chain_lengths,
    count_chains,
)
from indexd.spark.stats.parts_kernel import BUCKETS

_KEPT_FIRST = 1 << 12
_OVERLONG_FIRST = 1 << 8

#: A batch and the bytes of the log that it was decoded from.
Pair = tuple[DispatchBatch, NDArray[np.uint8]]


@dataclass(frozen=True, slots=True)
class Group:
    """The files that one task counts: entries ``[begin, end)``, beginning in split ``first_split``.

    ``before`` entries stand before that split; the splits up to ``last_split``, included, hold the rest.
    """

    first_split: int
    last_split: int
    before: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class FileChains:
    """One file. ``lengths`` int64 (2, BUCKETS): slots and entries by bucket of chain length; bucket 0: empty slots.

    ``begin`` and ``end`` are the store times of the first and the last entry, ms. ``example_phy`` is the message, and
    ``example_hash`` the key hash, whose entry made the longest chain so long.
    """

    number: int
    entries: int
    lengths: NDArray[np.int64]
    squares: float
    longest: int
    longest_slot: int
    example_phy: int
    example_hash: int
    begin: int
    end: int
    kept: Kept
    overlong: tuple[int, ...]

    @property
    def used_slots(self) -> int:
        """Slots with at least one entry."""
        return int(self.lengths[0, 1:].sum())


def plan_groups(entries: Sequence[int], layout: IndexLayout) -> list[Group]:
    """Which task counts which files, from the entries of each split: a group for each split in which files begin."""
    capacity = layout.index_num - 1
    before = [0, *accumulate(entries)]
    groups: list[Group] = []
    file, files = 0, -(-before[-1] // capacity)
    for split in range(len(entries)):
        first = file
        while file < files and file * capacity < before[split + 1]:
            file += 1
        if file == first:
            continue
        end = min(file * capacity, before[-1])
        last = next(number for number in range(split, len(entries)) if before[number + 1] >= end)
        groups.append(Group(split, last, before[split], first * capacity, end))
    return groups


def sample_mask(entries: int, kept_max: int) -> int:
    """The mask of the largest sample of slots whose entries come to about ``kept_max`` of ``entries`` at most."""
    level = 0
    while entries >> level > kept_max:
        level += 1
    return (1 << level) - 1


class ChainCounter:
    """Counts entries file by file; ``files`` are those that are over. One owner."""

    def __init__(self, layout: IndexLayout, flavour: Flavour, first_file: int, mask: int) -> None:
        self._capacity = layout.index_num - 1
        self._flavour = np.array([flavour.skip_mask, flavour.uniq_key, flavour.tags], dtype=np.int64)
        self._slots = np.zeros(layout.hash_slot_num, dtype=np.uint32)
        self._mask = np.uint64(mask)
        self._number = first_file
        self.files: list[FileChains] = []
        self._begin_file()

    def _begin_file(self) -> None:
        self._slots[:] = 0
        self._state = np.zeros(len(STATE), dtype=np.int64)
        self._kept = _make_kept(_KEPT_FIRST)
        self._overlong = np.zeros(_OVERLONG_FIRST, dtype=np.int64)

    def add(self, batch: DispatchBatch, frames: NDArray[np.uint8], row: int, key: int, room: int) -> int:
        """Count at most ``room`` entries of a batch from (row, key) on; how many were counted."""
        base, left = np.uint64(batch.begin_offset), room
        while left:
            counted = int(self._state[0])
            to_file_end = min(left, self._capacity - counted)
            status, row, key = count_chains(
                frames, base, batch.columns, row, batch.rows, np.int64(key), self._flavour, to_file_end, self._slots,
                self._mask, self._kept, self._overlong, self._state,
            )  # fmt: skip
            left -= int(self._state[0]) - counted
            if int(self._state[0]) == self._capacity:
                self.end_file()
            if status == DONE:
                break
            if status == GROW:
                self._grow()
            elif status == NO_FRAME:
                raise DisturbedError(f"the log at {batch.columns.phy_offset[row]} was rewritten while it was read")
            else:
                assert status == FILE_OVER
        return room - left

    def end_file(self) -> None:
        """The file is over, full or not; an empty one is none."""
        state = dict(zip(STATE, (int(value) for value in self._state), strict=True))
        if not state["entries"]:
            return
        lengths = np.zeros((2, BUCKETS), dtype=np.int64)
        squares = float(chain_lengths(self._slots, lengths))
        self.files.append(
            FileChains(
                self._number,
                state["entries"],
                lengths,
                squares,
                state["longest"],
                state["slot"],
                state["phy_offset"],
                state["key_hash"],
                state["begin"],
                state["end"],
                Kept._make(column[: state["kept"]].copy() for column in self._kept),
                tuple(int(slot) for slot in self._overlong[: state["overlong"]]),
            )
        )
        self._number += 1
        self._begin_file()

    def _grow(self) -> None:
        kept = _make_kept(2 * len(self._kept.number))
        columns: Iterable[tuple[NDArray[Any], NDArray[Any]]] = zip(kept, self._kept, strict=True)
        for new, old in columns:
            new[: len(old)] = old
        self._kept = kept
        self._overlong = np.concatenate([self._overlong, np.zeros_like(self._overlong)])


def count_group(
    pairs: Iterable[Pair], group: Group, layout: IndexLayout, flavour: Flavour, mask: int
) -> list[FileChains]:
    """The files of a group, from the batches of its splits in log order."""
    capacity = layout.index_num - 1
    counter = ChainCounter(layout, flavour, group.begin // capacity, mask)
    at = group.before
    for batch, frames in pairs:
        if at >= group.end:
            break
        counts = _entries_of_rows(batch, flavour)
        total = int(counts.sum())
        if at + total > group.begin:
            row, key = 0, -1
            if at < group.begin:
                row, key = _place_of(batch, counts, group.begin - at)
                at, total = group.begin, total - (group.begin - at)
            counter.add(batch, frames, row, key, min(total, group.end - at))
        at += total
    counter.end_file()
    return counter.files


def _entries_of_rows(batch: DispatchBatch, flavour: Flavour) -> NDArray[np.int64]:
    columns = batch.columns
    counts = np.diff(columns.key_start[: batch.rows + 1])
    for skipped in flavour.skipped_types:
        counts[columns.sys_flag[: batch.rows] & 0xC == skipped] = 0
    return counts


def _place_of(batch: DispatchBatch, counts: NDArray[np.int64], entry: int) -> tuple[int, int]:
    # The row and the key of the batch's entry of that number.
    behind = np.cumsum(counts)
    row = int(np.searchsorted(behind, entry, side="right"))
    inside = entry - int(behind[row] - counts[row])
    return row, int(batch.columns.key_start[row]) + inside


def _make_kept(size: int) -> Kept:
    return Kept(
        number=np.zeros(size, dtype=np.int32),
        key_hash=np.zeros(size, dtype=np.uint32),
        prints=np.zeros(size, dtype=np.uint64),
        phy_offset=np.zeros(size, dtype=np.int64),
        store_timestamp=np.zeros(size, dtype=np.int64),
    )
