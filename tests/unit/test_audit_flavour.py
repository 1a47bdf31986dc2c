"""Which RocketMQ indexed a store, by its entries: whatever its messages have, however files cut them, and damaged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from indexd.audit.plan import plan_audit
from indexd.commitlog.writer import CommitLogWriter, FrameSpec
from indexd.config import Config
from indexd.index.format import IndexLayout
from indexd.storage.disk import Disk
from support.auditing import audit, config_for, index_log, rows_of
from support.naive import key_hash, naive_frames
from support.small_log import SEGMENT_SIZE

BEFORE, BETWEEN, NOW = "3.x", "4.7", "5.4"
LAYOUT = IndexLayout(100, 400)


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


def eras_of(config: Config) -> list[str]:
    return [era.flavour for era in plan_audit(Disk(), config).eras]


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


def test_unique_keys_that_cannot_be_read_make_no_older_rocketmq(tmp_path: Path) -> None:
    store = tmp_path / "store"
    write(store, 2000, 1, lambda number: number % 3 == 0)
    config = config_for(store, LAYOUT, SEGMENT_SIZE)
    index_log(config, NOW)
    files = sorted((store / "index").iterdir())
    data = bytearray(files[5].read_bytes())
    unique = {key_hash(f"Orders#{number:032X}") for number in range(2000)}
    for number in range(1, LAYOUT.index_num):
        at = LAYOUT.entry_position(number)
        if int.from_bytes(data[at : at + 4], "big") in unique:
            data[at + 11] ^= 1  # the offset where the message begins
    files[5].write_bytes(data)
    assert eras_of(config) == [NOW]


def test_an_upgrade_is_seen_at_the_begin_of_a_file(tmp_path: Path) -> None:
    store = tmp_path / "store"
    write(store, 3000, 1, lambda number: number % 3 > 0)
    config = config_for(store, LAYOUT, SEGMENT_SIZE)
    assert config.store.store is not None
    frames = list(naive_frames(store / "commitlog", SEGMENT_SIZE))
    index_log(config, BETWEEN)
    kept = sorted((store / "index").iterdir())
    end = int.from_bytes(kept[4].read_bytes()[24:32], "big")
    # The last message's further keys are in the file behind, which goes: nobody puts them in again.
    entries = kept[5].read_bytes()[40 + 4 * LAYOUT.hash_slot_num :]
    lost = sum(entries[at + 4 : at + 12] == end.to_bytes(8, "big") for at in range(0, len(entries), 20))
    for path in kept[5:]:
        path.unlink()
    index_log(config, NOW, begin=next(f.phy_offset for f in frames if f.phy_offset > end), name=20260101000000100)
    found = audit(config)
    assert [era.flavour for era in found.eras] == [BETWEEN, NOW]
    assert found.missing_keys == lost == 1
