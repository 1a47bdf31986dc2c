"""``indexd repair`` as it is typed: what it does and says, whose it is, what it refuses, and the way back."""

from __future__ import annotations

import errno
import json
import os
import pty
import shutil
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from indexd.config import Config
from indexd.errors import CorruptDataError, DiskError
from indexd.flush.frontier import StoreCheckpoint
from indexd.repair import run
from indexd.repair.swap import Manifest, RepairFolder
from indexd.storage.disk import Disk
from indexd.storage.lock import StoreLock
from support.auditing import lost_keys
from support.daemon import compile_kernels, indexd_here
from support.fake_broker import stand_in
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


def expect(config: Config, *words: object, code: int, text: str) -> None:
    """What the command ends with, and says; an error in one line."""
    found, out, errors = repair(config, *words)
    assert (found, text in out + errors) == (code, True), (found, out, errors)
    assert errors.count("\n") == (code > 1)


def rows(config: Config, *more: object) -> list[dict[str, Any]]:
    return [json.loads(line) for line in repair(config, "--json", *more)[1].splitlines()]


def test_a_repair_from_its_plan_to_its_undo(config: Config, store: Path) -> None:
    before, checkpoint, stamps = index_of(store), (store / "checkpoint").read_bytes(), tree(store)
    assert lost_keys(config, "5.4")
    code, out, errors = repair(config, "--plan")
    assert (code, errors, tree(store)) == (1, "", stamps)
    assert ("% of" in out.splitlines()[0], "about 1 s" in out.splitlines()[-1]) == (True, True)

    code, out, errors = repair(config, "--yes")
    assert (code, errors, "checked against the log" in out) == (0, "", True)
    assert_repaired(config)
    (name,) = folders_of(store)
    assert name in out
    written = (store / "checkpoint").read_bytes()
    assert (written[:16], written[24:]) == (checkpoint[:16], checkpoint[24:])
    assert index_of(store / name) == before
    assert (store / name / "checkpoint").read_bytes() == checkpoint
    # Full files that were sound are the same files; the one that a broker will write to is not.
    kept = [path for path in sorted((store / name / "index").iterdir()) if (store / "index" / path.name).exists()]
    assert len(kept) > 2
    assert [path.samefile(store / "index" / path.name) for path in kept] == [True] * (len(kept) - 1) + [False]

    stamps = tree(store)
    for words in (("--yes",), ("--plan",)):
        expect(config, *words, code=0, text="100.00 %")
        expect(config, *words, code=0, text="nothing to do")
    assert indexd_here("audit", *words_of(config), "--samples", 0).returncode == 0
    assert tree(store) == stamps

    expect(config, "--undo", "--yes", code=0, text="the old index is back")
    assert (index_of(store), (store / "checkpoint").read_bytes()) == (before, checkpoint)
    assert folders_of(store) == [name + ".undone"]
    expect(config, "--undo", "--yes", code=3, text="can be undone")


def test_what_an_unclean_start_would_throw_away(config: Config, store: Path) -> None:
    assert repair(config, "--yes")[0] == 0
    checkpoint = (store / "checkpoint").read_bytes()
    last = max(path.name for path in (store / "index").iterdir())
    (store / "checkpoint").write_bytes(StoreCheckpoint(1, 2, 3, 4, 5).pack())
    assert repair(config, "--plan")[0] == 0  # it was stopped cleanly
    (store / "abort").write_text("1")
    expect(config, "--plan", code=1, text="the broker ended without a clean stop")
    expect(config, "--yes", code=0, text="no new file was needed")
    assert (store / "checkpoint").read_bytes() == checkpoint
    assert_repaired(config)
    old = store / folders_of(store)[-1] / "index"
    assert [path.name for path in sorted(old.iterdir()) if not path.samefile(store / "index" / path.name)] == [last]
    assert repair(config, "--plan")[0] == 0


