"""A repair that would take keys away which the old index finds is refused, and told how it can be done."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from indexd.audit.result import FlavourRange
from indexd.config import Config
from indexd.index.format import IndexLayout
from support.auditing import config_for, index_log, lost_keys
from support.daemon import compile_kernels
from support.naive import NaiveIndexService, naive_frames
from support.repairing import HASH_SLOT_NUM, INDEX_NUM, folders_of, index_of, repair, tree
from support.small_log import SEGMENT_SIZE, write_log


@pytest.fixture
def config(tmp_path: Path) -> Config:
    compile_kernels()
    store = tmp_path / "store"
    write_log(store, 1500)
    (store / "lock").write_text("lock")
    return config_for(store, IndexLayout(HASH_SLOT_NUM, INDEX_NUM), SEGMENT_SIZE)


@pytest.fixture
def store(config: Config) -> Path:
    assert config.store.store is not None
    return config.store.store


def refused(config: Config, store: Path, *words: str) -> str:
    before, stamps = index_of(store), tree(store)
    for how in ("--plan", "--yes"):
        code, out, errors = repair(config, how, *words)
        assert (code, out, errors.count("\n")) == (4, "", 1), errors
        assert "a repair would lose" in errors
        assert "--flavour 5.4 loses none" in errors
        assert (index_of(store), folders_of(store), tree(store)) == (before, [], stamps)
    return errors


@pytest.mark.parametrize(("flavour", "wrong"), [("5.4", "4.7"), ("5.4", "3.x"), ("4.7", "3.x")])
def test_with_the_wrong_flavour_it_is_refused(
    config: Config, store: Path, monkeypatch: pytest.MonkeyPatch, flavour: str, wrong: str
) -> None:
    index_log(config, flavour)
    monkeypatch.setattr("indexd.audit.plan.detect_flavours", lambda *_: [FlavourRange(0, wrong)])
    assert f"RocketMQ {wrong}" in refused(config, store)
    refused(config, store, "--all")
    # Whoever says it knows it.
    assert repair(config, "--yes", "--flavour", "5.4")[0] == 0
    assert not lost_keys(config, "5.4")
    assert repair(config, "--yes", "--flavour", "4.7")[0] == 0
    assert not lost_keys(config, "4.7")


def test_a_few_tags_in_the_middle_of_a_file_are_not_lost(config: Config, store: Path) -> None:
    # More messages than these would be evidence.
    old, new = (NaiveIndexService(HASH_SLOT_NUM, 40_000, flavour) for flavour in ("4.7", "5.4"))
    new.files = old.files
    tags = 0
    for number, frame in enumerate(naive_frames(store / "commitlog", SEGMENT_SIZE)):
        is_new = 700 <= number < 704
        (new if is_new else old).build_index(frame)
        tags += is_new and bool(frame.tags) and frame.sys_flag & 0xC != 0xC
    (store / "index").mkdir()
    (store / "index" / "20260101000000000").write_bytes(old.files[0].to_bytes())
    config = config_for(store, IndexLayout(HASH_SLOT_NUM, 40_000), SEGMENT_SIZE)
    assert tags
    assert f"would lose {tags} keys: index/20260101000000000 has them" in refused(config, store)


@pytest.mark.parametrize("flavour", ["3.x", "4.0", "4.7", "5.4"])
def test_entries_of_no_key_at_all_hold_nothing_up(config: Config, store: Path, flavour: str) -> None:
    index_log(config, flavour)
    rand = random.Random(3)
    for path in sorted((store / "index").iterdir())[1:3]:
        data = bytearray(path.read_bytes())
        for number in rand.sample(range(1, INDEX_NUM), 40):
            at = 40 + 4 * HASH_SLOT_NUM + 20 * number + rand.randrange(12)
            data[at] ^= 1 << rand.randrange(8)
        path.write_bytes(data)
    before = sum(lost_keys(config, flavour).values()) if flavour != "3.x" else 1
    assert before
    assert repair(config, "--yes")[0] == 0
    if flavour != "3.x":
        assert not lost_keys(config, flavour)
    assert repair(config, "--plan")[0] == 0
