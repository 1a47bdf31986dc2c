"""Says what an audit has found: as sections of lines, the same on a terminal and on the HTML page of ``--report``."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Literal

from indexd.audit.causes import LOG_CAUSES
from indexd.audit.report import NO_MESSAGE, AuditReport
from indexd.config.units import printable
from indexd.findings import Finding
from indexd.pages.report import Section, render_report
from indexd.pages.wording import counted, show_local, show_number, show_size

MEANINGS = {
    "chain-forward": "a chain turns back on itself: older entries behind this place are not found",
    "chain-loop": "an entry names itself as the one before it: the search ends there, older entries are not found",
    "chain-previous": "a chain skips entries or leads into another one: entries are not found",
    "chain-range": "a chain leads out of the file: older entries behind this place are not found",
    "entry-behind-log": "points behind the end of the log: the log was cut since, the broker finds no message there",
    "entry-hash": "stands where another key's entry should stand: that key is not found by it",
    "entry-key-hash": "a negative key hash: no query asks for it",
    "entry-phy-offset": "a negative offset: the broker finds no message there",
    "entry-phy-offset-range": "points outside the part of the log that its file says it covers",
    "entry-time-difference": "carries the wrong time: queries in time ranges miss the message or add it",
    "entry-twice": "a key has a second entry: queries answer with the message twice",
    "entry-without-key": "names a key that its message does not have: queries for that key get a wrong message",
    "entry-without-message": "points to where no message begins: the broker finds nothing there",
    "file-foreign": "no index file, but it lies in their folder",
    "file-order": "the newest name must be the newest file's, or searches in time ranges end too early",
    "file-size": "not of the size that the broker is configured for: what it holds is not found",
    "header-begin-phy-offset": "the header's first offset is not that of the first entry",
    "header-begin-timestamp": "the header's first time is wrong: queries in time ranges miss messages of this file",
    "header-end-phy-offset": "the header's last offset is not the last entry's: a restart may index messages twice",
    "header-end-timestamp": "the header's last time is wrong: queries in time ranges miss messages of this file",
    "header-index-count": "the header counts other entries than are there: the next ones overwrite, or leave a gap",
    "header-used-slot-count": "the header counts other slots than are in use; queries do not look at it",
    "log-missing": "segments are gone from the middle of the log: their messages are lost, whatever names them",
    "log-unreadable": "bytes of the log that are no message: whether keys there are findable cannot be told",
    "slot-behind-last": "a slot names an entry that is not written yet: its chain is not found",
    "slot-old": "a slot names an older entry than its newest: newer ones are not found",
    "slot-range": "a slot names no entry of this file: its chain is not found",
    "slot-wiped": "a slot is empty but has entries: none of them is found",
    "slot": "further wrong slots of the file",
}
# The cause of a hole that heals by itself.
_PENDING = "not-dispatched-yet"
State = Literal["good", "warn", "bad"]
_CUTS_SHOWN = 5
_FINDINGS_SHOWN, _HOLES_SHOWN = 10, 20
# Rows of a table, and what is drawn of each kind; texts are cut where they are long.
_ROWS_MAX = 100
_TEXT_LONGEST = 400


def lines(report: AuditReport) -> Iterator[str]:
    """All of it for a terminal, a line each; the first is the verdict."""
    yield verdict_line(report)
    for section in sections(report):
        yield from section.words


def sections(report: AuditReport) -> list[Section]:
    """Everything but the verdict."""
    # Without a message nothing can be said of a crash.
    said = [f"crash: {line}" for line in report.crash.lines()] if not report.entries_without_log else []
    measured = [broker_line(report), flavour_line(report), *coverage_lines(report)]
    found = [
        Section("Holes", list(_hole_lines(report))),
        Section("Findings", list(_finding_lines(report))),
        Section("What the broker answers today", report.answers.lines() if report.answers is not None else []),
        Section("ConsumeQueues", report.queues.lines() if report.queues is not None else []),
        Section("What a crash would cost", said),
        Section("How it was measured", measured),
    ]
    return [section for section in found if section.words]


def _hole_lines(report: AuditReport) -> Iterator[str]:
    found = report.audit
    largest = _largest(report, _HOLES_SHOWN)
    for at in sorted(largest):  # in the order of the log
        hole, cause = found.holes[at], report.causes[at]
        where = "to the end of the log" if hole == found.tail else f"to {hole.end}"
        times = f"stored {show_local(hole.begin_timestamp)} to {show_local(hole.end_timestamp)}"
        lost = f"{counted(hole.keys, 'key')} of {counted(hole.messages, 'message')} not findable"
        yield f"hole: {times}, log bytes {hole.begin} {where} ({show_size(hole.size)}): {lost}"
        yield f"  likely cause: {cause.words}"
        yield from (f"  - {_cut(fact)}" for fact in cause.evidence)
    if found.hole_count > len(largest):
        yield f"and {counted(found.hole_count - len(largest), 'smaller hole')}"


def _finding_lines(report: AuditReport) -> Iterator[str]:
    found: dict[str, list[Finding]] = defaultdict(list)
    for finding in report.audit.findings:
        found[finding.what].append(finding)
    for what, count in report.audit.counts.items():
        kept = found[what]
        yield f"{printable(what)}, {counted(count, 'finding')}: {MEANINGS.get(what) or what.replace('-', ' ')}"
        for finding in kept[:_FINDINGS_SHOWN]:
            yield f"  {printable(finding.file)} byte {finding.position}: {_cut(finding.text)}"
        more = count - min(len(kept), _FINDINGS_SHOWN)
        if more:
            yield f"  and {more:,} more; --json has {'the first 100 of each file' if count > 100 else 'all of them'}"


def _largest(report: AuditReport, count: int) -> list[int]:
    # Numbers of the holes with the most keys.
    holes = report.audit.holes
    return sorted(range(len(holes)), key=lambda number: (-holes[number].keys, number))[:count]


def verdict_state(report: AuditReport) -> State:
    """``good``: nothing is wrong; ``bad``: keys are not findable, and not only because a broker is about to index them;
    ``warn``: anything else.
    """
    audit = report.audit
    is_pending_only = len(audit.holes) == audit.hole_count and {cause.what for cause in report.causes} <= {_PENDING}
    if report.entries_without_log or (audit.missing_keys and not is_pending_only):
        return "bad"
    return "good" if report.is_sound else "warn"


def verdict_line(report: AuditReport) -> str:
    """One line: how many keys are findable, the hole or the largest of the holes, and what to do."""
    audit = report.audit
    findable = "keys that could be read are findable" if audit.gaps else "keys findable"
    parts = [f"all {audit.keys:,} {findable}" if audit.keys else "the log has no keys to be found"]
    if report.entries_without_log:
        parts = [NO_MESSAGE.format(report.entries_without_log)]
    elif audit.missing_keys:
        parts = [f"{show_findable(report)} of {audit.keys:,} keys findable"]
        for number in _largest(report, 1):
            hole, cause = audit.holes[number], report.causes[number]
            many = "one hole" if audit.hole_count == 1 else f"{audit.hole_count:,} holes, the largest"
            span = f"{show_local(hole.begin_timestamp)} to {show_local(hole.end_timestamp)}"
            parts.append(f"{many}, {span}, {show_size(hole.size)}, {cause.words}")
    for is_missing, words in ((True, "missing from the middle of the log"), (False, "of the log not readable")):
        gaps = [gap for gap in audit.gaps if gap.is_missing == is_missing]
        if gaps:
            size, entries = show_size(sum(gap.end - gap.begin for gap in gaps)), sum(gap.entries for gap in gaps)
            parts.append(f"{size} {words}, and {entries:,} entries name messages there")
    whats = {cause.what for cause in report.causes}
    more = (
        (audit.index_findings, f"{counted(audit.index_findings, 'finding')} in the index files"),
        (
            not audit.index_findings and not audit.missing_keys and not audit.gaps,
            "nothing wrong in the index files",
        ),
        (report.queues is not None and not report.queues.is_sound, "the ConsumeQueues have findings"),
        (whats - {_PENDING, *LOG_CAUSES}, f"indexd repair mends {'the rest' if whats & LOG_CAUSES else 'it'}"),
    )
    return "; ".join([*parts, *(words for holds, words in more if holds)])


def broker_line(report: AuditReport) -> str:
    """Whether a broker runs, or how the last one ended."""
    state, lock = report.state, report.state.lock
    pid = "a broker" if lock.pid is None else f"the broker (pid {lock.pid})"
    said = (
        (lock.alive, f"{pid} {'runs' if lock.how == 'lock' else 'loads this store'}"),
        (lock.alive is None, f"not known whether one runs: {printable(lock.why or '')}"),
        (
            not state.has_lock_file,
            "none runs; there is no lock file: a copy, or a store that no broker since 4.2 has opened",
        ),
        (state.has_abort, "none runs; it was not stopped cleanly"),
        (True, "none runs; it was stopped cleanly"),
    )
    return f"broker: {next(words for holds, words in said if holds)}"


def flavour_line(report: AuditReport) -> str:
    """As which RocketMQ the index was judged, and how that is known."""
    found = report.audit
    eras = [f"{era.flavour} from log byte {era.begin} on" if at else era.flavour for at, era in enumerate(found.eras)]
    why = "by its entries" if any(file.entries for file in found.files) else "as configured: there are no entries"
    return f"flavour: {', '.join(eras)} ({'as given' if report.plan.is_flavour_given else why})"


def coverage_lines(report: AuditReport) -> Iterator[str]:
    """What was read and compared, and what could not be."""
    found = report.audit
    more = (
        (True, f"{found.entries:,} entries compared, in {report.seconds:.2f} s"),
        (
            report.resumed_tasks,
            f"{report.resumed_tasks:,} of {counted(len(report.plan.tasks), 'task')} taken over from an earlier run",
        ),
        (
            found.expired_entries,
            f"{found.expired_entries:,} entries point before the log begins: their messages have expired",
        ),
        (
            found.log_begin_now > found.log_begin,
            f"its beginning has expired meanwhile: the log begins at {found.log_begin_now} now",
        ),
        (found.unreadable, f"behind its end stands {printable(found.unreadable or '')}"),
    )
    yield (
        f"covered: {printable(report.store)}, log bytes {found.log_begin} to {found.log_end} "
        f"({show_size(found.log_size)}, {counted(found.messages, 'message')}), "
        f"{counted(len(found.files), 'index file')}, {'; '.join(words for holds, words in more if holds)}"
    )
    for gap in found.expired[:_CUTS_SHOWN]:
        yield f"not covered: log bytes {gap.begin} to {gap.end}: they expired before they could be read"
    for gap in found.gaps[:_CUTS_SHOWN]:
        size = show_size(gap.end - gap.begin)
        yield f"not covered: log bytes {gap.begin} to {gap.end} ({size}): {printable(gap.reason)}"
    if len(found.gaps) > _CUTS_SHOWN:
        yield f"and {counted(len(found.gaps) - _CUTS_SHOWN, 'more range')} that could not be read"


def show_findable(report: AuditReport) -> str:
    """The share of keys that are findable, rounded down: what is not whole must not look so."""
    audit = report.audit
    if not audit.keys or not audit.missing_keys:
        return "100 %"
    thousandths = 1000 * audit.findable_keys // audit.keys
    return "under 0.1 %" if not thousandths and audit.findable_keys else f"{thousandths / 10:.1f} %"


def _cut(text: str) -> str:
    return printable(text if len(text) <= _TEXT_LONGEST else text[: _TEXT_LONGEST - 1] + "…")


def audit_page(report: AuditReport) -> str:
    """The page of ``--report``."""
    audit, verdict, now = report.audit, verdict_line(report), time.localtime()
    return render_report(
        title=f"{verdict} - audit of {report.store}",
        heading=verdict[:1].upper() + verdict[1:] + ".",
        state=verdict_state(report),
        lines=[f"audit of {report.store}, {show_local(report.state.looked_at)}; {broker_line(report)}"],
        tiles=[
            (show_findable(report), f"of {audit.keys:,} keys findable"),
            (show_number(audit.missing_keys), "keys not findable"),
            (show_number(audit.hole_count), "holes"),
            (show_number(audit.index_findings), "findings in the index files"),
            (show_size(audit.log_size), f"of log, {show_number(audit.messages)} messages"),
            (show_number(len(audit.files)), "index files"),
        ],
        plot=_plot(report) if audit.log_end > audit.log_begin else None,
        sections=sections(report),
        footer=f"times on the clock of the machine that audited ({now.tm_zone}, {time.strftime('UTC%z', now)})",
    )


def _plot(report: AuditReport) -> dict[str, Any]:
    # The log from its begin to its end: holes, what was not read, and the newest index files below.
    audit, causes = report.audit, report.causes

    def at(offset: int) -> float:
        return min(max(100 * (offset - audit.log_begin) / (audit.log_end - audit.log_begin), 0), 100)

    holes = [(audit.holes[number], causes[number].what) for number in sorted(_largest(report, _ROWS_MAX))]
    drawn = [
        (audit.log_begin, audit.log_end, "findable, where nothing else is drawn", "ok", 100),
        *(
            (
                hole.begin,
                hole.end,
                printable(f"{hole.keys:,} keys not findable: {why}"),
                "pending" if why == _PENDING else "hole",
                100,
            )
            for hole, why in holes
        ),
        *((file.begin, file.end + 1, printable(file.name), "t0", 8) for file in audit.files[-_ROWS_MAX:]),
    ]
    return {
        "title": "The log",
        "caption": ": holes are red, what a broker is about to index is yellow, what could not be read grey; "
        "along the bottom the newest index files",
        "columns": [
            {"at": at(begin), "width": at(end) - at(begin), "title": title, "parts": [(colour, height)]}
            for begin, end, title, colour, height in drawn
            if begin < end
        ],
        "steps": (),
        "silences": [(at(gap.begin), at(gap.end)) for gap in audit.gaps[:_ROWS_MAX]],
        "ticks": [(0, f"byte {audit.log_begin:,}"), (100, f"{audit.log_end:,}")],
    }
