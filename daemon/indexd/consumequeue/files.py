"""QueueFiles: the files of all queues, written in order, each opened for as long as a write takes.

Thousands of queues have no descriptor each: a file is opened, written and closed, but for the few that were written
last. A file is made with its whole size and lies on the disk only where it was written; so a disk that is full shows
at a write, as a DiskError, and what was written before it stays.

PendingUnits: units that are in the store and not written yet, in the order of the log until they are sorted.
"""

from __future__ import annotations

import errno
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from indexd.commitlog.batcher import DispatchBatch, make_columns
from indexd.consumequeue.format import UNIT_SIZE, file_name
from indexd.consumequeue.kernel import UNITS, group_units, put_units
from indexd.consumequeue.store import Queues
from indexd.errors import DiskError
from indexd.storage.disk import Disk, DiskFile

if TYPE_CHECKING:
    from collections.abc import Iterable

    from indexd.storage.disk import Buffer

# Enough for a broker with a few topics; beyond it a write costs an open and a close.
_OPEN_MAX = 64


class Unsynced:
    """Paths that were changed and are not known to be durable, each with the number of its last change's mark."""

    def __init__(self, paths: Iterable[Path] = ()) -> None:
        self._serials: dict[Path, int] = dict.fromkeys(paths, 0)
        self._paths: tuple[Path, ...] | None = None

    def __repr__(self) -> str:
        return f"Unsynced({len(self._serials)})"

    def add(self, path: Path, serial: int) -> None:
        """It was changed before the mark of that number was made."""
        if path not in self._serials:
            self._paths = None
        self._serials[path] = serial

    def discard(self, path: Path) -> None:
        """It is to be removed: nobody needs it."""
        if self._serials.pop(path, None) is not None:
            self._paths = None

    def synced(self, paths: Iterable[Path], serial: int) -> None:
        """What the mark of that number says of these has become durable; they may have changed since."""
        for path in paths:
            if self._serials.get(path, serial + 1) <= serial:
                del self._serials[path]
                self._paths = None

    def paths(self) -> tuple[Path, ...]:
        """All of them, in order of their first change."""
        if self._paths is None:
            self._paths = tuple(self._serials)
        return self._paths


class QueueFiles:
    """Writes below ``root``. Raises DiskError; after one the same write may be tried again. One owner, no locks."""

    def __init__(self, disk: Disk, root: Path, file_size: int) -> None:
        self._disk = disk
        self._root = root
        self._file_size = file_size
        self._open: OrderedDict[Path, DiskFile] = OrderedDict()
        #: The file of each queue directory that was written last, so that a path is made once a file.
        self._paths: dict[Path, tuple[int, Path]] = {}
        self.files = Unsynced()
        self.directories = Unsynced()
        #: Of the mark that comes next.
        self.serial = 1
        self._has_root = False

    def __repr__(self) -> str:
        return f"QueueFiles({self._root}, open={len(self._open)}, {self.files}, {self.directories})"

    def write(self, directory: Path, offset: int, units: Buffer) -> None:
        """Write whole units, all of one file, at unit ``offset`` of the queue; a file that begins there is made."""
        position = offset * UNIT_SIZE % self._file_size
        path = self.path(directory, offset)
        file = self._create(path) if position == 0 else self._opened(path)
        file.pwrite(units, position)
        self.files.add(path, self.serial)

    def path(self, directory: Path, offset: int) -> Path:
        """The file that holds unit ``offset`` of the queue in ``directory``."""
        begin = offset * UNIT_SIZE // self._file_size * self._file_size
        known = self._paths.get(directory)
        if known is None or known[0] != begin:
            known = self._paths[directory] = (begin, directory / file_name(begin))
        return known[1]

    def expire(self, path: Path) -> None:
        """Nobody writes or syncs this file any more."""
        self.files.discard(path)
        file = self._open.pop(path, None)
        if file is not None:
            file.close()

    def close(self) -> None:
        """Close what is open."""
        while self._open:
            self._open.popitem()[1].close()

    def _opened(self, path: Path) -> DiskFile:
        file = self._open.get(path)
        if file is None:
            return self._keep(path, self._open_write(path))
        self._open.move_to_end(path)
        return file

    def _open_write(self, path: Path, *, create: bool = False) -> DiskFile:
        try:
            return self._disk.open_write(path, create=create)
        except DiskError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._open:
                raise
        # Those that are kept open for speed are the ones to give back.
        self.close()
        return self._disk.open_write(path, create=create)

    def _create(self, path: Path) -> DiskFile:
        if path in self._open:
            return self._open[path]  # made before, and then its first units were refused
        self._make_directory(path.parent)
        try:
            file = self._open_write(path, create=True)
        except DiskError:
            if not self._disk.exists(path):
                raise
            # Left of an attempt that failed: it holds nothing.
            file = self._open_write(path)
        try:
            file.truncate(0)
            file.truncate(self._file_size)
        except DiskError:
            file.close()
            raise
        self.directories.add(path.parent, self.serial)
        return self._keep(path, file)

    def _make_directory(self, directory: Path) -> None:
        if not self._has_root:
            self._disk.make_dir(self._root)
            self._has_root = True
        # Thousands of queues may appear at once: their directories are synced by the next flush, together. That goes
        # for those that are there already, too: whoever made them may have died before.
        self._disk.make_dir(directory, durable=False)
        self.directories.add(directory.parent, self.serial)
        self.directories.add(self._root, self.serial)

    def _keep(self, path: Path, file: DiskFile) -> DiskFile:
        self._open[path] = file
        if len(self._open) > _OPEN_MAX:
            self._open.popitem(last=False)[1].close()
        return file


