"""Carries a RecoveryPlan out: what is kept is brought back, what is not is removed, and the rest is the log's to give.

Every step leaves a directory that the same recovery would bring to the same end, so a crash inside it costs nothing:
files are only ever cut back or removed, and the frontier is replaced last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from indexd.flush.frontier import Frontier
from indexd.index.flavour import Flavour
from indexd.index.format import HEADER_SIZE, FileMark, IndexHeader, IndexLayout
from indexd.recovery.against import Agreed, Comparison, compare_with_log
from indexd.recovery.plan import OnDisk, RecoveryPlan
from indexd.recovery.replay import phy_offset_of, read_entries, replay_file, time_diff_of, write_back
from indexd.storage.disk import Disk
from indexd.storage.names import DataFiles, is_index_name

OnProgress = Callable[[str, int, int], None]
# The store timestamp of the message at a physical offset, or None when it has expired.
StoreTimestampOf = Callable[[int], int | None]
# What to compare of the log before a physical offset.
CompareBefore = Callable[[int], Comparison]


@dataclass(frozen=True, slots=True)
class Ground:
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
    #: Messages of the log that were compared, up to ``phy_offset``, and the store timestamp of the last, or 0.
    compared_messages: int = 0
    store_timestamp: int = 0
    kept_entries: int = 0
    dropped_entries: int = 0
    deleted_files: tuple[str, ...] = ()
    rewritten_files: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


def look(disk: Disk, files: DataFiles, frontier: Frontier | None, *, unclean: bool, log_begin: int) -> OnDisk:
    """What the data directory holds; reads headers only."""
    stamps = {name: stamp for name, stamp in disk.stamps(files.index).items() if is_index_name(name)}
    sizes = {name: stamp.size for name, stamp in stamps.items()}
    headers: dict[str, IndexHeader | None] = {}
    for name, size in sizes.items():
        if size < HEADER_SIZE:
            headers[name] = None
            continue
        with disk.open_read(files.index / name) as file:
            headers[name] = IndexHeader.unpack(file.pread(HEADER_SIZE, 0))
    return OnDisk(
        unclean, frontier, sizes, headers, log_begin, {name: stamp.mtime_ns for name, stamp in stamps.items()}
    )


def carry_out(plan: RecoveryPlan, ground: Ground, compare_before: CompareBefore | None) -> Recovered:
    """Do what ``plan`` says; then cut off what the log, as far as the comparison looks, does not say any more."""
    recovered = Recovered((), plan.phy_offset, reasons=[plan.reason])
    _delete(ground, plan.delete, recovered)
    marks = sorted((*plan.keep, *plan.replay), key=lambda mark: mark.name)
    before = plan.lost_entries + sum(mark.header.entries for mark in marks)
    sound = _replay_all(marks, plan, ground, recovered)
    if plan.cut or sound != marks:
        # The message of the last entry may have more keys than are in: it is indexed again, whole.
        recovered.phy_offset = _last_message(ground, sound)
        sound = _keep_before(ground, sound, recovered.phy_offset or 0, recovered)
    if compare_before is not None and recovered.phy_offset is not None:
        agreed = _compare(ground, sound, compare_before(recovered.phy_offset), recovered)
        if agreed.phy_offset is not None:
            recovered.phy_offset = agreed.phy_offset
            sound = _keep_before(ground, sound, agreed.phy_offset, recovered)
    mtimes_ns = {name: stamp.mtime_ns for name, stamp in ground.disk.stamps(ground.directory).items()}
    sound = [replace(mark, mtime_ns=mtimes_ns[mark.name]) for mark in sound]
    recovered.files = tuple(sound)
    recovered.kept_entries = sum(mark.header.entries for mark in sound)
    recovered.dropped_entries = before - recovered.kept_entries
    ground.disk.sync_dir(ground.directory)
    return recovered


def _delete(ground: Ground, names: tuple[str, ...], recovered: Recovered) -> None:
    for name in names:
        ground.disk.unlink(ground.directory / name)
    recovered.deleted_files = (*recovered.deleted_files, *names)


def _replay_all(marks: list[FileMark], plan: RecoveryPlan, ground: Ground, recovered: Recovered) -> list[FileMark]:
    # The marks that hold, oldest first; the last one may be cut, and then what is behind it is gone.
    sound: list[FileMark] = []
    for done, mark in enumerate(marks):
        ground.on_progress("replay", done, len(marks))
        if mark in plan.keep:
            sound.append(mark)
            continue
        with ground.disk.open_write(ground.directory / mark.name) as file:
            replayed = replay_file(file, mark, ground.layout, ground.flavour)
            if replayed.dropped_entries == 0:
                if write_back(file, replayed, ground.layout):
                    recovered.rewritten_files.append(mark.name)
                sound.append(replayed.mark)
                continue
        entry = replayed.mark.header.index_count
        recovered.reasons.append(f"index file {mark.name}: entry {entry} is not what its chain says")
        _delete(ground, tuple(later.name for later in marks[done + 1 :]), recovered)
        return [*sound, replayed.mark]
    return sound


def _last_message(ground: Ground, marks: list[FileMark]) -> int | None:
    # The physical offset of the last entry at which a message stands, or has expired; None when there is none. Where
    # a chain is broken, the entry before may be, too: reading the log must not go on between two frames.
    for mark in reversed(marks):
        with ground.disk.open_read(ground.directory / mark.name) as file:
            for number in range(mark.header.index_count - 1, 0, -1):
                phy_offset = phy_offset_of(read_entries(file, ground.layout, number, 1)[0])
                if phy_offset < ground.log_begin or ground.store_timestamp_of(phy_offset) is not None:
                    return phy_offset
    return None


def _keep_before(ground: Ground, marks: list[FileMark], phy_offset: int, recovered: Recovered) -> list[FileMark]:
    # Keep the entries of messages before phy_offset. Those of one message may straddle files, so go back file by file.
    kept = list(marks)
    while kept:
        mark = kept[-1]
        with ground.disk.open_read(ground.directory / mark.name) as file:
            count = mark.header.index_count
            while count > 1 and phy_offset_of(read_entries(file, ground.layout, count - 1, 1)[0]) >= phy_offset:
                count -= 1
        if count > 1:
            if not mark.full or count < mark.header.index_count:
                kept[-1] = _cut_file(ground, mark, count)
            break
        _delete(ground, (mark.name,), recovered)
        kept.pop()
    return kept


def _cut_file(ground: Ground, mark: FileMark, count: int) -> FileMark:
    # Cut a file to the entries below ``count`` and put its slots and header right.
    with ground.disk.open_write(ground.directory / mark.name) as file:
        last = read_entries(file, ground.layout, count - 1, 1)[0]
        phy_offset = phy_offset_of(last)
        # The entry knows whole seconds only; the message, if it is still there, knows the millisecond.
        exact = ground.store_timestamp_of(phy_offset)
        end = mark.header.begin_timestamp + time_diff_of(last) * 1000 if exact is None else exact
        header = replace(mark.header, end_phy_offset=phy_offset, end_timestamp=end, index_count=count)
        replayed = replay_file(file, FileMark(mark.name, header, full=False), ground.layout, ground.flavour)
        write_back(file, replayed, ground.layout)
    return replayed.mark


def _compare(ground: Ground, sound: list[FileMark], comparison: Comparison, recovered: Recovered) -> Agreed:
    begin = comparison.reader.position
    agreed = compare_with_log(
        ground.disk,
        ground.directory,
        ground.layout,
        ground.flavour,
        tuple(sound),
        comparison,
        lambda offset: ground.on_progress("compare", offset - begin, comparison.end - begin),
    )
    recovered.compared_messages, recovered.store_timestamp = agreed.messages, agreed.store_timestamp
    if agreed.reason:
        recovered.reasons.append(agreed.reason)
    return agreed
