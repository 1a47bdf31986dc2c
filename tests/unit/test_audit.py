"""Audits of RocketMQ's own stores, of other orders and flavours, and however the work is cut."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexd.audit.plan import NEVER, plan_audit
from indexd.config import Config
from indexd.index.format import IndexLayout
from indexd.storage.disk import Disk
from support.auditing import (
    audit,
    audit_plan,
    config_for,
    config_of_golden,
    index_log,
    key_texts,
    lost_keys,
    rows_of,
)
from support.commitlog_writer import CommitLogWriter, FrameSpec
from support.goldens import GOLDENS, unpack
from support.naive import naive_frames
from support.small_log import SEGMENT_SIZE, write_log

LAYOUT = IndexLayout(500, 2000)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Several segments and files; not to be changed."""
    store = tmp_path_factory.mktemp("small") / "store"
    write_log(store, 4000)
    config = config_for(store, LAYOUT, SEGMENT_SIZE)
    index_log(config)
    return config


@pytest.mark.parametrize("name", GOLDENS)
def test_nothing_is_wrong_with_what_rocketmq_wrote(tmp_path: Path, name: str) -> None:
    golden = unpack(name, tmp_path)
    found = audit(config_of_golden(golden))
    assert found.is_sound, rows_of(found)
    assert {era.flavour for era in found.eras} == {golden.flavour}
    assert not found.is_flavour_given
    rows = golden.messages()
    assert (found.messages, found.log_end) == (len(rows), rows[-1]["phyOffset"] + rows[-1]["size"])
    frames = naive_frames(golden.root / "commitlog", golden.segment_size)
    assert found.keys == found.entries == sum(len(key_texts(frame, golden.flavour)) for frame in frames)
    assert len(found.files) == len(golden.index_files())


@pytest.mark.parametrize("flavour", ["3.x", "4.0", "4.7", "5.4"])
def test_an_index_of_our_own_has_no_findings_in_any_flavour(tmp_path: Path, flavour: str) -> None:
    store = tmp_path / "store"
    write_log(store, 3000)
    index_log(config_for(store, LAYOUT, SEGMENT_SIZE), flavour)
    found = audit(config_for(store, LAYOUT, SEGMENT_SIZE))
    assert found.is_sound, rows_of(found)
    assert [era.flavour for era in found.eras] == ["4.7" if flavour == "4.0" else flavour]
    if flavour == "5.4":
        assert audit(config_for(store, LAYOUT, SEGMENT_SIZE, flavour="4.7")).counts["entry-without-key"] > 1000


def test_what_has_expired_is_no_finding(small: Config, tmp_path: Path) -> None:
    store = Path(shutil.copytree(small.store.store or "", tmp_path / "store"))
    before = audit(small)
    for segment in sorted((store / "commitlog").iterdir())[:2]:
        segment.unlink()
    found = audit(config_for(store, LAYOUT, SEGMENT_SIZE))
    assert found.is_sound, rows_of(found)
    assert found.log_begin == 2 * SEGMENT_SIZE
    assert found.expired_entries > 4000  # a whole file, and a part of the next
    assert found.expired_entries + found.entries == before.entries


def test_the_log_was_cut_and_entries_point_behind_it(small: Config, tmp_path: Path) -> None:
    store = Path(shutil.copytree(small.store.store or "", tmp_path / "store"))
    segments = sorted((store / "commitlog").iterdir())
    segments[-1].unlink()
    config = config_for(store, LAYOUT, SEGMENT_SIZE)
    found = audit(config)
    assert set(found.counts) == {"entry-behind-log"}
    assert found.counts["entry-behind-log"] == audit(small).entries - found.keys
    assert found.missing_keys == 0


def test_indexed_twice_after_a_crash(small: Config, tmp_path: Path) -> None:
    # The newest file was thrown away, and re-dispatch began before its first message (spec rocketmq-store 7.5).
    store = Path(shutil.copytree(small.store.store or "", tmp_path / "store"))
    config = config_for(store, LAYOUT, SEGMENT_SIZE)
    max((store / "index").iterdir()).unlink()
    index_log(config, begin=SEGMENT_SIZE, name=20270101000000000)
    found = audit(config)
    assert found.missing_keys == 0
    # Of the files that were made anew, those that end before the newest old one have names out of order.
    assert set(found.counts) == {"entry-twice", "file-order"}
    assert found.counts["entry-twice"] == found.entries - found.keys
    assert lost_keys(config, "5.4").total() == 0


