"""What ``indexd audit`` says to people: the verdict first, then holes, findings, and everything that surrounds them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from indexd.cli.output import show_bytes, show_time
from indexd.config.units import printable

if TYPE_CHECKING:
    from indexd.audit import Audit, AuditReport

_FINDINGS_SHOWN = 10
_HOLES_SHOWN = 20
_CUTS_SHOWN = 5


def page_of_words(report: AuditReport) -> Iterator[str]:
    """All of it, a line each; the first is the verdict."""
    from indexd.audit.verdict import verdict_line  # noqa: PLC0415 - loads numba, and other commands need no audit

    yield verdict_line(report)
    yield from _holes(report)
    yield from _findings(report.audit)
    for answers in (report.answers, report.queues):
        yield from answers.lines() if answers is not None else ()
    if not report.homeless_entries:  # of what is built again from such a log nothing can be said
        yield from _crash(report)
    yield _broker(report)
    yield _flavour(report.audit)
    yield from _covered(report)


def _holes(report: AuditReport) -> Iterator[str]:
    found = report.audit
    # The largest, in the order of the log.
    largest = sorted(range(len(found.holes)), key=lambda at: (-found.holes[at].keys, at))[:_HOLES_SHOWN]
    for at in sorted(largest):
        hole, cause = found.holes[at], report.causes[at]
        where = "to the end of the log" if hole == found.tail else f"to {hole.end}"
        times = f"stored {show_time(hole.begin_timestamp)} to {show_time(hole.end_timestamp)}"
        lost = f"{_count(hole.keys, 'key')} of {_count(hole.messages, 'message')} not findable"
        yield f"hole: {times}, log bytes {hole.begin} {where} ({show_bytes(hole.size)}): {lost}"
        yield f"  likely cause: {cause.words}"
        for fact in cause.evidence:
            yield f"  - {printable(fact)}"
    if found.hole_count > len(largest):
        yield f"and {_count(found.hole_count - len(largest), 'smaller hole')}"


def _findings(found: Audit) -> Iterator[str]:
    from indexd.audit.meanings import meaning_of  # noqa: PLC0415 - loads numba, and other commands need no audit

    kept = defaultdict(list)
    for finding in found.findings:
        kept[finding.what].append(finding)
    for what, count in found.counts.items():
        yield f"{what}, {_count(count, 'finding')}: {meaning_of(what)}"
        for finding in kept[what][:_FINDINGS_SHOWN]:
            yield f"  {printable(finding.file)} byte {finding.position}: {printable(finding.text)}"
        more = count - min(len(kept[what]), _FINDINGS_SHOWN)
        if more:
            yield f"  and {more:,} more; --json has {'the first 100 of each file' if count > 100 else 'all of them'}"


def _crash(report: AuditReport) -> Iterator[str]:
    crash = report.crash
    for line in crash.lines():
        before = crash.dispatch_timestamp
        is_lost = crash.lost_keys and before and line.endswith("lost")
        yield f"crash: {line}" + (f": of what was stored before {show_time(before)}" if is_lost and before else "")


def _broker(report: AuditReport) -> str:
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


def _flavour(found: Audit) -> str:
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


def _covered(report: AuditReport) -> Iterator[str]:
    found = report.audit
    line = (
        f"covered: {printable(report.store)}, log bytes {found.log_begin} to {found.log_end} "
        f"({show_bytes(found.log_size)}, "
        f"{_count(found.messages, 'message')}), {_count(len(found.files), 'index file')}, "
        f"{found.entries:,} entries compared, in {report.seconds:.2f} s"
    )
    if report.manner:
        line += f" ({', '.join(report.manner)})"
    if report.resumed_tasks:
        line += f"; {report.resumed_tasks:,} of {_count(len(report.plan.tasks), 'task')} taken over from an earlier run"
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
        yield f"not covered: log bytes {gap.begin} to {gap.end} ({show_bytes(size)}): {printable(gap.reason)}"
    if len(found.gaps) > _CUTS_SHOWN:
        yield f"and {_count(len(found.gaps) - _CUTS_SHOWN, 'more range')} that could not be read"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}" if number else f"no {what}s"
