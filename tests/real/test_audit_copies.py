"""``indexd audit`` where there is no broker: copies, a slave's log, a read-only mount, a user who may only look."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from indexd.config import Config
from support.auditing import audit, config_of_golden
from support.daemon import COMMAND, compile_kernels, environment, indexd_here
from support.faults import OwnMounts
from support.goldens import Golden, unpack
from support.missing import need, need_root

NAME = "rocketmq-5.4-killed-open-index"
_NOBODY = 65534


@pytest.fixture
def golden(tmp_path: Path) -> Golden:
    compile_kernels()
    return unpack(NAME, tmp_path)


def words(golden: Golden, store: Path, *more: object) -> list[str]:
    return [
        *("audit", "--json", "--store", str(store), "--segment-size", str(golden.segment_size)),
        *("--hash-slot-num", str(golden.hash_slot_num), "--index-num", str(golden.index_num), *map(str, more)),
    ]


def stamps(root: Path) -> dict[str, tuple[int, ...]]:
    """Everything but when it was read last."""
    found = {}
    for path in (root, *sorted(root.rglob("*"))):
        status = path.lstat()
        found[str(path)] = (
            *(status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino),
            *(status.st_mode, status.st_uid, status.st_blocks),
        )
    return found


def rows_of(out: str) -> list[dict[str, Any]]:
    # A name may hold what Python takes for the end of a line.
    return [json.loads(line) for line in out.removesuffix("\n").split("\n")]


def run(golden: Golden, store: Path, before: tuple[str, ...] = (), *more: object, **env: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [*before, str(COMMAND), *words(golden, store, *more)],
        capture_output=True, text=True, env=environment(env), cwd="/", timeout=120, check=False,
    )  # fmt: skip
    assert (done.stderr[-2000:], done.returncode) == ("", 0)
    return rows_of(done.stdout)


def comparable(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    leave = ("seconds", "store", "broker", "brokerAlive", "brokerPid")
    return [{key: row[key] for key in row if key not in leave} for row in rows if row["kind"] != "crash"]


def test_a_copy_anywhere_without_a_lock_file(golden: Golden, tmp_path: Path) -> None:
    wanted = comparable(rows_of(indexd_here(*words(golden, golden.root)).stdout))
    copy = tmp_path / "a copy, of März" / "store\u2028"
    shutil.copytree(golden.root, copy)
    for name in ("lock", "abort", "checkpoint"):
        (copy / name).unlink(missing_ok=True)
    before = stamps(copy)
    done = indexd_here(*words(golden, copy))
    assert (done.returncode, done.stderr) == (0, "")
    rows = rows_of(done.stdout)
    assert comparable(rows) == wanted
    assert (rows[-1]["broker"], rows[-1]["brokerAlive"]) == ("none", False)
    assert stamps(copy) == before
    # And one that holds nothing but log and index.
    for path in copy.iterdir():
        if path.name not in ("commitlog", "index"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    done = indexd_here(*words(golden, copy))
    assert (done.returncode, done.stderr) == (0, "")
    assert comparable(rows_of(done.stdout)) == wanted


def test_a_relative_path_and_a_symbolic_link(golden: Golden, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(golden.root)
    for path in (Path("link"), golden.root.relative_to(tmp_path)):
        done = indexd_here(*words(golden, path))
        assert (done.returncode, done.stderr) == (0, "")


def frames(golden: Golden) -> list[tuple[int, int]]:
    return [(row["phyOffset"], row["size"]) for row in golden.messages()]


@pytest.mark.parametrize("part", [1, 5, 60, 0.5, -1])
def test_a_slave_whose_log_ends_inside_a_frame(golden: Golden, part: float) -> None:
    """A slave gets the log in pieces that end anywhere; its index is as far as whole messages reach (spec 7.4)."""
    # What has a NUL at its end may be waited for longer than an audit waits.
    config = config_of_golden(golden, settle_ms=200, corrupt_after_ms=5000)
    whole = frames(golden)
    last, size = whole[-1]
    taken = int(size * part) if 0 < part < 1 else int(part) % size
    segment = max((golden.root / "commitlog").iterdir())
    while int(segment.name) > last:  # the broker made one ahead
        segment.unlink()
        segment = max((golden.root / "commitlog").iterdir())
    with segment.open("r+b") as file:
        at = last - int(segment.name) + taken
        file.seek(at)
        file.write(bytes(golden.segment_size - at))
    before = stamps(golden.root)
    rows = rows_of(indexd_here(*words(golden, golden.root, "--settle-ms", 200)).stdout)
    summary = rows[-1]
    assert (summary["messages"], summary["endOffset"]) == (len(whole) - 1, last)
    # The index that came from the master's copy knows the message; nothing else is wrong.
    assert set(summary["counts"]) <= {"entry-behind-log"}
    assert summary["missingKeys"] == 0
    # A few bytes of a head, or all but the last one, may be a message that is being written.
    assert bool(summary["unreadable"]) == (5 <= taken < size - 1)
    assert stamps(golden.root) == before
    assert cut_back(config, last)


def cut_back(config: Config, log_end: int) -> bool:
    """Without the entries of the last message there is nothing to say at all."""
    assert config.store.store is not None
    for path in sorted((config.store.store / "index").iterdir()):
        path.unlink()
    found = audit(config)
    return found.counts == {} and found.tail is not None and found.tail.end <= log_end


def test_on_a_read_only_mount(golden: Golden) -> None:
    wanted = comparable(rows_of(indexd_here(*words(golden, golden.root)).stdout))
    before = stamps(golden.root)
    with OwnMounts() as mounts:
        mounts.read_only(golden.root)
        refused = subprocess.run([*mounts.words, "touch", str(golden.root / "x")], capture_output=True, check=False)
        assert refused.returncode != 0
        assert comparable(run(golden, golden.root, mounts.words)) == wanted
    assert stamps(golden.root) == before


def test_a_user_who_may_only_read(golden: Golden, tmp_path: Path) -> None:
    need_root("become another user")
    wanted = comparable(rows_of(indexd_here(*words(golden, golden.root)).stdout))
    other = (need("setpriv"), f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups")
    for path in (golden.root, *golden.root.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    # Directories on the way to these are for their owner alone; what is compiled is kept where he may write.
    cache = Path(shutil.copytree(os.environ["NUMBA_CACHE_DIR"], tmp_path / "cache"))
    for path in (cache, *cache.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)
    with OwnMounts() as mounts:
        mounts.run("mount", "-t", "tmpfs", "tmpfs", "/mnt")
        for name, place in (("store", golden.root), ("cache", cache)):
            mounts.run("mkdir", f"/mnt/{name}")
            mounts.run("mount", "--bind", place, f"/mnt/{name}")
        before = stamps(golden.root)
        nobody = (*mounts.words, *other)
        refused = subprocess.run(
            [*nobody, "touch", "/mnt/store/x", "/mnt/store/checkpoint"], check=False, capture_output=True
        )
        assert refused.stderr.count(b"Permission denied") == 2
        found = run(golden, Path("/mnt/store"), nobody, HOME="/nowhere", NUMBA_CACHE_DIR="/mnt/cache")
        assert comparable(found) == wanted
    assert stamps(golden.root) == before
