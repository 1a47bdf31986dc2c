"""Plans of repairs: which files stay, where the log is cut, in pieces, and what names new files take."""

from __future__ import annotations

import datetime
import random
import shutil
import struct
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from indexd.config import Config
from indexd.errors import CorruptDataError
from indexd.index.format import HEADER_SIZE, IndexHeader, IndexLayout
from indexd.recovery.rebuild import rebuild
from indexd.repair.build import mark_end
from indexd.repair.plan import RepairPlan, names_between
from indexd.storage.disk import Disk
from support.auditing import audit, config_for, index_log
from support.data_directory import SEGMENT, T0, Store, spec
from support.mending import (
    LAYOUT,
    index_files,
    mended,
    planned,
    put_in_place,
    repair,
    report_of,
    spaced,
    write,
)
from support.naive import naive_frames


@pytest.fixture(params=[False, True], ids=["whole", "straddling"])
def config(tmp_path: Path, request: pytest.FixtureRequest) -> Config:
    """Some full files and an open one."""
    config = write(tmp_path, straddling=request.param)
    index_log(config)
    spaced(config)
    assert audit(config).is_sound
    assert len(index_files(config)) == (30 if request.param else 20)
    return config


def names_of(files: list[Path]) -> list[str]:
    return [path.name for path in files]


def test_a_sound_index_needs_nothing(config: Config) -> None:
    plan = planned(config)
    assert not plan.is_needed
    assert [file.name for file in plan.kept] == names_of(index_files(config))
    assert plan.lines() == [f"{len(plan.kept)} index files stay as they are"]
    assert plan.to_json()["needed"] is False


def test_files_that_were_deleted_are_built_and_the_others_stay(config: Config) -> None:
    files = index_files(config)
    stood = {path.name: path.read_bytes() for path in files}
    for number in (4, 5, 9):
        files[number].unlink()
    plan = repair(config)
    assert [wanted.replaces for wanted in plan.ranges] == [(), ()]
    assert plan.ranges[0].begin > plan.ranges[1].begin
    assert {file.name for file in plan.kept} == set(stood) - {files[number].name for number in (4, 5, 9)}
    mended(config, plan)
    for path in index_files(config)[:-1]:
        if path.name in stood:
            assert path.read_bytes() == stood[path.name]
    # What was built are the files that were lost, but for the place of the names.
    made = [path for path in index_files(config) if path.name not in stood]
    assert [path.read_bytes() for path in made] == [stood[files[number].name] for number in (4, 5, 9)]


def test_the_tail_is_built_into_the_file_that_was_open(config: Config) -> None:
    assert config.store.store is not None
    offsets = [frame.phy_offset for frame in naive_frames(config.store.store / "commitlog", SEGMENT)]
    last = index_files(config)[-1]
    before = IndexHeader.unpack(last.read_bytes()[:HEADER_SIZE])
    last.unlink()
    full = index_files(config)[-1]
    plan = repair(config)
    assert len(plan.ranges) == 1
    assert plan.kept[-1].name == full.name
    mended(config, plan)
    header = IndexHeader.unpack(index_files(config)[-1].read_bytes()[:HEADER_SIZE])
    assert header.index_count == before.index_count
    assert (header.end_phy_offset, before.end_phy_offset) == (offsets[-1] + 1, offsets[-1])


def test_an_open_file_with_a_hole_behind_it_is_built_again_from_its_begin(tmp_path: Path) -> None:
    store = Store(tmp_path, LAYOUT)
    for number in range(30):
        store.append(spec(T0 + 1300 * number, size=90, KEYS=f"a{number}"))
    config = config_for(store.root, LAYOUT, SEGMENT, flavour="5.4")
    index_log(config)
    open_one = index_files(config)[-1].name
    for number in range(30, 60):
        store.append(spec(T0 + 1300 * number, size=90, KEYS=f"a{number}"))
    plan = repair(config)
    assert [one.replaces for one in plan.ranges] == [(open_one,)]
    assert len(index_files(config)) == 3
    assert index_files(config)[-2].name == open_one
    mended(config, plan)


