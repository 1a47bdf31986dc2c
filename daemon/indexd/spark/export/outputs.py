"""The files of an export's target, whose names are below it: what a target needs of them, and those of a file system.

What is written is durable when the call returns. A task's file has a name that it is written under and one that it will
be read under: on a file system ``move`` turns one into the other, behind a URI they are the same.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa

from indexd.errors import DiskError, UnsafeStoreError
from indexd.storage.disk import DiskFile, OutputDisk
from indexd.storage.lock import DirectoryLock

if TYPE_CHECKING:
    from indexd.storage.disk import Buffer

TEMPORARY = "_temporary"
# A file of few rows comes in a hundred pieces of some bytes.
_BUFFER_SIZE = 256 << 10
_LOCK = f"{TEMPORARY}/lock"


class Output(Protocol):
    """A file that a task writes through ``sink``; ``name`` is the one under which it will be read."""

    name: str
    sink: pa.NativeFile

    def finish(self) -> int:
        """Make it whole and durable; its size in bytes."""

    def discard(self) -> None:
        """Close what is not whole; never raises."""


class TargetFiles(Protocol):
    """What a target needs; LocalFiles and RemoteFiles have it. All of it raises DiskError."""

    #: Files that a task may have open at a time.
    open_max: int

    def written_name(self, job: str, name: str) -> str:
        """Where a task writes what will be ``name``."""

    def create(self, job: str, name: str) -> Output:
        """In a task: begin a file."""

    def below(self, directory: str) -> Iterator[str]:
        """Every file at any depth; none where there is no such directory."""

    def leads_out(self, name: str) -> bool:
        """Whether a symbolic link makes what has that name stand outside of the target."""

    def size(self, name: str) -> int | None:
        """Bytes, or None where there is no such file."""

    def read(self, name: str) -> bytes | None:
        """The whole of a small file, or None."""

    def write(self, name: str, data: bytes) -> None:
        """Replace a small file at once; its directory is made."""

    def move(self, moves: Mapping[str, str]) -> None:
        """Give files the names under which they are read."""

    def remove(self, names: Collection[str]) -> None:
        """Remove those that are there, and directories that become empty."""

    def drop(self, job: str, kept: Collection[str]) -> None:
        """Remove what the tasks of a job wrote but those ``kept``, and its journal."""

    def locked(self) -> AbstractContextManager[None]:
        """Hold the target alone, where a file system can tell."""


class LocalFiles:
    """A directory of this machine, or one that all machines of a cluster see."""

    open_max = 128

    def __init__(self, root: Path) -> None:
        self._root = root
        self._disk = OutputDisk()

    def written_name(self, job: str, name: str) -> str:
        # Not *.parquet: some readers look below names that begin with "_".
        return f"{TEMPORARY}/{job}/{name.rpartition('/')[2]}.tmp"

    def create(self, job: str, name: str) -> Output:
        path = self._root / self.written_name(job, name)
        if not self._disk.exists(path.parent):
            raise UnsafeStoreError(
                f"{path.parent}, which the driver made, is not there",
                "workers and driver have to see one file system: give a shared directory or a URI as --to",
            )
        return _LocalOutput(name, self._disk.open_write(path, create=True))

    def below(self, directory: str) -> Iterator[str]:
        path = self._root / directory
        if not self._disk.exists(path):
            return
        prefix = directory and f"{directory}/"
        yield from (prefix + name for name, _ in self._disk.list_dir(path))
        for name in self._disk.list_dirs(path):
            yield from self.below(prefix + name)

    def leads_out(self, name: str) -> bool:
        return is_led_out(self._root, name)

    def size(self, name: str) -> int | None:
        try:
            return self._disk.stamp(self._root / name).size
        except DiskError as error:
            if not error.is_missing:
                raise
            return None

    def read(self, name: str) -> bytes | None:
        return self._disk.read(self._root / name) if self._disk.exists(self._root / name) else None

    def write(self, name: str, data: bytes) -> None:
        path = self._root / name
        self._disk.make_dir(path.parent)
        self._disk.write_atomically(path, data)

    def move(self, moves: Mapping[str, str]) -> None:
        directories = set()
        for written, name in moves.items():
            path = self._root / name
            if path.parent not in directories:
                self._disk.make_dir(path.parent, durable=False)
                directories.add(path.parent)
            self._disk.rename(self._root / written, path)
        # Once each, and upwards: the names of new directories have to last, too.
        above = {parent for path in directories for parent in path.parents if parent.is_relative_to(self._root)}
        for path in sorted(directories | above, reverse=True):
            self._disk.sync_dir(path)

    def remove(self, names: Collection[str]) -> None:
        for name in names:
            self._disk.unlink(self._root / name)
        for directory in sorted({parent for name in names for parent in Path(name).parents}, reverse=True):
            self._remove_empty(self._root / directory)

    def drop(self, job: str, kept: Collection[str]) -> None:
        self.remove([name for name in self.below(f"{TEMPORARY}/{job}") if name not in kept])
        self._remove_empty(self._root / TEMPORARY / job)

    @contextmanager
    def locked(self) -> Iterator[None]:
        existed = self._disk.exists(self._root)
        lock = DirectoryLock(self._root / _LOCK)
        while True:
            self._disk.make_dir(self._root / TEMPORARY, durable=False)
            lock.acquire()
            if lock.is_held():
                break
            lock.release()  # whoever held it before has just removed the file
        try:
            yield
        finally:
            self._disk.unlink(self._root / _LOCK)
            self._remove_empty(self._root / TEMPORARY)
            if not existed:
                self._remove_empty(self._root)
            lock.release()

    def _remove_empty(self, path: Path) -> None:
        try:
            if path != self._root or not any(path.iterdir()):
                self._disk.remove_dir(path)
        except DiskError as error:
            if not error.is_missing and error.errno != errno.ENOTEMPTY:
                raise


def is_led_out(root: Path, name: str) -> bool:
    """Whether the directory of ``root / name``, or what is a directory there itself, is not below ``root``."""
    path = root / name
    return not (path if path.is_dir() else path.parent).resolve().is_relative_to(root.resolve())


class _LocalOutput:
    def __init__(self, name: str, file: DiskFile) -> None:
        self.name = name
        self._file = file
        self._raw = _Sink(file)
        self.sink = pa.BufferedOutputStream(pa.PythonFile(self._raw, mode="w"), _BUFFER_SIZE)

    def finish(self) -> int:
        self.sink.close()
        self._file.fsync()
        size = self._file.size()
        self._file.close()
        return size

    def discard(self) -> None:
        # The stream writes what it has kept back when it is let go of.
        self._raw.is_discarded = True
        self._file.close()


class _Sink:
    """What pyarrow writes to: a DiskFile, from its beginning to its end."""

    closed = False
    is_discarded = False

    def __init__(self, file: DiskFile) -> None:
        self._file = file
        self._position = 0

    def write(self, data: Buffer) -> int:
        with memoryview(data) as view:
            if not self.is_discarded:
                self._file.pwrite(view, self._position)
            self._position += view.nbytes
            return view.nbytes

    def tell(self) -> int:
        return self._position

    def flush(self) -> None:
        """Nothing is kept back."""

    def close(self) -> None:
        self.closed = True
