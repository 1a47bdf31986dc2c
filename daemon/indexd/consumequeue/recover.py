"""Recovery of the ConsumeQueues, in two steps: ``plan`` only looks, ``carry_out`` changes files.

What the marks of a durable frontier say was synced before it was written, so their units are there. Behind them
anything may lie: pages of units that were never durable, files that no mark names.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from indexd.consumequeue.format import (
    UNIT,
    UNIT_SIZE,
    QueueMark,
    Unit,
    file_name,
    queue_directory,
    queue_folders,
    unnamed_files,
)
from indexd.consumequeue.queues import first_at
from indexd.errors import DiskError
from indexd.storage.disk import Disk

_NOT_EMPTY = (errno.ENOTEMPTY, errno.EEXIST)
_REASONS_MAX = 10


@dataclass(frozen=True, slots=True)
class QueuesPlan:
    """The queues as they will be, and what has to be changed for that.

    ``marks``: what is kept, in the order of the marks that were given. ``refill_from``: the physical offset from which
    the log has to be read again for ConsumeQueues because units are lost, None if none are; it lies before the offset
    from which reading goes on anyway, and queues that have lost nothing pass over what they have. ``cut``: files and
    how many of their bytes are kept; zeros follow. ``delete`` and ``directories``: what no mark names. ``reasons``: a
    line each for the log. ``dropped_units`` are no longer in ``marks``.

    A frontier with ``marks`` must be durable before ``carry_out``, and until everything behind ``refill_from`` has been
    built again and synced it must not say more than that offset: files of a refill that was broken off are taken for
    leftovers only then.
    """

    root: Path
    file_size: int
    marks: tuple[QueueMark, ...] = ()
    refill_from: int | None = None
    delete: tuple[Path, ...] = ()
    directories: tuple[Path, ...] = ()
    cut: tuple[tuple[Path, int], ...] = ()
    reasons: list[str] = field(default_factory=list)
    dropped_units: int = 0


@dataclass(frozen=True, slots=True)
class QueuesRecovered:
    """What ``carry_out`` has changed: for ConsumeQueueStore.load, so that the next flush makes it durable."""

    unsynced_files: tuple[Path, ...] = ()
    unsynced_directories: tuple[Path, ...] = ()
    deleted_files: tuple[Path, ...] = ()


def plan(
    disk: Disk,
    directory: Path,
    file_size: int,
    marks: Sequence[QueueMark],
    phy_offset: int,
    *,
    is_cut: bool,
    is_unclean: bool,
    log_begin: int,
) -> QueuesPlan:
    """What is left of ``marks``, if reading the log goes on at ``phy_offset``. Reads only; raises DiskError.

    ``is_cut``: that is lower than what the marks cover, so units from there on are dropped. ``is_unclean``: behind the
    last unit of a queue anything may lie. ``log_begin``: the lowest physical offset that the log has.
    """
    found = queue_folders(disk, directory)
    if marks and phy_offset < log_begin:
        reason = f"the log begins at {log_begin}, behind all that the queues hold: they begin anew"
        lost = sum(mark.max_offset - mark.min_offset for mark in marks)
        return replace(_leftovers(directory, file_size, (), found), reasons=[reason], dropped_units=lost)
    keeping = _Keeping(disk, directory, file_size, phy_offset if is_cut else None, log_begin, is_unclean=is_unclean)
    kept = tuple(
        mark
        for mark in (keeping.keep(mark, found.get(_directory(directory, mark), {})) for mark in marks)
        if mark is not None
    )
    refill_from = keeping.refill_from
    return replace(
        _leftovers(directory, file_size, kept, found),
        refill_from=refill_from if refill_from is not None and refill_from < phy_offset else None,
        cut=tuple(keeping.cut),
        reasons=keeping.reasons(),
        dropped_units=keeping.dropped_units,
    )


def carry_out(disk: Disk, plan: QueuesPlan) -> QueuesRecovered:
    """Do what ``plan`` says. Broken off, it is planned and carried out again, and comes to the same."""
    for path in plan.delete:
        disk.unlink(path)
    left = {path.parent for path in plan.delete}
    for path in plan.directories:
        try:
            disk.remove_dir(path)
        except DiskError as error:
            if error.errno not in _NOT_EMPTY:
                raise
            continue  # it holds something that is not ours
        left.discard(path)
        left.add(path.parent)
    for path, size in plan.cut:
        with disk.open_write(path) as file:
            file.truncate(size)
            file.truncate(plan.file_size)
    return QueuesRecovered(tuple(path for path, _ in plan.cut), tuple(sorted(left)), plan.delete)


class _Keeping:
    # Mark by mark, what of it is kept.

    def __init__(
        self, disk: Disk, root: Path, file_size: int, cut_at: int | None, log_begin: int, *, is_unclean: bool
    ) -> None:
        self._disk, self._root, self._file_size = disk, root, file_size
        self._file_units = file_size // UNIT_SIZE
        self._cut_at, self._log_begin, self._is_unclean = cut_at, log_begin, is_unclean
        self.refill_from: int | None = None
        self.cut: list[tuple[Path, int]] = []
        self.dropped_units = 0
        self._reasons: list[str] = []
        self._reason_count = 0

    def reasons(self) -> list[str]:
        """The first ones, and how many more there are."""
        more = self._reason_count - len(self._reasons)
        return [*self._reasons, *([f"{more} more queues that are not whole"] if more else [])]

    def keep(self, mark: QueueMark, sizes: dict[int, int]) -> QueueMark | None:
        """The queue as it will be, None if nothing of it is left. ``sizes``: bytes of its files, by the file's name."""
        kept = self._whole(mark, sizes)
        if kept is not None and self._cut_at is not None and kept.max_phy_offset > self._cut_at:
            kept = self._ending(kept, self._first_at(kept, self._cut_at))
        end = kept.max_offset if kept is not None else 0
        self.dropped_units += mark.max_offset - max(end, min(mark.min_offset, mark.max_offset))
        if kept is not None and end > kept.first_offset:
            begin = (end - 1) // self._file_units * self._file_units
            size = (end - begin) * UNIT_SIZE
            is_stale = self._is_unclean or end < mark.max_offset or sizes[begin * UNIT_SIZE] < self._file_size
            if is_stale and size < self._file_size:
                self.cut.append((self._path(kept, begin), size))
        return kept

    def _whole(self, mark: QueueMark, sizes: dict[int, int]) -> QueueMark | None:
        # The units before the first file that is not there; what is lost behind them the log has to give again.
        reason, end = self._first_missing(mark, sizes)
        if reason is None:
            return mark
        self._reason_count += 1
        if len(self._reasons) < _REASONS_MAX:
            self._reasons.append(f"ConsumeQueue {mark.topic}/{mark.queue_id}: {reason}")
        if mark.max_phy_offset <= self._log_begin:
            return None  # all of it has expired
        kept = self._ending(mark, end) if end > mark.first_offset else None
        if kept is not None and kept.max_phy_offset <= self._log_begin:
            # What is lost may have expired, too, and then the next message would take its place.
            kept = None
        begin = kept.max_phy_offset if kept is not None else self._log_begin
        self.refill_from = begin if self.refill_from is None else min(begin, self.refill_from)
        return kept

    def _first_missing(self, mark: QueueMark, sizes: dict[int, int]) -> tuple[str | None, int]:
        # Why the queue is not what its mark says, None if it is, and the unit up to which it may be.
        first, end = mark.first_offset, mark.max_offset
        is_empty = first == end and mark.begin_offset >= first
        if first < 0 or first % self._file_units or not first <= mark.min_offset <= end or is_empty:
            return "its mark contradicts itself", first
        for begin in range(first, end, self._file_units):
            size = sizes.get(begin * UNIT_SIZE)
            if size is None:
                return f"file {file_name(begin * UNIT_SIZE)} is missing", begin
            least = min((end - begin) * UNIT_SIZE, self._file_size)
            if not least <= size <= self._file_size or (size < self._file_size and end > begin + self._file_units):
                return f"file {file_name(begin * UNIT_SIZE)} has {size} bytes, not {self._file_size}", begin
            if size < self._file_size and not self._is_whole(mark, begin, end):
                return f"file {file_name(begin * UNIT_SIZE)} was cut, and written on", begin
        if self._is_unclean and end > first:
            last = self._unit(mark, end - 1)
            if last.phy_offset + last.size != mark.max_phy_offset or last.is_blank:
                return f"unit {end - 1} is not the one that was written", first
        return None, end

    def _is_whole(self, mark: QueueMark, begin: int, end: int) -> bool:
        # A file that a broken-off recovery left shorter has all its units; one that somebody cut has a hole.
        with self._disk.open_read(self._path(mark, begin)) as file:
            data = file.pread((end - begin) * UNIT_SIZE, 0)
        last = -1
        for unit in (Unit(*row) for row in UNIT.iter_unpack(data[: len(data) // UNIT_SIZE * UNIT_SIZE])):
            if not unit.is_valid or (unit.phy_offset <= last and not unit.is_blank):
                return False
            last = last if unit.is_blank else unit.phy_offset
        return True

    def _ending(self, mark: QueueMark, end: int) -> QueueMark | None:
        # The queue with the units before ``end``; None if there never was a message among them.
        if end <= mark.first_offset:
            if mark.begin_offset >= mark.first_offset:
                return None
            # Messages that have expired stood before: what comes next goes on behind them.
            first = mark.first_offset
            return mark._replace(min_offset=first, max_offset=first, max_phy_offset=self._log_begin)
        last = self._unit(mark, end - 1)
        if last.is_blank or not last.is_valid:
            return None
        return mark._replace(
            min_offset=min(mark.min_offset, end), max_offset=end, max_phy_offset=last.phy_offset + last.size
        )

    def _first_at(self, mark: QueueMark, phy_offset: int) -> int:
        # The first unit at phy_offset or behind it; they rise, but for blank ones, which come first and say 0.
        begin = (mark.max_offset - 1) // self._file_units * self._file_units
        while True:
            with self._disk.open_read(self._path(mark, begin)) as file:
                count = min(mark.max_offset - begin, self._file_units)
                index, _ = first_at(file, 0, count, phy_offset)
            if index > 0 or begin == mark.first_offset:
                return begin + index
            begin -= self._file_units

    def _unit(self, mark: QueueMark, offset: int) -> Unit:
        begin = offset // self._file_units * self._file_units
        with self._disk.open_read(self._path(mark, begin)) as file:
            return Unit(*UNIT.unpack(file.pread(UNIT_SIZE, (offset - begin) * UNIT_SIZE)))

    def _path(self, mark: QueueMark, begin: int) -> Path:
        return _directory(self._root, mark) / file_name(begin * UNIT_SIZE)


def _leftovers(
    root: Path, file_size: int, marks: tuple[QueueMark, ...], found: dict[Path, dict[int, int]]
) -> QueuesPlan:
    # What no mark names: files, then folders, each after what is in it.
    named = {_directory(root, mark) for mark in marks}
    queues = [directory for directory in found if directory not in named]
    topics = {directory.parent for directory in queues} - {directory.parent for directory in named}
    delete = tuple(unnamed_files(root, file_size, marks, found))
    return QueuesPlan(root, file_size, marks, delete=delete, directories=(*queues, *sorted(topics)))


def _directory(root: Path, mark: QueueMark) -> Path:
    return queue_directory(root, mark.topic, mark.queue_id)
