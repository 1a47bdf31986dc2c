"""What a repair keeps and what it builds, fault by fault; and that the result is that of a full rebuild."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from indexd.config import Config
from indexd.errors import CorruptDataError
from indexd.index.format import HEADER_SIZE, IndexHeader
from indexd.recovery.rebuild import rebuild
from indexd.repair import RepairPlan, mark_end
from indexd.storage.disk import Disk
from support.auditing import audit, config_for, index_log
from support.data_directory import SEGMENT, T0, Store, spec
from support.mending import (
    LAYOUT,
    entry_counts,
    index_files,
    mended,
    planned,
    put_in_place,
    repair,
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
    assert [wanted.is_tail for wanted in plan.ranges] == [True]
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
    assert [(one.replaces, one.is_tail) for one in plan.ranges] == [((open_one,), True)]
    assert len(index_files(config)) == 3
    assert index_files(config)[-2].name == open_one
    mended(config, plan)


def test_only_the_file_with_a_finding_is_built_again(config: Config) -> None:
    files = index_files(config)
    with files[3].open("r+b") as opened:
        opened.seek(LAYOUT.entry_position(7))
        opened.write(struct.pack(">i", 5))
    plan = repair(config)
    assert [wanted.replaces for wanted in plan.ranges] == [(files[3].name,)]
    assert names_of(index_files(config)) == names_of(files)
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


def test_names_out_of_order_come_into_order(config: Config) -> None:
    files = index_files(config)
    files[3].rename(files[3].with_name("20260101000230000"))
    files[5].rename(files[5].with_name("20260101235900000"))
    plan = repair(config)
    assert plan.is_needed
    mended(config, plan)


def test_where_there_is_no_room_for_a_name_the_newer_file_is_built_again_too(config: Config) -> None:
    files = index_files(config)
    files[4].unlink()
    files[5] = files[5].rename(files[5].with_name(f"{int(files[3].name) + 1}"))
    plan = repair(config)
    assert [wanted.replaces for wanted in plan.ranges] == [(files[5].name,)]
    mended(config, plan)


def test_keys_twice_are_there_once_again(config: Config) -> None:
    assert config.store.store is not None
    files = index_files(config)
    begin = IndexHeader.unpack(files[8].read_bytes()[:HEADER_SIZE]).begin_phy_offset
    index_log(config, begin=begin, name=20260102000000000)
    assert max(entry_counts(config).values()) == 2
    plan = repair(config)
    assert len(plan.kept) == 8
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
