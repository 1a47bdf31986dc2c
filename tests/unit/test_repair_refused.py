"""What ``indexd repair`` refuses, or gives up: nothing of the store is changed then."""

from __future__ import annotations

import errno
import os
import pty
from pathlib import Path
from typing import Any

import pytest

from indexd.config import Config
from indexd.errors import CorruptDataError, DiskError
from indexd.repair import run
from indexd.storage import disk as disk_module
from indexd.storage.lock import StoreLock
from support.daemon import compile_kernels
from support.fake_broker import stand_in
from support.repairing import (
    folders_of,
    holed_store,
    index_of,
    repair,
    tree,
)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    compile_kernels()
    return holed_store(tmp_path / "store")


@pytest.fixture
def store(config: Config) -> Path:
    assert config.store.store is not None
    return config.store.store


@pytest.mark.parametrize("is_loading", [True, False])
def test_beside_a_broker(config: Config, store: Path, is_loading: bool) -> None:
    stamps = tree(store)
    with stand_in(store / "lock") as broker:
        if not is_loading:
            broker.start()
        code, _, errors = repair(config, "--yes")
        assert (code, errors.count("\n")) == (3, 1)
        assert f"a broker, pid {broker.pid}," in errors
        assert ("loading" in errors) == is_loading
        assert repair(config, "--undo", "--yes")[0] == 3
        code, out, _ = repair(config, "--plan")
        assert code == 1
        assert "it has to be stopped" in out
    assert tree(store) == stamps


def test_beside_another_repair(config: Config, store: Path) -> None:
    lock = StoreLock(store / "lock")
    assert lock.take()
    code, _, errors = repair(config, "--yes")
    lock.release()
    assert (code, "another indexd repair" in errors) == (5, True)


def test_a_broker_that_begins_to_load_meanwhile(config: Config, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, check = index_of(store), run.check_built
    brokers = []

    def checked(*args: Any) -> None:
        check(*args)
        brokers.append(stand_in(store / "lock"))
        brokers[-1].__enter__()

    monkeypatch.setattr(run, "check_built", checked)
    code, _, errors = repair(config, "--yes")
    for broker in brokers:
        broker.__exit__(None, None, None)
    assert (code, "has begun to load" in errors) == (3, True)
    assert (index_of(store), folders_of(store)) == (before, [])


def test_an_index_that_somebody_changes_meanwhile(config: Config, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "check_built", lambda *_: (store / "index" / "20270101000000000").write_bytes(b""))
    code, _, errors = repair(config, "--yes")
    assert (code, "was changed by somebody else" in errors) == (3, True)
    assert folders_of(store) == []


def test_what_does_not_hold_is_not_exchanged(config: Config, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise CorruptDataError("it does not hold")

    stamps = tree(store / "index")
    monkeypatch.setattr(run, "check_built", fail)
    assert repair(config, "--yes")[0] == 4
    assert (tree(store / "index"), folders_of(store)) == (stamps, [])


def test_a_disk_without_room(config: Config, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stamps = tree(store)
    monkeypatch.setattr(disk_module.Disk, "free", lambda *_: 1000)
    code, _, errors = repair(config, "--yes")
    assert (code, "1,000 are free; free space" in errors) == (3, True)
    assert tree(store) == stamps


def test_a_link_instead_of_an_index(config: Config, store: Path) -> None:
    (store / "index").rename(store.parent / "elsewhere")
    (store / "index").symlink_to(store.parent / "elsewhere")
    code, _, errors = repair(config, "--yes")
    assert (code, "is a symbolic link" in errors) == (3, True)


@pytest.mark.parametrize("name", ["index", "checkpoint", "lock"])
def test_a_file_where_a_folder_is_to_be_or_the_other_way_round(config: Config, store: Path, name: str) -> None:
    (store / name).rename(store / "moved")
    if name == "index":
        (store / name).write_text("x")
    else:
        (store / name).mkdir()
    stamps = tree(store)
    for words in (["--yes"], ["--plan"], ["--undo", "--yes"]):
        if words == ["--plan"] and name == "lock":
            continue  # it only looks
        code, _, errors = repair(config, *words)
        assert (code, "move" in errors or "cannot be told" in errors) == (3, True), errors
    assert tree(store) == stamps


def test_a_store_that_may_only_be_read(config: Config, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(lock: StoreLock) -> bool:
        raise DiskError("lock", store / "lock", OSError(errno.EROFS, "Read-only file system"))

    monkeypatch.setattr(StoreLock, "take", read_only)
    code, _, errors = repair(config, "--yes")
    assert (code, "remount the file system read-write, or repair a copy" in errors) == (3, True)
    assert "--data" not in errors


def test_an_undo_without_room(config: Config, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert repair(config, "--yes")[0] == 0
    stamps = tree(store)
    monkeypatch.setattr(disk_module.Disk, "free", lambda *_: 1000)
    code, _, errors = repair(config, "--undo", "--yes")
    assert (code, "1,000 are free; free space" in errors) == (3, True)
    assert tree(store) == stamps


def test_no_time(config: Config, store: Path) -> None:
    stamps = tree(store)
    code, out, _ = repair(config, "--yes", "--time-limit", "1ms")
    assert (code, out.splitlines()[-1]) == (1, "nothing was changed: there is not even time for the newest part")
    assert tree(store / "index") == {path: stamp for path, stamp in stamps.items() if "/index/" in path}
    assert folders_of(store) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "say --yes, or --plan"),
        (("--undo",), "say --yes, or --plan"),
        (("--plan", "--undo"), "not allowed with"),
        (("--undo", "--yes", "--all"), "are for a repair"),
        (("--yes", "--time-limit", "soon"), "time-limit: 'soon' is not a duration"),
        (("--yes", "--time-limit", "0"), "'0' is not 0.001 or more"),
    ],
)
def test_wrong_words(config: Config, words: tuple[str, ...], said: str) -> None:
    code, _, errors = repair(config, *words)
    assert (code, errors.count("\n")) == (2, 1)
    assert said in errors


@pytest.mark.parametrize("answer", ["n", "y"])
def test_a_question_on_a_terminal(config: Config, store: Path, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    ours, theirs = pty.openpty()
    before = index_of(store)
    with os.fdopen(theirs, encoding="utf-8", closefd=True) as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        os.write(ours, f"{answer}\n".encode())
        code, out, errors = repair(config)
    os.close(ours)
    assert "repair it now? [y/N]" in errors
    assert code == (0 if answer == "y" else 1)
    assert (index_of(store) == before) == (answer == "n")
    assert ("nothing was changed: as you say" in out) == (answer == "n")
