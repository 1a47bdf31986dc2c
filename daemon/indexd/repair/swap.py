"""The exchange of the index and what follows it, forwards and backwards; each step may be the last before a crash.

The new index changes places with the old one in one system call. Then the checkpoint's indexMsgTimestamp is raised: an
unclean start of the broker throws away every index file that ends behind it (spec rocketmq-store 1.4). Between the two
the store has the repaired index and a checkpoint that does not vouch for it yet; whoever comes next finishes it.
"""

from __future__ import annotations

import errno
import signal
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from indexd.errors import CorruptDataError, DiskError, UnsafeStoreError
from indexd.flush.checkpoint import CHECKPOINT_SIZE, StoreCheckpoint
from indexd.index.format import HEADER_SIZE, IndexHeader
from indexd.repair.folder import MadeFile, Manifest, RepairFolder
from indexd.storage.disk import Disk

Where = Literal["before", "swapped", "elsewhere"]
_INDEX_TIMESTAMP_AT, _FIELD = 16, struct.Struct(">q")
_CANNOT_EXCHANGE = {
    errno.EINVAL: "this file system cannot exchange two directories",
    errno.ENOSYS: "this system cannot exchange two directories",
    errno.EBUSY: "STORE/index is a mount point",
    errno.EXDEV: "STORE/index is on another file system than STORE",
}


@dataclass(frozen=True, slots=True)
class Undone:
    """``folder`` as it is called now; ``entries`` were put by the broker since the repair and went with its index."""

    folder: Path
    entries: int


@dataclass(frozen=True, slots=True)
class ToUndo:
    """``entries`` were put by the broker since. ``is_back``: of an undo that was interrupted behind the exchange."""

    folder: RepairFolder
    manifest: Manifest
    entries: int
    is_back: bool


def marks_of(disk: Disk, index: Path) -> tuple[tuple[MadeFile, ...], int]:
    """The files of an index folder by their headers, and the newest of their end timestamps, ms, 0 for none."""
    marks, newest = [], 0
    for name, _ in disk.list_dir(index):
        if name.isdecimal():
            with disk.open_read(index / name) as file:
                header = IndexHeader.unpack(file.pread(HEADER_SIZE, 0).ljust(HEADER_SIZE, b"\0"))
            marks.append(MadeFile(name, header.index_count, header.end_phy_offset))
            newest = max(newest, header.end_timestamp)
    return tuple(marks), newest


def index_timestamp_of(disk: Disk, checkpoint: Path) -> int | None:
    """The indexMsgTimestamp of a checkpoint, ms; None where there is none, or too short a one."""
    data = _read(disk, checkpoint)
    return None if data is None else _unpacked(data, checkpoint)


def swap(disk: Disk, store: Path, folder: RepairFolder, kept: tuple[str, ...], left_out: tuple[str, ...]) -> Manifest:
    """Put ``folder.index``, which is durable, in the place of STORE/index. Raises UnsafeStoreError, DiskError.

    Interrupted anywhere, ``settle.settle`` goes on from there. Signals of a terminal wait until it is over.
    """
    marks, newest = marks_of(disk, folder.index)
    old = _read(disk, store / "checkpoint")
    if old is not None:
        folder.keep_checkpoint(old)
    manifest = Manifest(
        format=1,
        state="ready",
        new_inode=disk.stamp(folder.index).inode,
        old_inode=disk.stamp(store / "index").inode,
        index_timestamp=newest,
        old_index_timestamp=None if old is None else _unpacked(old, store / "checkpoint"),
        files=marks,
        kept=kept,
        left_out=left_out,
    )
    with _undisturbed():
        folder.write(manifest)
        _exchange(disk, store, folder)
        return finish(disk, store, folder, manifest)


def to_undo(disk: Disk, store: Path) -> ToUndo:
    """The newest repair; only looks. What an interrupted one has left that touched nothing counts for none.

    UnsafeStoreError if there is none, or if the index that is there now is not the one that it made; CorruptDataError
    for a folder that cannot be judged.
    """
    for folder in reversed(RepairFolder.all_of(disk, store)):
        manifest = folder.read()
        where = where_is(disk, store, manifest) if manifest.state != "building" else "before"
        if where == "before" and manifest.state in ("building", "ready"):
            continue
        if where != "before" and manifest.state == "undone":
            continue
        if where == "before" and manifest.state in ("undoing", "undone"):
            return ToUndo(folder, manifest, 0, is_back=True)
        if where != "swapped":
            raise UnsafeStoreError(
                f"{store / 'index'} is not the index that the repair of {folder.path.name} made",
                f"to have the old one back nevertheless, move {folder.path / 'index'} there by hand",
            )
        if not disk.exists(folder.index) or disk.stamp(folder.index).inode != manifest.old_inode:
            raise UnsafeStoreError(
                f"the old index is not in {folder.path} any more: {folder.index} is missing, or another folder",
                f"move it back there, or move {folder.path} away",
            )
        before = {mark.name: mark.index_count for mark in manifest.files}
        marks, _ = marks_of(disk, store / "index")
        entries = sum(max(mark.index_count - before.get(mark.name, 1), 0) for mark in marks)
        return ToUndo(folder, manifest, entries, is_back=False)
    raise UnsafeStoreError(f"no repair of {store} can be undone: there is no folder of one", "nothing to do")