def test_what_an_interrupted_repair_has_left(config: Config, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Disk.write_atomically

    def broken(disk: Disk, path: Path, *args: Any, **keys: Any) -> None:
        if path == store / "checkpoint":
            raise DiskError("write", path, OSError(errno.EIO, "Input/output error"))
        write(disk, path, *args, **keys)

    with monkeypatch.context() as patch:
        patch.setattr(Disk, "write_atomically", broken)
        expect(config, "--yes", code=70, text="run indexd repair again before the broker starts")
    expect(config, "--plan", code=1, text="was interrupted: indexd repair removes or finishes it")
    expect(config, "--yes", code=0, text="the repair that was interrupted is done")
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
    shutil.rmtree(store / "index")
    for name in ("checkpoint", "lock"):
        (store / name).unlink()
    assert repair(config, "--plan")[0] == 1
    assert not any((store / name).exists() for name in ("index", "lock"))
    code, out, _ = repair(config, "--yes")
    assert code == 0
    for text in ("there was no lock file", "there is no checkpoint", "no index file says what the broker indexes"):
        assert text in out
    assert_repaired(config)
    assert (store / "checkpoint").read_bytes()[:16] == bytes(16)
    assert repair(config, "--undo", "--yes")[0] == 0
    assert index_of(store) == {}


def test_foreign_files_go_with_the_old_index(config: Config, store: Path) -> None:
    (store / "index" / "20260101000000009").write_bytes(b"short")
    (store / "index" / "notes.txt").write_bytes(b"mine")
    (store / "index" / "folder").mkdir()
    assert {"20260101000000009", "notes.txt", "folder"} <= set(rows(config, "--plan")[0]["leftOut"])
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
    expect(config, "--yes", "--time-limit", "10m", code=1, text="1 older part not reached in time")
    left = lost_keys(config, "5.4")
    assert 0 < left.total() < lost.total()
    assert max(left) < min(lost) + (max(lost) - min(lost)) / 2  # the newer hole is mended
    assert index_timestamp(store) == newest_end(store / "index")
    monkeypatch.undo()
    assert repair(config, "--yes")[0] == 0
    assert_repaired(config)
    assert len(folders_of(store)) == 2


def test_an_undo_says_what_the_broker_has_indexed_since(config: Config, store: Path) -> None:
    assert repair(config, "--yes")[0] == 0
    last = max((store / "index").iterdir())
    data = bytearray(last.read_bytes())
    data[36:40] = (int.from_bytes(data[36:40], "big") + 7).to_bytes(4, "big")
    last.write_bytes(data)
    expect(config, "--undo", "--yes", code=0, text="the broker has indexed 7 keys since")


def test_the_only_index_file_cut_short_is_a_finding_where_the_sizes_are_given(config: Config, store: Path) -> None:
    first, *others = sorted((store / "index").iterdir())
    for path in others:
        path.unlink()
    wrong = (*words_of(config)[:-1], INDEX_NUM - 1)
    assert "so these are not the broker's numbers" in indexd_here("audit", *wrong).stderr
    os.truncate(first, 100)
    done = indexd_here("audit", *words_of(config), "--samples", 0)
    assert (done.returncode, "file-size" in done.stdout) == (1, True)
    assert repair(config, "--yes")[0] == 0
    assert_repaired(config)


def owners(*paths: Path) -> set[tuple[int, int, int]]:
    found = [path.stat() for path in paths]
    return {(status.st_uid, status.st_gid, status.st_mode & 0o777) for status in found}


def test_all_that_a_repair_writes_is_its_stores_own_and_what_is_kept_stays_as_it_is(
    config: Config, store: Path, request: pytest.FixtureRequest
) -> None:
    umask = os.umask(0o077)  # it leaves others nothing
    request.addfinalizer(lambda: os.umask(umask))
    # A foreign file that sorts first, and an index file that root has put back, with fewer rights than all others.
    index, names = store / "index", sorted(index_of(store))
    (index / ".nfs0001").touch()
    (index / names[1]).unlink()
    # The store as another user's, if this one may; folders 0750, files 0640.
    owner, root = ((4321, 4322), (0, 0)) if os.geteuid() == 0 else ((os.geteuid(), os.getegid()),) * 2
    for path in (store, *store.rglob("*")):
        os.chown(path, *owner)
        path.chmod(0o750 if path.is_dir() else 0o640)
    (store / "checkpoint").chmod(0o604)
    os.chown(index / names[0], *root)
    for name in (".nfs0001", names[0]):
        (index / name).chmod(0o600)
    for undo, suffix in (("--yes", ""), ("--undo", ".undone")):
        assert repair(config, "--yes", undo)[0] == 0
        (name,) = folders_of(store)
        assert name.endswith(suffix)
        folder = store / name
        assert owners(store / "checkpoint") == {(*owner, 0o604)}
        assert owners(folder, folder / "index", index) == {(*owner, 0o750)}
        old = index if suffix else folder / "index"
        assert owners(*(path / names[0] for path in (index, folder / "index"))) == {(*root, 0o600)}
        files = {folder / "manifest", folder / "checkpoint", *index.iterdir(), *(folder / "index").iterdir()}
        assert owners(*(path for path in files if path.name not in (names[0], ".nfs0001"))) == {(*owner, 0o640)}
        assert owners(old / ".nfs0001") == {(*owner, 0o600)}


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


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("checkpoint", "link"),
        ("index", "link"),
        ("index", "file"),
        ("checkpoint", "folder"),
        ("lock", "folder"),
    ],
)
def test_what_is_no_such_thing_as_a_broker_has_is_not_replaced(
    config: Config, store: Path, name: str, kind: str
) -> None:
    path = store / name
    path.rename(store / "elsewhere")
    make = {"link": lambda: path.symlink_to("elsewhere"), "file": path.touch, "folder": path.mkdir}
    make[kind]()
    stamps = tree(store)
    for words in (["--yes"], ["--undo", "--yes"], *([["--plan"]] if name != "lock" else [])):  # a plan takes no lock
        code, _, errors = repair(config, *words)
        assert (code, errors.count("\n")) == (3, 1)
        assert "symbolic link" in errors if kind == "link" else "move" in errors or "cannot be told" in errors
    assert tree(store) == stamps


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


