"""Puts an audit into words, the same on a terminal and on the page: the verdict, the broker, what was covered."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Literal

from indexd.audit.causes.words import LOG_CAUSES, Cause
from indexd.audit.report import AuditReport
from indexd.audit.whole import Audit
from indexd.config.units import printable
from indexd.pages.wording import show_duration, show_local, show_size

# The cause of a hole that heals by itself.
_PENDING = "not-dispatched-yet"
#: With the number of entries.
NO_MESSAGE = "the log holds no message, and the index has {:,} entries: is the log's disk mounted?"
State = Literal["good", "warn", "bad"]
# A repair reads what it builds about so often, building and checking, at the rate of this audit.
_READS = 2
_CUTS_SHOWN = 5


def verdict_state(report: AuditReport) -> State:
    """``good``: nothing is wrong; ``bad``: keys are not findable, and not only because a broker is about to index them;
    ``warn``: anything else.
    """
    audit = report.audit
    if report.homeless_entries:
        return "bad"
    if audit.missing_keys and not (len(audit.holes) == audit.hole_count and all(map(is_pending, report.causes))):
        return "bad"
    return "good" if report.is_sound else "warn"


def verdict_line(report: AuditReport) -> str:
    """One line: how many keys are findable, the hole or the largest of the holes, and what to do."""
    audit = report.audit
    if report.homeless_entries:
        parts = [NO_MESSAGE.format(report.homeless_entries)]
    elif not audit.keys:
        parts = ["the log has no keys to be found"]
    elif not audit.missing_keys and audit.gaps:
        parts = [f"all {audit.keys:,} keys that could be read are findable"]
    elif not audit.missing_keys:
        parts = [f"all {audit.keys:,} keys findable" if audit.keys > 1 else "the one key is findable"]
    else:
        parts = [f"{show_findable(report)} of {audit.keys:,} keys findable", *_holes(report)]
    parts += _gaps(report)
    wrong = audit.index_findings
    if wrong:
        parts.append(f"{wrong:,} finding{'' if wrong == 1 else 's'} in the index files")
    elif not audit.missing_keys and not audit.gaps:
        parts.append("nothing wrong in the index files")
    if report.queues is not None and not report.queues.is_sound:
        parts.append("the ConsumeQueues have findings")
    seconds = repair_seconds(report)
    if seconds is not None:
        what = "the rest" if any(cause.what in LOG_CAUSES for cause in report.causes) else "it"
        parts.append(f"indexd repair mends {what} in about {_rounded(seconds)}")
    return "; ".join(parts)


def broker_line(report: AuditReport) -> str:
    """Whether a broker runs, or how the last one ended."""
    standing = report.standing
    lock = standing.lock
    if lock.alive:
        pid = "a broker" if lock.pid is None else f"the broker (pid {lock.pid})"
        return f"broker: {pid} {'runs' if lock.how == 'lock' else 'loads this store'}"
    if lock.alive is None:
        return f"broker: not known whether one runs: {printable(lock.why or '')}"
    if not standing.has_lock_file:
        return "broker: none runs; there is no lock file: a copy, or a store that no broker since 4.2 has opened"
    return f"broker: none runs; it was {'not stopped cleanly' if standing.has_abort else 'stopped cleanly'}"


def flavour_line(found: Audit) -> str:
    """As which RocketMQ the index was judged, and how that is known."""
    eras = ", ".join(
        era.flavour if not number else f"{era.flavour} from log byte {era.begin} on"
        for number, era in enumerate(found.eras)
    )
    why = "as given"
    if not found.is_flavour_given:
        why = "by its entries" if any(file.entries for file in found.files) else "as configured: there are no entries"
    return f"flavour: {eras} ({why}{_meanings(found)})"


def _meanings(found: Audit) -> str:
    # RocketMQ has counted in two ways; which one is a fact of its release.
    meanings = {file.counts_every_put for file in found.files} - {None}
    if not meanings:
        return ""
    if len(meanings) == 2:
        return "; some headers count every entry and some every slot: it was upgraded over 4.7.1"
    return (
        "; headers count every entry: before 4.7.1" if meanings == {True} else "; headers count every slot: since 4.7.1"
    )


def coverage_lines(report: AuditReport, size_words: Callable[[float], str] = show_size) -> Iterator[str]:
    """What was read and compared, and what could not be."""
    found = report.audit
    line = (
        f"covered: {printable(report.store)}, log bytes {found.log_begin} to {found.log_end} "
        f"({size_words(found.log_size)}, "
        f"{show_count(found.messages, 'message')}), {show_count(len(found.files), 'index file')}, "
        f"{found.entries:,} entries compared, in {report.seconds:.2f} s"
    )
    if report.manner:
        line += f" ({', '.join(report.manner)})"
    if report.resumed_tasks:
        line += (
            f"; {report.resumed_tasks:,} of {show_count(len(report.plan.tasks), 'task')} taken over from an earlier run"
        )
    if found.expired_entries:
        line += f"; {found.expired_entries:,} entries point before the log begins: their messages have expired"
    if found.log_begin_now > found.log_begin:
        line += f"; its beginning has expired meanwhile: the log begins at {found.log_begin_now} now"
    if found.unreadable is not None:
        line += f"; behind its end stands {printable(found.unreadable)}"
    yield line
    for gap in found.expired[:_CUTS_SHOWN]:
        yield f"not covered: log bytes {gap.begin} to {gap.end}: they expired before they could be read"
    for gap in found.gaps[:_CUTS_SHOWN]:
        size = gap.end - gap.begin
        yield f"not covered: log bytes {gap.begin} to {gap.end} ({size_words(size)}): {printable(gap.reason)}"
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


def repair_seconds(report: AuditReport) -> float | None:
    """How long a repair of the holes would take, roughly, at the rate of this audit; None where it would do nothing."""
    holes = zip(report.audit.holes, report.causes, strict=True)
    size = sum(hole.size for hole, cause in holes if cause.what not in {_PENDING, *LOG_CAUSES})
    if not size or not report.bytes_read or report.seconds <= 0:
        return None
    return _READS * size * report.seconds / report.bytes_read


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


def zone_name() -> str:
    """What this machine's clock shows, as ``CET, UTC+01:00``."""
    now = time.localtime()
    minutes = now.tm_gmtoff // 60
    offset = f"UTC{'-' if minutes < 0 else '+'}{abs(minutes) // 60:02d}:{abs(minutes) % 60:02d}"
    return "UTC" if not minutes else f"{now.tm_zone}, {offset}"


