"""Asked: what the form says, as it stands in the address of the page, and what it means.

The page around an answer: its head, the form, and what is known of the daemon when it is asked for.

Where hits lie, in time and in the log: SVG whose places are per cent, so that it fits any width without a script.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta, timezone
from datetime import time as clock_time
from functools import cache
from importlib.resources import files
from string import Template
from typing import Any
from urllib.parse import urlencode

from indexd import __version__
from indexd.errors import UsageError
from indexd.pages.markup import Html, element, foreign, joined
from indexd.query import TIME_MAX, TIME_MIN, Coverage, Hit
from indexd.serve.web.wording import moment, show_count, show_duration, show_size, show_utc

#: How one may search, and what the field is called then.
WAYS = {
    "key": "Key or unique key",
    "unique": "Unique key",
    "tags": "Tags",
    "id": "Message id (offset)",
    "offset": "Physical offset",
    "queue": "Queue id / offset",
    "time": "Time in the log",
}
#: Those that are asked within a topic, and those that know a range of time.
OF_TOPIC = frozenset({"key", "unique", "tags", "queue"})
BY_INDEX = frozenset({"key", "unique", "tags"})
INDEX_TYPES = {"key": None, "unique": "U", "tags": "T"}
VIEWS = ("text", "json", "hex")
MODES = {"exact": "every message that matches", "rocketmq": "what the broker would answer"}
MOST_DEFAULT = 64

_HINT = "write 2026-11-22 03:15, 03:15, -15m, -1h, -7d, or milliseconds since 1970"
_RELATIVE = re.compile(r"-([0-9]{1,9})\s*(ms|s|m|min|h|d)", re.ASCII)
_UNITS = {"ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
_NUMBER = re.compile(r"-?[0-9]{1,19}", re.ASCII)
_ZONE = re.compile(r"([+-])([0-9]{2}):([0-9]{2})", re.ASCII)
_QUEUE = re.compile(r"\s*([0-9]{1,10})\s*[/: ]\s*([0-9]{1,19})\s*", re.ASCII)
_OFFSET_ID = re.compile(r"(?:[0-9A-Fa-f]{32}|[0-9A-Fa-f]{56})")
# Names in the address -> fields.
_PARAMETERS = {
    "by": "by", "topic": "topic", "q": "q", "from": "begin", "to": "end", "max": "most", "mode": "mode",
    "before": "before", "view": "view", "at": "at", "zone": "zone",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Asked:
    """Each field is the text that was typed; the properties read it and raise UsageError where it means nothing.

    ``view`` and ``at``: how a body is shown, and from which byte on. ``zone`` is what times without one are in.
    """

    by: str = "key"
    topic: str = ""
    q: str = ""
    begin: str = ""
    end: str = ""
    most: str = ""
    mode: str = "exact"
    before: str = ""
    view: str = ""
    at: str = ""
    zone: str = ""

    @classmethod
    def of(cls, parameters: Mapping[str, str]) -> Asked:
        """From the address; what is not known there is passed over."""
        given = {field: parameters[key].strip() for key, field in _PARAMETERS.items() if parameters.get(key)}
        asked = cls(**given)
        return replace(asked, by=asked.by if asked.by in WAYS else "key")

    @property
    def is_anything(self) -> bool:
        """Whether a search was asked for at all."""
        return bool(self.q or self.topic)

    def link(self, **changes: str) -> str:
        """The address of this search with some fields changed."""
        asked = replace(self, **changes)
        pairs = {key: getattr(asked, field) for key, field in _PARAMETERS.items()}
        given = {key: text for key, text in pairs.items() if text and (key, text) != ("mode", "exact")}
        return "?" + urlencode(given, errors="replace")

    def check(self) -> None:
        """UsageError for a form that was not filled in."""
        if self.by in OF_TOPIC and not self.topic:
            raise UsageError(
                "which topic?", f"a {WAYS[self.by].lower()} is looked for within one topic; write its name"
            )
        if not self.q:
            raise UsageError("what is to be found?", f"write the {WAYS[self.by].lower()}")

    def number(self, field: str, least: int = 0) -> int:
        """A field as a whole number of 64 bits."""
        text = getattr(self, field).replace(",", "").replace(" ", "")
        if not _NUMBER.fullmatch(text) or not least <= int(text) < 2**63:
            raise UsageError(f"{getattr(self, field)[:80]!r} is no whole number from {least} on", "correct it")
        return int(text)

    @property
    def max_num(self) -> int:
        """Most hits."""
        return self.number("most", 1) if self.most else MOST_DEFAULT

    @property
    def queue(self) -> tuple[int, int]:
        """Queue id and queue offset."""
        found = _QUEUE.fullmatch(self.q)
        if found is None or int(found[1]) >= 2**31 or int(found[2]) >= 2**63:
            raise UsageError(f"{self.q[:80]!r} is no queue id and offset", "write them as 0/123")
        return int(found[1]), int(found[2])

    @property
    def offset_id(self) -> str:
        """An offset message id."""
        if not _OFFSET_ID.fullmatch(self.q):
            raise UsageError(
                f"{self.q[:80]!r} is no offset message id: 32 or 56 hex digits",
                f"if it is what a producer printed, search for it as {WAYS['unique'].lower()}",
            )
        return self.q

    def times(self, now: int | None = None) -> tuple[int, int]:
        """First and last store time in ms, both included."""
        now = int(time.time() * 1000) if now is None else now
        begin = TIME_MIN if not self.begin else self.moment(self.begin, now)
        end = TIME_MAX if not self.end else self.moment(self.end, now)
        if begin > end:
            raise UsageError("the time range ends before it begins", "exchange From and To, or leave one empty")
        return begin, end

    def moment(self, text: str, now: int) -> int:
        """One time in ms."""
        found = self._moment(text, now)
        if found < 0:
            raise UsageError(f"{text[:80]!r} is before 1970, where no message was stored", _HINT)
        return found

    def _moment(self, text: str, now: int) -> int:
        if text.lower() == "now":
            return now
        if found := _RELATIVE.fullmatch(text):
            return now - int(found[1]) * _UNITS[found[2]]
        if _NUMBER.fullmatch(text):
            if -(2**63) <= int(text) < 2**63:
                return int(text)
            raise UsageError(f"{text!r} is no time in milliseconds", _HINT)
        zone = self._zone()
        try:
            return _millis(datetime.fromisoformat(text), zone)
        except (ValueError, OverflowError):
            return self._clock(text, now, zone)

    def _clock(self, text: str, now: int, zone: timezone) -> int:
        # 03:15 is the last time that it was so late.
        try:
            clock = clock_time.fromisoformat(text)
            today: date = datetime.fromtimestamp(now / 1000, tz=zone).date()
            found = _millis(datetime.combine(today, clock), zone)
            return found if found <= now else found - _UNITS["d"]
        except (ValueError, OverflowError, OSError):
            raise UsageError(f"{text[:80]!r} is no time", _HINT) from None

    def _zone(self) -> timezone:
        found = _ZONE.fullmatch(self.zone)
        if found is None or int(found[2]) > 23 or int(found[3]) > 59:
            return UTC
        offset = timedelta(hours=int(found[2]), minutes=int(found[3]))
        return timezone(-offset if found[1] == "-" else offset)


def _millis(moment: datetime, zone: timezone) -> int:
    aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=zone)
    return (aware - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)


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
    whose = "indexd" if row is None else f"indexd: {row['cluster']} / {row['nodeId']}"
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
    if row.get("compiling"):
        return "", "Opening: compiling, once; later starts load what is compiled now"
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
        element("datalist", id="topics"),
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
        _field("topic", "Topic", _input("topic", asked.topic, maxlength=1000, list="topics"), "grow of-topic"),
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


_BINS = 60
_BARS_HEIGHT = 38
_RUG_HEIGHT = 10
# What is there is seen: no part of the log is drawn narrower.
_PART_SHARE_MIN = 0.004


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of the log ``[begin, end)`` and what is the matter with it, a class of page.css."""

    begin: int
    end: int
    kind: str
    words: str


