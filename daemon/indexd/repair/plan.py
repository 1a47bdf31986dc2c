"""The plan of a repair: which index files stay as they are, and which ranges of the log get new ones.

Files can stay that have no finding and all keys exactly once. Ranges and kept files together cover every key of the log
once, in the order of the log and of the names, so a query is answered as over an index that was built anew. A message's
keys may stand in two files, the first of them at the end of one and the others at the front of the next; the log says
at which key a kept file meets a range. A range is built by itself: those that are not reached keep the files that they
would have replaced.

Names are times, strictly between those of the files that stay, in the order of the log. A broker sorts its files by
name and asks them from the last to the first. What it makes later is named by its clock in its own time zone, so a name
without a neighbour is written in the time zone that is the furthest behind.
"""

from __future__ import annotations

import datetime
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice, pairwise
from typing import Any, NamedTuple

from indexd.audit import AuditReport
from indexd.audit.causes import log_cut
from indexd.audit.plan import LogProbe, flavour_at
from indexd.audit.result import BrokerFile, FlavourRange, Hole
from indexd.commitlog.batcher import DispatchBatch
from indexd.compare.index import keys_of
from indexd.config import Config
from indexd.index.entries import first_entry_at, read_entries
from indexd.index.format import FLAVOURS, IndexHeader
from indexd.pages.wording import counted, show_size
from indexd.recovery.open import LogRange
from indexd.storage.disk import Disk

_INDEX = "index/"


class KeyPosition(NamedTuple):
    """Behind the first ``key`` keys of the message at ``offset``, which is reached from ``aligned``."""

    offset: int
    key: int
    aligned: int


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

    def line(self) -> str:
        """What would be done, for people."""
        goes = f", in place of {counted(len(self.replaces), 'index file')}" if self.replaces else ""
        where = f"{show_size(self.end - self.begin)} of log from {self.begin} on, about {self.keys:,} keys"
        return f"{where}, indexed anew{goes}"


