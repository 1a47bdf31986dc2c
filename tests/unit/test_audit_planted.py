"""Faults planted into a broker's index files: what the audit calls them, and which keys they cost."""

from __future__ import annotations

import os
import random
import struct
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexd.audit import Audit, audit_task, join, plan_audit
from indexd.compare.index import NOTED_MAX
from indexd.config import Config
from indexd.errors import UnsafeStoreError, UsageError
from indexd.index.format import IndexLayout
from indexd.storage.disk import Disk
from support.auditing import audit, audit_plan, config_for, index_log, lost_keys, rows_of
from support.data_directory import SEGMENT, T0, Store, spec
from support.naive import naive_frames
from support.verifying import HASH, LAYOUT, PHY, PREV, TIME, change, change_entry, entry_of, set_slot

# Where the header's fields stand, and how wide they are.
BEGIN_TIME, END_TIME, BEGIN_PHY, END_PHY, USED, COUNT = (
    (0, ">q"),
    (8, ">q"),
    (16, ">q"),
    (24, ">q"),
    (32, ">i"),
    (36, ">i"),
)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Ten messages of two or four keys: three full files of nine entries, and one of three that is open."""
    store = Store(tmp_path, LAYOUT)
    for number in range(10):
        extra = {"UNIQ_KEY": f"u{number}", "TAGS": "t"} if number % 2 else {}
        store.append(spec(T0 + 1700 * number, size=60, KEYS=f"a{number} b{number % 3}", **extra))
    config = config_for(store.root, LAYOUT, SEGMENT)
    index_log(config)
    assert audit(config).is_sound
    return config


def files(config: Config) -> list[Path]:
    assert config.store.store is not None
    return sorted((config.store.store / "index").iterdir())


def checked(config: Config) -> Audit:
    """The audit, with its holes compared to what RocketMQ's own walk does not find."""
    found, lost = audit(config), lost_keys(config, "5.4")
    assert found.missing_keys == lost.total(), rows_of(found)
    for hole in found.holes:
        assert {hole.begin, hole.last} <= set(lost)
    assert sum(hole.messages for hole in found.holes) == len(lost)
    return found


def set_header(path: Path, field: tuple[int, str], value: int) -> None:
    position, form = field
    assert struct.unpack_from(form, path.read_bytes(), position) != (value,)
    change(path, position, struct.pack(form, value))


def whats(found: Audit) -> set[str]:
    return set(found.counts)


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
    assert whats(checked(config)) == {"chain-previous"}


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
    names = {"notes.txt", "20260101", "20260101000000099"}
    assert {finding.file for finding in found.findings} == {f"index/{name}" for name in names}


FILES = IndexLayout(11, 40)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Sixty messages with keys that repeat, in several segments; two full files and an open one."""
    rand = random.Random(3)
    store = Store(tmp_path_factory.mktemp("damaged"), FILES)
    for number in range(60):
        keys = " ".join(rand.choice("abcdefgh") for _ in range(rand.randrange(4)))
        store.append(spec(T0 + 700 * number, size=rand.randrange(300), KEYS=keys, TAGS=rand.choice(["s", "t"])))
    many = config_for(store.root, FILES, SEGMENT, flavour="5.4")
    index_log(many)
    assert audit(many).is_sound
    return many


def index_files(many: Config) -> list[Path]:
    assert many.store.store is not None
    return sorted((many.store.store / "index").iterdir())


@st.composite
def damages(draw: st.DrawFn) -> list[tuple[int, int, bytes]]:
    """(file, position, bytes): single bits, whole numbers, stretches of zeros or of another part."""
    found = []
    for _ in range(draw(st.integers(1, 6))):
        position = draw(st.integers(0, FILES.file_size - 1))
        data = draw(
            st.one_of(
                st.binary(min_size=1, max_size=4),
                st.integers(0, 45).map(lambda number: number.to_bytes(4, "big")),
                st.integers(1, 200).map(bytes),
            )
        )
        found.append((draw(st.integers(0, 2)), position, data[: FILES.file_size - position]))
    return found


def test_the_keys_that_are_missed_are_those_that_no_query_finds(many: Config) -> None:
    assert many.store.store is not None
    files = index_files(many)
    assert len(files) >= 3
    before = [path.read_bytes() for path in files]
    offsets = [frame.phy_offset for frame in naive_frames(many.store.store / "commitlog", SEGMENT)]

    @settings(max_examples=150)
    @given(damages(), st.lists(st.sampled_from(offsets), max_size=4))
    def check(damage: list[tuple[int, int, bytes]], cuts: list[int]) -> None:
        for path, data in zip(files, before, strict=False):
            path.write_bytes(data)
        for file, position, data in damage:
            with files[file].open("r+b") as opened:
                opened.seek(position)
                opened.write(data)
        plan = plan_audit(Disk(), many, cuts=cuts)
        found, lost = audit(many), lost_keys(many, "5.4", plan)
        holes: Counter[int] = Counter()
        for hole in found.holes:
            missed = {offset: count for offset, count in lost.items() if hole.begin <= offset < hole.end}
            assert (hole.messages, hole.keys) == (len(missed), sum(missed.values())), rows_of(found)
            holes.update(missed)
        assert holes == lost
        assert audit_plan(plan, many) == found
        # With files that are checked beside the comparison, which took them for sound.
        beside = [audit_task(one, Disk(), many, workers=1) for one in plan.tasks]
        assert join(plan, beside) == found

    check()
