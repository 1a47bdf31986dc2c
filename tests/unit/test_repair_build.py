"""Ranges built and checked: after a repair every key is found once, also where the log is not whole."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from indexd.audit.page import verdict_line
from indexd.config import Config
from indexd.index.format import HEADER_SIZE, IndexHeader, IndexLayout
from support.auditing import audit, config_for, config_of_golden, index_log, lost_keys
from support.data_directory import SEGMENT, T0, Store, spec
from support.goldens import unpack
from support.mending import (
    differences,
    entry_counts,
    index_files,
    mended,
    planned,
    repair,
    report_of,
    spaced,
    write,
)
from support.naive import naive_frames

LAYOUT = IndexLayout(11, 40)


FLAVOUR = "5.4"


def make(tmp: Path, count: int = 150, layout: IndexLayout = LAYOUT, begin: int = 0) -> Config:
    """A log in several segments with keys that repeat; its index is ten full files and an open one."""
    rand = random.Random(5)
    store = Store(tmp, layout)
    for number in range(count):
        keys = " ".join(rand.choice("abcdefgh") for _ in range(rand.randrange(5)))
        flags = spec(T0 + 700 * number, size=rand.randrange(200), KEYS=keys, TAGS=rand.choice(["s", "t", ""]))
        store.append(flags)
    config = config_for(store.root, layout, SEGMENT, flavour=FLAVOUR)
    index_log(config, begin=begin)
    for path in reversed(index_files(config)):
        # As far apart as full files are, so that there is room for a name or two in between.
        path.rename(path.with_name(f"{int(path.name) // 1000 * 1000 + 100_000 * (int(path.name) % 1000):017d}"))
    return config


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Config:
    config = make(tmp_path_factory.mktemp("sound"))
    assert audit(config).is_sound
    return config


def restore(config: Config, kept: dict[str, bytes]) -> None:
    assert config.store.store is not None
    folder = config.store.store / "index"
    for place in (folder, config.store.store / "beside"):
        shutil.rmtree(place, ignore_errors=True)
    folder.mkdir()
    for name, data in kept.items():
        (folder / name).write_bytes(data)


@st.composite
def damages(draw: st.DrawFn) -> list[tuple[int, int, bytes]]:
    """(file, position, bytes): single bytes, whole numbers, zeros, parts of the entries."""
    found = []
    for _ in range(draw(st.integers(0, 3))):
        position = draw(st.integers(0, LAYOUT.file_size - 1))
        data = draw(
            st.one_of(
                st.binary(min_size=1, max_size=4),
                st.integers(0, 45).map(lambda number: number.to_bytes(4, "big")),
                st.integers(1, 200).map(bytes),
            )
        )
        found.append((draw(st.integers(0, 10)), position, data[: LAYOUT.file_size - position]))
    return found


def test_every_key_is_found_once_after_a_repair(sound: Config) -> None:
    before = {path.name: path.read_bytes() for path in index_files(sound)}
    names = list(before)
    assert len(names) == 11

    @settings(max_examples=25)
    @given(
        damages(),
        st.sets(st.sampled_from(names)),
        st.sampled_from([None, None, (0, 1), (3, 4), (8, 9), (2, 7)]),
        st.booleans(),
        st.integers(0, 3),
    )
    @example([], set(names), None, False, 0)
    @example([], set(), None, True, 0)
    def check(
        damage: list[tuple[int, int, bytes]],
        lost: set[str],
        swapped: tuple[int, int] | None,
        in_pieces: bool,
        everything: int,
    ) -> None:
        restore(sound, before)
        files = index_files(sound)
        if swapped is not None:
            files[swapped[0]].write_bytes(before[names[swapped[1]]])
            files[swapped[1]].write_bytes(before[names[swapped[0]]])
        for file, position, data in damage:
            with files[file].open("r+b") as opened:
                opened.seek(position)
                opened.write(data)
        for name in lost:
            (files[0].parent / name).unlink()
        stood = {path.name: path.read_bytes() for path in index_files(sound)}
        plan = repair(sound, in_pieces=in_pieces, everything=everything == 0)
        assert differences(sound, FLAVOUR) == {}
        assert audit(sound).is_sound
        assert not planned(sound).is_needed
        for kept in plan.kept[:-1]:
            assert (files[0].parent / kept.name).read_bytes() == stood[kept.name]

    check()


@pytest.fixture(params=[False, True], ids=["whole", "straddling"])
def config(tmp_path: Path, request: pytest.FixtureRequest) -> Config:
    """Some full files and an open one."""
    config = write(tmp_path, straddling=request.param)
    index_log(config)
    spaced(config)
    assert audit(config).is_sound
    assert len(index_files(config)) == (30 if request.param else 20)
    return config


def planted_gap(config: Config, number: int) -> int:
    """Make a message of segment ``number`` unreadable; where it begins."""
    assert config.store.store is not None
    segment = sorted((config.store.store / "commitlog").iterdir())[number]
    base = int(segment.name)
    frames = naive_frames(config.store.store / "commitlog", SEGMENT)
    inside = [frame.phy_offset for frame in frames if base < frame.phy_offset < base + SEGMENT]
    with segment.open("r+b") as opened:
        opened.seek(inside[1] - base + 4)
        opened.write(b"\1\2\3\4")
    return inside[1]


def test_unreadable_bytes_in_a_sealed_segment_are_passed_over(config: Config) -> None:
    for path in index_files(config):
        path.unlink()
    offset = planted_gap(config, 2)
    plan = repair(config)
    assert plan.unreadable is None
    found = audit(config)
    assert found.is_sound
    assert [gap.begin for gap in found.gaps] == [offset]


def gap_at_the_end(config: Config) -> int:
    """One in the last segment that is in use: the writer has made the next one ahead."""
    last = max(segment.begin for segment in report_of(config).state.segments if segment.store_timestamp is not None)
    return planted_gap(config, last // SEGMENT)


def test_what_is_built_ends_where_a_broker_cuts_its_log(config: Config) -> None:
    for path in index_files(config):
        path.unlink()
    offset = gap_at_the_end(config)
    plan = repair(config)
    assert plan.ends_at == offset
    assert plan.unreadable is not None
    ends = [IndexHeader.unpack(path.read_bytes()[:HEADER_SIZE]).end_phy_offset for path in index_files(config)]
    assert max(ends) < offset
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
    assert len(plan.kept) == len(index_files(config))


@pytest.mark.parametrize("has_abort", [False, True])
def test_sound_files_behind_unreadable_bytes_stay_beside_what_is_built(config: Config, *, has_abort: bool) -> None:
    assert config.store.store is not None
    if has_abort:
        (config.store.store / "abort").touch()
    offset = gap_at_the_end(config)
    index_files(config)[3].unlink()
    before = entry_counts(config)
    plan = repair(config)
    assert any(file.end > offset for file in plan.kept)
    assert not before - entry_counts(config)
    assert plan.keys_behind == 0
    report = report_of(config)
    assert report.audit.is_sound
    again = planned(config)
    assert not again.ranges
    assert again.at_stake if has_abort else not again.is_needed
    assert not {file.name for file in again.kept if file.end >= offset} & set(again.at_stake)


def test_a_hole_across_unreadable_bytes_is_mended_up_to_them(config: Config) -> None:
    offset = gap_at_the_end(config)
    across = [file.name for file in report_of(config).plan.files if file.begin < offset <= file.end]
    before = entry_counts(config)
    for path in index_files(config):
        if path.name in across:
            path.unlink()
    plan = repair(config)
    assert plan.keys_behind > 0
    lost = before - entry_counts(config)
    assert {at for _, at in lost} <= {at for _, at in before if at >= offset}
    report = report_of(config)
    assert {cause.what for cause in report.causes} <= {"behind-unreadable"}
    assert not planned(config).is_needed


def test_a_log_that_was_cut_back(config: Config) -> None:
    assert config.store.store is not None
    segments = sorted((config.store.store / "commitlog").iterdir())
    for path in segments[3:]:
        path.unlink()
    files = index_files(config)
    behind = [
        path.name
        for path in files
        if IndexHeader.unpack(path.read_bytes()[:HEADER_SIZE]).begin_phy_offset >= 3 * SEGMENT
    ]
    plan = repair(config)
    assert set(behind) <= set(plan.left_out)
    mended(config, plan)


def test_a_killed_broker_whose_index_had_never_rolled(tmp_path: Path) -> None:
    golden = unpack("rocketmq-5.4-killed-open-index", tmp_path)
    config = config_of_golden(golden)
    for path in index_files(config):
        path.unlink()
    index_log(config, golden.flavour, begin=6 * golden.segment_size)
    assert lost_keys(config, golden.flavour)
    plan = repair(config)
    assert len(plan.ranges) == 1
    assert differences(config, golden.flavour) == {}
    assert planned(config).ranges == ()


shapes_of_messages = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 400), st.sampled_from([0, 0, 0, 4, 8, 12])), max_size=40
)


@settings(max_examples=25)
@given(shapes_of_messages, st.integers(3, 12), st.sets(st.integers(0, 30)), st.integers(0, 2**31))
def test_any_small_store(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: list[tuple[int, int, int]],
    index_num: int,
    lost: set[int],
    seed: int,
) -> None:
    # Messages with more keys than a file has room for, the same key twice, none; rollback ones; any files lost.
    rand, layout = random.Random(seed), IndexLayout(5, index_num)
    store = Store(tmp_path_factory.mktemp("any"), layout)
    store.append(spec(T0, KEYS="first"))
    for number, (keys, size, flag) in enumerate(shapes):
        texts = " ".join(rand.choice("abcd") for _ in range(keys)) or " "
        store.append(replace(spec(T0 + rand.randrange(3) * 900 * number, size=size, KEYS=texts), sys_flag=flag))
    config = config_for(store.root, layout, SEGMENT, flavour="5.4")
    index_log(config)
    spaced(config)
    for number, path in enumerate(index_files(config)):
        if number in lost:
            path.unlink()
    repair(config, in_pieces=bool(seed % 2))
    # A key that a message has twice is found by one of its entries, so the other may be lost.
    assert {hashed: both for hashed, both in differences(config, "5.4").items() if set(both[0]) != set(both[1])} == {}
    assert audit(config).is_sound
