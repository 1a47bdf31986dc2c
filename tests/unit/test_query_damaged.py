"""Queries of logs and data directories that are damaged, or were made to be; keys with very many messages."""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from indexd.commitlog.lookup import Evidence, LogView, TimeUpError
from indexd.errors import CorruptDataError, UnsafeStoreError, UsageError
from indexd.flush.frontier import Uncovered
from indexd.index.format import IndexLayout
from indexd.query import (
    KeyQuery,
    OffsetQuery,
    open_data,
    query_exact,
    query_log_time,
    query_offset,
    query_rocketmq,
)
from indexd.query.by_key import LastUpdate
from indexd.query.by_queue_and_time import scan_start, time_bound
from indexd.query.message import find_by_offset
from support.data_directory import LAYOUT, SEGMENT, T0, Store, built, spec, write_data
from support.naive import NaiveIndexFile, NaiveIndexService, key_hash
from support.queue_store import QueueStore, build_sparse
from support.reading import patch


@pytest.fixture
def store(tmp_path: Path) -> QueueStore:
    return QueueStore(tmp_path)


TIMES = st.lists(
    st.one_of(st.integers(T0, T0 + 8), st.integers(T0 - 1000, T0 + 1000), st.integers(T0, T0 + 1)),
    min_size=20,
    max_size=110,
)


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 0x80 >> bit % 8
    path.write_bytes(bytes(content))


def check_answers(store: QueueStore, times: list[int]) -> None:
    messages = store.messages()
    with store.index() as index:
        for asked in sorted({*times, *(time + 1 for time in times)})[::3]:
            later = [m.phy_offset for m in messages if m.store_timestamp >= asked]
            hits = query_exact(index, KeyQuery("T", "k", 500, asked)).hits
            assert [hit.phy_offset for hit in hits] == later[::-1]
            assert query_log_time(index, asked).phy_offset == (later[0] if later else None)
            assert not later or time_bound(index, index.look(), asked) <= later[0]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(TIMES, st.sampled_from([SEGMENT, 1 << 16]), st.data())
