"""EntryCursor: the entries of all index files one behind the other, with the header as it was when each was put.

Where log and entries differ: what is wrong there, and where they agree again.

Both are in the order of physical offsets, so a message is the measure: the entries that point to it are held against
its keys, those that point elsewhere belong to no message, and the next message starts afresh. An entry that points too
high is told from missing entries by those behind it, which point lower.

The log decoded again: every key of every message against the entries, and every entry against the messages.

What agrees, and that should be all, goes through match_batch, as fast as the log can be read; ``resync`` takes over at
the first difference and gives back at the next message.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from indexd.commitlog.batcher import DispatchBatch
from indexd.commitlog.format import Corrupt, NotYetWritten
from indexd.commitlog.reader import LogReader, Skipped
from indexd.config import Config
from indexd.errors import DiskError
from indexd.findings import Findings
from indexd.index.check import time_difference
from indexd.index.format import FLAVOURS, FileMark, IndexEntry, IndexHeader, IndexLayout, unpack_entry
from indexd.index.kernel import BUFFER_FULL, DONE, match_batch
from indexd.recovery.compare import once
from indexd.recovery.open import decode_rules, reader_options
from indexd.recovery.replay import ENTRIES_PER_READ, phy_offset_of, read_entries
from indexd.storage.disk import Disk
from indexd.storage.names import DataFiles
from indexd.verify.beside import BesideComparison
from indexd.verify.ground import Compared, Ground

# Entries behind one that are asked whether they point lower: a few see an offset that is a little too high, many see
# beyond a damaged block of a file system, which holds 200.
_NEAR = 16
_AHEAD = 4096

_BEGIN_TIMESTAMP, _END_TIMESTAMP, _BEGIN_PHY, _END_PHY, _, _COUNT = range(6)


class EntryCursor:
    """Stands at entry ``number`` of ``files[at]``. ``state`` is the header before that entry, as match_batch moves it.

    ``on_end`` is called with the mark and the state of each file that was walked to its end.
    """

    def __init__(
        self,
        disk: Disk,
        directory: Path,
        layout: IndexLayout,
        files: tuple[FileMark, ...],
        on_end: Callable[[FileMark, IndexHeader], None],
    ) -> None:
        self._disk, self._directory, self.layout = disk, directory, layout
        self._on_end = on_end
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

    def __repr__(self) -> str:
        return f"EntryCursor({self.name}, entry {self.number}, {len(self.files)} files)"

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
                if not error.is_missing:
                    raise
                self.window = self.window[:0]
            self.position = 0
            if len(self.window) == 0:
                self.lost.append((mark, self.left))
                self.leave_file()

    def leave_file(self) -> None:
        """On to the first entry of the next file, whose header inherits this one's end (spec rocketmq-store 3.5)."""
        header = self.files[self.at].header
        end_time, end_phy = max(header.end_timestamp, 0), max(header.end_phy_offset, 0)
        self.state[:] = IndexHeader(end_time, end_time, end_phy, end_phy).values()
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

    def stray(self) -> None:
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
            stops = np.flatnonzero(_phy_offsets(self.window[self.position :]) >= phy_offset)
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
        offsets = _phy_offsets(ahead)
        # Damaged ones among them, such as zeros, must not make this one look too high.
        offsets = offsets[offsets >= mark.header.begin_phy_offset]
        return any(2 * np.count_nonzero(part < phy_offset) > len(part) for part in (offsets[:_NEAR], offsets))


def _phy_offsets(entries: NDArray[np.uint32]) -> NDArray[np.int64]:
    halves = entries[:, 1:3].byteswap().astype(np.int64)
    return halves[:, 0].astype(np.int32).astype(np.int64) << 32 | halves[:, 1]


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


_PAUSE = 0.002
_NEVER = 1 << 63


def compare(
    config: Config, disk: Disk, ground: Ground, findings: Findings, on_bytes: Callable[[int], None]
) -> Compared:
    """Compare what the frontier covers and the log still has; ``config`` is that of the data directory."""
    options = replace(once(reader_options(config)), skip_corrupt=True)
    reader = LogReader(disk, config.store.commit_log_directories, decode_rules(config), options)
    reader.refresh()
    try:
        comparison = _Comparison(config, DataFiles(config.store.data), disk, ground, reader)
        comparison.run(on_bytes)
    finally:
        reader.close()
    for found in comparison.found().values():
        findings.merge(found)
    return comparison.compared


