"""What an audit says, as lines, JSON and a page; odd stores, and options that are wrong; nothing is touched."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from indexd.audit import AuditOptions, AuditReport, TaskResult, audit_here, audit_task, plan_audit
from indexd.audit.causes import Cause, CrashCost, make_cause
from indexd.audit.page import MEANINGS, audit_page, verdict_line, verdict_state
from indexd.audit.plan import AuditTask
from indexd.audit.report import run_audit
from indexd.audit.result import Gap, Hole
from indexd.commitlog.reader import SEGMENTS_MISSING
from indexd.compare.index import KINDS
from indexd.config import Config
from indexd.errors import DiskError, UnsafeStoreError
from indexd.findings import Finding
from indexd.index.file import ENTRY_KINDS
from indexd.storage.disk import Disk
from indexd.storage.lock import BrokerLock
from support.audit_reports import GIB, made_report
from support.auditing import (
    audit,
    audit_queues,
    config_of_golden,
    index_log,
    restart_of_killed_broker,
    store_of,
    store_with_queues,
    words_of,
)
from support.daemon import compile_kernels, indexd_here
from support.data_directory import SEGMENT, T0
from support.goldens import Golden, unpack
from support.indexing_broker import Broker
from support.repairing import report_of, tree
from support.small_log import QUEUE_FILE_SIZE
from support.verifying import change

CRASH = Cause("unclean-stop", "unclean stop", ("the file before it is full",))
PENDING = Cause("not-dispatched-yet", "not dispatched yet")
PWN = "document.documentElement.dataset.pwned=1"
HOSTILE = [
    f"<script>{PWN}</script>",
    f'"><img/src=x/onerror={PWN}>',
    f"</title></style></text><svg/onload={PWN}>",
    "$verdict ${strip} &amp;<!--",
    "\u202egnp.exe",
    "a\nb\x1b[31m\udc80",
]
_VOID = {"meta", "br", "link", "input", "img"}


class Elements(HTMLParser):
    """Every element with its attributes, and the text that a person reads; that tags are balanced is asserted."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self._words: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        assert not self._open
        self.text = " ".join(" ".join(self._words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "title"} & set(self._open):
            self._words.append(data)

    def of(self, kind: str) -> list[dict[str, str | None]]:
        """Attributes of those of a class."""
        return [attributes for _, attributes in self.found if (attributes.get("class") or "") == kind]


def one_hole(cause: Cause = CRASH) -> AuditReport:
    return made_report(holes=[(16 * GIB, 8 * GIB, cause)])


def test_the_verdict_is_the_first_line() -> None:
    report = one_hole()
    words = verdict_line(report)
    assert words.startswith("87.5 % of 201,326,592 keys findable; one hole, ")
    assert words.endswith(", 8 GiB, unclean stop; indexd repair mends it")
    elements = Elements(audit_page(report))
    assert elements.text.startswith("87.5 %")
    assert verdict_state(report) == "bad"
    assert elements.found[[name for name, _ in elements.found].index("h1")][1]["class"] == "verdict bad"


@pytest.mark.parametrize(("missing", "words"), [(1, "99.9 %"), (25_165_823, "under 0.1 %"), (25_165_824, "0.0 %")])
def test_shares_are_never_rounded_up(missing: int, words: str) -> None:
    report = made_report(8, 3)
    report = replace(report, audit=replace(report.audit, missing_keys=missing))
    assert verdict_line(report).startswith(f"{words} of ")


@pytest.mark.parametrize(("cause", "colour", "other"), [(CRASH, "hole", "pending"), (PENDING, "pending", "hole")])
def test_a_hole_is_drawn_where_it_is(cause: Cause, colour: str, other: str) -> None:
    elements = Elements(audit_page(one_hole(cause)))
    assert [(found["x"], found["width"]) for found in elements.of(colour)] == [("25.00%", "12.50%")]
    assert not elements.of(other)
    assert f"likely cause: {cause.words}" in elements.text
    assert all(fact in elements.text for fact in cause.evidence)


def test_thousands_of_holes_stay_small_and_readable() -> None:
    causes = [Cause("unclean-stop", "unclean stop", ("a line of evidence " * 8,) * 4), PENDING]
    page = audit_page(
        made_report(
            4000,
            3000,
            [(4 * number * GIB, 50 << 20, causes[number % 2]) for number in range(1000)],
            [(f"index/{number}", "entry-twice", "x" * 5000, 1000) for number in range(3000)],
            [Gap(number * GIB, number * GIB + 4096, "y" * 500) for number in range(3000)],
            more_holes=54_321,
        )
    )
    assert len(page.encode()) < 1_000_000
    assert f"and {55_321 - 20:,} smaller holes" in Elements(page).text
    assert Elements(page).of("hole")[0]["width"] == "0.15%", "narrower than a line, and still seen"


def hostile() -> AuditReport:
    report = made_report(
        8,
        3,
        [(number * GIB, 1 << 20, Cause(text, text, (text,))) for number, text in enumerate(HOSTILE)],
        [(f"index/{text}", text, text, 1) for text in HOSTILE],
        [Gap(number * GIB + (1 << 29), (number + 1) * GIB, text) for number, text in enumerate(HOSTILE)],
    )
    files = tuple(replace(file, name=text) for file, text in zip(report.audit.files, HOSTILE, strict=False))
    return replace(
        report,
        store="/data/" + HOSTILE[0],
        audit=replace(report.audit, files=files, unreadable=HOSTILE[2]),
        crash=CrashCost(tuple(HOSTILE), 10, 5, 0),
        state=replace(report.state, lock=BrokerLock(None, 7, "unknown", HOSTILE[1])),
    )


def test_what_the_store_says_stays_text() -> None:
    page = audit_page(hostile())
    elements = Elements(page)
    names = {name for name, _ in elements.found}
    assert not names & {"script", "img", "iframe", "link", "object", "form", "input"}
    assert not [key for _, attributes in elements.found for key in attributes if key.startswith("on") or key == "src"]
    for text in HOSTILE[:4]:
        assert text in elements.text
    assert "\u202e" not in page
    assert "\x1b" not in page
    page.encode("utf-8")


def test_every_kind_of_finding_has_a_meaning() -> None:
    entries = {what for what, _, _ in (*ENTRY_KINDS, *KINDS[1:])} - {"entry-order"}
    assert entries <= MEANINGS.keys()


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> AuditReport:
    """Of a store without a fault; tests change what they need."""
    broker = Broker.sound(tmp_path_factory.mktemp("words"))
    return audit_here(broker.config, Disk(), AuditOptions(samples=5, queues=True), lambda *_: None)


def test_the_page_has_a_section_of_each_kind(sound: AuditReport) -> None:
    text = Elements(audit_page(replace(sound, crash=replace(sound.crash, thrown=("a",), lost_keys=7)))).text
    for title in ("What the broker answers today", "ConsumeQueues", "What a crash would cost", "How it was measured"):
        assert title in text
    assert "queue-missing" in text  # there are none


def lines(report: AuditReport, **changes: Any) -> list[str]:
    """The page of a report whose audit is changed."""
    return words_of(replace(report, audit=replace(report.audit, **changes)))


def holes(number: int) -> tuple[Hole, ...]:
    return tuple(Hole(100 * n, 100 * n + 50, T0 + n, T0 + n, 1, n % 7 + 1, 100 * n + 80) for n in range(number))


def test_the_largest_holes_in_the_order_of_the_log(sound: AuditReport) -> None:
    many = holes(50)
    report = replace(sound, causes=tuple(make_cause("unknown", f"fact {n}") for n in range(50)))
    words = lines(report, holes=many, hole_count=70, missing_keys=200, tail=many[-1])
    shown = [line for line in words if line.startswith("hole: ")]
    assert len(shown) == 20
    assert "and 50 smaller holes" in words
    begins = [int(line.split("log bytes ")[1].split()[0]) for line in shown]
    assert begins == sorted(begins)
    chosen = [many[begin // 100] for begin in begins]
    assert min(hole.keys for hole in chosen) >= max(hole.keys for hole in set(many) - set(chosen))
    # Each with its own cause.
    assert [line for line in words if line.startswith("  - fact")] == [f"  - fact {begin // 100}" for begin in begins]


def test_findings_are_bounded_by_kind_and_say_what_they_mean(sound: AuditReport) -> None:
    found = tuple(Finding(f"index/{n}", n, "chain-loop", f"text {n}") for n in range(100))
    found += (Finding("index/\x1b[31m", 0, "file-foreign", "no index\nfile"),)
    words = lines(sound, findings=found, counts={"chain-loop": 5000, "file-foreign": 1})
    at = words.index(next(line for line in words if line.startswith("chain-loop, 5,000 findings: ")))
    assert "older entries are not found" in words[at]
    assert words[at + 10] == "  index/9 byte 9: text 9"
    assert words[at + 11] == "  and 4,990 more; --json has the first 100 of each file"
    assert words[at + 12].startswith("file-foreign, 1 finding: ")
    assert words[at + 13] == "  index/\\x1b[31m byte 0: no index\\nfile"


RUNS = BrokerLock(True, 4711, "lock")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lock": RUNS}, "the broker (pid 4711) runs"),
        ({"lock": replace(RUNS, how="proc")}, "the broker (pid 4711) loads this store"),
        ({"lock": replace(RUNS, pid=None)}, "a broker runs"),
        ({"lock": BrokerLock(None, None, "unknown", "it is NFS")}, "not known whether one runs: it is NFS"),
        ({"has_abort": False}, "none runs; it was stopped cleanly"),
        ({"has_abort": True}, "none runs; it was not stopped cleanly"),
        (
            {"has_lock_file": False},
            "none runs; there is no lock file: a copy, or a store that no broker since 4.2 has opened",
        ),
    ],
)
def test_which_broker_it_is(sound: AuditReport, changes: dict[str, Any], words: str) -> None:
    report = replace(sound, state=replace(sound.state, **changes))
    assert [line for line in words_of(report) if line.startswith("broker: ")] == [f"broker: {words}"]


def test_what_was_not_covered(sound: AuditReport) -> None:
    gaps = tuple(Gap(1000 * n, 1000 * n + 24, "bytes that are no frame\x07") for n in range(9))
    words = lines(sound, gaps=gaps, unreadable="a frame that is cut", expired_entries=1234)
    assert "not covered: log bytes 0 to 24 (24 B): bytes that are no frame\\x07" in words
    assert words[-1] == "and 4 more ranges that could not be read"
    (covered,) = [line for line in words if line.startswith("covered: ")]
    assert "; 1,234 entries point before the log begins: their messages have expired" in covered
    assert covered.endswith("; behind its end stands a frame that is cut")


@pytest.fixture
def golden(tmp_path: Path) -> Golden:
    compile_kernels()
    return unpack("rocketmq-5.4-killed-open-index", tmp_path)


def words(golden: Golden, *more: object) -> tuple[object, ...]:
    return (
        *("audit", "--store", golden.root, "--segment-size", golden.segment_size),
        *("--hash-slot-num", golden.hash_slot_num, "--index-num", golden.index_num, *more),
    )


def rows(golden: Golden, *more: object) -> list[dict[str, Any]]:
    done = indexd_here(*words(golden, "--json", *more))
    assert done.stderr == ""
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_sound_store(golden: Golden) -> None:
    before = tree(golden.root)
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
    assert tree(golden.root) == before


def test_a_store_that_lost_keys(golden: Golden) -> None:
    restart_of_killed_broker(golden.root)
    index_log(config_of_golden(golden), begin=6 * golden.segment_size)
    done = indexd_here(*words(golden))
    assert done.returncode == 1
    verdict, hole, cause, *more = done.stdout.splitlines()
    assert verdict.startswith("40.9 % of 18,402 keys findable; one hole, 2026-11-21 ")
    assert verdict.endswith(", 1.5 MiB, unclean stop; indexd repair mends it")
    assert hole.endswith(", log bytes 0 to 1572716 (1.5 MiB): 10,858 keys of 2,226 messages not findable")
    assert [cause, more[0]] == [
        "  likely cause: unclean stop",
        "  - it begins with the log, and no index file stands before it",
    ]
    assert more[1].startswith("  - it ends where the segment at 1572864 begins: after an unclean stop RocketMQ throws ")
    found = rows(golden, "--samples", 0)
    assert [row["kind"] for row in found] == ["file", "hole", "crash", "summary"]
    assert (found[1]["cause"], found[1]["tail"], len(found[1]["evidence"])) == ("unclean-stop", False, 2)


def test_what_cannot_be_audited(golden: Golden, tmp_path: Path) -> None:
    for options, code, text in (
        (("--data", tmp_path / "d"), 2, "no store is given"),
        (("--store", tmp_path / "none"), 3, "there is no commitlog"),
        (("--store", golden.root, "--segment-size", golden.segment_size), 3, "give --hash-slot-num and --index-num"),
    ):
        done = indexd_here("audit", *options)
        assert (done.returncode, done.stderr.count("\n"), text in done.stderr) == (code, 1, True), done.stderr


def test_options_that_are_wrong(golden: Golden, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    inside = golden.root / "page.html"
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(golden.root)
    os.mkfifo(pipe)
    before = pipe.lstat(), link.lstat()
    for options, text in (
        (("--samples", "-1"), "'-1' is not from 0 to 100000"),
        (("--samples", "many"), "'many' is not a whole number"),
        (("--samples", "1e9"), "is not a whole number"),
        (("--queues=yes",), "ignored explicit argument"),
        (("--report", ""), "is not a path"),
        (("--report", inside), "lies inside the store"),
        (("--resume", link / "index" / "kept"), "lies inside the store"),
        *(((flag, path), "is no plain file") for flag in ("--report", "--resume") for path in (pipe, "/dev/null")),
        (("--report", tmp_path / "folder"), "is no plain file"),
        (("--report", tmp_path / "none" / "page.html"), "there is no directory"),
        (("--report", tmp_path / "one", "--resume", tmp_path / "one"), "are the same file"),
    ):
        done = indexd_here(*words(golden, *options))
        code = 3 if "inside the store" in text else 2
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1), done.stderr
        assert text in done.stderr
    assert (inside.exists(), pipe.lstat(), link.lstat()) == (False, *before)


def test_the_page_is_written_beside_and_renamed(golden: Golden, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("what was there before", "utf-8")
    done = indexd_here(*words(golden, "--samples", 0, "--report", page))
    assert (done.returncode, done.stderr) == (0, "")
    assert page.read_text("utf-8").startswith("<!DOCTYPE html>")
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["page.html"]
    # What was found is said, whatever becomes of the page.
    done = indexd_here(*words(golden, "--samples", 0, "--report", tmp_path / ("x" * 254)))
    assert (done.returncode, done.stderr.count("\n"), "File name too long" in done.stderr) == (70, 1, True)
    assert done.stdout.startswith("all 18,402 keys findable")


@pytest.fixture
def broker(tmp_path: Path) -> Broker:
    return Broker.sound(tmp_path)


@pytest.fixture
def queues(tmp_path: Path) -> Config:
    return store_with_queues(tmp_path)


def test_a_file_in_place_of_the_index_folder(broker: Broker) -> None:
    (broker.store.root / "index").rename(broker.store.root / "elsewhere")
    (broker.store.root / "index").touch()
    with pytest.raises(DiskError, match="index: Not a directory"):
        audit(broker.config)


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


def log_segments(broker: Broker) -> list[Path]:
    return sorted((broker.store.root / "commitlog").iterdir())


def wipe(broker: Broker, begin: int, size: int) -> None:
    """Zeros into the log, all in one segment."""
    change(log_segments(broker)[begin // SEGMENT], begin % SEGMENT, bytes(size))


def rows_of_kind(report: AuditReport, kind: str) -> list[dict[str, Any]]:
    return [row for row in report.rows() if row["kind"] == kind]


def test_a_segment_that_is_missing_is_the_first_thing_said(broker: Broker) -> None:
    path = log_segments(broker)[1]
    gone = [m for m in broker.messages if SEGMENT <= m.phy_offset < 2 * SEGMENT]
    path.unlink()
    report = report_of(broker.config)
    keys, entries = 2 * (len(broker.messages) - len(gone)), 2 * len(gone)
    assert verdict_line(report) == (
        f"all {keys} keys that could be read are findable; 4 KiB missing from the middle of the log, and {entries} "
        "entries name messages there"
    )
    assert (report.is_sound, verdict_state(report)) == (False, "warn")
    (finding,) = rows_of_kind(report, "finding")
    assert (finding["what"], finding["file"], finding["position"]) == ("log-missing", "commitlog", SEGMENT)
    (summary,) = rows_of_kind(report, "summary")
    assert (summary["sound"], summary["findings"], summary["counts"]) == (False, 1, {"log-missing": 1})
    gap = Gap(SEGMENT, 2 * SEGMENT, SEGMENTS_MISSING, entries)
    assert summary["leftOut"] == [gap.to_json()]
    # The index holds: what is wrong is the log.
    assert report.audit.is_sound


def test_bytes_that_cannot_be_read_are_no_clean_bill(broker: Broker) -> None:
    wipe(broker, broker.messages[30].phy_offset, 20)
    report = report_of(broker.config)
    first, *more = verdict_line(report).split("; ")
    assert first == "all 178 keys that could be read are findable"
    assert more == [more[0]]
    assert "of the log not readable, and 2 entries name messages there" in more[0]
    assert (report.is_sound, report.audit.counts) == (False, {"log-unreadable": 1})


def test_a_message_whose_end_the_damage_hit_is_the_logs_fault(broker: Broker) -> None:
    # The last bytes of one message among the zeros: its last key is another one now, the entry is right.
    message, following = broker.messages[30], broker.messages[31]
    end = following.phy_offset
    assert end // SEGMENT == message.phy_offset // SEGMENT
    wipe(broker, end - 3, 30)
    report = report_of(broker.config)
    (cause,), (hole,) = report.causes, report.audit.holes
    assert (hole.begin, hole.end, hole.messages) == (message.phy_offset, end, 1)
    assert (cause.what, cause.words) == ("log-damaged", "log damaged")
    assert cause.evidence[0].startswith(f"it ends where the log cannot be read, at {end} (")
    line = verdict_line(report)
    assert "log damaged" in line
    assert "repair" not in line


def expiring(broker: Broker, after: int, count: int) -> AuditReport:
    """The broker deletes the first ``count`` log_segments once ``after`` tasks have ended."""
    oldest = log_segments(broker)[:count]

    def run(tasks: Any, ended: Any) -> list[TaskResult]:
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
    return [line for line in words_of(report) if line.startswith(("covered: ", "not covered: "))]


def test_a_log_that_expires_behind_the_reader_was_read_all_the_same(broker: Broker) -> None:
    report = expiring(broker, len(plan_audit(Disk(), broker.config).tasks) - 1, 2)
    audited = report.audit
    assert (audited.messages, audited.log_begin, audited.log_begin_now) == (90, 0, 2 * SEGMENT)
    (line,) = covered(report)
    assert f"log bytes 0 to {audited.log_end} (" in line
    assert f"; its beginning has expired meanwhile: the log begins at {2 * SEGMENT} now" in line
    assert report.is_sound


def test_what_expired_before_it_was_read_is_not_covered(broker: Broker) -> None:
    first = expiring(broker, 0, 1)
    assert (first.audit.log_begin, first.audit.log_begin_now, first.audit.expired) == (SEGMENT, SEGMENT, ())
    (line,) = covered(first)
    assert (f"log bytes {SEGMENT} to " in line, "expired meanwhile" in line) == (True, False)
    # In the middle: the first stretch was read, and then more of the log went than that.
    report = expiring(broker, 2, 2)
    (gap,) = report.audit.expired
    assert (report.audit.log_begin, gap.end, report.is_sound) == (SEGMENT, 3 * SEGMENT, True)
    assert covered(report)[1:] == [
        f"not covered: log bytes {gap.begin} to {gap.end}: they expired before they could be read"
    ]
    assert report.audit.log_size == report.audit.log_end - SEGMENT - (gap.end - gap.begin)
