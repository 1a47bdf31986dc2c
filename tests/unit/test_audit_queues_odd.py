"""The audit of ConsumeQueues where log and queues are not all there, and what of them it does not compare."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from indexd.cli.main import main
from indexd.commitlog.writer import CommitLogWriter
from indexd.config import Config
from indexd.consumequeue.format import EXT_ADDRESS_MAX, UNIT
from support.auditing_queues import (
    Queue,
    audit_queues,
    build_queues,
    config_of,
    copy_of,
    entering,
    make_store,
    messages_of,
    store_of,
)
from support.data_directory import T0, spec
from support.small_log import QUEUE_FILE_SIZE, SEGMENT_SIZE, SIZES


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return make_store(tmp_path_factory.mktemp("made"))


@pytest.fixture
def config(made: Config, tmp_path: Path) -> Config:
    return copy_of(made, tmp_path)


def segments(config: Config) -> list[Path]:
    return sorted((store_of(config) / "commitlog").iterdir())


def test_what_only_points_before_the_log_has_expired(config: Config) -> None:
    every = len(entering(config))
    segments(config)[0].unlink()
    found = audit_queues(config)
    assert found.is_sound, found.rows()
    assert found.seen.messages == len(entering(config)) < every
    assert found.seen.expired_units == every - found.seen.messages
    # What does not lie before them is no leftover.
    queue = Queue(config)
    queue.change(max(offset for offset in range(60, 120) if queue.get(offset).is_valid), phy_offset=0)
    assert audit_queues(config).counts == {"unit-missing": 1, "unit-order": 1}


def test_units_for_a_log_that_was_cut(config: Config) -> None:
    every = len(entering(config))
    segments(config)[-1].unlink()
    found = audit_queues(config)
    left = len(entering(config))
    assert found.counts == {"unit-behind-log": every - left}
    assert found.seen.messages == left
    begins = [message.phy_offset for message in messages_of(config)]
    assert audit_queues(config, begins[::100], backwards=True).rows() == found.rows()


def test_units_for_what_cannot_be_read_stand_for_themselves(config: Config) -> None:
    messages = messages_of(config)
    lost = [message for message in messages if 5000 < message.phy_offset < 9000]
    with segments(config)[0].open("r+b") as file:
        file.seek(lost[0].phy_offset)
        file.write(b"\xff" * (lost[-1].phy_offset + lost[-1].size - lost[0].phy_offset))
    found = audit_queues(config)
    assert found.is_sound, found.rows()
    assert found.seen.left_out_units == sum(message.sys_flag & 0xC in (0, 8) for message in lost) > 0
    assert f"{found.seen.left_out_units} units that point to where the log could not be read" in found.lines()[-1]


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
    return config_of(tmp_path / "store")


def test_transactions_and_a_queue_that_begins_late(empty: Config) -> None:
    write(empty, [0, 4, 8, 12, 0, 4, 0], {0: 75})
    build_queues(empty)
    found = audit_queues(empty)
    assert found.is_sound, found.rows()
    assert found.seen.messages == found.seen.units == 4


def test_units_behind_a_gap_of_queue_offsets_are_not_where_consumers_look(empty: Config) -> None:
    write(empty, [0] * 70, {20: 25})
    build_queues(empty)
    found = audit_queues(empty)
    assert found.counts == {"unit-place": 50}
    assert "unit 20: stands for the message at " in found.findings[0].text
    assert "which has queue offset 25" in found.findings[0].text


def test_a_message_whose_queue_offset_was_given_twice_is_in_no_queue(empty: Config) -> None:
    write(empty, [0] * 30, {20: 18})
    build_queues(empty)
    assert audit_queues(empty).counts == {"unit-missing": 2}


def test_batches_are_not_compared(config: Config) -> None:
    root, every = store_of(config), entering(config)
    (root / "batchconsumequeue" / "OrderPaid" / "0").mkdir(parents=True)
    shutil.rmtree(root / "consumequeue" / "OrderPaid")
    found = audit_queues(config)
    assert found.is_sound, found.rows()
    batches = [message for message in every if message.topic == "OrderPaid"]
    assert found.seen.batch_messages == len(batches)
    assert found.seen.messages == len(every) - len(batches)
    assert f"{len(batches):,} messages of BatchConsumeQueues (1 topics)" in found.lines()[-1]


def test_messages_that_hold_batches_and_topics_without_a_name(empty: Config) -> None:
    write(empty, [0, 0x80, 0x80 | 8, 0], {3: 1})
    with CommitLogWriter(store_of(empty) / "commitlog", SEGMENT_SIZE, start_offset=SEGMENT_SIZE) as writer:
        writer.append(spec(T0, topic="a/b"))
    build_queues(empty)
    found = audit_queues(empty)
    assert found.is_sound, found.rows()
    assert (found.seen.messages, found.seen.batch_messages, found.seen.nameless_messages) == (2, 2, 1)
    assert "; 1 messages of topics that no folder can be named after" in found.lines()[-1]


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
    assert found.lmq_queues == 1
    assert found.lines()[-1] == "  not compared: 1 LMQs"


def test_a_queue_that_no_message_has(config: Config) -> None:
    folder = store_of(config) / "consumequeue" / "Ghost" / "0"
    folder.mkdir(parents=True)
    first, second = entering(config)[:2]
    units = UNIT.pack(first.phy_offset, first.size, 0) + UNIT.pack(second.phy_offset + 1, 5, 0)
    (folder / f"{0:020d}").write_bytes(units.ljust(QUEUE_FILE_SIZE, b"\0"))
    found = audit_queues(config)
    assert found.counts == {"unit-of-another-queue": 1, "unit-without-message": 1}
    assert [one.file for one in found.findings] == [f"consumequeue/Ghost/0/{0:020d}"] * 2


def test_an_address_of_an_extension_is_no_tags_code(config: Config) -> None:
    queue = Queue(config)
    queue.change(4, tags_code=EXT_ADDRESS_MAX)
    queue.change(7, tags_code=-(1 << 63))
    found = audit_queues(config)
    assert found.is_sound, found.rows()
    assert found.seen.ext_units == 2
    queue.change(4, tags_code=EXT_ADDRESS_MAX + 1)
    assert audit_queues(config).counts == {"unit-tags-code": 1}


def test_queues_in_rocksdb_are_not_compared(config: Config) -> None:
    shutil.rmtree(store_of(config) / "consumequeue")
    (store_of(config) / "consumequeue").mkdir()
    (store_of(config) / "consumequeue" / "CURRENT").write_bytes(b"MANIFEST-000001\n")
    found = audit_queues(config)
    assert found.is_sound
    assert found.lines() == ["ConsumeQueues: not compared: the broker keeps them in RocksDB (storeType=defaultRocksDB)"]
    assert [(row["kind"], row["compared"]) for row in found.rows()] == [("queues", False)]


def test_a_store_without_queues(config: Config) -> None:
    shutil.rmtree(store_of(config) / "consumequeue")
    found = audit_queues(config)
    assert found.counts == {"queue-missing": len(entering(config))}


def test_the_command(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["audit", "--store", str(store_of(config)), "--queues", "--samples", "0", *SIZES[:2], *SIZES[6:]]
    arguments += ["--hash-slot-num", str(config.index.hash_slot_num), "--index-num", str(config.index.index_num)]
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    assert "ConsumeQueues: each of " in capsys.readouterr().out
    Queue(config).change(5, size=1)
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--json"])
    assert ended.value.code == 1
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (queue,) = [row for row in rows if row["kind"] == "queue"]
    assert (queue["topic"], queue["queueId"], queue["counts"]) == ("OrderPaid", 1, {"unit-size": 1})
    assert rows[-1]["sound"] is False
