"""ConsumeQueues against the naive ones: any stream of messages, any batches, any tables, any moment of writing."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

from hypothesis import example, given, settings
from hypothesis import strategies as st

from indexd.commitlog.batcher import TopicTable
from indexd.consumequeue import store as store_module
from indexd.consumequeue.store import ConsumeQueueStore
from support.naive_queue import NaiveConsumeQueueStore, NaiveMessage
from support.queues import batch_of, sim_tree
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
