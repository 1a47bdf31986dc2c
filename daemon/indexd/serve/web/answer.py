"""The answer to a search: the hits and where they lie, one message with its body, or why there is none."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple
from urllib.parse import urlencode

from markupsafe import Markup

from indexd.commitlog.decoder import Message
from indexd.errors import IndexdError
from indexd.pages.wording import show_size
from indexd.query import TIME_MAX, TIME_MIN, Answer, Coverage, Data, Hit, NotFound, OffsetAnswer
from indexd.query import coverage as reasons
from indexd.query.message import Body, message_fields, unpack_body
from indexd.query.questions import ByKey
from indexd.serve.queries import result_of
from indexd.serve.web.page import render
from indexd.serve.web.search_form import BY_INDEX, INDEX_TYPES, MODES, WAYS, SearchForm

_TEXT_SIZE_MAX = 256 << 10
_HEX_SIZE_MAX = 8 << 10
_HEX_WIDTH = 16
_INDENT_MAX = 40
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+', re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_NAMES = {"json": "JSON", "text": "text", "hex": "hex"}
_TYPES = {0x0: "", 0x4: "prepared", 0x8: "commit", 0xC: "rollback"}
_BINS, _BARS_HEIGHT = 60, 38
# What is there is seen: no part of the log is drawn narrower.
_PART_SHARE_MIN = 0.004


class Link(NamedTuple):
    """A way from here."""

    words: str
    href: str
    rel: str = ""
    title: str = ""


class Shown(NamedTuple):
    """A part of the page, and how the search ended: a name of board.RESULTS."""

    html: Markup
    result: str


def answer_to(data: Data, form: SearchForm, size_max: int) -> Shown:
    """Look it up and write it down; raises IndexdError. ``size_max``: most bytes of a body."""
    form.check()
    if form.by in BY_INDEX:
        return _by_index(data, form)
    if form.by == "queue":
        return _by_queue(data, form)
    note = None
    if form.by == "time":
        answer = data.log_at_time(form.moment(form.q, int(time.time() * 1000)))
        if answer.phy_offset is None:
            return _nothing(form, answer.coverage, answer.why or reasons.BEHIND_LAST)
        where: int | str = answer.phy_offset
        note = "The first message of the log that was stored then or later."
    else:
        where = form.number("q") if form.by == "offset" else form.offset_id
    found = data.message(where)
    if isinstance(found, NotFound):
        links = [Link("search again", form.link())]
        if form.by == "id" and form.topic:
            links.append(Link("search as unique key", form.link(by="unique")))
        lines = [f"{found.reason[:1].upper()}{found.reason[1:]}."]
        html = render("answer.html", kind="nothing", why=None, links=links, lines=lines, log=None)
        return Shown(html, "empty_covered")
    return Shown(message_section(form, found, size_max, note), "found")


def problem_section(error: IndexdError) -> Markup:
    """An error as the page shows it: what happened, and what to do."""
    return render("answer.html", kind="problem", words=str(error.args[0]), hint=error.hint)


def _by_index(data: Data, form: SearchForm) -> Shown:
    begin, end = form.times()
    before = form.number("before") if form.before and form.mode == "exact" else None
    asked = ByKey(
        topic=form.topic, key=form.q, max=form.max_num, begin=None if begin == TIME_MIN else begin, end=end,
        mode="rocketmq" if form.mode == "rocketmq" else "exact", before=before, index_type=INDEX_TYPES[form.by],
    )  # fmt: skip
    answer = asked.answer(data.index)
    if not answer.hits:
        return _nothing(form, answer.coverage, answer.why or reasons.ABSENT)
    title = f"{len(answer.hits):,} {'message' if len(answer.hits) == 1 else 'messages'}"
    if answer.truncated is not None:
        title = f"{'older ones: ' if form.before else 'the newest '}{title}"
    links = [Link("JSON", _api_of(asked), title="the same from the API")]
    if answer.cursor is not None:
        links.insert(0, Link("older →", form.link(before=str(answer.cursor)), rel="next"))
    if form.before:
        links.insert(0, Link("the newest", form.link(before=""), rel="first"))
    notes = [{"class_": "note", "words": words} for words in _notes(answer)]
    html = render(
        "answer.html", kind="hits", title=title, links=links, notes=notes, time=timeline(answer.hits, begin, end),
        log=log_strip(answer.coverage, answer.hits), hits=answer.hits, form=form,
        covered=_covered(form, answer.coverage),
    )  # fmt: skip
    return Shown(html, "found")


def _notes(answer: Answer) -> list[str]:
    notes = []
    if answer.truncated is not None and answer.truncated.startswith("walk"):
        notes.append(f"The search stopped after {answer.truncated[5:]} entries of this key's chain; older goes on.")
    elif answer.coverage.is_cut_off:
        notes.append("The search took too long and stopped before the end of this key's chain; older goes on.")
    if answer.expired:
        notes.append(f"{answer.expired:,} entries of this key's hash point to messages that have expired.")
    if answer.unreadable:
        notes.append(f"{answer.unreadable:,} entries of this key's hash point to what is no message.")
    if answer.last_update is not None:
        notes.append("This is what the broker would answer: it may miss messages, repeat them, or show others.")
    return notes


def _by_queue(data: Data, form: SearchForm) -> Shown:
    queue_id, queue_offset = form.queue
    answer = data.by_queue(form.topic, queue_id, queue_offset, max_num=min(form.max_num, 1000))
    if not answer.hits:
        return _nothing(form, answer.coverage, answer.why or reasons.ABSENT, queue=answer)
    hits = [
        hit.hit or Hit(hit.unit.phy_offset, queue_id=queue_id, queue_offset=hit.queue_offset) for hit in answer.hits
    ]
    links = []
    if queue_offset > answer.min_offset:
        before = max(queue_offset - form.max_num, answer.min_offset)
        links.append(Link("← before", form.link(q=f"{queue_id}/{before}"), rel="prev"))
    if answer.truncated:
        links.append(Link("go on →", form.link(q=f"{queue_id}/{answer.next_offset}"), rel="next"))
    notes = [{"class_": "soft", "words": _bounds(answer)}]
    notes += [
        {"class_": "note bad", "words": f"Queue offset {hit.queue_offset}: {hit.problem}."}
        for hit in answer.hits
        if hit.problem is not None
    ]
    html = render(
        "answer.html", kind="hits", links=links, notes=notes, time=None, hits=hits,
        log=log_strip(answer.coverage, hits),
        title=f"{len(hits):,} {'message' if len(hits) == 1 else 'messages'} of queue {queue_id}", form=form,
        covered=_covered(form, answer.coverage),
    )  # fmt: skip
    return Shown(html, "found")


def _bounds(queue: OffsetAnswer) -> str:
    return f"The queue holds offsets {queue.min_offset:,} to {queue.max_offset:,}."


def _nothing(form: SearchForm, coverage: Coverage, why: str, queue: OffsetAnswer | None = None) -> Shown:
    lines = [_reason(form, coverage, one) for one in why.split("; ")]
    links = [Link("search again", form.link())]
    if (form.begin or form.end) and form.by in BY_INDEX:
        links.append(Link("search all of time", form.link(begin="", end="", before="")))
    if form.by != "key" and form.by in BY_INDEX:
        links.append(Link(f"search as {WAYS['key'].lower()}", form.link(by="key")))
    if queue is not None and queue.max_offset > 0:
        lines.append(_bounds(queue))
    html = render(
        "answer.html", kind="nothing", why=why.partition(":")[0], links=links, lines=lines,
        log=log_strip(coverage, ()), covered=_covered(form, coverage),
    )  # fmt: skip
    return Shown(html, result_of(0, why))


def _reason(form: SearchForm, coverage: Coverage, why: str) -> str:
    # What the reason means for whoever waits for a message.
    kind, _, detail = why.partition(": ")
    what = f"{WAYS[form.by].lower()}" if form.by in WAYS else "key"
    in_range = " in this range of time" if form.begin or form.end else ""
    words = {
        reasons.ABSENT: f"Covered and absent: the index covers the log, and no message of this topic has this {what}"
        f"{in_range}. Topic and key are compared whole, capitals count.",
        reasons.ABSENT_BEFORE: "There are no older ones: this is the end of the pages.",
        reasons.NOT_YET_INDEXED: f"Not indexed yet: the index is {_behind(detail)}. The message may be in "
        "what is still to come: search again in a moment.",
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
    return words.get(kind, f"{why[:1].upper()}{why[1:]}.")


def _behind(detail: str) -> str:
    # "1234 bytes behind", with a unit that is read at a glance.
    number = "".join(c for c in detail if c.isdigit())
    return f"{detail.partition(number)[0]}{show_size(int(number))} behind the log" if number else detail


def _covered(form: SearchForm, coverage: Coverage) -> str:
    words = [
        f"Covers log bytes {coverage.begin:,} to {coverage.end:,}, "
        + (reasons.why_not_complete(coverage) or "all there is"),
        "the index is being kept up to date" if coverage.daemon_pid is not None else "no daemon keeps it up to date",
        MODES["rocketmq"] if form.mode == "rocketmq" and form.by in BY_INDEX else None,
    ]
    return "; ".join(word for word in words if word) + "."


def _api_of(asked: ByKey) -> str:
    given = asked.model_dump(exclude_defaults=True)
    return "/api/v1/messages/by-key?" + urlencode(given, errors="replace")


def message_section(form: SearchForm, found: Message, size_max: int, note: str | None = None) -> Markup:
    """The message as a card; ``note`` is a line above it, ``size_max`` the most bytes of its body."""
    own = replace(form, by="offset", q=str(found.phy_offset), begin="", end="", most="", mode="exact", before="")
    queue = SearchForm(by="queue", topic=found.topic, most="16", zone=own.zone)
    around = queue.link(q=f"{found.queue_id}/{max(found.queue_offset - 7, 0)}")
    # The next frame begins where this one ends; where a segment ends there the page says so.
    following = own.link(q=str(found.phy_offset + found.size), view="", at="")
    links = [
        Link("its queue", around, title="messages around it in its queue"),
        Link("next in the log", following, title="the message that begins where this one ends"),
        Link("link", own.link(), title="an address of this message"),
    ]
    row = message_fields(found)
    prepared = found.prepared_transaction_offset
    fields = [
        ("queue / offset", f"{found.queue_id} / {found.queue_offset:,}", ""),
        ("size", f"{found.size:,} bytes", ""),
        ("store host", row["storeHost"], ""),
        ("message id", row["offsetMsgId"], ""),
        ("system flag", f"0x{found.sys_flag:x}", _TYPES[found.sys_flag & 0xC]),
        ("tags code", str(found.tags_code), ""),
        ("reconsumed", f"{found.reconsume_times} times" if found.reconsume_times else "", ""),
        ("prepared at", f"{prepared:,}" if prepared else "", ""),
        ("flag", str(found.flag) if found.flag else "", ""),
        ("body CRC", f"{found.body_crc:08x}", ""),
    ]
    # What can be searched for is a link to that search.
    searches = {"KEYS": ("key", found.keys), "UNIQ_KEY": ("unique", None), "TAGS": ("tags", None)}
    properties = []
    for name, value in found.properties.items():
        by, texts = searches.get(name, ("", []))
        ways = [(text, SearchForm(by=by, topic=found.topic, q=text).link()) for text in (texts or [value]) if by]
        properties.append((name, value, ways))
    return render(
        "answer.html", kind="message", found=found, row=row, links=links, note=note, fields=fields,
        properties=properties, topic_link=SearchForm(by="key", topic=found.topic).link(),
        body=body_view(own, unpack_body(found), size_max),
    )  # fmt: skip


def body_view(form: SearchForm, body: Body, size_max: int) -> dict[str, Any]:
    """The body in the asked view, else in the one that suits it; ``size_max``: most bytes of it that are shown."""
    data, text = body.data, _text_of(body.data)
    is_json = text is not None and len(data) <= min(_TEXT_SIZE_MAX, size_max) and _is_json(text)
    views = [view for view, is_there in (("json", is_json), ("text", True), ("hex", True)) if is_there]
    fitting = "json" if is_json and (text or "").lstrip()[:1] in "{[" else "text" if text is not None else "hex"
    view = form.view if form.view in views else fitting
    words = f"{len(data):,} bytes"
    if body.compression is not None:
        words += f", {body.compression}" + (", unpacked" if body.is_unpacked else ", as stored: not unpacked here")
    tabs = [{"words": _NAMES[one], "href": form.link(view=one, at=""), "is_current": one == view} for one in views]
    shown: dict[str, Any] = {"size": len(data), "words": words, "tabs": tabs, "view": view, "cut": None}
    if view == "json":
        return shown | {"text": _visible(_indented(text or ""))}
    if view == "hex":
        return shown | _hex(form, data, size_max)
    most = min(_TEXT_SIZE_MAX, size_max)
    if len(data) > most:
        shown["cut"] = f"The first {show_size(most)} of {show_size(len(data))}; the API has all of it."
    return shown | {"text": _visible(data[:most].decode("utf-8", "replace"))}


def _text_of(data: bytes) -> str | None:
    # Not so strict as Body.text: what turns text around or joins signs is shown as an escape.
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return None if _CONTROL.search(text) else text


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return False
    return True


def _indented(text: str) -> str:
    # The text's own tokens, only placed anew: no number is rounded, no name that stands twice is lost.
    depth, parts = 0, []
    for before, token in pairwise(["", *_TOKEN.findall(text)]):
        depth -= token in "}]"
        is_empty = before in "{[" and token in "}]"
        if before and not is_empty and (before in "{[," or token in "}]"):
            parts.append("\n" + "  " * min(depth, _INDENT_MAX))
        parts.append(": " if token == ":" else token)
        depth += token in "{["
    return "".join(parts)


def _visible(text: str) -> str:
    # Line ends and tabs stay; other controls, and what turns text around, become escapes.
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode("ascii") for c in text)


def _hex(form: SearchForm, data: bytes, size_max: int) -> dict[str, Any]:
    step = max(min(_HEX_SIZE_MAX, size_max), _HEX_WIDTH)
    at = form.number("at") if form.at else 0
    first = min(at, max(len(data) - 1, 0)) // _HEX_WIDTH * _HEX_WIDTH
    last = min(first + step, len(data))
    lines, half = [], _HEX_WIDTH // 2
    for place in range(first, last, _HEX_WIDTH):
        row = data[place : min(place + _HEX_WIDTH, last)]
        digits = f"{row[:half].hex(' ')}  {row[half:].hex(' ')}".ljust(3 * _HEX_WIDTH)
        signs = "".join(chr(byte) if 0x20 <= byte < 0x7F else "·" for byte in row)
        lines.append((f"{place:08x}", digits, signs))
    pages: list[Link] = []
    if first > 0:
        pages.append(Link("← before", form.link(view="hex", at=str(max(first - step, 0)))))
    if last < len(data):
        pages.append(Link("go on →", form.link(view="hex", at=str(last))))
    return {"lines": lines, "pages": pages, "bounds": f"bytes {first:,} to {last:,} of {len(data):,}"}


# Where hits lie, in time and in the log: places in per cent, so that they fit any width without a script.


def timeline(hits: Sequence[Hit], begin: int, end: int) -> dict[str, Any]:
    """Hits by store time, in what was asked for or, where that is open, in what was found: bars, a mark for each."""
    times = [(hit.phy_offset, hit.store_timestamp) for hit in hits if hit.store_timestamp is not None]
    stamps = [stamp for _, stamp in times] or [0]
    first = min(stamps) if begin == TIME_MIN else begin
    last = max(stamps) if end == TIME_MAX else end
    first, last = (first, last) if last > first else (first - 500, first + 500)
    span, counts = last - first, [0] * _BINS
    for _, stamp in times:
        counts[min(max((stamp - first) * _BINS // span, 0), _BINS - 1)] += 1
    bars = [
        {
            "x": f"{100 * number / _BINS:.3f}%",
            "width": f"{100 / _BINS - 0.25:.3f}%",
            "height": max(round(_BARS_HEIGHT * count / max(counts)), 3),
            "count": count,
            "begin": first + span * number // _BINS,
            "end": first + span * (number + 1) // _BINS,
        }
        for number, count in enumerate(counts)
        if count
    ]
    marks = [_mark(phy_offset, (stamp - first) / span) for phy_offset, stamp in times]
    return {"begin": first, "end": last, "bars": bars, "marks": marks}


def log_strip(coverage: Coverage, hits: Sequence[Hit]) -> dict[str, Any]:
    """The log from its oldest byte that matters to where the answer ends, with a mark for each hit."""
    log_begin = coverage.begin if coverage.log_begin is None else coverage.log_begin
    begin, end = coverage.begin, coverage.end
    parts = []
    if log_begin > begin:
        parts.append((begin, min(log_begin, end), "expired", "expired"))
    elif log_begin < begin:
        parts.append((log_begin, begin, "hole", "before the index begins"))
    parts.append((min(max(begin, log_begin), end), end, "durable", "indexed"))
    # Holes come last, to be drawn over the rest.
    parts += [(gap.begin, gap.end, "hole", f"not indexed, {gap.reason}") for gap in coverage.uncovered]
    first, last = parts[0][0], max(part[1] for part in parts)
    span = max(last - first, 1)
    shown = [
        {
            "begin": part_begin,
            "end": part_end,
            "kind": kind,
            "words": words,
            "x": f"{100 * (part_begin - first) / span:.3f}%",
            "width": f"{100 * max((part_end - part_begin) / span, _PART_SHARE_MIN):.3f}%",
        }
        for part_begin, part_end, kind, words in parts
    ]
    marks = [_mark(hit.phy_offset, (hit.phy_offset - first) / span) for hit in hits]
    return {"begin": first, "end": last, "parts": shown, "marks": marks}


def _mark(phy_offset: int, share: float) -> dict[str, object]:
    return {"phy_offset": phy_offset, "x": f"{100 * min(max(share, 0.001), 0.999):.3f}%"}
