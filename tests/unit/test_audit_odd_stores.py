"""Stores that are odd: files in place of folders, names that are no text, other sizes; a log with parts missing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from indexd.audit import AuditOptions, AuditReport, Part, audit_here, audit_task, plan_audit
from indexd.audit.page import verdict_line, verdict_state
from indexd.audit.plan import AuditTask
from indexd.audit.report import run_audit
from indexd.config import Config
from indexd.errors import UnsafeStoreError
from indexd.storage.disk import Disk
from support.auditing import audit, words_of
from support.auditing_queues import audit_queues, make_store, store_of
from support.data_directory import SEGMENT
from support.indexing_broker import Broker, one, says
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


def report_of(broker: Broker, samples: int = 5) -> AuditReport:
    return audit_here(broker.config, Disk(), AuditOptions(samples=samples), lambda *_: None)


def segments(broker: Broker) -> list[Path]:
    return sorted((broker.store.root / "commitlog").iterdir())


def wipe(broker: Broker, begin: int, size: int) -> None:
    """Zeros into the log, all in one segment."""
    path = segments(broker)[begin // SEGMENT]
    data = bytearray(path.read_bytes())
    at = begin % SEGMENT
    data[at : at + size] = bytes(size)
    path.write_bytes(data)


def rows(report: AuditReport, kind: str) -> list[dict[str, Any]]:
    return [row for row in report.rows() if row["kind"] == kind]


def test_a_segment_that_is_missing_is_the_first_thing_said(broker: Broker) -> None:
    path = segments(broker)[1]
    gone = [m for m in broker.messages if SEGMENT <= m.phy_offset < 2 * SEGMENT]
    path.unlink()
    report = report_of(broker)
    keys, entries = 2 * (len(broker.messages) - len(gone)), 2 * len(gone)
    assert verdict_line(report) == (
        f"all {keys} keys that could be read are findable; 4 KiB missing from the middle of the log, and {entries} "
        "entries name messages there"
    )
    assert not report.is_sound
    assert verdict_state(report) == "warn"
    (finding,) = rows(report, "finding")
    assert (finding["what"], finding["file"], finding["position"]) == ("log-missing", "commitlog", SEGMENT)
    (summary,) = rows(report, "summary")
    assert (summary["sound"], summary["findings"], summary["counts"]) == (False, 1, {"log-missing": 1})
    (left_out,) = summary["leftOut"]
    assert (left_out["beginOffset"], left_out["endOffset"], left_out["entries"]) == (SEGMENT, 2 * SEGMENT, entries)
    assert left_out["missing"]
    assert any(line.startswith("log-missing, 1 finding: ") for line in words_of(report))
    # The index holds: what is wrong is the log.
    assert report.audit.is_sound


def test_bytes_that_cannot_be_read_are_no_clean_bill(broker: Broker) -> None:
    message = broker.messages[30]
    wipe(broker, message.phy_offset, 20)
    report = report_of(broker)
    line = verdict_line(report)
    assert line.startswith("all 178 keys that could be read are findable; ")
    assert "of the log not readable, and 2 entries name messages there" in line
    assert "nothing wrong" not in line
    assert (report.is_sound, report.audit.counts) == (False, {"log-unreadable": 1})


def test_a_message_whose_end_the_damage_hit_is_the_logs_fault(broker: Broker) -> None:
    # The last bytes of one message among the zeros: its last key is another one now, the entry is right.
    message, following = broker.messages[30], broker.messages[31]
    end = following.phy_offset
    assert end // SEGMENT == message.phy_offset // SEGMENT
    wipe(broker, end - 3, 30)
    report = report_of(broker)
    (cause,), (hole,) = report.causes, report.audit.holes
    assert (hole.begin, hole.end, hole.messages) == (message.phy_offset, end, 1)
    assert (cause.what, cause.words) == ("log-damaged", "log damaged")
    assert cause.evidence[0].startswith(f"it ends where the log cannot be read, at {end} (")
    line = verdict_line(report)
    assert "log damaged" in line
    assert "repair" not in line


def expiring(broker: Broker, after: int, count: int) -> AuditReport:
    """The broker deletes the first ``count`` segments once ``after`` tasks have ended."""
    oldest = segments(broker)[:count]

    def run(tasks: Any, ended: Any) -> list[Part]:
        parts = []
        task: AuditTask
        for number, task in enumerate(tasks):
            if number == after:
                for path in oldest:
                    path.unlink()
            parts.append(audit_task(task, Disk(), broker.config))
            ended(task, parts[-1])
        return parts

    options = AuditOptions(samples=0)
    return run_audit(broker.config, Disk(), options, lambda: plan_audit(Disk(), broker.config), run)


def covered(report: AuditReport) -> list[str]:
    words = words_of(report)
    at = next(number for number, line in enumerate(words) if line.startswith("covered: "))
    return words[at:]


def test_a_log_that_expires_behind_the_reader_was_read_all_the_same(broker: Broker) -> None:
    tasks = len(plan_audit(Disk(), broker.config).tasks)
    report = expiring(broker, tasks - 1, 2)
    audited = report.audit
    assert (audited.messages, audited.log_begin, audited.log_begin_now) == (90, 0, 2 * SEGMENT)
    (line,) = covered(report)
    assert f"log bytes 0 to {audited.log_end} (" in line
    assert "90 messages), " in line
    assert f"; its beginning has expired meanwhile: the log begins at {2 * SEGMENT} now" in line
    (summary,) = rows(report, "summary")
    assert (summary["beginOffset"], summary["logBegin"], summary["expired"]) == (0, 2 * SEGMENT, [])
    assert report.is_sound


def test_what_expired_before_it_was_read_is_not_covered(broker: Broker) -> None:
    first = expiring(broker, 0, 1)
    assert (first.audit.log_begin, first.audit.log_begin_now, first.audit.expired) == (SEGMENT, SEGMENT, ())
    (line,) = covered(first)
    assert f"log bytes {SEGMENT} to " in line
    assert "expired meanwhile" not in line
    # In the middle: the first stretch was read, and then more of the log went than that.
    report = expiring(broker, 2, 2)
    (gap,) = report.audit.expired
    assert (report.audit.log_begin, gap.end) == (SEGMENT, 3 * SEGMENT)
    line, left = covered(report)
    assert f"log bytes {SEGMENT} to " in line
    assert left == f"not covered: log bytes {gap.begin} to {gap.end}: they expired before they could be read"
    assert report.audit.log_size == report.audit.log_end - SEGMENT - (gap.end - gap.begin)
    assert report.is_sound
