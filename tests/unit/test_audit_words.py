"""What ``indexd audit`` says to people: the verdict first, then the facts, bounded, and nothing a terminal obeys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from indexd.audit import AuditOptions, AuditReport, audit_here
from indexd.audit.causes import make_cause
from indexd.audit.result import Gap, Hole
from indexd.findings import Finding
from indexd.storage.disk import Disk
from indexd.storage.lock import BrokerLock
from support.auditing import words_of
from support.data_directory import T0
from support.indexing_broker import Broker


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> AuditReport:
    """Of a store without a fault; tests change what they need."""
    broker = Broker(tmp_path_factory.mktemp("words"))
    broker.dispatch(broker.messages)
    broker.stopped()
    return audit_here(broker.config, Disk(), AuditOptions(samples=5, queues=True), lambda *_: None)


def lines(report: AuditReport, **changes: Any) -> list[str]:
    """The page of a report whose audit is changed."""
    return words_of(replace(report, audit=replace(report.audit, **changes)))


def holes(number: int) -> tuple[Hole, ...]:
    return tuple(Hole(100 * n, 100 * n + 50, T0 + n, T0 + n, 1, n % 7 + 1, 100 * n + 80) for n in range(number))


def only(report: AuditReport, begin: str, **changes: Any) -> str:
    (line,) = [line for line in lines(report, **changes) if line.startswith(begin)]
    return line


def with_state(report: AuditReport, **changes: Any) -> AuditReport:
    return replace(report, state=replace(report.state, **changes))


def test_the_verdict_is_first_and_what_was_covered_is_last(sound: AuditReport) -> None:
    words = lines(sound)
    assert words[0].startswith("all 180 keys findable")
    assert words[-1].startswith(f"covered: {sound.store}, log bytes 0 to {sound.audit.log_end} (")
    assert words[-1].endswith(" s")
    assert not [line for line in words if line.startswith(("hole", "not covered", "and "))]


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


def test_which_broker_it_is(sound: AuditReport) -> None:
    def broker(**changes: Any) -> str:
        return only(with_state(sound, **changes), "broker: ")

    runs = BrokerLock(True, 4711, "lock")
    assert broker(lock=runs) == "broker: the broker (pid 4711) runs"
    assert broker(lock=replace(runs, how="proc")) == "broker: the broker (pid 4711) loads this store"
    assert broker(lock=replace(runs, pid=None)) == "broker: a broker runs"
    unknown = BrokerLock(None, None, "unknown", "the lock is on NFS")
    assert broker(lock=unknown) == "broker: not known whether one runs: the lock is on NFS"
    assert broker(has_abort=False) == "broker: none runs; it was stopped cleanly"
    assert broker(has_abort=True) == "broker: none runs; it was not stopped cleanly"
    assert broker(has_lock_file=False) == (
        "broker: none runs; there is no lock file: a copy, or a store that no broker since 4.2 has opened"
    )


def test_what_was_not_covered(sound: AuditReport) -> None:
    gaps = tuple(Gap(1000 * n, 1000 * n + 24, "bytes that are no frame\x07") for n in range(9))
    words = lines(sound, gaps=gaps, unreadable="a frame that is cut", expired_entries=1234)
    assert "not covered: log bytes 0 to 24 (24 B): bytes that are no frame\\x07" in words
    assert words[-1] == "and 4 more ranges that could not be read"
    (covered,) = [line for line in words if line.startswith("covered: ")]
    assert "; 1,234 entries point before the log begins: their messages have expired" in covered
    assert covered.endswith("; behind its end stands a frame that is cut")


def test_the_crash_says_what_was_stored_before(sound: AuditReport) -> None:
    crash = replace(sound.crash, lost_keys=12, dispatch_timestamp=T0, has_checkpoint=True, thrown=("1",), keys=20)
    line = only(replace(sound, crash=crash), "crash: ")
    assert "and 12 keys would be lost: of what was stored before 2023-11-1" in line
    none = [
        line
        for line in lines(replace(sound, crash=replace(crash, lost_keys=0, has_checkpoint=False)))
        if line.startswith("crash: ")
    ]
    assert len(none) == 2
    assert not any("of what was stored" in line for line in none)
