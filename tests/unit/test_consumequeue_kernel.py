"""ConsumeQueues against the naive ones, any stream of messages, any moment of writing; and what the check finds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from indexd.commitlog.batcher import TopicTable
from indexd.consumequeue import store as store_module
from indexd.consumequeue.check import check_queues
from indexd.consumequeue.format import BLANK_UNIT, UNIT, QueueMark, QueuesMark
from indexd.consumequeue.store import ConsumeQueueStore
from indexd.errors import DiskError
from indexd.findings import Findings
from indexd.output import CheckScope, Condition
from indexd.storage.disk import Disk
from support.naive_queue import NaiveConsumeQueueStore, NaiveMessage
from support.queues import batch_of, batches, sim_tree, stream
from support.sim_disk import SimDisk

ROOT = Path("/simulated")
QUEUES = ROOT / "consumequeue"
TOPICS = ["A", "主题", "%RETRY%g", ".", "..", "a/b", ""]
FAR = 1 << 61

#: A message: topic, queue id, how its queue offset lies to the next one of its queue (or absolutely), flags, size.
STEPS = st.tuples(
    st.sampled_from([*TOPICS[:3] * 4, *TOPICS[3:]]),
    st.sampled_from([0, 0, 1, 2, -1, 2**31 - 1]),
    st.sampled_from(["next"] * 8 + ["zero", "before", "behind", "negative", "far"]),
    st.sampled_from([0] * 8 + [0x4, 0x8, 0xC, 0x80, 0x84, 0x700]),
    st.integers(1, 1000),
)
#: What happens: messages as one batch; the last so many messages once more; publish; expiry of a share of the log.
EVENTS = st.one_of(
    st.tuples(st.just("put"), st.lists(STEPS, min_size=1, max_size=12), st.integers(0, 2)),
    st.tuples(st.just("put"), st.lists(STEPS, min_size=1, max_size=12), st.integers(0, 2)),
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
        self.messages: list[NaiveMessage] = []
        self.phy_offset = self.expired = 0

    def put(self, messages: list[NaiveMessage], table: int) -> None:
        self.store.build(batch_of(messages, self.tables[table]))
        for message in messages:
            self.naive.put(message)

    def made(self, steps: list[tuple[str, int, str, int, int]]) -> list[NaiveMessage]:
        """The messages that the steps stand for, at the end of the log."""
        made = []
        ends = {name: queue.end for name, queue in self.naive.queues.items()}
        for topic, queue_id, offset, flags, size in steps:
            end = ends.setdefault((topic, queue_id), len(self.messages) % 7)
            queue_offset = {"next": end, "zero": 0, "before": end // 2, "behind": end + 3, "negative": -1}.get(
                offset, FAR
            )
            made.append(NaiveMessage(topic, queue_id, queue_offset, self.phy_offset, size, -(size << 33), flags))
            self.phy_offset += size
            ends[topic, queue_id] += 1
        self.messages += made
        return made

    def check(self) -> None:
        marks = [tuple(mark) for mark in self.store.mark().held.queues]
        assert marks == self.naive.marks()
        gone = {str(path.relative_to(QUEUES)) for path in self.store.mark().expired}
        assert {
            name: data for name, data in sim_tree(self.disk, QUEUES).items() if name not in gone
        } == self.naive.tree()


@given(
    st.lists(EVENTS, max_size=12), st.integers(1, 6), st.sampled_from([1, 2, 4, 1000]), st.sampled_from([1, 2, 7, 1000])
)
@example([("put", [("A", 0, "next", 0, 9)], 0), ("again", 1, 1), ("put", [("A", 0, "zero", 0, 9)], 2)], 1, 1, 1)
def test_every_file_and_mark_is_what_the_rules_say(
    events: list[tuple[str, object, int]], file_units: int, queues_max: int, units_per_write: int
) -> None:
    twins = Twins(file_units, queues_max)
    with mock.patch.multiple(store_module, UNITS_PER_WRITE=units_per_write, _UNITS_A_QUEUE=0):
        for what, argument, table in events:
            if what == "put":
                assert isinstance(argument, list)
                twins.put(twins.made(argument), table)
            elif what == "again":
                assert isinstance(argument, int)
                twins.put(twins.messages[-argument:], table)
            elif what == "publish":
                twins.check()
            else:
                assert isinstance(argument, int)
                twins.expired = max(twins.expired, twins.phy_offset * argument // 100)
                inside = [m.phy_offset for m in twins.messages if m.phy_offset < twins.expired < m.phy_offset + m.size]
                twins.expired = inside[0] if inside else twins.expired
                names = twins.store.expire(twins.expired)
                assert len(names) == twins.naive.delete_expired(twins.expired)
        twins.check()
    counters, kinds = twins.store.counters, twins.naive.kinds
    names = {
        "gap": "gaps",
        "repeat": "repeats",
        "batch": "batch_messages",
        "nameless": "nameless",
        "left out": "left_out",
    }
    assert {name: counters[name] for name in names.values()} == {
        name: kinds.get(kind, 0) for kind, name in names.items()
    }
    assert counters["units"] == kinds.get("unit", 0) + kinds.get("gap", 0)
    assert counters["messages"] == sum(kinds.values())


@settings(max_examples=10)
@given(st.integers(0, 1 << 32), st.integers(1, 400))
def test_many_queues_are_each_found_again(seed: int, queues: int) -> None:
    # More than the first table holds, with ids that differ in every part.
    twins = Twins(3, 1 << 20)
    names = [(f"T{(seed + number * 7919) % 97}", (seed ^ number * 0x10001) % (1 << 31)) for number in range(queues)]
    for turn in range(3):
        messages = [
            NaiveMessage(topic, queue_id, turn, (turn * queues + number) * 10, 10, number)
            for number, (topic, queue_id) in enumerate(dict.fromkeys(names))
        ]
        twins.put(messages, 0)
    twins.check()
    assert len(twins.store) == len(set(names))


FILE_SIZE = 80
NAME = "00000000000000000000"


class Built:
    """Queues in a directory, and their marks."""

    def __init__(self, root: Path, file_size: int = FILE_SIZE) -> None:
        self.root, self.file_size = root, file_size
        self.messages = stream(25, 200, 6)
        store = ConsumeQueueStore(Disk(), root, file_size, 1000)
        for batch in batches(self.messages, 50):
            store.build(batch)
        self.marks: Sequence[QueueMark] = store.mark().held.queues
        store.close()
        self.mark = next(mark for mark in self.marks if mark.min_offset == 0 and mark.max_offset % 4)
        self.folder = root / self.mark.topic / str(self.mark.queue_id)
        self.name = f"consumequeue/{self.mark.topic}/{self.mark.queue_id}"

    def write(self, unit: int, data: bytes, at: int = 0) -> str:
        """Overwrite a part of a unit; the name of its file."""
        position = unit * 20
        path = self.folder / f"{position // self.file_size * self.file_size:020d}"
        with path.open("r+b") as file:
            file.seek(position % self.file_size + at)
            file.write(data)
        return f"{self.name}/{path.name}"

    def check(self, on_bytes: Callable[[int], None] = lambda _: None, **how: bool) -> Findings:
        condition = Condition.AT_REST if how.get("is_at_rest", True) else Condition.GROWING
        scope = CheckScope(condition, how.get("is_complete", True), on_bytes)
        return check_queues(Disk(), self.root, QueuesMark(self.file_size, tuple(self.marks)), scope)


@pytest.fixture
def built(tmp_path: Path) -> Built:
    return Built(tmp_path / "q")


@pytest.mark.parametrize("file_size", [20, 80, 60_000, 6_000_000])
def test_nothing_is_found_in_what_was_built(tmp_path: Path, file_size: int) -> None:
    built, done = Built(tmp_path / "q", file_size), 0

    def count(more: int) -> None:
        nonlocal done
        done += more

    assert built.check(count).kept == []
    assert done == sum(mark.max_offset - mark.first_offset for mark in built.marks) * 20


@pytest.mark.parametrize(
    ("at", "data", "kind", "words"),
    [
        (0, b"\x80", "unit-phy-offset", "is negative"),
        (0, bytes(8), "unit-order", "the phy offset 0 lies before the end of the message before it"),
        (8, bytes(4), "unit-size", "the size 0 is not more than 0"),
        (8, b"\xff", "unit-size", "is not more than 0"),
        (0, BLANK_UNIT, "unit-blank", "a blank unit stands where a message's should"),
        (0, bytes(20), "unit-size", "the size 0 is not more than 0"),
    ],
)
@pytest.mark.parametrize("unit", [1, 5])
def test_a_unit_that_cannot_be_is_found(built: Built, unit: int, at: int, data: bytes, kind: str, words: str) -> None:
    name = built.write(unit, data, at)
    found = built.check()
    assert found.kept[0].file == name
    assert found.kept[0].position // 20 == unit % 4
    assert found.kept[0].what == kind
    assert words in found.kept[0].text
    assert f"unit {unit}:" in found.kept[0].text
    assert found.counts.total() == 1


def test_a_first_unit_that_is_blank_is_found_where_the_queue_begins_there(built: Built) -> None:
    built.write(0, BLANK_UNIT)
    assert [finding.what for finding in built.check().kept] == ["unit-blank"]


def test_a_queue_that_ends_elsewhere_is_found(built: Built) -> None:
    unit = built.mark.max_offset - 1
    built.write(unit, (1 << 40).to_bytes(8, "big"))
    assert [finding.what for finding in built.check().kept] == ["queue-end"]


def test_files_that_are_missing_or_of_another_size_are_found(built: Built) -> None:
    (built.folder / NAME).unlink()
    (built.folder / "00000000000000000080").write_bytes((built.folder / "00000000000000000080").read_bytes()[:70])
    (built.folder / "00000000000000000160").write_bytes((built.folder / "00000000000000000160").read_bytes() + b"x")
    kinds = [(finding.file.rpartition("/")[2][-3:], finding.what) for finding in built.check().kept]
    assert kinds == [("000", "file-missing"), ("080", "file-size"), ("160", "file-size")]


def test_a_queue_that_is_wrong_all_over_is_found_in_bounded_memory(tmp_path: Path) -> None:
    root = tmp_path / "q"
    (root / "T/0").mkdir(parents=True)
    (root / "T/0" / NAME).write_bytes(UNIT.pack(7, -1, 0) * 50_000)
    mark = QueueMark("T", 0, 0, 0, 50_000, 1)
    scope = CheckScope(Condition.AT_REST, True, lambda _: None)
    found = check_queues(Disk(), root, QueuesMark(1_000_000, (mark,)), scope)
    assert found.counts == {"unit-size": 50_000}
    assert len(found.kept) <= 1000


def test_what_may_not_be_read_is_an_error(built: Built) -> None:
    path = built.folder / NAME
    path.unlink()
    path.mkdir()
    with pytest.raises(DiskError):
        built.check()
