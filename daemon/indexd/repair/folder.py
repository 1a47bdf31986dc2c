"""The folder of one repair, beside the index: all that it makes, and from the exchange on all that it took away.

::

    STORE/indexd-repair-20260102T030405Z/
        manifest     JSON, one object: how far the repair is, and which of two directories is the new index; made first
        checkpoint   the broker's checkpoint as it was; missing where there was none
        index/       the new index while it is made; from the exchange on, the old one

``state`` goes from ``building`` (nothing of the store is touched) over ``ready`` (index/ is durable, and the next step
is the exchange) to ``done``; an undo goes from there over ``undoing`` to ``undone``. The manifest is replaced by
rename, so a crash leaves the one before or the one after. Whether an exchange has happened is told by the inode that
STORE/index has. All of it belongs to whom STORE belongs, with the rights of STORE.
Without a manifest that holds, a folder is nobody's of ours: it may be all that is left of an old index.
"""

from __future__ import annotations

import errno
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from indexd.audit.ground import is_index_file
from indexd.audit.standing import REPAIR_PREFIX
from indexd.errors import CorruptDataError, DiskError
from indexd.storage.disk import Disk, is_temporary

State = Literal["building", "ready", "done", "undoing", "undone"]
_NAME = re.compile(REPAIR_PREFIX + r"[0-9]{8}T[0-9]{6}Z")
_UNDONE = ".undone"
_OURS = ("manifest", "checkpoint")
_STRICT = ConfigDict(strict=True, extra="forbid")
_Long = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
_Count = Annotated[int, Field(ge=0, lt=1 << 64)]


@dataclass(frozen=True, slots=True, config=_STRICT)
class MadeFile:
    """An index file as the repair left it: the count in its header, and where its last entry points."""

    name: str
    index_count: _Long
    end_phy_offset: _Long


@dataclass(frozen=True, slots=True, config=_STRICT)
class Manifest:
    """``new_inode`` and ``old_inode`` are those of the two directories. ``index_timestamp`` is what the checkpoint's
    indexMsgTimestamp is raised to, ms, ``old_index_timestamp`` what it was, None without a checkpoint. ``files`` are
    all of the new index; of them ``kept`` were there before. ``left_out`` were, too, and are no longer.
    """

    # None has a default: what is not in a manifest is not known.
    format: Literal[1]
    state: State
    new_inode: _Count
    old_inode: _Count
    index_timestamp: _Long
    old_index_timestamp: _Long | None
    files: tuple[MadeFile, ...]
    kept: tuple[str, ...]
    left_out: tuple[str, ...]

    @classmethod
    def first(cls) -> Manifest:
        """Of a repair that has just begun."""
        return cls(1, "building", 0, 0, 0, None, (), (), ())

    def pack(self) -> bytes:
        """One line of JSON."""
        return _MANIFEST.dump_json(self) + b"\n"

    @classmethod
    def unpack(cls, data: bytes, path: Path) -> Manifest:
        """What ``pack`` made; CorruptDataError for anything else."""
        try:
            return _MANIFEST.validate_json(data)
        except ValidationError as errors:
            error = errors.errors(include_url=False)[0]
            where = ".".join(map(str, error["loc"]))
            text = f"{where}: {error['msg']}" if where else str(error["msg"])
            if where == "format":
                text = "it is of another version of indexd"
            raise CorruptDataError(f"{path} is no manifest of a repair: {text}", move_away(path.parent)) from None


_MANIFEST = TypeAdapter(Manifest)