def _holes(report: AuditReport) -> list[str]:
    audit = report.audit
    if not audit.holes:
        return []
    number = max(range(len(audit.holes)), key=lambda at: audit.holes[at].keys)
    hole, cause = audit.holes[number], report.causes[number]
    span = show_span(hole.begin_timestamp, hole.end_timestamp, report.standing.looked_at)
    words = f"{span}, {show_size(hole.size)}, {cause.words}"
    return [f"one hole, {words}" if audit.hole_count == 1 else f"{audit.hole_count:,} holes, the largest {words}"]


def _gaps(report: AuditReport) -> list[str]:
    # What is missing from the log, and what of it cannot be read.
    found = []
    for is_missing, words in ((True, "missing from the middle of the log"), (False, "of the log not readable")):
        gaps = [gap for gap in report.audit.gaps if gap.is_missing == is_missing]
        if gaps:
            entries = sum(gap.entries for gap in gaps)
            named = f", and {entries:,} {'entry names' if entries == 1 else 'entries name'} messages there"
            size = show_size(sum(gap.end - gap.begin for gap in gaps))
            found.append(f"{size} {words}{named if entries else ''}")
    return found


def _rounded(seconds: float) -> str:
    if seconds < 1:
        return "a second"
    return show_duration(round(seconds) * 1000 if seconds < 60 else round(seconds / 60) * 60_000)
