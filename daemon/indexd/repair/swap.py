"""The folder of one repair beside the index, and the exchange of the new index with the old one, and back.

::

    STORE/indexd-repair-20260102T030405Z/
        manifest     JSON, one object: how far the repair is, and which of two directories is the new index; made first
        checkpoint   the broker's checkpoint as it was; missing where there was none
        index/       the new index while it is made; from the exchange on, the old one

``state`` goes from ``building`` (nothing of the store is touched) over ``ready`` (index/ is durable, and the next step
is the exchange) to ``done``, and to ``undone`` by an undo. The manifest is replaced by rename, so a crash leaves the
one before or the one after. Whether an exchange has happened is told by the inode that STORE/index has. All of it
belongs to whom STORE belongs, with the rights of STORE. Without a manifest that holds, a folder is nobody's of ours: it
may be all that is left of an old index.

The new index changes places with the old one in one system call. Then the checkpoint's indexMsgTimestamp is raised: an
unclean start of the broker throws away every index file that ends behind it (spec rocketmq-store 1.4). Between the two
the store has the repaired index and a checkpoint that does not vouch for it yet; whoever comes next finishes it. Each
step may be the last before a crash.
"""

from __future__ import annotations

import errno
import re
import signal
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from indexd.audit.causes import read_checkpoint
from indexd.audit.plan import is_index_file
from indexd.errors import CorruptDataError, DiskError, MissingOk, UnsafeStoreError
from indexd.flush.frontier import CHECKPOINT_SIZE
from indexd.index.format import HEADER_SIZE, IndexHeader
from indexd.storage.disk import TEMPORARY, Disk

# The version before wrote "undoing" ahead of an undo's exchange: the inode tells the same.
State = Literal["building", "ready", "done", "undoing", "undone"]
#: How the folder of a repair is called, before its time.
REPAIR_PREFIX = "indexd-repair-"
_NAME = re.compile(REPAIR_PREFIX + r"[0-9]{8}T[0-9]{6}Z")
_UNDONE = ".undone"
_OURS = {"manifest", "checkpoint", "manifest" + TEMPORARY, "checkpoint" + TEMPORARY}
_STRICT = ConfigDict(strict=True, extra="forbid")
_Long = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
_Count = Annotated[int, Field(ge=0, lt=1 << 64)]


@checked_dataclass(frozen=True, slots=True, config=_STRICT)
class MadeFile:
    """An index file as the repair left it: the count in its header, and where its last entry points."""

    name: str
    index_count: _Long
    end_phy_offset: _Long


@checked_dataclass(frozen=True, slots=True, config=_STRICT)
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
        except ValidationError:
            text = f"{path} is no manifest of a repair, or one of another version of indexd"
            raise CorruptDataError(text, move_away(path.parent)) from None


_MANIFEST = TypeAdapter(Manifest)


def move_away(folder: Path) -> str:
    """What to do about a folder that cannot be judged."""
    return f"move {folder} away: nothing in it was touched"


class RepairFolder:
    """The paths in it, and its manifest; ``path`` is the folder itself, ``undone`` what an undo calls it."""

    def __init__(self, disk: Disk, path: Path) -> None:
        self._disk = disk
        self.path, self.undone = path, path.with_name(path.name + _UNDONE)
        self.index, self.checkpoint, self.manifest_path = (path / name for name in ("index", "checkpoint", "manifest"))

    @classmethod
    def make(cls, disk: Disk, store: Path, now: float) -> RepairFolder:
        """A new one with a manifest and an empty index/, named by ``now``, Unix seconds; durable."""
        while True:
            folder = cls(disk, store / f"{REPAIR_PREFIX}{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(now))}")
            if not disk.exists(folder.path) and not disk.exists(folder.undone):
                break
            now += 1
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
            if not error.is_missing and error.errno != errno.EINVAL:  # it is no plain file
                raise
        names = [*self._disk.list_dirs(self.path), *(name for name, _ in self._disk.list_dir(self.path))]
        # A crash may have left some of the first manifest.
        if names not in ([], [self.manifest_path.name + TEMPORARY]):
            raise self._strange("it has no manifest, so no repair is known that has made it")
        return Manifest.first()

    def write(self, manifest: Manifest) -> None:
        """Replace the manifest, durably."""
        # Whoever runs this, and with whatever umask: it is its store's own.
        self._disk.write_atomically(self.manifest_path, manifest.pack(), like=self.path.parent)

    def set_state(self, state: State) -> None:
        """The same manifest with another state."""
        self.write(replace(self.read(), state=state))

    def check_removable(self) -> None:
        """CorruptDataError if there is anything in it that a repair does not make before the exchange."""
        disk = self._disk
        folders = disk.list_dirs(self.path)
        strange = [name for name in folders if name != "index"]
        strange += [name for name, _ in disk.list_dir(self.path) if name not in _OURS]
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

    def _strange(self, text: str) -> CorruptDataError:
        return CorruptDataError(f"{self.path} is left as it is: {text}", move_away(self.path))


