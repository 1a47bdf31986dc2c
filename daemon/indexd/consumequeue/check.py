"""Holds the files of ConsumeQueues against their marks: every unit for a check, what is left of them for recovery.

What the marks of a durable frontier say was synced before it was written, so their units are there. Behind them
anything may lie: pages of units that were never durable, files that no mark names. A queue that is not what its mark
says is built again from the log's begin. Both only read, by pread, a window at a time; never the log.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from indexd.consumequeue.format import (
    UNIT_SIZE,
    QueueMark,
    QueuesMark,
    file_name,
    queue_directory,
    queue_folders,
    unnamed_files,
)
from indexd.consumequeue.reader import ConsumeQueueReader
from indexd.errors import MissingOk
from indexd.findings import KEPT_MAX, Findings
from indexd.output import CheckScope, OutputRecovery, RecoveryScope, find_nonzero
from indexd.storage.disk import Disk, DiskFile

#: A unit as it lies in a file.
UNIT_TYPE = np.dtype([("phy_offset", ">i8"), ("size", ">i4"), ("tags_code", ">i8")])
_BLANK_SIZE = 2147483647
_UNITS_PER_READ = 1 << 16
_REASONS_MAX = 10
# What is wrong with a unit, and where in it the number stands.
_NEGATIVE, _ORDER, _SIZE, _BLANK = range(4)
_UNIT_KINDS = (
    ("unit-phy-offset", 0, "the phy offset {value} is negative"),
    ("unit-order", 0, "the phy offset {value} lies before the end of the message before it, {least}"),
    ("unit-size", 8, "the size {value} is not more than 0"),
    ("unit-blank", 0, "a blank unit stands where a message's should"),
)


class _Units:
    # Judges the units of a queue, window by window.
    def __init__(self, min_offset: int) -> None:
        self._min_offset = min_offset
        #: Where the last message ends in the log; whether a unit that is not blank has been seen.
        self.end, self._is_begun = 0, False

    def judge(self, data: bytes, offset: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Of the whole units of ``data``, from unit ``offset`` on: the kind of what is wrong or -1, what stands there,
        and what is the least.

        Blank units may stand before ``min_offset``, and only before all others.
        """
        units = np.frombuffer(data, UNIT_TYPE, len(data) // UNIT_SIZE)
        phy, size = units["phy_offset"].astype(np.int64), units["size"].astype(np.int64)
        numbers = np.arange(len(units))
        is_blank = (phy == 0) & (size == _BLANK_SIZE)
        is_valid = ~is_blank & (phy >= 0) & (size > 0)
        # Also of one that stands too low: one that stands too high must not make all behind it look wrong.
        ends = np.concatenate(([self.end], phy + size))
        last = np.maximum.accumulate(np.concatenate(([0], np.where(is_valid, numbers + 1, 0))))
        begun = np.logical_or.accumulate(np.concatenate(([self._is_begun], ~is_blank)))
        least, kinds = ends[last[:-1]], np.full(len(units), -1)
        kinds[is_valid & (phy < least)] = _ORDER
        kinds[~is_blank & (size <= 0)] = _SIZE
        kinds[~is_blank & (phy < 0)] = _NEGATIVE
        kinds[is_blank & (begun[:-1] | (offset + numbers >= self._min_offset))] = _BLANK
        self.end, self._is_begun = int(ends[last[-1]]), bool(begun[-1])
        return kinds, np.where(kinds == _SIZE, size, phy), least


def check_queues(disk: Disk, directory: Path, held: QueuesMark, scope: CheckScope) -> Findings:
    """Everything that does not hold."""
    findings, file_size = Findings(), held.file_size
    for mark in held.queues:
        name, before, units = f"consumequeue/{mark.topic}/{mark.queue_id}", len(findings), _Units(mark.min_offset)
        folder = queue_directory(directory, mark.topic, mark.queue_id)
        for first in range(mark.first_offset, mark.max_offset, file_size // UNIT_SIZE):
            path = folder / file_name(first * UNIT_SIZE)
            with MissingOk(), disk.open_read(path) as file:
                _check_file(file, f"{name}/{path.name}", file_size, mark, first, units, findings, scope)
                continue
            findings.add(f"{name}/{path.name}", 0, "file-missing", "the frontier names it, but it is not there")
        if mark.max_offset > mark.first_offset and len(findings) == before and units.end != mark.max_phy_offset:
            text = f"the newest message ends at {units.end}, not at {mark.max_phy_offset} as the frontier says"
            findings.add(name, 0, "queue-end", text)
    # A daemon that runs or died may have made files that the marks do not name yet.
    if scope.is_complete:
        for path in unnamed_files(directory, file_size, held.queues, queue_folders(disk, directory)):
            text = "the frontier does not name it, and no daemon runs"
            findings.add(f"consumequeue/{path.relative_to(directory)}", 0, "file-unnamed", text)
    return findings


def _check_file(
    file: DiskFile,
    name: str,
    file_size: int,
    mark: QueueMark,
    first: int,
    units: _Units,
    findings: Findings,
    scope: CheckScope,
) -> None:
    end, size = min(mark.max_offset - first, file_size // UNIT_SIZE) * UNIT_SIZE, file.size()
    if size != file_size:
        findings.add(name, min(size, file_size), "file-size", f"{size} bytes, not {file_size}")
    for position in range(0, end, _UNITS_PER_READ * UNIT_SIZE):
        data = file.pread(min(end - position, _UNITS_PER_READ * UNIT_SIZE), position)
        scope.on_bytes(len(data))
        offset = first + position // UNIT_SIZE
        kinds, values, least = units.judge(data, offset)
        wrong = np.flatnonzero(kinds >= 0)
        for row in wrong[:KEPT_MAX].tolist():
            what, at, text = _UNIT_KINDS[kinds[row]]
            words = f"unit {offset + row}: {text.format(value=values[row], least=least[row])}"
            findings.add(name, position + row * UNIT_SIZE + at, what, words)
        for kind, count in zip(*np.unique(kinds[wrong[KEPT_MAX:]], return_counts=True), strict=True):
            findings.count(_UNIT_KINDS[kind][0], int(count))
    at, count = find_nonzero(file, end, min(size, file_size)) if scope.is_at_rest else (0, 0)
    if count:
        text = f"{count} bytes behind the last unit, {mark.max_offset - 1}, are not zero"
        findings.add(name, at, "behind-last-unit", text)


def recover_queues(
    disk: Disk, directory: Path, held: QueuesMark | None, file_size: int, scope: RecoveryScope, queues_max: int
) -> OutputRecovery[QueuesMark]:
    """What is left of ``held``, if reading the log goes on at ``scope.phy_offset``. Reads only; raises DiskError.

    The marks that are kept are in the order of those that were given. Queues that have lost nothing pass over what
    they have when the log is read again for others.
    """
    # There may be room now for queues that were left out.
    has_room = held is None or (held.limit is not None and (scope.is_forced or queues_max > held.limit))
    limit = None if held is None or has_room else held.limit
    held, is_anew = held or QueuesMark(file_size), has_room
    found, kept, reasons = queue_folders(disk, directory), list[QueueMark](), list[str]()
    cut: list[tuple[Path, int, int]] = []
    marks = held.queues
    if marks and scope.believed < scope.log_begin:
        reasons.append(f"the log begins at {scope.log_begin}, behind all that the queues hold: they begin anew")
        marks = ()
    for mark in marks:
        folder = queue_directory(directory, mark.topic, mark.queue_id)
        reason = _fault(disk, directory, mark, found.get(folder, {}), held.file_size, is_unclean=scope.is_unclean)
        if reason is not None:
            reasons.append(f"ConsumeQueue {mark.topic}/{mark.queue_id}: {reason}")
            is_anew |= mark.max_phy_offset > scope.log_begin  # else all of it has expired
        elif (left := _before(disk, directory, mark, held.file_size, scope)) is not None:
            kept.append(left)
            cut += _cut(folder, left, mark, held.file_size, scope)
    if (more := len(reasons) - _REASONS_MAX) > 0:
        reasons[_REASONS_MAX:] = [f"{more} more queues that are not whole"]
    refill_from = scope.log_begin if is_anew else max(scope.believed, scope.log_begin)
    # What no mark names: files, then folders, each after what is in it.
    named = {queue_directory(directory, mark.topic, mark.queue_id) for mark in kept}
    queues = [folder for folder in found if folder not in named]
    topics = {folder.parent for folder in queues} - {folder.parent for folder in named}
    return OutputRecovery(
        QueuesMark(file_size, tuple(kept), limit),
        refill_from if refill_from < scope.phy_offset else None,
        tuple(unnamed_files(directory, file_size, kept, found)),
        (*queues, *sorted(topics)),
        tuple(cut),
        tuple(reasons),
    )


def kept_queues(disk: Disk, directory: Path, held: QueuesMark, scope: RecoveryScope) -> tuple[QueuesMark, bool]:
    """What ``held`` has of messages before ``scope.believed``, and whether all files for that are there."""
    recovery = recover_queues(disk, directory, held, held.file_size, scope, 0)
    return held._replace(queues=recovery.held.queues), recovery.refill_from is None


def _fault(
    disk: Disk, root: Path, mark: QueueMark, sizes: dict[int, int], file_size: int, *, is_unclean: bool
) -> str | None:
    # Why the queue is not what its mark says; ``sizes``: bytes of its files, by the file's name.
    first, end, units = mark.first_offset, mark.max_offset, file_size // UNIT_SIZE
    is_possible = 0 <= first <= mark.min_offset <= end and first % units == 0
    if not is_possible or (first == end and mark.begin_offset >= first):
        return "its mark contradicts itself"
    for begin in range(first, end, units):
        name, size = file_name(begin * UNIT_SIZE), sizes.get(begin * UNIT_SIZE)
        if size is None:
            return f"file {name} is missing"
        if size != file_size:
            return f"file {name} has {size} bytes, not {file_size}"
    if is_unclean and end > first:
        with ConsumeQueueReader.of_mark(disk, root, mark, file_size) as reader:
            last = reader.unit(end - 1)
        if last.phy_offset + last.size != mark.max_phy_offset or last.is_blank:
            return f"unit {end - 1} is not the one that was written"
    return None


def _before(disk: Disk, root: Path, mark: QueueMark, file_size: int, scope: RecoveryScope) -> QueueMark | None:
    # The queue with the units of what is believed; None if there never was a message among them.
    if mark.max_phy_offset <= scope.believed:
        return mark
    first = mark.first_offset
    with ConsumeQueueReader.of_mark(disk, root, mark._replace(min_offset=first), file_size) as reader:
        # They rise, but for blank ones, which come first and say 0.
        reader.correct_min_offset(scope.believed)
        end = reader.min_offset
        last = reader.unit(end - 1) if end > first else None
    if last is None:
        # Where messages that have expired stood before, what comes next goes on behind them.
        expired = mark._replace(min_offset=first, max_offset=first, max_phy_offset=scope.log_begin, moved_from=-1)
        return expired if mark.begin_offset < first else None
    if last.is_blank or not last.is_valid:
        return None
    end_phy_offset = last.phy_offset + last.size
    return mark._replace(
        min_offset=min(mark.min_offset, end),
        max_offset=end,
        max_phy_offset=end_phy_offset,
        moved_from=mark.moved_from if mark.moved_from < end_phy_offset else -1,
    )


def _cut(
    folder: Path, kept: QueueMark, mark: QueueMark, file_size: int, scope: RecoveryScope
) -> list[tuple[Path, int, int]]:
    # Also where nothing is taken back: a drain that was broken off may have left units behind it.
    begin = (kept.max_offset - 1) * UNIT_SIZE // file_size * file_size
    size = kept.max_offset * UNIT_SIZE - begin
    if kept.max_offset <= kept.first_offset or size >= file_size:
        return []
    is_changed = scope.is_unclean or kept.max_offset < mark.max_offset
    return [(folder / file_name(begin), size, file_size)] if is_changed else []
