"""One fault of every kind, planted into a broker's index files: what the audit calls it, and which keys it costs."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from indexd.compare.index import NOTED_MAX
from indexd.config import Config
from indexd.errors import UnsafeStoreError, UsageError
from support.auditing import audit, config_for, index_log
from support.data_directory import SEGMENT, T0, Store, spec
from support.planted import (
    BEGIN_PHY,
    BEGIN_TIME,
    COUNT,
    END_PHY,
    END_TIME,
    USED,
    checked,
    config,
    files,
    set_header,
    whats,
)
from support.verifying import HASH, LAYOUT, PHY, PREV, TIME, change, change_entry, entry_of, set_slot

__all__ = ["config"]


def test_a_wrong_hash(config: Config) -> None:
    path = files(config)[1]
    change_entry(path, 4, HASH, entry_of(path, 4).key_hash ^ 1)
    found = checked(config)
    assert "entry-hash" in found.counts
    assert found.missing_keys >= 1
    (finding,) = [one for one in found.findings if one.what == "entry-hash"]
    assert (finding.file, finding.position) == (f"index/{path.name}", LAYOUT.entry_position(4))


@pytest.mark.parametrize("offset", [-1, 0, 1 << 40])
def test_a_phy_offset_far_away(config: Config, offset: int) -> None:
    path = files(config)[1]
    change_entry(path, 4, PHY, offset)
    found = checked(config)
    assert whats(found) == {"entry-phy-offset" if offset < 0 else "entry-phy-offset-range"}
    assert found.missing_keys == 1


@pytest.mark.parametrize("number", [1, 2, 9])
def test_a_wrong_time_difference(config: Config, number: int) -> None:
    path = files(config)[1]
    change_entry(path, number, TIME, entry_of(path, number).time_diff + 5)
    found = checked(config)
    # Entry 1 counts from a file that may be gone: nobody can say.
    assert whats(found) == (set() if number == 1 else {"entry-time-difference"})
    assert found.missing_keys == 0


def test_a_negative_time_difference_ends_the_walk(config: Config) -> None:
    path = files(config)[1]
    change_entry(path, 9, TIME, -1)
    found = checked(config)
    assert whats(found) == {"entry-time-difference"}
    assert found.missing_keys >= 1
    assert found.unreachable_keys == found.missing_keys


@pytest.mark.parametrize(
    ("value", "what"), [(9, "chain-loop"), (10, "chain-range"), (-1, "chain-range"), (0, "chain-previous")]
)
def test_a_broken_chain(config: Config, value: int, what: str) -> None:
    path = files(config)[1]
    number = next(number for number in range(9, 0, -1) if entry_of(path, number).prev_index)
    value = number if what == "chain-loop" else value
    change_entry(path, number, PREV, value)
    found = checked(config)
    assert whats(found) == {what}
    assert found.missing_keys == found.unreachable_keys >= 1
    assert found.files[1].unreachable == found.missing_keys


def test_a_chain_into_another_slot(config: Config) -> None:
    path = files(config)[1]
    number = next(number for number in range(9, 0, -1) if entry_of(path, number).prev_index)
    change_entry(path, number, PREV, entry_of(path, number).prev_index - 1)
    assert whats(checked(config)) == {"chain-slot"}


@pytest.mark.parametrize(
    ("value", "what"),
    [(0, "slot-wiped"), (-5, "slot-range"), (11, "slot-range"), (1 << 30, "slot-range"), (1, "slot-old")],
)
def test_a_wrong_slot(config: Config, value: int, what: str) -> None:
    path = files(config)[1]
    slot = LAYOUT.slot_of(entry_of(path, 9).key_hash)
    if what == "slot-old":
        value = entry_of(path, 9).prev_index
    position = set_slot(path, slot, value)
    found = checked(config)
    assert whats(found) == {what if value or what != "slot-old" else "slot-wiped"}
    assert found.missing_keys >= 1
    assert found.findings[0].position == position


@pytest.mark.parametrize("value", [4, 5])
def test_a_slot_of_the_open_file_that_names_what_is_not_there(config: Config, value: int) -> None:
    path = files(config)[-1]
    set_slot(path, LAYOUT.slot_of(entry_of(path, 3).key_hash), value)
    found = checked(config)
    assert whats(found) == {"slot-behind-last"}
    assert found.missing_keys >= 1


def test_a_file_that_has_an_entry_twice(config: Config) -> None:
    # The last entry of the open file once more, with its links as a second put makes them.
    path = files(config)[-1]
    entry = entry_of(path, 3)
    change(path, LAYOUT.entry_position(4), struct.pack(">iqii", entry.key_hash, entry.phy_offset, entry.time_diff, 3))
    set_slot(path, LAYOUT.slot_of(entry.key_hash), 4)
    set_header(path, COUNT, 5)
    found = checked(config)
    assert (found.counts, found.missing_keys) == ({"entry-twice": 1}, 0)


def test_entries_in_no_order_at_all(config: Config) -> None:
    # Two entries changed places: each key is still found, by chains that are as they must be.
    path = files(config)[1]
    first, second = entry_of(path, 2), entry_of(path, 8)
    for member, name in ((HASH, "key_hash"), (PHY, "phy_offset"), (TIME, "time_diff")):
        for number, entry in ((2, second), (8, first)):
            if getattr(entry_of(path, number), name) != getattr(entry, name):
                change_entry(path, number, member, getattr(entry, name))
    found = checked(config)
    assert {what.partition("-")[0] for what in found.counts} <= {"chain", "slot"}


def test_many_findings_are_counted_and_few_kept(tmp_path: Path) -> None:
    layout = type(LAYOUT)(5, 2000)
    store = Store(tmp_path, layout, segment=1 << 16)
    store.append(*(spec(T0 + number, KEYS=f"k{number}") for number in range(300)))
    config = config_for(store.root, layout, 1 << 16)
    index_log(config)
    (path,) = files(config)
    for number in range(1, 301):
        change_entry(path, number, TIME, 9, layout)
    found = audit(config)
    assert found.counts == {"entry-time-difference": 299}
    assert [finding.text.split(":")[0] for finding in found.findings] == [f"entry {n + 2}" for n in range(NOTED_MAX)]


def test_a_put_that_a_crash_cut_short(config: Config) -> None:
    # Entry and slot are there, the header does not count it yet: RocketMQ's query finds it (spec 11, number 5).
    path = files(config)[-1]
    set_header(path, COUNT, 3)
    found = checked(config)
    assert (whats(found), found.missing_keys) == ({"header-index-count"}, 0)


def test_a_header_that_counts_too_many(config: Config) -> None:
    set_header(files(config)[-1], COUNT, 8)
    found = checked(config)
    assert (whats(found), found.missing_keys) == ({"header-index-count"}, 0)


@pytest.mark.parametrize(
    ("field", "what"),
    [
        (BEGIN_PHY, "header-begin-phy-offset"),
        (END_PHY, "header-end-phy-offset"),
        (BEGIN_TIME, "header-begin-timestamp"),
        (END_TIME, "header-end-timestamp"),
    ],
)
@pytest.mark.parametrize("more", [-1, 2, 1 << 33])
def test_a_wrong_header(config: Config, field: tuple[int, str], what: str, more: int) -> None:
    path = files(config)[1]
    (value,) = struct.unpack_from(field[1], path.read_bytes(), field[0])
    set_header(path, field, value + more)
    found = checked(config)
    assert what in found.counts
    assert whats(found) <= {what, "entry-time-difference"}
    assert found.missing_keys == 0


@pytest.mark.parametrize("value", [0, 100])
def test_a_wrong_slot_count(config: Config, value: int) -> None:
    set_header(files(config)[1], USED, value)
    assert whats(checked(config)) == {"header-used-slot-count"}


def test_a_file_of_another_size_is_not_read(config: Config) -> None:
    path = files(config)[1]
    with path.open("r+b") as file:
        file.truncate(LAYOUT.file_size + 20)
    found = audit(config)
    assert (found.counts, found.missing_keys) == ({"file-size": 1}, 9)
    assert len(found.files) == 3


def test_sizes_that_fit_no_file_end_it(config: Config) -> None:
    assert config.store.store is not None
    with pytest.raises(UnsafeStoreError, match="7 slots and 11 entries make"):
        audit(config_for(config.store.store, type(LAYOUT)(7, 11), SEGMENT))
    with pytest.raises(UsageError, match="no store is given"):
        audit(config.model_copy(update={"store": config.store.model_copy(update={"store": None})}))


def test_what_is_no_index_file(config: Config) -> None:
    folder = files(config)[0].parent
    (folder / "notes.txt").write_text("mine")
    (folder / "20260101").write_bytes(b"")
    (folder / "20260101000000099").mkdir()
    os.mkfifo(folder / "20260101000000098")
    found = audit(config)
    assert found.counts == {"file-foreign": 3}
    words = {finding.file: finding.text for finding in found.findings}
    assert "leaves it alone" in words["index/notes.txt"]
    assert "its name is a number" in words["index/20260101"]
    assert "fails to load" in words["index/20260101000000099"]