_INDEX_TIMESTAMP_AT, _FIELD = 16, struct.Struct(">q")
_CANNOT_EXCHANGE = {
    errno.EINVAL: "this file system cannot exchange two directories",
    errno.ENOSYS: "this system cannot exchange two directories",
    errno.EBUSY: "STORE/index is a mount point",
    errno.EXDEV: "STORE/index is on another file system than STORE",
}


def index_timestamp_of(disk: Disk, store: Path) -> int | None:
    """The indexMsgTimestamp of the checkpoint, ms; None where there is none, or too short a one."""
    checkpoint = read_checkpoint(disk, store)
    return None if checkpoint is None else checkpoint.index_msg_timestamp


def swap(disk: Disk, store: Path, folder: RepairFolder, kept: tuple[str, ...], left_out: tuple[str, ...]) -> None:
    """Put ``folder.index``, which is durable, in the place of STORE/index. Raises UnsafeStoreError, DiskError.

    Interrupted anywhere, ``settle`` goes on from there. Signals of a terminal wait until it is over.
    """
    marks, newest = _marks_of(disk, folder.index)
    old = _read(disk, store / "checkpoint")
    if old is not None:
        disk.write_atomically(folder.checkpoint, old, like=store)
    manifest = Manifest(
        format=1,
        state="ready",
        new_inode=disk.stamp(folder.index).inode,
        old_inode=disk.stamp(store / "index").inode,
        index_timestamp=newest,
        old_index_timestamp=index_timestamp_of(disk, store),
        files=marks,
        kept=kept,
        left_out=left_out,
    )
    with _undisturbed():
        folder.write(manifest)
        _exchange(disk, store, folder)
        _finish(disk, store, folder, manifest)


def to_undo(disk: Disk, store: Path) -> tuple[RepairFolder, int]:
    """The newest repair, and how many entries the broker has put since; what touched nothing counts for none.

    It only looks. UnsafeStoreError if there is none, or if the index that is there now is not the one that it made;
    CorruptDataError for a folder that cannot be judged.
    """
    for folder in reversed(RepairFolder.all_of(disk, store)):
        manifest = folder.read()
        step = _next_step(disk, store, folder)
        if step == "remove":
            continue
        if step == "undo":
            return folder, 0
        if _inode(disk, store / "index") != manifest.new_inode:
            raise UnsafeStoreError(
                f"{store / 'index'} is not the index that the repair of {folder.path.name} made",
                f"to have the old one back nevertheless, move {folder.path / 'index'} there by hand",
            )
        if _inode(disk, folder.index) != manifest.old_inode:
            raise UnsafeStoreError(
                f"the old index is not in {folder.path} any more: {folder.index} is missing, or another folder",
                f"move it back there, or move {folder.path} away",
            )
        before = {mark.name: mark.index_count for mark in manifest.files}
        marks, _ = _marks_of(disk, store / "index")
        return folder, sum(max(mark.index_count - before.get(mark.name, 1), 0) for mark in marks)
    raise UnsafeStoreError(f"no repair of {store} can be undone: there is no folder of one", "nothing to do")


def undo(disk: Disk, store: Path, folder: RepairFolder) -> None:
    """Exchange the two again, and set the checkpoint's indexMsgTimestamp as it was; ``folder`` is from ``to_undo``."""
    with _undisturbed():
        if _next_step(disk, store, folder) != "undo":
            _exchange(disk, store, folder)
        _finish_undo(disk, store, folder)


_INTERRUPTED = "{} is of a repair that was interrupted: indexd repair removes or finishes it"
_ELSEWHERE = "{} is of a repair that was interrupted, and the index is neither its new nor its old one: left"
_SETTLED = {
    "remove": "{} is removed: of a repair that was interrupted before it had changed anything",
    "finish": "{} had its index in place, and has its checkpoint now: the repair that was interrupted is done",
    "undo": "{} was about to be undone, and is now",
}


def settle(disk: Disk, store: Path, *, only_look: bool = False) -> tuple[list[str], list[str]]:
    """Bring to an end what earlier repairs were interrupted in: removed if it had not begun, else finished.

    Lines for a person about what was done, or is to be done with ``only_look``; then about folders that are named as
    those of repairs and not touched, and why. Raises DiskError.
    """
    lines, left_alone = list[str](), list[str]()
    for folder in RepairFolder.all_of(disk, store):
        try:
            step = _next_step(disk, store, folder)
        except CorruptDataError as error:
            left_alone.append(error.line())
            continue
        if step == "leave":
            left_alone.append(_ELSEWHERE.format(folder.path.name))
        elif step:
            lines.append((_INTERRUPTED if only_look else _SETTLED[step]).format(folder.path.name))
        if only_look:
            continue
        if step == "remove":
            folder.remove()
        elif step == "finish":
            _finish(disk, store, folder, folder.read())
        elif step == "undo":
            _finish_undo(disk, store, folder)
    return lines, left_alone


