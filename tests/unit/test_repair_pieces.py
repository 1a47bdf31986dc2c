"""A repair that gets little time again and again: each run mends something that the next one does not do once more."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from indexd.config import Config
from indexd.index.format import IndexLayout
from support.auditing import config_for, index_log
from support.data_directory import SEGMENT, T0, Store, spec
from support.mending import index_files, repair, report_of, spaced

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


def test_files_inside_one_message_whose_names_are_in_another_order(tmp_path: Path) -> None:
    # A message has more keys than a file has room for.
    keys, seed = [0, 5, 3, 0, 1, 6, 2, 5, 0, 5, 4], 1278317401
    config, rand = store_of(tmp_path, keys, 3, seed), random.Random(seed)
    damage(config, "swap", rand)
    damage(config, "swap", rand)
    assert not report_of(config).audit.is_sound
    repair(config)
    assert report_of(config).audit.is_sound
