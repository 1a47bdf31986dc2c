"""Says what an audit has found: in words, the same on a terminal and on the page, and as one HTML page.

The page has no script and asks no other host for anything; its Content-Security-Policy says so. Jinja2 escapes what
comes from the store; each list is bounded, and what is left out is counted.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any, Literal

from markupsafe import Markup

from indexd import __version__
from indexd.audit.causes import LOG_CAUSES, Cause
from indexd.audit.report import NO_MESSAGE, AuditReport
from indexd.config.units import printable
from indexd.findings import Finding
from indexd.pages.markup import element, foreign, page_style
from indexd.pages.wording import show_duration, show_local, show_name, show_number, show_size

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
    "slot-other": "a slot names an entry of another slot: its own chain is not found",
    "slot-range": "a slot names no entry of this file: its chain is not found",
    "slot-wiped": "a slot is empty but has entries: none of them is found",
    "slot": "further wrong slots of the file",
}
# The cause of a hole that heals by itself.
_PENDING = "not-dispatched-yet"
State = Literal["good", "warn", "bad"]
# A repair reads what it builds about so often, building and checking, at the rate of this audit.
_READS = 2
_CUTS_SHOWN = 5
_FINDINGS_SHOWN, _HOLES_SHOWN = 10, 20


def lines(report: AuditReport, size_words: Callable[[float], str], time_words: Callable[[int], str]) -> Iterator[str]:
    """All of it for a terminal, a line each; the first is the verdict."""
    yield verdict_line(report)
    yield from _hole_lines(report, size_words, time_words)
    yield from _finding_lines(report)
    for answers in (report.answers, report.queues):
        yield from answers.lines() if answers is not None else ()
    crash = report.crash
    for line in crash.lines() if not report.entries_without_log else ():  # else nothing can be said
        before = crash.dispatch_timestamp if crash.lost_keys and line.endswith("lost") else None
        yield f"crash: {line}" + (f": of what was stored before {time_words(before)}" if before else "")
    yield broker_line(report)
    yield flavour_line(report)
    yield from coverage_lines(report, size_words)


def _hole_lines(
    report: AuditReport, size_words: Callable[[float], str], time_words: Callable[[int], str]
) -> Iterator[str]:
    found = report.audit
    # The largest, in the order of the log.
    largest = sorted(range(len(found.holes)), key=lambda at: (-found.holes[at].keys, at))[:_HOLES_SHOWN]
    for at in sorted(largest):
        hole, cause = found.holes[at], report.causes[at]
        where = "to the end of the log" if hole == found.tail else f"to {hole.end}"
        times = f"stored {time_words(hole.begin_timestamp)} to {time_words(hole.end_timestamp)}"
        lost = f"{show_count(hole.keys, 'key')} of {show_count(hole.messages, 'message')} not findable"
        yield f"hole: {times}, log bytes {hole.begin} {where} ({size_words(hole.size)}): {lost}"
        yield f"  likely cause: {cause.words}"
        yield from (f"  - {printable(fact)}" for fact in cause.evidence)
    if found.hole_count > len(largest):
        yield f"and {show_count(found.hole_count - len(largest), 'smaller hole')}"


def _finding_lines(report: AuditReport) -> Iterator[str]:
    for what, count, meaning, kept in _findings(report):
        yield f"{what}, {show_count(count, 'finding')}: {meaning}"
        for finding in kept[:_FINDINGS_SHOWN]:
            yield f"  {printable(finding.file)} byte {finding.position}: {printable(finding.text)}"
        more = count - min(len(kept), _FINDINGS_SHOWN)
        if more:
            yield f"  and {more:,} more; --json has {'the first 100 of each file' if count > 100 else 'all of them'}"


def _findings(report: AuditReport) -> list[tuple[str, int, str, list[Finding]]]:
    # Kind, number, what that means, the first ones.
    found: dict[str, list[Finding]] = defaultdict(list)
    for finding in report.audit.findings:
        found[finding.what].append(finding)
    counts = report.audit.counts.items()
    return [(what, count, MEANINGS.get(what) or what.replace("-", " "), found[what]) for what, count in counts]


def verdict_state(report: AuditReport) -> State:
    """``good``: nothing is wrong; ``bad``: keys are not findable, and not only because a broker is about to index them;
    ``warn``: anything else.
    """
    audit = report.audit
    is_pending_only = len(audit.holes) == audit.hole_count and all(map(is_pending, report.causes))
    if report.entries_without_log or (audit.missing_keys and not is_pending_only):
        return "bad"
    return "good" if report.is_sound else "warn"


def verdict_line(report: AuditReport) -> str:
    """One line: how many keys are findable, the hole or the largest of the holes, and what to do."""
    audit = report.audit
    if report.entries_without_log:
        parts = [NO_MESSAGE.format(report.entries_without_log)]
    elif not audit.keys:
        parts = ["the log has no keys to be found"]
    elif audit.missing_keys:
        parts = [f"{show_findable(report)} of {audit.keys:,} keys findable", *_largest_hole(report)]
    elif audit.gaps:
        parts = [f"all {audit.keys:,} keys that could be read are findable"]
    else:
        parts = [f"all {audit.keys:,} keys findable" if audit.keys > 1 else "the one key is findable"]
    for is_missing, words in ((True, "missing from the middle of the log"), (False, "of the log not readable")):
        gaps = [gap for gap in audit.gaps if gap.is_missing == is_missing]
        entries = sum(gap.entries for gap in gaps)
        named = f", and {entries:,} {'entry names' if entries == 1 else 'entries name'} messages there"
        size = show_size(sum(gap.end - gap.begin for gap in gaps))
        parts += [f"{size} {words}{named if entries else ''}"] if gaps else []
    if audit.index_findings:
        parts.append(f"{show_count(audit.index_findings, 'finding')} in the index files")
    elif not audit.missing_keys and not audit.gaps:
        parts.append("nothing wrong in the index files")
    if report.queues is not None and not report.queues.is_sound:
        parts.append("the ConsumeQueues have findings")
    holes = zip(audit.holes, report.causes, strict=True)
    size_left = sum(hole.size for hole, cause in holes if cause.what not in {_PENDING, *LOG_CAUSES})
    if size_left and report.bytes_read and report.seconds > 0:
        what = "the rest" if any(cause.what in LOG_CAUSES for cause in report.causes) else "it"
        seconds = _READS * size_left * report.seconds / report.bytes_read
        rounded = round(seconds) if seconds < 60 else round(seconds / 60) * 60
        parts.append(f"indexd repair mends {what} in about {show_duration(1000 * rounded) if rounded else 'a second'}")
    return "; ".join(parts)


def _largest_hole(report: AuditReport) -> list[str]:
    audit = report.audit
    if not audit.holes:
        return []
    number = max(range(len(audit.holes)), key=lambda at: audit.holes[at].keys)
    hole, cause = audit.holes[number], report.causes[number]
    span = show_span(hole.begin_timestamp, hole.end_timestamp, report.state.looked_at)
    words = f"{span}, {show_size(hole.size)}, {cause.words}"
    return [f"one hole, {words}" if audit.hole_count == 1 else f"{audit.hole_count:,} holes, the largest {words}"]


def broker_line(report: AuditReport) -> str:
    """Whether a broker runs, or how the last one ended."""
    state = report.state
    lock = state.lock
    if lock.alive:
        pid = "a broker" if lock.pid is None else f"the broker (pid {lock.pid})"
        return f"broker: {pid} {'runs' if lock.how == 'lock' else 'loads this store'}"
    if lock.alive is None:
        return f"broker: not known whether one runs: {printable(lock.why or '')}"
    if not state.has_lock_file:
        return "broker: none runs; there is no lock file: a copy, or a store that no broker since 4.2 has opened"
    return f"broker: none runs; it was {'not stopped cleanly' if state.has_abort else 'stopped cleanly'}"


def flavour_line(report: AuditReport) -> str:
    """As which RocketMQ the index was judged, and how that is known."""
    found = report.audit
    eras = [f"{era.flavour} from log byte {era.begin} on" if at else era.flavour for at, era in enumerate(found.eras)]
    why = "by its entries" if any(file.entries for file in found.files) else "as configured: there are no entries"
    return f"flavour: {', '.join(eras)} ({'as given' if found.is_flavour_given else why})"


def coverage_lines(report: AuditReport, size_words: Callable[[float], str] = show_size) -> Iterator[str]:
    """What was read and compared, and what could not be."""
    found = report.audit
    parts = [
        f"covered: {printable(report.store)}, log bytes {found.log_begin} to {found.log_end} "
        f"({size_words(found.log_size)}, {show_count(found.messages, 'message')}), "
        f"{show_count(len(found.files), 'index file')}, {found.entries:,} entries compared, in {report.seconds:.2f} s"
        + (f" ({', '.join(report.manner)})" if report.manner else "")
    ]
    if report.resumed_tasks:
        tasks = show_count(len(report.plan.tasks), "task")
        parts.append(f"{report.resumed_tasks:,} of {tasks} taken over from an earlier run")
    if found.expired_entries:
        parts.append(f"{found.expired_entries:,} entries point before the log begins: their messages have expired")
    if found.log_begin_now > found.log_begin:
        parts.append(f"its beginning has expired meanwhile: the log begins at {found.log_begin_now} now")
    if found.unreadable is not None:
        parts.append(f"behind its end stands {printable(found.unreadable)}")
    yield "; ".join(parts)
    for gap in found.expired[:_CUTS_SHOWN]:
        yield f"not covered: log bytes {gap.begin} to {gap.end}: they expired before they could be read"
    for gap in found.gaps[:_CUTS_SHOWN]:
        size = size_words(gap.end - gap.begin)
        yield f"not covered: log bytes {gap.begin} to {gap.end} ({size}): {printable(gap.reason)}"
    if len(found.gaps) > _CUTS_SHOWN:
        yield f"and {show_count(len(found.gaps) - _CUTS_SHOWN, 'more range')} that could not be read"


def show_count(number: int, what: str) -> str:
    """A number with its noun: ``no keys``, ``1 key``, ``1,024 keys``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}" if number else f"no {what}s"


