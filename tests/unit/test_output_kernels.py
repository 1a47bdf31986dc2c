"""The kernels of the outputs against plain twins: putKey and its replay, ConsumeQueues, entries of sparse indexes."""

from __future__ import annotations

import struct
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from indexd.commitlog.batcher import TopicTable
from indexd.consumequeue.store import ConsumeQueueStore
from indexd.index.entries import read_entries, replay_file
from indexd.index.file import IndexFile, time_difference
from indexd.index.format import FLAVOURS, Flavour, IndexHeader, IndexLayout, index_key_hash
from indexd.index.kernel import DONE, FILE_FULL
from indexd.index.reader import IndexFileReader
from indexd.sparse.kernel import final_time_entry, new_state, segment_entries
from indexd.storage.disk import Disk
from support.naive import NaiveConsumeQueueStore, NaiveIndexFile, QueueMessage
from support.queues import Entries, batch_of, sim_tree
from support.sim_disk import SimDisk
from support.strategies import Sample, logs, pieces, store_timestamps, topics
from support.twins import batches, encode, put_key

EXTREME = st.one_of(store_timestamps(), st.sampled_from([2**63 - 1, -(2**63), 2**62, -(2**62), 1000, 999]))
PUTS = st.lists(st.tuples(topics(), pieces(), st.integers(0, 2**63 - 1), EXTREME), max_size=30)


@contextmanager
def new_file(slots: int, entries: int, previous: IndexHeader | None = None) -> Iterator[IndexFile]:
    with tempfile.TemporaryDirectory() as directory:
        file = IndexFile.create(Disk(), Path(directory) / "20240101000000000", IndexLayout(slots, entries), previous)
        yield file
        file.close()


def published(file: IndexFile) -> bytes:
    file.publish()
    return file.path.read_bytes()


def selected(file: IndexFile, hashed: int, max_num: int = 64, begin: int = 0, end: int = 2**63 - 1) -> list[int]:
    return IndexFileReader(file.file, file.layout).select_phy_offset(hashed, max_num, begin, end)


# --- putKey: the vector of spec 12, and any puts ---

VECTOR = [("a", 1000, 1000000500), ("a", 1100, 1000003499), ("b", 1200, 999000000), ("c", 1300, 1000009000)]


def test_the_index_file_vector() -> None:
    entries = [(0, 0, 0, 0), (81906, 1000, 0, 0), (81906, 1100, 2, 1), (81907, 1200, 0, 0), (81908, 1300, 8, 0)]
    expected = struct.pack(">qqqqii4i", 1000000500, 1000009000, 1000, 1300, 3, 5, 4, 0, 2, 3)
    expected += b"".join(struct.pack(">iqii", *entry) for entry in entries)
    flavour, wanted = FLAVOURS["5.4"], index_key_hash("T", "a")
    with new_file(4, 5) as file:
        assert [put_key(file, "T", *put, flavour) for put in VECTOR] == [DONE] * 4
        assert put_key(file, "T", "d", 1400, 1000009000, flavour) == FILE_FULL
        assert published(file) == expected
        assert selected(file, wanted) == selected(file, wanted, end=1000002500) == [1100, 1000]
        assert selected(file, wanted, begin=1000003499) == selected(file, wanted, 0) == []
        assert selected(file, wanted, 1) == [1100]
        header = file.header
    with new_file(4, 5, header) as file:
        head = struct.pack(">qqqqi", 1000009000, 1000009000, 1300, 1300, 0)
        assert published(file) == head + bytes(4 + 16 + 100)
        put_key(file, "T", "z", 5000, 1000019000, flavour)
        head = struct.pack(">qqqqii", 1000019000, 1000019000, 5000, 5000, 1, 2)
        body = struct.pack(">4i", 0, 0, 0, 1) + bytes(20) + struct.pack(">iqii", 81931, 5000, 10, 0) + bytes(60)
        assert published(file) == head + body


@given(PUTS, st.sampled_from([1, 3, 50, 5000]), st.integers(2, 20), st.sampled_from(list(FLAVOURS)), EXTREME)
def test_puts_make_the_naive_file(puts: list[tuple], slots: int, entries: int, flavour: str, previous: int) -> None:
    """5000 slots are more than a page holds: those that changed are written, whenever that is."""
    header = IndexHeader(0, previous, 0, abs(previous) if previous > -(2**63) else 0)
    ends = header.end_phy_offset, header.end_timestamp, FLAVOURS[flavour].counts_every_put
    naive = NaiveIndexFile(slots, entries, *ends)
    with new_file(slots, entries, header) as file:
        assert published(file) == naive.to_bytes()
        for topic, key, phy_offset, time in puts:
            put = put_key(file, topic, key, phy_offset, time, FLAVOURS[flavour])
            assert (put == DONE) == naive.put_key(f"{topic}#{key}", phy_offset, time)
            assert time % 5 or published(file) == naive.to_bytes()
        assert published(file) == naive.to_bytes()
        file.flush()
        assert file.path.read_bytes() == naive.to_bytes(flushed=True)
        loaded = IndexFile.load(Disk(), file.path, file.layout, file.mark(full=False))
        put_key(loaded, "T", "later", 7, 7, FLAVOURS[flavour])
        naive.put_key("T#later", 7, 7)
        assert published(loaded) == naive.to_bytes(flushed=True)
        loaded.close()