@dataclass(frozen=True, slots=True)
class RepairPlan:
    """``ranges`` newest first; ``kept`` files in the order of their names, full ones never change any more.

    ``left_out`` are names in the index folder that the new one does without: foreign ones, of other sizes, without an
    entry that points into the log. ``ends_at``: what is built ends here, and ``unreadable`` says why no further, if the
    log goes on or ends in bytes that are no frame; behind it ``keys_behind``, roughly, are not findable afterwards.
    ``at_stake``: kept files that the broker's next start, an unclean one, would throw away or index the last message of
    again. Bytes of log and index ``bytes_to_read``, to build and to check; ``bytes_to_write`` of files;
    ``estimated_seconds`` at the rate of the audit.
    """

    kept: tuple[BrokerFile, ...]
    ranges: tuple[RepairRange, ...]
    left_out: tuple[str, ...]
    eras: tuple[FlavourRange, ...]
    is_flavour_known: bool
    ends_at: int
    unreadable: str | None
    keys_behind: int
    at_stake: tuple[str, ...]
    bytes_to_read: int
    bytes_to_write: int
    estimated_seconds: float

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to do at all."""
        return bool(self.ranges or self.left_out or self.at_stake)

    def lines(self) -> list[str]:
        """What would be done, for people: a line a kind of thing, what is built in the order in which it is."""
        names = ", ".join(self.left_out[:10])
        more = (
            (
                self.at_stake,
                "the broker ended without a clean stop: its next start would throw away sound index files, or index "
                "their last message again; the checkpoint is made to vouch for them",
            ),
            (self.left_out, f"left out, {counted(len(self.left_out), 'name')}: {names}"),
            (
                self.ranges and not self.is_flavour_known,
                f"no index file says what the broker indexes: as flavour {self.eras[0].flavour} has it",
            ),
        )
        kept = f"{counted(len(self.kept), 'index file')} kept as before"
        return [kept, *(wanted.line() for wanted in self.ranges), *(words for holds, words in more if holds)]

    def behind_lines(self) -> list[str]:
        """What no repair makes findable, whether anything else is to be done or not."""
        if not self.keys_behind:
            return []
        return [
            f"about {self.keys_behind:,} keys behind the unreadable bytes at {self.ends_at} are left out, because a "
            f"broker cuts its log there when it starts: the log wants a look first ({self.unreadable})"
        ]

    def to_json(self) -> dict[str, Any]:
        """The same for programs: kind "plan"."""
        return {
            "kind": "plan",
            "needed": self.is_needed,
            "kept": [file.name for file in self.kept],
            "ranges": [
                {
                    "beginOffset": wanted.begin,
                    "endOffset": wanted.end,
                    "keys": wanted.keys,
                    "replaces": list(wanted.replaces),
                }
                for wanted in self.ranges
            ],
            "leftOut": list(self.left_out),
            "atStake": list(self.at_stake),
            "flavours": [{"beginOffset": era.begin, "flavour": era.flavour} for era in self.eras],
            "flavourKnown": self.is_flavour_known,
            "endOffset": self.ends_at,
            "unreadable": self.unreadable,
            "keysBehind": self.keys_behind,
            "bytesToRead": self.bytes_to_read,
            "bytesToWrite": self.bytes_to_write,
            "estimatedSeconds": round(self.estimated_seconds, 1),
        }


def plan_repair(disk: Disk, config: Config, report: AuditReport, *, everything: bool = False) -> RepairPlan:
    """Decide; reads a few messages and entries where kept files meet ranges, writes nothing.

    ``everything`` keeps no file. Raises DiskError.
    """
    audit, layout = report.audit, report.plan.layout
    ends_at, unreadable = log_cut(audit, report.state, report.crash.dispatch_offset)
    kept, ranges, behind = list(report.plan.files), list[RepairRange](), 0
    if not audit.is_sound or everything:
        planner = _Planner(disk, config, report, ends_at)
        kept = [] if everything else [file for file in candidates(report) if not planner.is_missing_inside(file)]
        # What one file cannot stay beside, another one may: until all of them can.
        while isinstance(found := planner.ranges(kept), BrokerFile):
            kept.remove(found)
        ranges = found
        behind = keys_behind(disk, report, kept, ends_at) if unreadable is not None else 0
    foreign = [one.file.removeprefix(_INDEX) for one in audit.findings if one.what == "file-foreign"]
    names = {*(file.name for file in report.plan.files), *foreign}
    names -= {file.name for file in kept} | {name for wanted in ranges for name in wanted.replaces}
    to_write = sum(-(-wanted.keys // max(layout.index_num - 1, 1)) for wanted in ranges) * layout.file_size
    to_read = 2 * sum(wanted.end - wanted.begin for wanted in ranges) + to_write
    return RepairPlan(
        kept=tuple(kept),
        ranges=tuple(reversed(ranges)),
        left_out=tuple(sorted(names)),
        eras=audit.eras,
        is_flavour_known=report.plan.is_flavour_given or any(file.entries for file in audit.files),
        ends_at=ends_at,
        unreadable=unreadable,
        keys_behind=behind,
        at_stake=_at_stake(report, kept, ends_at),
        bytes_to_read=to_read,
        bytes_to_write=to_write,
        estimated_seconds=(to_read + to_write) * report.seconds / max(report.bytes_read, 1),
    )


def candidates(report: AuditReport) -> list[BrokerFile]:
    """Files that could stay, in the order of the log and of their names; what is missing inside them is not asked.

    Those, too, that point behind bytes where a broker cuts its log: what they find now must not go for a repair. None
    of two whose entries overlap: which of them has a key that both could have is not known. None whose name is written
    in the digits of another script: where a new name sorts beside it depends on the broker's locale.
    """
    wrong, seen = {one.file for one in report.audit.findings}, {file.name for file in report.audit.files}
    files = sorted((file for file in report.plan.files if file.is_readable and file.entries), key=_order)
    found, reach = list[BrokerFile](), -1
    for file, behind in pairwise([*files, None]):
        assert file is not None
        is_shared = reach > file.begin or (behind is not None and behind.begin < file.end)
        reach = max(reach, file.end)
        is_good = file.name in seen and file.end < report.audit.log_end and file.name.isascii()
        if is_good and not is_shared and file.path not in wrong and (not found or found[-1].name < file.name):
            found.append(file)
    return found


def keys_behind(disk: Disk, report: AuditReport, kept: Collection[BrokerFile], ends_at: int) -> int:
    """Keys of messages from ``ends_at`` on that are not findable, or will not be when the files not ``kept`` are gone.

    Of a hole that lies on both sides all are counted. Reads some entries of files. Raises DiskError.
    """
    log_end, layout = report.audit.log_end, report.plan.layout
    found = sum(hole.keys for hole in report.audit.holes if hole.last >= ends_at)
    names = {file.name for file in kept}
    for file in report.plan.files:
        if file.name not in names and file.points_into(ends_at, log_end):
            with disk.open_read(report.plan.folder / file.name) as opened:
                first, behind = (first_entry_at(opened, layout, 1, file.count, offset) for offset in (ends_at, log_end))
            found += behind - first
    return found


def _order(file: BrokerFile) -> tuple[int, int, str]:
    return file.begin, file.end, file.name


def _at_stake(report: AuditReport, kept: Sequence[BrokerFile], ends_at: int) -> tuple[str, ...]:
    # What an unclean start does to sound files (spec rocketmq-store 1.4, 7.3, 7.5), if one is next. A repair that
    # builds nothing still has the checkpoint vouch for them, and the last one say that all its messages are indexed.
    # Not for one that reaches behind where that start cuts the log: what comes there would be passed over.
    if report.crash.when != "next-start":
        return ()
    thrown = set(report.crash.thrown)
    last = max(kept, key=lambda file: file.name, default=None)
    if last is not None and last.entries and last.header.end_phy_offset <= last.end:
        thrown.add(last.name)
    return tuple(file.name for file in kept if file.name in thrown and file.end < ends_at)


# Names to spare where there is room: a key that a message has twice, and the index once, is not missing.
_SPARE_FACTOR, _SPARE = 4, 8


class _Planner:
    # Cuts the ranges between files that stay. Raises DiskError.
    def __init__(self, disk: Disk, config: Config, report: AuditReport, ends_at: int) -> None:
        self._disk, self._config, self._report, self._audit = disk, config, report, report.audit
        self._ends_at = ends_at
        self._probe = LogProbe(disk, config)
        # Those with entries that point into what is looked at.
        there = (file for file in report.plan.files if file.entries)
        self._files = sorted((file for file in there if file.points_into(self._audit.log_begin, ends_at)), key=_order)
        self._holes = [hole for hole in self._audit.holes if hole.begin < ends_at]
        self._has_all_holes = self._audit.hole_count == len(self._audit.holes)
        # The same places are asked for again and again.
        self._place = cache(self._find_place)

    def ranges(self, kept: Sequence[BrokerFile]) -> list[RepairRange] | BrokerFile:
        """Ranges in the order of the log; or the file that cannot stay as it is, so that others have to do."""
        found, names = list[RepairRange](), {file.name for file in kept}
        going = [file for file in self._files if file.name not in names]
        for low, high in pairwise([None, *kept, None]):
            first = _order(low) if low is not None else (-1, -1, "")
            last = _order(high) if high is not None else (self._ends_at, 0, "")
            replaced = [file for file in going if first < _order(file) < last]
            is_past = low is not None and low.end >= self._ends_at  # nothing is missing there
            if not replaced and (is_past or not self._is_missing(low, high)):
                continue
            if high is None and low is not None and not low.is_full and low.end >= self._audit.log_begin:
                return low  # the broker would go on in another file, and this one would stay as empty as it is
            made = self._make(low, high, replaced)
            if isinstance(made, BrokerFile):
                return made
            found += [made] if made is not None else []
        return found

    def is_missing_inside(self, file: BrokerFile) -> bool:
        """Whether a message between the first and the last one of ``file`` has keys that are not findable."""
        # Where there are too many holes to know each, any file may have one.
        return not self._has_all_holes or any(hole.begin < file.end and hole.last > file.begin for hole in self._holes)

    def _is_missing(self, low: BrokerFile | None, high: BrokerFile | None) -> bool:
        # The messages where files meet are in here, too: some keys of theirs may stand in neither.
        first = max(low.end if low is not None else 0, self._audit.log_begin)
        last = min(high.begin if high is not None else self._ends_at, self._ends_at - 1)
        holes = [hole for hole in self._holes if hole.last >= first and hole.begin <= last]
        return not self._has_all_holes or any(self._is_between(hole, low, high) for hole in holes)

    def _is_between(self, hole: Hole, low: BrokerFile | None, high: BrokerFile | None) -> bool:
        # Of the message that ends a file its first keys may be missing, which belong before that file; and so behind.
        if low is not None and hole.last == low.end:
            place = self._place(low, is_end=True)
            return place is None or place.offset <= low.end
        if high is not None and hole.begin == high.begin:
            place = self._place(high, is_end=False)
            return place is None or place.key > 0
        return True

    def _make(
        self, low: BrokerFile | None, high: BrokerFile | None, replaced: list[BrokerFile]
    ) -> RepairRange | BrokerFile | None:
        log_begin = self._audit.log_begin
        begin, before = KeyPosition(log_begin, 0, log_begin), None
        if low is not None and low.end >= log_begin:
            place, before = self._place(low, is_end=True), low.header
            if place is None:
                return low
            begin = place
        end = KeyPosition(self._ends_at, 0, self._ends_at)
        if high is not None and high.begin < self._ends_at:
            place = self._place(high, is_end=False)
            if place is None or begin[:2] > place[:2]:
                return high
            end = place
        if begin[:2] >= end[:2]:
            return None
        missing = sum(hole.keys for hole in self._holes if hole.last >= begin.offset and hole.begin <= end.offset)
        entries = sum(file.entries for file in replaced)
        # At most so many keys come to it: old entries, and all that are missing there.
        names = self._names(low, high, begin, replaced, entries + missing)
        if names is None:
            assert high is not None, "there is room behind every file but one of the last day of time"
            return high
        return RepairRange(
            begin=begin.offset,
            begin_key=begin.key,
            end=end.offset,
            end_key=end.key,
            aligned=begin.aligned,
            keys=max(entries, missing, 1),
            names=names,
            replaces=tuple(sorted(file.name for file in replaced)),
            before=before,
        )

    def _names(
        self, low: BrokerFile | None, high: BrokerFile | None, begin: KeyPosition, replaced: list[BrokerFile], keys: int
    ) -> tuple[str, ...] | None:
        taken = {file.name for file in self._report.plan.files}.difference(file.name for file in replaced)
        holes = [hole.begin_timestamp for hole in self._holes if hole.last >= begin.offset]
        files = [file.header.begin_timestamp for file in replaced]
        # No name of the future, whatever a clock has written: the broker's next ones have to sort behind.
        timestamp = min([*holes[:1], *files, self._report.state.looked_at])
        bounds = low.name if low is not None else None, high.name if high is not None else None
        capacity = max(self._report.plan.layout.index_num - 1, 1)
        count = -(-(keys + (0 if self._has_all_holes else self._audit.missing_keys)) // capacity)
        for wanted in (_SPARE_FACTOR * count + _SPARE, count + 1, count):
            if (found := names_between(*bounds, wanted, taken, timestamp)) is not None:
                return found
        return None

    def _find_place(self, file: BrokerFile, *, is_end: bool) -> KeyPosition | None:
        # Behind the last key that ``file`` holds, or before the first; None when those that it holds of its last
        # message are not the first ones, of its first message not the last ones.
        offset = file.end if is_end else file.begin
        end = self._probe.frame_end(offset)
        whole = self._key_hashes(offset) if end is not None else None
        if end is None or whole is None:
            # It cannot be read: what is missing of it, if anything, is no key that the log has.
            segment = self._probe.log.at(offset)
            behind = KeyPosition(offset + 1, 0, segment.base if segment is not None else offset + 1)
            return behind if is_end else KeyPosition(offset, 0, offset)
        # Key hashes of the entries that point there, in order; the file is in the order of the log.
        layout = self._report.plan.layout
        with self._disk.open_read(self._report.plan.folder / file.name) as opened:
            first, last = (first_entry_at(opened, layout, 1, file.count, one) for one in (offset, offset + 1))
            held = tuple(read_entries(opened, layout, first, last - first)[:, 0].byteswap().tolist())
        key = len(held) if is_end else len(whole) - len(held)
        if held == whole:
            return KeyPosition(end, 0, end) if is_end else KeyPosition(offset, 0, offset)
        # A file of a single message that another shares does not say which of the keys it holds.
        is_known = file.begin < file.end and held == (whole[:key] if is_end else whole[max(key, 0) :])
        return KeyPosition(offset, key, offset) if is_known else None

    def _key_hashes(self, offset: int) -> tuple[int, ...] | None:
        # Those of the message at ``offset``, None where it cannot be read.
        flavour = FLAVOURS[flavour_at(self._audit.eras, offset)]
        for item in LogRange(offset, offset + 1, offset, flavour.name).read(self._disk, self._config, 0):
            if isinstance(item, DispatchBatch):
                return tuple(keys_of(item, flavour.skip_mask).key_hash.tolist())
        return None


# Times are counted in milliseconds, so that every one of them has a name and names have one order.
_BEGIN = datetime.datetime(1000, 1, 1, tzinfo=datetime.UTC)
_END = datetime.datetime(9999, 12, 31, 23, 59, 59, 999_000, tzinfo=datetime.UTC)
_MILLISECOND = datetime.timedelta(milliseconds=1)
_TIMES = range((_END - _BEGIN) // _MILLISECOND + 1)
# The first millisecond of Unix time, in UTC-12.
_EPOCH = (datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC) - datetime.timedelta(hours=12) - _BEGIN) // _MILLISECOND


def names_between(
    low: str | None,
    high: str | None,
    count: int,
    taken: Collection[str],
    store_timestamp: int,
) -> tuple[str, ...] | None:
    """``count`` names for new files, behind ``low`` and before ``high``; None without room.

    ``taken`` are names of files that stay. ``store_timestamp``, ms, of the first message says where names begin that
    have no file before them.
    """
    first = min(max(_EPOCH + store_timestamp, 0), len(_TIMES) - 1)
    if low is not None:
        first = _behind(low) if high is not None else max(first, _behind(low))
    elif high is not None:
        # So much room is left to the one behind it as is needed.
        first = max(min(first, _behind(high) - 2 - count - len(taken)), 0)
    free = (name for name in map(_name, _TIMES[first:]) if name not in taken)
    names = tuple(islice(free, count))
    is_room = len(names) == count and (high is None or max(names, default="") < high)
    return names if is_room else None


def _name(at: int) -> str:
    time = _BEGIN + at * _MILLISECOND
    return f"{time:%Y%m%d%H%M%S}{time.microsecond // 1000:03d}"


def _behind(name: str) -> int:
    # The first time whose name sorts behind ``name``, be that a time or not.
    return bisect_right(_TIMES, name, key=_name)
