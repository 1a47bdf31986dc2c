"""Folders and manifests that no repair has left so: named, and never touched; and what is not asked for yet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from indexd.config import Config
from indexd.repair.swap import Manifest, RepairFolder
from indexd.storage.disk import Disk
from support.daemon import compile_kernels
from support.repairing import folders_of, holed_store, index_of, repair, tree

_OLD = "indexd-repair-20250101T000000Z"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    compile_kernels()
    return holed_store(tmp_path / "store")


@pytest.fixture
def store(config: Config) -> Path:
    assert config.store.store is not None
    return config.store.store


def plant(store: Path, *names: str) -> Path:
    folder = store / _OLD
    folder.mkdir()
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("precious")
    return folder


def test_the_only_backup_is_kept_when_its_manifest_is_lost(config: Config, store: Path) -> None:
    before = index_of(store)
    assert repair(config, "--yes")[0] == 0
    (name,) = folders_of(store)
    (store / name / "manifest").unlink()
    code, out, _ = repair(config, "--yes")
    assert (code, f"{name} is left as it is: it has no manifest" in out) == (0, True)
    assert {path.name: path.read_bytes() for path in (store / name / "index").iterdir()} == before
    code, _, errors = repair(config, "--undo", "--yes")
    assert (code, f"move {store / name} away" in errors) == (4, True)


@pytest.mark.parametrize("names", [("my-notes", "index/keep"), ("manifest.tmp",), ("index/20260101000000000",)])
def test_a_folder_of_somebody_else_is_named_and_left(config: Config, store: Path, names: tuple[str, ...]) -> None:
    stamps = tree(plant(store, *names))
    code, out, _ = repair(config, "--plan")
    assert (code, f"{_OLD} is left as it is" in out) == (1, True)
    code, out, _ = repair(config, "--yes")
    assert (code, f"{_OLD} is left as it is" in out) == (0, True)
    assert tree(store / _OLD) == stamps
    assert repair(config, "--plan")[0] == 0
    assert repair(config, "--undo", "--yes")[0] == 0


@pytest.mark.parametrize("is_torn", [False, True])
def test_a_folder_that_has_just_been_made_is_removed(config: Config, store: Path, *, is_torn: bool) -> None:
    folder = plant(store)
    if is_torn:
        (folder / "manifest.0123456789abcdef.tmp").write_bytes(Manifest.first().pack()[:20] + bytes(7))
    assert repair(config, "--yes")[0] == 0
    assert not folder.exists()


def test_a_folder_with_a_subfolder_is_left(config: Config, store: Path) -> None:
    folder = RepairFolder.make(Disk(), store, 0).path
    (folder / "index" / "sub").mkdir()
    code, out, errors = repair(config, "--yes")
    assert (code, "no repair has made index/sub in it" in out, errors) == (0, True, "")
    assert (folder / "index" / "sub").is_dir()


def test_nothing_is_removed_before_somebody_has_said_yes(
    config: Config, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RepairFolder.make(Disk(), store, 0).path
    stamps = tree(store)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("indexd.cli.repair._says_yes", lambda _: False)
    code, out, _ = repair(config)
    assert (code, f"{folder.name} is of a repair that was interrupted" in out) == (1, True)
    assert tree(store) == stamps
    code, out, _ = repair(config, "--yes")
    assert (code, f"{folder.name} is removed" in out) == (0, True)
    assert not folder.exists()


def assert_refused(config: Config, store: Path) -> None:
    """--undo says the way out, a repair goes on; nothing in the folder is touched."""
    (name,) = folders_of(store)
    stamps, index = tree(store / name), index_of(store)
    code, _, errors = repair(config, "--undo", "--yes")
    assert (code, errors.count("\n"), f"move {store / name} away" in errors) == (4, 1, True), errors
    code, out, errors = repair(config, "--yes")
    assert (code, errors, "is no manifest of a repair" in out) == (0, "", True)
    assert (tree(store / name), index_of(store)) == (stamps, index)


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"null", b"[]", b'{"format": 1}', b'{"format": 2}', b"\xff\xfe", b"[" * 100_000]
)
def test_a_manifest_of_other_bytes(config: Config, store: Path, data: bytes) -> None:
    assert repair(config, "--yes")[0] == 0
    (store / folders_of(store)[0] / "manifest").write_bytes(data)
    assert_refused(config, store)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("state", "bogus"),
        ("new_inode", "x"),
        ("files", [1]),
        ("files", [{"name": "a", "index_count": "z", "end_phy_offset": 1}]),
        ("old_index_timestamp", "abc"),
        ("old_index_timestamp", 1 << 70),
        ("old_inode", None),
        ("more", 1),
    ],
)
def test_a_manifest_with_a_wrong_field(config: Config, store: Path, field: str, value: Any) -> None:
    assert repair(config, "--yes")[0] == 0
    path = store / folders_of(store)[0] / "manifest"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), field: value}))
    assert_refused(config, store)


def test_an_old_index_that_is_not_there_any_more(config: Config, store: Path) -> None:
    assert repair(config, "--yes")[0] == 0
    (name,) = folders_of(store)
    (store / name / "index").rename(store / "moved")
    stamps = tree(store)
    code, _, errors = repair(config, "--undo", "--yes")
    assert (code, "the old index is not in" in errors) == (3, True)
    assert tree(store) == stamps
    (store / "moved").rename(store / name / "index")
    assert repair(config, "--undo", "--yes")[0] == 0