def move_away(folder: Path) -> str:
    """What to do about a folder that cannot be judged."""
    return f"move {folder} away: nothing in it was touched"


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
        """A new one with a manifest and an empty index/, named by ``now``, Unix seconds; durable."""
        folder = cls(disk, _path_at(store, now))
        while any(disk.exists(path) for path in folder.names):
            now += 1
            folder = cls(disk, _path_at(store, now))
        disk.make_dir(folder.path)
        disk.give(folder.path, store)
        folder.write(Manifest.first())
        disk.make_dir(folder.index)
        disk.give(folder.index, store)
        return folder

    @classmethod
    def all_of(cls, disk: Disk, store: Path) -> list[RepairFolder]:
        """Those of a store that were not undone, the oldest first."""
        return [cls(disk, store / name) for name in disk.list_dirs(store) if _NAME.fullmatch(name)]

    def read(self) -> Manifest:
        """Its manifest; that of a repair which has just begun, if there is none and nothing else either.

        CorruptDataError for a manifest that does not hold, and for a folder that no repair has made.
        """
        try:
            return Manifest.unpack(self._disk.read(self.manifest_path), self.manifest_path)
        except DiskError as error:
            if error.errno == errno.EINVAL:  # no plain file
                raise self._strange("its manifest is no file") from None
            if error.is_forbidden:
                raise self._forbidden() from None
            if not error.is_missing:
                raise
        if not self._is_just_made():
            raise self._strange("it has no manifest, so no repair is known that has made it")
        return Manifest.first()

    def write(self, manifest: Manifest) -> None:
        """Replace the manifest, durably."""
        self._write(self.manifest_path, manifest.pack())

    def keep_checkpoint(self, data: bytes) -> None:
        """Write the broker's checkpoint down as it is, durably."""
        self._write(self.checkpoint, data)

    def set_state(self, state: State) -> Manifest:
        """The same manifest with another state."""
        manifest = replace(self.read(), state=state)
        self.write(manifest)
        return manifest

    def check_removable(self) -> None:
        """CorruptDataError if there is anything in it that a repair does not make before the exchange."""
        disk = self._disk
        folders = disk.list_dirs(self.path)
        strange = [name for name, _ in disk.list_dir(self.path) if not _is_ours(name)]
        strange += [name for name in folders if name != "index"]
        if "index" in folders:
            strange += [f"index/{name}" for name in disk.list_dirs(self.index)]
            strange += [f"index/{name}" for name, _ in disk.list_dir(self.index) if not is_index_file(name)]
        if strange:
            raise self._strange(f"no repair has made {strange[0]} in it")

    def remove(self) -> None:
        """All of it: of a repair that has not touched the store. Files of the broker's have their other name.

        The manifest is the last to go. Raises as ``check_removable`` does, and nothing is removed then.
        """
        self.check_removable()
        disk = self._disk
        if disk.exists(self.index):
            for name, _ in disk.list_dir(self.index):
                disk.unlink(self.index / name)
            disk.remove_dir(self.index)
        for name, _ in disk.list_dir(self.path):
            if name != self.manifest_path.name:
                disk.unlink(self.path / name)
        disk.sync_dir(self.path)
        disk.unlink(self.manifest_path)
        disk.remove_dir(self.path)
        disk.sync_dir(self.path.parent)

    def mark_undone(self) -> None:
        """Rename it so that nobody takes it for one that can be undone."""
        self._disk.rename(*self.names)
        self._disk.sync_dir(self.path.parent)

    def _is_just_made(self) -> bool:
        # Empty, or with what a crash has left of the first manifest.
        disk = self._disk
        names = [name for name, _ in disk.list_dir(self.path)]
        if disk.list_dirs(self.path) or not all(is_temporary(name, self.manifest_path.name) for name in names):
            return False
        first = Manifest.first().pack()
        return all(first.startswith(disk.read(self.path / name).rstrip(b"\0")) for name in names)

    def _write(self, path: Path, data: bytes) -> None:
        # Whoever runs this, and with whatever umask: it is its store's own.
        self._disk.write_atomically(path, data, like=self.path.parent)

    def _forbidden(self) -> CorruptDataError:
        return CorruptDataError(
            f"{self.path} is left as it is: this user may not read its manifest",
            f"as root: chown -R --reference={self.path.parent} {self.path}",
        )

    def _strange(self, text: str) -> CorruptDataError:
        return CorruptDataError(f"{self.path} is left as it is: {text}", move_away(self.path))


def _is_ours(name: str) -> bool:
    return name in _OURS or any(is_temporary(name, target) for target in _OURS)


def _path_at(store: Path, now: float) -> Path:
    return store / f"{REPAIR_PREFIX}{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(now))}"