# Units that are collected before they are written: 1.25 MiB, or more if there are many queues, so that an open and a
# write are worth it. The memory of the longest buffers is the system's until it is used.
UNITS_PER_WRITE = 1 << 16
_UNITS_A_QUEUE = 128
_UNITS_MAX = 1 << 20


class PendingUnits:
    """What the kernel collects, and the same sorted by queue: ``grouped``, (n, 5) uint32, the bytes of the files."""

    def __init__(self) -> None:
        self._units = np.empty((_UNITS_MAX, 5), dtype=np.uint32)
        self._slots = np.empty(_UNITS_MAX, dtype=np.int32)
        self._touched = np.empty(_UNITS_MAX, dtype=np.int32)
        self._lengths = np.empty(_UNITS_MAX, dtype=np.int64)
        self._used = np.zeros(2, dtype=np.int64)
        self.grouped = np.empty((_UNITS_MAX, 5), dtype=np.uint32)
        #: See the kernel; they only grow.
        self.counts = np.zeros(6, dtype=np.int64)

    def __repr__(self) -> str:
        return f"PendingUnits({self._used[0]} of {self._used[1]} queues, {self.counts[UNITS]} so far)"

    def clear(self) -> None:
        """Forget what is there."""
        self._used[:] = 0

    def put(self, batch: DispatchBatch, row: int, queues: Queues, numbers: NDArray[np.int32]) -> tuple[int, int]:
        """Take rows from ``row`` on; why it stopped (DONE, NEW_QUEUE, BUFFER_FULL), and at which row.

        ``numbers`` are ``queues.numbers`` of the batch.
        """
        status, next_row = put_units(
            batch.columns,
            batch.rows,
            row,
            numbers,
            queues.table_keys,
            queues.table_slots,
            queues.is_closed,
            queues.state,
            self._units[: max(UNITS_PER_WRITE, min(_UNITS_A_QUEUE * len(queues), _UNITS_MAX))],
            self._slots,
            self._used,
            self._touched,
            self.counts,
        )
        return int(status), int(next_row)

    def group(self, queues: Queues) -> list[tuple[int, int, int]]:
        """Sort what is there into ``grouped``; each queue's slot, first and last row, the one that came first last."""
        touched = self._touched[: self._used[1]].tolist()
        group_units(self._units, self._slots, self._used, self._touched, queues.state, self.grouped, self._lengths)
        ends = np.cumsum(self._lengths[: len(touched)]).tolist()
        return list(zip(touched, [0, *ends], ends, strict=False))[::-1]


def load_kernels() -> None:
    """Have putMessagePositionInfo compiled, or loaded from where it is kept."""
    queues = Queues(Path(), 1, 1)
    queues.begin("T", 0, 0, 0)
    units, slots = np.empty((1, 5), dtype=np.uint32), np.empty(1, dtype=np.int32)
    used, counts = np.zeros(2, dtype=np.int64), np.zeros(6, dtype=np.int64)
    keys, table, state = queues.table_keys, queues.table_slots, queues.state
    put_units(make_columns(1, 1), 0, 0, slots, keys, table, False, state, units, slots, used, slots, counts)
    group_units(units, slots, used, slots, state, units, counts)
