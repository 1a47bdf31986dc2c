"""What queries say of empty answers, of wrong arguments and of a frontier that holds nonsense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from indexd.errors import CorruptDataError, IndexdError, UsageError
from indexd.flush.frontier import Uncovered
from indexd.query import (
    Coverage,
    Data,
    KeyQuery,
    OffsetQuery,
    open_data,
    query_exact,
    query_offset,
)
from indexd.query.coverage import Behind
from indexd.storage.disk import Disk
from support.data_directory import SEGMENT, T0, spec
from support.queue_store import QueueStore


@pytest.fixture
def store(tmp_path: Path) -> QueueStore:
    return QueueStore(tmp_path)


# --- what is said ---


def test_nothing_before_a_cursor(store: QueueStore) -> None:
    (offset, _) = store.append(spec(), spec())
    store.build()
    with store.index() as index:
        assert query_exact(index, KeyQuery("T", "k", before=offset)).why == "absent before the cursor"
        assert query_exact(index, KeyQuery("T", "none")).why == "absent"
        (behind,) = store.append(spec())
        # What is not indexed yet stands behind the cursor, unless the cursor is behind the index.
        assert query_exact(index, KeyQuery("T", "k", before=offset)).why == "absent before the cursor"
        assert query_exact(index, KeyQuery("T", "none", before=behind)).why == "absent before the cursor"
        assert str(query_exact(index, KeyQuery("T", "none", before=behind + 1)).why).startswith("not yet indexed")


def test_what_a_cursor_leaves_open() -> None:
    gap = Uncovered(300, 400, "lost")
    whole = Coverage(200, 500, 100, Behind(500), (gap,))
    assert whole.up_to(501).behind is not None
    assert whole.up_to(500).behind is None
    assert whole.up_to(301).uncovered == (gap,)
    assert whole.up_to(300).uncovered == ()
    assert whole.up_to(101).starts_late
    assert not whole.up_to(101).complete
    assert whole.up_to(100).complete  # the log begins there
    assert not Coverage(200, 500, None, Behind(500)).complete
    assert Coverage(200, 500, None, Behind(500)).up_to(0).complete


def test_a_query_is_ended_by_its_check(store: QueueStore) -> None:
    store.append(*[spec() for _ in range(20)])
    store.build()
    with open_data(store.data) as data:
        assert len(data.by_key("T", "k").hits) == 20
        where = data.by_key("T", "k").hits[0].phy_offset
        queries = (
            lambda: data.by_key("T", "k"),
            lambda: data.by_key("T", "none"),
            lambda: data.by_queue("T", 0),
            lambda: data.at_time("T", 0, T0),
            lambda: data.message(where),
        )
        for query in queries:
            query()

        def stop() -> None:
            raise KeyError

        data.set_check(stop)
        for query in queries:
            with pytest.raises(KeyError):
                query()


def test_queues_that_were_left_out_and_one_that_starts_late(store: QueueStore) -> None:
    store.writer.queue_offsets["T", 0] = 11
    store.append(*[spec() for _ in range(3)])
    store.build()
    store.change_frontier(
        queues_limit=1,
        queues=tuple(mark._replace(begin_offset=mark.min_offset) for mark in store.frontier.queues or ()),
    )
    with store.index() as index:
        assert query_offset(index, OffsetQuery("T", 1, 0)).why == (
            "no such queue; queues were left out when there were 1 (queues_max)"
        )
        answer = query_offset(index, OffsetQuery("T", 0, 2))
        assert (answer.status, answer.begins_late, answer.begin_offset) == ("OFFSET_TOO_SMALL", True, 11)
        assert query_offset(index, OffsetQuery("T", 0, 14)).why == "behind the last message"
    store.change_frontier(queues=tuple(mark._replace(begin_offset=3) for mark in store.frontier.queues or ()))
    with store.index() as index:
        assert not query_offset(index, OffsetQuery("T", 0, 2)).begins_late


# --- the Python API ---


@pytest.mark.parametrize(
    "asked",
    [
        lambda data: data.at_time("T", 0, T0, "middle"),
        lambda data: data.at_time("T", 0, T0, None),
        lambda data: data.at_time("T", 0, "now"),
        lambda data: data.at_time("T", 0.0, T0),
        lambda data: data.by_queue("T", 0, 0, max_num=0),
        lambda data: data.by_queue("T", True, 0),
        lambda data: data.by_queue("T", "0"),
        lambda data: data.by_queue(b"T", 0),
        lambda data: data.by_queue("T", 0, 1.5),
        lambda data: data.by_key("T", "k", max_num=0),
        lambda data: data.by_key("T", "k", max_num=True),
        lambda data: data.by_key("T", 7),
        lambda data: data.by_key("T", "k", index_type="X"),
        lambda data: data.by_key("T", "k", index_type=["K"]),
        lambda data: data.by_key("T", "k", before="5"),
        lambda data: data.by_key("T", "k", begin=None),
        lambda data: data.log_at_time(1.0),
        lambda data: data.message(None),
        lambda data: data.split_log("1 MiB"),
    ],
)
def test_wrong_arguments(store: QueueStore, asked: Any) -> None:
    store.append(spec())
    store.build()
    with open_data(store.data) as data, pytest.raises(UsageError, match=r"has to be|max_num"):
        asked(data)


def test_what_is_a_number_elsewhere_is_one_here(store: QueueStore) -> None:
    np = pytest.importorskip("numpy")
    store.append(spec())
    store.build()
    with open_data(store.data) as data:
        assert len(data.by_queue("T", np.int32(0), np.int64(0), max_num=np.uint8(1)).hits) == 1


def test_a_closed_data(store: QueueStore) -> None:
    store.append(spec())
    store.build()
    data = open_data(store.data)
    data.close()
    data.close()
    calls: list[Any] = [
        lambda: data.by_key("T", "k"),
        lambda: data.by_queue("T", 0),
        lambda: data.at_time("T", 0, T0),
        lambda: data.log_at_time(T0),
        lambda: data.split_log(100),
        lambda: data.message(0),
        data.coverage,
        data.__enter__,
    ]
    for call in calls:
        with pytest.raises(UsageError, match="is closed"):
            call()
    assert isinstance(data, Data)


# --- a frontier that was edited by hand ---


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("consumeQueue", "fileSize"), 0),
        (("consumeQueue", "fileSize"), -160),
        (("consumeQueue", "fileSize"), 159),
        (("sparse", "segments", 0, 0), -SEGMENT),
        (("sparse", "segments", 0, 1), 1 << 31),
        (("sparse", "segments", 0, 2), -1),
        (("sparse", "segments", 0, 2), 1 << 31),
        (("sparse", "segments", 0, 3), 1 << 40),
    ],
)
def test_nonsense_in_a_frontier(store: QueueStore, where: tuple[Any, ...], value: int) -> None:
    store.append(*[spec(T0 + number) for number in range(9)])
    store.build()
    path = store.data / "frontier"
    row = json.loads(Disk().read(path))
    del row["crc32"]
    path.write_text(json.dumps(row))
    open_data(store.data).close()
    inner = row
    for name in where[:-1]:
        inner = inner[name]
    inner[where[-1]] = value
    path.write_text(json.dumps(row))
    with pytest.raises(CorruptDataError, match="is no frontier") as refused:
        open_data(store.data)
    assert isinstance(refused.value, IndexdError)