def test_everything_is_the_full_rebuild(config: Config, tmp_path: Path) -> None:
    files = index_files(config)
    files[2].unlink()
    plan = repair(config, everything=True)
    assert plan.kept == ()
    mended(config, plan)
    rebuild(config, Disk(), tmp_path / "out", lambda *_: None)
    there = [path.read_bytes() for path in sorted((tmp_path / "out" / "index").iterdir())]
    here = [path.read_bytes() for path in index_files(config)]
    assert here[:-1] == there[:-1]
    assert len(here) == len(there)
    # The end that a broker which starts begins behind.
    ends = [IndexHeader.unpack(data[:HEADER_SIZE]).end_phy_offset for data in (here[-1], there[-1])]
    assert ends[0] == ends[1] + 1
    assert here[-1][:24] + here[-1][32:] == there[-1][:24] + there[-1][32:]


def test_the_last_file_is_marked_once_and_an_empty_one_never(config: Config, tmp_path: Path) -> None:
    last = index_files(config)[-1]
    mark_end(Disk(), config, last)
    marked = last.read_bytes()
    mark_end(Disk(), config, last)
    assert last.read_bytes() == marked
    assert audit(config).is_sound
    empty = tmp_path / "empty"
    empty.write_bytes(IndexHeader(5, 5, 7, 7).pack().ljust(LAYOUT.file_size, b"\0"))
    mark_end(Disk(), config, empty)
    assert empty.read_bytes()[24:32] == struct.pack(">q", 7)


def test_without_any_index_it_says_by_which_flavour_it_builds(tmp_path: Path) -> None:
    config = write(tmp_path, flavour=None)
    plan = planned(config)
    assert not plan.is_flavour_known
    assert any("flavour 5.4" in line for line in plan.lines())
    assert config.store.store is not None
    (config.store.store / "index").mkdir()
    put_in_place(config, plan, plan.ranges)
    mended(config, plan)
    # The store time of the first message in the time zone that is the furthest behind.
    assert index_files(config)[0].name == "20231114101320000"


def test_a_broker_that_was_upgraded_in_a_hole(tmp_path: Path) -> None:
    # 4.7 up to the middle of the log, 5.4 from there on; the file with the switch in it is lost.
    config = write(tmp_path, 200, flavour=None)
    assert config.store.store is not None
    offsets = [frame.phy_offset for frame in naive_frames(config.store.store / "commitlog", SEGMENT)]
    index_log(config, "4.7")
    for path in index_files(config)[6:]:
        path.unlink()
    begin = IndexHeader.unpack(index_files(config)[-1].read_bytes()[:HEADER_SIZE]).end_phy_offset
    switch = next(offset for offset in offsets if offset > begin)
    index_log(config, "5.4", begin=switch, name=20260101000000100)
    spaced(config)
    files = index_files(config)
    flavours = [era.flavour for era in audit(config).eras]
    assert flavours == ["4.7", "5.4"]
    files[2].unlink()
    files[8].unlink()
    plan = repair(config)
    assert [era.flavour for era in plan.eras] == ["4.7", "5.4"]
    found = audit(config)
    assert found.is_sound
    assert [era.flavour for era in found.eras] == flavours


def test_foreign_files_empty_ones_and_those_of_another_size_are_left_out(config: Config) -> None:
    files = index_files(config)
    folder = files[0].parent
    (folder / "notes.txt").write_text("mine")
    (folder / "20260101005900000").write_bytes(bytes(LAYOUT.file_size - 1))
    (folder / "20260101005900001").write_bytes(bytes(LAYOUT.file_size))
    plan = repair(config)
    assert plan.left_out == ("20260101005900000", "20260101005900001", "notes.txt")
    assert plan.ranges == ()
    assert names_of(index_files(config)) == names_of(files)
    mended(config, plan)


