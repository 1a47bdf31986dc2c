"""The page's tables: holes, findings, index files. Each is bounded; what is left out is counted."""

from __future__ import annotations

from collections import Counter, defaultdict
from datetime import UTC, datetime

from indexd.audit.ground import BrokerFile
from indexd.audit.holes import Hole
from indexd.audit.meanings import meaning_of
from indexd.audit.part import FileSeen
from indexd.audit.report import AuditReport
from indexd.config.units import printable
from indexd.findings import Finding
from indexd.pages.markup import Child, Html, element, foreign
from indexd.pages.wording import show_local, show_size

HOLES_SHOWN = 100
_HOLES_UNFOLDED = 20
FILES_SHOWN = 120
_FINDINGS_SHOWN = 5
_FINDINGS_UNFOLDED = 100
_TEXT_LONGEST = 400


def holes_shown(report: AuditReport) -> list[int]:
    """Numbers of the holes with the most keys, in the order of the log; each has a row with the id of ``hole_id``."""
    holes = report.audit.holes
    return sorted(sorted(range(len(holes)), key=lambda number: -holes[number].keys)[:HOLES_SHOWN])


def hole_id(number: int) -> str:
    """What the row of a hole is called."""
    return f"hole-{number + 1}"


def holes_section(report: AuditReport) -> Html | None:
    """Every hole that is shown: where and when, what it costs, why, and what speaks for that."""
    audit, shown = report.audit, holes_shown(report)
    if not shown:
        return None
    first = sorted(sorted(shown, key=lambda number: -audit.holes[number].keys)[:_HOLES_UNFOLDED])
    rest = [number for number in shown if number not in first]
    folded: Child = None
    if rest:
        folded = element("details", element("summary", f"{len(rest):,} smaller ones"), _holes_table(rest, report))
    left = audit.hole_count - len(shown)
    more = None
    if left:
        keys = audit.missing_keys - sum(audit.holes[number].keys for number in shown)
        more = element("p", f"And {left:,} smaller still, {keys:,} keys in all.", class_="soft")
    words = (
        "Ranges of the log whose keys no query finds. A hole goes on until a message comes whose keys are all findable."
    )
    return _section("holes", "Holes", element("p", words), _holes_table(first, report), folded, more)


def _holes_table(numbers: list[int], report: AuditReport) -> Html:
    head = table_head("", "stored", ("n", "keys"), ("n", "messages"), ("n", "log"), "why")
    body = [_hole_row(number, report.audit.holes[number], report) for number in numbers]
    return table(head, body, "Holes", "holes")


def _hole_row(number: int, hole: Hole, report: AuditReport) -> Html:
    cause = report.causes[number]
    evidence = element("ul", [element("li", _text(line)) for line in cause.evidence]) if cause.evidence else None
    end = "the end of the log" if hole == report.audit.tail else f"{hole.end:,}"
    return element(
        "tr",
        element("th", f"{number + 1}", scope="row"),
        element("td", span(hole.begin_timestamp, hole.end_timestamp), class_="when"),
        element("td", f"{hole.keys:,}", class_="n", data_label=noun("key", hole.keys)),
        element("td", f"{hole.messages:,}", class_="n", data_label=noun("message", hole.messages)),
        element("td", show_size(hole.size), class_="n", data_label="of log"),
        element(
            "td",
            element("b", foreign(_sentence(cause.words))),
            evidence,
            element("p", f"log bytes {hole.begin:,} to {end}", class_="soft"),
            class_="why",
        ),
        id=hole_id(number),
    )


def findings_section(report: AuditReport) -> Html | None:
    """What does not hold, by kind: what it means, where, and the first ones in full."""
    counts = report.audit.counts
    if not counts:
        return None
    found: dict[str, list[Finding]] = defaultdict(list)
    for finding in report.audit.findings:
        found[finding.what].append(finding)
    body = [_finding_row(what, count, found[what]) for what, count in sorted(counts.items(), key=lambda row: -row[1])]
    head = table_head("kind", ("n", "count"), "what that means, and the first ones")
    return _section("findings", "Findings", table(head, body, "Findings", "findings"))


def _finding_row(what: str, count: int, found: list[Finding]) -> Html:
    first = [_finding(finding) for finding in found[:_FINDINGS_SHOWN]]
    rest = found[_FINDINGS_SHOWN:_FINDINGS_UNFOLDED]
    unfolded: Child = None
    if rest:
        summary = element("summary", f"{len(rest):,} more" + (f" of {count:,}" if count > len(found) else ""))
        unfolded = element("details", summary, element("ul", [_finding(finding) for finding in rest]))
    return element(
        "tr",
        element("td", element("code", printable(what)), class_="kind"),
        element("td", f"{count:,}", class_="n"),
        element("td", element("p", foreign(meaning_of(what))), element("ul", first) if first else None, unfolded),
    )


def _finding(finding: Finding) -> Html:
    return element("li", element("code", foreign(finding.file)), f" byte {finding.position:,}: ", _text(finding.text))