def test_one_wrong_bit_in_each_sparse_index_changes_no_answer(
    times: list[int], segment: int, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        store = QueueStore(Path(directory), segment=segment)
        offsets = store.append(*[spec(time, size=number * 37 % 300) for number, time in enumerate(times)])
        is_running = data.draw(st.booleans(), label="a daemon runs")
        kept = data.draw(st.integers(1, len(times) - 1)) if is_running else None
        store.build(upto=None if kept is None else offsets[kept])
        store.write_state(filledOffset=store.writer.max_offset)
        for base in sorted({path.name.split(".")[0] for path in (store.data / "sparse").iterdir()}):
            paths = [store.data / "sparse" / f"{base}.{kind}" for kind in ("index", "timeindex")]
            path = data.draw(st.sampled_from([path for path in paths if path.stat().st_size] or [None]))
            if path is not None:
                used = len(path.read_bytes().rstrip(b"\0")) or 1
                flip(path, data.draw(st.integers(0, 8 * used - 1), label=path.name))
        with store.running() if is_running else nullcontext():
            check_answers(store, times)


# The largest time comes back after the clock fell: a wrong ordinal names a message of the right time.
REPEATED = [0] * 4 + [9] * 6 + [2] * 8 + [9] * 12 + [2] * 6 + [12] * 2 + [5] * 9


# Ordinal 4 with one bit more is 20, of the same time, but behind the first of a later one.
BEHIND_THE_NEXT = [0] * 4 + [9] * 4 + [12] * 2 + [2] * 10 + [9] * 3 + [2] * 9


@pytest.mark.parametrize("segment", [SEGMENT, 1 << 16])
@pytest.mark.parametrize("kind", ["index", "timeindex"])
@pytest.mark.parametrize("times", [REPEATED, BEHIND_THE_NEXT])
def test_every_bit_of_the_oldest_index(tmp_path: Path, times: list[int], kind: str, segment: int) -> None:
    store, _ = built(
        QueueStore(tmp_path, segment=segment), *[spec(T0 + time) for time in times], *[spec(T0) for _ in range(20)]
    )
    path = store.data / "sparse" / f"{0:020d}.{kind}"
    whole = path.read_bytes()
    mark = store.frontier.outputs["sparse"].segments[0]
    size = 8 * mark.offset_entries if kind == "index" else 12 * mark.time_entries
    assert size >= 24
    messages = store.messages()
    wanted = {T0 + asked: next(m.phy_offset for m in messages if m.store_timestamp >= T0 + asked) for asked in times}
    # By the fast profile every third, of each byte another bit.
    for bit in range(0, 8 * size, 1 if settings.default.max_examples >= 50 else 3):
        flip(path, bit)
        with store.index() as index:
            look = index.look()
            for asked, first in wanted.items():
                assert scan_start(index, look, asked, 0) <= first
        path.write_bytes(whole)


@pytest.mark.parametrize(
    "damage",
    [
        Path.unlink,
        lambda path: os.truncate(path, 0),
        lambda path: os.truncate(path, path.stat().st_size // 2 + 1),
        lambda path: path.write_bytes(bytes(path.stat().st_size)),
        lambda path: path.write_bytes(b"\xff" * path.stat().st_size),
        lambda path: path.rename(path.with_suffix(".away")) and path.mkdir(),
    ],
    ids=["missing", "empty", "cut", "zeros", "ones", "a directory"],
)
def test_sparse_indexes_that_are_no_more(store: QueueStore, damage: Callable[[Path], object]) -> None:
    times = [T0 + number for number in range(60)]
    built(store, *[spec(time) for time in times])
    for path in list((store.data / "sparse").iterdir()):
        damage(path)
    check_answers(store, times)


def test_sound_sparse_indexes_are_made_use_of(store: QueueStore) -> None:
    types = (0, 0x4, 0x8, 0xC)
    _, offsets = built(store, *[replace(spec(T0 + n, size=50), sys_flag=types[n % 4]) for n in range(300)])
    with store.index() as index:
        look = index.look()
        for number in range(0, 300, 7):
            start = scan_start(index, look, T0 + number, 0)
            assert offsets[number] - 1000 < start <= offsets[number]
        assert scan_start(index, look, T0 + 999, 0) > offsets[-1] - 1000
        assert offsets[100] < time_bound(index, look, T0 + 200) <= offsets[200]


def test_places_that_were_passed_over_do_not_put_an_index_in_doubt(store: QueueStore) -> None:
    _, offsets = built(store, *[spec(T0 + number) for number in range(12)])
    left_out = store.messages()
    patch(store.root / "commitlog" / f"{0:020d}", offsets[4], b"\xee" * (offsets[5] - offsets[4]))
    del left_out[4]
    sparse = build_sparse(store.data, left_out, left_out, store.segment)
    store.change_frontier(sparse=sparse, uncovered=(Uncovered(offsets[4], offsets[5], "unreadable"),))
    with store.index() as index:
        assert scan_start(index, index.look(), T0 + 11, 0) > offsets[5]
        assert query_log_time(index, T0 + 4).phy_offset == offsets[5]


def test_a_segment_missing_from_the_middle_of_the_log(store: QueueStore) -> None:
    _, offsets = built(store, *[spec(T0 + number, size=500) for number in range(40)])
    gone = [number for number, offset in enumerate(offsets) if offset // SEGMENT == 2]
    (store.root / "commitlog" / f"{2 * SEGMENT:020d}").unlink()
    with store.index() as index:
        answer = query_log_time(index, T0 + gone[0])
        assert (answer.phy_offset, answer.unreadable) == (offsets[gone[-1] + 1], 1)
        answer = query_log_time(index, T0 + 999)
        assert (answer.phy_offset, answer.unreadable, answer.why) == (None, 1, "unreadable")
        page = query_offset(index, OffsetQuery("T", 0, gone[0], len(gone)))
        assert [hit.problem for hit in page.hits] == ["no message stands there"] * len(gone)
        assert page.expired == 0
        found = query_exact(index, KeyQuery("T", "k"))
        assert (len(found.hits), found.expired, found.unreadable) == (40 - len(gone), 0, len(gone))
        assert "missing from the middle" in repr(find_by_offset(index.log, offsets[gone[0]]))
        (store.root / "commitlog" / f"{0:020d}").unlink()  # one that goes while it is listed
        assert query_log_time(index, T0).phy_offset == next(offset for offset in offsets if offset >= SEGMENT)


def test_zeros_in_the_middle_of_the_covered_log_are_no_end_of_it(store: QueueStore) -> None:
    _, offsets = built(store, *[spec(T0 + number) for number in range(12)])
    patch(store.root / "commitlog" / f"{0:020d}", offsets[4], bytes(offsets[5] - offsets[4]))
    with store.index() as index:
        answer = query_log_time(index, T0 + 11)
    assert (answer.phy_offset, answer.unreadable) == (None, 1)
    assert (answer.why or "").startswith("unreadable")


def noted(store: Store) -> tuple[Evidence, ...]:
    with store.index() as index:
        found = [index.log.evidence(message.phy_offset) for message in store.messages()]
    return tuple(point for point in found if point is not None)


def test_another_store_is_refused(store: QueueStore, tmp_path: Path) -> None:
    built(store, *[spec(T0 + number, size=300) for number in range(30)])
    store.change_frontier(evidence=noted(store))
    other = Store(tmp_path / "other")
    other.append(*[spec(T0 + 5000 + number, size=300) for number in range(30)])
    open_data(store.data, store=store.root).close()
    for place in ({"store": other.root}, {"commit_log_paths": [other.root / "commitlog"]}):
        with pytest.raises(UnsafeStoreError, match=r"is not the store .* none of the 30") as refused:
            open_data(store.data, **place)
        assert str(other.root) in str(refused.value)
    # Rewritten but for one message it is the same.
    points = noted(store)
    store.change_frontier(evidence=(points[0], *(Evidence(p.phy_offset, p.size, 1, 1, 0) for p in points[1:])))
    open_data(store.data).close()
    (store.root / "commitlog" / f"{0:020d}").unlink()
    with pytest.raises(UnsafeStoreError):
        open_data(store.data)
    store.change_frontier(evidence=())
    open_data(store.data).close()


@pytest.fixture
def plain(tmp_path: Path) -> Store:
    return Store(tmp_path)


def test_max_and_what_it_cuts_off(plain: Store) -> None:
    _, offsets = built(plain, *[spec(KEYS="k k", UNIQ_KEY="k") for _ in range(5)])
    with plain.index(query_max_num=9) as index:
        for count in (0, 1, 4):
            answer = query_exact(index, KeyQuery("T", "k", count))
            assert [hit.phy_offset for hit in answer.hits] == offsets[::-1][:count]
            assert answer.to_dict()["truncatedBy"] == f"max {count}"
        assert not query_exact(index, KeyQuery("T", "k", 5)).to_dict()["truncated"]
        assert query_exact(index, KeyQuery("T", "k", -1)).hits == ()
        assert query_rocketmq(index, KeyQuery("T", "k", -1)).hits == ()
        with pytest.raises(UsageError, match="9 messages"):
            query_exact(index, KeyQuery("T", "k", 10))


@pytest.fixture
def hostile(plain: Store) -> Store:
    return built(plain, *[spec() for _ in range(5)])[0]


def poke(store: Store, position: int, data: bytes) -> None:
    patch(store.data / "index" / store.frontier.index[0].name, position, data)


@pytest.mark.parametrize("previous", [3, 4, 9, 10, 2**31 - 1])
def test_a_chain_that_loops_or_goes_up(hostile: Store, previous: int) -> None:
    poke(hostile, LAYOUT.entry_position(3) + 16, struct.pack(">i", previous))
    with pytest.raises(CorruptDataError, match="goes up from entry 3"):
        hostile.exact()
    with hostile.index() as index:
        assert len(query_rocketmq(index, KeyQuery("T", "k")).hits) >= 3


def test_a_slot_that_names_no_entry(hostile: Store) -> None:
    slot = LAYOUT.slot_position(LAYOUT.slot_of(key_hash("T#k")))
    poke(hostile, slot, struct.pack(">i", -5))
    assert hostile.exact() == []
    poke(hostile, slot, struct.pack(">i", 10))
    with pytest.raises(CorruptDataError, match="goes up"):
        hostile.exact()
    poke(hostile, 36, struct.pack(">i", 2**31 - 1))
    with hostile.index() as index, pytest.raises(CorruptDataError):
        query_rocketmq(index, KeyQuery("T", "k"))


def test_entries_that_point_at_no_message(hostile: Store) -> None:
    offsets = [message.phy_offset for message in hostile.messages()]
    for number, wrong in ((1, -1), (2, offsets[1] + 1), (3, 2**63 - 1), (4, 3000)):
        poke(hostile, LAYOUT.entry_position(number) + 4, struct.pack(">q", wrong))
    with hostile.index() as index:
        answer = query_exact(index, KeyQuery("T", "k"))
        assert [hit.phy_offset for hit in answer.hits] == offsets[4:]
        assert (answer.unreadable, answer.expired) == (4, 0)
        row = query_rocketmq(index, KeyQuery("T", "k")).to_dict()
        assert row["phyOffsets"] == [offsets[4], 3000, 2**63 - 1, offsets[1] + 1, -1]
        assert row["storeTimestamps"] == [T0, None, None, None, None]
    poke(hostile, LAYOUT.entry_position(5) + 4, struct.pack(">q", 1))
    assert hostile.why() == "unreadable"


def test_settings_that_contradict_the_index(plain: Store) -> None:
    built(plain, spec())
    for key, value in (("hash_slot_num", 8), ("index_num", 11), ("flavour", "4.7")):
        with (
            pytest.raises(UsageError, match=f"was built with {getattr(LAYOUT, key, '5.4')}"),
            plain.index(**{key: value}),
        ):
            pass
    with plain.index(hash_slot_num=7, index_num=10, flavour="5.4", store=plain.root, segment_size=SEGMENT) as index:
        assert len(query_exact(index, KeyQuery("T", "k")).hits) == 1
    with pytest.raises(UnsafeStoreError, match="segment_size"), plain.index(segment_size=8192):
        pass
    moved = plain.root.rename(plain.root.with_name("moved"))
    with pytest.raises(UnsafeStoreError, match="no commitlog"):
        plain.exact()
    with plain.index(commit_log_paths=moved / "commitlog") as index:
        assert len(query_exact(index, KeyQuery("T", "k")).hits) == 1
    plain.change_frontier(flavour="9.9")
    with pytest.raises(CorruptDataError, match=r"9\.9"):
        plain.exact()


def test_an_index_without_files_or_log(plain: Store) -> None:
    plain.build()
    with plain.index() as index:
        answer = query_rocketmq(index, KeyQuery("T", "k"))
        assert (answer.hits, answer.last_update) == ((), LastUpdate())
        assert query_exact(index, KeyQuery("T", "k")).why == "absent"


_ENTRIES, _OLD = 20_000, 64


@pytest.fixture(scope="module")
def hot(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A key of very many entries, a second each: the messages of the oldest 64 are there."""
    store, offsets = built(
        Store(tmp_path_factory.mktemp("hot"), IndexLayout(100, 200_000), segment=1 << 16),
        *[spec(time=T0 + 1000 * number) for number in range(_OLD)],
    )
    service = NaiveIndexService(100, 200_000)
    service.files = [NaiveIndexFile(100, 200_000)]
    for number in range(_ENTRIES):
        service.files[0].put_key("T#k", offsets[number] if number < _OLD else 10**9 + number, T0 + 1000 * number)
    write_data(store.data, store.frontier, service)
    return store


def test_a_hot_key_and_a_narrow_range_read_few_messages(hot: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    # As many entries as a walk may take are too few for a key alone, and enough for the range.
    with hot.index(query_walk_max=300) as index:
        assert len(query_exact(index, KeyQuery("T", "k", 100, T0, T0 + 1000 * _OLD)).hits) == _OLD
    wanted, reads, at = hot.messages()[_OLD // 2], list[int](), LogView.at
    monkeypatch.setattr(LogView, "at", lambda self, offset: reads.append(offset) or at(self, offset))
    assert hot.exact(begin=wanted.store_timestamp, end=wanted.store_timestamp) == [wanted.phy_offset]
    assert len(reads) < 10


def test_an_answer_whose_walk_was_cut_off_is_not_complete(hot: Store) -> None:
    with hot.index(query_walk_max=5) as index:
        answer = query_exact(index, KeyQuery("T", "k", end=T0 - 1))
    assert (answer.truncated, answer.why) == ("walk 5", "cut off")
    assert answer.to_dict()["coverage"]["complete"] is False


def test_what_was_found_when_the_time_was_up_is_kept(plain: Store) -> None:
    _, offsets = built(plain, *[spec(KEYS="k x k", UNIQ_KEY="k") for _ in range(12)])
    pages = set()
    with plain.index() as index:
        for checks in range(1, 120):
            # The last of so many checks says that the time is up.
            index.log.check = Mock(side_effect=[None] * (checks - 1) + [TimeUpError] + [None] * 500)
            try:
                first = query_exact(index, KeyQuery("T", "k"))
            except TimeUpError:  # before the walk had begun
                continue
            index.log.check = Mock()
            found = [hit.phy_offset for hit in first.hits]
            if first.truncated is not None:
                assert first.truncated == "time"
                assert not first.coverage.complete
                pages.add(len(found))
                rest = query_exact(index, KeyQuery("T", "k", before=first.cursor))
                found += [hit.phy_offset for hit in rest.hits]
            assert found == offsets[::-1], checks
    assert pages == set(range(13))