def _next_step(disk: Disk, store: Path, folder: RepairFolder) -> str:
    # One of _SETTLED, "leave", or "" for a repair that is done.
    manifest, inode = folder.read(), _inode(disk, store / "index")
    if manifest.state == "building" or (manifest.state == "ready" and inode == manifest.old_inode):
        folder.check_removable()
        return "remove"
    if manifest.state == "ready":
        return "finish" if inode == manifest.new_inode else "leave"
    # The folder of an undo that was interrupted behind its exchange holds the index that the repair has made.
    is_back = inode == manifest.old_inode and _inode(disk, folder.index) == manifest.new_inode
    return "undo" if is_back or manifest.state == "undone" else ""


def _inode(disk: Disk, path: Path) -> int | None:
    with MissingOk():
        return disk.stamp(path).inode
    return None


def _exchange(disk: Disk, store: Path, folder: RepairFolder) -> None:
    try:
        disk.exchange(store / "index", folder.index)
    except DiskError as error:
        why = _CANNOT_EXCHANGE.get(error.errno or 0)
        if why is None:
            raise
        raise UnsafeStoreError(
            f"{why}: nothing is changed", "repair a copy of the store on another file system, and copy its index back"
        ) from error


def _finish(disk: Disk, store: Path, folder: RepairFolder, manifest: Manifest) -> None:
    # What follows the exchange: the checkpoint vouches for the index that is there now. After a crash, too: of an
    # exchange that is seen nobody knows whether it is durable.
    disk.sync_dir(store)
    disk.sync_dir(folder.path)
    now = index_timestamp_of(disk, store)
    if now is None or now < manifest.index_timestamp:
        data = _read(disk, store / "checkpoint") or b""
        _write_checkpoint(disk, store, _with_field(data, _FIELD.pack(manifest.index_timestamp)))
    folder.set_state("done")


def _finish_undo(disk: Disk, store: Path, folder: RepairFolder) -> None:
    disk.sync_dir(store)
    disk.sync_dir(folder.path)
    if folder.read().state != "undone":
        # By its bytes: they need not be a time. If nobody else has changed the checkpoint, its length is the old one.
        now, old = _read(disk, store / "checkpoint") or b"", _read(disk, folder.checkpoint)
        if old is None:
            old = _with_field(b"", _FIELD.pack(0))
        field = old.ljust(CHECKPOINT_SIZE, b"\0")[_INDEX_TIMESTAMP_AT:][: _FIELD.size]
        then = _with_field(now, field)
        _write_checkpoint(disk, store, old if then == _with_field(old, field) else then)
        folder.set_state("undone")
    # So that nobody takes it for one that can be undone.
    disk.rename(folder.path, folder.undone)
    disk.sync_dir(store)


def _marks_of(disk: Disk, index: Path) -> tuple[tuple[MadeFile, ...], int]:
    # The files of an index folder by their headers, and the newest of their end timestamps, ms, 0 for none.
    marks, newest = [], 0
    for name, _ in disk.list_dir(index):
        if name.isdecimal():
            with disk.open_read(index / name) as file:
                header = IndexHeader.unpack(file.pread(HEADER_SIZE, 0).ljust(HEADER_SIZE, b"\0"))
            marks.append(MadeFile(name, header.index_count, header.end_phy_offset))
            newest = max(newest, header.end_timestamp)
    return tuple(marks), newest


def _with_field(checkpoint: bytes, field: bytes) -> bytes:
    # Filled up to what a broker maps.
    data = bytearray(checkpoint.ljust(CHECKPOINT_SIZE, b"\0"))
    data[_INDEX_TIMESTAMP_AT : _INDEX_TIMESTAMP_AT + len(field)] = field
    return bytes(data)


def _write_checkpoint(disk: Disk, store: Path, data: bytes) -> None:
    # It must be the broker's own to write before it has its name.
    path = store / "checkpoint"
    disk.write_atomically(path, data, like=path if disk.exists(path) else store)


def _read(disk: Disk, path: Path) -> bytes | None:
    with MissingOk():
        return disk.read(path)
    return None


@contextmanager
def _undisturbed() -> Iterator[None]:
    # A Ctrl-C in the middle would leave work for the next one. It is over in milliseconds.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
