"""The log between the index files that stay, cut into ranges, each with the names that its new files take.

Edges finds, by the log itself, at which key of which message a kept file meets a range: a message's keys may stand in
two files, the first of them at the end of one and the others at the front of the next.

Names are times, strictly between those of the files that stay, in the order of the log. A broker sorts its files by
name and asks them from the last to the first. What it makes later is named by its clock in its own time zone, so a name
without a neighbour is written in the time zone that is the furthest behind. Times are counted in milliseconds since the
year 1, so that every one of them has a name and names have one order.
"""

from __future__ import annotations

import datetime
import unicodedata
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from indexd.audit import AuditReport
from indexd.audit.match import Rows
from indexd.audit.plan import AuditPlan, BrokerFile, LogProbe
from indexd.audit.result import FlavourRange, Hole
from indexd.audit.task import LogRange
from indexd.commitlog.segments import list_segments
from indexd.config import Config
from indexd.index.entries import first_entry_at, read_entries
from indexd.index.format import FLAVOURS, IndexHeader
from indexd.storage.disk import Disk, DiskFile


@dataclass(frozen=True, slots=True)
class Place:
    """Behind the first ``key`` keys of the message at ``offset``, which is reached from ``aligned``.

    ``doubled`` keys of that message stand on both sides of the place: the file finds them, and yet there is to be an
    entry for each.
    """

    offset: int
    aligned: int
    key: int = 0
    doubled: int = 0

    @property
    def order(self) -> tuple[int, int]:
        """Places in the order of the log."""
        return self.offset, self.key


@dataclass(frozen=True, slots=True)
class _Message:
    key_hashes: tuple[int, ...]
    store_timestamp: int
    end: int


class Edges:
    """Reads single messages and the entries that belong to them. Raises DiskError. Nothing stays open."""

    def __init__(self, disk: Disk, config: Config, plan: AuditPlan, eras: tuple[FlavourRange, ...]) -> None:
        self._disk, self._config, self._plan, self._eras = disk, config, plan, eras
        store = config.store
        self._log = list_segments(disk, store.commit_log_directories, store.segment_size)
        self._probe = LogProbe(disk, self._log)
        self._met: dict[int, _Message | None] = {}
        self._behind: dict[str, Place | None] = {}
        self._before: dict[str, Place | None] = {}

    def behind(self, file: BrokerFile) -> Place | None:
        """Behind the last key that ``file`` holds; None when those of its last message are not its first ones."""
        if file.name not in self._behind:
            self._behind[file.name] = self._place_behind(file)
        return self._behind[file.name]

    def before(self, file: BrokerFile) -> Place | None:
        """Before the first key that ``file`` holds; None when those of its first message are not its last ones."""
        if file.name not in self._before:
            self._before[file.name] = self._place_before(file)
        return self._before[file.name]

    def is_message(self, offset: int) -> bool:
        """Whether a message stands there."""
        return self._message(offset) is not None

    def _place_behind(self, file: BrokerFile) -> Place | None:
        message = self._message(file.end)
        if message is None:
            # It cannot be read: what is missing of it, if anything, is no key that the log has.
            segment = self._log.at(file.end)
            return Place(file.end + 1, segment.base if segment is not None else file.end + 1)
        held, whole = self._held(file, file.end), message.key_hashes
        first = _only_place(whole, held) if file.begin == file.end else 0
        if first is None or held != whole[first : first + len(held)]:
            return None
        key = first + len(held)
        if key == len(whole):
            return Place(message.end, message.end)
        return Place(file.end, file.end, key, _doubled(whole[key:], whole[:key]))

    def _place_before(self, file: BrokerFile) -> Place | None:
        message = self._message(file.begin)
        if message is None:
            return Place(file.begin, file.begin)
        held, whole = self._held(file, file.begin), message.key_hashes
        if held == whole:
            return Place(file.begin, file.begin)
        key = _only_place(whole, held) if file.begin == file.end else len(whole) - len(held)
        if key is None or key < 0 or held != whole[key : key + len(held)]:
            return None
        return Place(file.begin, file.begin, key, _doubled(whole[:key], whole[key:]))

    def _held(self, file: BrokerFile, offset: int) -> tuple[int, ...]:
        # Key hashes of the entries that point there, in order; the file is in the order of the log.
        layout = self._plan.layout
        with self._disk.open_read(self._plan.folder / file.name) as opened:
            first, behind = (self._first_at(opened, file, one) for one in (offset, offset + 1))
            entries = read_entries(opened, layout, first, behind - first)
        return tuple(entries[:, 0].byteswap().tolist())

    def _first_at(self, opened: DiskFile, file: BrokerFile, offset: int) -> int:
        return first_entry_at(opened, self._plan.layout, 1, file.count, offset)

    def _message(self, offset: int) -> _Message | None:
        if offset not in self._met:
            self._met[offset] = self._read(offset)
        return self._met[offset]

    def _read(self, offset: int) -> _Message | None:
        end = self._probe.frame_end(offset)
        if end is None:
            return None
        flavour = FLAVOURS[[era.flavour for era in self._eras if era.begin <= offset][-1]]
        for item in LogRange(offset, offset + 1, offset, flavour.name).read(self._disk, self._config, 0):
            if isinstance(item, Rows):
                columns, row = item.batch.columns, item.first
                first, last = columns.key_start[row : row + 2]
                skips = flavour.skip_mask >> (int(columns.sys_flag[row]) & 0xC) & 1
                hashes = columns.key_hash[first:last] if not skips else np.empty(0, dtype=np.uint32)
                return _Message(tuple(hashes.tolist()), int(columns.store_timestamp[row]), end)
        return None


