"""``indexd repair`` as it is typed: what it does to a store, what it says, and the way back."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from indexd.config import Config
from indexd.errors import DiskError
from indexd.flush.frontier import StoreCheckpoint
from indexd.repair import run, swap
from support.auditing import lost_keys
from support.daemon import compile_kernels, indexd_here
from support.repairing import (
    INDEX_NUM,
    assert_repaired,
    folders_of,
    holed_store,
    index_of,
    index_timestamp,
    newest_end,
    repair,
    tree,
    words_of,
)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    compile_kernels()
    return holed_store(tmp_path / "store")


@pytest.fixture
def store(config: Config) -> Path:
    assert config.store.store is not None
    return config.store.store


def rows(config: Config, *more: object) -> list[dict[str, Any]]:
    return [json.loads(line) for line in repair(config, "--json", *more)[1].splitlines()]


def test_a_repair_from_its_plan_to_its_undo(config: Config, store: Path) -> None:
    before, checkpoint, stamps = index_of(store), (store / "checkpoint").read_bytes(), tree(store)
    assert lost_keys(config, "5.4")
    code, out, errors = repair(config, "--plan")
    assert (code, errors) == (1, "")
    assert "% of" in out.splitlines()[0]
    assert "about 1 s" in out.splitlines()[-1]
    assert tree(store) == stamps

    code, out, errors = repair(config, "--yes")
    assert (code, errors) == (0, ""), errors
    assert "checked against the log" in out
    assert_repaired(config)
    (name,) = folders_of(store)
    assert name in out
    written = (store / "checkpoint").read_bytes()
    assert (written[:16], written[24:]) == (checkpoint[:16], checkpoint[24:])
    assert {path.name: path.read_bytes() for path in (store / name / "index").iterdir()} == before
    assert (store / name / "checkpoint").read_bytes() == checkpoint
    # Full files that were sound are the same files; the one that a broker will write to is not.
    kept = [path for path in sorted((store / name / "index").iterdir()) if (store / "index" / path.name).exists()]
    assert len(kept) > 2
    assert [path.samefile(store / "index" / path.name) for path in kept] == [True] * (len(kept) - 1) + [False]

    stamps = tree(store)
    code, out, _ = repair(config, "--yes")
    assert (code, out.splitlines()[-1]) == (0, "nothing to do")
    assert "100.00 %" in out
    assert repair(config, "--plan")[0] == 0
    assert indexd_here("audit", *words_of(config), "--samples", 0).returncode == 0
    assert tree(store) == stamps

    code, out, _ = repair(config, "--undo", "--yes")
    assert code == 0
    assert "the old index is back" in out
    assert index_of(store) == before
    assert (store / "checkpoint").read_bytes() == checkpoint
    assert folders_of(store) == [name + ".undone"]
    code, _, errors = repair(config, "--undo", "--yes")
    assert (code, "can be undone" in errors) == (3, True)


def test_what_an_unclean_start_would_throw_away(config: Config, store: Path) -> None:
    assert repair(config, "--yes")[0] == 0
    checkpoint = (store / "checkpoint").read_bytes()
    last = max(path.name for path in (store / "index").iterdir())
    (store / "checkpoint").write_bytes(StoreCheckpoint(1, 2, 3, 4, 5).pack())
    assert repair(config, "--plan")[0] == 0  # it was stopped cleanly
    (store / "abort").write_text("1")
    code, out, _ = repair(config, "--plan")
    assert (code, "the broker ended without a clean stop" in out) == (1, True)
    code, out, _ = repair(config, "--yes")
    assert (code, "no new file was needed" in out) == (0, True)
    assert (store / "checkpoint").read_bytes() == checkpoint
    assert_repaired(config)
    old = store / folders_of(store)[-1] / "index"
    assert [path.name for path in sorted(old.iterdir()) if not path.samefile(store / "index" / path.name)] == [last]
    assert repair(config, "--plan")[0] == 0


def test_what_an_interrupted_repair_has_left(config: Config, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise DiskError("write", store / "checkpoint", OSError(errno.EIO, "Input/output error"))

    with monkeypatch.context() as patch:
        patch.setattr(swap, "_write_checkpoint", broken)
        code, _, errors = repair(config, "--yes")
        assert (code, "run indexd repair again before the broker starts" in errors) == (70, True)
    code, out, _ = repair(config, "--plan")
    assert (code, "was interrupted: indexd repair removes or finishes it" in out) == (1, True)
    code, out, _ = repair(config, "--yes")
    assert (code, "the repair that was interrupted is done" in out) == (0, True)
    assert_repaired(config)


def test_json(config: Config, store: Path) -> None:
    (plan,) = rows(config, "--plan")
    assert (plan["kind"], plan["needed"]) == ("plan", True)
    plan, done = rows(config, "--yes")
    assert (plan["kind"], done["kind"], done["repaired"], done["leftRanges"]) == ("plan", "repair", True, 0)
    assert done["folder"] == str(store / folders_of(store)[0])
    assert done["indexMsgTimestamp"] == index_timestamp(store)
    assert set(done["builtFiles"]) <= set(index_of(store))
    (undone,) = rows(config, "--undo", "--yes")
    assert (undone["kind"], undone["folder"]) == ("undo", done["folder"] + ".undone")


def test_a_store_without_an_index_or_a_checkpoint_or_a_lock_file(config: Config, store: Path) -> None:
    for path in (store / "index").iterdir():
        path.unlink()
    (store / "index").rmdir()
    (store / "checkpoint").unlink()
    (store / "lock").unlink()
    code, out, _ = repair(config, "--plan")
    assert code == 1
    assert not (store / "index").exists()
    assert not (store / "lock").exists()
    code, out, _ = repair(config, "--yes")
    assert code == 0
    assert "there was no lock file" in out
    assert "there is no checkpoint" in out
    assert_repaired(config)
    assert (store / "checkpoint").read_bytes()[:16] == bytes(16)
    assert repair(config, "--undo", "--yes")[0] == 0
    assert index_of(store) == {}


def test_foreign_files_go_with_the_old_index(config: Config, store: Path) -> None:
    (store / "index" / "20260101000000009").write_bytes(b"short")
    (store / "index" / "notes.txt").write_bytes(b"mine")
    (store / "index" / "folder").mkdir()
    assert repair(config, "--yes")[0] == 0
    assert_repaired(config)
    old = store / folders_of(store)[0] / "index"
    assert (old / "notes.txt").read_bytes() == b"mine"
    assert (old / "folder").is_dir()
    assert all(path.is_file() for path in (store / "index").iterdir())
    assert "notes.txt" not in index_of(store)


def test_time_for_the_newest_part(config: Config, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A second hole, and a clock on which all parts but one take ten minutes.
    names = sorted(index_of(store))
    (store / "index" / names[2]).unlink()
    (plan,) = rows(config, "--plan", "--time-limit", "10m")
    build, seconds = run.build_range, [0.0]

    def built(*args: Any) -> Any:
        seconds[0] += 600 / (len(plan["ranges"]) - 1)
        return build(*args)

    monkeypatch.setattr(run, "build_range", built)
    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: seconds[0], time=time.time))
    lost = lost_keys(config, "5.4")
    code, out, _ = repair(config, "--yes", "--time-limit", "10m")
    assert code == 1
    assert "1 older part not reached in time" in out
    left = lost_keys(config, "5.4")
    assert 0 < left.total() < lost.total()
    assert max(left) < min(lost) + (max(lost) - min(lost)) / 2  # the newer hole is mended
    assert index_timestamp(store) == newest_end(store / "index")
    monkeypatch.undo()
    assert repair(config, "--yes")[0] == 0
    assert_repaired(config)
    assert len(folders_of(store)) == 2
    assert "3 repairs can be undone, the newest first" in repair(config, "--yes", "--all")[1]


def test_an_undo_says_what_the_broker_has_indexed_since(config: Config, store: Path) -> None:
    assert repair(config, "--yes")[0] == 0
    last = max((store / "index").iterdir())
    data = bytearray(last.read_bytes())
    data[36:40] = (int.from_bytes(data[36:40], "big") + 7).to_bytes(4, "big")
    last.write_bytes(data)
    code, out, _ = repair(config, "--undo", "--yes")
    assert code == 0
    assert "the broker has indexed 7 keys since" in out


def test_kept_files_keep_their_owner_and_rights(config: Config, store: Path) -> None:
    # One that root has put back, and a foreign one that sorts first, with fewer rights than all others.
    names = sorted(index_of(store))
    (store / "index" / ".nfs0001").write_text("x")
    for name in (".nfs0001", names[0]):
        (store / "index" / name).chmod(0o600)
    (store / "index" / names[1]).unlink()
    before = {path.name: (path.stat().st_mode, path.stat().st_uid) for path in (store / "index").iterdir()}
    if os.geteuid() == 0:
        for path in (store, *store.rglob("*")):
            os.chown(path, 4321, 4321)
        os.chown(store / "index" / names[0], 0, 0)
        before = {path.name: (path.stat().st_mode, path.stat().st_uid) for path in (store / "index").iterdir()}
    assert repair(config, "--yes")[0] == 0
    after = {path.name: (path.stat().st_mode, path.stat().st_uid) for path in (store / "index").iterdir()}
    assert after[names[0]] == before[names[0]]
    assert {status for name, status in after.items() if name != names[0]} == {before[names[2]]}
    assert repair(config, "--undo", "--yes")[0] == 0
    assert before == {path.name: (path.stat().st_mode, path.stat().st_uid) for path in (store / "index").iterdir()}


def test_the_only_index_file_cut_short_is_a_finding_where_the_sizes_are_given(config: Config, store: Path) -> None:
    names = sorted(index_of(store))
    for name in names[1:]:
        (store / "index" / name).unlink()
    data = (store / "index" / names[0]).read_bytes()
    for size in (len(data) + 20, len(data)):
        (store / "index" / names[0]).write_bytes(data.ljust(size, b"\0"))
        sizes = words_of(config)[:-1]
        done = indexd_here("repair", *sizes, 3 * INDEX_NUM if size == len(data) else INDEX_NUM, "--plan")
        assert done.returncode == (1 if size == len(data) else 3), done.stderr
    assert "so these are not the broker's numbers" in indexd_here("audit", *sizes, INDEX_NUM - 1).stderr
    (store / "index" / names[0]).write_bytes(data[:100])
    done = indexd_here("audit", *words_of(config), "--samples", 0)
    assert (done.returncode, "file-size" in done.stdout) == (1, True)
    assert repair(config, "--yes")[0] == 0
    assert_repaired(config)
