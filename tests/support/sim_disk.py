"""SimDisk: the twin of ``indexd.storage.disk`` that keeps a tree in memory and forgets, tears and fails as told.

Paths under ``root`` are simulated, all others are the real disk's. Each call is counted, can be failed by a FaultMap
and can be preceded by a crash; ``crash`` leaves what a loss of power may leave, ``kill`` what the death of the process
leaves: all of it, but every handle is dead.
"""

from __future__ import annotations

import errno
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakSet

from indexd.errors import DiskError
from indexd.storage.disk import DiskFile
from support.sim_fault import CHANGES, WORDS, FaultMap, SimCrash, errno_of
from support.sim_file import SimFile, stamp_of
from support.sim_inode import Change, Memo, SimDirectory, SimInode
from support.sim_links import SimLinks

if TYPE_CHECKING:
    from indexd.storage.disk import Stamp


class SimDisk(SimLinks):
    """``rand`` decides what a failed or interrupted call leaves; ``limit`` ends a run that does not end by itself."""

    def __init__(self, root: Path, seed: int = 0, faults: FaultMap | None = None) -> None:
        super().__init__(root)
        self.rand = random.Random(seed)
        self.faults = faults or FaultMap()
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
        self._words = count(1)

    def __repr__(self) -> str:
        return f"SimDisk({self.root}, operations={self.operations}, changes={self.changes}, lives={self.lives})"

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
        memo: Memo = {}
        twin._tree = self._tree.copy(memo)
        twin.ticks, twin.lives = copy(self.ticks), self.lives + 1
        twin._words = copy(self._words)
        return twin

    # The calls of Disk.

    def open_read(self, path: Path) -> DiskFile:
        if not self.holds(path):
            file = super().open_read(path)
            self._real.add(file)
            return file
        return self._open("open_read", path, is_writable=False)

    def open_write(self, path: Path, *, create: bool = False) -> DiskFile:
        if not self.holds(path):
            return super().open_write(path, create=create)
        if not create:
            return self._open("open_write", path, is_writable=True)
        fault = self.meet("create", path)
        parent = self._parent("create", path)
        if path.name in parent.names:
            raise self.error("create", path, errno.EEXIST)
        return self._create(path, parent, fault)

    def exists(self, path: Path) -> bool:
        if not self.holds(path):
            return super().exists(path)
        self.meet("exists", path)
        with suppress(NotADirectoryError):
            return self._tree.find(self._names(path)) is not None
        return False

    def random_word(self) -> str:
        return f"{next(self._words):016x}"

    def rename(self, source: Path, target: Path) -> None:
        if not self.holds(target):
            super().rename(source, target)
            return
        words = f"rename {source} to"
        fault = self.meet("rename", target, words)
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
        self.leave(fault)

    def unlink(self, path: Path) -> None:
        if not self.holds(path):
            super().unlink(path)
            return
        fault = self.meet("unlink", path)
        found = self._find("unlink", path)
        if isinstance(found, SimDirectory):
            raise self.error("unlink", path, errno.EISDIR)
        if found is not None:
            self._parent("unlink", path).change(Change(None, path.name, None))
        self.leave(fault)

    def remove_dir(self, path: Path) -> None:
        if not self.holds(path):
            super().remove_dir(path)
            return
        fault = self.meet("remove_dir", path)
        if self._directory("remove_dir", path).names:
            raise self.error("remove_dir", path, errno.ENOTEMPTY)
        self._parent("remove_dir", path).change(Change(None, path.name, None))
        self.leave(fault)

    def list_dir(self, path: Path) -> list[tuple[str, int]]:
        if not self.holds(path):
            return super().list_dir(path)
        self.meet("list_dir", path)
        return sorted((name, node.size) for name, node in self._files("list_dir", path))

    def list_dirs(self, path: Path) -> list[str]:
        if not self.holds(path):
            return super().list_dirs(path)
        self.meet("list_dir", path)
        names = self._directory("list_dir", path).names
        return sorted(name for name, node in names.items() if isinstance(node, SimDirectory))

    def stamps(self, path: Path) -> dict[str, Stamp]:
        if not self.holds(path):
            return super().stamps(path)
        self.meet("stamps", path)
        return {name: stamp_of(node) for name, node in sorted(self._files("stamps", path))}

    def make_dir(self, path: Path, *, durable: bool = True) -> None:
        if not self.holds(path):
            super().make_dir(path, durable=durable)
            return
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
            fault = self.meet("make_dir", step)
            self._parent("make_dir", step).change(Change(None, step.name, SimDirectory(next(self.ticks))))
            self.leave(fault)
            if durable:
                self.sync_dir(step.parent)
        if not isinstance(self._find("make_dir", path), SimDirectory):
            raise DiskError("use", path, OSError(errno.ENOTDIR, "it is not a directory"))

    def sync_dir(self, path: Path) -> None:
        if not self.holds(path):
            super().sync_dir(path)
            return
        fault = self.meet("sync_dir", path)
        self._directory("sync_dir", path).sync()
        self.leave(fault)

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
        fault = self.faults.meet(operation, path.relative_to(self.root)) if self.faults.rules else None
        if fault == "crash":
            self._is_dead = True
            raise SimCrash
        if fault in (None, "crash-after", "short"):
            return fault
        raise self.error(operation, path, errno_of(str(fault)), words)

    def leave(self, fault: str | None) -> None:
        """The call is done; some crashes come right behind it."""
        if fault == "crash-after":
            self._is_dead = True
            raise SimCrash

    def _open(self, operation: str, path: Path, *, is_writable: bool) -> SimFile:
        self.meet(operation, path)
        found = self._find(operation, path)
        if isinstance(found, SimDirectory) and not is_writable:
            raise DiskError(WORDS[operation], path, OSError(errno.EINVAL, "it is no plain file"))
        if not isinstance(found, SimInode):
            raise self.error(operation, path, errno.ENOENT if found is None else errno.EISDIR)
        return SimFile(self, path, found, is_writable=is_writable)

    def _create(self, path: Path, parent: SimDirectory, fault: str | None) -> SimFile:
        inode = SimInode(next(self.ticks))
        parent.change(Change(None, path.name, inode))
        self.leave(fault)
        return SimFile(self, path, inode, is_writable=True)
