"""The page's last sections: the cost of a crash, which queries are wrong, the ConsumeQueues, how it was measured."""

from __future__ import annotations

from indexd.audit.page.tables import local, plain_table, table, table_head
from indexd.audit.queues_found import QueueFound
from indexd.audit.report import AuditReport
from indexd.audit.samples.answers import Share
from indexd.pages.markup import Child, Html, element, foreign
from indexd.pages.wording import show_duration, show_name, show_share, show_size

_ROWS_MAX = 100
_GAPS_MAX = 20
_DIFFERENCES_SHOWN = 3
_TOPIC_LONGEST = 60


def crash_section(report: AuditReport) -> Html:
    """What the broker's next unclean start does to the index."""
    lines = [element("p", foreign(_sentence(line))) for line in report.crash.lines()]
    before, thrown = report.crash.dispatch_timestamp, report.crash.thrown
    if report.crash.lost_keys and before:
        lines.append(element("p", "Lost would be keys of what was stored before ", local(before), ".", class_="soft"))
    shown = [element("li", element("code", foreign(name))) for name in thrown[:_ROWS_MAX]]
    files = element("details", element("summary", "The files"), element("ul", shown)) if len(thrown) > 1 else None
    return element("section", element("h2", "What a crash would cost"), lines, files, id="crash")


def queries_section(report: AuditReport) -> Html | None:
    """How much of what is true the broker's own answers miss, in time ranges, and what they add to it."""
    answers = report.answers
    if answers is None:
        return None
    rows = [_share_row(share) for share in answers.shares if share.queries]
    head = [
        "range", "queries", "true hits", "missed", "by a hole", "by the time test", "by an early end",
        "cut off", "answers", "wrong answers",
    ]  # fmt: skip
    return element(
        "section",
        element("h2", "What the broker answers today"),
        [element("p", _sentence(line)) for line in answers.lines()],
        plain_table(head, rows, "Queries in time ranges") if rows else None,
        id="queries",
    )


def _share_row(share: Share) -> list[object]:
    missed = show_share(share.missed / share.hits) if share.hits else "-"
    added = show_share(share.added / share.answers) if share.answers else "-"
    found: list[object] = [share.width, share.queries, share.hits, missed, share.hole, share.time, share.early_end]
    return [*found, share.cut_off, share.answers, added]


def queues_section(report: AuditReport) -> Html | None:
    """The ConsumeQueues, if they were looked at: in words, and those with findings."""
    queues = report.queues
    if queues is None:
        return None
    # What is said of single queues stands in the table.
    lines = [
        element("p", foreign(_sentence(line.removeprefix("ConsumeQueues: "))))
        for line in queues.lines()
        if not line.startswith(" ")
    ]
    left = len(queues.found) - _ROWS_MAX
    more = element("p", f"And {left:,} more; --json has them all.", class_="soft") if left > 0 else None
    body = [_queue_row(queue) for queue in queues.found[:_ROWS_MAX]]
    head = table_head("topic", ("n", "queue"), ("n", "differences"), "which, and the first ones")
    shown = table(head, body, "ConsumeQueues", "queues") if body else None
    return element("section", element("h2", "ConsumeQueues"), lines, shown, more, id="queues")


def _queue_row(queue: QueueFound) -> Html:
    kinds = ", ".join(f"{count:,} {what}" for what, count in queue.counts.items())
    first = [element("li", foreign(finding.text)) for finding in queue.findings[:_DIFFERENCES_SHOWN]]
    return element(
        "tr",
        element("td", foreign(show_name(queue.topic, _TOPIC_LONGEST))),
        element("td", f"{queue.queue_id:,}", class_="n"),
        element("td", element("b", f"{queue.total:,}", class_="bad"), class_="n"),
        element("td", element("p", foreign(kinds)), element("ul", first) if first else None),
    )


def measured_section(report: AuditReport) -> Html:
    """What was read, by which rules, and what was left out."""
    audit = report.audit
    facts: list[tuple[str, Child]] = [
        ("log", _log_words(report)),
        ("messages", f"{audit.messages:,}, of which {audit.keyed_messages:,} have keys: {audit.keys:,} in all"),
        ("entries", _entry_words(report)),
        ("index as of", [_flavour_words(report), "; ", _layout_words(report)]),
        ("broker", _lock_words(report)),
        ("read", _read_words(report)),
    ]
    if audit.gaps:
        shown = [
            element("li", f"bytes {gap.begin:,} to {gap.end:,}: ", foreign(gap.reason))
            for gap in audit.gaps[:_GAPS_MAX]
        ]
        more = len(audit.gaps) - len(shown)
        facts.append(("not read", element("ul", shown, element("li", f"and {more:,} more") if more else None)))
    if audit.unreadable is not None:
        facts.append(("behind the log", foreign(audit.unreadable)))
    rows = [[element("dt", name), element("dd", words)] for name, words in facts]
    return element("section", element("h2", "How it was measured"), element("dl", rows), id="measured")


def _log_words(report: AuditReport) -> str:
    audit = report.audit
    segments = len(report.standing.segments)
    words = f"bytes {audit.log_begin:,} to {audit.log_end:,}, in {segments:,} segment{'' if segments == 1 else 's'}"
    if audit.log_begin_now > audit.log_begin:
        words += f"; its beginning has expired meanwhile, it begins at {audit.log_begin_now:,} now"
    return f"{words}; every message was decoded once"


def _entry_words(report: AuditReport) -> str:
    audit = report.audit
    words = f"{audit.entries:,} of the index files held against the messages"
    if audit.expired_entries:
        words += f"; {audit.expired_entries:,} point before the log begins, to messages that have expired"
    if audit.left_out_entries:
        words += f"; {audit.left_out_entries:,} point to log that could not be read"
    return words


def _flavour_words(report: AuditReport) -> str:
    eras = [
        f"RocketMQ {era.flavour}" + (f" from log byte {era.begin:,} on" if number else "")
        for number, era in enumerate(report.audit.eras)
    ]
    if report.audit.is_flavour_given:
        how = "as given"
    else:
        has_entries = any(file.entries for file in report.audit.files)
        how = "told by the entries themselves" if has_entries else "as configured: there are no entries to tell"
    return f"{', '.join(eras)} ({how})"


def _layout_words(report: AuditReport) -> str:
    layout = report.plan.layout
    return f"{layout.hash_slot_num:,} slots and {layout.index_num:,} entries a file, {show_size(layout.file_size)}"


def _lock_words(report: AuditReport) -> Child:
    standing = report.standing
    lock = standing.lock
    alive = {True: "alive", False: "none alive", None: "not known whether one is alive"}[lock.alive]
    words = alive if lock.pid is None else f"{alive}, process {lock.pid}"
    words += ", abort file there" if standing.has_abort else ", no abort file"
    words += ", no checkpoint" if standing.checkpoint is None else ""
    return [words, "; " if lock.why else None, foreign(lock.why) if lock.why else None]


def _read_words(report: AuditReport) -> str:
    rate = f", {show_size(report.bytes_read / report.seconds)}/s" if report.seconds > 0 else ""
    words = f"{show_size(report.bytes_read)} in {show_duration(int(report.seconds * 1000))}{rate}"
    words += "".join(f"; {manner}" for manner in report.manner)
    if report.resumed_tasks:
        words += f"; {report.resumed_tasks:,} of {len(report.plan.tasks):,} tasks taken over from an earlier run"
    return words + "; nothing of the store was changed"


def _sentence(line: str) -> str:
    return f"{line[:1].upper()}{line[1:]}{'' if line.endswith(('.', ':')) else '.'}"
