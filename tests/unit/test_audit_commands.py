"""``indexd audit`` as it is typed: words, JSON lines, exit codes; and nothing in the store is touched."""

from __future__ import annotations

import json
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.auditing import config_of_golden, index_log, restart_of_killed_broker
from support.daemon import compile_kernels, indexd_here
from support.data_directory import SEGMENT
from support.goldens import Golden, unpack
from support.indexing_broker import LAYOUT, Broker


@pytest.fixture
def golden(tmp_path: Path) -> Golden:
    compile_kernels()
    return unpack("rocketmq-5.4-killed-open-index", tmp_path)


def words(golden: Golden, *more: object) -> tuple[object, ...]:
    return (
        *("audit", "--store", golden.root, "--segment-size", golden.segment_size),
        *("--hash-slot-num", golden.hash_slot_num, "--index-num", golden.index_num, *more),
    )


def stamps(root: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(root.rglob("*"))}


def rows(golden: Golden, *more: object) -> list[dict[str, Any]]:
    done = indexd_here(*words(golden, "--json", *more))
    assert done.stderr == ""
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_sound_store(golden: Golden) -> None:
    before = stamps(golden.root)
    done = indexd_here(*words(golden))
    assert (done.returncode, done.stderr) == (0, "")
    first, *more = done.stdout.splitlines()
    assert first == "all 18,402 keys findable; nothing wrong in the index files"
    assert [line.split(":")[0] for line in more if ": " in line][-4:] == ["crash", "broker", "flavour", "covered"]
    assert more[-2] == "flavour: 5.4 (by its entries)"
    assert more[-1].startswith(
        f"covered: {golden.root}, log bytes 0 to 2740160 (2.61 MiB, 4,000 messages), 1 index file"
    )
    found = rows(golden)
    assert [row["kind"] for row in found] == ["file", *["answers"] * 3, "samples", "crash", "summary"]
    assert (found[-1]["keys"], found[-1]["findableKeys"], found[-1]["store"]) == (18402, 18402, str(golden.root))
    assert found[-1]["sound"]
    assert stamps(golden.root) == before


def test_a_store_that_lost_keys(golden: Golden) -> None:
    restart_of_killed_broker(golden.root)
    index_log(config_of_golden(golden), begin=6 * golden.segment_size)
    done = indexd_here(*words(golden))
    assert done.returncode == 1
    verdict, hole, cause, *more = done.stdout.splitlines()
    assert verdict.startswith("40.9 % of 18,402 keys findable; one hole, 2026-11-21 ")
    assert ", 1.5 MiB, unclean stop; indexd repair mends it in about " in verdict
    assert hole.startswith("hole: stored 20")
    assert hole.endswith(", log bytes 0 to 1572716 (1.5 MiB): 10,858 keys of 2,226 messages not findable")
    assert cause == "  likely cause: unclean stop"
    assert more[0] == "  - it begins with the log, and no index file stands before it"
    assert more[1].startswith("  - it ends where the segment at 1572864 begins: after an unclean stop RocketMQ throws ")
    found = rows(golden, "--samples", 0)
    assert [row["kind"] for row in found] == ["file", "hole", "crash", "summary"]
    assert (found[1]["cause"], found[1]["tail"], len(found[1]["evidence"])) == ("unclean-stop", False, 2)


def test_what_cannot_be_audited(golden: Golden, tmp_path: Path) -> None:
    done = indexd_here("audit", "--data", tmp_path / "d")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "no store is given" in done.stderr
    done = indexd_here("audit", "--store", tmp_path / "none")
    assert done.returncode == 3
    assert "there is no commitlog" in done.stderr
    done = indexd_here("audit", "--store", golden.root, "--segment-size", golden.segment_size)
    assert done.returncode == 3
    assert "no index file in" in done.stderr
    assert "give --hash-slot-num and --index-num" in done.stderr


def test_options_that_are_wrong(golden: Golden, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    inside = golden.root / "page.html"
    link = tmp_path / "link"
    link.symlink_to(golden.root)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.symlink_to(tmp_path / "new")
    for options, text in (
        (("--samples", "-1"), "'-1' is not from 0 to 100000"),
        (("--samples", "many"), "'many' is not a whole number"),
        (("--samples", "1e9"), "is not a whole number"),
        (("--queues=yes",), "ignored explicit argument"),
        (("--report", ""), "is not a path"),
        (("--report", inside), "lies inside the store"),
        (("--resume", link / "index" / "kept"), "lies inside the store"),
        (("--report", tmp_path / "folder"), "is no plain file"),
        (("--report", elsewhere), "elsewhere is no plain file"),
        (("--resume", elsewhere), "elsewhere is no plain file"),
        (("--report", tmp_path / "none" / "page.html"), "there is no directory"),
        (("--report", tmp_path / "one", "--resume", tmp_path / "one"), "are the same file"),
    ):
        done = indexd_here(*words(golden, *options))
        code = 3 if "inside the store" in text else 2
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1), done.stderr
        assert text in done.stderr
    assert not inside.exists()
    assert not (tmp_path / "new").exists()


def test_the_page_is_written_beside_and_renamed(golden: Golden, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("what was there before", "utf-8")
    done = indexd_here(*words(golden, "--samples", 0, "--report", page))
    assert (done.returncode, done.stderr) == (0, "")
    assert page.read_text("utf-8").startswith("<!DOCTYPE html>")
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["page.html"]


def test_a_page_that_cannot_be_written(golden: Golden, tmp_path: Path) -> None:
    # What was found is said all the same.
    page = tmp_path / ("x" * 254)
    done = indexd_here(*words(golden, "--samples", 0, "--report", page))
    assert (done.returncode, done.stderr.count("\n")) == (70, 1)
    assert "cannot create" in done.stderr
    assert done.stdout.startswith("all 18,402 keys findable")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    compile_kernels()
    broker = Broker(tmp_path)
    broker.dispatch(broker.messages)
    broker.stopped()
    return broker.store.root


def command_of(store: Path, *more: object) -> tuple[object, ...]:
    sizes = ("--hash-slot-num", LAYOUT.hash_slot_num, "--index-num", LAYOUT.index_num)
    return ("audit", "--store", store, "--segment-size", SEGMENT, *sizes, "--samples", 0, *more)


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[Path]:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        yield tmp_path / "socket"


@pytest.mark.parametrize("option", ["--report", "--resume"])
def test_what_is_no_plain_file_is_left_as_it_is(store: Path, tmp_path: Path, listening: Path, option: str) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    null = Path("/dev/null")
    for path in (pipe, link, listening, null):
        before = os.lstat(path)
        done = indexd_here(*command_of(store, option, path))
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
        assert f"{option} {path} is no plain file" in done.stderr
        after = os.lstat(path)
        assert (after.st_ino, stat.S_IFMT(after.st_mode)) == (before.st_ino, stat.S_IFMT(before.st_mode))
