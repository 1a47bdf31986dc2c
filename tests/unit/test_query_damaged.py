"""Queries over what is damaged, missing, another's or wrongly asked: they say so, and lose nothing that is there."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from indexd.commitlog.evidence import Evidence
from indexd.commitlog.writer import FrameSpec
from indexd.errors import UnsafeStoreError
from indexd.flush.frontier import Uncovered
from indexd.query import (
    KeyQuery,
    OffsetQuery,
    QueryIndex,
    open_data,
    query_exact,
    query_log_time,
    query_offset,
)
from indexd.query.by_time import TimeBound, scan_start
from indexd.storage.lock import DirectoryLock
from support.data_directory import SEGMENT, T0, Store, spec
from support.queue_store import QueueStore, build_sparse
from support.reading import patch


@pytest.fixture
def store(tmp_path: Path) -> QueueStore:
    return QueueStore(tmp_path)


# --- sparse indexes ---

TIMES = st.lists(
    st.one_of(st.integers(T0, T0 + 8), st.integers(T0 - 1000, T0 + 1000), st.integers(T0, T0 + 1)),
    min_size=20,
    max_size=110,
)


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 0x80 >> bit % 8
    path.write_bytes(bytes(content))


def check_answers(store: QueueStore, times: list[int], covered: int) -> None:
    messages = store.messages()
    with store.index() as index:
        for asked in sorted({*times, *(time + 1 for time in times)})[::3]:
            later = [m.phy_offset for m in messages if m.store_timestamp >= asked]
            hits = query_exact(index, KeyQuery("T", "k", 500, asked)).hits
            assert [hit.phy_offset for hit in hits] == later[::-1]
            first = next((offset for offset in later if offset < covered), None)
            assert query_log_time(index, asked).phy_offset == first


@pytest.fixture
def always_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("indexd.query.by_key._BOUND_AFTER", 0)


@pytest.mark.usefixtures("always_bound")
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(TIMES, st.sampled_from([SEGMENT, 1 << 16]), st.data())
def test_one_wrong_bit_in_each_sparse_index_changes_no_answer(
    times: list[int], segment: int, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        store = QueueStore(Path(directory), segment=segment)
        with store.writer as writer:
            offsets = [writer.append(spec(time, size=number * 37 % 300)) for number, time in enumerate(times)]
        is_running = data.draw(st.booleans(), label="a daemon runs")
        kept = data.draw(st.integers(1, len(times) - 1)) if is_running else None
        store.build(upto=None if kept is None else offsets[kept])
        end = store.writer.max_offset
        lock = DirectoryLock(store.data / "lock")
        if is_running:
            store.write_state(filledOffset=end, phyOffset=end)
            lock.acquire()
        try:
            bases = sorted({path.name.split(".")[0] for path in (store.data / "sparse").iterdir()})
            for base in bases:
                paths = [store.data / "sparse" / f"{base}.{kind}" for kind in ("index", "timeindex")]
                paths = [path for path in paths if path.stat().st_size]
                if paths:
                    path = data.draw(st.sampled_from(paths))
                    used = len(path.read_bytes().rstrip(b"\0")) or 1
                    flip(path, data.draw(st.integers(0, 8 * used - 1), label=path.name))
            check_answers(store, times, end)
        finally:
            lock.release()


# The largest time comes back after the clock fell: a wrong ordinal names a message of the right time.
REPEATED = [0] * 4 + [9] * 6 + [2] * 8 + [9] * 12 + [2] * 6 + [12] * 2 + [5] * 9
# Ordinal 4 with one bit more is 20, of the same time, but behind the first of a later one.
BEHIND_THE_NEXT = [0] * 4 + [9] * 4 + [12] * 2 + [2] * 10 + [9] * 3 + [2] * 9


@pytest.mark.parametrize("segment", [SEGMENT, 1 << 16])
@pytest.mark.parametrize("kind", ["index", "timeindex"])
@pytest.mark.parametrize("times", [REPEATED, BEHIND_THE_NEXT])
def test_every_bit_of_the_oldest_index(tmp_path: Path, times: list[int], kind: str, segment: int) -> None:
    store = QueueStore(tmp_path, segment=segment)
    store.append(*[spec(T0 + time) for time in times], *[spec(T0) for _ in range(20)])
    store.build()
    path = store.data / "sparse" / f"{0:020d}.{kind}"
    whole = path.read_bytes()
    sparse = store.frontier.sparse
    assert sparse is not None
    mark = sparse.segments[0]
    size = 8 * mark.offset_entries if kind == "index" else 12 * mark.time_entries
    assert size >= 24
    messages = store.messages()
    wanted = {T0 + asked: next(m.phy_offset for m in messages if m.store_timestamp >= T0 + asked) for asked in times}
    for bit in range(8 * size):
        flip(path, bit)
        with store.index() as index:
            look = index.look()
            for asked, first in wanted.items():
                assert scan_start(index, look, asked, 0) <= first
        path.write_bytes(whole)


@pytest.mark.usefixtures("always_bound")
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "zeros", "ones", "a directory"])
def test_sparse_indexes_that_are_no_more(store: QueueStore, damage: str) -> None:
    times = [T0 + number for number in range(60)]
    store.append(*[spec(time) for time in times])
    store.build()
    for path in (store.data / "sparse").iterdir():
        content = path.read_bytes()
        path.unlink()
        if damage == "a directory":
            path.mkdir()
        elif damage != "missing":
            size = len(content)
            path.write_bytes(
                {"empty": b"", "cut": content[: size // 2 + 1], "zeros": bytes(size), "ones": b"\xff" * size}[damage]
            )
    check_answers(store, times, store.writer.max_offset)


def test_sound_sparse_indexes_are_made_use_of(store: QueueStore) -> None:
    types = (0, 0x4, 0x8, 0xC)
    offsets = [
        store.writer.append(
            FrameSpec("T", b"x" * 50, {"KEYS": "k"}, store_timestamp=T0 + number, sys_flag=types[number % 4])
        )
        for number in range(300)
    ]
    store.build()
    with store.index() as index:
        look = index.look()
        for number in range(0, 300, 7):
            start = scan_start(index, look, T0 + number, 0)
            assert offsets[number] - 1000 < start <= offsets[number]
        assert scan_start(index, look, T0 + 999, 0) > offsets[-1] - 1000
        bound = TimeBound(index, look)
        assert bound.is_before(offsets[100], T0 + 200)
        assert not bound.is_before(offsets[200], T0 + 200)


def test_places_that_were_passed_over_do_not_put_an_index_in_doubt(store: QueueStore) -> None:
    offsets = store.append(*[spec(T0 + number) for number in range(12)])
    segment = store.root / "commitlog" / f"{0:020d}"
    content = bytearray(segment.read_bytes())
    store.build()
    left_out = store.messages()
    content[offsets[4] : offsets[5]] = b"\xee" * (offsets[5] - offsets[4])
    segment.write_bytes(bytes(content))
    del left_out[4]
    sparse = build_sparse(store.data, left_out, left_out, store.segment)
    store.change_frontier(sparse=sparse, uncovered=(Uncovered(offsets[4], offsets[5], "unreadable"),))
    with store.index() as index:
        assert scan_start(index, index.look(), T0 + 11, 0) > offsets[5]
        assert query_log_time(index, T0 + 4).phy_offset == offsets[5]


# --- a log without its middle ---


def test_a_segment_missing_from_the_middle_of_the_log(store: QueueStore) -> None:
    offsets = store.append(*[spec(T0 + number, size=500) for number in range(40)])
    store.build()
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
    with open_data(store.data) as data:
        assert "missing from the middle" in repr(data.message(offsets[gone[0]]))
    with store.index() as index:  # one that goes while it is listed
        index.look()
        (store.root / "commitlog" / f"{0:020d}").unlink()
        assert query_log_time(index, T0).phy_offset == offsets[next(n for n in range(40) if offsets[n] >= SEGMENT)]


def test_zeros_in_the_middle_of_the_covered_log_are_no_end_of_it(store: QueueStore) -> None:
    offsets = store.append(*[spec(T0 + number) for number in range(12)])
    store.build()
    patch(store.root / "commitlog" / f"{0:020d}", offsets[4], bytes(offsets[5] - offsets[4]))
    with store.index() as index:
        answer = query_log_time(index, T0 + 11)
    assert (answer.phy_offset, answer.unreadable, answer.why) == (None, 1, "unreadable")


# --- another store ---


def noted(store: Store) -> tuple[Evidence, ...]:
    with store.index() as index, index.log.frame_reader() as frames:
        found = [frames.evidence(message.phy_offset) for message in store.messages()]
    return tuple(point for point in found if point is not None)


def test_another_store_is_refused(store: QueueStore, tmp_path: Path) -> None:
    store.append(*[spec(T0 + number) for number in range(30)])
    store.build()
    store.change_frontier(evidence=noted(store))
    other = Store(tmp_path / "other")
    other.append(*[spec(T0 + 5000 + number) for number in range(30)])
    with store.index(store=store.root) as index:
        assert len(query_exact(index, KeyQuery("T", "k")).hits) == 30
    with pytest.raises(UnsafeStoreError, match=r"is not the store that .* was built from: none of the 30") as refused:
        open_data(store.data, store=other.root)
    assert str(other.root) in str(refused.value)
    with pytest.raises(UnsafeStoreError, match="is not the store"):
        open_data(store.data, commit_log_paths=[other.root / "commitlog"])


def test_a_store_that_was_rewritten_but_for_one_message_is_the_same(store: QueueStore) -> None:
    store.append(*[spec(T0 + number, size=300) for number in range(30)])
    store.build()
    points = noted(store)
    store.change_frontier(evidence=(points[0], *(Evidence(p.phy_offset, p.size, 1, 1, 0) for p in points[1:])))
    with store.index() as index:
        assert isinstance(index, QueryIndex)
    (store.root / "commitlog" / f"{0:020d}").unlink()
    with pytest.raises(UnsafeStoreError):
        open_data(store.data)
    store.change_frontier(evidence=())
    open_data(store.data).close()
