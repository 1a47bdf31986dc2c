"""Rules of a repair: names of new files lie between their neighbours, and no key that is found today is lost."""

from __future__ import annotations

import datetime
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexd.audit.result import FlavourRange
from indexd.config import Config
from indexd.index.format import IndexLayout
from indexd.repair.plan import names_between
from support.auditing import config_for, index_log, lost_keys
from support.daemon import compile_kernels
from support.naive import NaiveIndexService, naive_frames
from support.repairing import HASH_SLOT_NUM, INDEX_NUM, folders_of, index_of, repair, tree
from support.small_log import SEGMENT_SIZE, write_log


@pytest.fixture
def config(tmp_path: Path) -> Config:
    compile_kernels()
    store = tmp_path / "store"
    write_log(store, 1500)
    (store / "lock").write_text("lock")
    return config_for(store, IndexLayout(HASH_SLOT_NUM, INDEX_NUM), SEGMENT_SIZE)


@pytest.fixture
def store(config: Config) -> Path:
    assert config.store.store is not None
    return config.store.store


def refused(config: Config, store: Path, *words: str) -> str:
    before, stamps = index_of(store), tree(store)
    for how in ("--plan", "--yes"):
        code, out, errors = repair(config, how, *words)
        assert (code, out, errors.count("\n")) == (4, "", 1), errors
        assert "a repair would lose" in errors
        assert "--flavour 5.4 loses none" in errors
        assert (index_of(store), folders_of(store), tree(store)) == (before, [], stamps)
    return errors


@pytest.mark.parametrize(("flavour", "wrong"), [("5.4", "4.7"), ("5.4", "3.x"), ("4.7", "3.x")])
def test_with_the_wrong_flavour_it_is_refused(
    config: Config, store: Path, monkeypatch: pytest.MonkeyPatch, flavour: str, wrong: str
) -> None:
    index_log(config, flavour)
    monkeypatch.setattr("indexd.audit.plan.detect_flavours", lambda *_: [FlavourRange(0, wrong)])
    assert f"RocketMQ {wrong}" in refused(config, store)
    refused(config, store, "--all")
    # Whoever says it knows it.
    assert repair(config, "--yes", "--flavour", "5.4")[0] == 0
    assert not lost_keys(config, "5.4")
    assert repair(config, "--yes", "--flavour", "4.7")[0] == 0
    assert not lost_keys(config, "4.7")


def test_a_few_tags_in_the_middle_of_a_file_are_not_lost(config: Config, store: Path) -> None:
    # More messages than these would be evidence.
    old, new = (NaiveIndexService(HASH_SLOT_NUM, 40_000, flavour) for flavour in ("4.7", "5.4"))
    new.files = old.files
    tags = 0
    for number, frame in enumerate(naive_frames(store / "commitlog", SEGMENT_SIZE)):
        is_new = 700 <= number < 704
        (new if is_new else old).build_index(frame)
        tags += is_new and bool(frame.tags) and frame.sys_flag & 0xC != 0xC
    (store / "index").mkdir()
    (store / "index" / "20260101000000000").write_bytes(old.files[0].to_bytes())
    config = config_for(store, IndexLayout(HASH_SLOT_NUM, 40_000), SEGMENT_SIZE)
    assert tags
    assert f"would lose {tags} keys: index/20260101000000000 has them" in refused(config, store)


@pytest.mark.parametrize("flavour", ["3.x", "4.0", "4.7", "5.4"])
def test_entries_of_no_key_at_all_hold_nothing_up(config: Config, store: Path, flavour: str) -> None:
    index_log(config, flavour)
    rand = random.Random(3)
    for path in sorted((store / "index").iterdir())[1:3]:
        data = bytearray(path.read_bytes())
        for number in rand.sample(range(1, INDEX_NUM), 40):
            at = 40 + 4 * HASH_SLOT_NUM + 20 * number + rand.randrange(12)
            data[at] ^= 1 << rand.randrange(8)
        path.write_bytes(data)
    before = sum(lost_keys(config, flavour).values()) if flavour != "3.x" else 1
    assert before
    assert repair(config, "--yes")[0] == 0
    if flavour != "3.x":
        assert not lost_keys(config, flavour)
    assert repair(config, "--plan")[0] == 0


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
    st.integers(0, 5),
    st.lists(names, max_size=6, unique=True),
    st.sets(names, max_size=3),
    st.integers(-(2**63), 2**63 - 1),
)
def test_names_are_new_times_in_order_between_their_neighbours(
    low: str | None, high: str | None, count: int, own: list[str], others: set[str], timestamp: int
) -> None:
    taken = (others | {name for name in (low, high) if name}) - set(own)
    flat = names_between(low, high, count, own, taken, timestamp)
    if flat is None:
        assert high is not None or timestamp > 0 or (low or "") > "9999"
        return
    assert len(flat) == count
    assert list(flat) == sorted(set(flat))
    assert all(map(is_time, flat))
    assert not taken & set(flat)
    assert all((low is None or low < name) and (high is None or name < high) for name in flat)


def test_the_names_of_files_that_go_are_taken_first() -> None:
    own = ("20260101000000000", "20260102000000000")
    assert names_between("20250101000000000", NOON[:4] + "0201000000000", 2, own, (), 0) == own
    assert names_between(None, None, 1, own, (), 0) == own[:1]
    # One that is missing comes behind them, as a broker would have named it.
    assert names_between(None, None, 3, own, (), 0) == (*own, "20260102000000001")


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
    assert names_between(low, high, count, (), (), far) == expected


def test_without_neighbours_they_sort_before_what_a_broker_makes_in_any_time_zone() -> None:
    now = datetime.datetime(2026, 3, 1, 5, 0, tzinfo=datetime.UTC)
    found = names_between(None, None, 2, (), (), int(now.timestamp() * 1000))
    assert found == ("20260228170000000", "20260228170000001")
    earliest = now.astimezone(datetime.timezone(datetime.timedelta(hours=-12)))
    assert found[0] <= f"{earliest:%Y%m%d%H%M%S}000"
