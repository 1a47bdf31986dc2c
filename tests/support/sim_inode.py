"""What stands on a simulated disk and what only seems to: files by pages, directories by changes.

Everything has two states: what every process sees (the page cache), and what a loss of power leaves. Between two syncs
the device may have taken any of the changes, in any order. This is what POSIX allows, not what one file system does.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

PAGE_SIZE = 4096
SECTOR_SIZE = 512
_ZEROS = bytes(PAGE_SIZE)
# How much of what was not synced a crash has kept: nothing, everything, or a share of it.
_KEPT_SHARES = (0.0, 0.1, 0.5, 0.9, 1.0)
_TORN = 0.25


@dataclass(slots=True)
class SimInode:
    """A file. ``versions`` are the states of each page that has changed since the last fsync, oldest first."""

    number: int
    size: int = 0
    mtime_ns: int = 0
    pages: dict[int, bytes] = field(default_factory=dict)
    versions: dict[int, list[bytes]] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    disk_pages: dict[int, bytes] = field(default_factory=dict)
    disk_size: int = 0
    mtimes_ns: list[int] = field(default_factory=list)
    disk_mtime_ns: int = 0

    def touch(self, mtime_ns: int) -> None:
        """It was written now; that is as durable as the rest."""
        self.mtime_ns = mtime_ns
        self.mtimes_ns.append(mtime_ns)

    def read(self, size: int, position: int) -> bytes:
        """What a reader sees now."""
        end = min(position + size, self.size)
        if end <= position:
            return b""
        first, last = position // PAGE_SIZE, (end - 1) // PAGE_SIZE
        whole = b"".join(self.pages.get(page, _ZEROS) for page in range(first, last + 1))
        return whole[position - first * PAGE_SIZE : end - first * PAGE_SIZE]

    def write(self, data: bytes | memoryview, position: int) -> None:
        """Into the cache, each page that is met getting a further version."""
        done = 0
        while done < len(data):
            page, start = divmod(position + done, PAGE_SIZE)
            part = bytes(data[done : done + PAGE_SIZE - start])
            old = self.pages.get(page, _ZEROS)
            self._change(page, old[:start] + part + old[start + len(part) :])
            done += len(part)
        if data:
            self.resize(max(self.size, position + len(data)))

    def resize(self, size: int) -> None:
        """Cut or extend; a cut leaves zeros for a later extension, and none of it is durable before an fsync."""
        if size < self.size:
            page, start = divmod(size, PAGE_SIZE)
            if start and page in self.pages:
                self._change(page, self.pages[page][:start].ljust(PAGE_SIZE, b"\0"))
            for behind in [number for number in self.pages if number >= page + (start > 0)]:
                self._change(behind, _ZEROS)
        if size != self.size:
            self.size = size
            self.sizes.append(size)

    def sync(self) -> None:
        """Content and size are durable."""
        for page in self.versions:
            self.disk_pages[page] = self.pages[page]
        self.versions.clear()
        self.sizes.clear()
        self.mtimes_ns.clear()
        self.disk_size, self.disk_mtime_ns = self.size, self.mtime_ns

    def fail_sync(self, rand: random.Random) -> None:
        """An fsync that fails: of each page anything may be on the device, and the cache calls all of it clean.

        So a later fsync that succeeds brings none of it out, unless it is written again.
        """
        for page, versions in self.versions.items():
            self.disk_pages[page] = self._survivor(page, versions, rand, 0.5)
        self.versions.clear()

    def crash(self, rand: random.Random) -> None:
        """Lose power: what was not synced is there or not, page by page, sector by sector."""
        share = rand.choice(_KEPT_SHARES)
        for page, versions in sorted(self.versions.items()):
            self.disk_pages[page] = self._survivor(page, versions, rand, share)
        if self.sizes and rand.random() < share:
            self.disk_size = rand.choice(self.sizes)
        if self.mtimes_ns and rand.random() < share:
            self.disk_mtime_ns = rand.choice(self.mtimes_ns)
        page, start = divmod(self.disk_size, PAGE_SIZE)
        self.disk_pages = {number: data for number, data in self.disk_pages.items() if number < page + (start > 0)}
        if start and page in self.disk_pages:
            self.disk_pages[page] = self.disk_pages[page][:start].ljust(PAGE_SIZE, b"\0")
        self.pages, self.size, self.mtime_ns = dict(self.disk_pages), self.disk_size, self.disk_mtime_ns
        self.versions.clear()
        self.sizes.clear()
        self.mtimes_ns.clear()

    def _change(self, page: int, data: bytes) -> None:
        self.pages[page] = data
        self.versions.setdefault(page, []).append(data)

    def _survivor(self, page: int, versions: list[bytes], rand: random.Random, share: float) -> bytes:
        # One state of the page; or, torn, one of each of its sectors.
        old = self.disk_pages.get(page, _ZEROS)
        if rand.random() >= share:
            return old
        if rand.random() >= _TORN:
            return versions[-1] if rand.random() < 0.5 else rand.choice(versions)
        states = [old, *versions]
        return b"".join(rand.choice(states)[at : at + SECTOR_SIZE] for at in range(0, PAGE_SIZE, SECTOR_SIZE))


class Change(NamedTuple):
    """One change of a directory: ``target`` gets ``node``, or is gone; a rename takes ``source`` away with it."""

    source: str | None
    target: str
    node: SimInode | SimDirectory | None
    pair: Pair | None = None

    def apply(self, names: dict[str, SimInode | SimDirectory]) -> None:
        """To what a process sees, or to what stands on the device."""
        if self.source is not None:
            names.pop(self.source, None)
        if self.node is None:
            names.pop(self.target, None)
        else:
            names[self.target] = self.node


@dataclass(slots=True)
class Pair:
    """What two changes of two directories have in common: of an exchange both are durable, or neither is."""

    is_kept: bool | None = None

    def survives(self, rand: random.Random, share: float) -> bool:
        """Decided at the first of the two, if it was not synced before."""
        if self.is_kept is None:
            self.is_kept = rand.random() < share
        return self.is_kept


@dataclass(slots=True)
class SimDirectory:
    """Names; ``pending`` are the changes since it was last synced, in their order, each kept or lost as one."""

    number: int
    names: dict[str, SimInode | SimDirectory] = field(default_factory=dict)
    disk_names: dict[str, SimInode | SimDirectory] = field(default_factory=dict)
    pending: list[Change] = field(default_factory=list)

    def find(self, parts: Sequence[str]) -> SimInode | SimDirectory | None:
        """What a path below this one leads to, None if it leads to nothing; NotADirectoryError through a file."""
        node: SimInode | SimDirectory | None = self
        for part in parts:
            if isinstance(node, SimInode):
                raise NotADirectoryError
            node = node.names.get(part) if node is not None else None
        return node

    def change(self, change: Change) -> None:
        """Visible at once, durable after ``sync``."""
        change.apply(self.names)
        self.pending.append(change)

    def sync(self) -> None:
        """The names are durable; what they name need not be."""
        for change in self.pending:
            if change.pair is not None:
                change.pair.is_kept = True
        self.disk_names = dict(self.names)
        self.pending.clear()

    def crash(self, rand: random.Random) -> None:
        """Lose power: of the pending changes any subset has reached the device."""
        share = rand.choice(_KEPT_SHARES)
        for change in self.pending:
            if change.pair.survives(rand, share) if change.pair is not None else rand.random() < share:
                change.apply(self.disk_names)
        self.pending.clear()
        self.names = dict(self.disk_names)
