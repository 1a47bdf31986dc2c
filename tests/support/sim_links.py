"""SimLinks: what a simulated disk does to names in two directories at once, and what it says of a name."""

from __future__ import annotations

import errno
from abc import abstractmethod
from pathlib import Path

from indexd.errors import DiskError
from indexd.storage.disk import Stamp
from support.sim_file import stamp_of
from support.sim_inode import Change, Pair, SimDirectory, SimInode
from support.sim_tree import SimTree


class SimLinks(SimTree):
    """The calls ``link``, ``exchange``, ``stamp``, ``free`` and ``give`` of a SimDisk."""

    #: What ``free`` says.
    space = 1 << 50

    @abstractmethod
    def meet(self, operation: str, path: Path, words: str | None = None) -> str | None:
        """As SimDisk does."""

    @abstractmethod
    def leave(self, fault: str | None) -> None:
        """As SimDisk does."""

    def link(self, source: Path, target: Path) -> None:
        if not self.holds(target):
            super().link(source, target)
            return
        words = f"link {source} to"
        fault = self.meet("link", target, words)
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
        self.leave(fault)

    def exchange(self, one: Path, other: Path) -> None:
        if not self.holds(other):
            super().exchange(one, other)
            return
        words = f"exchange {one} with"
        fault = self.meet("exchange", other, words)
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
        self.leave(fault)

    def stamp(self, path: Path) -> Stamp:
        if not self.holds(path):
            return super().stamp(path)
        self.meet("stamp", path)
        node = self._find("stamp", path)
        if node is None:
            raise self.error("stamp", path, errno.ENOENT)
        return stamp_of(node) if isinstance(node, SimInode) else Stamp(0, 0, node.number)

    def free(self, path: Path) -> int:
        return self.space if self.holds(path) else super().free(path)

    def give(self, path: Path, like: Path, rights: int | None = None) -> None:
        if not self.holds(path):  # owners are not simulated
            super().give(path, like, rights)
