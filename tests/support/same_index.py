"""Whether two directories hold the same outputs, and where they part."""

from __future__ import annotations

from typing import TYPE_CHECKING

from indexd.consumequeue.format import UNIT, Unit
from indexd.storage.names import is_index_name

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path


def index_files(root: Path) -> list[Path]:
    """The index files of a data directory or a store, oldest first."""
    directory = root / "index"
    return sorted(path for path in directory.iterdir() if is_index_name(path.name)) if directory.exists() else []


def assert_same_index(a: Path, b: Path, *, log_begin: int = 0) -> None:
    """All that two directories hold of what is built from a log is the same, byte for byte; index files by number.

    One of the two may be a store, which has no sparse indexes. ``b`` may still hold queue files and segments of
    messages before ``log_begin``.
    """
    for name, is_old in (("consumequeue", _is_old_queue_file), ("sparse", _is_old_sparse_index)):
        if (a / name).exists() and (b / name).exists():
            assert_same_tree(a / name, b / name, {path for path in _files(b / name) if is_old(path, log_begin)})
    files_a, files_b = index_files(a), index_files(b)
    for path_a, path_b in zip(files_a, files_b, strict=False):
        _assert_same(path_a, path_b)
    assert len(files_a) == len(files_b), f"{len(files_a)} index files in {a}, {len(files_b)} in {b}"


def _assert_same(a: Path, b: Path) -> None:
    data = [path.read_bytes() for path in (a, b)]
    if data[0] != data[1]:
        at = next((at for at, pair in enumerate(zip(*data, strict=False)) if pair[0] != pair[1]), "the end")
        raise AssertionError(f"{a} and {b} differ from byte {at} on, of {len(data[0])} and {len(data[1])} bytes")


def assert_same_tree(a: Path, b: Path, only_b: Collection[Path] = ()) -> None:
    """The same files of the same bytes; folders without files do not count. ``only_b`` may be in ``b`` alone."""
    files = [{path.relative_to(root): path for path in _files(root)} for root in (a, b)]
    for path in {path.relative_to(b) for path in only_b} - files[0].keys():
        del files[1][path]
    only = [sorted(map(str, one.keys() - other.keys())) for one, other in (files, files[::-1])]
    assert only == [[], []], f"only in {a}: {only[0][:9]}; only in {b}: {only[1][:9]}"
    for name in sorted(files[0]):
        _assert_same(files[0][name], files[1][name])


def _files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


def _is_old_sparse_index(path: Path, log_begin: int) -> bool:
    return int(path.name.partition(".")[0]) < log_begin


def old_queue_files(root: Path, log_begin: int) -> list[Path]:
    """The queue files of a store that only point before ``log_begin``, but for the last of each queue."""
    return [path for path in _files(root / "consumequeue") if _is_old_queue_file(path, log_begin)]


def _is_old_queue_file(path: Path, log_begin: int) -> bool:
    # A queue keeps its last file.
    units = (Unit(*row) for row in UNIT.iter_unpack(path.read_bytes()))
    is_last = path == max(path.parent.iterdir())
    return not is_last and all(unit.phy_offset < log_begin for unit in units)
