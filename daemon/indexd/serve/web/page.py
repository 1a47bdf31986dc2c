"""The page: the form as it stands in the address, the answer to it as HTML, and the page around both, from templates.

All that is put into a template is escaped there; what a terminal would obey is written as an escape.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cache
from importlib.resources import files
from typing import Any, Literal
from urllib.parse import urlencode

import jinja2
from markupsafe import Markup

from indexd import __version__
from indexd.config.units import parse_millis, printable
from indexd.errors import IndexdError, UsageError
from indexd.pages.wording import counted, show_duration, show_size, show_utc
from indexd.query import Answer, Coverage, Data, Hit, NotFound, OffsetAnswer
from indexd.query import source as reasons
from indexd.query.message import Body, message_fields, unpack_body
from indexd.query.questions import ByKey, ByMessage, ByQueueOffset, ByTime, Question, make_question
from indexd.serve.queries import EMPTY_COVERED, FOUND, result_of

#: A part of the page, and how the search ended, as the status counts it.
Shown = tuple[Markup, str]
_SCRIPT = "text/javascript; charset=utf-8"
#: What is served under /static, by name: its media type.
ASSETS = {
    **dict.fromkeys(("theme.js", "page.js", "live.js", "panels.js", "draw.js", "show.js"), _SCRIPT),
    "page.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
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
MODES = {"exact": "every message that matches", "rocketmq": "what the broker would answer"}
MOST_DEFAULT = 64
_INDEX_TYPES: dict[str, Literal["U", "T"]] = {"unique": "U", "tags": "T"}
_HINTS = {
    "queue": "write them as 0/123",
    "id": f"if it is what a producer printed, search for it as {WAYS['unique'].lower()}",
}
# Names in the address -> fields.
_PARAMETERS = {
    "by": "by", "topic": "topic", "q": "q", "from": "begin", "to": "end", "max": "most", "mode": "mode",
    "before": "before", "view": "view", "zone": "zone",
}  # fmt: skip
_TEXT_SIZE_MAX = 256 << 10
_HEX_SIZE_MAX = 8 << 10
# In a body line ends and tabs are as they are; on the page what a terminal may obey, when it is read there.
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_CONTROL_OF_PAGE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True)
class SearchForm:
    """Each field is the text that was typed. ``view``: how a body is shown; ``zone``: what times without one are in."""

    by: str = "key"
    topic: str = ""
    q: str = ""
    begin: str = ""
    end: str = ""
    most: str = ""
    mode: str = "exact"
    before: str = ""
    view: str = ""
    zone: str = ""

    @classmethod
    def of(cls, parameters: Mapping[str, str]) -> SearchForm:
        """From the address; what is not known there is passed over."""
        given = {field: parameters[key].strip() for key, field in _PARAMETERS.items() if parameters.get(key)}
        if given.get("by") not in WAYS:
            given["by"] = "key"
        return cls(**given)

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

    def search(self, by: str, topic: str, q: str = "", **more: str) -> str:
        """The address of another search."""
        return SearchForm(by=by, topic=topic, q=q, zone=self.zone, **more).link()

    def question(self) -> Question:
        """What is asked; UsageError says what to correct."""
        what = WAYS[self.by].lower()
        if self.by in OF_TOPIC and not self.topic:
            raise UsageError("which topic?", f"a {what} is looked for within one topic; write its name")
        if not self.q:
            raise UsageError("what is to be found?", f"write the {what}")
        number, most = self.q.replace(",", "").replace(" ", ""), self.most or MOST_DEFAULT
        model: type[Question] = ByMessage
        given: dict[str, Any] = {"topic": self.topic, "max": most}
        match self.by:
            case "offset" | "id":
                given = {self.by: self.q if self.by == "id" else number}
            case "time":
                model, given = ByTime, {"time": self.moment(self.q)}
            case "queue":
                queue, _, offset = number.partition("/")
                model, given = ByQueueOffset, given | {"queue": queue, "offset": offset}
            case _:
                times = {"begin": self.begin, "end": self.end}
                given |= {name: self.moment(text) for name, text in times.items() if text}
                mode = "rocketmq" if self.mode == "rocketmq" else "exact"
                if self.before and mode == "exact":
                    given["before"] = self.before
                model, given = ByKey, given | {"key": self.q, "mode": mode, "index_type": _INDEX_TYPES.get(self.by)}
        try:
            return make_question(model, given)
        except UsageError as error:
            raise UsageError(str(error.args[0]), _HINTS.get(self.by, "correct it")) from None

    def moment(self, text: str, now: int | None = None) -> int:
        """A time in ms; UsageError if it is none."""
        now = int(time.time() * 1000) if now is None else now
        if text.lower() == "now":
            return now
        try:
            if text.startswith("-") and text[-1].isalpha():
                return now - parse_millis(text[1:])
            if text.isascii() and text.isdigit():
                return int(text)
            moment = datetime.fromisoformat(text)
            zone = datetime.fromisoformat(f"2000-01-01T00:00{self.zone}").tzinfo or UTC
        except ValueError:
            hint = "write 2026-11-22 03:15, -15m, -1h, -7d, or milliseconds since 1970"
            raise UsageError(f"{text[:80]!r} is no time", hint) from None
        aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=zone)
        return (aware - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)


def render_page(form: SearchForm, answer: Markup | None, row: Mapping[str, Any] | None) -> str:
    """The whole page. ``row`` is the status, None for who may not see it: then there is only the form."""
    whose = "indexd" if row is None else f"indexd: {row['cluster']} / {row['nodeId']}"
    title = (f"{form.q or form.topic} - {whose}" if form.is_anything else whose)[:200]
    return render(
        "page.html", version=__version__, title=title, whose=whose, row=row, form=form, answer=answer, ways=WAYS,
        modes=MODES, of_topic=" ".join(sorted(OF_TOPIC)), of_index=" ".join(sorted(BY_INDEX)), most=MOST_DEFAULT,
    )  # fmt: skip


def answer_to(data: Data, form: SearchForm, size_max: int) -> Shown:
    """Look it up and write it down; raises IndexdError. ``size_max``: most bytes of a body."""
    question, note = form.question(), None
    found: Any = question.answer(data.index)
    if isinstance(question, ByKey):
        return _by_key(form, question, found)
    if isinstance(question, ByQueueOffset):
        return _by_queue(form, found)
    if isinstance(question, ByTime):
        if found.phy_offset is None:
            return _nothing(form, found.coverage, found.why or reasons.BEHIND_LAST)
        found, note = data.message(found.phy_offset), "The first message of the log that was stored then or later."
    if isinstance(found, NotFound):
        return render("answer.html", kind="no-message", form=form, lines=[f"{found.reason}."]), EMPTY_COVERED
    own = SearchForm(by="offset", topic=form.topic, q=str(found.phy_offset), view=form.view, zone=form.zone)
    shown = {"row": message_fields(found), "body": body_view(own, unpack_body(found), size_max)}
    return render("answer.html", kind="message", form=own, found=found, note=note, **shown), FOUND


def problem_section(error: IndexdError) -> Markup:
    """An error as the page shows it: what happened, and what to do."""
    return render("answer.html", kind="problem", words=str(error.args[0]), hint=error.hint)


def _by_key(form: SearchForm, asked: ByKey, answer: Answer) -> Shown:
    if not answer.hits:
        return _nothing(form, answer.coverage, answer.why or reasons.ABSENT)
    title = counted(len(answer.hits), "message")
    if answer.truncated is not None:
        title = f"{'older ones: ' if form.before else 'the newest '}{title}"
    given = asked.model_dump(exclude_defaults=True)
    links = [("JSON", "/api/v1/messages/by-key?" + urlencode(given, errors="replace"), "")]
    if answer.cursor is not None:
        links.insert(0, ("older →", form.link(before=str(answer.cursor)), "next"))
    if form.before:
        links.insert(0, ("the newest", form.link(before=""), "first"))
    notes = {
        f"The search was cut off ({answer.truncated}); older goes on.": (
            answer.coverage.is_cut_off or (answer.truncated or "").startswith("walk")
        ),
        f"{answer.expired:,} entries of this key's hash point to messages that have expired.": answer.expired,
        f"{answer.unreadable:,} entries of this key's hash point to what is no message.": answer.unreadable,
        "This is what the broker would answer: it may miss messages, repeat them, or show others.": answer.last_update,
    }
    said = [words for words, is_so in notes.items() if is_so]
    return _hits(form, answer.coverage, answer.hits, title=title, links=links, notes=said)


def _by_queue(form: SearchForm, answer: OffsetAnswer) -> Shown:
    asked, links = answer.query, []
    bounds = f"The queue holds offsets {answer.min_offset:,} to {answer.max_offset:,}."
    if not answer.hits:
        more = [bounds] if answer.max_offset > 0 else []
        return _nothing(form, answer.coverage, answer.why or reasons.ABSENT, more)
    if asked.queue_offset > answer.min_offset:
        before = max(asked.queue_offset - asked.max_num, answer.min_offset)
        links.append(("← before", form.link(q=f"{asked.queue_id}/{before}"), "prev"))
    if answer.truncated:
        links.append(("go on →", form.link(q=f"{asked.queue_id}/{answer.next_offset}"), "next"))
    notes = [f"Queue offset {hit.queue_offset}: {hit.problem}." for hit in answer.hits if hit.problem is not None]
    hits = [
        hit.hit or Hit(hit.unit.phy_offset, queue_id=asked.queue_id, queue_offset=hit.queue_offset)
        for hit in answer.hits
    ]
    title = f"{counted(len(hits), 'message')} of queue {asked.queue_id}"
    return _hits(form, answer.coverage, hits, title=title, links=links, notes=[bounds, *notes])


def _hits(form: SearchForm, coverage: Coverage, hits: Sequence[Hit], **more: object) -> Shown:
    return render("answer.html", kind="hits", form=form, hits=hits, covered=_covered(form, coverage), **more), FOUND


def _nothing(form: SearchForm, coverage: Coverage, why: str, more: Sequence[str] = ()) -> Shown:
    lines, covered = [*(_reason(form, coverage, one) for one in why.split("; ")), *more], _covered(form, coverage)
    given = {"why": why.partition(":")[0], "by_index": form.by in BY_INDEX, "ways": WAYS}
    return render("answer.html", kind="nothing", form=form, lines=lines, covered=covered, **given), result_of(0, why)


def _reason(form: SearchForm, coverage: Coverage, why: str) -> str:
    # What the reason means for whoever waits for a message.
    kind, _, detail = why.partition(": ")
    what = WAYS[form.by].lower()
    in_range = " in this range of time" if form.begin or form.end else ""
    words = {
        reasons.ABSENT: f"Covered and absent: the index covers the log, and no message of this topic has this {what}"
        f"{in_range}. Topic and key are compared whole, capitals count.",
        reasons.ABSENT_BEFORE: "There are no older ones: this is the end of the pages.",
        reasons.NOT_YET_INDEXED: f"Not indexed yet: the index is {detail}. The message may be in what is still to "
        "come: search again in a moment.",
        reasons.EXPIRED: "Expired: the index knew entries for it, but the broker has removed the log they point into."
        f" The log begins at {coverage.log_begin or 0:,} now.",
        reasons.UNREADABLE: "Unreadable: there are entries for it, but where they point stands no message. "
        "Run indexd verify.",
        reasons.CUT_OFF: "Cut off: the search stopped before the end of this key's chain. Narrow the range of time.",
        reasons.NEVER_INDEXED: f"Never indexed: this index holds no {what}, as RocketMQ's of this version does not.",
        reasons.BEFORE_BEGIN: f"Before the index begins: {detail}. Older messages cannot be found here.",
        reasons.LEFT_OUT: f"Left out: {detail} could not be indexed. The message may be there.",
        reasons.BEHIND_LAST: "Behind the last message: nothing was stored there or then yet.",
    }
    return words.get(kind, f"{why}.")


def _covered(form: SearchForm, coverage: Coverage) -> str:
    words = [
        f"Covers log bytes {coverage.begin:,} to {coverage.end:,}, "
        + (reasons.why_not_complete(coverage) or "all there is"),
        "the index is being kept up to date" if coverage.daemon_pid is not None else "no daemon keeps it up to date",
        MODES["rocketmq"] if form.mode == "rocketmq" and form.by in BY_INDEX else None,
    ]
    return "; ".join(word for word in words if word) + "."


def body_view(form: SearchForm, body: Body, size_max: int) -> dict[str, Any]:
    """The body in the asked view, else in the one that suits it; ``size_max``: most bytes of it that are shown."""
    data, most, hex_most = body.data, min(_TEXT_SIZE_MAX, size_max), min(_HEX_SIZE_MAX, size_max)
    # Not so strict as Body.text: what turns text around or joins signs is shown as an escape.
    text = data.decode("utf-8", "replace")
    is_text = "\ufffd" not in text and not _CONTROL.search(text)
    indented = _indented(text) if is_text and len(data) <= most else None
    views = {} if indented is None else {"json": indented}
    views |= {"text": data[:most].decode("utf-8", "replace"), "hex": _hex(data[:hex_most])}
    fitting = next(iter(views)) if is_text else "hex"
    view = form.view if form.view in views else fitting
    size = hex_most if view == "hex" else most
    # Line ends and tabs stay; other controls, and what turns text around, become escapes.
    visible = "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in views[view])
    return {"body": body, "shown_size": size, "views": list(views), "view": view, "text": visible, "form": form}


def _indented(text: str) -> str | None:
    # None for what is no JSON, and for what would lose by it: digits of a number, a name that stands twice.
    with suppress(ValueError, RecursionError):
        shown = json.dumps(json.loads(text), ensure_ascii=False, indent=2)
        if shown[:1] in "{[" and "".join(shown.split()) == "".join(text.split()):
            return shown
    return None


def _hex(data: bytes) -> str:
    lines = []
    for place in range(0, len(data), 16):
        row = data[place : place + 16]
        digits = f"{row[:8].hex(' ')}  {row[8:].hex(' ')}".ljust(48)
        signs = "".join(chr(byte) if 0x20 <= byte < 0x7F else "·" for byte in row)
        lines.append(f"{place:08x}  {digits}  {signs}\n")
    return "".join(lines)


@cache
def asset(name: str) -> bytes:
    """The bytes of one of ASSETS."""
    return files("indexd.serve.web").joinpath(name).read_bytes()


def render(template: str, **context: object) -> Markup:
    """A template of this package; all that is put into it is escaped."""
    return Markup(_environment().get_template(template).render(**context))


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
        "short": lambda text: printable(text[:199]),
        "sentence": lambda words: words[:1].upper() + words[1:],
    }
    return made


def _finalize(value: Any) -> Any:
    if isinstance(value, str) and not isinstance(value, Markup):
        return _CONTROL_OF_PAGE.sub(lambda met: met[0].encode("unicode_escape").decode("ascii"), value)
    return "" if value is None else value


def _age(millis: int) -> str:
    passed = int(time.time() * 1000) - millis
    return f"{show_duration(passed)} ago" if passed >= 0 else f"{show_duration(-passed)} ahead"