def undo(disk: Disk, store: Path) -> Undone:
    """Exchange the two again, and set the checkpoint's indexMsgTimestamp as it was. Raises as ``to_undo`` does."""
    found = to_undo(disk, store)
    folder, manifest = found.folder, found.manifest
    with _undisturbed():
        if not found.is_back:
            folder.set_state("undoing")
            try:
                _exchange(disk, store, folder)
            except UnsafeStoreError:
                folder.set_state("done")
                raise
        finish_undo(disk, store, folder, manifest)
    return Undone(folder.names[1], found.entries)


def where_is(disk: Disk, store: Path, manifest: Manifest) -> Where:
    """Which of its two directories STORE/index is, by its inode."""
    try:
        inode = disk.stamp(store / "index").inode
    except DiskError as error:
        if not error.is_missing:
            raise
        return "elsewhere"
    if inode == manifest.new_inode:
        return "swapped"
    return "before" if inode == manifest.old_inode else "elsewhere"


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


def finish(disk: Disk, store: Path, folder: RepairFolder, manifest: Manifest) -> Manifest:
    """What follows the exchange: the checkpoint vouches for the index that is there now."""
    # After a crash, too: of an exchange that is seen nobody knows whether it is durable.
    disk.sync_dir(store)
    disk.sync_dir(folder.path)
    now = index_timestamp_of(disk, store / "checkpoint")
    if now is None or now < manifest.index_timestamp:
        _set_index_timestamp(disk, store, manifest.index_timestamp)
    return folder.set_state("done")


def finish_undo(disk: Disk, store: Path, folder: RepairFolder, manifest: Manifest) -> None:
    """What follows the exchange of an undo."""
    if manifest.state != "undone":
        disk.sync_dir(store)
        disk.sync_dir(folder.path)
        _put_back_index_timestamp(disk, store, folder, manifest)
        folder.set_state("undone")
    folder.mark_undone()


def _put_back_index_timestamp(disk: Disk, store: Path, folder: RepairFolder, manifest: Manifest) -> None:
    # By its bytes: they need not be a time. If nobody else has changed the checkpoint, its length is the old one, too.
    now, old = _read(disk, store / "checkpoint") or b"", _read(disk, folder.checkpoint)
    if old is None:
        old = _with_field(b"", _FIELD.pack(manifest.old_index_timestamp or 0))
    field = old.ljust(CHECKPOINT_SIZE, b"\0")[_INDEX_TIMESTAMP_AT:][: _FIELD.size]
    then = _with_field(now, field)
    _write_checkpoint(disk, store, old if then == _with_field(old, field) else then)


def _set_index_timestamp(disk: Disk, store: Path, value: int) -> None:
    data = _read(disk, store / "checkpoint") or b""
    _write_checkpoint(disk, store, _with_field(data, _FIELD.pack(value)))


def _with_field(checkpoint: bytes, field: bytes) -> bytes:
    # Filled up to what a broker maps.
    data = bytearray(checkpoint.ljust(CHECKPOINT_SIZE, b"\0"))
    data[_INDEX_TIMESTAMP_AT : _INDEX_TIMESTAMP_AT + len(field)] = field
    return bytes(data)


def _write_checkpoint(disk: Disk, store: Path, data: bytes) -> None:
    # It must be the broker's own to write before it has its name.
    path = store / "checkpoint"
    like = path if disk.exists(path) else store
    disk.write_atomically(path, data, like=like)


def _read(disk: Disk, path: Path) -> bytes | None:
    try:
        return disk.read(path)
    except DiskError as error:
        if not error.is_missing:
            raise
        return None


def _unpacked(data: bytes, path: Path) -> int | None:
    try:
        return StoreCheckpoint.unpack(data, path).index_msg_timestamp
    except CorruptDataError:
        return None


@contextmanager
def _undisturbed() -> Iterator[None]:
    # A Ctrl-C in the middle would leave work for the next one. It is over in milliseconds.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
