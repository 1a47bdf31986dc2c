"""render_page: the page around an answer, from templates: its head, the form, and what is known of the daemon."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

from indexd import __version__
from indexd.config.units import printable
from indexd.pages.wording import show_duration, show_size, show_utc
from indexd.serve.web.search_form import BY_INDEX, MODES, MOST_DEFAULT, OF_TOPIC, WAYS, SearchForm

Row = Mapping[str, Any]
#: What is served under /static, by name: its media type.
ASSETS = {
    "page.css": "text/css; charset=utf-8",
    "theme.js": "text/javascript; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "live.js": "text/javascript; charset=utf-8",
    "panels.js": "text/javascript; charset=utf-8",
    "draw.js": "text/javascript; charset=utf-8",
    "show.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
_NAME_LENGTH_MAX = 200
# What a terminal may obey, when the page is read there.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@cache
def asset(name: str) -> bytes:
    """The bytes of one of ASSETS."""
    return files("indexd.serve.web").joinpath(name).read_bytes()


def render(template: str, **context: object) -> Markup:
    """A template of this package; all that is put into it is escaped."""
    return Markup(_environment().get_template(template).render(**context))


def render_page(form: SearchForm, answer: Markup | None, row: Row | None) -> str:
    """The whole page. ``row`` is the status, None for who may not see it: then there is only the form."""
    whose = "indexd" if row is None else f"indexd: {row['cluster']} / {row['nodeId']}"
    title = (f"{form.q or form.topic} - {whose}" if form.is_anything else whose)[:200]
    return render(
        "page.html", version=__version__, title=title, whose=whose, row=row, form=form, answer=answer, ways=WAYS,
        modes=MODES, of_topic=" ".join(sorted(OF_TOPIC)), of_index=" ".join(sorted(BY_INDEX)), most=MOST_DEFAULT,
    )  # fmt: skip


@cache
def _environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("indexd.serve.web", "."), autoescape=True, finalize=_finalize,
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    made.filters |= {
        "count": "{:,}".format,
        "size": show_size,
        "utc": lambda millis: show_utc(millis, seconds=True),
        "age": _age,
        "line": printable,
        "short": lambda text: printable(text[: _NAME_LENGTH_MAX - 1]),
        "sentence": lambda words: words[:1].upper() + words[1:],
    }
    return made


def _finalize(value: Any) -> Any:
    if isinstance(value, str) and not isinstance(value, Markup):
        return _CONTROL.sub(lambda met: met[0].encode("unicode_escape").decode("ascii"), value)
    return "" if value is None else value


def _age(millis: int) -> str:
    passed = int(time.time() * 1000) - millis
    return f"{show_duration(passed)} ago" if passed >= 0 else f"{show_duration(-passed)} ahead"
