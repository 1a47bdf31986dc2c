"""The audit of a broker's ConsumeQueues: sound ones, one fault of every kind, and the same answer however it is cut."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from indexd.audit.queues.seen import KEPT_MAX, QUEUES_MAX, Difference, QueuesSeen
from indexd.config import Config
from indexd.consumequeue.format import BLANK_UNIT, UNIT, UNIT_SIZE
from support.auditing import config_of_golden
from support.auditing_queues import COUNT, Queue, audit_queues, copy_of, entering, make_store, messages_of, store_of
from support.goldens import GOLDENS, unpack
from support.small_log import QUEUE_FILE_SIZE


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return make_store(tmp_path_factory.mktemp("made"))


@pytest.fixture
def config(made: Config, tmp_path: Path) -> Config:
    return copy_of(made, tmp_path)


@pytest.mark.parametrize("name", GOLDENS)
def test_the_queues_that_rocketmq_wrote_are_sound(name: str, tmp_path: Path) -> None:
    golden = unpack(name, tmp_path)
    config = config_of_golden(golden, consume_queue_file_size=golden.queue_file_size)
    found = audit_queues(config)
    assert found.is_sound, found.rows()
    assert found.seen.messages == found.seen.units == len(entering(config)) > 100
    assert found.queues == len(list((golden.root / "consumequeue").glob("*/*")))
    assert found.lines() == [
        f"ConsumeQueues: each of {found.seen.messages:,} messages is in its queue, and nothing else is; "
        f"{found.queues} queues"
    ]


def test_a_sound_store(config: Config) -> None:
    found = audit_queues(config)
    assert found.is_sound, found.rows()
    assert found.seen.messages == found.seen.units == len(entering(config)) > COUNT / 2
    (row,) = found.rows()
    assert (row["kind"], row["sound"], row["compared"]) == ("queues", True, True)


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
        {"unit-missing": 1, "unit-without-message": 1},
        "at 100: unit 5: missing; it is due for",
    ),
    "another's message": (
        lambda q: q.change(5, phy_offset=0),
        {"unit-missing": 1, "unit-of-another-queue": 1, "unit-order": 1},
        "at 100: unit 5: missing",
    ),
    "a message twice": (
        lambda q: q.put(5, UNIT.pack(*q.get(6))),
        {"unit-missing": 1, "unit-twice": 1},
        "at 100: unit 5: missing",
    ),
    "negative": (
        lambda q: q.change(5, phy_offset=-7),
        {"unit-missing": 1, "unit-phy-offset": 1},
        "at 100: unit 5: missing",
    ),
    "zeros": (lambda q: q.put(5, bytes(UNIT_SIZE)), {"unit-missing": 1}, "at 100: unit 5: missing"),
    "blank": (lambda q: q.put(5, BLANK_UNIT), {"unit-missing": 1}, "at 100: unit 5: missing"),
    "far behind the log": (
        lambda q: q.change(5, phy_offset=1 << 50),
        {"unit-missing": 1, "unit-behind-log": 1, "unit-order": 1},
        "at 100: unit 5: missing",
    ),
    "changed places": (lambda q: q.swap(5, 6), {"unit-place": 2, "unit-order": 1}, "at 100: unit 5: stands for"),
    "short file": (
        lambda q: q.path(0).write_bytes(q.path(0).read_bytes()[:-40]),
        {"queue-file-size": 1, "unit-missing": 2},
        "at 0: 1160 bytes, not 1200",
    ),
    "long file": (
        lambda q: q.path(0).write_bytes(q.path(0).read_bytes() + bytes(40)),
        {"queue-file-size": 1},
        "at 0: 1240 bytes, not 1200",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault(config: Config, fault: str) -> None:
    damage, counts, text = FAULTS[fault]
    queue = Queue(config)
    damage(queue)
    found = audit_queues(config)
    assert found.counts == counts, found.rows()
    assert not found.is_sound
    (wrong,) = found.found
    assert wrong.path == queue.name
    assert any(text in f"at {one.position}: {one.text}" for one in wrong.findings), wrong.findings
    assert all((store_of(config) / queue.name).is_dir() and one.file.startswith(queue.name) for one in wrong.findings)
    assert json.loads(json.dumps(found.rows()))[0]["queueId"] == 1
    assert f"  {queue.name}: " in found.lines()[1]


def test_a_file_that_is_gone(config: Config) -> None:
    queue = Queue(config)
    queue.path(0).unlink()
    found = audit_queues(config)
    assert found.counts == {"unit-missing": 60}
    assert found.seen.kept[("OrderPaid", 1)]["unit-missing"][0].phy_offset == queue.messages[0].phy_offset
    assert len(found.found[0].findings) == KEPT_MAX


def test_files_that_do_not_follow_one_another(config: Config) -> None:
    queue = Queue(config)
    queue.path(60).rename(queue.path(180))
    found = audit_queues(config)
    assert found.counts == {"queue-file-gap": 1, "unit-place": len(queue.messages) - 60}
    assert "the file before it ends at byte 1200" in found.findings[0].text
    queue.path(180).rename(queue.folder / f"{1300:020d}")
    assert set(audit_queues(config).counts) == {"queue-file-name", "unit-place"}


def test_a_file_that_the_broker_had_no_time_to_fill(config: Config) -> None:
    queue = Queue(config)
    queue.path(240).write_bytes(b"")
    assert audit_queues(config).is_sound


def test_units_behind_a_hole_of_zeros_still_stand_for_their_messages(config: Config) -> None:
    queue = Queue(config)
    for offset in range(3, 9):
        queue.put(offset, bytes(UNIT_SIZE))
    queue.put(20, BLANK_UNIT)
    found = audit_queues(config)
    assert found.counts == {"unit-missing": 7}


def test_a_queue_that_is_gone(config: Config) -> None:
    queue = Queue(config)
    shutil.rmtree(queue.folder)
    found = audit_queues(config)
    assert found.counts == {"queue-missing": len(queue.messages)}
    assert found.findings[0].file == queue.name
    topics = store_of(config) / "config" / "topics.json"
    topics.parent.mkdir()
    topics.write_text(json.dumps({"topicConfigTable": {"OrderPaid": {}}}))
    assert audit_queues(config).counts == found.counts
    # A topic that was deleted takes its queues with it, and its messages stay.
    topics.write_text(json.dumps({"topicConfigTable": {"TopicTest": {}}}))
    deleted = audit_queues(config)
    assert deleted.is_sound
    assert deleted.deleted == {"OrderPaid": len(queue.messages)}
    assert "messages of 1 topics that have been deleted" in deleted.lines()[-1]


def test_many_differences_are_counted_and_few_are_kept(config: Config) -> None:
    for queue_id in range(4):
        for path in (store_of(config) / "consumequeue" / "TopicTest" / str(queue_id)).iterdir():
            path.write_bytes(bytes(QUEUE_FILE_SIZE))
    found = audit_queues(config)
    lost = [message for message in entering(config) if message.topic == "TopicTest"]
    assert found.counts == {"unit-missing": len(lost)}
    assert [len(queue.findings) for queue in found.found] == [KEPT_MAX] * 4
    assert found.found[0].total == max(queue.total for queue in found.found)
    assert "and 1 queues more" in found.lines()[-1]


def test_of_many_queues_the_first_by_name_keep_theirs_however_they_are_merged() -> None:
    rand = random.Random(3)
    names = [("T", number) for number in range(2 * QUEUES_MAX + 50)]
    rows = [(rand.choice(names), phy_offset) for phy_offset in range(8_000)]

    def seen(rows: list[tuple[tuple[str, int], int]]) -> QueuesSeen:
        found = QueuesSeen()
        for name, phy_offset in rows:
            found.add(name, "unit-missing", 1, [Difference(phy_offset, 0)])
        return found

    whole = QueuesSeen()
    whole.merge(seen(rows))
    for cuts in ([1], [4000], [100, 5000, 5001], list(range(500, 8_000, 500))):
        parts = QueuesSeen()
        for first, last in pairwise([0, *cuts, len(rows)]):
            parts.merge(seen(rows[first:last]))
        assert parts == whole
    assert len(whole.kept) == QUEUES_MAX
    assert whole.counts.total() == len(rows)
    kept = TypeAdapter(QueuesSeen)
    assert kept.validate_python(json.loads(json.dumps(kept.dump_python(whole, mode="json")))) == whole


_DAMAGE = st.sampled_from([*FAULTS, "gone"])


@settings(max_examples=12)
@given(data=st.data())
def test_what_is_found_does_not_depend_on_how_the_log_was_cut(made: Config, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as root:
        config = copy_of(made, Path(root))
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
