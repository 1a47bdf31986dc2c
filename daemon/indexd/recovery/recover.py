"""Carries a RecoveryPlan out: what is kept is brought back, what is not is removed, and the rest is the log's to give.

Every step leaves a directory that the same recovery would bring to the same end, so a crash inside it costs nothing:
files are only ever cut back or removed, and the frontier is replaced last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from indexd.commitlog.reader import LogReader
from indexd.flush.frontier import Frontier
from indexd.index.flavour import Flavour
from indexd.index.format import HEADER_SIZE, FileMark, IndexHeader, IndexLayout
from indexd.recovery.against import Agreed, compare_with_log
from indexd.recovery.plan import OnDisk, RecoveryPlan
from indexd.recovery.replay import phy_offset_of, read_entries, replay_file, time_diff_of, write_back
from indexd.storage.disk import Disk
from indexd.storage.names import DataFiles, is_index_name

OnProgress = Callable[[str, int, int], None]
# The store timestamp of the message at a physical offset, or None when it has expired.
StoreTimestampOf = Callable[[int], int | None]


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
    kept_entries: int = 0
    dropped_entries: int = 0
    deleted_files: tuple[str, ...] = ()
    rewritten_files: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


def look(disk: Disk, files: DataFiles, frontier: Frontier | None, *, unclean: bool, log_begin: int) -> OnDisk:
    """What the data directory holds; reads headers only."""
    sizes = {name: size for name, size in disk.list_dir(files.index) if is_index_name(name)}
    headers: dict[str, IndexHeader | None] = {}
    for name, size in sizes.items():
        if size < HEADER_SIZE:
            headers[name] = None
            continue
        with disk.open_read(files.index / name) as file:
            headers[name] = IndexHeader.unpack(file.pread(HEADER_SIZE, 0))
    return OnDisk(unclean, frontier, sizes, headers, log_begin)


def carry_out(plan: RecoveryPlan, ground: Ground, log: LogReader | None) -> Recovered:
    """Do what ``plan`` says; with ``log`` (at the begin of the log) also compare every kept entry with it."""
    recovered = Recovered((), plan.phy_offset, reasons=[plan.reason])
    _delete(ground, plan.delete, recovered)
    marks = sorted((*plan.keep, *plan.replay), key=lambda mark: mark.name)
    before = plan.lost_entries + sum(mark.header.entries for mark in marks)
    sound = _replay_all(marks, plan, ground, recovered)
    agreed = _compare(ground, sound, log, recovered) if log is not None and sound else None
    if agreed is not None and agreed.phy_offset is not None:
        recovered.phy_offset = agreed.phy_offset
        _delete(ground, tuple(mark.name for mark in sound[len(agreed.files) :]), recovered)
        sound = _keep_before(ground, list(agreed.files), agreed.phy_offset, recovered)
    elif plan.cut or sound != marks:
        # The message of the last entry may have more keys than are in: it is indexed again, whole.
        recovered.phy_offset = _last_message(ground, sound)
        sound = _keep_before(ground, sound, recovered.phy_offset or 0, recovered)
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


def _compare(ground: Ground, sound: list[FileMark], log: LogReader, recovered: Recovered) -> Agreed:
    end = sound[-1].header.end_phy_offset
    agreed = compare_with_log(
        ground.disk,
        ground.directory,
        ground.layout,
        ground.flavour,
        tuple(sound),
        log,
        lambda offset: ground.on_progress("compare", offset, end),
    )
    recovered.reasons.append(agreed.reason)
    return agreed
