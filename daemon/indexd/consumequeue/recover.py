"""Recovery of the ConsumeQueues: what of the marks holds, and what has to be changed and read again.

What the marks of a durable frontier say was synced before it was written, so their units are there. Behind them
anything may lie: pages of units that were never durable, files that no mark names.
"""

from __future__ import annotations

from pathlib import Path

from indexd.consumequeue.format import (
    UNIT,
    UNIT_SIZE,
    QueueMark,
    QueuesMark,
    Unit,
    file_name,
    queue_directory,
    queue_folders,
    unnamed_files,
)
from indexd.consumequeue.queues import first_at
from indexd.output import OutputRecovery, RecoveryScope
from indexd.storage.disk import Disk

_REASONS_MAX = 10


def recover_queues(
    disk: Disk, directory: Path, held: QueuesMark | None, file_size: int, scope: RecoveryScope, queues_max: int
) -> OutputRecovery[QueuesMark]:
    """What is left of ``held``, if reading the log goes on at ``scope.phy_offset``. Reads only; raises DiskError.

    The marks that are kept are in the order of those that were given. Queues that have lost nothing pass over what
    they have when the log is read again for others.
    """
    limit, starts = None, [scope.believed]
    if held is None:
        starts.append(scope.log_begin)
    elif held.limit is not None and not scope.is_forced and queues_max <= held.limit:
        limit = held.limit
    elif held.limit is not None:
        starts.append(scope.log_begin)  # there is room now for queues that were left out
    marks, lost, cut, reasons = _kept(disk, directory, held or QueuesMark(file_size), scope)
    refill_from = max(min([*starts, *lost]), scope.log_begin)
    delete, directories = _leftovers(disk, directory, file_size, marks)
    return OutputRecovery(
        QueuesMark(file_size, marks, limit),
        refill_from if refill_from < scope.phy_offset else None,
        delete,
        directories,
        cut,
        reasons,
    )


def kept_queues(disk: Disk, directory: Path, held: QueuesMark, scope: RecoveryScope) -> tuple[QueuesMark, bool]:
    """What ``held`` has of messages before ``scope.believed``, and whether all files for that are there."""
    marks, lost, _, _ = _kept(disk, directory, held, scope)
    return held._replace(queues=marks), not any(start < scope.believed for start in lost)


_Kept = tuple[tuple[QueueMark, ...], list[int], tuple[tuple[Path, int, int], ...], tuple[str, ...]]


def _kept(disk: Disk, directory: Path, held: QueuesMark, scope: RecoveryScope) -> _Kept:
    # The marks; where the log has to be read again for what is lost; what is cut; why.
    if held.queues and scope.believed < scope.log_begin:
        return (), [], (), (f"the log begins at {scope.log_begin}, behind all that the queues hold: they begin anew",)
    found = queue_folders(disk, directory)
    keeping = _Keeping(disk, directory, held.file_size, scope)
    kept = [keeping.keep(mark, found.get(_directory(directory, mark), {})) for mark in held.queues]
    lost = [] if keeping.refill_from is None else [keeping.refill_from]
    return tuple(mark for mark in kept if mark is not None), lost, tuple(keeping.cut), keeping.reasons()


class _Keeping:
    # Mark by mark, what of it is kept.

    def __init__(self, disk: Disk, root: Path, file_size: int, scope: RecoveryScope) -> None:
        self._disk, self._root, self._file_size = disk, root, file_size
        self._file_units = file_size // UNIT_SIZE
        # Also where it is not lower than the marks: a drain that was broken off may have left units behind it.
        self._cut_at, self._log_begin, self._is_unclean = scope.believed, scope.log_begin, scope.is_unclean
        self.refill_from: int | None = None
        self.cut: list[tuple[Path, int, int]] = []
        self._reasons: list[str] = []
        self._reason_count = 0

    def reasons(self) -> tuple[str, ...]:
        """The first ones, and how many more there are."""
        more = self._reason_count - len(self._reasons)
        return (*self._reasons, *([f"{more} more queues that are not whole"] if more else []))

    def keep(self, mark: QueueMark, sizes: dict[int, int]) -> QueueMark | None:
        """The queue as it will be, None if nothing of it is left. ``sizes``: bytes of its files, by the file's name."""
        kept = self._whole(mark, sizes)
        if kept is not None and kept.max_phy_offset > self._cut_at:
            kept = self._ending(kept, self._first_at(kept, self._cut_at))
        end = kept.max_offset if kept is not None else 0
        if kept is not None and end > kept.first_offset:
            begin = (end - 1) // self._file_units * self._file_units
            size = (end - begin) * UNIT_SIZE
            is_stale = self._is_unclean or end < mark.max_offset or sizes[begin * UNIT_SIZE] < self._file_size
            if is_stale and size < self._file_size:
                self.cut.append((self._path(kept, begin), size, self._file_size))
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
            return mark._replace(min_offset=first, max_offset=first, max_phy_offset=self._log_begin, moved_from=-1)
        last = self._unit(mark, end - 1)
        if last.is_blank or not last.is_valid:
            return None
        end_phy_offset = last.phy_offset + last.size
        return mark._replace(
            min_offset=min(mark.min_offset, end),
            max_offset=end,
            max_phy_offset=end_phy_offset,
            moved_from=mark.moved_from if mark.moved_from < end_phy_offset else -1,
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
    disk: Disk, root: Path, file_size: int, marks: tuple[QueueMark, ...]
) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    # What no mark names: files, then folders, each after what is in it.
    found = queue_folders(disk, root)
    named = {_directory(root, mark) for mark in marks}
    queues = [directory for directory in found if directory not in named]
    topics = {directory.parent for directory in queues} - {directory.parent for directory in named}
    return tuple(unnamed_files(root, file_size, marks, found)), (*queues, *sorted(topics))


def _directory(root: Path, mark: QueueMark) -> Path:
    return queue_directory(root, mark.topic, mark.queue_id)
