"""Queries by key: exact, in pages, and as the broker answers."""

from __future__ import annotations

import json
import os
import struct
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from indexd.errors import CorruptDataError
from indexd.flush.frontier import Uncovered, write_frontier
from indexd.index.format import IndexHeader, IndexLayout
from indexd.query import KeyQuery, query_exact, query_rocketmq
from indexd.query.by_key import ChainFilter, may_match
from indexd.query.source import LOG_ENDS, REWRITTEN
from indexd.storage.disk import Disk
from support.commitlog_writer import CommitLogWriter
from support.data_directory import LAYOUT, SEGMENT, T0, Store, built, spec
from support.naive import NaiveIndexFile, exact_oracle
from support.reading import patch
from support.strategies import Sample, logs, queries

if TYPE_CHECKING:
    from indexd.query import QueryIndex


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), logs(max_size=25), st.sampled_from(["3.x", "4.0", "4.7", "5.4"]))
def test_both_modes_on_any_log(data: st.DataObject, samples: list[Sample], flavour: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        store = Store(Path(directory), flavour=flavour, segment=8192)
        with store.writer as writer:
            for sample in samples:
                sample.append(writer)
        service = store.build()
        rows = [message.row() for message in store.messages()]
        with store.index() as index:
            for _ in range(8):
                query = data.draw(queries(samples))
                args = (query.topic, query.key, query.begin, query.end, query.index_type)
                expected = sorted(exact_oracle(rows, *args, flavour), reverse=True)
                answer = query_exact(index, query)
                assert [hit.phy_offset for hit in answer.hits] == expected[: query.max_num]
                assert (answer.truncated is not None) == (len(expected) > query.max_num)
                found = query_rocketmq(index, query)
                capped = service.query_offset(
                    query.topic, query.key, min(query.max_num, 64), query.begin, query.end, query.index_type
                )
                assert ([hit.phy_offset for hit in found.hits], *found.last_update) == capped


@given(
    st.lists(st.one_of(st.integers(T0 - 5000, T0 + 9000), st.integers(-(2**63), 2**63 - 1)), min_size=1, max_size=6),
    st.one_of(st.just(0), st.integers(T0 - 3000, T0 + 3000), st.integers(-5, 2**62)),
    st.integers(-1500, 1500),
    st.integers(-1500, 1500),
)
def test_the_prefilter_never_denies_a_message_that_matches(
    times: list[int], previous_end: int, before: int, behind: int
) -> None:
    file = NaiveIndexFile(1, 20, 5, previous_end)
    for moment in times:
        file.put_key("k", 10, moment)
    header = IndexHeader.unpack(file.to_bytes())
    for number, moment in enumerate(times, 1):
        begin, end = moment - max(before, 0), moment + max(behind, 0)
        assert may_match(number, file.entries[number][2], *ChainFilter(begin, end).differences(header))


def test_absent_and_not_yet_indexed(store: Store) -> None:
    built(store, spec())
    assert store.exact() == [0]
    assert store.why("other") == "absent"
    assert store.why(begin=T0 + 1) == "absent"
    (offset,) = store.append(spec())
    answer = store.ask("other")
    assert answer.why == f"not yet indexed: the log from physical offset {offset} on"
    assert (answer.coverage.end, answer.coverage.complete) == (offset, False)


def test_uncovered_ranges_count_while_their_log_is_there(store: Store) -> None:
    built(store, spec(), spec(), spec())
    store.change_frontier(uncovered=(Uncovered(100, 150, "corrupt"), Uncovered(10**6, 10**6 + 5, "behind the end")))
    answer = store.ask("other")
    assert answer.why == "left out: 50 bytes of the log (corrupt)"
    assert answer.coverage.to_json()["uncovered"] == [[100, 150, "corrupt"]]
    store.change_frontier(begin_offset=120, uncovered=())
    assert store.why("other") == "before the index begins: that is at 120, the log begins at 0"


def test_expired(store: Store) -> None:
    built(store, *[spec(size=1500) for _ in range(6)])
    with store.index() as index:
        assert len(query_exact(index, KeyQuery("T", "k")).hits) == 6
        (store.root / "commitlog" / f"{0:020d}").unlink()
        (store.root / "commitlog" / f"{SEGMENT:020d}").unlink()
        # The files are still open here: what was listed may still be answered.
        query_exact(index, KeyQuery("T", "k"))
    answer = store.ask()
    assert (len(answer), answer.expired, answer.coverage.log_begin) == (2, 4, 2 * SEGMENT)
    assert store.why(begin=T0, end=T0 - 1) is not None
    (store.root / "commitlog" / f"{2 * SEGMENT:020d}").unlink()
    assert store.why() == "expired"


def test_a_log_that_was_written_anew_where_it_was_read_is_not_known_any_more(store: Store) -> None:
    """A broker that lost the end of its log has written on from there; no daemon has looked since."""
    _, offsets = built(store, *[spec(KEYS="k") for _ in range(8)])
    assert store.ask("new").coverage.complete
    path = store.root / "commitlog" / f"{0:020d}"
    with CommitLogWriter(path.parent, SEGMENT, start_offset=offsets[2]) as writer:
        writer.append(spec(KEYS="new"))
    later = (store.data / "frontier").stat().st_mtime_ns + 1
    os.utime(path, ns=(later, later))
    coverage = store.ask("new").coverage
    assert (coverage.complete, [(gap.begin, gap.reason) for gap in coverage.uncovered]) == (False, [(0, REWRITTEN)])


def test_a_log_that_ends_before_its_index_does_is_not_known_behind_that(store: Store) -> None:
    built(store, *[spec(size=1500, KEYS="k") for _ in range(6)])
    for path in sorted((store.root / "commitlog").iterdir())[1:]:
        path.unlink()
    coverage = store.ask().coverage
    assert (coverage.complete, [(gap.begin, gap.reason) for gap in coverage.uncovered]) == (
        False,
        [(SEGMENT, LOG_ENDS)],
    )


def test_an_index_file_that_expired_is_passed_over_and_a_lost_one_is_not(store: Store) -> None:
    _, offsets = built(store, *[spec(size=1500, KEYS="k " * 9) for _ in range(6)])
    (store.data / "index" / store.frontier.index[0].name).unlink()
    with pytest.raises(CorruptDataError, match="missing"):
        store.exact()
    (store.root / "commitlog" / f"{0:020d}").unlink()
    assert store.exact() == offsets[:1:-1]
    with store.index() as index:
        assert query_rocketmq(index, KeyQuery("T", "k")).hits[0].phy_offset == offsets[-1]


def test_an_older_flavour_says_what_it_never_indexes(tmp_path: Path) -> None:
    store = Store(tmp_path, flavour="4.7")
    built(store, spec(TAGS="t"))
    assert store.why("t", index_type="T") == "never indexed"


def test_a_running_daemon_has_newer_files_and_says_how_far_it_is(store: Store) -> None:
    built(store, spec(), spec())
    (offset,) = store.append(spec(time=T0 + 1, KEYS="new"))
    before = store.frontier
    service = store.build()
    newer = NaiveIndexFile(LAYOUT.hash_slot_num, LAYOUT.index_num, 1, 1)
    newer.put_key("T#newest", offset, T0)
    (store.data / "index" / "20270101000000000").write_bytes(newer.to_bytes())
    (store.data / "index" / "20270101000000001").write_bytes(b"half made")
    (store.data / "index" / "notes.txt").write_text("not ours")
    write_frontier(Disk(), store.data / "frontier", before, "0")
    state = {"pid": os.getpid(), "phyOffset": store.writer.max_offset, "storeTimestamp": T0, "dispatchBehindBytes": 0}
    (store.data / "state").write_text(json.dumps(state))
    assert service.files[-1].index_count < LAYOUT.index_num
    behind = f"not yet indexed: the log from physical offset {offset} on"
    assert store.why("other") == behind  # no one runs: the state is an old one
    with store.running():
        assert store.why("other") == "absent"
        assert store.exact("new") == [offset]
        with store.index() as index:
            answer = query_rocketmq(index, KeyQuery("T", "newest"))
            assert [hit.phy_offset for hit in answer.hits] == [offset]
            assert answer.coverage.daemon_pid == os.getpid()
        (store.data / "state").write_text("{")
        assert store.why("other") == behind
    with store.index() as index:
        assert query_rocketmq(index, KeyQuery("T", "newest")).hits == ()


def test_after_a_crash_the_slots_are_not_believed(store: Store) -> None:
    built(store, spec(), spec(KEYS="other"), spec())
    path = store.data / "index" / store.frontier.index[0].name
    patch(path, 40, struct.pack(">7i", *[9] * LAYOUT.hash_slot_num))  # ahead of the entries, which are zeros
    assert store.exact() == []
    (store.data / "abort").write_text("1")
    assert store.exact() == [message.phy_offset for message in store.messages()][::-2]
    assert store.exact("other") == [store.messages()[1].phy_offset]


def test_a_scan_of_hash_zero_finds_its_entries_among_zeros(tmp_path: Path) -> None:
    store = Store(tmp_path, IndexLayout(7, 3000), segment=1 << 20)
    _, offsets = built(store, *[spec(topic="TopicA", KEYS=f"a{i} 4E1C<E=" if i % 3 else f"a{i}") for i in range(900)])
    (store.data / "abort").write_text("1")
    expected = [offset for i, offset in enumerate(offsets) if i % 3][::-1]
    assert store.exact("4E1C<E=", topic="TopicA", max_num=5000) == expected


def pages(index: QueryIndex, query: KeyQuery) -> list[int]:
    """All hits, page by page; a page that is cut off has a cursor, and each cursor is before the last."""
    page = query_exact(index, query)
    got = [hit.phy_offset for hit in page.hits]
    while page.cursor is not None:
        assert page.truncated is not None
        assert query.before is None or page.cursor < query.before
        query = query._replace(before=page.cursor)
        page = query_exact(index, query)
        got += [hit.phy_offset for hit in page.hits]
    assert page.truncated is None
    return got


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(st.sampled_from(["k", "k k", "k x y", "x", "Aa BB k", "y"]), st.integers(0, 9)), max_size=40),
    st.integers(1, 7),
    st.integers(1, 12),
    st.booleans(),
)
def test_pages_are_the_whole(rows: list[tuple[str, int]], page: int, walk_max: int, is_unclean: bool) -> None:
    with tempfile.TemporaryDirectory() as directory:
        store = Store(Path(directory), IndexLayout(3, 17))
        _, offsets = built(store, *[spec(T0 + 1000 * late, KEYS=keys, UNIQ_KEY="k") for keys, late in rows])
        if is_unclean:
            (store.data / "abort").write_text("1")
        matching = [o for o, (_, late) in zip(offsets, rows, strict=True) if late < 7][::-1]
        query = KeyQuery("T", "k", page, end=T0 + 6999)
        with store.index(query_walk_max=walk_max) as index:
            assert pages(index, query) == matching
        with store.index() as index:
            assert pages(index, query) == matching
            for before in [0, *offsets, 10**9]:
                answer = query_exact(index, KeyQuery("T", "k", 1000, end=T0 + 6999, before=before))
                assert [hit.phy_offset for hit in answer.hits] == [o for o in matching if o < before]


