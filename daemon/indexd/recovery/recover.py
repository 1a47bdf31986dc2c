"""Recovers the key index: what of its files is kept, replayed and removed, decided first and then carried out.

Only the frontier is believed. Files that it does not name were made after it and are made again from the log. A file
that it names but that is missing or has another size ends what can be kept; so does everything behind it. Deciding is
pure: nothing is read or written by it, so every case is a row of a test.

Every step of carrying out leaves a directory that the same recovery would bring to the same end: what the frontier says
is made true again first; where it is not to be true any more, it is replaced before the files change.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from indexd.compare.log import Agreed, Compared, Comparison, compare_with_log
from indexd.errors import DisturbedError
from indexd.flush.frontier import Frontier
from indexd.index.entries import first_entry_at, phy_offset_of, read_entries, read_slots, time_diff_of
from indexd.index.format import HEADER_SIZE, FileMark, Flavour, IndexHeader, IndexLayout
from indexd.recovery.replay import Replayed, replay_file, write_back
from indexd.storage.disk import Disk
from indexd.storage.names import DataFiles, is_index_name


@dataclass(frozen=True, slots=True)
class OnDisk:
    """What a data directory holds: the abort flag, the frontier; size, header and time of each index file.

    ``log_begin`` is the first physical offset that the log still has. ``damaged`` are names of files that are not what
    their checksums say.
    """

    abort: bool
    frontier: Frontier | None
    sizes: Mapping[str, int]
    headers: Mapping[str, IndexHeader | None]
    log_begin: int = 0
    mtimes_ns: Mapping[str, int] = field(default_factory=dict)
    damaged: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """``keep`` as they are, ``replay`` to their marks, ``delete``; go on at ``phy_offset`` (None: the log's begin).

    ``cut`` is True when not all that the frontier names is kept: where files are lost (``lost_entries`` in them), to
    the last kept message, and ``phy_offset`` is None; where there are more entries than it covers, to ``phy_offset``.
    """

    keep: tuple[FileMark, ...]
    replay: tuple[FileMark, ...]
    delete: tuple[str, ...]
    phy_offset: int | None
    cut: bool
    reason: str
    lost_entries: int = 0

    @property
    def is_clean(self) -> bool:
        """Nothing has to be done."""
        return not self.replay and not self.delete and not self.cut


def plan_recovery(disk: OnDisk, *, forced: bool = False) -> RecoveryPlan:
    """Decide; ``forced`` (indexd --recover) replays every file, not only those that a crash can have touched."""
    if disk.frontier is None:
        return RecoveryPlan((), (), tuple(sorted(disk.sizes)), None, cut=False, reason="there is no frontier")
    reason = "abort is there" if disk.abort else "the last stop was clean"
    size = disk.frontier.layout.file_size
    marks = disk.frontier.index
    while marks and marks[0].name not in disk.sizes and marks[0].header.end_phy_offset < disk.log_begin:
        marks = marks[1:]  # it pointed to expired messages only, and may well be gone
    whole = 0
    while whole < len(marks) and disk.sizes.get(marks[whole].name) == size:
        whole += 1
    cut, offset = whole < len(marks), None if whole < len(marks) else disk.frontier.phy_offset
    if cut:
        name = marks[whole].name
        found = f"has {disk.sizes[name]} bytes" if name in disk.sizes else "is missing"
        reason = f"index file {name} {found}"
    elif disk.damaged:
        reason = f"index file {min(disk.damaged)} is not what its checksums say"
    elif any(mark.header.entries and mark.header.end_phy_offset >= disk.frontier.phy_offset for mark in marks):
        cut, reason = True, f"the frontier's phyOffset {disk.frontier.phy_offset} lies before what its files hold"
    lost = sum(mark.header.entries for mark in marks[whole:])
    marks = marks[:whole]
    keep: list[FileMark] = []
    replay: list[FileMark] = []
    for mark in marks:
        sound = disk.headers.get(mark.name) == mark.header and not _was_written_by_another(mark, disk)
        sound = sound and mark.name not in disk.damaged
        # An open file is written between flushes: after a crash only its durable prefix is known.
        touched = disk.abort and not mark.full
        (replay if forced or touched or not sound else keep).append(mark)
    kept = {mark.name for mark in marks}
    delete = tuple(sorted(name for name in disk.sizes if name not in kept))
    return RecoveryPlan(tuple(keep), tuple(replay), delete, offset, cut, "--recover" if forced else reason, lost)


def _was_written_by_another(mark: FileMark, disk: OnDisk) -> bool:
    return bool(mark.mtime_ns) and disk.mtimes_ns.get(mark.name, mark.mtime_ns) != mark.mtime_ns


OnProgress = Callable[[str, int, int], None]
# The store timestamp of the message at a physical offset, or None when it has expired.
StoreTimestampOf = Callable[[int], int | None]
# What to compare of the log before a physical offset.
CompareBefore = Callable[[int], Comparison]


@dataclass(frozen=True, slots=True)
class RecoveryContext:
    """Where recovery works, and how the files there are laid out."""

    disk: Disk
    directory: Path
    layout: IndexLayout
    flavour: Flavour
    log_begin: int
    store_timestamp_of: StoreTimestampOf
    on_progress: OnProgress


@dataclass(slots=True)
class Recovered:
    """The files as they now are, and where building goes on (None: at the log's begin)."""

    files: tuple[FileMark, ...]
    phy_offset: int | None
    compared: Compared = field(default_factory=Compared)
    kept_entries: int = 0
    dropped_entries: int = 0
    deleted_files: tuple[str, ...] = ()
    rewritten_files: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


# Makes a frontier durable that says what has been recovered.
Commit = Callable[[Recovered], object]


def look(
    disk: Disk,
    files: DataFiles,
    frontier: Frontier | None,
    *,
    unclean: bool,
    log_begin: int,
    damaged: frozenset[str] = frozenset(),
) -> OnDisk:
    """What the data directory holds; reads headers only, and the slots of a file that will be written on."""
    stamps = {name: stamp for name, stamp in disk.stamps(files.index).items() if is_index_name(name)}
    sizes = {name: stamp.size for name, stamp in stamps.items()}
    headers: dict[str, IndexHeader | None] = {}
    for name, size in sizes.items():
        if size < HEADER_SIZE:
            headers[name] = None
            continue
        with disk.open_read(files.index / name) as file:
            headers[name] = IndexHeader.unpack(file.pread(HEADER_SIZE, 0))
    mtimes_ns = {name: stamp.mtime_ns for name, stamp in stamps.items()}
    if frontier is not None and not unclean:
        for mark in frontier.index[-1:]:
            if not mark.full and sizes.get(mark.name) == frontier.layout.file_size and mark.slots_crc is not None:
                with disk.open_read(files.index / mark.name) as file:
                    is_sound = zlib.crc32(read_slots(file, frontier.layout).data) == mark.slots_crc
                damaged |= frozenset() if is_sound else {mark.name}
    return OnDisk(unclean, frontier, sizes, headers, log_begin, mtimes_ns, damaged)


def carry_out(
    plan: RecoveryPlan, context: RecoveryContext, compare_before: CompareBefore | None, commit: Commit
) -> Recovered:
    """Do what ``plan`` says; then cut off what the log, as far as the comparison looks, does not say any more.

    Where entries are cut off, ``commit`` first makes a frontier durable that does without them: else the next recovery
    would take a cut that was broken off for damage, and cut once more.
    """
    recovered = Recovered((), plan.phy_offset, reasons=[plan.reason])
    marks = sorted((*plan.keep, *plan.replay), key=lambda mark: mark.name)
    before = plan.lost_entries + sum(mark.header.entries for mark in marks)
    sound = _replay_all(marks, plan, context, recovered)
    is_cut = plan.cut or sound != marks
    if is_cut:
        if plan.phy_offset is None or sound != marks:
            # The message of the last entry may have more keys than are in: it is indexed again, whole.
            recovered.phy_offset = _last_message(context, sound)
        sound = _before(context, sound, recovered.phy_offset or 0)
    if compare_before is not None and recovered.phy_offset is not None:
        agreed = _compare(context, sound, compare_before(recovered.phy_offset), recovered)
        if agreed.phy_offset is not None:
            is_cut, recovered.phy_offset = True, agreed.phy_offset
            sound = _before(context, sound, agreed.phy_offset)
    last = _cut_last(context, sound) if is_cut and sound else None
    recovered.files = (*sound[:-1], last.mark) if last else tuple(sound)
    recovered.kept_entries = sum(mark.header.entries for mark in sound)
    recovered.dropped_entries = before - recovered.kept_entries
    if is_cut:
        commit(recovered)
    _finish_files(plan, context, recovered, last)
    return recovered


def _finish_files(plan: RecoveryPlan, context: RecoveryContext, recovered: Recovered, last: Replayed | None) -> None:
    # Only now do files become less than the frontier before said of them.
    kept = {mark.name for mark in recovered.files}
    known = {mark.name for mark in (*plan.keep, *plan.replay)}
    recovered.deleted_files = tuple(sorted({*plan.delete, *(known - kept)}))
    for name in recovered.deleted_files:
        context.disk.unlink(context.directory / name)
    if last is not None:
        with context.disk.open_write(context.directory / last.mark.name) as file:
            write_back(file, last, context.layout)
    context.disk.sync_dir(context.directory)
    stamps = context.disk.stamps(context.directory)
    recovered.files = tuple(replace(mark, mtime_ns=stamps[mark.name].mtime_ns) for mark in recovered.files)


def _replay_all(
    marks: list[FileMark], plan: RecoveryPlan, context: RecoveryContext, recovered: Recovered
) -> list[FileMark]:
    # The marks that hold, oldest first; the last one may be shorter, and then what is behind it is gone.
    sound: list[FileMark] = []
    for done, mark in enumerate(marks):
        context.on_progress("replay", done, len(marks))
        if mark in plan.keep:
            sound.append(mark)
            continue
        with context.disk.open_write(context.directory / mark.name) as file:
            replayed = replay_file(file, mark, context.layout, context.flavour)
            if replayed.dropped_entries == 0:
                if write_back(file, replayed, context.layout):
                    recovered.rewritten_files.append(mark.name)
                sound.append(replayed.mark)
                continue
        entry = replayed.mark.header.index_count
        recovered.reasons.append(f"index file {mark.name}: entry {entry} is not what its chain says")
        return [*sound, replayed.mark]
    return sound


def _last_message(context: RecoveryContext, marks: list[FileMark]) -> int | None:
    # The physical offset of the last entry at which a message stands, or has expired; None when there is none. Where
    # a chain is broken, the entry before may be, too: reading the log must not go on between two frames.
    for mark in reversed(marks):
        with context.disk.open_read(context.directory / mark.name) as file:
            for number in range(mark.header.index_count - 1, 0, -1):
                phy_offset = phy_offset_of(read_entries(file, context.layout, number, 1)[0])
                if phy_offset < context.log_begin or context.store_timestamp_of(phy_offset) is not None:
                    return phy_offset
    return None


def _before(context: RecoveryContext, marks: list[FileMark], phy_offset: int) -> list[FileMark]:
    # The entries of messages before phy_offset. Those of one message may straddle files, so go back file by file.
    kept = list(marks)
    while kept:
        mark = kept[-1]
        with context.disk.open_read(context.directory / mark.name) as file:
            count = first_entry_at(file, context.layout, 1, mark.header.index_count, phy_offset)
        if count > 1:
            if count < mark.header.index_count:
                kept[-1] = replace(mark, header=replace(mark.header, index_count=count), full=False)
            break
        kept.pop()
    return kept


def _cut_last(context: RecoveryContext, marks: list[FileMark]) -> Replayed | None:
    # What the last file comes to with the entries that its mark has left; None if that is all it ever had.
    mark = marks[-1]
    if mark.full:
        return None
    with context.disk.open_read(context.directory / mark.name) as file:
        last = read_entries(file, context.layout, mark.header.index_count - 1, 1)[0]
        phy_offset = phy_offset_of(last)
        # The entry knows whole seconds only; the message, if it is still there, knows the millisecond.
        exact = context.store_timestamp_of(phy_offset)
        end = mark.header.begin_timestamp + time_diff_of(last) * 1000 if exact is None else exact
        header = replace(mark.header, end_phy_offset=phy_offset, end_timestamp=end)
        return replay_file(file, replace(mark, header=header), context.layout, context.flavour)


def _compare(context: RecoveryContext, sound: list[FileMark], comparison: Comparison, recovered: Recovered) -> Agreed:
    begin = comparison.reader.position
    agreed = compare_with_log(
        context.disk,
        context.directory,
        context.layout,
        context.flavour,
        tuple(sound),
        comparison,
        lambda offset: context.on_progress("compare", offset - begin, comparison.end - begin),
    )
    recovered.compared = agreed.compared
    if agreed.reason:
        recovered.reasons.append(agreed.reason)
    return agreed


@dataclass(frozen=True, slots=True)
class Damage:
    """``files``: names of index files to be replayed; from ``recheck_from`` on, entries are compared with the log.

    ``is_secondary``: other outputs than the key index, which are filled again from the log's begin.
    """

    files: frozenset[str] = frozenset()
    recheck_from: int | None = None
    is_secondary: bool = False

    def recheck_size(self, frontier: Frontier) -> int:
        """So much of the log before the frontier's end has to be compared."""
        return 0 if self.recheck_from is None else max(frontier.phy_offset - self.recheck_from, 0)


NO_DAMAGE = Damage()


class DamagedError(DisturbedError):
    """A file is not as it was written, whoever did that."""

    def __init__(self, text: str, damage: Damage) -> None:
        super().__init__(text)
        self.damage = damage