def show_findable(report: AuditReport) -> str:
    """The share of keys that are findable, rounded down: what is not whole must not look so."""
    audit = report.audit
    if not audit.keys or not audit.missing_keys:
        return "100 %"
    thousandths = 1000 * audit.findable_keys // audit.keys
    return "under 0.1 %" if not thousandths and audit.findable_keys else f"{thousandths / 10:.1f} %"


def is_pending(cause: Cause) -> bool:
    """Whether a hole is only what a working broker has not come to yet."""
    return cause.what == _PENDING


def show_span(begin: int, end: int, now: int) -> str:
    """From one store timestamp to another on this machine's clock, ms; the day only where it is not that of ``now``."""
    first, last = show_local(begin), show_local(end)
    if first.endswith("ms") or last.endswith("ms"):
        return f"{first} to {last}"
    if first[:10] != last[:10]:
        return f"{first[:16]} to {last[:16]}"
    cut = slice(11, 16) if first[11:16] != last[11:16] else slice(11, 19)
    times = first[cut] if first[cut] == last[cut] else f"{first[cut]}-{last[cut]}"
    return times if first[:10] == show_local(now)[:10] else f"{first[:10]} {times}"


# Rows of a table, and of each kind of finding so many; of the holes so many are unfolded.
_ROWS_MAX, _HOLES_UNFOLDED = 100, 20
_TEXT_LONGEST = 400


