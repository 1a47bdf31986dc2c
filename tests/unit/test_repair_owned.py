"""Stores of other owners and rights, and stores that look strange to a repair."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from indexd.config import Config
from indexd.errors import CorruptDataError
from indexd.flush.frontier import StoreCheckpoint
from indexd.repair.swap import Manifest, RepairFolder
from indexd.storage.disk import Disk
from support.daemon import compile_kernels, indexd_here
from support.repairing import folders_of, holed_store, index_of, repair, tree, words_of


@pytest.fixture
def config(tmp_path: Path) -> Config:
    compile_kernels()
    return holed_store(tmp_path / "store")


@pytest.fixture
def store(config: Config) -> Path:
    assert config.store.store is not None
    return config.store.store


@pytest.fixture
def narrow() -> Iterator[None]:
    """A umask that leaves others nothing."""
    old = os.umask(0o077)
    yield
    os.umask(old)


def owners(*paths: Path) -> set[tuple[int, int, int]]:
    found = [path.stat() for path in paths]
    return {(status.st_uid, status.st_gid, status.st_mode & 0o777) for status in found}


def given_away(store: Path) -> tuple[int, int]:
    """The store as another user's, if this one may; folders 0750, files 0640."""
    owner = (4321, 4322) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
    for path in (store, *store.rglob("*")):
        os.chown(path, *owner)
        path.chmod(0o750 if path.is_dir() else 0o640)
    return owner


@pytest.mark.usefixtures("narrow")
def test_all_that_a_repair_writes_is_its_stores_own(config: Config, store: Path) -> None:
    owner = given_away(store)
    (store / "checkpoint").chmod(0o604)
    for undo, suffix in (("--yes", ""), ("--undo", ".undone")):
        assert repair(config, "--yes", undo)[0] == 0
        (name,) = folders_of(store)
        assert name.endswith(suffix)
        folder = store / name
        assert owners(store / "checkpoint") == {(*owner, 0o604)}
        assert owners(folder, folder / "index", store / "index") == {(*owner, 0o750)}
        assert owners(folder / "manifest", folder / "checkpoint") == {(*owner, 0o640)}
        assert owners(*(store / "index").iterdir(), *(folder / "index").iterdir()) == {(*owner, 0o640)}


def test_a_manifest_that_this_user_may_not_read(config: Config, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert repair(config, "--yes")[0] == 0
    manifest, opened = store / folders_of(store)[0] / "manifest", os.open

    def forbidden(path: object, *args: int, **more: int) -> int:
        if path == manifest:
            raise PermissionError(13, "Permission denied")
        return opened(path, *args, **more)  # type: ignore[arg-type]  # any path

    monkeypatch.setattr(os, "open", forbidden)
    code, out, errors = repair(config, "--plan")
    assert (code, errors, f"chown -R --reference={store} {manifest.parent}" in out) == (0, "", True)
    code, _, errors = repair(config, "--undo", "--yes")
    assert (code, "may not read its manifest; as root: chown" in errors) == (4, True)


@pytest.mark.parametrize(
    "data",
    [
        StoreCheckpoint(1, 2, 3, 4, 5).pack()[:32],
        bytes(range(16)) + b"\xe8" + bytes(range(100)),
        b"short",
        b"",
        bytes(range(16)) + b"\xff" * 5000,
    ],
)
def test_an_undo_puts_back_a_checkpoint_that_is_none(config: Config, store: Path, data: bytes) -> None:
    (store / "checkpoint").write_bytes(data)
    before = index_of(store)
    assert repair(config, "--yes")[0] == 0
    assert repair(config, "--yes", "--undo")[0] == 0
    assert (store / "checkpoint").read_bytes() == data
    assert index_of(store) == before


def test_a_checkpoint_that_is_a_link_is_not_replaced(config: Config, store: Path) -> None:
    (store / "checkpoint").rename(store / "elsewhere")
    (store / "checkpoint").symlink_to("elsewhere")
    stamps = tree(store)
    for words in (("--yes",), ("--plan",), ("--undo", "--yes")):
        code, _, errors = repair(config, *words)
        assert (code, errors.count("\n"), "is a symbolic link" in errors) == (3, 1, True)
    assert tree(store) == stamps


def test_no_checkpoint_is_promised_where_none_is_made(config: Config, store: Path) -> None:
    assert repair(config, "--yes")[0] == 0
    (store / "checkpoint").unlink()
    for words in (("--plan",), ("--yes",)):
        code, out, _ = repair(config, *words)
        assert (code, "there is no checkpoint" in out) == (0, False)
    assert not (store / "checkpoint").exists()
    (store / "index" / min(index_of(store))).unlink()
    code, out, _ = repair(config, "--plan")
    assert (code, "there is no checkpoint: a repair makes one" in out) == (1, True)


@pytest.mark.parametrize("is_zeros", [False, True])
def test_an_index_beside_a_log_that_is_not_there(config: Config, store: Path, is_zeros: bool) -> None:
    for path in (store / "commitlog").iterdir():
        if is_zeros:
            path.write_bytes(bytes(config.store.segment_size))
        else:
            path.unlink()
    before = index_of(store)
    for words in (("--yes",), ("--plan",), ("--yes", "--all")):
        code, out, errors = repair(config, *words)
        assert (code, out, errors.count("\n")) == (3, "", 1)
        assert "the log holds no message, and the index has" in errors
        assert f"is the log's disk mounted?; mount it at {store / 'commitlog'}" in errors
    assert index_of(store) == before
    done = indexd_here("audit", *words_of(config), "--samples", 0)
    assert (done.returncode, "is the log's disk mounted?" in done.stdout.splitlines()[0]) == (1, True)
    assert "1970" not in done.stdout
    assert "crash:" not in done.stdout


def test_a_log_without_a_message_and_no_index(config: Config, store: Path) -> None:
    for path in (*(store / "commitlog").iterdir(), *(store / "index").iterdir()):
        path.unlink()
    (store / "checkpoint").unlink()
    (store / "index" / "notes.txt").write_text("mine")
    code, out, _ = repair(config, "--yes")
    assert (code, "1970" in out) == (0, False)


_OLD = "indexd-repair-20250101T000000Z"


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


def test_nothing_is_removed_before_somebody_has_said_yes(
    config: Config, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RepairFolder.make(Disk(), store, 0).path
    stamps = tree(store)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("indexd.cli.broker_index._says_yes", lambda _: False)
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


def test_a_manifest_of_other_bytes(config: Config, store: Path) -> None:
    assert repair(config, "--yes")[0] == 0
    (store / folders_of(store)[0] / "manifest").write_bytes(b"[]")
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
def test_a_manifest_with_a_wrong_field(field: str, value: Any) -> None:
    row = json.loads(Manifest.first().pack())
    assert Manifest.unpack(json.dumps(row).encode(), Path("manifest")) == Manifest.first()
    with pytest.raises(CorruptDataError, match="is no manifest of a repair"):
        Manifest.unpack(json.dumps({**row, field: value}).encode(), Path("manifest"))
    with pytest.raises(CorruptDataError, match="is no manifest of a repair"):
        Manifest.unpack(
            json.dumps({name: value for name, value in row.items() if name != field}).encode()[:-1], Path("x")
        )


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
