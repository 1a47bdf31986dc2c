"""The key index compared with the log: a cursor over the entries, and what is wrong where log and entries differ.

What agrees, and that should be all, goes through the kernel's match_batch. At the first difference Resync takes over:
both sides are in the order of physical offsets, so a message is the measure. The entries that point to it are held
against its keys, those that point elsewhere belong to no message, and the next message starts afresh. An entry that
points too high is told from missing entries by those behind it, which point lower.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from indexd.commitlog.batcher import DispatchBatch
from indexd.errors import DiskError
from indexd.findings import Findings
from indexd.index.check import time_difference
from indexd.index.entries import ENTRIES_PER_READ, first_entry_at, phy_offset_of, read_entries, time_diff_of
from indexd.index.format import FileMark, IndexEntry, IndexHeader, IndexLayout, inherited, unpack_entry
from indexd.storage.disk import Disk

# Entries behind one that are asked whether they point lower: a few see an offset that is a little too high, many see
# beyond a damaged block of a file system, which holds 200.
_NEAR = 16
_AHEAD = 4096
_BEGIN_TIMESTAMP, _END_TIMESTAMP, _BEGIN_PHY, _END_PHY, _, _COUNT = range(6)
_EVERYTHING = 1 << 62


class EntryCursor:
    """Stands at entry ``number`` of ``files[at]``. ``state`` is the header before that entry, as match_batch moves it.

    ``on_end`` is called with the mark and the state of each file that was walked to its end. ``may_be_gone``: a file
    that is missing or too short is passed over, and in ``lost``; else it raises. ``has_expired``: the file before the
    first one may be gone, from whose end entry 1 counts.
    """

    def __init__(
        self,
        disk: Disk,
        directory: Path,
        layout: IndexLayout,
        files: tuple[FileMark, ...],
        on_end: Callable[[FileMark, IndexHeader], None] = lambda *_: None,
        *,
        may_be_gone: bool = True,
        has_expired: bool = False,
    ) -> None:
        self._disk, self._directory, self.layout = disk, directory, layout
        self._on_end = on_end
        self._may_be_gone, self._has_expired = may_be_gone, has_expired
        self.files = files
        self.at = 0
        self.number = 1
        self.state = np.array(IndexHeader().values(), dtype=np.int64)
        self.window: NDArray[np.uint32] = np.empty((0, 5), dtype=np.uint32)
        self.position = 0
        #: Entries that were held against a message, or found to have none.
        self.walked = 0
        #: Files that could not be read to their end, with the entries that were left in them.
        self.lost: list[tuple[FileMark, int]] = []

    @property
    def done(self) -> bool:
        """Behind the last entry of the last file; ``load`` finds that out."""
        return self.at >= len(self.files)

    @property
    def name(self) -> str:
        """What findings call the file, the last one behind its end."""
        return f"index/{self.files[min(self.at, len(self.files) - 1)].name}" if self.files else "frontier"

    @property
    def place(self) -> int:
        """The byte position of the entry, or of the one that would come next."""
        if not self.files:
            return 0
        number = self.files[-1].header.index_count if self.done else self.number
        return self.layout.entry_position(number)

    @property
    def left(self) -> int:
        """Entries of the file from this one on."""
        return 0 if self.done else self.files[self.at].header.index_count - self.number

    def load(self) -> None:
        """Have an entry in the window, unless it is done; steps over files whose entries are used up."""
        while self.position >= len(self.window) and not self.done:
            if self.left <= 0:
                self._on_end(self.files[self.at], IndexHeader(*self.state.tolist()))
                self.leave_file()
                continue
            mark = self.files[self.at]
            try:
                with self._disk.open_read(self._directory / mark.name) as file:
                    self.window = read_entries(file, self.layout, self.number, min(self.left, ENTRIES_PER_READ))
            except DiskError as error:
                if not error.is_missing or not self._may_be_gone:
                    raise
                self.window = self.window[:0]
            self.position = 0
            if self._has_expired and self.at == 0 and self.number == 1 and len(self.window):
                # It counts from the end of a file that nobody knows any more: that difference is taken as it is.
                self.state[_BEGIN_TIMESTAMP] = mark.header.begin_timestamp - 1000 * time_diff_of(self.window[0])
            if len(self.window) == 0:
                self.lost.append((mark, self.left))
                self.leave_file()

    @property
    def phy_offset(self) -> int:
        """Of the entry; far behind everything when none is left."""
        self.load()
        return _EVERYTHING if self.done else phy_offset_of(self.window[self.position])

    def seek(self, phy_offset: int) -> None:
        """On to the first entry of a message at ``phy_offset`` or behind it, by binary search."""
        while not self.done and self.files[self.at].header.end_phy_offset < phy_offset:
            self.leave_file()
        self.window, self.position = self.window[:0], 0
        if self.done:
            return
        header = self.files[self.at].header
        with self._disk.open_read(self._directory / self.files[self.at].name) as file:
            number = first_entry_at(file, self.layout, self.number, header.index_count, phy_offset)
            if number > self.number:
                last = phy_offset_of(read_entries(file, self.layout, number - 1, 1)[0])
                self.number = number
                self.state[:] = replace(header, end_phy_offset=last, index_count=number).values()

    def leave_file(self) -> None:
        """On to the first entry of the next file, whose header inherits this one's end (spec rocketmq-store 3.5)."""
        self.state[:] = inherited(self.files[self.at].header).values()
        self.at, self.number, self.position = self.at + 1, 1, 0
        self.window = self.window[:0]

    def entry(self) -> IndexEntry | None:
        """The entry it stands at; None behind the last one."""
        self.load()
        return None if self.done else unpack_entry(self.window[self.position].tobytes())

    def used(self, position: int) -> None:
        """match_batch has taken the window's entries up to ``position`` and moved the state."""
        self.walked += position - self.position
        self.number += position - self.position
        self.position = position

    def put(self, phy_offset: int, store_timestamp: int) -> None:
        """The entry belongs to that message: on to the next, with the header as its put left it."""
        state = self.state
        if state[_COUNT] <= 1:
            state[_BEGIN_PHY], state[_BEGIN_TIMESTAMP] = phy_offset, store_timestamp
        state[_END_PHY], state[_END_TIMESTAMP] = phy_offset, store_timestamp
        state[_COUNT] += 1
        self.used(self.position + 1)

    def orphan(self) -> None:
        """The entry belongs to no message: on to the next, taking from the header's word what its put changed."""
        header = self.files[self.at].header
        if self.number == 1:
            self.state[_BEGIN_TIMESTAMP] = header.begin_timestamp
        if self.left == 1:
            self.state[_END_TIMESTAMP] = header.end_timestamp
        self.state[_COUNT] += 1
        self.used(self.position + 1)

    def skip_below(self, phy_offset: int) -> int:
        """Step over entries that point below ``phy_offset``, up to the first that does not; how many they were."""
        skipped = 0
        while True:
            self.load()
            if self.done:
                return skipped
            stops = np.flatnonzero(phy_offsets_of(self.window[self.position :]) >= phy_offset)
            count = int(stops[0]) if len(stops) else len(self.window) - self.position
            if count:
                last = phy_offset_of(self.window[self.position + count - 1])
                header = replace(self.files[self.at].header, end_phy_offset=last, index_count=self.number + count)
                self.state[:] = header.values()
                self.number, self.position, skipped = self.number + count, self.position + count, skipped + count
            if len(stops):
                return skipped

    def is_outlier(self, phy_offset: int) -> bool:
        """Whether the entry points too high: above the file's end, or above what most entries behind it point to."""
        mark = self.files[self.at]
        if phy_offset > mark.header.end_phy_offset:
            return True
        try:
            with self._disk.open_read(self._directory / mark.name) as file:
                ahead = read_entries(file, self.layout, self.number + 1, min(self.left - 1, _AHEAD))
        except DiskError as error:
            if not error.is_missing:
                raise
            ahead = self.window[:0]  # it expires just now; the next load says so
        offsets = phy_offsets_of(ahead)
        # Damaged ones among them, such as zeros, must not make this one look too high.
        offsets = offsets[offsets >= mark.header.begin_phy_offset]
        return any(2 * np.count_nonzero(part < phy_offset) > len(part) for part in (offsets[:_NEAR], offsets))


