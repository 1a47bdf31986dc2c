"""A sound index that the broker's next start would throw away: nothing is built, and it is kept from that."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from indexd.flush.frontier import StoreCheckpoint
from indexd.index.format import HEADER_SIZE, IndexHeader
from support.auditing import audit, config_of_golden
from support.daemon import indexd_here
from support.goldens import Golden, unpack


def index_msg_timestamp(golden: Golden) -> int:
    path = golden.root / "checkpoint"
    return StoreCheckpoint.unpack(path.read_bytes(), path).index_msg_timestamp


def repair(golden: Golden, *words: str) -> tuple[int, list[dict[str, object]]]:
    sizes = ("--hash-slot-num", golden.hash_slot_num, "--index-num", golden.index_num)
    sizes += ("--segment-size", golden.segment_size, "--data", golden.root.with_name("unused"))
    done = indexd_here("repair", "--json", *words, "--store", golden.root, *sizes)
    assert not done.stderr, done.stderr
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("name", ["rocketmq-5.4-killed", "rocketmq-5.4-killed-open-index"])
def test_the_checkpoint_vouches_for_it_and_the_last_message_is_not_indexed_again(tmp_path: Path, name: str) -> None:
    golden = unpack(name, tmp_path)
    last = golden.index_files()[-1]
    before = {path.name: path.read_bytes() for path in golden.index_files()}
    newest = IndexHeader.unpack(before[last.name][:HEADER_SIZE])
    assert audit(config_of_golden(golden)).is_sound
    assert index_msg_timestamp(golden) < newest.end_timestamp

    status, rows = repair(golden, "--plan")
    assert (status, rows[0]["needed"], rows[0]["ranges"], rows[0]["atStake"]) == (1, True, [], [last.name])
    status, rows = repair(golden, "--yes")
    assert (status, rows[-1]["repaired"], rows[-1]["builtFiles"]) == (0, True, [])

    assert {path.name for path in golden.index_files()} == set(before)
    assert all(path.read_bytes() == before[path.name] for path in golden.index_files()[:-1])
    header = IndexHeader.unpack(last.read_bytes()[:HEADER_SIZE])
    assert header.end_phy_offset == newest.end_phy_offset + 1
    assert last.read_bytes()[HEADER_SIZE:] == before[last.name][HEADER_SIZE:]
    assert index_msg_timestamp(golden) == newest.end_timestamp
    assert repair(golden, "--plan")[0] == 0


def test_after_a_clean_stop_there_is_nothing_to_do(tmp_path: Path) -> None:
    golden = unpack("rocketmq-5.4-clean", tmp_path)
    status, rows = repair(golden, "--plan")
    assert (status, rows[0]["needed"], rows[0]["atStake"]) == (0, False, [])
