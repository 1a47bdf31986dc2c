"""Renders an audit as one HTML page that needs nothing else: the verdict, the log as a strip, and every list.

It has no script and asks no other host for anything; its Content-Security-Policy says so. Jinja2 escapes what comes
from the store; each list is bounded, and what is left out is counted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

from indexd import __version__
from indexd.audit.notes import meaning_of
from indexd.audit.report import AuditReport
from indexd.audit.strip import draw_strip, swatch
from indexd.audit.verdict import (
    broker_line,
    coverage_lines,
    flavour_line,
    is_pending,
    show_findable,
    verdict_line,
    verdict_state,
    zone_name,
)
from indexd.config.units import printable
from indexd.findings import Finding
from indexd.pages.markup import Html, element, foreign, page_style
from indexd.pages.wording import show_local, show_name, show_number, show_share, show_size

# Rows of a table; of the holes so many are unfolded, and of each kind of finding so many are shown.
_ROWS_MAX, _HOLES_UNFOLDED, _FINDINGS_MAX = 100, 20, 100
_TEXT_LONGEST = 400


def audit_page(report: AuditReport) -> str:
    """The page as text."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "number": show_number,
        "full": "{:,}".format,
        "size": show_size,
        "share": show_share,
        "name": show_name,
        "line": printable,
        "foreign": _foreign,
        "local": _local,
        "noun": lambda word, count: word if count == 1 else f"{word}s",
        "sentence": lambda words: words[:1].upper() + words[1:],
    }
    return environment.from_string(_text("page.html")).render(
        report=report,
        audit=report.audit,
        version=__version__,
        style=Markup(page_style() + _text("page.css")),
        verdict=printable(verdict_line(report)),
        state=verdict_state(report),
        findable=show_findable(report),
        broker=broker_line(report).removeprefix("broker: "),
        measured=[flavour_line(report.audit), *coverage_lines(report)],
        zone=zone_name(),
        top=_ROWS_MAX,
        findings=_findings(report),
        unread=[file for file in report.plan.files if not file.is_readable],
        files=_files(report),
        **_holes(report),
    )


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


def _holes(report: AuditReport) -> dict[str, Any]:
    # The strip, and the holes with the most keys, in the order of the log.
    audit = report.audit
    by_keys = sorted(range(len(audit.holes)), key=lambda number: -audit.holes[number].keys)[:_ROWS_MAX]
    strip = draw_strip(report, {number: f"#hole-{number + 1}" for number in by_keys})
    return {
        "strip": Markup(strip) if audit.log_end > audit.log_begin else None,
        "legend": [(Markup(sample), words) for sample, words in _legend(report)],
        "holes": by_keys,
        "large": sorted(by_keys[:_HOLES_UNFOLDED]),
        "small": sorted(by_keys[_HOLES_UNFOLDED:]),
        "small_keys": audit.missing_keys - sum(audit.holes[number].keys for number in by_keys),
    }


def _legend(report: AuditReport) -> list[tuple[Html, str]]:
    audit, pending = report.audit, [is_pending(cause) for cause in report.causes]
    kinds = [
        ("log", "findable", True),
        ("hole", "a hole: keys are not findable", not all(pending)),
        ("pending", "not dispatched yet", any(pending)),
        ("gap", "could not be read", bool(audit.gaps)),
        ("file", "an index file", bool(audit.files)),
        ("file wrong", "one with findings", bool(audit.index_findings) and bool(audit.files)),
    ]
    return [(swatch(kind), words) for kind, words, is_met in kinds if is_met]


def _findings(report: AuditReport) -> list[tuple[str, int, str, list[Finding]]]:
    found: dict[str, list[Finding]] = defaultdict(list)
    for finding in report.audit.findings:
        found[finding.what].append(finding)
    counts = sorted(report.audit.counts.items(), key=lambda row: -row[1])
    return [(what, count, meaning_of(what), found[what][:_FINDINGS_MAX]) for what, count in counts]


def _files(report: AuditReport) -> list[tuple[Any, int, int]]:
    # Those with findings and the newest, in the order of their names: the file, its findings, how full it is.
    wrong = Counter(finding.file.removeprefix("index/") for finding in report.audit.findings)
    found = list(enumerate(report.audit.files))
    found.sort(key=lambda row: (not (wrong[row[1].name] or row[1].unreachable), -row[0]))
    room = max(report.plan.layout.index_num - 1, 1)
    # Rounded down: only a file that is full is 100 % full.
    return [(file, wrong[file.name], min(100 * file.entries // room, 100)) for _, file in sorted(found[:_ROWS_MAX])]