def test_the_only_backup_is_kept_when_its_manifest_is_lost(config: Config, store: Path) -> None:
    before = index_of(store)
    assert repair(config, "--yes")[0] == 0
    (name,) = folders_of(store)
    for manifest, text in ((None, "is left as it is: it has no manifest"), (b"[]", "is no manifest of a repair")):
        (store / name / "manifest").unlink(missing_ok=True)
        if manifest is not None:
            (store / name / "manifest").write_bytes(manifest)
        stamps, index = tree(store / name), index_of(store)
        expect(config, "--yes", code=0, text=text)
        expect(config, "--undo", "--yes", code=4, text=f"move {store / name} away")
        assert (tree(store / name), index_of(store), index_of(store / name)) == (stamps, index, before)


@pytest.mark.parametrize("names", [("my-notes", "index/keep"), ("manifest.old",), ("index/20260101000000000",)])
def test_a_folder_of_somebody_else_is_named_and_left(config: Config, store: Path, names: tuple[str, ...]) -> None:
    folder = store / "indexd-repair-20250101T000000Z"
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("precious")
    stamps = tree(folder)
    for words, code in (("--plan", 1), ("--yes", 0), ("--plan", 0)):
        expect(config, words, code=code, text=f"{folder.name} is left as it is")
    assert tree(folder) == stamps
    assert repair(config, "--undo", "--yes")[0] == 0


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
    without = json.dumps({name: value for name, value in row.items() if name != field})[:-1]
    for data in (json.dumps({**row, field: value}), without):
        with pytest.raises(CorruptDataError, match="is no manifest of a repair"):
            Manifest.unpack(data.encode(), Path("manifest"))


def test_an_old_index_that_is_not_there_any_more(config: Config, store: Path) -> None:
    assert repair(config, "--yes")[0] == 0
    (name,) = folders_of(store)
    (store / name / "index").rename(store / "moved")
    stamps = tree(store)
    expect(config, "--undo", "--yes", code=3, text="the old index is not in")
    assert tree(store) == stamps
    (store / "moved").rename(store / name / "index")
    assert repair(config, "--undo", "--yes")[0] == 0


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
        expect(config, "--plan", code=1, text="it has to be stopped")
    assert tree(store) == stamps


@pytest.mark.parametrize(
    ("what", "code", "text"),
    [
        ("wrong", 4, "it does not hold"),
        ("changed", 3, "was changed by somebody else"),
        ("broker", 3, "has begun to load"),
    ],
)
def test_what_happens_while_it_is_checked_ends_it(
    config: Config, store: Path, monkeypatch: pytest.MonkeyPatch, what: str, code: int, text: str
) -> None:
    before = index_of(store) | ({"20270101000000000": b""} if what == "changed" else {})
    with ExitStack() as brokers:

        def check(*_: object) -> None:
            if what == "wrong":
                raise CorruptDataError("it does not hold")
            if what == "broker":
                brokers.enter_context(stand_in(store / "lock"))
            else:
                (store / "index" / "20270101000000000").write_bytes(b"")

        monkeypatch.setattr(run, "check_built", check)
        expect(config, "--yes", code=code, text=text)
    assert (index_of(store), folders_of(store)) == (before, [])


def test_a_disk_without_room(config: Config, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert repair(config, "--yes")[0] == 0
    (store / "index" / min(index_of(store))).unlink()
    stamps = tree(store)
    monkeypatch.setattr(Disk, "free", lambda *_: 1000)
    for words in (("--yes",), ("--undo", "--yes")):
        expect(config, *words, code=3, text="1,000 are free; free space")
    assert tree(store) == stamps


def test_a_store_that_may_only_be_read(config: Config, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(lock: StoreLock) -> bool:
        raise DiskError("lock", store / "lock", OSError(errno.EROFS, "Read-only file system"))

    monkeypatch.setattr(StoreLock, "take", read_only)
    code, _, errors = repair(config, "--yes")
    assert (code, "remount the file system read-write, or repair a copy" in errors, "--data" in errors) == (
        3,
        True,
        False,
    )


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
    # Neither is what an interrupted repair has left removed before somebody has said yes.
    folder = RepairFolder.make(Disk(), store, 0).path
    ours, theirs = pty.openpty()
    before = tree(store)
    with os.fdopen(theirs, encoding="utf-8", closefd=True) as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        os.write(ours, f"{answer}\n".encode())
        code, out, errors = repair(config)
    os.close(ours)
    assert "repair it now? [y/N]" in errors
    assert f"{folder.name} is of a repair that was interrupted" in out
    assert (code, tree(store) == before) == ((0, False) if answer == "y" else (1, True))
    assert (f"{folder.name} is removed" in out, "nothing was changed: as you say" in out) == (
        answer == "y",
        answer == "n",
    )
