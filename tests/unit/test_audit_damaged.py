"""Whatever an index file holds: the audit ends, and the keys it misses are those that RocketMQ's own walk misses."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexd.audit import audit_task, join, plan_audit
from indexd.config import Config
from indexd.index.format import IndexLayout
from indexd.storage.disk import Disk
from support.auditing import audit, audit_plan, config_for, index_log, lost_keys, rows_of
from support.data_directory import SEGMENT, T0, Store, spec
from support.naive import naive_frames

LAYOUT = IndexLayout(11, 40)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Sixty messages with keys that repeat, in several segments; two full files and an open one."""
    rand = random.Random(3)
    store = Store(tmp_path_factory.mktemp("damaged"), LAYOUT)
    for number in range(60):
        keys = " ".join(rand.choice("abcdefgh") for _ in range(rand.randrange(4)))
        store.append(spec(T0 + 700 * number, size=rand.randrange(300), KEYS=keys, TAGS=rand.choice(["s", "t"])))
    config = config_for(store.root, LAYOUT, SEGMENT, flavour="5.4")
    index_log(config)
    assert audit(config).is_sound
    return config


def index_files(config: Config) -> list[Path]:
    assert config.store.store is not None
    return sorted((config.store.store / "index").iterdir())


@st.composite
def damages(draw: st.DrawFn) -> list[tuple[int, int, bytes]]:
    """(file, position, bytes): single bits, whole numbers, stretches of zeros or of another part."""
    found = []
    for _ in range(draw(st.integers(1, 6))):
        position = draw(st.integers(0, LAYOUT.file_size - 1))
        data = draw(
            st.one_of(
                st.binary(min_size=1, max_size=4),
                st.integers(0, 45).map(lambda number: number.to_bytes(4, "big")),
                st.integers(1, 200).map(bytes),
            )
        )
        found.append((draw(st.integers(0, 2)), position, data[: LAYOUT.file_size - position]))
    return found


def test_the_keys_that_are_missed_are_those_that_no_query_finds(config: Config) -> None:
    assert config.store.store is not None
    files = index_files(config)
    assert len(files) >= 3
    before = [path.read_bytes() for path in files]
    offsets = [frame.phy_offset for frame in naive_frames(config.store.store / "commitlog", SEGMENT)]

    @settings(max_examples=150)
    @given(damages(), st.lists(st.sampled_from(offsets), max_size=4))
    def check(damage: list[tuple[int, int, bytes]], cuts: list[int]) -> None:
        for path, data in zip(files, before, strict=False):
            path.write_bytes(data)
        for file, position, data in damage:
            with files[file].open("r+b") as opened:
                opened.seek(position)
                opened.write(data)
        plan = plan_audit(Disk(), config, cuts=cuts)
        found, lost = audit(config), lost_keys(config, "5.4", plan)
        holes: Counter[int] = Counter()
        for hole in found.holes:
            missed = {offset: count for offset, count in lost.items() if hole.begin <= offset < hole.end}
            assert (hole.messages, hole.keys) == (len(missed), sum(missed.values())), rows_of(found)
            holes.update(missed)
        assert holes == lost
        assert audit_plan(plan, config) == found
        # With files that are checked beside the comparison, which took them for sound.
        beside = [audit_task(one, Disk(), config, workers=1) for one in plan.tasks]
        assert join(plan, beside) == found

    check()
