"""Plans of repairs and what is built by them: which files stay, names; every key is found once, and none is lost."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from indexd.audit.page import verdict_line
from indexd.config import Config
from indexd.errors import CorruptDataError
from indexd.index.format import HEADER_SIZE, IndexHeader, IndexLayout
from indexd.recovery.rebuild import rebuild
from indexd.repair.plan import plan_repair
from indexd.storage.disk import Disk
from support.auditing import audit, config_for, files_of, index_log, lost_keys, store_of
from support.daemon import compile_kernels
from support.data_directory import SEGMENT, T0, Store, spec
from support.naive import NaiveIndexService, naive_frames
from support.repairing import (
    HASH_SLOT_NUM,
    INDEX_NUM,
    LAYOUT,
    differences,
    entry_counts,
    folders_of,
    index_of,
    mend,
    mended,
    planned,
    put_in_place,
    repair,
    report_of,
    spaced,
    tree,
    write,
)
from support.small_log import SEGMENT_SIZE, write_log
from support.strategies import damages
from support.verifying import SLOT, change


@pytest.fixture(params=[False, True], ids=["whole", "straddling"])
def config(tmp_path: Path, request: pytest.FixtureRequest) -> Config:
    """Some full files and an open one."""
    config = write(tmp_path, straddling=request.param)
    index_log(config)
    spaced(config)
    assert audit(config).is_sound
    assert len(files_of(config)) == (30 if request.param else 20)
    return config


def end_of(path: Path) -> int:
    return IndexHeader.unpack(path.read_bytes()[:HEADER_SIZE]).end_phy_offset


def begins(config: Config) -> list[int]:
    """Where the messages of the log begin."""
    assert config.store.store is not None
    return [frame.phy_offset for frame in naive_frames(config.store.store / "commitlog", SEGMENT)]


def test_a_sound_index_needs_nothing(config: Config) -> None:
    plan = planned(config)
    assert not plan.is_needed
    assert [file.name for file in plan.kept] == [path.name for path in files_of(config)]
    assert plan.lines() == [f"{len(plan.kept)} index files kept as before"]
    assert plan.to_json()["needed"] is False


def test_files_that_were_deleted_are_built_and_the_others_stay(config: Config) -> None:
    files = files_of(config)
    stood = {path.name: path.read_bytes() for path in files}
    for number in (4, 5, 9):
        files[number].unlink()
    plan = mend(config)
    assert [wanted.replaces for wanted in plan.ranges] == [(), ()]
    assert plan.ranges[0].begin > plan.ranges[1].begin
    assert {file.name for file in plan.kept} == set(stood) - {files[number].name for number in (4, 5, 9)}
    mended(config, plan)
    for path in files_of(config)[:-1]:
        if path.name in stood:
            assert path.read_bytes() == stood[path.name]
    # What was built are the files that were lost, but for the place of the names.
    made = [path for path in files_of(config) if path.name not in stood]
    assert [path.read_bytes() for path in made] == [stood[files[number].name] for number in (4, 5, 9)]


def test_an_open_file_with_a_hole_behind_it_is_built_again_from_its_begin(tmp_path: Path) -> None:
    store = Store(tmp_path, LAYOUT)
    for number in range(30):
        store.append(spec(T0 + 1300 * number, size=90, KEYS=f"a{number}"))
    config = config_for(store.root, LAYOUT, SEGMENT, flavour="5.4")
    index_log(config)
    open_one = files_of(config)[-1].name
    for number in range(30, 60):
        store.append(spec(T0 + 1300 * number, size=90, KEYS=f"a{number}"))
    plan = mend(config)
    assert [one.replaces for one in plan.ranges] == [(open_one,)]
    assert len(files_of(config)) == 3
    assert files_of(config)[-2].name == open_one
    mended(config, plan)


def test_everything_is_the_full_rebuild(config: Config, tmp_path: Path) -> None:
    files = files_of(config)
    files[2].unlink()
    plan = mend(config, everything=True)
    assert plan.kept == ()
    mended(config, plan)
    rebuild(config, Disk(), tmp_path / "out", lambda *_: None)
    there = [path.read_bytes() for path in sorted((tmp_path / "out" / "index").iterdir())]
    here = [path.read_bytes() for path in files_of(config)]
    assert here[:-1] == there[:-1]
    assert len(here) == len(there)
    # The end that a broker which starts begins behind.
    ends = [int.from_bytes(data[24:32], "big") for data in (here[-1], there[-1])]
    assert ends[0] == ends[1] + 1
    assert here[-1][:24] + here[-1][32:] == there[-1][:24] + there[-1][32:]


def test_a_broker_that_was_upgraded_in_a_hole(tmp_path: Path) -> None:
    # 4.7 up to the middle of the log, 5.4 from there on; the file with the switch in it is lost.
    config = write(tmp_path, 200, flavour=None)
    index_log(config, "4.7")
    for path in files_of(config)[6:]:
        path.unlink()
    switch = next(offset for offset in begins(config) if offset > end_of(files_of(config)[-1]))
    index_log(config, "5.4", begin=switch, name=20260101000000100)
    spaced(config)
    files = files_of(config)
    files[2].unlink()
    files[8].unlink()
    plan = mend(config)
    assert [era.flavour for era in plan.eras] == ["4.7", "5.4"]
    found = audit(config)
    assert (found.is_sound, found.eras) == (True, plan.eras)


def test_what_has_expired_stays_where_it_is_sound(config: Config) -> None:
    for path in files_of(config, "commitlog")[:2]:
        path.unlink()
    files = files_of(config)
    files[len(files) // 2].unlink()
    change(files[1], LAYOUT.slot_position(2), SLOT.pack(1))  # damaged, and nobody can build it again
    plan = mend(config)
    assert (plan.kept[0].name, plan.left_out, len(plan.ranges)) == (files[0].name, (files[1].name,), 1)
    mended(config, plan)


def test_where_there_is_no_room_for_a_name_the_newer_file_is_built_again_too(config: Config) -> None:
    files = files_of(config)
    files[4].unlink()
    files[5] = files[5].rename(files[5].with_name(f"{int(files[3].name) + 1}"))
    plan = mend(config)
    assert [wanted.replaces for wanted in plan.ranges] == [(files[5].name,)]
    mended(config, plan)


def test_a_file_that_does_not_come_out_right_is_told(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    files_of(config)[4].unlink()
    before, plan = files_of(config), planned(config)

    def spoil(_disk: Disk, _config: Config, path: Path) -> None:
        made = next(one for one in path.parent.iterdir() if one.name in plan.ranges[0].names)
        data = bytearray(made.read_bytes())
        data[LAYOUT.entry_position(3)] ^= 1
        made.write_bytes(data)

    monkeypatch.setattr("support.repairing.mark_end", spoil)
    with pytest.raises(CorruptDataError, match="the new index does not hold"):
        put_in_place(config, plan, plan.ranges)
    assert files_of(config) == before


RAGGED = IndexLayout(11, 40)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A log in several segments with keys that repeat; its index is ten full files and an open one."""
    rand, store = random.Random(5), Store(tmp_path_factory.mktemp("sound"), RAGGED)
    for number in range(150):
        keys = " ".join(rand.choice("abcdefgh") for _ in range(rand.randrange(5)))
        store.append(spec(T0 + 700 * number, size=rand.randrange(200), KEYS=keys, TAGS=rand.choice(["s", "t", ""])))
    config = config_for(store.root, RAGGED, SEGMENT, flavour="5.4")
    index_log(config)
    spaced(config)
    assert audit(config).is_sound
    return config


