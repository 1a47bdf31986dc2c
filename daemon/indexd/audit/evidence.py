"""Which RocketMQ wrote the entries, by the entries themselves: are unique keys there, are tags?

A broker that was upgraded goes on in the file it has open, so what is indexed may change at any message. Messages at
both ends of each file are asked; where it seems to change, those between, each time in the middle of what was not
asked. 4.0 and 4.7 index the same and differ in how a header counts, which the check of the file looks at; here both are
4.7. What no message tells apart indexes the same, but for the odd message: then it is the newest that fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from indexd.audit.ground import BrokerFile, phy_offsets
from indexd.audit.votes import NAMES, Run, Vote, history, runs_of, votes_of
from indexd.commitlog.decoder import DecoderOptions
from indexd.commitlog.evidence import MessageLookup
from indexd.config import Config
from indexd.errors import DiskError
from indexd.index.format import IndexLayout
from indexd.recovery.open import frame_size_max
from indexd.recovery.replay import first_entry_at, read_entries
from indexd.storage.disk import Disk, DiskFile

# Entries that are read at once; more where single messages have as many.
_WINDOW, _WINDOW_MAX = 64, 4096
_RUNS_MIN = 4
# Windows of a file that are asked for one that says anything, and of all for one that tells 4.7 and 5.4 apart: messages
# may have neither tags nor unique keys, and few may have tags.
_TRIES, _TRIES_FOR_TAGS = 8, 48
# Windows that are asked where what is indexed seems to change.
_ROUNDS = 64


@dataclass(frozen=True, slots=True)
class Era:
    """Messages from physical offset ``begin`` on, to the next era, were indexed as ``flavour`` says."""

    begin: int
    flavour: str


class Evidence:
    """Asks files and log; close it after use."""

    def __init__(self, disk: Disk, config: Config, folder: Path, layout: IndexLayout) -> None:
        self._disk, self._folder, self._layout = disk, folder, layout
        options = DecoderOptions(frame_size_max=frame_size_max(config), check_crc=False)
        store = config.store
        self._lookup = MessageLookup(disk, store.commit_log_directories, store.segment_size, options)

    def close(self) -> None:
        """Close what is open of the log."""
        self._lookup.close()

    def eras(self, files: Sequence[BrokerFile]) -> list[Era]:
        """Where what is indexed changes; empty when no message that has entries shows it."""
        log_begin = self._lookup.log.min_offset or 0
        asked = [
            _Asked(self._disk, self._folder, self._layout, file, log_begin)
            for file in sorted(files, key=lambda file: (file.begin, file.name))
            if file.is_readable and file.entries and file.end >= log_begin
        ]
        for one in asked:
            self._ask_ends(one)
        for _ in range(_TRIES_FOR_TAGS):
            is_told = any(vote.fits[1] != vote.fits[2] for one in asked for vote in one.votes.values())
            if is_told or not self._ask_widest(asked):
                break
        for _ in range(_ROUNDS):
            votes = _in_order(asked)
            found = history([vote for _, vote in votes])
            changes = [at for at, (old, new) in enumerate(pairwise(found), 1) if old != new]
            # All of them are asked, and then once more what they say now.
            if not sum(self._ask_between(asked, *_around(votes, found, at)) for at in changes):
                break
        eras = [Era(0, NAMES[found[0]])] if votes else []
        for at in changes:
            # Between two that say it, the newer one: it finds what the older one finds.
            begin = votes[at - 1][1].end if found[at] > found[at - 1] else votes[at][1].phy_offset
            eras.append(Era(begin, NAMES[found[at]]))
        return eras

    def _ask_ends(self, asked: _Asked) -> None:
        asked.ask(asked.low, self._lookup)
        asked.ask(asked.count - 1, self._lookup)
        for _ in range(_TRIES):
            if asked.votes or not self._ask_widest([asked]):
                break

    def _ask_widest(self, asked: Iterable[_Asked]) -> bool:
        widest = max(asked, key=lambda one: one.widest(one.low, one.count)[0], default=None)
        return widest is not None and widest.ask_between(widest.low, widest.count, self._lookup)

    def _ask_between(self, asked: Iterable[_Asked], old: tuple[_Asked, Vote], new: tuple[_Asked, Vote]) -> bool:
        # In every file that has entries of messages between the two.
        found = False
        for one in asked:
            if one.file.end >= old[1].phy_offset and one.file.begin <= new[1].phy_offset:
                low = old[1].number if one is old[0] else one.low
                high = new[1].number if one is new[0] else one.count
                found |= one.ask_between(low, high, self._lookup)
        return found


def _in_order(asked: Iterable[_Asked]) -> list[tuple[_Asked, Vote]]:
    # Of files that have the same messages, too.
    votes = [(one, vote) for one in asked for vote in one.votes.values()]
    return sorted(votes, key=lambda vote: vote[1].phy_offset)


def _around(votes: list[tuple[_Asked, Vote]], found: list[int], at: int) -> tuple[tuple[_Asked, Vote], ...]:
    # The last vote before the change at ``at``, and the first one behind it, that do not fit both sides.
    old, new = found[at - 1], found[at]
    before = (one for one in reversed(votes[:at]) if not one[1].fits[new])
    behind = (one for one in votes[at:] if not one[1].fits[old])
    return next(before, votes[at - 1]), next(behind, votes[at])


class _Asked:
    # One file, which of its entries were not asked yet, and what the others said, by the numbers of entries.

    def __init__(self, disk: Disk, folder: Path, layout: IndexLayout, file: BrokerFile, log_begin: int) -> None:
        self._disk, self._path, self._layout = disk, folder / file.name, layout
        self.file, self.count = file, file.count
        try:
            with disk.open_read(self._path) as opened:
                self.low = first_entry_at(opened, layout, 1, file.count, max(file.begin, log_begin))
        except DiskError as error:
            self.low = self._none_left(error)
        self._left = [(self.low, self.count)] if self.low < self.count else []
        self.votes: dict[int, Vote] = {}

    def widest(self, low: int, high: int) -> tuple[int, int]:
        """Of what was not asked in ``[low, high)``: how many entries follow one another, and the one in the middle."""
        bounds = [(max(begin, low), min(end, high)) for begin, end in self._left]
        return max(((end - begin, (begin + end) // 2) for begin, end in bounds if begin < end), default=(0, 0))

    def ask_between(self, low: int, high: int, lookup: MessageLookup) -> bool:
        """Ask in the middle of the widest; False when all was asked."""
        width, number = self.widest(low, high)
        if width:
            self.ask(number, lookup)
        return width > 0

    def ask(self, number: int, lookup: MessageLookup) -> None:
        """Ask the messages of the entries around ``number``."""
        if not self.low <= number < self.count:
            return
        try:
            self._ask_file(number, lookup)
        except DiskError as error:
            self.low, self._left = self._none_left(error), []

    def _none_left(self, error: DiskError) -> int:
        # The broker has removed it meanwhile, with the log it was of: what it has said so far stays.
        if not error.is_missing or error.path != self._path:
            raise error
        return self.count

    def _ask_file(self, number: int, lookup: MessageLookup) -> None:
        size, runs = _WINDOW, list[Run]()
        with self._disk.open_read(self._path) as opened:
            while True:
                first = max(min(number - size // 2, self.count - size), self.low)
                behind = min(first + size, self.count)
                runs = self._runs(opened, first, behind, lookup)
                is_all = first == self.low and behind == self.count
                if len(runs) >= _RUNS_MIN or is_all or size >= _WINDOW_MAX:
                    break
                size *= 4
        begins, ends = first == 1, behind == self.count
        for vote in votes_of(runs, begins=begins, ends=ends):
            self.votes[vote.number] = vote
        # Those at its ends are whole in another window.
        inner = runs[0 if first == self.low else 1 : None if ends else -1]
        done = (inner[0].number, inner[-1].behind) if inner else (number, number + 1)
        self._take_out(min(done[0], number), max(done[1], number + 1))

    def _runs(self, opened: DiskFile, first: int, behind: int, lookup: MessageLookup) -> list[Run]:
        entries = read_entries(opened, self._layout, first, behind - first)
        return runs_of(first, phy_offsets(entries).tolist(), entries[:, 0].byteswap().tolist(), lookup)

    def _take_out(self, begin: int, end: int) -> None:
        parts = [part for low, high in self._left for part in ((low, min(high, begin)), (max(low, end), high))]
        self._left = [(low, high) for low, high in parts if low < high]
