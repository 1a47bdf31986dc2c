"""SimTree: what lies on a simulated disk by name, and the errors of names that lead nowhere."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from indexd.errors import DiskError
from indexd.storage.disk import Disk
from support.sim_fault import WORDS
from support.sim_inode import SimDirectory, SimInode


class SimTree(Disk):
    """The tree below ``root``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._tree = SimDirectory(1)
        # As text: a simulation asks a million times, and Path's own ways are long.
        self._prefix = f"{root}/"

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