def test_time_differences_wrap_as_javas() -> None:
    rows = {(5000, 0): 0, (5000, 3001): 1, (3000, 5000): 0, (1 << 62, 1): (1 << 31) - 1, (-(1 << 63), 1): (1 << 31) - 1}
    assert {times: time_difference(*times) for times in rows} == rows


# --- replay: what recovery trusts ---


def replayed(file: IndexFile, entries: NDArray[np.uint32], flavour: Flavour) -> tuple[int, int, bytes]:
    """(entries that hold, used slot count, slots) of the file with these entries."""
    file.file.pwrite(entries.tobytes(), file.layout.entry_position(1))
    found = replay_file(file.file, file.mark(full=False), file.layout, flavour)
    return found.mark.header.entries, found.mark.header.used_slot_count, found.slots.tobytes()


@given(st.data(), logs(max_size=12), st.integers(1, 9), st.sampled_from(list(FLAVOURS)))
def test_a_replay_rebuilds_the_slots(data: st.DataObject, samples: list[Sample], slots: int, name: str) -> None:
    flavour = FLAVOURS[name]
    with new_file(slots, 300) as file:
        for batch in batches(encode(samples), name, [5]):
            file.put_batch(batch, flavour, 0, -1)
        raw, count = published(file), file.header.entries
        entries = read_entries(file.file, file.layout, 1, count)
        expected = (count, file.header.used_slot_count, raw[40 : 40 + 4 * slots])
        assert replayed(file, entries, flavour) == expected
        if count:
            bad, broken = data.draw(st.integers(0, count - 1)), entries.copy()
            # A bit of the previous entry, or the sign of the key hash, the physical offset or the time difference.
            previous = st.tuples(st.just(4), st.integers(0, 31).map(lambda bit: 1 << bit))
            column, bits = data.draw(st.one_of(previous, st.tuples(st.sampled_from([0, 1, 3]), st.just(0x80))))
            broken[bad, column] ^= np.uint32(bits)
            assert replayed(file, broken, flavour)[0] == bad


def test_a_replay_ends_where_offsets_go_back_and_refuses_another_file() -> None:
    flavour = FLAVOURS["5.4"]
    with new_file(3, 10) as file:
        for phy_offset in (5, 9, 9, 8, 10):
            put_key(file, "T", "k", phy_offset, 1, flavour)
        file.publish()
        entries = read_entries(file.file, file.layout, 1, file.header.entries)
        assert replayed(file, entries, flavour)[:2] == (3, 1)
        entries[3, 2] = entries[2, 2]
        for number, low in ((0, 6), (4, 9)):
            other = entries.copy()
            other[number, 2] = np.uint32(low).byteswap()
            assert replayed(file, other, flavour)[:2] == (0, 0)


# --- ConsumeQueues: any stream of messages, any moment of writing ---

ROOT = Path("/simulated")
QUEUES = ROOT / "consumequeue"
TOPICS = ["A", "主题", "%RETRY%g", ".", "..", "a/b", ""]

#: A message: topic, queue id, how its queue offset lies to the next one of its queue (or absolutely), flags, size.
STEPS = st.tuples(
    st.sampled_from([*TOPICS[:3] * 4, *TOPICS[3:]]),
    st.sampled_from([0, 0, 1, 2, -1, 2**31 - 1]),
    st.sampled_from(["next"] * 8 + ["zero", "before", "behind", "negative", "far"]),
    st.sampled_from([0] * 8 + [0x4, 0x8, 0xC, 0x80, 0x84, 0x700]),
    st.integers(1, 1000),
)
PUT = st.tuples(st.just("put"), st.lists(STEPS, min_size=1, max_size=12), st.integers(0, 2))
#: What happens: messages as one batch; the last so many messages once more; publish; expiry of a share of the log.
EVENTS: st.SearchStrategy[tuple[str, Any, int]] = st.one_of(
    PUT,
    PUT,
    st.tuples(st.just("again"), st.integers(1, 10), st.integers(0, 2)),
    st.tuples(st.just("publish"), st.just(0), st.just(0)),
    st.tuples(st.just("expire"), st.integers(0, 100), st.just(0)),
)


