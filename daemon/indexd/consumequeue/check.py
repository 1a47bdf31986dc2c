"""Checks ConsumeQueues against what the frontier says of them: marks, files, every unit, nothing else there.

Reads only, by pread, a window at a time; never the log.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from indexd.commitlog.format import FRAME_SIZE_MIN
from indexd.consumequeue.format import (
    UNIT_SIZE,
    QueueMark,
    QueuesMark,
    file_name,
    queue_directory,
    queue_folders,
    unnamed_files,
)
from indexd.consumequeue.kernel import END, FOUND, check_units
from indexd.errors import DiskError
from indexd.findings import Findings
from indexd.output import LogBounds, find_nonzero
from indexd.storage.disk import Disk, DiskFile

#: A unit as it lies in a file.
UNIT_TYPE = np.dtype([("phy_offset", ">i8"), ("size", ">i4"), ("tags_code", ">i8")])

_UNITS_PER_READ = 1 << 16
_FOUND_MAX = 1000
# What the kernel's codes are called, and where in the unit the number stands that is wrong.
UNIT_KINDS = (
    ("unit-phy-offset", 0, "the phy offset {value} is negative"),
    ("unit-order", 0, "the phy offset {value} lies before the end of the message before it, {least}"),
    ("unit-size", 8, "the size {value} is not more than 0"),
    ("unit-blank", 0, "a blank unit stands where a message's should"),
)


def check_queues(
    disk: Disk,
    directory: Path,
    file_size: int,
    marks: Sequence[QueueMark],
    *,
    is_at_rest: bool,
    is_owned: bool,
    on_bytes: Callable[[int], None],
) -> Findings:
    """Everything that does not hold; ``on_bytes`` is told how many bytes of units more have been looked at.

    ``is_at_rest``: no daemon runs and the last one stopped cleanly, so zeros stand behind the last unit of each queue.
    ``is_owned``: a daemon runs or died, so there may be files that ``marks`` do not name yet.
    """
    findings, name = Findings(), "consumequeue"
    for mark in marks:
        _Queue(disk, directory, file_size, mark, name, findings).check(on_bytes, is_at_rest=is_at_rest)
    if not is_owned:
        for path in unnamed_files(directory, file_size, marks, queue_folders(disk, directory)):
            text = "the frontier does not name it, and no daemon runs"
            findings.add(f"{name}/{path.relative_to(directory)}", 0, "file-unnamed", text)
    return findings


class _Queue:
    # One queue and its files, oldest first.

    def __init__(self, disk: Disk, root: Path, file_size: int, mark: QueueMark, name: str, findings: Findings) -> None:
        self._disk, self._file_size, self._mark = disk, file_size, mark
        self._folder = queue_directory(root, mark.topic, mark.queue_id)
        self._name = f"{name}/{mark.topic}/{mark.queue_id}"
        self._findings = findings
        self._state = np.zeros(3, dtype=np.int64)
        self._counts = np.zeros(len(UNIT_KINDS), dtype=np.int64)
        self._found = np.empty((_FOUND_MAX, 4), dtype=np.int64)

    def check(self, on_bytes: Callable[[int], None], *, is_at_rest: bool) -> None:
        """Add to the findings what does not hold."""
        mark, units, before = self._mark, self._file_size // UNIT_SIZE, len(self._findings)
        if mark.first_offset % units or not 0 <= mark.first_offset <= mark.min_offset <= mark.max_offset:
            self._findings.add(self._name, 0, "queue-mark", f"units {mark[2:5]} of the frontier contradict each other")
            return
        for first in range(mark.first_offset, mark.max_offset, units):
            self._check_file(first, min(units, mark.max_offset - first), on_bytes, is_at_rest=is_at_rest)
        self._put_into_words()
        end = int(self._state[END])
        if mark.max_offset > mark.first_offset and len(self._findings) == before and end != mark.max_phy_offset:
            text = f"the newest message ends at {end}, not at {mark.max_phy_offset} as the frontier says"
            self._findings.add(self._name, 0, "queue-end", text)

    def _check_file(self, first: int, count: int, on_bytes: Callable[[int], None], *, is_at_rest: bool) -> None:
        name = f"{self._name}/{file_name(first * UNIT_SIZE)}"
        try:
            with self._disk.open_read(self._folder / file_name(first * UNIT_SIZE)) as file:
                size = file.size()
                # Recovery that was broken off between cutting the last file and giving it its size again mends it.
                is_cut = not is_at_rest and first + count == self._mark.max_offset and size >= count * UNIT_SIZE
                if size > self._file_size or (size < self._file_size and not is_cut):
                    text = f"{size} bytes, not {self._file_size}"
                    self._findings.add(name, min(size, self._file_size), "file-size", text)
                for index in range(0, count, _UNITS_PER_READ):
                    data = file.pread(min(count - index, _UNITS_PER_READ) * UNIT_SIZE, index * UNIT_SIZE)
                    self._check_units(data, first + index)
                    on_bytes(len(data))
                if is_at_rest:
                    self._check_rest(file, name, count * UNIT_SIZE)
        except DiskError as error:
            if not error.is_missing:
                raise
            self._findings.add(name, 0, "file-missing", "the frontier names it, but it is not there")

    def _check_units(self, data: bytes, offset: int) -> None:
        units = np.frombuffer(data, dtype=np.uint8)
        check_units(units, offset, self._mark.min_offset, self._state, self._counts, self._found)

    def _check_rest(self, file: DiskFile, name: str, position: int) -> None:
        first, found = find_nonzero(file, position, min(file.size(), self._file_size))
        if found:
            text = f"{found} bytes behind the last unit, {self._mark.max_offset - 1}, are not zero"
            self._findings.add(name, first, "behind-last-unit", text)

    def _put_into_words(self) -> None:
        for offset, code, value, least in self._found[: int(self._state[FOUND])].tolist():
            what, at, text = UNIT_KINDS[code]
            begin = offset * UNIT_SIZE // self._file_size * self._file_size
            words = f"unit {offset}: {text.format(value=value, least=least)}"
            position = offset * UNIT_SIZE - begin + at
            self._findings.add(f"{self._name}/{file_name(begin)}", position, what, words)
            self._counts[code] -= 1
        for (what, _, _), left in zip(UNIT_KINDS, self._counts.tolist(), strict=True):
            self._findings.count(what, left)


def sound_marks(held: QueuesMark, bounds: LogBounds | None = None) -> tuple[QueueMark, ...]:
    """The queues whose marks can be: only of those are there files to be looked at."""
    if not _is_file_size(held.file_size):
        return ()
    return tuple({mark[:2]: mark for mark in held.queues if _can_be(mark, held.file_size, bounds)}.values())


def check_queue_marks(held: QueuesMark, bounds: LogBounds) -> list[str]:
    """What no builder writes: numbers that contradict each other, more messages than the log can have had."""
    found = [] if _is_file_size(held.file_size) else [f"queue files of {held.file_size} bytes"]
    found += [
        f"queue {mark.topic}/{mark.queue_id}: {mark[2:]} is nothing that a queue can be"
        for mark in held.queues
        if not _can_be(mark, held.file_size, bounds)
    ]
    if len({mark[:2] for mark in held.queues}) < len(held.queues):
        found.append("a queue is named twice")
    return found


def _is_file_size(size: int) -> bool:
    return 0 < size < 1 << 31 and size % UNIT_SIZE == 0


def _can_be(mark: QueueMark, file_size: int, bounds: LogBounds | None) -> bool:
    # Blank or expired units only in its oldest file. Where the disk refused in the middle of a drain, its units may
    # reach behind the frontier's physical offset.
    units, messages = max(file_size // UNIT_SIZE, 1), mark.max_offset - mark.min_offset
    return (
        0 <= mark.first_offset <= mark.min_offset <= mark.max_offset
        and mark.first_offset % units == 0
        and mark.min_offset - mark.first_offset <= units
        and 0 <= mark.begin_offset <= mark.max_offset
        and (bounds is None or messages * FRAME_SIZE_MIN <= bounds.phy_offset + bounds.segment_size)
    )
