"""Whatever is wrong with an index: after a repair every key of the log is found, once, the newest first."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from indexd.config import Config
from indexd.index.format import IndexLayout
from support.auditing import audit, config_for, index_log
from support.data_directory import SEGMENT, T0, Store, spec
from support.mending import differences, index_files, planned, repair, report_of

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


def test_each_range_by_itself_leaves_the_others_as_they_are(sound: Config) -> None:
    before = {path.name: path.read_bytes() for path in index_files(sound)}
    restore(sound, before)
    try:
        files = index_files(sound)
        for number in (1, 4, 5):
            files[number].unlink()
        plan = planned(sound, in_pieces=True)
        assert len(plan.ranges) > 1
        left = report_of(sound).audit.missing_keys
        for _ in plan.ranges:
            done = repair(sound, ranges_max=1, in_pieces=True)
            assert done.is_needed
            found = report_of(sound).audit
            assert not found.counts
            assert found.missing_keys < left
            left = found.missing_keys
        assert left == 0
        assert differences(sound, FLAVOUR) == {}
    finally:
        restore(sound, before)
