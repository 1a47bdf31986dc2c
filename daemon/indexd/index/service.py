"""IndexService: the list of index files, and buildIndex over batches (spec rocketmq-store 4).

Files are in creation order; all but the last are full and never change again. Names only grow, whatever the clock does.
The service knows no checkpoint: ``mark`` says what stands now, the flusher makes that durable and writes it down.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from indexd.commitlog.dispatch import DispatchBatch
from indexd.errors import DiskError
from indexd.index.file import IndexFile, Put
from indexd.index.flavour import Flavour
from indexd.index.format import FileMark, IndexLayout
from indexd.storage.disk import Disk
from indexd.storage.names import next_index_name


@dataclass(frozen=True, slots=True)
class IndexMark:
    """All files at one moment, oldest first; those whose bytes may not be durable; names that can go after this."""

    files: tuple[FileMark, ...]
    unsynced: tuple[IndexFile, ...]
    expired: tuple[str, ...] = ()


@dataclass(slots=True)
class IndexCounters:
    """Plain numbers that only grow."""

    messages: int = 0
    entries: int = 0
    rolls: int = 0
    expired_files: int = 0


class IndexService:
    """Builds into ``directory``; new files are named by ``names``, else by ``clock``. Raises DiskError; no locks."""

    def __init__(
        self,
        disk: Disk,
        directory: Path,
        layout: IndexLayout,
        flavour: Flavour,
        clock: Callable[[], float] = time.time,
        names: Iterator[str] | None = None,
    ) -> None:
        self._disk = disk
        self._directory = directory
        self.layout = layout
        self.flavour = flavour
        self._clock = clock
        self._names = names
        self._full: list[FileMark] = []
        self._open: IndexFile | None = None
        self._unsynced: list[IndexFile] = []
        self._last_name: str | None = None
        self._expired: list[str] = []
        # How far a batch has come: the disk may refuse at any point.
        self._interrupted: tuple[DispatchBatch, int, int] | None = None
        self.counters = IndexCounters()

    def __repr__(self) -> str:
        return f"IndexService({len(self._full)} full, open={self._open}, {self.counters})"

    def load(self, files: tuple[FileMark, ...]) -> None:
        """Take over files that are known to be as the marks say: after a clean stop, or after recovery."""
        for mark in files:
            self._last_name = mark.name
            if mark.full:
                self._full.append(mark)
            else:
                self._open = IndexFile.load(self._disk, self._directory / mark.name, self.layout, mark)

    def adopt(self, mark: FileMark) -> None:
        """What is now known of a full file, as somebody has read it; nothing if it is gone meanwhile."""
        self._full = [mark if known.full and known == mark else known for known in self._full]

    def build_index(self, batch: DispatchBatch) -> None:
        """Index a batch: RocketMQ's buildIndex for each row, in order (spec 4.2).

        After a DiskError the same batch may be given again: it goes on where it stopped.
        """
        row, key = self._first_row(batch)
        while row < batch.rows:
            if self._open is None:
                self._open = self._create_file()
            file = self._open
            count = file.header.index_count
            put, row, key = file.put_batch(batch, self.flavour, row, key)
            self.counters.entries += file.header.index_count - count
            # Up to here it is in the file's buffer, whatever the disk says next.
            self._interrupted = (batch, row, key)
            if put is Put.FULL:
                self._roll(file)
            elif put is Put.BUFFER_FULL:
                file.write_entries()
        self._interrupted = None
        self.counters.messages += batch.rows

    def publish(self) -> None:
        """Let every reader see what has been built: once a drain, for a batch touches slots all over the file."""
        if self._open is not None:
            self._open.publish()

    def mark(self) -> IndexMark:
        """What stands now, published; ``unsynced`` is what a flusher has to sync for it."""
        self.publish()
        files = list(self._full)
        if self._open is not None:
            files.append(self._open.mark(full=False))
        return IndexMark(tuple(files), self.writing(), tuple(self._expired))

    def rolled(self) -> tuple[IndexFile, ...]:
        """Full files that are not known to be durable yet."""
        return tuple(self._unsynced)

    def writing(self) -> tuple[IndexFile, ...]:
        """The files whose bytes are not known to be durable: rolled ones and the open one."""
        return (*self._unsynced, *((self._open,) if self._open is not None else ()))

    @property
    def file_count(self) -> int:
        """How many files there are."""
        return len(self._full) + (self._open is not None)

    def synced(self, files: tuple[IndexFile, ...]) -> None:
        """The flusher has made these durable: full ones among them are closed and forgotten."""
        for file in files:
            if file in self._unsynced:
                self._unsynced.remove(file)
                file.close()

    def flush(self) -> None:
        """Make the open file durable with its header as in memory: what a clean stop leaves (spec 3.8)."""
        if self._open is not None:
            self._open.flush()

    def delete_expired_file(self, min_phy_offset: int) -> list[str]:
        """Leave out full files that end before the log begins, oldest first, and say their names (spec 4.6).

        RocketMQ never removes the last file of its list; neither does this. The files themselves go with
        ``remove_expired``, once a frontier without them is durable.
        """
        names = []
        while self._full and self._full[0].header.end_phy_offset < min_phy_offset:
            if len(self._full) == 1 and self._open is None:
                break
            names.append(self._full.pop(0).name)
        self._expired += names
        self.counters.expired_files += len(names)
        return names

    def remove_expired(self, names: tuple[str, ...]) -> None:
        """Remove files that no durable frontier names any more."""
        for name in names:
            if name in self._expired:
                self._disk.unlink(self._directory / name)
                self._expired.remove(name)

    def close(self) -> None:
        """Close what is open; writes nothing."""
        for file in (*self._unsynced, *([self._open] if self._open else [])):
            file.close()
        self._unsynced.clear()
        self._open = None

    def destroy(self) -> None:
        """Remove every file of the service."""
        self.close()
        for name, _ in self._disk.list_dir(self._directory):
            if any(mark.name == name for mark in self._full) or name == self._last_name:
                self._disk.unlink(self._directory / name)
        self._full.clear()
        self._last_name = None

    def _first_row(self, batch: DispatchBatch) -> tuple[int, int]:
        if self._interrupted is not None and self._interrupted[0] is batch:
            return self._interrupted[1:]
        return 0, -1

    def _create_file(self) -> IndexFile:
        previous = self._full[-1].header if self._full else None
        name = next(self._names) if self._names is not None else next_index_name(self._clock(), self._last_name)
        file = IndexFile.create(self._disk, self._directory / name, self.layout, previous)
        self._last_name = name
        try:
            self._disk.sync_dir(self._directory)
        except DiskError:
            file.destroy(self._disk)
            raise
        return file

    def _roll(self, file: IndexFile) -> None:
        file.publish()
        mark = file.mark(full=True)
        self._full.append(mark)
        self._unsynced.append(file)
        file.release_memory()
        self._open = None
        self.counters.rolls += 1
