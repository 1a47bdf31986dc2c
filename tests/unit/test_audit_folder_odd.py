"""Store folders that are not what a broker makes: files in their place, links, names that are no text, other sizes."""

from __future__ import annotations

import json
import os
import shutil
import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest

from indexd.audit import AuditOptions, audit_here
from indexd.cli.output import print_json
from indexd.config import Config
from indexd.errors import UnsafeStoreError
from indexd.storage.disk import Disk
from support.auditing import audit, config_for, words_of
from support.auditing_queues import audit_queues, make_store, messages_of, store_of
from support.data_directory import SEGMENT, T0, spec
from support.indexing_broker import LAYOUT, Broker, one, says
from support.small_log import QUEUE_FILE_SIZE


@pytest.fixture
def broker(tmp_path: Path) -> Broker:
    made = Broker(tmp_path)
    made.dispatch(made.messages)
    made.stopped()
    return made


@pytest.fixture
def queues(tmp_path: Path) -> Config:
    return make_store(tmp_path)


def test_a_file_in_place_of_the_index_folder(broker: Broker) -> None:
    folder = broker.store.root / "index"
    shutil.rmtree(folder)
    folder.write_bytes(b"")
    with pytest.raises(UnsafeStoreError, match="index is a file, and a broker has a folder there"):
        audit(broker.config)
    folder.unlink()
    assert audit(broker.config).missing_keys == 180


def test_no_index_says_what_is_not_there_and_guesses_nothing(broker: Broker) -> None:
    folder = broker.store.root / "index"
    for path in broker.files:
        path.unlink()
    says(one(broker), "unknown", "stopped cleanly", "there is no index file")
    folder.rmdir()
    report = audit_here(broker.config, Disk(), AuditOptions(samples=0), lambda *_: None)
    (cause,) = report.causes
    says(cause, "unknown", "there is no index file")
    facts = broker.config.broker.model_copy(update={"index_file_write_enable": False})
    off = broker.config.model_copy(update={"broker": facts})
    (cause,) = audit_here(off, Disk(), AuditOptions(samples=0), lambda *_: None).causes
    says(cause, "index-off", "indexFileWriteEnable is false in broker.conf")


def test_a_name_that_is_no_text_is_shown_by_its_bytes(broker: Broker) -> None:
    folder = os.fsencode(broker.store.root / "index")
    with open(folder + b"/a\xff\xfe\x1b", "wb"):  # noqa: PTH123 - bytes
        pass
    report = audit_here(broker.config, Disk(), AuditOptions(samples=0), lambda *_: None)
    assert any(line.startswith("  index/a\\xff\\xfe\\x1b byte 0: no index file") for line in words_of(report))


def test_a_name_that_is_no_text_is_json_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    # As a terminal of UTF-8 has it, and as the one of the C locale, which would let the bytes through.
    for errors in ("strict", "surrogateescape"):
        raw = BytesIO()
        monkeypatch.setattr(sys, "stdout", TextIOWrapper(raw, encoding="utf-8", errors=errors))
        print_json({"file": "index/ü\udcff"})
        print_json({"file": "index/ü"})
        sys.stdout.flush()
        first, second = raw.getvalue().decode("utf-8").splitlines()
        assert os.fsencode(json.loads(first)["file"]) == "index/ü".encode() + b"\xff"
        assert second == '{"file":"index/ü"}'


def test_queue_files_that_all_have_another_size_end_it(queues: Config) -> None:
    wrong = queues.model_copy(update={"store": queues.store.model_copy(update={"consume_queue_file_size": 6_000_000})})
    with pytest.raises(
        UnsafeStoreError, match=f"every file of the ConsumeQueues has {QUEUE_FILE_SIZE} bytes"
    ) as caught:
        audit_queues(wrong)
    assert f"--consume-queue-file-size {QUEUE_FILE_SIZE}" in caught.value.hint
    # Where one fits, the others are findings.
    some = next((store_of(queues) / "consumequeue").rglob("0" * 20))
    with some.open("r+b") as file:
        file.truncate(QUEUE_FILE_SIZE - 20)
    assert audit_queues(queues).counts["queue-file-size"] == 1


def test_a_file_in_place_of_the_queues_folder(queues: Config) -> None:
    root = store_of(queues) / "consumequeue"
    shutil.rmtree(root)
    assert set(audit_queues(queues).counts) == {"queue-missing"}
    root.write_bytes(b"")
    with pytest.raises(UnsafeStoreError, match="consumequeue is a file"):
        audit_queues(queues)


def test_a_long_topic_is_shortened_in_the_lines(tmp_path: Path) -> None:
    topic = "t" * 127
    broker = Broker(tmp_path)
    broker.store.append(spec(T0, topic=topic, KEYS="k"))
    config = config_for(broker.store.root, LAYOUT, SEGMENT)
    assert messages_of(config)[-1].topic == topic
    found = audit_queues(config)
    assert {queue.topic for queue in found.found} >= {topic}
    line = next(line for line in found.lines() if "/ttt" in line)
    assert f"  consumequeue/{'t' * 59}…/0: 1, first the queue is not there" in line
    assert topic in {row.get("topic") for row in found.rows()}
