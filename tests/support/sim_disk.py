"""SimDisk: the twin of ``indexd.storage.disk`` that keeps a tree in memory and forgets, tears and fails as told.

Paths under ``root`` are simulated, all others are the real disk's. Each call is counted, can be failed by a Fault
and can be preceded by a crash; ``crash`` leaves what a loss of power may leave, ``kill`` what the death of the process
leaves: all of it, but every handle is dead.
"""

from __future__ import annotations

import errno
import os
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from copy import copy, deepcopy
from dataclasses import dataclass
from itertools import count
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar, cast
from weakref import WeakSet

from indexd.errors import DiskError
from indexd.storage.disk import Disk, DiskFile, Stamp
from support.sim_inode import Change, Pair, SimDirectory, SimInode

if TYPE_CHECKING:
    from typing_extensions import Buffer


#: The calls of Disk and DiskFile. ``create`` is open_write(create=True) and the temporary file of write_atomically.
OPERATIONS = (
    *("open_read", "open_write", "create", "exists", "list_dir", "stamps"),
    *("size", "stamp", "pread", "pwrite", "allocate", "truncate", "fsync"),
    *("rename", "link", "exchange", "unlink", "remove_dir", "make_dir", "sync_dir"),
)
# What the real disk calls its operations where an error names them.
WORDS = {
    "open_read": "open", "open_write": "open", "exists": "stat", "size": "stat", "stamp": "stat",
    "list_dir": "list", "stamps": "list", "pread": "read", "pwrite": "write", "allocate": "allocate space for",
    "unlink": "remove", "remove_dir": "remove", "make_dir": "make directory", "sync_dir": "fsync directory",
}  # fmt: skip
#: Those that leave another disk behind; a crash between two others is a crash before the later one.
CHANGES = frozenset(
    {
        *("create", "pwrite", "allocate", "truncate", "fsync", "rename", "link", "exchange"),
        *("unlink", "remove_dir", "make_dir", "sync_dir"),
    }
)


class SimCrash(BaseException):
    """The machine lost its power. No Exception, so that nothing in between takes it for an error to be handled."""


@dataclass(slots=True)
class Fault:
    """One of OPERATIONS ("*": any) that fails: the ``nth`` call whose path ``glob`` matches from the right, 0 for all.

    ``error`` is an errno by name; "short", of a pwrite: a part is written, then the disk is full; "crash": the machine
    loses its power before the call.
    """

    operation: str
    error: str
    glob: str = "*"
    nth: int = 1
    seen: int = 0

    def meets(self, operation: str, path: PurePath) -> bool:
        """Count a call that fits; True when it is the one that fails."""
        if self.operation not in ("*", operation) or not (self.glob == "*" or path.match(self.glob)):
            return False
        self.seen += 1
        return self.nth in (0, self.seen)


def stamp_of(inode: SimInode) -> Stamp:
    """The stamp of a simulated file."""
    return Stamp(inode.size, inode.mtime_ns, inode.number)


class SimFile(DiskFile):
    """Reads and writes the inode that was opened, whatever has become of its name."""

    def __init__(self, disk: SimDisk, path: Path, inode: SimInode, *, is_writable: bool) -> None:
        super().__init__(path, -1, disk)
        self._sim = disk
        self._inode = inode
        self._is_writable = is_writable
        self._is_open = True
        self._life = disk.lives
        disk.handles.add(self)

    def size(self) -> int:
        self._meet("size")
        return self._inode.size

    def stamp(self) -> Stamp:
        self._meet("stamp")
        return stamp_of(self._inode)

    def pread(self, size: int, position: int) -> bytes:
        self._meet("pread")
        return self._inode.read(size, position)

    def pread_into(self, buffer: Buffer, position: int) -> int:
        self._meet("pread")
        with memoryview(buffer) as raw, raw.cast("B") as view:
            data = self._inode.read(len(view), position)
            view[: len(data)] = data
        return len(data)

    def next_data(self, position: int) -> int:
        self._meet("size")
        return position  # no hole is known here, as on a file system that does not tell

    def pwrite(self, data: Buffer, position: int) -> None:
        fault = self._meet("pwrite", is_write=True)
        with memoryview(data) as raw, raw.cast("B") as view:
            size = self._sim.rand.randrange(len(view) + 1) if fault == "short" else len(view)
            self._inode.write(view[:size], position)
        self._inode.touch(next(self._sim.ticks))
        if fault == "short":
            # The real DiskFile writes on, and is told then that there is no room.
            raise self._sim.error("pwrite", self.path, errno.ENOSPC)

    def allocate(self, size: int) -> None:
        self._meet("allocate", is_write=True)
        self._inode.resize(max(size, self._inode.size))

    def truncate(self, size: int) -> None:
        self._meet("truncate", is_write=True)
        self._inode.resize(size)
        self._inode.touch(next(self._sim.ticks))

    def fsync(self) -> None:
        self._check()
        try:
            self._sim.meet("fsync", self.path)
        except Exception:
            self._inode.fail_sync(self._sim.rand)
            raise
        self._inode.sync()

    def fileno(self) -> int:
        """The descriptor of a copy: what is mapped through it is the file as it is now."""
        self._check()
        if self._fd < 0:
            self._fd = os.memfd_create(self.path.name)
            os.pwrite(self._fd, self._inode.read(self._inode.size, 0), 0)
        return self._fd

    def close(self) -> None:
        super().close()
        self._is_open = False
        self._sim.handles.discard(self)

    def _meet(self, operation: str, *, is_write: bool = False) -> str | None:
        self._check()
        fault = self._sim.meet(operation, self.path)
        if is_write and not self._is_writable:
            raise self._sim.error(operation, self.path, errno.EINVAL if operation == "truncate" else errno.EBADF)
        return fault

    def _check(self) -> None:
        if self._life != self._sim.lives:
            raise AssertionError(f"{self.path} is used through a handle of a process that died")
        if not self._is_open:
            raise self._sim.error("pread", self.path, errno.EBADF)