def test_new_messages_do_not_move_a_cursor(store: Store) -> None:
    _, offsets = built(store, *[spec() for _ in range(9)])
    with store.index() as index:
        first = query_exact(index, KeyQuery("T", "k", 4))
        built(store, *[spec() for _ in range(7)])
        second = query_exact(index, KeyQuery("T", "k", 100, before=first.cursor))
    assert [hit.phy_offset for hit in first.hits + second.hits] == offsets[::-1]
    assert first.to_dict()["cursor"] == str(offsets[4] + 1)


def age(path: Path) -> None:
    """As if it had been written long ago."""
    past = time.time_ns() - 10**9
    os.utime(path, ns=(past, past))


def test_a_second_query_opens_and_lists_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    built(store, *[spec() for _ in range(30)])
    for path in (store.data / "frontier", store.data / "index", store.root / "commitlog"):
        age(path)
    with store.index() as index:
        first = query_exact(index, KeyQuery("T", "k"))
        calls: list[str] = []
        for name in ("open_read", "list_dir", "read", "stamps"):
            monkeypatch.setattr(Disk, name, lambda *args, name=name: calls.append(name))
        assert query_exact(index, KeyQuery("T", "k")) == first
        assert calls == []


def test_a_long_lived_index_sees_each_change(store: Store) -> None:
    built(store, *[spec() for _ in range(3)])
    with store.index() as index:
        for number in range(6):
            built(store, spec(KEYS=f"k{number}"), spec())
            for path in (store.data / "frontier", store.data / "index"):
                age(path)
            assert len(query_exact(index, KeyQuery("T", f"k{number}")).hits) == 1
            assert len(query_exact(index, KeyQuery("T", "k")).hits) == number + 4
        age(store.data / "index")
        assert len(query_exact(index, KeyQuery("T", "k")).hits) == 9
        path = store.data / "index" / store.frontier.index[0].name
        content = path.read_bytes()
        os.truncate(path, 100)
        with pytest.raises(CorruptDataError, match="100 bytes"):
            query_exact(index, KeyQuery("T", "k"))
        path.write_bytes(content)
        path.unlink()
        with pytest.raises(CorruptDataError, match="missing"):
            query_exact(index, KeyQuery("T", "k"))
        path.write_bytes(content)
        # A file that is being made has another size at first, and its directory does not change when it grows.
        with store.running():
            newer = store.data / "index" / "20280101000000000"
            newer.write_bytes(b"")
            age(store.data / "index")
            assert len(query_exact(index, KeyQuery("T", "k")).hits) == 9
            newer.write_bytes(bytes(store.layout.file_size))
            age(store.data / "index")
            assert [name for name, _ in index.look().files][-1] == newer.name


def test_a_long_lived_index_follows_the_log(store: Store) -> None:
    built(store, *[spec(size=1900) for _ in range(2)])
    age(store.root / "commitlog")
    with store.index() as index:
        assert query_exact(index, KeyQuery("T", "none")).why == "absent"
        assert store.append(spec(size=1900)) == [store.segment]
        behind = f"not yet indexed: the log from physical offset {store.frontier.phy_offset} on"
        assert query_exact(index, KeyQuery("T", "none")).why == behind
        age(store.root / "commitlog")
        query_exact(index, KeyQuery("T", "none"))
        (store.root / "commitlog" / f"{0:020d}").unlink()
        assert query_exact(index, KeyQuery("T", "none")).coverage.log_begin == store.segment