def _only_place(whole: tuple[int, ...], held: tuple[int, ...]) -> int | None:
    # Of a message with more keys than a file has room for: where this part of it stands, if that can be told.
    count = len(held)
    found = [first for first in range(len(whole) - count + 1) if whole[first : first + count] == held]
    return found[0] if len(found) == 1 else None


def _doubled(others: tuple[int, ...], held: tuple[int, ...]) -> int:
    return sum(other in held for other in others)


# In pieces, no range is expected to take more files than this, if the log has a place to cut it.
_PIECE_FILES = 4
_SPARE_FACTOR, _SPARE = 4, 8


@dataclass(frozen=True, slots=True)
class RepairRange:
    """Keys of the log from one place to another: messages of ``[begin, end)``, read from ``aligned`` on.

    Of the message at ``begin`` the first ``begin_key`` keys belong to the file before; with ``end_key`` that many keys
    of the message at ``end`` belong here, too. ``replaces`` are the names of old files that go once it is built;
    ``names`` those that new files take, oldest first, more than are needed as a rule; ``before`` is the header of the
    kept file in front of it, whose end the first new one inherits. ``keys`` are expected, roughly.
    """

    begin: int
    begin_key: int
    end: int
    end_key: int
    aligned: int
    keys: int
    names: tuple[str, ...]
    replaces: tuple[str, ...]
    before: IndexHeader | None


@dataclass(slots=True)
class _Piece:
    begin: Place
    end: Place
    files: list[BrokerFile]
    # At most so many, and as many as are likely.
    keys_max: int = 0
    keys: int = 0


