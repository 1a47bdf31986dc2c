"""The key index compared with the log: the entries of index files against the keys of the messages.

Both sides are in the order of physical offsets. Where all entries are as they must be, one compiled pass over them says
so; else entries and keys are told apart by message and key hash. A key without an entry and an entry of no
key of the same message are one wrong hash.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from indexd.commitlog.batcher import DispatchBatch
from indexd.errors import MissingOk
from indexd.findings import Findings
from indexd.index.entries import first_entry_at, phy_offset_of, read_entries
from indexd.index.format import ENTRY_SIZE, IndexHeader, IndexLayout
from indexd.index.kernel import count_right
from indexd.storage.disk import Disk

Integers = NDArray[Any]
Flags = NDArray[np.bool_]

#: What an entry can be: of a key of its message, or wrong; the order is that of ``KINDS``.
RIGHT, WITHOUT_MESSAGE, WITHOUT_KEY, WRONG_HASH, TWICE, WRONG_TIME = range(6)
#: What those are called, and where in the entry the number stands that is wrong.
KINDS = (
    ("", 0, ""),
    ("entry-without-message", 4, "no message begins at {phy}, where it points"),
    ("entry-without-key", 0, "key hash {value}, but the message at {phy} has no such key"),
    ("entry-hash", 0, "key hash {value}, but the message at {phy} has the key {wanted} there"),
    ("entry-twice", 0, "key hash {value} of the message at {phy} once more"),
    ("entry-time-difference", 12, "the time difference is {value}, but for the message at {phy} it is {wanted}"),
)
BEHIND_LOG = ("entry-behind-log", 4, "points to {phy}, behind the end of the log")
#: Of each kind so many are put into words at a time.
NOTED_MAX = 100
ENTRIES_PER_WINDOW = 1 << 18
_DIFFERENCE_MAX = (1 << 31) - 1


class Entries(NamedTuple):
    """``rows`` as ``read_entries`` has them; ``number`` is the number of each in its file."""

    rows: NDArray[np.uint32]
    number: Integers

    @property
    def phy_offset(self) -> Integers:
        """Where they point."""
        return np.ascontiguousarray(self.rows[:, 1:3]).view(">i8")[:, 0].astype(np.int64)

    @property
    def key_hash(self) -> Integers:
        """Of their keys."""
        return self.rows[:, 0].byteswap()

    @property
    def time_diff(self) -> Integers:
        """Their time differences, s."""
        return self.rows[:, 3].byteswap().view(np.int32)

    def only(self, which: slice | Flags | Integers) -> Entries:
        """Some of them, or all in another order."""
        return Entries(self.rows[which], self.number[which])


class Keys(NamedTuple):
    """Messages (``phy_offset``, ``timestamp``) and their keys, in log order; ``row`` is the message of a key."""

    phy_offset: Integers
    timestamp: Integers
    row: Integers
    key_hash: Integers


def numbered(rows: NDArray[np.uint32], number: int) -> Entries:
    """Rows of ``read_entries``, of which the first has ``number``."""
    return Entries(rows, np.arange(number, number + len(rows), dtype=np.int32))


def joined(parts: Sequence[Entries]) -> Entries:
    """One behind the other."""
    none = numbered(np.empty((0, 5), dtype=np.uint32), 1)
    return parts[0] if len(parts) == 1 else Entries(*map(np.concatenate, zip(none, *parts, strict=True)))


def keys_of(batch: DispatchBatch, skip_mask: int) -> Keys:
    """The messages of a batch; those that ``skip_mask`` names have no keys."""
    columns, rows = batch.columns, batch.rows
    starts = columns.key_start[: rows + 1].astype(np.int64)
    row, hashes = np.repeat(np.arange(rows), np.diff(starts)), columns.key_hash[starts[0] : starts[-1]]
    is_indexed = skip_mask >> (columns.sys_flag[:rows].astype(np.int64) & 0xC) & 1 == 0
    if not is_indexed.all():
        row, hashes = row[is_indexed[row]], hashes[is_indexed[row]]
    return Keys(columns.phy_offset[:rows], columns.store_timestamp[:rows], row, hashes)


#: Where the log has no message.
NO_KEYS = Keys(*(np.empty(0, dtype=kind) for kind in (np.int64, np.int64, np.int64, np.uint32)))


def time_differences(timestamps: Integers, begin: int) -> Integers:
    """What entries store of these times in a file that begins at ``begin`` (spec rocketmq-store 3.4)."""
    if begin <= 0:
        return np.zeros(len(timestamps), dtype=np.int64)
    differences: Integers = np.clip(timestamps - begin, 0, 1000 * _DIFFERENCE_MAX) // 1000
    return differences


class Match(NamedTuple):
    """Entries held against the keys of messages.

    Of each entry: ``row``, its message, where it ``is_known``; ``kind``; ``wanted``, the hash that is due where it is
    wrong. Of each key: whether it ``is_missing``, ``is_lost``, without an entry that is findable; ``unpaired`` are the
    missing ones for which no wrong entry stands. ``is_right``: all are as they must be, their times, too.
    """

    row: Integers
    is_known: Flags
    kind: Integers
    wanted: Integers
    is_missing: Flags
    is_lost: Flags
    unpaired: Integers
    is_right: bool = False

    def of(self, at: slice) -> Match:
        """Some of the entries."""
        return self._replace(**{name: getattr(self, name)[at] for name in ("row", "is_known", "kind", "wanted")})


def match_entries(keys: Keys, entries: Entries, is_findable: Flags) -> Match:
    """Tell entries and keys of messages apart; a message's entries may stand in several files, one behind the other."""
    row = keys.phy_offset.searchsorted(entries.phy_offset)
    offsets = np.append(keys.phy_offset, -1)  # no entry of a message points there
    is_known = (offsets[row] == entries.phy_offset) & (row < len(keys.phy_offset))
    own, due = np.where(is_known, _codes(row, entries), -1), _codes(keys.row, keys)
    count, given = _count(own, due), _count(due, own)
    rules = [~is_known, count == 0, _ranks(own) >= count]
    kind, wanted = np.select(rules, [WITHOUT_MESSAGE, WITHOUT_KEY, TWICE], RIGHT), np.zeros_like(row)
    is_missing = _ranks(due) >= given
    # The wrong entries of a message and its missing keys, in pairs.
    wrong, missing = np.flatnonzero(kind == WITHOUT_KEY), np.flatnonzero(is_missing)
    rows, missing_rows = row[wrong], keys.row[missing]
    ranks = _ranks(rows)
    is_paired = ranks < _count(rows, missing_rows)
    paired = wrong[is_paired]
    kind[paired] = WRONG_HASH
    wanted[paired] = keys.key_hash[missing[missing_rows.searchsorted(rows[is_paired]) + ranks[is_paired]]]
    unpaired = missing[_ranks(missing_rows) >= _count(missing_rows, rows)]
    is_lost = (given if is_findable.all() else _count(due, own[is_known & is_findable])) == 0
    return Match(row, is_known, kind, wanted, is_missing, is_lost, unpaired)