P = ParamSpec("P")
T = TypeVar("T")


def simulated(call: Callable[Concatenate[SimDisk, Path, P], T]) -> Callable[Concatenate[SimDisk, Path, P], T]:
    """A call of Disk on a path below ``root``; on others it is the real disk's."""

    def either(disk: SimDisk, path: Path, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if disk.holds(path):
            return call(disk, path, *args, **kwargs)
        real = getattr(Disk, call.__name__)(disk, path, *args, **kwargs)
        if call.__name__ == "open_read":
            disk._real.add(real)
        return cast(T, real)

    return either


class SimDisk(Disk):
    """``rand`` decides what a failed or interrupted call leaves; ``limit`` ends a run that does not end by itself."""

    def __init__(self, root: Path, seed: int = 0) -> None:
        self.root = root
        self._tree = SimDirectory(1)
        # As text: a simulation asks a million times, and Path's own ways are long.
        self._prefix = f"{root}/"
        self.rand = random.Random(seed)
        #: What fails, and what has failed so far; every fault counts a call that fits, the first that fails it wins.
        self.faults: list[Fault] = []
        self.injected: Counter[str] = Counter()
        #: Calls so far, of each kind and in all.
        self.counts: Counter[str] = Counter()
        self.operations = 0
        #: Calls that change the disk, so far; the one with the number ``crash_at`` (from 0) is not reached.
        self.changes = 0
        self.crash_at: int | None = None
        self.limit: int | None = None
        #: Called before each call that changes the disk.
        self.before_change: Callable[[str, Path], None] | None = None
        self.handles: set[SimFile] = set()
        self._real: WeakSet[DiskFile] = WeakSet()
        self.lives = 0
        self._is_dead = False
        self.ticks = count(2)  # inode numbers, and times of writing

    @property
    def still_open(self) -> list[DiskFile]:
        """What has been opened in this life and not been closed, files of the real disk among it."""
        return [*self.handles, *(file for file in self._real if file.fileno() >= 0)]

    def crash(self, rand: random.Random | None = None) -> None:
        """The power fails and comes back: of what was not synced something is left."""
        nodes: list[SimInode | SimDirectory] = [self._tree]
        while nodes:
            node = nodes.pop()
            node.crash(rand or self.rand)
            if isinstance(node, SimDirectory):
                nodes += [node.names[name] for name in sorted(node.names)]
        self.kill()

    def kill(self) -> None:
        """The process dies, the machine does not."""
        for file in self.still_open:
            file.close()  # nothing is left of its descriptors, real ones included
        self._real.clear()
        self.lives += 1
        self._is_dead = False
        self.crash_at = None

    def fork(self) -> SimDisk:
        """A second disk in the same state, without faults, handles or hooks."""
        twin = SimDisk(self.root)
        twin.rand.setstate(self.rand.getstate())
        twin._tree = deepcopy(self._tree)
        twin.ticks, twin.lives = copy(self.ticks), self.lives + 1
        return twin

    def holds(self, path: Path) -> bool:
        """Whether ``path`` is simulated."""
        return f"{path}/".startswith(self._prefix)

    def error(self, operation: str, path: Path, number: int, words: str | None = None) -> DiskError:
        """The error that the real call raises."""
        return DiskError(words or WORDS.get(operation, operation), path, OSError(number, os.strerror(number)))

    def _names(self, path: Path) -> list[str]:
        # From below the root to what ``path`` names.
        text = f"{path}/"
        assert text.startswith(self._prefix), path
        return text[len(self._prefix) :].split("/")[:-1]

    def _find(self, operation: str, path: Path, words: str | None = None) -> SimInode | SimDirectory | None:
        try:
            return self._tree.find(self._names(path))
        except NotADirectoryError:
            raise self.error(operation, path, errno.ENOTDIR, words) from None

    def _parent(self, operation: str, path: Path, words: str | None = None) -> SimDirectory:
        self._find(operation, path, words)  # so that an error names what was asked for
        found = self._find(operation, path.parent, words)
        if not isinstance(found, SimDirectory):
            raise self.error(operation, path, errno.ENOENT, words)
        return found

    def _directory(self, operation: str, path: Path) -> SimDirectory:
        found = self._find(operation, path)
        if not isinstance(found, SimDirectory):
            raise self.error(operation, path, errno.ENOENT if found is None else errno.ENOTDIR)
        return found

    def _files(self, operation: str, path: Path) -> list[tuple[str, SimInode]]:
        names = self._directory(operation, path).names
        return [(name, node) for name, node in names.items() if isinstance(node, SimInode)]

    # The calls of Disk.

    @simulated
    def link(self, source: Path, target: Path) -> None:
        words = f"link {source} to"
        self.meet("link", target, words)
        # The real disk opens both directories before it looks for the file: the source's, then the target's.
        try:
            here, parent = (self._parent("link", path, words) for path in (source, target))
        except DiskError as error:
            raise self.error("link", target, error.errno or 0, words) from None
        node = here.names.get(source.name)
        if node is None:
            raise self.error("link", target, errno.ENOENT, words)
        if target.name in parent.names:
            raise self.error("link", target, errno.EEXIST, words)
        if isinstance(node, SimDirectory):
            raise self.error("link", target, errno.EPERM, words)
        parent.change(Change(None, target.name, node))

    @simulated
    def exchange(self, one: Path, other: Path) -> None:
        words = f"exchange {one} with"
        self.meet("exchange", other, words)
        try:
            parents = [self._parent("exchange", path, words) for path in (one, other)]
        except DiskError as error:
            raise self.error("exchange", other, error.errno or 0, words) from None
        nodes = [parent.names.get(path.name) for parent, path in zip(parents, (one, other), strict=True)]
        if nodes[0] is None or nodes[1] is None:
            raise self.error("exchange", other, errno.ENOENT, words)
        if one in other.parents or other in one.parents:
            raise self.error("exchange", other, errno.EINVAL, words)
        pair = Pair()
        for parent, path, node in ((parents[0], one, nodes[1]), (parents[1], other, nodes[0])):
            parent.change(Change(None, path.name, node, pair))

    @simulated
    def stamp(self, path: Path) -> Stamp:
        self.meet("stamp", path)
        node = self._find("stamp", path)
        if node is None:
            raise self.error("stamp", path, errno.ENOENT)
        return stamp_of(node) if isinstance(node, SimInode) else Stamp(0, 0, node.number)

    def free(self, path: Path) -> int:
        return 1 << 50 if self.holds(path) else super().free(path)

    def give(self, path: Path, like: Path, rights: int | None = None) -> None:
        if not self.holds(path):  # owners are not simulated
            super().give(path, like, rights)

    @simulated
    def open_read(self, path: Path) -> DiskFile:
        return self._open("open_read", path, is_writable=False)

    @simulated
    def open_write(self, path: Path, *, create: bool = False) -> DiskFile:
        if not create:
            return self._open("open_write", path, is_writable=True)
        self.meet("create", path)
        parent = self._parent("create", path)
        if path.name in parent.names:
            raise self.error("create", path, errno.EEXIST)
        inode = SimInode(next(self.ticks))
        parent.change(Change(None, path.name, inode))
        return SimFile(self, path, inode, is_writable=True)

    @simulated
    def exists(self, path: Path) -> bool:
        self.meet("exists", path)
        with suppress(NotADirectoryError):
            return self._tree.find(self._names(path)) is not None
        return False

    @simulated
    def rename(self, source: Path, target: Path) -> None:
        words = f"rename {source} to"
        self.meet("rename", target, words)
        if source.parent != target.parent:
            raise NotImplementedError("a rename from one directory into another")
        parent = self._parent("rename", target, words)
        node = parent.names.get(source.name)
        if node is None:
            raise self.error("rename", target, errno.ENOENT, words)
        there = parent.names.get(target.name)
        if there is not None and isinstance(there, SimDirectory) != isinstance(node, SimDirectory):
            raise self.error("rename", target, errno.ENOTDIR if isinstance(there, SimInode) else errno.EISDIR, words)
        if isinstance(there, SimDirectory) and there.names and there is not node:
            raise self.error("rename", target, errno.ENOTEMPTY, words)
        if there is not node:
            parent.change(Change(source.name, target.name, node))

    @simulated
    def unlink(self, path: Path) -> None:
        self.meet("unlink", path)
        found = self._find("unlink", path)
        if isinstance(found, SimDirectory):
            raise self.error("unlink", path, errno.EISDIR)
        if found is not None:
            self._parent("unlink", path).change(Change(None, path.name, None))

    @simulated
    def remove_dir(self, path: Path) -> None:
        self.meet("remove_dir", path)
        if self._directory("remove_dir", path).names:
            raise self.error("remove_dir", path, errno.ENOTEMPTY)
        self._parent("remove_dir", path).change(Change(None, path.name, None))

    @simulated
    def list_dir(self, path: Path) -> list[tuple[str, int]]:
        self.meet("list_dir", path)
        return sorted((name, node.size) for name, node in self._files("list_dir", path))

    @simulated
    def list_dirs(self, path: Path) -> list[str]:
        self.meet("list_dir", path)
        names = self._directory("list_dir", path).names
        return sorted(name for name, node in names.items() if isinstance(node, SimDirectory))

    @simulated
    def stamps(self, path: Path) -> dict[str, Stamp]:
        self.meet("stamps", path)
        return {name: stamp_of(node) for name, node in sorted(self._files("stamps", path))}

    @simulated
    def make_dir(self, path: Path, *, durable: bool = True) -> None:
        missing = []
        step = path
        while not self.exists(step):
            missing.append(step)
            step = step.parent
        try:
            if durable:
                self.sync_dir(step.parent)
        except DiskError as error:
            if not error.is_forbidden:
                raise
        for step in reversed(missing):
            self.meet("make_dir", step)
            self._parent("make_dir", step).change(Change(None, step.name, SimDirectory(next(self.ticks))))
            if durable:
                self.sync_dir(step.parent)
        if not isinstance(self._find("make_dir", path), SimDirectory):
            raise DiskError("use", path, OSError(errno.ENOTDIR, "it is not a directory"))

    @simulated
    def sync_dir(self, path: Path) -> None:
        self.meet("sync_dir", path)
        self._directory("sync_dir", path).sync()

    def peek(self, path: Path) -> bytes:
        """What a reader would see, for a test's own eyes: no call, so no fault."""
        found = self._find("open_read", path)
        assert isinstance(found, SimInode), path
        return found.read(found.size, 0)

    def is_there(self, path: Path) -> bool:
        """Whether a plain file has that name; no call either."""
        with suppress(NotADirectoryError):
            return isinstance(self._tree.find(self._names(path)), SimInode)
        return False

    # What the calls are made of, for SimFile too.

    def meet(self, operation: str, path: Path, words: str | None = None) -> str | None:
        """Count the call; it fails here with an errno, or crashes; other faults are the call's to act on."""
        if self._is_dead:
            raise SimCrash
        if operation in CHANGES:
            if self.before_change is not None:
                self.before_change(operation, path)
            if self.changes == self.crash_at:
                self._is_dead = True
                raise SimCrash
            self.changes += 1
        self.counts[operation] += 1
        self.operations += 1
        if self.limit is not None and self.operations > self.limit:
            raise AssertionError(f"no end after {self.operations} calls: {self.counts}")
        below = path.relative_to(self.root)
        errors = [fault.error for fault in self.faults if fault.meets(operation, below)]
        if not errors:
            return None
        self.injected[f"{operation}={errors[0]}"] += 1
        if errors[0] == "crash":
            self._is_dead = True
            raise SimCrash
        if errors[0] == "short":
            return errors[0]
        raise self.error(operation, path, getattr(errno, errors[0]), words)

    def _open(self, operation: str, path: Path, *, is_writable: bool) -> SimFile:
        self.meet(operation, path)
        found = self._find(operation, path)
        if isinstance(found, SimDirectory) and not is_writable:
            raise DiskError(WORDS[operation], path, OSError(errno.EINVAL, "it is no plain file"))
        if not isinstance(found, SimInode):
            raise self.error(operation, path, errno.ENOENT if found is None else errno.EISDIR)
        return SimFile(self, path, found, is_writable=is_writable)