def timeline(hits: Sequence[Hit], begin: int, end: int) -> Html:
    """Hits by store time between two times in ms: bars of how many, and a mark for each."""
    times = [(hit.phy_offset, hit.store_timestamp) for hit in hits if hit.store_timestamp is not None]
    span = max(end - begin, 1)
    counts = [0] * _BINS
    for _, timestamp in times:
        counts[min(max((timestamp - begin) * _BINS // span, 0), _BINS - 1)] += 1
    highest = max(*counts, 1)
    bars = [
        element(
            "rect",
            element("title", _bin_words(number, count, begin, span)),
            class_="bar",
            x=f"{100 * number / _BINS:.3f}%",
            width=f"{100 / _BINS - 0.25:.3f}%",
            y=_BARS_HEIGHT - _height(count, highest),
            height=_height(count, highest),
        )
        for number, count in enumerate(counts)
        if count
    ]
    top, bottom = _BARS_HEIGHT + 3, _BARS_HEIGHT + 3 + _RUG_HEIGHT
    marks = [_mark(phy_offset, (time - begin) / span, top, bottom) for phy_offset, time in times]
    drawn = element(
        "svg", bars, element("line", class_="axis", x1="0", x2="100%", y1=_BARS_HEIGHT + 1, y2=_BARS_HEIGHT + 1), marks,
        class_="timeline", width="100%", height=bottom, role="img",
        aria_label=f"{len(times)} hits between {show_utc(begin)} and {show_utc(end)} UTC",
    )  # fmt: skip
    return element("figure", drawn, element("p", moment(begin), moment(end), class_="ends"), class_="where")


def log_strip(coverage: Coverage, hits: Sequence[Hit]) -> Html:
    """The log from its oldest byte that matters to where the answer ends, with a mark for each hit."""
    parts = parts_of(coverage)
    begin, end = parts[0].begin, max(part.end for part in parts)
    span = max(end - begin, 1)
    boxes = [
        element(
            "rect",
            element("title", f"{part.words}: {show_count(part.begin)} to {show_count(part.end)}"),
            class_=f"part {part.kind}",
            x=f"{100 * (part.begin - begin) / span:.3f}%",
            width=f"{100 * max((part.end - part.begin) / span, _PART_SHARE_MIN):.3f}%",
            y=0,
            height=12,
        )
        for part in parts
        if part.end > part.begin
    ]
    marks = [_mark(hit.phy_offset, (hit.phy_offset - begin) / span, 15, 25) for hit in hits]
    drawn = element(
        "svg", boxes, marks, class_="strip", width="100%", height=25 if marks else 12, role="img",
        aria_label=f"log bytes {begin} to {end}: " + ", ".join(part.words for part in parts),
    )  # fmt: skip
    size = show_size(end - begin)
    words = joined(
        element("span", show_count(begin)), element("span", f"{size} of log"), element("span", show_count(end))
    )
    return element("figure", drawn, element("p", words, class_="ends"), class_="where")


def parts_of(coverage: Coverage) -> list[Part]:
    """The log in the order of its bytes; holes come last, to be drawn over the rest. Never empty."""
    log_begin = coverage.begin if coverage.log_begin is None else coverage.log_begin
    begin, end = coverage.begin, coverage.end
    parts = []
    if log_begin > begin:
        parts.append(Part(begin, min(log_begin, end), "expired", "expired"))
    elif log_begin < begin:
        parts.append(Part(log_begin, begin, "hole", "before the index begins"))
    parts.append(Part(min(max(begin, log_begin), end), end, "durable", "indexed"))
    parts += [Part(gap.begin, gap.end, "hole", f"not indexed, {gap.reason}") for gap in coverage.uncovered]
    return parts


def _mark(phy_offset: int, share: float, top: int, bottom: int) -> Html:
    x = f"{100 * min(max(share, 0.001), 0.999):.3f}%"
    return element("line", class_="mark", data_offset=str(phy_offset), x1=x, x2=x, y1=top, y2=bottom)


def _height(count: int, highest: int) -> int:
    return max(round(_BARS_HEIGHT * count / highest), 3)


def _bin_words(number: int, count: int, begin: int, span: int) -> str:
    first, last = begin + span * number // _BINS, begin + span * (number + 1) // _BINS
    return f"{count} between {show_utc(first)} and {show_utc(last)} UTC"