def test_every_key_is_found_once_after_a_repair(sound: Config) -> None:
    before = {path.name: path.read_bytes() for path in files_of(sound)}
    names, folder = list(before), files_of(sound)[0].parent
    assert len(names) == 11

    @settings(max_examples=25)
    @given(
        damages(RAGGED, 11, 3),
        st.sets(st.sampled_from(names)),
        st.sampled_from([None, None, (0, 1), (3, 4), (8, 9), (2, 7)]),
        st.sampled_from(["everything", "at once", "at once", "in parts"]),
        st.none() | st.sampled_from(names),
    )
    @example([], set(names), None, "everything", None)
    @example([], set(), None, "everything", None)
    @example([], set(), None, "in parts", names[4])
    def check(
        damage: list[tuple[int, int, bytes]],
        lost: set[str],
        swapped: tuple[int, int] | None,
        how: str,
        copied: str | None,
    ) -> None:
        for place in ("index", "beside"):
            shutil.rmtree(folder.with_name(place), ignore_errors=True)
        files = [folder / name for name in names]
        folder.mkdir()
        for path in files:
            path.write_bytes(before[path.name])
        if swapped is not None:
            files[swapped[0]].write_bytes(before[names[swapped[1]]])
            files[swapped[1]].write_bytes(before[names[swapped[0]]])
        for file, position, data in damage:
            change(files[file], position, data)
        if copied is not None:
            shutil.copy2(folder / copied, folder / f"{int(copied) + 7}")
        for name in lost:
            (folder / name).unlink()
        stood = {path.name: path.read_bytes() for path in files_of(sound)}
        plan = mend(sound, everything=how == "everything", ranges_max=1 if how == "in parts" else None)
        while how == "in parts" and len(plan.ranges) > 1:
            # Each part leaves fewer keys that are not findable, or old files, and never more of either.
            left = len(plan.ranges), report_of(sound).audit.missing_keys
            plan = mend(sound, ranges_max=1)
            assert left > (len(plan.ranges), report_of(sound).audit.missing_keys)
        assert differences(sound, "5.4") == {}
        report = report_of(sound)
        assert report.audit.is_sound
        assert not plan_repair(Disk(), sound, report).is_needed
        for kept in {file.name for file in plan.kept[:-1]} & stood.keys():
            assert (folder / kept).read_bytes() == stood[kept]

    check()