def test_what_has_expired_stays_where_it_is_sound(config: Config) -> None:
    assert config.store.store is not None
    segments = sorted((config.store.store / "commitlog").iterdir())
    for path in segments[:2]:
        path.unlink()
    files = index_files(config)
    files[len(files) // 2].unlink()
    first = files[0]
    with files[1].open("r+b") as opened:  # damaged, and nobody can build it again
        opened.seek(LAYOUT.slot_position(2))
        opened.write(struct.pack(">i", 1))
    plan = repair(config)
    assert plan.kept[0].name == first.name
    assert plan.left_out == (files[1].name,)
    assert len(plan.ranges) == 1
    mended(config, plan)


def test_where_there_is_no_room_for_a_name_the_newer_file_is_built_again_too(config: Config) -> None:
    files = index_files(config)
    files[4].unlink()
    files[5] = files[5].rename(files[5].with_name(f"{int(files[3].name) + 1}"))
    plan = repair(config)
    assert [wanted.replaces for wanted in plan.ranges] == [(files[5].name,)]
    mended(config, plan)


def test_a_file_that_does_not_come_out_right_is_told(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    files = index_files(config)
    files[4].unlink()
    before = names_of(index_files(config))

    plan = planned(config)
    beside = files[0].parent.with_name("beside")
    monkeypatch.setattr("support.mending.mark_end", lambda disk, config, path: _spoil(beside, plan))
    with pytest.raises(CorruptDataError, match="the new index does not hold"):
        put_in_place(config, plan, plan.ranges)
    assert names_of(index_files(config)) == before


def _spoil(folder: Path, plan: RepairPlan) -> None:
    path = next(path for path in folder.iterdir() if path.name in plan.ranges[0].names)
    data = bytearray(path.read_bytes())
    data[LAYOUT.entry_position(3)] ^= 1
    path.write_bytes(bytes(data))


NOON = "20260101120000000"


def is_time(name: str) -> bool:
    try:
        datetime.datetime.strptime(name[:14], "%Y%m%d%H%M%S").replace(tzinfo=datetime.UTC)
    except ValueError:
        return False
    return len(name) == 17


names = st.one_of(
    st.integers(10**15, 10**17 - 1).map(lambda number: f"{number:017d}"),
    st.integers(631_152_000_000, 4_102_444_800_000).map(
        lambda ms: f"{datetime.datetime.fromtimestamp(ms // 1000, datetime.UTC):%Y%m%d%H%M%S}{ms % 1000:03d}"
    ),
)


@given(
    st.none() | names,
    st.none() | names,
    st.lists(st.integers(0, 5), max_size=4),
    st.lists(names, max_size=6, unique=True),
    st.sets(names, max_size=3),
    st.integers(-(2**63), 2**63 - 1),
)
def test_names_are_new_times_in_order_between_their_neighbours(
    low: str | None, high: str | None, counts: list[int], own: list[str], others: set[str], timestamp: int
) -> None:
    wanted = [(count, tuple(own[2 * number : 2 * number + 2])) for number, count in enumerate(counts)]
    taken = (others | {name for name in (low, high) if name}) - {name for _, given in wanted for name in given}
    found = names_between(low, high, wanted, taken, timestamp)
    if found is None:
        assert high is not None or timestamp > 0 or (low or "") > "9999"
        return
    assert [len(one) for one in found] == [count for count, _ in wanted]
    flat = [name for one in found for name in one]
    assert flat == sorted(set(flat))
    assert all(map(is_time, flat))
    assert not taken & set(flat)
    assert all((low is None or low < name) and (high is None or name < high) for name in flat)


def test_the_names_of_files_that_go_are_taken_first() -> None:
    own = ("20260101000000000", "20260102000000000")
    assert names_between("20250101000000000", NOON[:4] + "0201000000000", [(2, own)], (), 0) == [own]
    assert names_between(None, None, [(1, own)], (), 0) == [own[:1]]
    # One that is missing comes behind them, as a broker would have named it.
    assert names_between(None, None, [(3, own)], (), 0) == [(*own, "20260102000000001")]


def test_a_later_range_lies_behind_what_an_earlier_one_keeps_if_it_is_not_built() -> None:
    found = names_between(None, None, [(1, ("20260101000000000", "20260105000000000")), (1, ())], (), 0)
    assert found == [("20260101000000000",), ("20260105000000001",)]


@pytest.mark.parametrize(
    ("low", "high", "count", "expected"),
    [
        ("20260101000000000", "20260101000000003", 2, ("20260101000000001", "20260101000000002")),
        ("20260101000000000", "20260101000000002", 2, None),
        ("20260101000000000", "20260101000000001", 1, None),
        # Over the end of a second, a day, a leap year's February; and from names that are no times.
        ("20240228235959999", "20240229000000002", 2, ("20240229000000000", "20240229000000001")),
        ("20260101000060000", None, 1, ("20260101000100000",)),
        ("20260001000000000", None, 1, ("20260101000000000",)),
        ("20261399999999999", None, 1, ("20270101000000000",)),
        ("99991231235959999", None, 1, None),
        (None, "20260101000000000", 1, ("20251231235959998",)),
    ],
)
def test_between(low: str | None, high: str | None, count: int, expected: tuple[str, ...] | None) -> None:
    far = 4_000_000_000_000 if low is None else 0
    found = names_between(low, high, [(count, ())], (), far)
    assert found == (None if expected is None else [expected])


def test_without_neighbours_they_sort_before_what_a_broker_makes_in_any_time_zone() -> None:
    now = datetime.datetime(2026, 3, 1, 5, 0, tzinfo=datetime.UTC)
    found = names_between(None, None, [(2, ())], (), int(now.timestamp() * 1000))
    assert found == [("20260228170000000", "20260228170000001")]
    earliest = now.astimezone(datetime.timezone(datetime.timedelta(hours=-12)))
    assert found[0][0] <= f"{earliest:%Y%m%d%H%M%S}000"


DAMAGES = ("copy", "delete", "rename", "swap", "zeros")


def store_of(root: Path, keys: list[int], index_num: int, seed: int) -> Config:
    """Messages with so many keys each, some of them twice; index files of a few entries."""
    rand, layout = random.Random(seed), IndexLayout(5, index_num)
    store = Store(root, layout)
    store.append(spec(T0, KEYS="first"))
    for number, count in enumerate(keys):
        texts = " ".join(rand.choice("abcd") for _ in range(count)) or " "
        store.append(spec(T0 + 900 * number, size=rand.randrange(400), KEYS=texts))
    config = config_for(store.root, layout, SEGMENT, flavour="5.4")
    index_log(config)
    spaced(config)
    return config


def damage(config: Config, kind: str, rand: random.Random) -> None:
    """What is done to one file, or two."""
    files = index_files(config)
    if not files:
        return
    path, other = rand.choice(files), rand.choice(files)
    later = path.with_name(str(int(path.name) + rand.choice([1, 7, 1000])))
    if kind == "copy":
        shutil.copy2(path, later)
    elif kind == "delete":
        path.unlink()
    elif kind == "rename":
        path.rename(later)
    elif kind == "swap":
        data = path.read_bytes()
        path.write_bytes(other.read_bytes())
        other.write_bytes(data)
    else:
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2].ljust(len(data), b"\0"))