def test_wherever_the_work_is_cut_it_comes_to_the_same(small: Config, tmp_path: Path) -> None:
    store = Path(shutil.copytree(small.store.store or "", tmp_path / "store"))
    files = sorted((store / "index").iterdir())
    files[2].unlink()
    rand = random.Random(7)
    for path in (files[0], files[1], files[-1]):
        data = bytearray(path.read_bytes())
        for _ in range(60):
            data[rand.randrange(2040, len(data) // 2)] ^= 1 << rand.randrange(8)
        path.write_bytes(data)
    index_log(config_for(store, LAYOUT, SEGMENT_SIZE), begin=SEGMENT_SIZE, name=20270101000000000)
    for path in sorted((store / "index").iterdir())[-2:]:
        path.unlink()
    config = config_for(store, LAYOUT, SEGMENT_SIZE)
    wanted = audit(config)
    assert wanted.missing_keys
    assert len(wanted.counts) >= 5
    assert wanted.hole_count > 3
    assert wanted.missing_keys == lost_keys(config, "5.4").total()
    offsets = [frame.phy_offset for frame in naive_frames(store / "commitlog", SEGMENT_SIZE)]

    @settings(max_examples=25)
    @given(st.lists(st.sampled_from(offsets), max_size=8), st.sampled_from([None, SEGMENT_SIZE]), st.randoms())
    def check(cuts: list[int], size: int | None, order: random.Random) -> None:
        plan = plan_audit(Disk(), config, cuts=cuts, size=size)
        stretches = [(task.begin, task.end) for task in plan.tasks if task.begin < task.end]
        assert [end for _, end in stretches[:-1]] == [begin for begin, _ in stretches[1:]]
        assert (stretches[0][0], stretches[-1][1]) == (0, NEVER)
        assert set(cuts) - {0} <= {begin for begin, _ in stretches}
        numbers = list(range(len(plan.tasks)))
        order.shuffle(numbers)
        assert audit_plan(plan, config, numbers) == wanted

    check()


BEFORE, BETWEEN, NOW = "3.x", "4.7", "5.4"
SMALL = IndexLayout(100, 400)


def write(store: Path, count: int, keys: int, tagged: Callable[[int], bool] = lambda _: False) -> None:
    """Messages with a unique key, ``keys`` further ones, and a tag where wanted."""
    with CommitLogWriter(store / "commitlog", SEGMENT_SIZE) as writer:
        for number in range(count):
            properties = {"UNIQ_KEY": f"{number:032X}"}
            if keys:
                properties["KEYS"] = " ".join(f"k{number}-{key}" for key in range(keys))
            if tagged(number):
                properties["TAGS"] = "TagA"
            writer.append(FrameSpec("Orders", b"", properties, store_timestamp=1_700_000_000_000 + number))


@pytest.mark.parametrize("keys", [0, 1, 2, 3])
@pytest.mark.parametrize("index_num", [400, 40_000])
def test_a_sound_store_without_tags_has_its_unique_keys(tmp_path: Path, keys: int, index_num: int) -> None:
    # Files, and the windows that are read of them, cut messages in two.
    store = tmp_path / "store"
    write(store, 1500, keys)
    config = config_for(store, IndexLayout(100, index_num), SEGMENT_SIZE)
    index_log(config, NOW)
    found = audit(config)
    assert found.is_sound, rows_of(found)
    assert [era.flavour for era in found.eras] == [NOW]


@pytest.mark.parametrize("keys", [1, 2, 3])
@pytest.mark.parametrize("index_num", [400])
def test_a_store_without_its_unique_keys_is_still_known(tmp_path: Path, keys: int, index_num: int) -> None:
    store = tmp_path / "store"
    write(store, 1500, keys, lambda number: number % 3 == 0)
    config = config_for(store, IndexLayout(100, index_num), SEGMENT_SIZE)
    index_log(config, BEFORE)
    found = audit(config)
    assert found.is_sound, rows_of(found)
    assert [era.flavour for era in found.eras] == [BEFORE]


def test_new_files_that_do_not_tell_are_judged_by_those_before(tmp_path: Path) -> None:
    store = tmp_path / "store"
    write(store, 1500, 1, lambda number: number < 500)
    config = config_for(store, SMALL, SEGMENT_SIZE)
    index_log(config, BETWEEN)
    found = audit(config)
    assert found.is_sound, rows_of(found)
    assert [era.flavour for era in found.eras] == [BETWEEN]


def test_an_upgrade_is_seen_at_the_begin_of_a_file(tmp_path: Path) -> None:
    store = tmp_path / "store"
    write(store, 3000, 1, lambda number: number % 3 > 0)
    config = config_for(store, SMALL, SEGMENT_SIZE)
    assert config.store.store is not None
    frames = list(naive_frames(store / "commitlog", SEGMENT_SIZE))
    index_log(config, BETWEEN)
    kept = sorted((store / "index").iterdir())
    end = int.from_bytes(kept[4].read_bytes()[24:32], "big")
    # The last message's further keys are in the file behind, which goes: nobody puts them in again.
    entries = kept[5].read_bytes()[40 + 4 * SMALL.hash_slot_num :]
    lost = sum(entries[at + 4 : at + 12] == end.to_bytes(8, "big") for at in range(0, len(entries), 20))
    for path in kept[5:]:
        path.unlink()
    index_log(config, NOW, begin=next(f.phy_offset for f in frames if f.phy_offset > end), name=20260101000000100)
    found = audit(config)
    assert [era.flavour for era in found.eras] == [BETWEEN, NOW]
    assert found.missing_keys == lost == 1
