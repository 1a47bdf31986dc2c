"""Where log and entries differ: what is wrong there, and where they agree again.

Both are in the order of physical offsets, so a message is the measure: the entries that point to it are held against
its keys, those that point elsewhere belong to no message, and the next message starts afresh. An entry that points too
high is told from missing entries by those behind it, which point lower.
"""

from __future__ import annotations

from collections import Counter

from indexd.commitlog.dispatch import DispatchBatch
from indexd.findings import Findings
from indexd.index.check_ground import time_difference
from indexd.index.format import IndexEntry
from indexd.verify.entries import EntryCursor

# A file with so many findings is not the index of this log; the rest of it is not looked at.
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

    def __repr__(self) -> str:
        return f"Resync({self.found}, {self._cursor})"

    @property
    def has_enough(self) -> bool:
        """Whether the file that the cursor stands in is to be given up."""
        return len(self.found.get(self._cursor.name, ())) >= GIVE_UP_AT

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
                if entry.key_hash != wanted[len(got)]:
                    self.stray(entry, batch)
                    continue
                self.add(
                    "entry-phy-offset",
                    f"entry {cursor.number}: the phy offset is {entry.phy_offset}, but its key is one of the message "
                    f"at {phy_offset}",
                    4,
                )
            self._check_time(entry, phy_offset, timestamp)
            if missing[entry.key_hash] > 0:
                missing[entry.key_hash] -= 1
            else:
                wrong.append((cursor.name, cursor.place, cursor.number, entry.key_hash))
            got.append(entry.key_hash)
            cursor.put(phy_offset, timestamp)
        if len(cursor.lost) == lost:  # else its entries may have been in the file that is gone
            self._judge(phy_offset, wanted, got, wrong, list(missing.elements()))

    def strays_below(self, phy_offset: int, batch: DispatchBatch | None = None) -> None:
        """Entries that point below ``phy_offset`` and to no message that is still to come."""
        while (entry := self._cursor.entry()) is not None and entry.phy_offset < phy_offset and not self.has_enough:
            if not self._leaves_out(entry.phy_offset, phy_offset):
                self.stray(entry, batch)

    def stray(self, entry: IndexEntry, batch: DispatchBatch | None) -> None:
        """An entry where none is due: of no message, of none of its keys, or once more."""
        what, why = "entry-without-message", "where no message is due"
        if batch is not None:
            columns = batch.columns
            row = int(columns.phy_offset[: batch.rows].searchsorted(entry.phy_offset))
            if row < batch.rows and int(columns.phy_offset[row]) == entry.phy_offset:
                first, last = (int(at) for at in columns.key_start[row : row + 2])
                if entry.key_hash in columns.key_hash[first:last].tolist():
                    what, why = "entry-twice", "whose message comes elsewhere and has its entries there"
                else:
                    what, why = "entry-without-key", "whose message has no such key"
        number = self._cursor.number
        self.add(what, f"entry {number}: key hash {entry.key_hash}, phy offset {entry.phy_offset}, {why}")
        self._cursor.stray()

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
            findings = self.found.setdefault(file, Findings())
            if missing:
                text = f"key hash {key_hash}, but {message} has the key {missing.pop(0)}"
                findings.add(file, place, "entry-hash", f"entry {number}: {text}")
            elif key_hash in wanted:
                findings.add(file, place, "entry-twice", f"entry {number}: key hash {key_hash} of {message} once more")
            else:
                findings.add(
                    file, place, "entry-without-key", f"entry {number}: {message} has no key with hash {key_hash}"
                )
        for key_hash in missing:
            self.add("key-without-entry", f"{message} has a key with hash {key_hash}, and no entry for it here")
        if not wrong and not missing and got != wanted:
            self.add("entry-key-order", f"the entries of {message} before here are not in the order of its keys")