def planted_gap(config: Config, number: int) -> int:
    """Make a message of segment ``number`` unreadable; where it begins."""
    segment = files_of(config, "commitlog")[number]
    base = int(segment.name)
    inside = [offset for offset in begins(config) if base < offset < base + SEGMENT]
    change(segment, inside[1] - base + 4, b"\1\2\3\4")
    return inside[1]


def test_unreadable_bytes_in_a_sealed_segment_are_passed_over(config: Config) -> None:
    for path in files_of(config):
        path.unlink()
    offset = planted_gap(config, 2)
    plan = mend(config)
    assert plan.unreadable is None
    found = audit(config)
    assert found.is_sound
    assert [gap.begin for gap in found.gaps] == [offset]


def gap_at_the_end(config: Config) -> int:
    """One in the last segment that is in use: the writer has made the next one ahead."""
    last = max(segment.begin for segment in report_of(config).state.segments if segment.store_timestamp is not None)
    return planted_gap(config, last // SEGMENT)


def test_what_is_built_ends_where_a_broker_cuts_its_log(config: Config) -> None:
    for path in files_of(config):
        path.unlink()
    offset = gap_at_the_end(config)
    plan = mend(config)
    assert plan.ends_at == offset
    assert plan.unreadable is not None
    assert max(map(end_of, files_of(config))) < offset
    report = report_of(config)
    (hole,), (cause,) = report.audit.holes, report.causes
    assert (report.audit.counts, hole.begin > offset) == ({"log-unreadable": 1}, True)
    assert (cause.what, cause.words) == ("behind-unreadable", "behind unreadable log")
    assert "repair" not in verdict_line(report)
    again = planned(config)
    assert (again.is_needed, again.keys_behind) == (False, hole.keys)
    assert f"about {hole.keys} keys behind the unreadable bytes at {offset} are left out" in again.behind_lines()[0]


def test_a_sound_index_that_points_behind_unreadable_bytes_needs_no_repair(config: Config) -> None:
    gap_at_the_end(config)
    plan = planned(config)
    assert (plan.is_needed, plan.keys_behind, plan.behind_lines()) == (False, 0, [])
    assert len(plan.kept) == len(files_of(config))


@pytest.mark.parametrize("has_abort", [False, True])
def test_sound_files_behind_unreadable_bytes_stay_beside_what_is_built(config: Config, *, has_abort: bool) -> None:
    assert config.store.store is not None
    if has_abort:
        (config.store.store / "abort").touch()
    offset = gap_at_the_end(config)
    files_of(config)[3].unlink()
    before = entry_counts(config)
    plan = mend(config)
    assert any(file.end > offset for file in plan.kept)
    assert not before - entry_counts(config)
    assert plan.keys_behind == 0
    report = report_of(config)
    assert report.audit.is_sound
    again = planned(config)
    assert not again.ranges
    assert again.at_stake if has_abort else not again.is_needed
    assert not {file.name for file in again.kept if file.end >= offset} & set(again.at_stake)


def test_a_log_that_was_cut_back(config: Config) -> None:
    for path in files_of(config, "commitlog")[3:]:
        path.unlink()
    before = {path.name: path.read_bytes() for path in files_of(config)}
    plan = mend(config)
    behind = {name for name, data in before.items() if int.from_bytes(data[16:24], "big") >= 3 * SEGMENT}
    assert behind <= set(plan.left_out)
    mended(config, plan)


@pytest.fixture
def log(tmp_path: Path) -> Config:
    compile_kernels()
    store = tmp_path / "store"
    write_log(store, 1500)
    (store / "lock").write_text("lock")
    return config_for(store, IndexLayout(HASH_SLOT_NUM, INDEX_NUM), SEGMENT_SIZE)


def refused(config: Config, *words: str) -> str:
    store = store_of(config)
    before, stamps = index_of(store), tree(store)
    for how in ("--plan", "--yes"):
        code, out, errors = repair(config, how, *words)
        assert (code, out, errors.count("\n")) == (4, "", 1), errors
        assert "a repair would lose" in errors
        assert "--flavour 5.4 loses none" in errors
        assert (index_of(store), folders_of(store), tree(store)) == (before, [], stamps)
    return errors


def test_a_few_tags_in_the_middle_of_a_file_are_not_lost(log: Config) -> None:
    # More messages than these would be evidence.
    old, new = (NaiveIndexService(HASH_SLOT_NUM, 40_000, flavour) for flavour in ("4.7", "5.4"))
    new.files = old.files
    tags = 0
    for number, frame in enumerate(naive_frames(store_of(log) / "commitlog", SEGMENT_SIZE)):
        is_new = 700 <= number < 704
        (new if is_new else old).build_index(frame)
        tags += is_new and bool(frame.tags) and frame.sys_flag & 0xC != 0xC
    (store_of(log) / "index").mkdir()
    (store_of(log) / "index" / "20260101000000000").write_bytes(old.files[0].to_bytes())
    log = config_for(store_of(log), IndexLayout(HASH_SLOT_NUM, 40_000), SEGMENT_SIZE)
    assert tags
    assert f"would lose {tags} keys: index/20260101000000000 has them" in refused(log)
    # Whoever says it knows it.
    for flavour in ("5.4", "4.7"):
        assert repair(log, "--yes", "--flavour", flavour)[0] == 0
        assert not lost_keys(log, flavour)


@pytest.mark.parametrize("flavour", ["3.x", "4.7", "5.4"])
def test_entries_of_no_key_at_all_hold_nothing_up(log: Config, flavour: str) -> None:
    index_log(log, flavour)
    rand = random.Random(3)
    for path in files_of(log)[1:3]:
        data = bytearray(path.read_bytes())
        for number in rand.sample(range(1, INDEX_NUM), 40):
            at = 40 + 4 * HASH_SLOT_NUM + 20 * number + rand.randrange(12)
            data[at] ^= 1 << rand.randrange(8)
        path.write_bytes(data)
    before = sum(lost_keys(log, flavour).values()) if flavour != "3.x" else 1
    assert before
    assert repair(log, "--yes")[0] == 0
    if flavour != "3.x":
        assert not lost_keys(log, flavour)
    assert repair(log, "--plan")[0] == 0
