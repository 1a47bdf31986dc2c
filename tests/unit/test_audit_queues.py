"""The audit of a broker's ConsumeQueues: sound ones, faults of every kind, and the same answer however it is cut."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexd.audit.queues import KEPT_MAX
from indexd.config import Config
from indexd.consumequeue.format import BLANK_UNIT, UNIT, UNIT_SIZE, Unit
from support.auditing import (
    audit_queues,
    build_queues,
    config_of_golden,
    config_with_queues,
    copied,
    files_of,
    store_of,
    store_with_queues,
)
from support.commitlog_writer import CommitLogWriter
from support.daemon import indexd_here
from support.data_directory import T0, spec
from support.goldens import GOLDENS, unpack
from support.naive import NaiveMessage, naive_frames
from support.small_log import QUEUE_FILE_SIZE, SEGMENT_SIZE, SIZES
from support.verifying import change


def messages_of(config: Config) -> list[NaiveMessage]:
    """Every message of the log."""
    return list(naive_frames(store_of(config) / "commitlog", config.store.segment_size))


def entering(config: Config) -> list[NaiveMessage]:
    """Those that have a unit."""
    return [message for message in messages_of(config) if message.sys_flag & 0xC in (0, 8)]


class Queue:
    """The files of one queue, to be damaged; it has more units than a file holds."""

    def __init__(self, config: Config, topic: str = "OrderPaid", queue_id: int = 1) -> None:
        self.name = f"consumequeue/{topic}/{queue_id}"
        self.folder = store_of(config) / self.name
        self._config, self._key = config, (topic, queue_id)
        assert self.get(62).is_valid

    @property
    def messages(self) -> list[NaiveMessage]:
        return [message for message in entering(self._config) if (message.topic, message.queue_id) == self._key]

    def path(self, offset: int) -> Path:
        return self.folder / f"{offset * UNIT_SIZE // QUEUE_FILE_SIZE * QUEUE_FILE_SIZE:020d}"

    def get(self, offset: int) -> Unit:
        position = offset * UNIT_SIZE % QUEUE_FILE_SIZE
        return Unit(*UNIT.unpack(self.path(offset).read_bytes()[position : position + UNIT_SIZE]))

    def put(self, offset: int, unit: bytes) -> None:
        change(self.path(offset), offset * UNIT_SIZE % QUEUE_FILE_SIZE, unit)

    def change(self, offset: int, **fields: int) -> None:
        self.put(offset, UNIT.pack(*self.get(offset)._replace(**fields)))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return store_with_queues(tmp_path_factory.mktemp("made"))


@pytest.fixture
def config(made: Config, tmp_path: Path) -> Config:
    return copied(made, tmp_path / "store")


@pytest.mark.parametrize("name", GOLDENS)
def test_the_queues_that_rocketmq_wrote_are_sound(name: str, tmp_path: Path) -> None:
    golden = unpack(name, tmp_path)
    config = config_of_golden(golden, consume_queue_file_size=golden.queue_file_size)
    found = audit_queues(config)
    assert found.is_sound, found.rows()
    assert found.messages == len(entering(config)) > 100
    assert found.queues == len(list((golden.root / "consumequeue").glob("*/*")))
    assert found.lines() == [
        f"ConsumeQueues: each of {found.messages:,} messages is in its queue, and nothing else is; "
        f"{found.queues} queues"
    ]


FAULTS: dict[str, tuple[Callable[[Queue], None], dict[str, int], str]] = {
    "wrong size": (lambda q: q.change(5, size=q.get(5).size + 1), {"unit-size": 1}, "at 108: unit 5: size"),
    "wrong tags code": (
        lambda q: q.change(5, tags_code=12345),
        {"unit-tags-code": 1},
        "at 112: unit 5: tags code 12345",
    ),
    "no size": (lambda q: q.change(5, size=0), {"unit-size": 1}, "at 108: unit 5: size 0"),
    "no message there": (
        lambda q: q.change(5, phy_offset=q.get(5).phy_offset + 1),
        {"unit-other": 1},
        "at 100: unit 5: points to ",
    ),
    "a message twice": (lambda q: q.put(5, UNIT.pack(*q.get(6))), {"unit-other": 1}, "at 100: unit 5: points to"),
    "negative": (lambda q: q.change(5, phy_offset=-7), {"unit-other": 1}, "at 100: unit 5: points to -7, but is due"),
    "zeros": (lambda q: q.put(5, bytes(UNIT_SIZE)), {"unit-missing": 1}, "at 100: unit 5: missing"),
    "blank": (lambda q: q.put(5, BLANK_UNIT), {"unit-missing": 1}, "at 100: unit 5: missing"),
    "short file": (
        lambda q: q.path(0).write_bytes(q.path(0).read_bytes()[:-40]),
        {"queue-file-size": 1, "unit-missing": 2},
        "at 0: unit 0: its file has 1160 bytes",
    ),
    "long file": (
        lambda q: q.path(0).write_bytes(q.path(0).read_bytes() + bytes(40)),
        {"queue-file-size": 1},
        "at 0: unit 0: its file has 1240 bytes",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault(config: Config, fault: str) -> None:
    (damage, counts, text), queue = FAULTS[fault], Queue(config)
    damage(queue)
    found = audit_queues(config)
    assert found.counts == counts, found.rows()
    assert not found.is_sound
    (wrong,) = found.found
    assert f"consumequeue/{wrong.topic}/{wrong.queue_id}" == queue.name
    assert any(text in f"at {one.position}: {one.text}" for one in wrong.findings.kept), wrong.findings.kept
    assert all(
        (store_of(config) / queue.name).is_dir() and one.file.startswith(queue.name) for one in wrong.findings.kept
    )
    assert json.loads(json.dumps(found.rows()))[0]["queueId"] == 1
    assert f"  {queue.name}: " in found.lines()[1]


def test_a_file_that_is_gone(config: Config) -> None:
    queue = Queue(config)
    queue.path(0).unlink()
    found = audit_queues(config)
    assert found.counts == {"unit-missing": 60}
    kept = found.found[0].findings.kept
    assert (kept[0].text.split()[-1], len(kept)) == (str(queue.messages[0].phy_offset), KEPT_MAX)


def test_a_queue_that_is_gone(config: Config) -> None:
    queue = Queue(config)
    shutil.rmtree(queue.folder)
    topics = store_of(config) / "config" / "topics.json"
    topics.parent.mkdir()
    for known in ("OrderPaid", None):
        found = audit_queues(config)
        assert found.counts == {"queue-missing": len(queue.messages)}
        assert found.found[0].findings.kept[0].file == queue.name
        topics.write_text(json.dumps({"topicConfigTable": {known: {}}}))
    # A topic that was deleted takes its queues with it, and its messages stay.
    topics.write_text(json.dumps({"topicConfigTable": {"TopicTest": {}}}))
    deleted = audit_queues(config)
    assert (deleted.is_sound, deleted.deleted) == (True, {"OrderPaid": len(queue.messages)})
    assert "messages of 1 topics that have been deleted" in deleted.lines()[-1]


_DAMAGE = st.sampled_from([*FAULTS, "gone"])


@settings(max_examples=12)
@given(data=st.data())
def test_what_is_found_does_not_depend_on_how_the_log_was_cut(made: Config, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as root:
        config = copied(made, Path(root) / "store")
        for topic, queue_id in data.draw(st.lists(st.sampled_from(QUEUES), min_size=1, max_size=4, unique=True)):
            queue, damage = Queue(config, topic, queue_id), data.draw(_DAMAGE)
            if damage == "gone":
                queue.path(data.draw(st.sampled_from([0, 60]))).unlink()
            else:
                FAULTS[damage][0](queue)
        begins = [message.phy_offset for message in messages_of(config)]
        cuts = data.draw(st.lists(st.sampled_from(begins), max_size=6, unique=True))
        whole, cut = audit_queues(config), audit_queues(config, cuts, backwards=True)
        assert cut.rows() == whole.rows()
        assert not whole.is_sound


QUEUES = [(topic, queue_id) for topic in ("TopicTest", "OrderPaid") for queue_id in (0, 1, 2, 3)]


def test_what_only_points_before_the_log_has_expired(config: Config) -> None:
    every = len(entering(config))
    files_of(config, "commitlog")[0].unlink()
    found = audit_queues(config)
    assert found.is_sound, found.rows()
    assert found.messages == len(entering(config)) < every
    assert found.expired_units == every - found.messages


def write(config: Config, flags: list[int], queue_offsets: dict[int, int]) -> None:
    # One message a flag, all of one queue; before some of them its next queue offset is another.
    with CommitLogWriter(store_of(config) / "commitlog", SEGMENT_SIZE) as writer:
        for number, flag in enumerate(flags):
            if number in queue_offsets:
                writer.queue_offsets["T", 0] = queue_offsets[number]
            writer.append(replace(spec(T0 + number), sys_flag=flag))


@pytest.fixture
def empty(tmp_path: Path) -> Config:
    (tmp_path / "store" / "index").mkdir(parents=True)
    return config_with_queues(tmp_path / "store")


def test_transactions_and_a_queue_that_begins_late(empty: Config) -> None:
    write(empty, [0, 4, 8, 12, 0, 4, 0], {0: 75})
    build_queues(empty)
    found = audit_queues(empty)
    assert found.is_sound, found.rows()
    assert found.messages == 4


def test_messages_that_hold_batches_and_topics_without_a_name(empty: Config) -> None:
    write(empty, [0, 0x80, 0x80 | 8, 0], {3: 1})
    with CommitLogWriter(store_of(empty) / "commitlog", SEGMENT_SIZE, start_offset=SEGMENT_SIZE) as writer:
        writer.append(spec(T0, topic="a/b"))
    build_queues(empty)
    found = audit_queues(empty)
    assert found.is_sound, found.rows()
    assert (found.messages, found.skipped_messages) == (2, 3)
    assert "not compared: 3 messages of BatchConsumeQueues, LMQs and topics without a folder" in found.lines()[-1]


def test_lmqs_and_what_is_no_queue_are_left_alone(config: Config) -> None:
    queues = store_of(config) / "consumequeue"
    (queues / "%LMQ%x" / "0").mkdir(parents=True)
    (queues / "%LMQ%x" / "0" / f"{0:020d}").write_bytes(b"\x01" * QUEUE_FILE_SIZE)
    (queues / "OrderPaid" / "notes").mkdir()
    (queues / "OrderPaid" / "1" / "notes").write_bytes(b"x")
    (queues / "Idle" / "0").mkdir(parents=True)
    (queues / "Idle" / "0" / f"{0:020d}").write_bytes(bytes(QUEUE_FILE_SIZE))
    found = audit_queues(config)
    assert found.is_sound, found.rows()
    assert found.skipped_queues == 1
    assert found.lines()[-1] == "  not compared: 1 LMQs"


def test_queues_in_rocksdb_are_not_compared(config: Config) -> None:
    shutil.rmtree(store_of(config) / "consumequeue")
    (store_of(config) / "consumequeue").mkdir()
    (store_of(config) / "consumequeue" / "CURRENT").write_bytes(b"MANIFEST-000001\n")
    found = audit_queues(config)
    assert found.is_sound
    assert found.lines() == ["ConsumeQueues: not compared: the broker keeps them in RocksDB (storeType=defaultRocksDB)"]
    assert [(row["kind"], row["compared"]) for row in found.rows()] == [("queues", False)]


def test_the_command(config: Config) -> None:
    words = ["audit", "--store", store_of(config), "--queues", "--samples", "0", *SIZES[:2], *SIZES[6:]]
    words += ["--hash-slot-num", config.index.hash_slot_num, "--index-num", config.index.index_num]
    done = indexd_here(*words)
    assert (done.returncode, "ConsumeQueues: each of " in done.stdout) == (0, True), done.stderr
    Queue(config).change(5, size=1)
    done = indexd_here(*words, "--json")
    queue = next(row for row in map(json.loads, done.stdout.splitlines()) if row["kind"] == "queue")
    wanted = (1, "OrderPaid", 1, {"unit-size": 1})
    assert (done.returncode, queue["topic"], queue["queueId"], queue["counts"]) == wanted
