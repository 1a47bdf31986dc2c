"""The audit as one HTML page that needs nothing else: the log as a strip with the holes drawn.

It has no script and asks no other host for anything; its Content-Security-Policy says so. What comes from the store is
escaped where it becomes an element (``config.markup``).
"""

from __future__ import annotations

from importlib.resources import files
from string import Template

from indexd import __version__
from indexd.audit.page.rest import crash_section, measured_section, queries_section, queues_section
from indexd.audit.page.strip import draw_strip, scale_of, swatch
from indexd.audit.page.tables import files_section, findings_section, hole_id, holes_section, holes_shown, local, noun
from indexd.audit.report import AuditReport
from indexd.audit.verdict import is_pending, show_findable, verdict_line, verdict_state, zone_name
from indexd.config.units import printable
from indexd.pages.markup import Html, element, foreign, joined, page_style
from indexd.pages.wording import show_number, show_size


def audit_page(report: AuditReport) -> str:
    """The page: the verdict first, then the strip, then every list, the most urgent before the rest."""
    verdict = printable(verdict_line(report))
    sections = (
        holes_section(report),
        findings_section(report),
        crash_section(report),
        queries_section(report),
        queues_section(report),
        files_section(report),
        measured_section(report),
    )
    return Template(_text("page.html")).substitute(
        version=__version__,
        title=joined(f"{verdict} - audit of {printable(report.store)}"[:300]),
        style=page_style() + _text("page.css"),
        verdict=joined(verdict[:1].upper() + verdict[1:] + "."),
        state=verdict_state(report),
        where=_where(report),
        zone=joined(zone_name()),
        tiles=_tiles(report),
        strip=_strip(report),
        sections=joined(sections),
    )


def _text(name: str) -> str:
    return files(__package__ or "indexd.audit.page").joinpath(name).read_text(encoding="utf-8")


def _where(report: AuditReport) -> Html:
    return joined(
        element("span", "audit of ", element("code", foreign(report.store))),
        element("span", "audited ", local(report.standing.looked_at)),
        element("span", broker_words(report)),
    )


def broker_words(report: AuditReport) -> str:
    """Which broker is alive, or that there is no lock file."""
    standing = report.standing
    lock = standing.lock
    if lock.alive:
        pid = "" if lock.pid is None else f", process {lock.pid}"
        return f"its broker {'runs' if lock.how == 'lock' else 'is loading'}{pid}"
    if lock.alive is None:
        return "whether a broker runs cannot be told"
    if not standing.has_lock_file:
        return "no lock file: a copy, or a store that no broker has opened"
    return "no broker runs" + (", and the last one ended without a clean stop" if standing.has_abort else "")


def _tiles(report: AuditReport) -> Html:
    audit = report.audit
    wrong = audit.index_findings
    reach = f"{show_number(audit.unreachable_keys)} of them stand in files" if audit.unreachable_keys else ""
    full = sum(file.is_full for file in report.plan.files)
    tiles = [
        _tile(show_findable(report), "of the keys findable", f"{audit.keys:,} in all", verdict_state(report)),
        _tile(show_number(audit.missing_keys), "keys not findable", reach, "bad" if audit.missing_keys else ""),
        _tile(show_number(audit.hole_count), noun("hole", audit.hole_count), "", "bad" if audit.hole_count else ""),
        _tile(show_number(wrong), noun("finding", wrong), "in the index files", "warn" if wrong else ""),
        _tile(show_size(audit.log_size), "of log", f"{show_number(audit.messages)} messages"),
        _tile(show_number(len(audit.files)), noun("index file", len(audit.files)), f"{full:,} full"),
    ]
    return element("section", tiles, class_="tiles", aria_label="In numbers")


def _tile(value: str, words: str, extra: str = "", state: str = "") -> Html:
    more = element("div", extra, class_="extra") if extra else None
    kind = f"tile {state}" if state else "tile"
    return element(
        "div", element("div", value, class_="value"), element("div", words, class_="words"), more, class_=kind
    )


def _strip(report: AuditReport) -> Html:
    audit, scale = report.audit, scale_of(report)
    head = element("h2", "The log")
    if audit.log_end <= audit.log_begin:
        return element("section", head, element("p", "There is no message in it."), id="log")
    links = {number: f"#{hole_id(number)}" for number in holes_shown(report)}
    pending = [is_pending(cause) for cause in report.causes]
    kinds = [
        ("log", "findable", True),
        ("hole", "a hole: keys are not findable", not all(pending)),
        ("pending", "not dispatched yet", any(pending)),
        ("gap", "could not be read", bool(audit.gaps)),
        ("expired", "expired", scale.first < scale.begin),
        ("behind", "behind the end of the log", scale.last > scale.end),
        ("file", "an index file", bool(audit.files)),
        ("file wrong", "one with findings", bool(audit.index_findings) and bool(audit.files)),
    ]
    legend = element(
        "ul", [element("li", swatch(kind), words) for kind, words, is_met in kinds if is_met], class_="legend"
    )
    words = "From its first byte to its last; the time below is when messages were stored."
    if any(count > 1 for count in (audit.hole_count, len(audit.holes))):
        words += " A number is that of the hole in the table; + stands where several lie too close to be told apart: "
        words += "the higher such a column, the more of the log there is in holes."
    return element("section", head, element("p", words, class_="soft"), draw_strip(report, links), legend, id="log")