class Twins:
    """The store and its slow twin, given the same."""

    def __init__(self, file_units: int, queues_max: int) -> None:
        self.disk = SimDisk(ROOT)
        self.store = ConsumeQueueStore(self.disk, QUEUES, 20 * file_units, queues_max)
        self.naive = NaiveConsumeQueueStore(file_units, queues_max)
        self.tables = [TopicTable(64) for _ in range(3)]
        self.messages: list[QueueMessage] = []
        self.phy_offset = self.expired = 0

    def put(self, messages: list[QueueMessage], table: int) -> None:
        self.store.build(batch_of(messages, self.tables[table]))
        for message in messages:
            self.naive.put(message)

    def made(self, steps: list[tuple[str, int, str, int, int]]) -> list[QueueMessage]:
        """The messages that the steps stand for, at the end of the log."""
        ends, before = {name: queue.end for name, queue in self.naive.queues.items()}, len(self.messages)
        for topic, queue_id, offset, flags, size in steps:
            end = ends.setdefault((topic, queue_id), before % 7)
            places = {"next": end, "zero": 0, "before": end // 2, "behind": end + 3, "negative": -1, "far": 1 << 61}
            place = topic, queue_id, places[offset], self.phy_offset
            self.messages.append(QueueMessage(*place, size, -(size << 33), flags))
            self.phy_offset += size
            ends[topic, queue_id] += 1
        return self.messages[before:]

    def expire(self, percent: int) -> None:
        expired = max(self.expired, self.phy_offset * percent // 100)
        inside = [m.phy_offset for m in self.messages if m.phy_offset < expired < m.phy_offset + m.size]
        self.expired = inside[0] if inside else expired
        assert len(self.store.expire(self.expired)) == self.naive.delete_expired(self.expired)

    def check(self) -> None:
        mark = self.store.mark()
        assert [tuple(queue) for queue in mark.held.queues] == self.naive.marks()
        gone = {str(path.relative_to(QUEUES)) for path in mark.expired}
        left = {name: data for name, data in sim_tree(self.disk, QUEUES).items() if name not in gone}
        assert left == self.naive.tree()


@given(
    st.lists(EVENTS, max_size=12), st.integers(1, 6), st.sampled_from([1, 2, 4, 1000]), st.sampled_from([1, 2, 7, 1000])
)
@example([("put", [("A", 0, "next", 0, 9)], 0), ("again", 1, 1), ("put", [("A", 0, "zero", 0, 9)], 2)], 1, 1, 1)
def test_every_file_and_mark_is_what_the_rules_say(
    events: list[tuple[str, Any, int]], file_units: int, queues_max: int, units_per_write: int
) -> None:
    twins = Twins(file_units, queues_max)
    twins.store.units_per_write, twins.store.units_a_queue = units_per_write, 0
    for what, argument, table in events:
        if what == "put":
            twins.put(twins.made(argument), table)
        elif what == "again":
            twins.put(twins.messages[-argument:], table)
        elif what == "publish":
            twins.check()
        else:
            twins.expire(argument)
    twins.check()
    figures, kinds = twins.store.figures(), Counter(twins.naive.kinds)
    kinds["units"] = kinds["unit"] + kinds["gap"]
    names = {"Units": "units", "Gaps": "gap", "Repeats": "repeat"}
    assert {name: figures[f"consumeQueue{name}"] for name in names} == {name: kinds[names[name]] for name in names}
    assert list(twins.store.left_out().values()) == [kinds["nameless"], kinds["left out"], kinds["batch"]]
    left_out = figures["batchMessages"], figures["leftOutMessages"]
    assert left_out == (kinds["batch"], kinds["nameless"] + kinds["left out"])


# --- sparse indexes: the entries of a segment ---

BATCHES = st.lists(
    st.tuples(st.integers(1, 500), st.integers(1, 3), st.integers(-3, 40) | st.integers(-(2**63), 2**63 - 1)),
    max_size=40,
)


@given(BATCHES, st.sampled_from([0, 1, 100, 499, 500, 4096]), st.integers(1, 7), st.integers(1, 5))
def test_batches_of_a_segment(batches: list[tuple[int, int, int]], interval: int, split: int, room: int) -> None:
    rows, position, offset, twin = [], 0, -1, Entries(interval)
    for size, count, timestamp in batches:
        offset += count
        rows.append((position, size, offset, timestamp))
        twin.put(*rows[-1])
        position += size
    columns = [np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)]
    state, at, found = new_state(), 0, ([], [])  # type: ignore[var-annotated]
    while at < len(rows):
        pair = np.empty((2, room, 2), np.int64)
        at, *counts = segment_entries(*columns, at, min(at + split, len(rows)), interval, state, *pair)
        for entries, made, count in zip(found, pair, counts, strict=True):
            entries.extend(map(tuple, made[:count].tolist()))
    assert found == (twin.offsets, twin.times)
    last = final_time_entry(state)
    twin.roll()
    assert found[1] + ([] if last is None else [last]) == twin.times
    assert final_time_entry(state) is None
    assert state[4] == len(rows)
