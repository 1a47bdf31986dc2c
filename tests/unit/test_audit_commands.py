"""``indexd audit`` as it is typed, and stores that are odd: words, JSON lines, exit codes; nothing is touched."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
from collections.abc import Iterator
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
from support.auditing import audit, config_of_golden, index_log, restart_of_killed_broker, words_of
from support.auditing_queues import audit_queues, make_store, store_of
from support.daemon import compile_kernels, indexd_here
from support.data_directory import SEGMENT
from support.goldens import Golden, unpack
from support.indexing_broker import LAYOUT, Broker
from support.small_log import QUEUE_FILE_SIZE


@pytest.fixture
def golden(tmp_path: Path) -> Golden:
    compile_kernels()
    return unpack("rocketmq-5.4-killed-open-index", tmp_path)


def words(golden: Golden, *more: object) -> tuple[object, ...]:
    return (
        *("audit", "--store", golden.root, "--segment-size", golden.segment_size),
        *("--hash-slot-num", golden.hash_slot_num, "--index-num", golden.index_num, *more),
    )


def stamps(root: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(root.rglob("*"))}


def rows(golden: Golden, *more: object) -> list[dict[str, Any]]:
    done = indexd_here(*words(golden, "--json", *more))
    assert done.stderr == ""
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_sound_store(golden: Golden) -> None:
    before = stamps(golden.root)
    done = indexd_here(*words(golden))
    assert (done.returncode, done.stderr) == (0, "")
    first, *more = done.stdout.splitlines()
    assert first == "all 18,402 keys findable; nothing wrong in the index files"
    assert [line.split(":")[0] for line in more if ": " in line][-4:] == ["crash", "broker", "flavour", "covered"]
    assert more[-2] == "flavour: 5.4 (by its entries)"
    assert more[-1].startswith(
        f"covered: {golden.root}, log bytes 0 to 2740160 (2.61 MiB, 4,000 messages), 1 index file"
    )
    found = rows(golden)
    assert [row["kind"] for row in found] == ["file", *["answers"] * 3, "samples", "crash", "summary"]
    assert (found[-1]["keys"], found[-1]["findableKeys"], found[-1]["store"]) == (18402, 18402, str(golden.root))
    assert found[-1]["sound"]
    assert stamps(golden.root) == before


def test_a_store_that_lost_keys(golden: Golden) -> None:
    restart_of_killed_broker(golden.root)
    index_log(config_of_golden(golden), begin=6 * golden.segment_size)
    done = indexd_here(*words(golden))
    assert done.returncode == 1
    verdict, hole, cause, *more = done.stdout.splitlines()
    assert verdict.startswith("40.9 % of 18,402 keys findable; one hole, 2026-11-21 ")
    assert ", 1.5 MiB, unclean stop; indexd repair mends it" in verdict
    assert hole.startswith("hole: stored 20")
    assert hole.endswith(", log bytes 0 to 1572716 (1.5 MiB): 10,858 keys of 2,226 messages not findable")
    assert cause == "  likely cause: unclean stop"
    assert more[0] == "  - it begins with the log, and no index file stands before it"
    assert more[1].startswith("  - it ends where the segment at 1572864 begins: after an unclean stop RocketMQ throws ")
    found = rows(golden, "--samples", 0)
    assert [row["kind"] for row in found] == ["file", "hole", "crash", "summary"]
    assert (found[1]["cause"], found[1]["tail"], len(found[1]["evidence"])) == ("unclean-stop", False, 2)


def test_what_cannot_be_audited(golden: Golden, tmp_path: Path) -> None:
    done = indexd_here("audit", "--data", tmp_path / "d")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "no store is given" in done.stderr
    done = indexd_here("audit", "--store", tmp_path / "none")
    assert done.returncode == 3
    assert "there is no commitlog" in done.stderr
    done = indexd_here("audit", "--store", golden.root, "--segment-size", golden.segment_size)
    assert done.returncode == 3
    assert "no index file in" in done.stderr
    assert "give --hash-slot-num and --index-num" in done.stderr


def test_options_that_are_wrong(golden: Golden, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    inside = golden.root / "page.html"
    link = tmp_path / "link"
    link.symlink_to(golden.root)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.symlink_to(tmp_path / "new")
    for options, text in (
        (("--samples", "-1"), "'-1' is not from 0 to 100000"),
        (("--samples", "many"), "'many' is not a whole number"),
        (("--samples", "1e9"), "is not a whole number"),
        (("--queues=yes",), "ignored explicit argument"),
        (("--report", ""), "is not a path"),
        (("--report", inside), "lies inside the store"),
        (("--resume", link / "index" / "kept"), "lies inside the store"),
        (("--report", tmp_path / "folder"), "is no plain file"),
        (("--report", elsewhere), "elsewhere is no plain file"),
        (("--resume", elsewhere), "elsewhere is no plain file"),
        (("--report", tmp_path / "none" / "page.html"), "there is no directory"),
        (("--report", tmp_path / "one", "--resume", tmp_path / "one"), "are the same file"),
    ):
        done = indexd_here(*words(golden, *options))
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
        assert text in done.stderr
    assert not inside.exists()
    assert not (tmp_path / "new").exists()


def test_the_page_is_written_beside_and_renamed(golden: Golden, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("what was there before", "utf-8")
    done = indexd_here(*words(golden, "--samples", 0, "--report", page))
    assert (done.returncode, done.stderr) == (0, "")
    assert page.read_text("utf-8").startswith("<!DOCTYPE html>")
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["page.html"]


def test_a_page_that_cannot_be_written(golden: Golden, tmp_path: Path) -> None:
    # What was found is said all the same.
    page = tmp_path / ("x" * 254)
    done = indexd_here(*words(golden, "--samples", 0, "--report", page))
    assert (done.returncode, done.stderr.count("\n")) == (70, 1)
    assert "cannot create" in done.stderr
    assert done.stdout.startswith("all 18,402 keys findable")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    compile_kernels()
    broker = Broker(tmp_path)
    broker.dispatch(broker.messages)
    broker.stopped()
    return broker.store.root


def command_of(store: Path, *more: object) -> tuple[object, ...]:
    sizes = ("--hash-slot-num", LAYOUT.hash_slot_num, "--index-num", LAYOUT.index_num)
    return ("audit", "--store", store, "--segment-size", SEGMENT, *sizes, "--samples", 0, *more)


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[Path]:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        yield tmp_path / "socket"


@pytest.mark.parametrize("option", ["--report", "--resume"])
def test_what_is_no_plain_file_is_left_as_it_is(store: Path, tmp_path: Path, listening: Path, option: str) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    null = Path("/dev/null")
    for path in (pipe, link, listening, null):
        before = os.lstat(path)
        done = indexd_here(*command_of(store, option, path))
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
        assert f"{option} {path} is no plain file" in done.stderr
        after = os.lstat(path)
        assert (after.st_ino, stat.S_IFMT(after.st_mode)) == (before.st_ino, stat.S_IFMT(before.st_mode))


@pytest.fixture
def sound(tmp_path: Path) -> Broker:
    made = Broker(tmp_path)
    made.dispatch(made.messages)
    made.stopped()
    return made


@pytest.fixture
def queues(tmp_path: Path) -> Config:
    return make_store(tmp_path)


def test_a_file_in_place_of_the_index_folder(sound: Broker) -> None:
    folder = sound.store.root / "index"
    shutil.rmtree(folder)
    folder.write_bytes(b"")
    with pytest.raises(UnsafeStoreError, match="index is a file, and a broker has a folder there"):
        audit(sound.config)
    folder.unlink()
    assert audit(sound.config).missing_keys == 180


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


def report_of(sound: Broker, samples: int = 5) -> AuditReport:
    return audit_here(sound.config, Disk(), AuditOptions(samples=samples), lambda *_: None)


def segments(sound: Broker) -> list[Path]:
    return sorted((sound.store.root / "commitlog").iterdir())


def wipe(sound: Broker, begin: int, size: int) -> None:
    """Zeros into the log, all in one segment."""
    path = segments(sound)[begin // SEGMENT]
    data = bytearray(path.read_bytes())
    at = begin % SEGMENT
    data[at : at + size] = bytes(size)
    path.write_bytes(data)


def rows_of_kind(report: AuditReport, kind: str) -> list[dict[str, Any]]:
    return [row for row in report.rows() if row["kind"] == kind]


def test_a_segment_that_is_missing_is_the_first_thing_said(sound: Broker) -> None:
    path = segments(sound)[1]
    gone = [m for m in sound.messages if SEGMENT <= m.phy_offset < 2 * SEGMENT]
    path.unlink()
    report = report_of(sound)
    keys, entries = 2 * (len(sound.messages) - len(gone)), 2 * len(gone)
    assert verdict_line(report) == (
        f"all {keys} keys that could be read are findable; 4 KiB missing from the middle of the log, and {entries} "
        "entries name messages there"
    )
    assert not report.is_sound
    assert verdict_state(report) == "warn"
    (finding,) = rows_of_kind(report, "finding")
    assert (finding["what"], finding["file"], finding["position"]) == ("log-missing", "commitlog", SEGMENT)
    (summary,) = rows_of_kind(report, "summary")
    assert (summary["sound"], summary["findings"], summary["counts"]) == (False, 1, {"log-missing": 1})
    (left_out,) = summary["leftOut"]
    assert (left_out["beginOffset"], left_out["endOffset"], left_out["entries"]) == (SEGMENT, 2 * SEGMENT, entries)
    assert left_out["missing"]
    assert any(line.startswith("log-missing, 1 finding: ") for line in words_of(report))
    # The index holds: what is wrong is the log.
    assert report.audit.is_sound


def test_bytes_that_cannot_be_read_are_no_clean_bill(sound: Broker) -> None:
    message = sound.messages[30]
    wipe(sound, message.phy_offset, 20)
    report = report_of(sound)
    line = verdict_line(report)
    assert line.startswith("all 178 keys that could be read are findable; ")
    assert "of the log not readable, and 2 entries name messages there" in line
    assert "nothing wrong" not in line
    assert (report.is_sound, report.audit.counts) == (False, {"log-unreadable": 1})


def test_a_message_whose_end_the_damage_hit_is_the_logs_fault(sound: Broker) -> None:
    # The last bytes of one message among the zeros: its last key is another one now, the entry is right.
    message, following = sound.messages[30], sound.messages[31]
    end = following.phy_offset
    assert end // SEGMENT == message.phy_offset // SEGMENT
    wipe(sound, end - 3, 30)
    report = report_of(sound)
    (cause,), (hole,) = report.causes, report.audit.holes
    assert (hole.begin, hole.end, hole.messages) == (message.phy_offset, end, 1)
    assert (cause.what, cause.words) == ("log-damaged", "log damaged")
    assert cause.evidence[0].startswith(f"it ends where the log cannot be read, at {end} (")
    line = verdict_line(report)
    assert "log damaged" in line
    assert "repair" not in line


def expiring(sound: Broker, after: int, count: int) -> AuditReport:
    """The broker deletes the first ``count`` segments once ``after`` tasks have ended."""
    oldest = segments(sound)[:count]

    def run(tasks: Any, ended: Any) -> list[Part]:
        parts = []
        task: AuditTask
        for number, task in enumerate(tasks):
            if number == after:
                for path in oldest:
                    path.unlink()
            parts.append(audit_task(task, Disk(), sound.config))
            ended(task, parts[-1])
        return parts

    options = AuditOptions(samples=0)
    return run_audit(sound.config, Disk(), options, lambda: plan_audit(Disk(), sound.config), run)


def covered(report: AuditReport) -> list[str]:
    words = words_of(report)
    at = next(number for number, line in enumerate(words) if line.startswith("covered: "))
    return words[at:]


def test_a_log_that_expires_behind_the_reader_was_read_all_the_same(sound: Broker) -> None:
    tasks = len(plan_audit(Disk(), sound.config).tasks)
    report = expiring(sound, tasks - 1, 2)
    audited = report.audit
    assert (audited.messages, audited.log_begin, audited.log_begin_now) == (90, 0, 2 * SEGMENT)
    (line,) = covered(report)
    assert f"log bytes 0 to {audited.log_end} (" in line
    assert "90 messages), " in line
    assert f"; its beginning has expired meanwhile: the log begins at {2 * SEGMENT} now" in line
    (summary,) = rows_of_kind(report, "summary")
    assert (summary["beginOffset"], summary["logBegin"], summary["expired"]) == (0, 2 * SEGMENT, [])
    assert report.is_sound


def test_what_expired_before_it_was_read_is_not_covered(sound: Broker) -> None:
    first = expiring(sound, 0, 1)
    assert (first.audit.log_begin, first.audit.log_begin_now, first.audit.expired) == (SEGMENT, SEGMENT, ())
    (line,) = covered(first)
    assert f"log bytes {SEGMENT} to " in line
    assert "expired meanwhile" not in line
    # In the middle: the first stretch was read, and then more of the log went than that.
    report = expiring(sound, 2, 2)
    (gap,) = report.audit.expired
    assert (report.audit.log_begin, gap.end) == (SEGMENT, 3 * SEGMENT)
    line, left = covered(report)
    assert f"log bytes {SEGMENT} to " in line
    assert left == f"not covered: log bytes {gap.begin} to {gap.end}: they expired before they could be read"
    assert report.audit.log_size == report.audit.log_end - SEGMENT - (gap.end - gap.begin)
    assert report.is_sound
