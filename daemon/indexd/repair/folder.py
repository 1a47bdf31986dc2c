"""The folder of one repair, beside the index: all that it makes, and from the exchange on all that it took away.

::

    STORE/indexd-repair-20260102T030405Z/
        manifest     JSON, one object: how far the repair is, and which of two directories is the new index
        checkpoint   the broker's checkpoint as it was; missing where there was none
        index/       the new index while it is made; from the exchange on, the old one

``state`` goes from ``building`` (nothing of the store is touched) over ``ready`` (index/ is durable, and the next step
is the exchange) to ``done``; an undo goes from there to ``undoing``. The manifest is replaced by rename, so a crash
leaves the one before or the one after. Whether an exchange has happened is told by the inode that STORE/index has.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from indexd.errors import CorruptDataError, DiskError
from indexd.storage.disk import Disk

State = Literal["building", "ready", "done", "undoing"]
_FORMAT = 1
_PREFIX = "indexd-repair-"
_NAME = re.compile(_PREFIX + r"[0-9]{8}T[0-9]{6}Z")
_UNDONE = ".undone"


@dataclass(frozen=True, slots=True)
class MadeFile:
    """An index file as the repair left it: the count in its header, and where its last entry points."""

    name: str
    index_count: int
    end_phy_offset: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """``new_inode`` and ``old_inode`` are those of the two directories. ``index_timestamp`` is what the checkpoint's
    indexMsgTimestamp is raised to, ms, ``old_index_timestamp`` what it was, None without a checkpoint. ``files`` are
    all of the new index; of them ``kept`` were there before. ``left_out`` were, too, and are no longer.
    """

    state: State = "building"
    new_inode: int = 0
    old_inode: int = 0
    index_timestamp: int = 0
    old_index_timestamp: int | None = None
    files: tuple[MadeFile, ...] = ()
    kept: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    def pack(self) -> bytes:
        """One line of JSON."""
        return json.dumps({"format": _FORMAT, **asdict(self)}).encode() + b"\n"

    @classmethod
    def unpack(cls, data: bytes, path: Path) -> Manifest:
        """What ``pack`` made; CorruptDataError for anything else."""
        try:
            row: dict[str, Any] = json.loads(data)
            if row.pop("format") != _FORMAT:
                raise ValueError("it is of another version of indexd")
            marks = tuple(MadeFile(**mark) for mark in row.pop("files"))
            return cls(files=marks, kept=tuple(row.pop("kept")), left_out=tuple(row.pop("left_out")), **row)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CorruptDataError(f"{path} is no manifest of a repair: {error}", "move its folder away") from None


class RepairFolder:
    """The paths in it, and its manifest; ``path`` is the folder itself."""

    def __init__(self, disk: Disk, path: Path) -> None:
        self._disk = disk
        self.path = path
        self.index = path / "index"
        self.checkpoint = path / "checkpoint"
        self.manifest_path = path / "manifest"
        #: As it is called before and after an undo.
        self.names = path, path.with_name(path.name + _UNDONE)

    def __repr__(self) -> str:
        return f"RepairFolder({self.path})"

    @classmethod
    def make(cls, disk: Disk, store: Path, now: float) -> RepairFolder:
        """A new one with an empty index/, named by ``now``, Unix seconds; durable."""
        folder = cls(disk, _path_at(store, now))
        while any(disk.exists(path) for path in folder.names):
            now += 1
            folder = cls(disk, _path_at(store, now))
        disk.make_dir(folder.index)
        disk.give(folder.path, store)
        folder.write(Manifest())
        return folder

    @classmethod
    def all_of(cls, disk: Disk, store: Path) -> list[RepairFolder]:
        """Those of a store that were not undone, the oldest first."""
        return [cls(disk, store / name) for name in disk.list_dirs(store) if _NAME.fullmatch(name)]

    def read(self) -> Manifest:
        """Its manifest; that of a repair which has just begun where there is none. Raises CorruptDataError."""
        try:
            return Manifest.unpack(self._disk.read(self.manifest_path), self.manifest_path)
        except DiskError as error:
            if not error.is_missing:
                raise
            return Manifest()

    def write(self, manifest: Manifest) -> None:
        """Replace the manifest, durably."""
        self._disk.write_atomically(self.manifest_path, manifest.pack())

    def set_state(self, state: State) -> Manifest:
        """The same manifest with another state."""
        manifest = replace(self.read(), state=state)
        self.write(manifest)
        return manifest

    def remove(self) -> None:
        """All of it: of a repair that has not touched the store. Files of the broker's have their other name."""
        disk = self._disk
        if disk.exists(self.index):
            for name, _ in disk.list_dir(self.index):
                disk.unlink(self.index / name)
            disk.remove_dir(self.index)
        for name, _ in disk.list_dir(self.path):
            disk.unlink(self.path / name)
        disk.remove_dir(self.path)
        disk.sync_dir(self.path.parent)

    def mark_undone(self) -> None:
        """Rename it so that nobody takes it for one that can be undone."""
        self._disk.rename(*self.names)
        self._disk.sync_dir(self.path.parent)


def _path_at(store: Path, now: float) -> Path:
    return store / f"{_PREFIX}{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(now))}"