@settings(max_examples=15)
@given(
    st.lists(st.integers(0, 6), min_size=4, max_size=30),
    st.integers(8, 14),
    st.lists(st.sampled_from(DAMAGES), min_size=1, max_size=3),
    st.integers(0, 2**31),
)
# A message that has a key twice stands in two files, one of which is there twice.
@example(keys=[5, 5, 2, 4, 6, 5, 5, 4, 5, 4, 6, 3], index_num=8, damages=["copy"], seed=0)
def test_one_part_at_a_time_ends(
    tmp_path_factory: pytest.TempPathFactory, keys: list[int], index_num: int, damages: list[str], seed: int
) -> None:
    config, rand = store_of(tmp_path_factory.mktemp("pieces"), keys, index_num, seed), random.Random(seed)
    for kind in damages:
        damage(config, kind, rand)
    old = {(path.name, path.read_bytes()) for path in index_files(config)}
    stood = None
    while True:
        # Keys that are not findable, and old files that are still there: neither may rise, and one of them falls.
        found = (
            report_of(config).audit.missing_keys,
            len(old & {(path.name, path.read_bytes()) for path in index_files(config)}),
        )
        assert stood is None or (found != stood and found[0] <= stood[0] and found[1] <= stood[1]), (found, stood)
        stood = found
        plan = repair(config, ranges_max=1, in_pieces=True)
        if len(plan.ranges) <= 1:
            break
    assert report_of(config).audit.is_sound
