"""``indexd rebuild`` on the stores that RocketMQ's own code wrote: its index files, byte for byte."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from indexd.flush.frontier import StoreCheckpoint
from indexd.index.format import IndexHeader
from support.daemon import (
    COMMAND,
    assert_same_index,
    compile_kernels,
    environment,
    indexd,
    indexd_here,
    rebuild,
)
from support.goldens import GOLDENS, Golden, unpack
from support.naive import naive_frames
from support.reading import patch


def golden_of(root: Path, name: str = "rocketmq-5.4-clean") -> Golden:
    """One that may be changed."""
    compile_kernels()
    return unpack(name, root)


def flags(golden: Golden) -> tuple[str, ...]:
    return (
        *("--segment-size", str(golden.segment_size)),
        *("--hash-slot-num", str(golden.hash_slot_num)),
        *("--index-num", str(golden.index_num)),
        *("--consume-queue-file-size", str(golden.queue_file_size)),
        *("--flavour", golden.flavour),
    )


def content(root: Path) -> dict[str, tuple[str, int]]:
    """Digest and time of change of every file."""
    return {
        str(path.relative_to(root)): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def end_of(golden: Golden) -> int:
    last = golden.messages()[-1]
    return int(last["phyOffset"] + last["size"])


@pytest.mark.parametrize("name", GOLDENS)
def test_gives_every_file_byte_for_byte(tmp_path: Path, name: str) -> None:
    golden, out = golden_of(tmp_path, name), tmp_path / "out"
    before = content(golden.root)
    figures = rebuild(golden.root, out, *flags(golden))
    assert content(golden.root) == before
    assert_same_index(out, golden.root)

    headers = [IndexHeader.unpack(path.read_bytes()) for path in golden.index_files()]
    rows = golden.messages()
    assert figures["messages"] == len(rows)
    assert figures["entries"] == sum(header.entries for header in headers)
    assert (figures["files"], figures["skippedBytes"]) == (len(headers), 0)
    assert (figures["beginOffset"], figures["phyOffset"]) == (0, end_of(golden))

    full = [header.end_timestamp for header in headers if header.index_count == golden.index_num]
    checkpoint = StoreCheckpoint.unpack((out / "checkpoint").read_bytes(), out / "checkpoint")
    last_time = rows[-1]["storeTimestamp"]
    assert checkpoint == StoreCheckpoint(last_time, last_time, full[-1] if full else 0, 0, end_of(golden))
    frontier = json.loads((out / "frontier").read_bytes())
    assert (frontier["phyOffset"], frontier["messages"]) == (end_of(golden), len(rows))
    assert [row["header"] for row in frontier["index"]] == [list(header.values()) for header in headers]
    assert sorted(path.name for path in out.iterdir()) == ["checkpoint", "consumequeue", "frontier", "index", "sparse"]
    assert not out.with_name("out.building").exists()


def test_a_target_that_holds_something_is_refused_and_an_interrupted_rebuild_leaves_none(tmp_path: Path) -> None:
    clean, out = golden_of(tmp_path), tmp_path / "out"
    words = ["rebuild", "--store", clean.root, "--data", tmp_path / "d", "--out", out, *flags(clean)]
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    done = indexd_here(*words)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith(f"indexd: --out {out} is not empty; ")
    assert [path.name for path in out.iterdir()] == ["notes.txt"]
    shutil.rmtree(out)
    for sign in ("lock", "index/*"):
        with subprocess.Popen([COMMAND, *words], stdout=subprocess.DEVNULL, env=environment()) as process:
            while process.poll() is None and not list(out.with_name("out.building").glob(sign)):
                time.sleep(0.001)
            process.kill()
        assert process.returncode == -9
        assert not out.exists()
    out.mkdir()
    rebuild(clean.root, out, *flags(clean))
    assert_same_index(out, clean.root)
    assert not out.with_name("out.building").exists()


def test_a_corrupt_log_ends_it_or_is_passed_over_as_told(tmp_path: Path) -> None:
    clean, out = golden_of(tmp_path), tmp_path / "out"
    rows, segment = clean.messages(), clean.segments()[1]
    broken = next(row for row in rows[1000:] if row["phyOffset"] // clean.segment_size == 1)
    patch(segment, broken["phyOffset"] - clean.segment_size + 4, b"\1\2\3\4")
    words = ("rebuild", "--json", "--store", clean.root, "--data", tmp_path / "d", "--out", out, *flags(clean))
    done = indexd(*words)
    assert done.returncode == 4
    assert f"the log is corrupt at offset {broken['phyOffset']} of {segment}: neither" in done.stderr
    assert "--on-corrupt skip" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not out.exists()

    done = indexd(*words, "--on-corrupt", "skip")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["skippedBytes"] == broken["size"]
    assert figures["messages"] == len(rows) - 1
    gap = [broken["phyOffset"], broken["phyOffset"] + broken["size"]]
    frontier = json.loads((out / "frontier").read_bytes())
    assert [row[:2] for row in frontier["uncovered"]] == [gap]
    assert frontier["phyOffset"] == end_of(clean)


def test_an_expired_front_and_an_empty_log(tmp_path: Path) -> None:
    clean = golden_of(tmp_path)
    clean.segments()[0].unlink()
    figures = rebuild(clean.root, tmp_path / "out", *flags(clean))
    left = list(naive_frames(clean.root / "commitlog", clean.segment_size))
    assert (figures["beginOffset"], figures["phyOffset"]) == (clean.segment_size, end_of(clean))
    assert figures["messages"] == len(left) < len(clean.messages())
    for segment in clean.segments():
        segment.unlink()
    figures = rebuild(clean.root, tmp_path / "empty", *flags(clean))
    assert (figures["messages"], figures["files"], figures["phyOffset"]) == (0, 0, 0)
