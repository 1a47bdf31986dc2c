"""``indexd audit`` as it is typed: words, JSON lines, exit codes; and nothing in the store is touched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.auditing import config_of_golden, index_log, restart_of_killed_broker
from support.daemon import compile_kernels, indexd_here
from support.goldens import Golden, unpack


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
    first, second = done.stdout.splitlines()
    assert first == f"{golden.root}: 100.00 % of 18,402 keys findable, no holes, no findings"
    assert second.startswith(
        "covered: log bytes 0 to 2740160 (2.6 MiB, 4,000 messages), 1 index file of flavour 5.4 (by"
    )
    found = rows(golden)
    assert [row["kind"] for row in found] == ["file", "summary"]
    assert (found[-1]["keys"], found[-1]["findableKeys"], found[-1]["store"]) == (18402, 18402, str(golden.root))
    assert stamps(golden.root) == before


def test_a_store_that_lost_keys(golden: Golden) -> None:
    restart_of_killed_broker(golden.root)
    index_log(config_of_golden(golden), begin=6 * golden.segment_size)
    done = indexd_here(*words(golden))
    assert done.returncode == 1
    hole, share, _ = done.stdout.splitlines()
    assert hole.startswith("hole: log bytes 0 to 1572716 (1.5 MiB), stored 20")
    assert hole.endswith(": 10,858 keys of 2,226 messages are not findable")
    assert share == f"{golden.root}: 40.99 % of 18,402 keys findable, 1 hole, no findings"
    assert [row["kind"] for row in rows(golden)] == ["file", "hole", "summary"]


def test_a_finding(golden: Golden) -> None:
    (path,) = golden.index_files()
    data = bytearray(path.read_bytes())
    data[32:36] = bytes(4)
    path.write_bytes(data)
    done = indexd_here(*words(golden))
    assert done.returncode == 1
    assert done.stdout.splitlines()[0].startswith(
        f"index/{path.name} byte 32: used slot count 0, but 18402 entries use"
    )
    (finding,) = [row for row in rows(golden) if row["kind"] == "finding"]
    assert (finding["what"], finding["position"]) == ("header-used-slot-count", 32)


def test_a_flavour_that_is_given(golden: Golden) -> None:
    done = indexd_here(*words(golden, "--flavour", "4.7"))
    assert done.returncode == 1
    assert "of flavour 4.7 (as given)" in done.stdout


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
