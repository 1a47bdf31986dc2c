"""QueueFiles: the files of all queues, written in order, each opened for as long as a write takes.

Thousands of queues have no descriptor each: a file is opened, written and closed, but for the few that were written
last. A file is made with its whole size and lies on the disk only where it was written; so a disk that is full shows
at a write, as a DiskError, and what was written before it stays.
"""

from __future__ import annotations

import errno
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING

from indexd.consumequeue.format import UNIT_SIZE, file_name
from indexd.errors import DiskError
from indexd.output import Unsynced
from indexd.storage.disk import Disk, DiskFile

if TYPE_CHECKING:
    from indexd.storage.disk import Buffer

# Enough for a broker with a few topics; beyond it a write costs an open and a close.
_OPEN_MAX = 64


class QueueFiles:
    """Writes below ``root``, noting in ``unsynced`` what was changed.

    Raises DiskError; after one the same write may be tried again. One owner, no locks.
    """

    def __init__(self, disk: Disk, root: Path, file_size: int, unsynced: Unsynced) -> None:
        self._disk = disk
        self._root = root
        self._file_size = file_size
        self._unsynced = unsynced
        self._open: OrderedDict[Path, DiskFile] = OrderedDict()
        #: The file of each queue directory that was written last, so that a path is made once a file.
        self._paths: dict[Path, tuple[int, Path]] = {}
        self._has_root = False

    def __repr__(self) -> str:
        return f"QueueFiles({self._root}, open={len(self._open)}, {self._unsynced})"

    def write(self, directory: Path, offset: int, units: Buffer) -> None:
        """Write whole units, all of one file, at unit ``offset`` of the queue; a file that begins there is made."""
        position = offset * UNIT_SIZE % self._file_size
        path = self.path(directory, offset)
        file = self._create(path) if position == 0 else self._opened(path)
        file.pwrite(units, position)
        self._unsynced.add(path)

    def path(self, directory: Path, offset: int) -> Path:
        """The file that holds unit ``offset`` of the queue in ``directory``."""
        begin = offset * UNIT_SIZE // self._file_size * self._file_size
        known = self._paths.get(directory)
        if known is None or known[0] != begin:
            known = self._paths[directory] = (begin, directory / file_name(begin))
        return known[1]

    def expire(self, path: Path) -> None:
        """Nobody writes this file any more."""
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
        self._unsynced.add_directory(path.parent)
        return self._keep(path, file)

    def _make_directory(self, directory: Path) -> None:
        if not self._has_root:
            self._disk.make_dir(self._root)
            self._has_root = True
        # Thousands of queues may appear at once: their directories are synced by the next flush, together. That goes
        # for those that are there already, too: whoever made them may have died before.
        self._disk.make_dir(directory, durable=False)
        self._unsynced.add_directory(directory.parent)
        self._unsynced.add_directory(self._root)

    def _keep(self, path: Path, file: DiskFile) -> DiskFile:
        self._open[path] = file
        if len(self._open) > _OPEN_MAX:
            self._open.popitem(last=False)[1].close()
        return file