class Ranges:
    """Cuts them. ``files`` are those with entries that point into the log before ``ends_at``, in log order."""

    def __init__(
        self, report: AuditReport, edges: Edges, files: Sequence[BrokerFile], ends_at: int, *, in_pieces: bool
    ) -> None:
        self._report, self._audit, self._edges = report, report.audit, edges
        self._files, self._ends_at, self._in_pieces = files, ends_at, in_pieces
        # N - 1 entries a file.
        self._capacity = max(report.plan.layout.index_num - 1, 1)
        self._holes = [hole for hole in self._audit.holes if hole.begin < ends_at]
        self._has_all_holes = self._audit.hole_count == len(self._audit.holes)

    def between(self, kept: Sequence[BrokerFile]) -> list[RepairRange] | BrokerFile:
        """Ranges in the order of the log; or the file that cannot stay as it is, so that others have to do."""
        found: list[RepairRange] = []
        for low, high in pairwise([None, *kept, None]):
            replaced = self._replaced(low, high, {file.name for file in kept})
            if low is not None and high is not None and self._is_crossed(low, high):
                return high
            if low is not None and low.end >= self._ends_at and not replaced:
                continue  # nothing is built there
            if not (replaced or self._is_missing(low, high)):
                continue
            if high is None and low is not None and not low.is_full and low.end >= self._audit.log_begin:
                return low  # the broker would go on in another file, and this one would stay as empty as it is
            made = self._make(low, high, replaced)
            if isinstance(made, BrokerFile):
                return made
            found += made
        return found

    def missing_inside(self, file: BrokerFile) -> bool:
        """Whether a message between the first and the last one of ``file`` has keys that are not findable."""
        if any(hole.begin < file.end and hole.last > file.begin for hole in self._holes):
            return True
        return not self._has_all_holes and self._is_missing_in(file.begin + 1, min(file.end, self._ends_at) - 1)

    def _is_missing_in(self, first: int, last: int) -> bool:
        # By stretches, where there are too many holes to know each.
        return not self._report.missing or any(begin <= last and end > first for begin, end, _ in self._report.missing)

    def _replaced(self, low: BrokerFile | None, high: BrokerFile | None, kept: set[str]) -> list[BrokerFile]:
        first = self._order(low) if low is not None else (-1, -1, "")
        last = self._order(high) if high is not None else (self._ends_at, 0, "")
        return [file for file in self._files if file.name not in kept and first < self._order(file) < last]

    @staticmethod
    def _order(file: BrokerFile) -> tuple[int, int, str]:
        return file.begin, file.end, file.name

    def _is_missing(self, low: BrokerFile | None, high: BrokerFile | None) -> bool:
        # The messages where files meet are in here, too: some keys of theirs may stand in neither.
        first = max(low.end if low is not None else 0, self._audit.log_begin)
        last = min(high.begin if high is not None else self._ends_at, self._ends_at - 1)
        if any(self._is_between(hole, low, high) for hole in self._holes if hole.last >= first and hole.begin <= last):
            return True
        return not self._has_all_holes and first <= last and self._is_missing_in(first, last)

    def _is_crossed(self, low: BrokerFile, high: BrokerFile) -> bool:
        # Each inside one message, which has more keys than a file has room for: by their names one may have the keys
        # that come before those of the other.
        if not low.begin == low.end == high.begin == high.end:
            return False
        behind, before = self._edges.behind(low), self._edges.before(high)
        return behind is not None and before is not None and behind.order > before.order

    def _is_between(self, hole: Hole, low: BrokerFile | None, high: BrokerFile | None) -> bool:
        # Of the message that ends a file its first keys may be missing, which belong before that file; and so behind.
        if low is not None and hole.last == low.end:
            place = self._edges.behind(low)
            return place is None or place.offset <= low.end
        if high is not None and hole.begin == high.begin:
            place = self._edges.before(high)
            return place is None or place.key > 0
        return True

    def _make(
        self, low: BrokerFile | None, high: BrokerFile | None, replaced: list[BrokerFile]
    ) -> list[RepairRange] | BrokerFile:
        log_begin = self._audit.log_begin
        if low is not None and low.end < log_begin:
            begin: Place | None = Place(log_begin, log_begin)
        else:
            begin = self._edges.behind(low) if low is not None else Place(log_begin, log_begin)
        if begin is None:
            assert low is not None
            return low
        # What is built ends there, also where a file behind stays.
        is_cut = high is None or high.begin >= self._ends_at
        end = Place(self._ends_at, self._ends_at) if high is None or is_cut else self._edges.before(high)
        if end is None or begin.order > end.order:
            return high if high is not None and not is_cut else []
        if begin.order == end.order:
            return []
        pieces = self._cut(begin, end, replaced)
        names = self._names(low, high, pieces)
        if names is None:
            assert high is not None, "there is room behind every file but one of the last day of time"
            return high
        header = low.header if low is not None and low.end >= log_begin else None
        return [
            RepairRange(
                begin=piece.begin.offset,
                begin_key=piece.begin.key,
                end=piece.end.offset,
                end_key=piece.end.key,
                aligned=piece.begin.aligned,
                keys=piece.keys,
                names=own,
                replaces=tuple(sorted(file.name for file in piece.files)),
                before=header if number == 0 else None,
            )
            for number, (piece, own) in enumerate(zip(pieces, names, strict=True))
        ]

    def _cut(self, begin: Place, end: Place, replaced: list[BrokerFile]) -> list[_Piece]:
        pieces = [_Piece(begin, end, [])]
        reach = begin.offset
        for file in replaced:
            at = self._cut_before(file, pieces[-1], reach) if self._in_pieces else None
            if at is not None and pieces[-1].begin.order < at.order < end.order:
                pieces[-1].end = at
                pieces.append(_Piece(at, end, []))
            pieces[-1].files.append(file)
            reach = max(reach, file.end)
        for piece in pieces:
            self._count(piece)
        if self._in_pieces:
            pieces = [part for piece in pieces for part in self._cut_at_segments(piece)]
        return pieces

    def _cut_before(self, file: BrokerFile, piece: _Piece, reach: int) -> Place | None:
        begin = max(file.begin, self._audit.log_begin)
        is_due = piece.files or self._missing_keys(piece.begin.offset, begin) >= self._capacity
        if not is_due or file.begin < reach or begin != file.begin or not self._edges.is_message(begin):
            return None
        at = self._edges.before(file)
        return at if at is not None and self._is_shared_cleanly(at, piece.files) else None

    def _is_shared_cleanly(self, at: Place, files: Sequence[BrokerFile]) -> bool:
        # The message there may have keys on both sides, until the older side is built, too. Each key has to be on one
        # of them, once: if not, what is built would seem to have one too many, and be built again by every run.
        sharing = [file for file in files if file.end >= at.offset]
        if not sharing:
            return not at.doubled
        behind = self._edges.behind(sharing[0]) if len(sharing) == 1 else None
        return behind is not None and behind.order == at.order and not (at.doubled or behind.doubled)

    def _cut_at_segments(self, piece: _Piece) -> list[_Piece]:
        # Where no old file stands: with one, nothing may be built before all of it is.
        free = max([piece.begin.offset, *(file.end for file in piece.files)])
        places = [one.begin for one in self._report.state.segments if free < one.begin < piece.end.offset]
        count = piece.keys // (_PIECE_FILES * self._capacity)
        step = max(-(-len(places) // max(count, 1)), 1)
        places = places[step - 1 :: step] if count else []
        bounds = [piece.begin, *(Place(place, place) for place in places), piece.end]
        keys = piece.keys // (len(bounds) - 1)
        return [
            _Piece(begin, end, piece.files if number == 0 else [], piece.keys_max, keys)
            for number, (begin, end) in enumerate(pairwise(bounds))
        ]

    def _count(self, piece: _Piece) -> None:
        entries = sum(file.entries for file in piece.files)
        missing = self._missing_keys(piece.begin.offset, piece.end.offset)
        piece.keys_max = entries + missing + piece.begin.doubled + piece.end.doubled
        if not self._has_all_holes:
            piece.keys_max += self._audit.missing_keys
        piece.keys = max(entries, missing, 1)

    def _missing_keys(self, first: int, last: int) -> int:
        return sum(hole.keys for hole in self._holes if hole.last >= first and hole.begin <= last)

    def _names(
        self, low: BrokerFile | None, high: BrokerFile | None, pieces: list[_Piece]
    ) -> list[tuple[str, ...]] | None:
        own = {file.name for piece in pieces for file in piece.files}
        taken = {file.name for file in self._report.plan.files} - own
        holes = [hole.begin_timestamp for hole in self._holes if hole.last >= pieces[0].begin.offset]
        files = [file.header.begin_timestamp for piece in pieces for file in piece.files]
        # No name of the future, whatever a clock has written: the broker's next ones have to sort behind.
        timestamp = min([*holes[:1], *files, self._report.state.looked_at])
        bounds = low.name if low is not None else None, high.name if high is not None else None
        # Many to spare where there is room: a key that a message has twice, and the index once, is not missing.
        for factor, spare in ((_SPARE_FACTOR, _SPARE), (1, 1), (1, 0)):
            wanted = [
                Wanted(factor * -(-piece.keys_max // self._capacity) + spare, tuple(file.name for file in piece.files))
                for piece in pieces
            ]
            names = names_between(*bounds, wanted, taken, timestamp)
            if names is not None:
                return names
        return None


_UTC = datetime.UTC
_BEGIN = datetime.datetime(1, 1, 1, tzinfo=_UTC)
_END = datetime.datetime(9999, 12, 31, 23, 59, 59, 999_000, tzinfo=_UTC)
_MILLISECOND = datetime.timedelta(milliseconds=1)
_TIMES = range((_END - _BEGIN) // _MILLISECOND + 1)
# The first millisecond of Unix time, in UTC-12.
_EPOCH = (datetime.datetime(1970, 1, 1, tzinfo=_UTC) - datetime.timedelta(hours=12) - _BEGIN) // _MILLISECOND


@dataclass(frozen=True, slots=True)
class Wanted:
    """``count`` names for one range, if possible ``own`` ones: those of the files that it replaces."""

    count: int
    own: tuple[str, ...] = ()


def names_between(
    low: str | None, high: str | None, wanted: Sequence[Wanted], taken: Collection[str], store_timestamp: int
) -> list[tuple[str, ...]] | None:
    """Names for ranges that follow one another in the log, behind ``low`` and before ``high``; None without room.

    ``taken`` are names of other files. ``store_timestamp``, ms, of the first message says where names begin that have
    no file before them. If there is room, a range's new names lie behind the own ones of the ranges before it.
    """
    digits = _Digits(low or high)
    if high is not None and not digits.have(high):
        high = None  # another script: it sorts behind all of these
    count = sum(one.count for one in wanted)
    first = _first(digits, low, high, count + len(taken), store_timestamp)
    for found in (_beside_own(digits, low, first, wanted, taken), _from(digits, first, wanted, taken)):
        names = [name for one in found for name in one]
        if len(names) == count and (not names or high is None or names[-1] < high):
            return found
    return None


class _Digits:
    """Names in the digits of one script, that of ``like``: a broker writes those of its locale."""

    def __init__(self, like: str | None) -> None:
        self._zero = ord(like[0]) - unicodedata.decimal(like[0]) if like else ord("0")

    def name(self, at: int) -> str:
        time = _BEGIN + at * _MILLISECOND
        fields = time.year, time.month, time.day, time.hour, time.minute, time.second, time.microsecond // 1000
        text = "{:04d}{:02d}{:02d}{:02d}{:02d}{:02d}{:03d}".format(*fields)
        return text if self._zero == ord("0") else "".join(chr(self._zero + int(digit)) for digit in text)

    def behind(self, name: str) -> int:
        """The first time whose name sorts behind ``name``, be that a time or not."""
        return bisect_right(_TIMES, name, key=self.name)

    def have(self, name: str) -> bool:
        return ord(name[0]) - unicodedata.decimal(name[0]) == self._zero

    def is_time(self, name: str) -> bool:
        at = self.behind(name)
        return at > 0 and self.name(at - 1) == name

    def free(self, at: int, taken: Collection[str]) -> Iterator[str]:
        return (name for time in _TIMES[at:] if (name := self.name(time)) not in taken)


def _first(digits: _Digits, low: str | None, high: str | None, count: int, store_timestamp: int) -> int:
    # The first time to be used where no name of its own serves.
    at = min(max(_EPOCH + store_timestamp, 0), len(_TIMES) - 1)
    if low is not None:
        return digits.behind(low) if high is not None else max(at, digits.behind(low))
    # Without a file before it, so much room is left to the one behind it as is needed.
    return at if high is None else max(min(at, digits.behind(high) - 2 - count), 0)


def _beside_own(
    digits: _Digits, low: str | None, first: int, wanted: Sequence[Wanted], taken: Collection[str]
) -> list[tuple[str, ...]]:
    found, last = [], low
    for one in wanted:
        own = sorted(name for name in one.own if (last is None or name > last) and digits.is_time(name))
        names = own[: one.count]
        last = max((name for name in (last, *own) if name is not None), default=None)
        free = digits.free(first if last is None else max(first, digits.behind(last)), taken)
        names += [name for name, _ in zip(free, range(one.count - len(names)), strict=False)]
        last = max((name for name in (last, *names) if name is not None), default=None)
        found.append(tuple(names))
    return found


def _from(digits: _Digits, first: int, wanted: Sequence[Wanted], taken: Collection[str]) -> list[tuple[str, ...]]:
    # One behind the other from the first one on: there is no room behind their own. Those of older ranges are still
    # there while the newer ones are built.
    found, names, used = [], digits.free(first, taken), set[str]()
    for one in wanted:
        free = (name for name in names if name not in used)
        found.append(tuple(name for _, name in zip(range(one.count), free, strict=False)))
        used.update(one.own)
    return found
