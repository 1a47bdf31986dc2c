"""Pages of an exact answer, and what a long-lived QueryIndex keeps from one query to the next."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from indexd.errors import CorruptDataError, UsageError
from indexd.index.format import IndexLayout
from indexd.query import KeyQuery, by_key, query_exact, query_rocketmq
from indexd.query.log import Kept
from indexd.storage.disk import Disk
from indexd.storage.lock import DirectoryLock
from support.data_directory import T0, Store, spec

if TYPE_CHECKING:
    from indexd.query import QueryIndex


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def pages(index: QueryIndex, query: KeyQuery) -> list[int]:
    """All hits, page by page; a page that is cut off has a cursor, and each cursor is before the last."""
    got: list[int] = []
    before = query.before
    while True:
        page = query_exact(index, KeyQuery("T", query.key, query.max_num, query.begin, query.end, None, before))
        got += [hit.phy_offset for hit in page.hits]
        assert (page.cursor is None) == (page.truncated is None)
        if page.cursor is None:
            return got
        assert before is None or page.cursor < before
        before = page.cursor


# --- pages ---


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
        offsets = store.append(*[spec(T0 + 1000 * late, KEYS=keys, UNIQ_KEY="k") for keys, late in rows])
        store.build()
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
    offsets = store.append(*[spec() for _ in range(9)])
    store.build()
    with store.index() as index:
        first = query_exact(index, KeyQuery("T", "k", 4))
        store.append(*[spec() for _ in range(7)])
        store.build()
        second = query_exact(index, KeyQuery("T", "k", 100, before=first.cursor))
    assert [hit.phy_offset for hit in first.hits + second.hits] == offsets[::-1]
    assert first.to_json()["cursor"] == str(offsets[4] + 1)
    with store.index() as index, pytest.raises(UsageError, match="no pages"):
        query_rocketmq(index, KeyQuery("T", "k", before=5))


def test_full_files_behind_a_cursor_are_not_walked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path, IndexLayout(3, 10))
    offsets = store.append(*[spec() for _ in range(90)])
    store.build()
    walked = []
    chain = by_key.chain
    monkeypatch.setattr(by_key, "chain", lambda file, *args: walked.append(file) or chain(file, *args))
    with store.index() as index:
        answer = query_exact(index, KeyQuery("T", "k", 100, before=offsets[9]))
    assert [hit.phy_offset for hit in answer.hits] == offsets[8::-1]
    assert len(walked) <= 2


# --- what is kept ---


def age(path: Path) -> None:
    """As if it had been written long ago."""
    past = time.time_ns() - 10**9
    os.utime(path, ns=(past, past))


def test_a_value_is_made_again_when_its_file_changes(tmp_path: Path) -> None:
    path, made = tmp_path / "file", []
    kept = Kept(Disk(), path, lambda: made.append(1) or (path.read_text() if path.exists() else None))
    assert [kept.get(), kept.get()] == [None, None]
    path.write_text("a")
    assert [kept.get(), kept.get()] == ["a", "a"]
    assert len(made) == 4  # it is too young to be kept
    age(path)
    assert [kept.get(), kept.get(), kept.get()] == ["a", "a", "a"]
    assert (len(made), kept.times_made) == (5, 5)
    other = tmp_path / "other"
    other.write_text("b")
    os.utime(other, ns=(path.stat().st_mtime_ns, path.stat().st_mtime_ns))
    other.rename(path)
    assert [kept.get(), kept.get()] == ["b", "b"]
    assert len(made) == 6
    kept.forget()
    assert kept.get() == "b"
    path.unlink()
    assert kept.get() is None


def test_a_second_query_opens_and_lists_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.append(*[spec() for _ in range(30)])
    store.build()
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
    store.append(*[spec() for _ in range(3)])
    store.build()
    lock = DirectoryLock(store.data / "lock")
    with store.index() as index:
        for number in range(30):
            store.append(spec(KEYS=f"k{number}"), spec())
            store.build()
            for path in (store.data / "frontier", store.data / "index"):
                age(path)
            assert len(query_exact(index, KeyQuery("T", f"k{number}")).hits) == 1
            assert len(query_exact(index, KeyQuery("T", "k")).hits) == number + 4
        age(store.data / "index")
        assert len(query_exact(index, KeyQuery("T", "k")).hits) == 33
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
        lock.acquire()
        try:
            newer = store.data / "index" / "20280101000000000"
            newer.write_bytes(b"")
            age(store.data / "index")
            assert len(query_exact(index, KeyQuery("T", "k")).hits) == 33
            newer.write_bytes(bytes(store.layout.file_size))
            age(store.data / "index")
            assert [name for name, _ in index.look().files][-1] == newer.name
        finally:
            lock.release()


def test_a_long_lived_index_follows_the_log(store: Store) -> None:
    store.append(*[spec(size=1900) for _ in range(2)])
    store.build()
    age(store.root / "commitlog")
    with store.index() as index:
        assert query_exact(index, KeyQuery("T", "none")).why == "absent"
        (offset,) = store.append(spec(size=1900))
        assert offset == store.segment
        behind = store.writer.max_offset - store.frontier.phy_offset
        assert query_exact(index, KeyQuery("T", "none")).why == f"not yet indexed: {behind} bytes behind"
        age(store.root / "commitlog")
        query_exact(index, KeyQuery("T", "none"))
        (store.root / "commitlog" / f"{0:020d}").unlink()
        assert query_exact(index, KeyQuery("T", "none")).coverage.log_begin == store.segment
