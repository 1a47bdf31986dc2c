"""The report as one HTML page that needs nothing else: plots, tables, light and dark, on a screen and on a phone.

No script is in it. Its Content-Security-Policy allows none and no address at all: a browser fetches nothing, and runs
nothing that came out of the log.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from indexd import __version__
from indexd.pages.markup import page_style
from indexd.pages.wording import show_duration, show_name, show_number, show_share, show_size, show_utc
from indexd.spark.stats import wording
from indexd.spark.stats.plots import plots_of
from indexd.spark.stats.verdict import RIGHT, TOO_FEW
from indexd.storage.disk import Disk

Row = dict[str, Any]
_HERE = __package__ or "indexd.spark.stats"


def write_page(report: Row, disk: Disk, path: Path, top: int) -> None:
    """Write the page to ``path``, in place of what is there; its folder is made. Raises DiskError."""
    disk.make_dir(path.parent)
    disk.write_atomically(path, render_page(report, top).encode("utf-8", "replace"), durable=False)


def render_page(report: Row, top: int) -> str:
    """The page of a report (``report.to_report``), of each list the first ``top``."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "number": show_number,
        "size": show_size,
        "share": show_share,
        "duration": show_duration,
        "utc": show_utc,
        "name": show_name,
        "repeated": wording.show_repeated,
    }
    template = environment.from_string(_text("page.html"))
    return template.render(
        report=report,
        top=top,
        version=__version__,
        style=Markup(page_style() + _text("page.css")),
        plots={name: Markup(plot) for name, plot in plots_of(report).items()},
        twice=_twice(report),
        range_words=wording.RANGE_WORDS,
        is_right=bool(report["index"]) and report["index"]["verdict"]["answer"] == RIGHT,
        is_bad=bool(report["index"]) and report["index"]["verdict"]["answer"] == TOO_FEW,
    )


def _text(name: str) -> str:
    return files(_HERE).joinpath(name).read_text(encoding="utf-8")


def _twice(report: Row) -> list[Row]:
    rows = {row["phyOffset"]: row for row in (*report["hotUniqKeys"]["top"], *report["repeatedUniqKeys"])}
    return sorted(rows.values(), key=lambda row: (-row["count"], row["phyOffset"]))
