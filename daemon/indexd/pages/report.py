"""Writes a report as one HTML page: a heading, tiles, a plot and sections; it runs no script and asks no other host.

Reports are made of sections; a terminal prints the same ones. All text may come from a log: it is escaped here, and
each text stays on its line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from markupsafe import Markup

from indexd import __version__
from indexd.config.units import printable


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a report. Columns whose name begins with ``>`` hold numbers; ``bars``: a share for each row.

    ``state``: good, warn or bad, of the first words; words that begin with a blank belong to those before them.
    """

    title: str
    words: Sequence[str] = ()
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    bars: Sequence[float] = ()
    state: str = ""


def render_report(
    *,
    title: str,
    heading: str,
    state: str,
    lines: Sequence[str],
    tiles: Sequence[tuple[str, str]],
    plot: dict[str, Any] | None,
    sections: Sequence[Section],
    footer: str,
) -> str:
    """The page. ``plot`` has ``title``, ``caption`` and, all in per cent of its width and height, ``columns`` (at,
    width, title, parts of (colour, height)), ``steps``, ``silences`` (begin, end) and ``ticks`` (at, words).
    """
    import jinja2  # noqa: PLC0415 - a terminal needs no templates

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["line"] = printable
    template = environment.from_string(_text("report.html"))
    return template.render(
        title=title, heading=heading, state=state, lines=lines, tiles=tiles, plot=plot, sections=sections,
        footer=footer, version=__version__, style=Markup(_text("page.css") + _text("report.css")),
    )  # fmt: skip


def _text(name: str) -> str:
    return files("indexd.pages").joinpath(name).read_text(encoding="utf-8")
