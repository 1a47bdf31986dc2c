"""What an audit says to people: the verdict first, bounded, all text escaped, on a terminal and as a page."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from indexd.audit import AuditOptions, AuditReport, audit_here
from indexd.audit.causes import Cause, CrashCost, make_cause
from indexd.audit.page import MEANINGS, audit_page, verdict_line, verdict_state
from indexd.audit.result import Gap, Hole
from indexd.compare.index import KINDS
from indexd.findings import Finding
from indexd.index.check import ENTRY_KINDS
from indexd.index.format import IndexLayout
from indexd.storage.disk import Disk
from indexd.storage.lock import BrokerLock
from support.audit_reports import GIB, Made, evenly
from support.auditing import config_for, index_log, words_of
from support.data_directory import T0
from support.indexing_broker import Broker
from support.small_log import HASH_SLOT_NUM, INDEX_NUM, SEGMENT_SIZE, write_log

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
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "title"} & set(self._open):
            self.words.append(data)

    @property
    def text(self) -> str:
        """All words, blanks as one."""
        return " ".join(" ".join(self.words).split())

    def of(self, kind: str) -> list[dict[str, str | None]]:
        """Attributes of those of a class."""
        return [attributes for _, attributes in self.found if (attributes.get("class") or "") == kind]


def one_hole(cause: Cause = CRASH) -> Made:
    made = Made(begin=0)
    made.add_hole(16 * GIB, 8 * GIB, cause)
    return made


def test_the_verdict_is_the_first_line() -> None:
    report = one_hole().report()
    words = verdict_line(report)
    assert words.startswith("87.5 % of 201,326,592 keys findable; one hole, ")
    assert words.endswith(", 8 GiB, unclean stop; indexd repair mends it")
    elements = Elements(audit_page(report))
    assert elements.text.startswith("87.5 %")
    assert verdict_state(report) == "bad"
    assert elements.found[[name for name, _ in elements.found].index("h1")][1]["class"] == "verdict bad"


@pytest.mark.parametrize(("missing", "words"), [(1, "99.9 %"), (25_165_823, "under 0.1 %"), (25_165_824, "0.0 %")])
def test_shares_are_never_rounded_up(missing: int, words: str) -> None:
    report = Made(8, 3).report()
    report = replace(report, audit=replace(report.audit, missing_keys=missing))
    assert verdict_line(report).startswith(f"{words} of ")


@pytest.mark.parametrize(("cause", "colour", "other"), [(CRASH, "hole", "pending"), (PENDING, "pending", "hole")])
def test_a_hole_is_drawn_where_it_is(cause: Cause, colour: str, other: str) -> None:
    elements = Elements(audit_page(one_hole(cause).report()))
    assert [(found["x"], found["width"]) for found in elements.of(colour)] == [("25.00%", "12.50%")]
    assert not elements.of(other)
    assert f"likely cause: {cause.words}" in elements.text
    assert all(fact in elements.text for fact in cause.evidence)


def test_thousands_of_holes_stay_small_and_readable() -> None:
    made = Made(4000, 3000, 0)
    evenly(made, 1000, 50 << 20, [Cause("unclean-stop", "unclean stop", ("a line of evidence " * 8,) * 4), PENDING])
    for number in range(3000):
        made.add_finding(f"index/{made.files[number].name}", "entry-twice", "x" * 5000, 1000)
        made.gaps.append(Gap(number * GIB, number * GIB + 4096, "y" * 500))
    page = audit_page(made.report(more_holes=54_321))
    assert len(page.encode()) < 1_000_000
    assert f"and {55_321 - 20:,} smaller holes" in Elements(page).text
    assert Elements(page).of("hole")[0]["width"] == "0.15%", "narrower than a line, and still seen"


def hostile() -> AuditReport:
    made = Made(8, 3, 0)
    made.store = "/data/" + HOSTILE[0]
    for number, text in enumerate(HOSTILE):
        made.files[number % 3] = replace(made.files[number % 3], name=text)
        made.add_finding(f"index/{text}", text, text)
        made.add_hole(number * GIB, 1 << 20, Cause(text, text, (text,)))
        made.gaps.append(Gap(number * GIB + (1 << 29), number * GIB + (1 << 30), text))
    made.crash = CrashCost(tuple(HOSTILE), 10, 5, 0)
    made.state = replace(made.state, lock=BrokerLock(None, 7, "unknown", HOSTILE[1]))
    report = made.report()
    return replace(report, audit=replace(report.audit, unreadable=HOSTILE[2]))


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


def test_the_page_asks_nobody_for_anything() -> None:
    page = audit_page(one_hole().report())
    elements = Elements(page)
    policy = next(a["content"] for _, a in elements.found if a.get("http-equiv") == "Content-Security-Policy") or ""
    rules = dict(rule.strip().partition(" ")[::2] for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert "script-src" not in rules
    assert not re.search(r"https?:|url\(|@import", page)


def test_every_kind_of_finding_has_a_meaning() -> None:
    entries = {what for what, _, _ in (*ENTRY_KINDS, *KINDS[1:])} - {"entry-order"}
    assert entries <= MEANINGS.keys()


def test_the_page_of_a_real_store_with_a_file_deleted(tmp_path: Path) -> None:
    store = tmp_path / "store"
    write_log(store, 6000)
    config = config_for(store, IndexLayout(HASH_SLOT_NUM, INDEX_NUM), SEGMENT_SIZE)
    index_log(config)
    names = sorted(path.name for path in (store / "index").iterdir())
    (store / "index" / names[1]).unlink()
    report = audit_here(config, Disk(), AuditOptions(samples=20, queues=True), lambda *_: None)
    elements = Elements(audit_page(report))
    assert verdict_line(report)[1:] in elements.text
    assert f"{report.audit.missing_keys:,}" in elements.text
    assert len(elements.of("hole")) == 1
    assert "What the broker answers today" in elements.text
    assert "the ConsumeQueues have findings" in elements.text  # there are none
    assert "queue-missing" in elements.text


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
