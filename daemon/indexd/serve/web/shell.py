"""The page around an answer: its head, the form, and what is known of the daemon when it is asked for."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from string import Template
from typing import Any

from indexd import __version__
from indexd.pages.markup import Html, element, foreign, joined
from indexd.serve.web.asked import BY_INDEX, MODES, MOST_DEFAULT, OF_TOPIC, WAYS, Asked
from indexd.serve.web.wording import show_count, show_duration, show_size

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
_BEHIND_MILLIS_MAX = 60_000
_CURRENT_MILLIS_MAX = 10_000
_TIMES = ("-15m", "-1h", "-6h", "-24h", "-7d")
_ADDRESS = re.compile(r"https?://[A-Za-z0-9.:\[\]-]{1,300}", re.ASCII)


@cache
def asset(name: str) -> bytes:
    """The bytes of one of ASSETS."""
    return files("indexd.serve.web").joinpath(name).read_bytes()


@cache
def assets_version() -> str:
    """Another text whenever any asset is another."""
    return hashlib.sha256(b"".join(asset(name) for name in ASSETS)).hexdigest()[:16]


def render_page(asked: Asked, answer: Html | None, row: Row | None, address: str = "") -> str:
    """The whole page. ``row`` is the board's, None for who may not see it: then there is only the form.

    ``address`` is where the browser found it, as ``http://HOST:PORT``.
    """
    whose = "indexd" if row is None else f"{row['cluster']} / {row['nodeId']}"
    words = f"{asked.q or asked.topic} - {whose}" if asked.is_anything else whose
    kind, state = ("", "") if row is None else state_of(row)
    return Template(_skeleton()).substitute(
        version=__version__,
        title=joined(words[:200]),
        assets=f"/static/{assets_version()}",
        heading=foreign(whose),
        where=_where(row),
        state_kind=kind,
        state=joined(state),
        problems=joined([element("li", foreign(problem)) for problem in problems_of(row or {})]),
        form=_form(asked),
        answer=answer or "",
        noscript=_without_script(is_refused=row is None, address=address),
    )


def state_of(row: Row) -> tuple[str, str]:
    """(class of page.css, one sentence) of how it stands; ``panels.js`` says the same."""
    phase = row["phase"]
    if phase == "recovering":
        done, total = row["recovering"]["done"], row["recovering"]["total"]
        return "", f"Recovering, {row['recovering']['step']}: {100 * done / total if total else 0:.0f} %"
    if phase != "running":
        return "", f"{phase.capitalize()}"
    if row.get("problems"):
        return "bad", f"Indexing waits ({', '.join(row['problems'])}); what is indexed already can be found"
    if row.get("corrupt"):
        return "bad", "Standing at bytes that are no frame; what is before them can be found"
    size, millis = row.get("dispatchBehindBytes", 0), row.get("dispatchBehindMilliseconds", 0)
    words = f"{show_size(size)}, {show_duration(millis)} behind the log"
    if millis < _CURRENT_MILLIS_MAX:
        return "good", f"Up to date: {show_count(row.get('messages', 0))} messages can be found"
    return "bad" if millis >= _BEHIND_MILLIS_MAX else "", f"Catching up: {words}"


def problems_of(row: Row) -> list[str]:
    """Each thing that somebody should look at, one line; ``panels.js`` says the same."""
    found = [f"{stage}: {line}" for stage, line in row.get("problems", {}).items()]
    stalled = row.get("stalled", {}).items()
    found += [f"{stage}: nothing has moved for {show_duration(int(1000 * s))}" for stage, s in stalled if s]
    corrupt = row.get("corrupt")
    if corrupt:
        found.append(f"the log cannot be read on at offset {corrupt['offset']}: {corrupt['reason']}")
    gaps = row.get("uncovered", [])
    if gaps:
        size = sum(gap[1] - gap[0] for gap in gaps)
        words = "1 stretch" if len(gaps) == 1 else f"{len(gaps)} stretches"
        found.append(f"{words} of the log cannot be found: {show_size(size)}")
    broker = row.get("broker", {})
    found += broker.get("unsafe", [])
    # In mode shadow a broker may be stopped whenever its operator likes; in mode offload the two belong together.
    if broker.get("alive") is False and row.get("mode") == "offload":
        found.append(": ".join(filter(None, ("the broker is not running", broker.get("why")))))
    return found


def _without_script(*, is_refused: bool, address: str) -> Html:
    ways = ("/api/v1/status", "/metrics")
    status, metrics = (element("a", way, href=way) for way in ways)
    figures = (status, ", ", metrics, " and in ", element("code", "indexd status"))
    if not is_refused:
        words = "What moves on this page (lag, rates, files, events) needs JavaScript; searching does not."
        return element("p", words, " The figures are also at ", figures, ".", class_="soft")
    where = address if _ADDRESS.fullmatch(address) else "http://HOST:PORT"
    curl = 'curl -H "Authorization: Bearer $(cat TOKEN_FILE)"'
    lines = [f"{curl} '{where}{way}'\n" for way in ("/api/v1/messages/by-key?topic=TOPIC&key=KEY", ways[0])]
    return element(
        "div",
        element("h2", "This server wants a token"),
        element("p", "A browser without JavaScript cannot give it: nothing is found and nothing is shown here."),
        element("p", "Turn JavaScript on for this page, or ask with the token's file:"),
        element("pre", lines, class_="code wrap"),
        class_="panel bad",
    )


@cache
def _skeleton() -> str:
    return files("indexd.serve.web").joinpath("page.html").read_text(encoding="utf-8")


def _where(row: Row | None) -> Html:
    if row is None:
        return Html("")
    pairs = (("store", row["store"]), ("data", row["data"]), ("mode", row["mode"]), ("format", row["flavour"]))
    return joined([element("span", f"{key} ", element("code", foreign(value))) for key, value in pairs])


def _form(asked: Asked) -> Html:
    return element(
        "form",
        element("div", _what(asked), class_="row"),
        element("div", _which(asked), class_="row of-index"),
        element("datalist", [element("option", value=time) for time in _TIMES], id="times"),
        element("input", type="hidden", name="zone", id="zone-given", value=asked.zone),
        id="search",
        class_="panel search",
        role="search",
        method="get",
        action="/",
        data_of_topic=" ".join(sorted(OF_TOPIC)),
        data_of_index=" ".join(sorted(BY_INDEX)),
    )


def _what(asked: Asked) -> tuple[Html, ...]:
    ways = [element("option", words, value=by, selected=by == asked.by) for by, words in WAYS.items()]
    return (
        _field("by", "Search by", element("select", ways, id="by", name="by")),
        _field("topic", "Topic", _input("topic", asked.topic, maxlength=1000), "grow of-topic"),
        _field("q", "Key, id or offset", _input("q", asked.q, type="search", maxlength=8000), "grow more"),
        element("button", "Search", type="submit", class_="go"),
    )


def _which(asked: Asked) -> tuple[Html, ...]:
    modes = [element("option", words, value=mode, selected=mode == asked.mode) for mode, words in MODES.items()]
    most = _input("max", asked.most, placeholder=str(MOST_DEFAULT), inputmode="numeric")
    zone = element("span", "UTC", id="zone-words")
    return (
        _field("from", "From", _input("from", asked.begin, list="times", placeholder="the beginning"), "time"),
        _field("to", "To", _input("to", asked.end, list="times", placeholder="now"), "time"),
        _field("max", "Most", most, "few"),
        _field("mode", "Answer with", element("select", modes, id="mode", name="mode")),
        element("p", "Times in ", zone, ": 2026-11-22 03:15, 03:15, -1h, milliseconds", class_="soft hint"),
    )


def _field(name: str, words: str, control: Html, class_: str = "") -> Html:
    return element("label", element("span", words), control, for_=name, class_=f"field {class_}".strip())


def _input(name: str, value: str, **more: str | int) -> Html:
    attributes: dict[str, str | int] = {"type": "text", "autocomplete": "off", "spellcheck": "false", **more}
    return element("input", id=name, name=name, value=value, autocapitalize="off", **attributes)