def files_section(report: AuditReport) -> Html:
    """The index files: what part of the log each covers, how full it is, and whether its chains hold."""
    audit = report.audit
    wrong = Counter(finding.file.removeprefix("index/") for finding in audit.findings)
    unread = [file for file in report.plan.files if not file.is_readable]
    if not audit.files and not unread:
        return _section("files", "Index files", element("p", "There is none."))
    shown, left = _files_shown(audit.files, wrong)
    head = table_head(
        "name", "full", ("n", "entries"), ("n", "findings"), ("n", "lost links"), ("n", "keys a slot"),
        ("n", "expired"), "stored", ("n", "log bytes"),
    )  # fmt: skip
    body = [_file_row(file, report, wrong[file.name]) for file in shown]
    body += [_unread_row(file) for file in unread[:FILES_SHOWN]]
    more = (
        element("p", f"And {left:,} more, none of them with a finding." if left else "", class_="soft")
        if left
        else None
    )
    words = (
        "Lost links: entries that no search reaches. Keys a slot: how many entries a search walks past, on average. "
        "Expired: entries whose messages are gone, as they should be in old files."
    )
    return _section(
        "files", "Index files", element("p", words, class_="soft"), table(head, body, "Index files", "files"), more
    )


def _files_shown(files: tuple[FileSeen, ...], wrong: Counter[str]) -> tuple[list[FileSeen], int]:
    # Those with findings first, then the newest; in the order of their names.
    if len(files) <= FILES_SHOWN:
        return list(files), 0
    ordered = sorted(range(len(files)), key=lambda at: (not (wrong[files[at].name] or files[at].unreachable), -at))
    return [files[at] for at in sorted(ordered[:FILES_SHOWN])], len(files) - FILES_SHOWN


def _file_row(file: FileSeen, report: AuditReport, findings: int) -> Html:
    room = report.plan.layout.index_num - 1
    share = min(file.entries / room, 1.0) if room > 0 else 0.0
    bar = element("span", element("span", style=f"width: {100 * share:.1f}%"), class_="bar", aria_hidden="true")
    chain = f"{file.entries / file.used_slots:.2f}" if file.used_slots else "-"
    stored: Child = "-"
    if file.entries:
        stored = span(file.begin_timestamp, file.end_timestamp)
    return element(
        "tr",
        element("td", element("code", foreign(file.name)), class_="name"),
        # Rounded down: only a file that is full is 100 % full.
        element("td", element("span", bar, f"{int(100 * share)} %", class_="full")),
        element("td", f"{file.entries:,}", class_="n"),
        _count_cell(findings),
        _count_cell(file.unreachable),
        element("td", chain, class_="n"),
        element("td", f"{file.expired:,}" if file.expired else "-", class_="n"),
        element("td", stored, class_="when"),
        element("td", f"{file.begin:,} to {file.end:,}" if file.entries else "-", class_="n"),
    )


def _unread_row(file: BrokerFile) -> Html:
    name = element("td", element("code", foreign(file.name)))
    return element("tr", name, element("td", element("b", "of another size, not read", class_="bad"), colspan=8))


def _count_cell(count: int) -> Html:
    return element("td", element("b", f"{count:,}", class_="bad") if count else "-", class_="n")


def table(head: Html, body: list[Html], label: str, kind: str) -> Html:
    """A table that scrolls by itself, with the keyboard, too, where it is wider than the screen."""
    whole = element("table", element("thead", head), element("tbody", body), class_=kind)
    return element("div", whole, class_="scroll", role="region", aria_label=label, tabindex=0)


def table_head(*columns: str | tuple[str, str]) -> Html:
    """The first row of a table: the words of each column, or its class and its words."""
    pairs = [("", column) if isinstance(column, str) else column for column in columns]
    return element("tr", [element("th", text, class_=kind or None, scope="col") for kind, text in pairs])


def stands_right(value: object) -> bool:
    """Whether that is a number, or a share in per cent, or none."""
    return value is None or isinstance(value, int | float) or (isinstance(value, str) and value.endswith(("%", "-")))


def plain_table(head: list[str], rows: list[list[object]], label: str) -> Html:
    """A table of whatever there is; numbers stand to the right."""

    def cell(value: object) -> Html:
        is_number = stands_right(value)
        text = f"{value:,}" if isinstance(value, int | float) else "-" if value is None else str(value)
        return element("td", _text(text), class_="n" if is_number else None)

    body = [element("tr", [cell(value) for value in row]) for row in rows]
    numbers = [all(stands_right(row[at]) for row in rows) for at in range(len(head))]
    columns = [("n" if is_number else "", text) for is_number, text in zip(numbers, head, strict=True)]
    return table(table_head(*columns), body, label, "plain")


def _section(name: str, title: str, *children: Child) -> Html:
    return element("section", element("h2", title), *children, id=name)


def local(millis: int, *, is_same_day: bool = False) -> Html:
    """A time on this machine's clock, to the second; in UTC for machines and where the pointer rests on it."""
    text = show_local(millis)
    if text.endswith("ms"):
        return element("span", text)
    utc = datetime.fromtimestamp(millis / 1000, tz=UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return element("time", text[11:] if is_same_day else text, datetime=utc, title=utc)


def span(begin: int, end: int) -> Child:
    """From one time to another; the day once where it is the same, the time once, too."""
    first, last = show_local(begin), show_local(end)
    if first == last:
        return local(begin)
    return [local(begin), " to ", local(end, is_same_day=first[:10] == last[:10])]


def noun(word: str, count: int) -> str:
    """The word for one, or for another number."""
    return word if count == 1 else f"{word}s"


def _text(text: str) -> Html:
    return foreign(text if len(text) <= _TEXT_LONGEST else text[: _TEXT_LONGEST - 1] + "…")


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:]