class _Comparison:
    def __init__(self, config: Config, files: DataFiles, disk: Disk, ground: Ground, reader: LogReader) -> None:
        self.compared = Compared()
        frontier = ground.frontier
        self._frontier, self._reader = frontier, reader
        self._skip_mask = FLAVOURS[frontier.flavour].skip_mask
        self._cursor = EntryCursor(disk, files.index, frontier.layout, frontier.index, self._check_times)
        begin = reader.log.min_offset
        self._start = max(begin if begin is not None else frontier.phy_offset, frontier.begin_offset)
        self._beside = BesideComparison(config, disk, files, ground, self._start)
        # Entries and messages in these ranges are not held against one another.
        self._left_out = [(gap.begin, gap.end) for gap in frontier.left_out]
        for gap in frontier.uncovered:
            self._say(f"log bytes {gap.begin} to {gap.end} are not covered: {gap.reason}")
        end = max((mark.header.end_phy_offset for mark in frontier.index if mark.header.entries), default=-1)
        if end >= frontier.phy_offset:
            self._left_out.append((frontier.phy_offset, end + 1))
            self._say(f"entries of messages behind {frontier.phy_offset}: the disk refused before all were built")
        if not reader.log.segments:
            self._say("the log has no segments")
        self._resync = Resync(self._cursor, self._left_out, knows_first=self._start == frontier.begin_offset)
        # A file was given up or is gone: messages up to here belong to it.
        self._resume_behind = -1
        self._lost = 0
        self._is_over = False

    def found(self) -> dict[str, Findings]:
        """The findings by file."""
        return self._resync.found

    def run(self, on_bytes: Callable[[int], None]) -> None:
        """To the frontier's physical offset, or to where the log ends."""
        frontier, reader, compared = self._frontier, self._reader, self.compared
        if self._start > frontier.begin_offset:
            compared.expired_entries = self._leave_out(frontier.begin_offset, self._start)
            if compared.expired_entries:
                self._say(f"{compared.expired_entries} entries of messages before {self._start}, which have expired")
        reader.position = self._start
        batch: DispatchBatch | None = None
        while reader.position < frontier.phy_offset and not (self._is_over and self._beside.is_over):
            before = reader.position
            poll = reader.poll()
            if isinstance(poll, DispatchBatch):
                self._compare_batch(poll, batch)
                self._beside.take(poll)
                batch = poll
            elif isinstance(poll, Skipped):
                end = min(poll.end, frontier.phy_offset)
                compared.left_out_entries += self._leave_out(poll.begin, end)
                self._say(f"log bytes {poll.begin} to {end} were not compared: {poll.reason}")
                if poll.is_expired or not self._is_left_out(poll):
                    self._beside.give_up(poll.reason)
            elif reader.is_undecided and isinstance(poll, NotYetWritten):
                time.sleep(_PAUSE)
            else:
                self._meet_end(poll)
                break
            on_bytes(reader.position - before)
        if not self._is_over:
            self._strays_below(_NEVER, batch)
        if reader.position < frontier.phy_offset:
            self._beside.give_up(f"the comparison ended at {reader.position}")
        else:
            self._beside.finish()
        self._resync.found["beside"] = self._beside.findings
        for text in self._beside.left_out:
            self._say(text)
        self._finish()

    def _finish(self) -> None:
        compared, cursor = self.compared, self._cursor
        compared.entries = cursor.walked
        compared.left_out_entries += self._resync.skipped
        for mark, left in cursor.lost:
            compared.left_out_entries += left
            self._say(f"{left} entries of index/{mark.name}, which is gone or too short")
        if compared.left_out_entries:
            self._say(f"{compared.left_out_entries} entries in all that were not compared for these reasons")

    def _is_left_out(self, skipped: Skipped) -> bool:
        # It was passed over when the outputs were built, too.
        return any(gap.begin <= skipped.begin and skipped.end <= gap.end for gap in self._frontier.left_out)

    def _meet_end(self, poll: NotYetWritten | Corrupt) -> None:
        # The log ends before what the frontier covers, or in bytes that are no frame.
        end = self._frontier.phy_offset
        if isinstance(poll, Corrupt):
            self.compared.left_out_entries += self._leave_out(poll.offset, end)
            self._say(f"log bytes {poll.offset} to {end} were not compared: {poll.reason}")
            return
        self._strays_below(poll.offset, None)
        if self._is_over:
            return
        entry = self._cursor.entry()
        if entry is None and poll.offset >= end:
            return
        text = f"the log ends at {poll.offset}, but the frontier covers it to {end}"
        self._resync.found.setdefault("frontier", Findings()).add("frontier", 0, "log-end", text)
        if entry is not None:
            text = f"entry {self._cursor.number}: from here on entries point behind the end of the log, {poll.offset}"
            self._resync.add("entry-behind-log", text)
            self.compared.left_out_entries += self._cursor.skip_below(_NEVER - 1)

    def _compare_batch(self, batch: DispatchBatch, before: DispatchBatch | None) -> None:
        # Where entries are left over from the batch before, that one can say of which message they are.
        if self._is_over:
            return
        offsets = batch.columns.phy_offset[: batch.rows]
        row, end = 0, int(offsets.searchsorted(self._frontier.phy_offset))
        if before is not None and end:
            self._strays_below(int(offsets[0]), before)
        for gap in self._frontier.left_out:
            first, last = max(gap.begin, batch.begin_offset), min(gap.end, batch.end_offset)
            if first < last:
                self._match(batch, row, int(offsets.searchsorted(first)))
                self.compared.left_out_entries += self._leave_out(first, last)
                row = int(offsets.searchsorted(last))
        self._match(batch, row, end)

    def _match(self, batch: DispatchBatch, row: int, end: int) -> None:
        cursor, columns = self._cursor, batch.columns
        self.compared.messages += max(end - row, 0)
        key = -1
        while row < end and not self._is_over:
            cursor.load()
            self._pass_over_lost()
            later = int(columns.phy_offset[:end].searchsorted(self._resume_behind, "right"))
            if later > row:
                self.compared.messages -= later - row
                row, key = later, -1
                continue
            status, row, key, at = match_batch(
                columns, end, row, key, self._skip_mask, cursor.window, cursor.position, cursor.state
            )
            row, key = int(row), int(key)
            cursor.used(int(at))
            if status == DONE:
                return
            if status == BUFFER_FULL and not cursor.done:
                continue
            self._resync.row(batch, row, key)
            row, key = row + 1, -1
            self._give_up_if_needed()

    def _pass_over_lost(self) -> None:
        # A file expired meanwhile. Its messages may still have been read, from a segment that is gone as well.
        cursor = self._cursor
        while len(cursor.lost) > self._lost:
            self._resume_behind = cursor.lost[self._lost][0].header.end_phy_offset
            self._lost += 1
            self.compared.left_out_entries += cursor.skip_below(self._resume_behind + 1)

    def _leave_out(self, begin: int, end: int) -> int:
        # Entries that point into [begin, end) stand for themselves; those before it have had their chance.
        self._strays_below(begin, None)
        self._left_out.append((begin, end))
        return self._cursor.skip_below(end)

    def _strays_below(self, phy_offset: int, batch: DispatchBatch | None) -> None:
        while not self._is_over:
            self._resync.strays_below(phy_offset, batch)
            if not self._resync.has_enough:
                return
            self._give_up_if_needed()

    def _give_up_if_needed(self) -> None:
        if not self._resync.has_enough:
            return
        cursor, name = self._cursor, self._cursor.name
        self.compared.gave_up.append(name)
        self._say(f"{name}: {len(self._resync.found[name])} findings, so the rest of it was not compared")
        if not cursor.done:
            self.compared.left_out_entries += cursor.left
            cursor.leave_file()
        entry = cursor.entry()
        if entry is None:
            self._is_over = True
            return
        # A message may straddle two files: the next one is compared from its first whole message on.
        self._resume_behind = entry.phy_offset
        self.compared.left_out_entries += cursor.skip_below(entry.phy_offset + 1)

    def _check_times(self, mark: FileMark, state: IndexHeader) -> None:
        # The header's times to the millisecond, which no entry knows.
        if not mark.header.entries or state.index_count != mark.header.index_count:
            return
        found = self._resync.found.setdefault(f"index/{mark.name}", Findings())
        for name, position, here, wanted in (
            ("begin", 0, mark.header.begin_timestamp, state.begin_timestamp),
            ("end", 8, mark.header.end_timestamp, state.end_timestamp),
        ):
            if here != wanted:
                text = f"{name} timestamp {here}, but by its message it is {wanted}"
                found.add(f"index/{mark.name}", position, f"header-{name}-timestamp", text)

    def _say(self, text: str) -> None:
        self.compared.left_out.append(text)