def _codes(row: Integers, of: Keys | Entries) -> Integers:
    # Message and hash as one number.
    return row << 32 | of.key_hash


def _count(values: Integers, among: Integers) -> Integers:
    # How often each value stands among others.
    order = np.sort(among, kind="stable")  # nearly sorted by rows, which that makes use of
    return order.searchsorted(values, "right") - order.searchsorted(values)


def _ranks(values: Integers) -> Integers:
    # How many of the same value stand before each.
    order = np.argsort(values, kind="stable")
    ranks = np.empty_like(order)
    ranks[order] = np.arange(len(order)) - values[order].searchsorted(values[order])
    return ranks


class ComparedFile:
    """One index file beside the log: entries are taken in the order of the log, and what is wrong goes to ``findings``.

    ``header`` says which entries there are and from which time they count; ``name`` is what findings call it. ``wait``
    is told how many bytes are read next. Entry 1 counts from ``previous_end``, where the file before ended, ms; None
    where nobody knows that file. ``low`` .. ``high`` is where the ``strays`` point, entries of no key;
    ``taken`` entries were given out, ``compared`` judged. ``is_gone``: the file was not there, or too short, when it
    was to be read. ``findable`` has a byte an entry number, 0 for one that no query comes to; without, all are found.
    """

    def __init__(
        self,
        disk: Disk,
        path: Path,
        layout: IndexLayout,
        header: IndexHeader,
        wait: Callable[[int], object] = int,
        previous_end: int | None = None,
        findable: Integers | None = None,
    ) -> None:
        self.previous_end = previous_end
        self._disk, self._path, self._layout, self._wait = disk, path, layout, wait
        self.header, self.findings = header, Findings()
        self._findable = findable
        self.name = f"index/{path.name}"
        self._window = joined(())
        self._next, self._end = 1, header.index_count
        self.taken = self.compared = self.strays = 0
        self.low, self.high = 1 << 62, -1
        self.is_gone = False
        # Store timestamps of the messages of the first and the last entry, by number.
        self._times: dict[int, int] = {}

    def select(self, begin: int, end: int, *, is_ordered: bool) -> None:
        """Only those that point into ``[begin, end)``. If not ``is_ordered``, they are all read now and sorted."""
        self._window = joined(())
        with MissingOk(), self._disk.open_read(self._path) as file:
            if is_ordered:
                self._next = first_entry_at(file, self._layout, 1, self._end, begin)
                self._end = first_entry_at(file, self._layout, self._next, self._end, end)
                return
        parts = []
        while self._load():
            there = self._window.phy_offset
            parts.append(self._window.only((there >= begin) & (there < end)))
            self._window = joined(())
        found = joined(parts)
        parts.clear()  # a file of 20,000,000 entries has much memory in them
        self._window = found.only(np.argsort(found.phy_offset, kind="stable"))

    def take_below(self, phy_offset: int) -> Entries:
        """Those that point below ``phy_offset`` and were not taken before."""
        parts = []
        while self._load():
            count = bisect_left(self._window.rows, phy_offset, key=phy_offset_of)
            parts.append(self._window.only(slice(count)))
            self.taken += count
            self._window = self._window.only(slice(count, None))
            if len(self._window.number):
                break
        return joined(parts)

    def _load(self) -> bool:
        # Have a window with an entry; False when there is none left.
        if len(self._window.number) or self._next >= self._end:
            return bool(len(self._window.number))
        count, entries = min(self._end - self._next, ENTRIES_PER_WINDOW), np.empty((0, 5), dtype=np.uint32)
        with MissingOk(), self._disk.open_read(self._path) as file:
            self._wait(count * ENTRY_SIZE)
            entries = read_entries(file, self._layout, self._next, count)
        self._window = numbered(entries, self._next)
        self.is_gone = len(entries) < count
        self._next = self._end if self.is_gone else self._next + count
        return len(entries) > 0

    @property
    def next_offset(self) -> int | None:
        """Where the next entry points; None behind the last one."""
        return phy_offset_of(self._window.rows[0]) if self._load() else None

    @property
    def is_over(self) -> bool:
        """Whether all its entries were taken."""
        return self._next >= self._end and not len(self._window.number)

    def finds(self, numbers: Integers) -> Flags:
        """Which of these entries a query comes to."""
        found = self._findable
        return np.ones(len(numbers), dtype=np.bool_) if found is None else found[numbers].astype(np.bool_)

    def judge(self, keys: Keys, entries: Entries, match: Match) -> None:
        """Write down what is wrong with entries of this file that were held against these messages."""
        self.compared += len(entries.number)
        for number in {1, self.header.index_count - 1}:
            for at in np.flatnonzero((entries.number == number) & match.is_known):
                self._times[number] = int(keys.timestamp[match.row[at]])
        if match.is_right:
            return
        timestamps = np.append(keys.timestamp, 0)[np.where(match.is_known, match.row, -1)]
        due = time_differences(timestamps, self.header.begin_timestamp)
        first = (
            time_differences(timestamps, self.previous_end or 0) if self.previous_end is not None else entries.time_diff
        )
        due = np.where(entries.number == 1, first, due)
        is_late = match.is_known & (entries.time_diff != due)
        if is_late.any():
            self.note(entries.only(is_late), KINDS[WRONG_TIME], entries.time_diff[is_late], due[is_late])
        if not match.kind.any():
            return
        for kind in range(WITHOUT_MESSAGE, TWICE + 1):
            rows = match.kind == kind
            self.note(entries.only(rows), KINDS[kind], entries.key_hash[rows], match.wanted[rows])
        strays = entries.phy_offset[(match.kind > RIGHT) & (match.kind < TWICE)]
        if len(strays):
            self.strays += len(strays)
            self.low, self.high = min(self.low, int(strays.min())), max(self.high, int(strays.max()))

    def count_right(self, keys: Keys, first: int, entries: Entries) -> int:
        """How many entries of this file are those of the keys from ``first`` on, before one that is not."""
        begin = -1 if self.previous_end is None else self.previous_end
        return int(count_right(*keys, first, *entries, self.header.begin_timestamp, begin))

    def note(self, entries: Entries, kind: tuple[str, int, str], value: Integers, wanted: Integers) -> None:
        """All of these are wrong in the same way; the first are put into words."""
        what, at, text = kind
        columns = (entries.number, entries.phy_offset, value, wanted)
        for number, phy, there, due in zip(*(column[:NOTED_MAX].tolist() for column in columns), strict=True):
            words = f"entry {number}: {text.format(phy=phy, value=there, wanted=due)}"
            self.findings.add(self.name, self._layout.entry_position(number) + at, what, words)
        self.findings.count(what, max(len(entries.number) - NOTED_MAX, 0))

    def judge_times(self, *, is_growing: bool = False) -> None:
        """Compare the header's times with those of its messages; of a file that ``is_growing`` only the first."""
        begin, end = self._times.get(1), self._times.get(self.header.index_count - 1)
        rows = [("begin", 0, self.header.begin_timestamp, begin)]
        rows += [] if is_growing else [("end", 8, self.header.end_timestamp, end)]
        for name, position, here, by_message in rows:
            if by_message not in (None, here):
                text = f"{name} timestamp {here}, but by its message it is {by_message}"
                self.findings.add(self.name, position, f"header-{name}-timestamp", text)


def compare_files(keys: Keys, bound: int, files: Iterable[ComparedFile]) -> Match:
    """Hold all entries that point below ``bound`` against these messages, which lie below it, too."""
    taken = [(file, file.take_below(bound)) for file in files]
    flags = [np.empty(0, dtype=np.bool_), *(file.finds(part.number) for file, part in taken)]
    findable, right = np.concatenate(flags), 0
    for file, part in taken:
        right += file.count_right(keys, right, part)
    if right == len(keys.row) == len(findable) and findable.all():
        lost = np.zeros(right, dtype=np.bool_)
        match = Match(keys.row, ~lost, lost, lost, lost, lost, keys.row[:0], is_right=True)
    else:
        match = match_entries(keys, joined([part for _, part in taken]), findable)
    first = 0
    for file, part in taken:
        file.judge(keys, part, match.of(slice(first, first + len(part.number))))
        first += len(part.number)
    return match
