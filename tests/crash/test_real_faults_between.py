"""What somebody does to a data directory between a stop and a start, and directories that are not for this start."""

from __future__ import annotations

import json
import shutil
import zlib
from typing import TYPE_CHECKING

import pytest

from support.daemon import Daemon, index_files, indexd, indexd_here
from support.faults import UNSAFE, all_files, check_whole
from support.small_log import HASH_SLOT_NUM, INDEX_NUM, SEGMENT_SIZE, SIZES, write_log

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def built(store: Path, data: Path, count: int = 2000, seed: int = 1) -> int:
    """A log and its index, after a clean stop; the end of the log."""
    end = write_log(store, count, seed=seed)
    done = indexd_here("--recover", "--store", store, "--data", data, *SIZES)
    assert done.returncode == 0, done.stderr
    return end


def contents(data: Path) -> dict[str, bytes]:
    """What a refusal may not change; the other small files only say who asked last."""
    mine = {"lock", "abort", "starts"}
    return {name: (data / name).read_bytes() for name in all_files(data) if name not in mine}


def rewrite(frontier: Path, **changes: object) -> None:
    row = json.loads(frontier.read_bytes()) | changes
    del row["crc32"]
    frontier.write_text(json.dumps(row | {"crc32": zlib.crc32(json.dumps(row).encode())}) + "\n")


def asked(segment_size: int = SEGMENT_SIZE, slots: int = HASH_SLOT_NUM, entries: int = INDEX_NUM) -> tuple[str, ...]:
    return ("--segment-size", str(segment_size), "--hash-slot-num", str(slots), "--index-num", str(entries))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (asked(slots=501), ["hash_slot_num 500", "501", "another --data"]),
        (asked(entries=4001), ["index_num 4000", "4001", "another --data"]),
        # The log itself does not fit, which is seen first.
        (asked(segment_size=2 * SEGMENT_SIZE), ["has 262144 bytes", "524288", "give --segment-size 262144"]),
        ((*SIZES, "--flavour", "4.7"), ["flavour 5.4", "4.7", "another --data"]),
    ],
    ids=["slots", "entries", "segments", "flavour"],
)
def test_a_directory_that_was_built_otherwise(tmp_path: Path, flags: tuple[str, ...], says: list[str]) -> None:
    store, data = tmp_path / "store", tmp_path / "data"
    end = built(store, data)
    before = contents(data)
    done = indexd("--store", store, "--data", data, *flags)
    assert done.returncode == UNSAFE
    line = done.stderr.splitlines()[-1]
    assert all(word in line for word in says), line
    assert contents(data) == before
    with Daemon(store, data, *SIZES) as daemon:
        check_whole(daemon, end)


def test_a_directory_of_a_newer_version(tmp_path: Path) -> None:
    store, data = tmp_path / "store", tmp_path / "data"
    built(store, data)
    rewrite(data / "frontier", format=2, version="9.8.7", unheardOf={"a": [1]})
    before = contents(data)
    done = indexd("--store", store, "--data", data, *SIZES)
    assert done.returncode == UNSAFE
    line = done.stderr.splitlines()[-1]
    assert "of format 2, written by indexd 9.8.7, not 1" in line
    assert "run that version or a newer one, or use a fresh --data" in line
    assert contents(data) == before


def test_being_refused_again_and_again_is_no_crash_loop(tmp_path: Path) -> None:
    """A service manager tries a wrong configuration many times; the right one must start at once."""
    store, data = tmp_path / "store", tmp_path / "data"
    end = built(store, data)
    env = {"INDEXD_UNCLEAN_STARTS_MAX": "1"}
    for _ in range(3):
        done = indexd("--store", store, "--data", data, *asked(slots=501), env=env)
        assert done.returncode == UNSAFE
        assert "hash_slot_num 500" in done.stderr.splitlines()[-1]
    with Daemon(store, data, *SIZES, env=env) as daemon:
        check_whole(daemon, end)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: b"",
        lambda text: text[: len(text) // 2],
        lambda text: bytes([*text[:300], text[300] ^ 1, *text[301:]]),
    ],
    ids=["empty", "half", "bit"],
)
def test_a_frontier_that_does_not_hold(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    store, data = tmp_path / "store", tmp_path / "data"
    end = built(store, data)
    (data / "frontier").write_bytes(damage((data / "frontier").read_bytes()))
    with Daemon(store, data, *SIZES) as daemon:
        assert str(data / "frontier") in daemon.wait_event("frontier_unreadable")["problem"]
        check_whole(daemon, end)


@pytest.mark.parametrize("unclean", [False, True], ids=["stopped", "killed"])
@pytest.mark.parametrize("same_names", [False, True], ids=["their-names", "our-names"])
def test_index_files_of_another_store(tmp_path: Path, same_names: bool, unclean: bool) -> None:
    store, data, other = tmp_path / "store", tmp_path / "data", tmp_path / "other"
    end = built(store, data)
    built(other, tmp_path / "foreign", seed=2)
    if unclean:
        (data / "abort").write_text("1")
    ours = index_files(data)
    for number, path in enumerate(index_files(tmp_path / "foreign")):
        target = ours[number].name if same_names and number < len(ours) else path.name
        shutil.copy2(path, data / "index" / target)
    if not same_names:
        for path in ours:
            path.unlink()
    with Daemon(store, data, *SIZES) as daemon:
        check_whole(daemon, end)