def phy_offsets_of(entries: NDArray[np.uint32]) -> NDArray[np.int64]:
    halves = entries[:, 1:3].byteswap().astype(np.int64)
    return halves[:, 0].astype(np.int32).astype(np.int64) << 32 | halves[:, 1]


# With so many findings it is not the index of this log; the rest is not looked at.
GIVE_UP_AT = 10_000


class Resync:
    """Writes down what differs, by file. ``left_out`` are log bytes whose messages nobody asks for.

    ``knows_first`` is False when a file before the first one may have expired: its entry 1 counts from its end then.
    """

    def __init__(self, cursor: EntryCursor, left_out: list[tuple[int, int]], *, knows_first: bool) -> None:
        self.found: dict[str, Findings] = {}
        #: Entries that point into ``left_out``.
        self.skipped = 0
        self._cursor = cursor
        self._left_out = left_out
        self._knows_first = knows_first

    @property
    def has_enough(self) -> bool:
        """Whether the comparison is to be given up."""
        return sum(map(len, self.found.values())) >= GIVE_UP_AT

    def add(self, what: str, text: str, member: int = 0) -> None:
        """A finding at the cursor's entry; ``member`` is where in it."""
        findings = self.found.setdefault(self._cursor.name, Findings())
        findings.add(self._cursor.name, self._cursor.place + member, what, text)

    def row(self, batch: DispatchBatch, row: int, key: int) -> None:
        """The message of ``row``, whose keys before ``key`` have their entries; the cursor ends behind its last one."""
        columns, cursor = batch.columns, self._cursor
        phy_offset, timestamp = int(columns.phy_offset[row]), int(columns.store_timestamp[row])
        first, last = (int(at) for at in columns.key_start[row : row + 2])
        wanted = columns.key_hash[first:last].tolist()
        got = wanted[: max(key - first, 0)]
        wrong: list[tuple[str, int, int, int]] = []
        missing = Counter(wanted[len(got) :])
        lost = len(cursor.lost)
        while (entry := cursor.entry()) is not None and not self.has_enough:
            if entry.phy_offset != phy_offset:
                if self._leaves_out(entry.phy_offset, phy_offset):
                    continue
                if len(got) >= len(wanted):
                    break
                if entry.phy_offset > phy_offset and not cursor.is_outlier(entry.phy_offset):
                    break
                self.orphan(entry)
                continue
            self._check_time(entry, phy_offset, timestamp)
            if missing[entry.key_hash] > 0:
                missing[entry.key_hash] -= 1
            else:
                wrong.append((cursor.name, cursor.place, cursor.number, entry.key_hash))
            got.append(entry.key_hash)
            cursor.put(phy_offset, timestamp)
        if len(cursor.lost) == lost:  # else its entries may have been in the file that is gone
            self._judge(phy_offset, wanted, got, wrong, list(missing.elements()))

    def orphans_below(self, phy_offset: int) -> None:
        """Entries that point below ``phy_offset`` and to no message that is still to come."""
        while (entry := self._cursor.entry()) is not None and entry.phy_offset < phy_offset and not self.has_enough:
            if not self._leaves_out(entry.phy_offset, phy_offset):
                self.orphan(entry)

    def orphan(self, entry: IndexEntry) -> None:
        """An entry where none is due: of no message, or once too often."""
        text = f"entry {self._cursor.number}: key hash {entry.key_hash}, phy offset {entry.phy_offset}"
        self.add("entry-without-message", f"{text}, where none is due")
        self._cursor.orphan()

    def _leaves_out(self, phy_offset: int, below: int) -> bool:
        for begin, end in self._left_out:
            if begin <= phy_offset < end and phy_offset < below:
                self.skipped += self._cursor.skip_below(min(end, below))
                return True
        return False

    def _check_time(self, entry: IndexEntry, phy_offset: int, timestamp: int) -> None:
        cursor = self._cursor
        if cursor.at == 0 and cursor.number == 1 and not self._knows_first:
            return
        wanted = time_difference(timestamp, int(cursor.state[0]))
        if entry.time_diff != wanted:
            self.add(
                "entry-time-difference",
                f"entry {cursor.number}: the time difference is {entry.time_diff}, but for the message at "
                f"{phy_offset} it is {wanted}",
                12,
            )

    def _judge(
        self,
        phy_offset: int,
        wanted: list[int],
        got: list[int],
        wrong: list[tuple[str, int, int, int]],
        missing: list[int],
    ) -> None:
        # A key without an entry and an entry without a key are one wrong hash.
        message = f"the message at {phy_offset}"
        for file, place, number, key_hash in wrong:
            what, text = "entry-without-key", f"entry {number}: {message} has no further key with hash {key_hash}"
            if missing:
                text = f"entry {number}: key hash {key_hash}, but {message} has the key {missing.pop(0)}"
                what = "entry-hash"
            self.found.setdefault(file, Findings()).add(file, place, what, text)
        for key_hash in missing:
            self.add("key-without-entry", f"{message} has a key with hash {key_hash}, and no entry for it here")
        if not wrong and not missing and got != wanted:
            self.add("entry-key-order", f"the entries of {message} before here are not in the order of its keys")