def audit_page(report: AuditReport) -> str:
    """The page as text."""
    import jinja2  # noqa: PLC0415 - a terminal needs no templates

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "number": show_number,
        "full": "{:,}".format,
        "size": show_size,
        "name": show_name,
        "line": printable,
        "foreign": _foreign,
        "local": _local,
        "noun": lambda word, count: word if count == 1 else f"{word}s",
        "sentence": lambda words: words[:1].upper() + words[1:],
        "pending": is_pending,
    }
    audit = report.audit
    by_keys = sorted(range(len(audit.holes)), key=lambda number: -audit.holes[number].keys)[:_ROWS_MAX]
    now = time.localtime()
    return environment.from_string(_text("page.html")).render(
        report=report,
        audit=audit,
        version=__version__,
        style=Markup(page_style() + _text("page.css")),
        verdict=printable(verdict_line(report)),
        state=verdict_state(report),
        findable=show_findable(report),
        broker=broker_line(report).removeprefix("broker: "),
        measured=[flavour_line(report), *coverage_lines(report)],
        zone=f"{now.tm_zone}, {time.strftime('UTC%z', now)}",
        top=_ROWS_MAX,
        at=lambda offset: min(max(100 * (offset - audit.log_begin) / max(audit.log_end - audit.log_begin, 1), 0), 100),
        legend=_legend(report),
        holes=by_keys,
        large=sorted(by_keys[:_HOLES_UNFOLDED]),
        small=sorted(by_keys[_HOLES_UNFOLDED:]),
        small_keys=audit.missing_keys - sum(audit.holes[number].keys for number in by_keys),
        findings=sorted(((*row[:3], row[3][:_ROWS_MAX]) for row in _findings(report)), key=lambda row: -row[1]),
        unread=[file for file in report.plan.files if not file.is_readable],
        files=_files(report),
    )


def _legend(report: AuditReport) -> list[tuple[str, str, bool]]:
    audit, pending = report.audit, [is_pending(cause) for cause in report.causes]
    return [
        ("log", "findable", True),
        ("hole", "a hole: keys are not findable", not all(pending)),
        ("pending", "not dispatched yet", any(pending)),
        ("gap", "could not be read", bool(audit.gaps)),
        ("file", "an index file", bool(audit.files)),
        ("file wrong", "one with findings", bool(audit.index_findings) and bool(audit.files)),
    ]


def _text(name: str) -> str:
    return files("indexd.audit").joinpath(name).read_text(encoding="utf-8")


def _foreign(text: str) -> Markup:
    # What comes out of the store, on one line that turns no other text around; the very long is cut.
    return Markup(foreign(text if len(text) <= _TEXT_LONGEST else text[: _TEXT_LONGEST - 1] + "…"))


def _local(millis: int) -> Markup:
    # On this machine's clock, and in UTC for machines and where the pointer rests on it.
    text = show_local(millis)
    if text.endswith("ms"):
        return Markup(element("span", text))
    utc = datetime.fromtimestamp(millis / 1000, tz=UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return Markup(element("time", text, datetime=utc, title=utc))


def _files(report: AuditReport) -> list[tuple[Any, int, int]]:
    # Those with findings and the newest, in the order of their names: the file, its findings, how full it is.
    wrong = Counter(finding.file.removeprefix("index/") for finding in report.audit.findings)
    found = list(enumerate(report.audit.files))
    found.sort(key=lambda row: (not (wrong[row[1].name] or row[1].unreachable), -row[0]))
    room = max(report.plan.layout.index_num - 1, 1)
    # Rounded down: only a file that is full is 100 % full.
    return [(file, wrong[file.name], min(100 * file.entries // room, 100)) for _, file in sorted(found[:_ROWS_MAX])]
