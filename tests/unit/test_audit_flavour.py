"""Which RocketMQ indexed a store, by its entries: whatever its messages have, however files cut them, and damaged."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from indexd.audit.files import FLAVOUR_NAMES as NAMES
from indexd.audit.files import detect_flavours, layout_of
from indexd.audit.plan import plan_audit
from indexd.config import Config
from indexd.index.format import IndexLayout
from indexd.storage.disk import Disk, DiskFile
from support.auditing import audit, config_for, index_log, rows_of
from support.commitlog_writer import CommitLogWriter, FrameSpec
from support.naive import key_hash, naive_frames
from support.small_log import SEGMENT_SIZE, write_log

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


@pytest.mark.parametrize("flavour", [BETWEEN, NOW])
def test_tags_that_few_messages_have_are_looked_for(tmp_path: Path, flavour: str) -> None:
    store = tmp_path / "store"
    write(store, 4000, 1, lambda number: number % 500 == 250)
    config = config_for(store, LAYOUT, SEGMENT_SIZE)
    index_log(config, flavour)
    found = audit(config)
    assert found.is_sound, rows_of(found)
    assert eras_of(config) == [flavour]


def test_messages_with_more_keys_than_a_window(tmp_path: Path) -> None:
    store = tmp_path / "store"
    write(store, 60, 200, lambda number: number % 2 == 0)
    config = config_for(store, IndexLayout(100, 3000), SEGMENT_SIZE)
    index_log(config, BETWEEN)
    assert eras_of(config) == [BETWEEN]


@pytest.mark.parametrize("tags", [True, False])
@pytest.mark.parametrize("index_num", [100, 2000])
@pytest.mark.parametrize("flavour", NAMES)
def test_one_damaged_file_makes_no_era(tmp_path: Path, flavour: str, index_num: int, tags: bool) -> None:
    store = tmp_path / "store"
    if tags:
        write_log(store, 700)
    else:
        write(store, 700, 1)
    config = config_for(store, IndexLayout(50, index_num), SEGMENT_SIZE)
    index_log(config, flavour)
    wanted, rand = [NOW if flavour == BETWEEN and not tags else flavour], random.Random(7)
    files = sorted((store / "index").iterdir())
    for path in rand.sample(files, min(len(files), 5)):
        sound = path.read_bytes()
        for damage in (_flip_bits, _wipe, _scatter):
            path.write_bytes(damage(sound, rand))
            assert eras_of(config) == wanted
        path.write_bytes(sound)


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


def _flip_bits(data: bytes, rand: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(50):
        changed[rand.randrange(240, len(data))] ^= 1 << rand.randrange(8)
    return bytes(changed)


def _wipe(data: bytes, rand: random.Random) -> bytes:
    begin = rand.randrange(240, len(data) - 600)
    return data[:begin] + bytes(512) + data[begin + 512 :]


def _scatter(data: bytes, rand: random.Random) -> bytes:
    # Offsets of entries are those of other messages.
    changed, count = bytearray(data), (len(data) - 240) // 20
    for _ in range(count // 8):
        to, source = (240 + 20 * rand.randrange(1, count) + 4 for _ in range(2))
        changed[to : to + 8] = data[source : source + 8]
    return bytes(changed)


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


@pytest.mark.parametrize("when", [1, 2])
def test_a_file_that_the_broker_removes_while_it_is_asked(tmp_path: Path, when: int) -> None:
    store = tmp_path / "store"
    write(store, 1500, 2, lambda number: number % 3 == 0)
    config = config_for(store, IndexLayout(100, 400), SEGMENT_SIZE)
    index_log(config, NOW)
    oldest = min((store / "index").iterdir())
    files = plan_audit(Disk(), config).files

    class Expiring(Disk):
        opened = 0

        def open_read(self, path: Path) -> DiskFile:
            self.opened += path == oldest
            if path == oldest and self.opened == when:
                path.unlink()
            return super().open_read(path)

    disk = Expiring()
    found = detect_flavours(disk, config, store / "index", layout_of(config), files)
    assert [one.flavour for one in found] == [NOW]
    assert disk.opened == 1
    assert oldest.exists() == (when > 1)
