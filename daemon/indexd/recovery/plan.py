"""What is on disk -> RecoveryPlan. Pure: nothing is read or written here, so every case is a row of a test.

Only the frontier is believed. Files that it does not name were made after it and are made again from the log. A
file that it names but that is missing or has another size ends what can be kept; so does everything behind it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from indexd.flush.frontier import Frontier
from indexd.index.format import FileMark, IndexHeader


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
