"""A message's body: as JSON with its lines made, as text, and as hex with its bytes beside it.

One message: its fields, properties and body, and the way to its neighbours.

The answer to a search: the hits and where they lie, or why there are none and what that leaves open.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlencode

from indexd.commitlog.decoder import Message
from indexd.errors import IndexdError
from indexd.pages.markup import Child, Html, element, joined
from indexd.query import (
    TIME_MAX,
    TIME_MIN,
    Answer,
    Coverage,
    Data,
    Hit,
    KeyQuery,
    NotFound,
    OffsetAnswer,
    query_rocketmq,
)
from indexd.query import coverage as reasons
from indexd.query.message import Body, message_fields, unpack_body
from indexd.query.source import NO_FOLDER
from indexd.serve.web.shell import BY_INDEX, INDEX_TYPES, MODES, WAYS, Asked, log_strip, timeline
from indexd.serve.web.wording import age, moment, name, show_count, show_size

_TEXT_SIZE_MAX = 256 << 10
_HEX_SIZE_MAX = 8 << 10
_HEX_WIDTH = 16
_INDENT_MAX = 40
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+', re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_NAMES = {"json": "JSON", "text": "text", "hex": "hex"}


def body_section(asked: Asked, body: Body, size_max: int) -> Html:
    """The body in the asked view, else in the one that suits it; ``size_max``: most bytes of it that are shown."""
    text = _text_of(body.data)
    is_json = text is not None and len(body.data) <= min(_TEXT_SIZE_MAX, size_max) and _is_json(text)
    views = [view for view, is_there in (("json", is_json), ("text", True), ("hex", True)) if is_there]
    fitting = "json" if is_json and (text or "").lstrip()[:1] in "{[" else "text" if text is not None else "hex"
    view = asked.view if asked.view in views else fitting
    tabs = [
        element("a", _NAMES[one], class_="view", href=asked.link(view=one, at=""), aria_current=one == view and "true")
        for one in views
    ]
    head = element("h3", "Body ", element("span", _size_words(body), class_="soft"))
    bar = element("div", head, element("nav", tabs, aria_label="Body as", class_="views"), class_="bar")
    if not body.data:
        return element("div", head, element("p", "It is empty.", class_="soft"), class_="body")
    if view == "json":
        shown = element("pre", joined(*_json_lines(text or "")), class_="code", tabindex=0)
    elif view == "text":
        shown = _as_text(body.data, min(_TEXT_SIZE_MAX, size_max))
    else:
        shown = _as_hex(asked, body.data, size_max)
    return element("div", bar, shown, class_="body")


def _size_words(body: Body) -> str:
    words = f"{show_count(len(body.data))} bytes"
    if body.compression is not None:
        words += f", {body.compression}" + (", unpacked" if body.is_unpacked else ", as stored: not unpacked here")
    return words


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


def _json_lines(text: str) -> Iterator[Html | str]:
    # The text's own tokens, only placed anew: no number is rounded, no name that stands twice is lost.
    depth, before = 0, ""
    tokens = _TOKEN.findall(text)
    for number, token in enumerate(tokens):
        following = tokens[number + 1] if number + 1 < len(tokens) else ""
        if token in "}]" and before not in "{[":
            depth -= 1
            yield _line(depth)
        elif token in "}]":
            depth -= 1
        elif before and before in "{[,":
            yield _line(depth)
        if token in "{[":
            depth += 1
        if token == ":":
            yield ": "
        elif token[0] == '"':
            yield element("span", _visible(token), class_="name" if following == ":" else "string")
        elif token in "{}[],":
            yield token
        else:
            yield element("span", token, class_="literal")
        before = token


def _line(depth: int) -> str:
    return "\n" + "  " * min(depth, _INDENT_MAX)


def _as_text(data: bytes, size_max: int) -> Html:
    text = data[:size_max].decode("utf-8", "replace")
    return joined(element("pre", _visible(text), class_="code wrap", tabindex=0), _cut_words(len(data), size_max))


def _visible(text: str) -> str:
    # Line ends and tabs stay; other controls, and what turns text around, become escapes.
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode("ascii") for c in text)


def _cut_words(size: int, shown: int) -> Html | None:
    if size <= shown:
        return None
    return element("p", f"The first {show_size(shown)} of {show_size(size)}; the API has all of it.", class_="soft")


def _as_hex(asked: Asked, data: bytes, size_max: int) -> Html:
    step = max(min(_HEX_SIZE_MAX, size_max), _HEX_WIDTH)
    at = asked.number("at") if asked.at else 0
    first = min(at, max(len(data) - 1, 0)) // _HEX_WIDTH * _HEX_WIDTH
    last = min(first + step, len(data))
    lines = []
    for place in range(first, last, _HEX_WIDTH):
        row = data[place : min(place + _HEX_WIDTH, last)]
        half = _HEX_WIDTH // 2
        digits = f"{row[:half].hex(' ')}  {row[half:].hex(' ')}".ljust(3 * _HEX_WIDTH)
        signs = "".join(chr(byte) if 0x20 <= byte < 0x7F else "·" for byte in row)
        place_words = element("span", f"{place:08x}", class_="soft")
        lines.append(joined(place_words, f"  {digits}  ", element("span", signs, class_="string"), "\n"))
    links: list[Html] = []
    if first > 0:
        links.append(element("a", "← before", class_="view", href=asked.link(view="hex", at=str(max(first - step, 0)))))
    if last < len(data):
        links.append(element("a", "go on →", class_="view", href=asked.link(view="hex", at=str(last))))
    words = f"bytes {show_count(first)} to {show_count(last)} of {show_count(len(data))} "
    pages = element("p", words, *links, class_="soft pages") if links else None
    return joined(element("pre", lines, class_="code", tabindex=0), pages)


_TYPES = {0x0: "", 0x4: "prepared", 0x8: "commit", 0xC: "rollback"}
_TYPE_MASK = 0xC


def message_section(asked: Asked, found: Message, size_max: int, note: str | None = None) -> Html:
    """The message as a card; ``note`` is a line above it, ``size_max`` the most bytes of its body."""
    own = Asked(by="offset", q=str(found.phy_offset), topic=asked.topic, view=asked.view, at=asked.at, zone=asked.zone)
    head = element("h2", "Message at ", element("span", show_count(found.phy_offset), class_="num"))
    parts = [
        element("div", head, _ways(found, own), class_="bar"),
        None if note is None else element("p", note, class_="note"),
        _fields(found),
        _properties(found),
        body_section(own, unpack_body(found), size_max),
    ]
    return element("article", parts, class_="message", data_offset=str(found.phy_offset))


def _ways(found: Message, own: Asked) -> Html:
    # The next frame begins where this one ends; where a segment ends there the page says so.
    plain = replace(own, view="", at="")
    following = plain.link(q=str(found.phy_offset + found.size))
    queue = Asked(by="queue", topic=found.topic, most="16", zone=own.zone)
    from_here = queue.link(q=f"{found.queue_id}/{max(found.queue_offset - 7, 0)}")
    links = [
        element("a", "its queue", href=from_here, title="messages around it in its queue"),
        element("a", "next in the log", href=following, title="the message that begins where this one ends"),
        element("a", "link", href=own.link(), title="an address of this message"),
    ]
    return element("nav", links, aria_label="From here", class_="views")


def _fields(found: Message) -> Html:
    row = message_fields(found)
    topic = element("a", name(found.topic), href=Asked(by="key", topic=found.topic).link())
    kind = _TYPES[found.sys_flag & _TYPE_MASK]
    fields: list[tuple[str, Child]] = [
        ("topic", topic),
        ("stored", joined(moment(found.store_timestamp), _soft(age(found.store_timestamp)))),
        ("born", joined(moment(found.born_timestamp), _soft(row["bornHost"]))),
        ("queue / offset", f"{found.queue_id} / {show_count(found.queue_offset)}"),
        ("size", f"{show_count(found.size)} bytes"),
        ("store host", row["storeHost"]),
        ("message id", element("code", row["offsetMsgId"])),
        ("system flag", joined(f"0x{found.sys_flag:x}", _soft(kind) if kind else None)),
        ("tags code", str(found.tags_code)),
        ("reconsumed", f"{found.reconsume_times} times" if found.reconsume_times else None),
        ("prepared at", show_count(found.prepared_transaction_offset) if found.prepared_transaction_offset else None),
        ("flag", str(found.flag) if found.flag else None),
        ("body CRC", f"{found.body_crc:08x}"),
    ]
    cells = [
        element("div", element("dt", key), element("dd", value), class_="long" if key == "message id" else None)
        for key, value in fields
        if value is not None
    ]
    return element("dl", cells, class_="fields")


def _properties(found: Message) -> Html:
    if not found.properties:
        return element("p", "It has no properties.", class_="soft")
    rows = [
        element("tr", element("th", name(key), scope="row"), element("td", _value(found, key, value), class_="text"))
        for key, value in found.properties.items()
    ]
    caption = element("caption", "Properties")
    return element("div", element("table", caption, element("tbody", rows), class_="properties"), class_="scroll")


def _value(found: Message, key: str, value: str) -> Child:
    # What can be searched for is a link to that search.
    ways = {"KEYS": ("key", found.keys), "UNIQ_KEY": ("unique", [value]), "TAGS": ("tags", [value])}
    by, texts = ways.get(key, ("", []))
    if not texts:
        return name(value)
    links = [element("a", name(text), href=Asked(by=by, topic=found.topic, q=text).link()) for text in texts]
    return [part for link in links for part in (link, " ")][:-1]


def _soft(text: str) -> Html:
    return element("span", f" {text}", class_="soft")


_HEAD = (
    ("Stored", "time"), ("Keys, unique key", ""), ("Tags", "wide"), ("Queue / offset", "n wide"), ("Size", "n wide"),
    ("Physical offset", "n"),
)  # fmt: skip
_SEARCHED_AGAIN = "search again"
_COVERED = (reasons.ABSENT, reasons.ABSENT_BEFORE, reasons.BEHIND_LAST, NO_FOLDER)


@dataclass(frozen=True, slots=True)
class Shown:
    """A part of the page, and how the search ended: a name of board.RESULTS."""

    html: Html
    result: str


def answer_to(data: Data, asked: Asked, size_max: int) -> Shown:
    """Look it up and write it down; raises IndexdError. ``size_max``: most bytes of a body."""
    asked.check()
    if asked.by in BY_INDEX:
        return _by_index(data, asked)
    if asked.by == "queue":
        return _by_queue(data, asked)
    note = None
    if asked.by == "time":
        answer = data.log_at_time(asked.moment(asked.q, _now()))
        if answer.phy_offset is None:
            return _nothing(asked, answer.coverage, answer.why or reasons.BEHIND_LAST)
        where: int | str = answer.phy_offset
        note = "The first message of the log that was stored then or later."
    else:
        where = asked.number("q") if asked.by == "offset" else asked.offset_id
    found = data.message(where)
    if isinstance(found, NotFound):
        return Shown(_no_message(asked, found), "empty_covered")
    return Shown(message_section(asked, found, size_max, note), "found")


def problem_section(error: IndexdError) -> Html:
    """An error as the page shows it: what happened, and what to do."""
    hint = element("p", f"{error.hint[:1].upper()}{error.hint[1:]}.") if error.hint else None
    words = str(error.args[0])
    return element("div", element("h2", f"{words[:1].upper()}{words[1:]}"), hint, class_="panel bad", role="alert")


def _by_index(data: Data, asked: Asked) -> Shown:
    begin, end = asked.times()
    kind = INDEX_TYPES[asked.by]
    if asked.mode == "rocketmq":
        query = KeyQuery(asked.topic, asked.q, asked.max_num, max(begin, 0), end, kind)
        answer = query_rocketmq(data.index, query)
    else:
        before = asked.number("before") if asked.before else None
        times = {"begin": begin, "end": end}
        answer = data.by_key(asked.topic, asked.q, max_num=asked.max_num, index_type=kind, before=before, **times)
    if not answer.hits:
        return _nothing(asked, answer.coverage, answer.why or reasons.ABSENT)
    first, last = _range_of(answer.hits, begin, end)
    drawn = element("div", timeline(answer.hits, first, last), log_strip(answer.coverage, answer.hits), class_="two")
    count = len(answer.hits)
    words = f"{show_count(count)} {'message' if count == 1 else 'messages'}"
    if answer.truncated is not None:
        words = f"{'older ones: ' if asked.before else 'the newest '}{words}"
    head = element("div", element("h2", words[:1].upper() + words[1:]), _more(asked, answer), class_="bar")
    notes = _notes(answer)
    html = joined(head, notes, drawn, _table(asked, answer.hits), _covered(asked, answer.coverage))
    return Shown(element("div", html, class_="hits-of"), "found")


def _more(asked: Asked, answer: Answer) -> Html:
    links: list[Html] = []
    if asked.before:
        links.append(element("a", "the newest", href=asked.link(before=""), rel="first"))
    if answer.cursor is not None:
        links.append(element("a", "older →", href=asked.link(before=str(answer.cursor)), rel="next"))
    links.append(element("a", "JSON", href=_api_of(asked), title="the same from the API"))
    return element("nav", links, aria_label="Pages", class_="views")


def _notes(answer: Answer) -> list[Html]:
    notes = []
    if answer.truncated is not None and answer.truncated.startswith("walk"):
        notes.append(f"The search stopped after {answer.truncated[5:]} entries of this key's chain; older goes on.")
    elif answer.coverage.is_cut_off:
        notes.append("The search took too long and stopped before the end of this key's chain; older goes on.")
    if answer.expired:
        notes.append(f"{show_count(answer.expired)} entries of this key's hash point to messages that have expired.")
    if answer.unreadable:
        notes.append(f"{show_count(answer.unreadable)} entries of this key's hash point to what is no message.")
    if answer.last_update is not None:
        notes.append("This is what the broker would answer: it may miss messages, repeat them, or show others.")
    return [element("p", note, class_="note") for note in notes]


def _table(asked: Asked, hits: Sequence[Hit]) -> Html:
    head = element("tr", [element("th", text, class_=kind or None, scope="col") for text, kind in _HEAD])
    rows = [_row(asked, hit) for hit in hits]
    table = element("table", element("thead", head), element("tbody", rows), class_="hits")
    return element("div", table, class_="scroll")


def _row(asked: Asked, hit: Hit) -> Html:
    href = Asked(by="offset", topic=asked.topic, q=str(hit.phy_offset), zone=asked.zone).link()
    time_words = moment(hit.store_timestamp) if hit.store_timestamp is not None else "not readable"
    keys: list[Child] = []
    if hit.keys:
        keys.append(element("span", name(hit.keys), class_="keys"))
    if hit.uniq_key:
        keys.append(element("span", name(hit.uniq_key), class_="unique soft"))
    queue = "-" if hit.queue_id is None else f"{hit.queue_id} / {show_count(hit.queue_offset or 0)}"
    cells = (
        element("td", element("a", time_words, class_="open", href=href), class_="time"),
        element("td", keys or "-", class_="text"),
        element("td", name(hit.tags), class_="text wide"),
        element("td", queue, class_="n wide"),
        element("td", "-" if hit.size is None else show_count(hit.size), class_="n wide"),
        element("td", show_count(hit.phy_offset), class_="n"),
    )
    return element("tr", cells, class_="hit", data_offset=str(hit.phy_offset))


def _by_queue(data: Data, asked: Asked) -> Shown:
    queue_id, queue_offset = asked.queue
    answer = data.by_queue(asked.topic, queue_id, queue_offset, max_num=min(asked.max_num, 1000))
    if not answer.hits:
        return _nothing(asked, answer.coverage, answer.why or reasons.ABSENT, queue=answer)
    hits = [
        hit.hit or Hit(hit.unit.phy_offset, queue_id=queue_id, queue_offset=hit.queue_offset) for hit in answer.hits
    ]
    links = []
    if queue_offset > answer.min_offset:
        before = max(queue_offset - asked.max_num, answer.min_offset)
        links.append(element("a", "← before", href=asked.link(q=f"{queue_id}/{before}"), rel="prev"))
    if answer.truncated:
        links.append(element("a", "go on →", href=asked.link(q=f"{queue_id}/{answer.next_offset}"), rel="next"))
    bounds = f"The queue holds offsets {show_count(answer.min_offset)} to {show_count(answer.max_offset)}."
    problems = [f"Queue offset {hit.queue_offset}: {hit.problem}." for hit in answer.hits if hit.problem is not None]
    title = element("h2", f"{show_count(len(hits))} {'message' if len(hits) == 1 else 'messages'} of queue {queue_id}")
    html = joined(
        element("div", title, element("nav", links, aria_label="Pages", class_="views"), class_="bar"),
        element("p", bounds, class_="soft"),
        [element("p", problem, class_="note bad") for problem in problems],
        log_strip(answer.coverage, hits),
        _table(asked, hits),
        _covered(asked, answer.coverage),
    )
    return Shown(element("div", html, class_="hits-of"), "found")


def _nothing(asked: Asked, coverage: Coverage, why: str, queue: OffsetAnswer | None = None) -> Shown:
    lines = [_reason(asked, coverage, one) for one in why.split("; ")]
    is_ranged = bool(asked.begin or asked.end) and asked.by in BY_INDEX
    again = [element("a", _SEARCHED_AGAIN, href=asked.link())]
    if is_ranged:
        again.append(element("a", "search all of time", href=asked.link(begin="", end="", before="")))
    if asked.by != "key" and asked.by in BY_INDEX:
        again.append(element("a", f"search as {WAYS['key'].lower()}", href=asked.link(by="key")))
    if queue is not None and queue.max_offset > 0:
        lines.append(f"The queue holds offsets {show_count(queue.min_offset)} to {show_count(queue.max_offset)}.")
    html = joined(
        element("div", element("h2", "No message"), element("nav", again, class_="views"), class_="bar"),
        [element("p", line, class_="why") for line in lines],
        log_strip(coverage, ()),
        _covered(asked, coverage),
    )
    found = element("div", html, class_="panel nothing", data_why=why.partition(":")[0])
    return Shown(found, "empty_covered" if why in _COVERED else "empty_uncovered")


def _reason(asked: Asked, coverage: Coverage, why: str) -> str:
    # What the reason means for whoever waits for a message.
    kind, _, detail = why.partition(": ")
    what = f"{WAYS[asked.by].lower()}" if asked.by in WAYS else "key"
    in_range = " in this range of time" if asked.begin or asked.end else ""
    words = {
        reasons.ABSENT: f"Covered and absent: the index covers the log, and no message of this topic has this {what}"
        f"{in_range}. Topic and key are compared whole, capitals count.",
        reasons.ABSENT_BEFORE: "There are no older ones: this is the end of the pages.",
        reasons.NOT_YET_INDEXED: f"Not indexed yet: the index is {_behind(detail)}. The message may be in "
        "what is still to come: search again in a moment.",
        reasons.EXPIRED: "Expired: the index knew entries for it, but the broker has removed the log they point into."
        f" The log begins at {show_count(coverage.log_begin or 0)} now.",
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


def _no_message(asked: Asked, found: NotFound) -> Html:
    links = [element("a", _SEARCHED_AGAIN, href=asked.link())]
    if asked.by == "id" and asked.topic:
        links.append(element("a", "search as unique key", href=asked.link(by="unique")))
    head = element("div", element("h2", "No message"), element("nav", links, class_="views"), class_="bar")
    words = element("p", f"{found.reason[:1].upper()}{found.reason[1:]}.", class_="why")
    return element("div", head, words, class_="panel nothing")


def _covered(asked: Asked, coverage: Coverage) -> Html:
    words = [
        f"Covers log bytes {show_count(coverage.begin)} to {show_count(coverage.end)}, "
        + (reasons.why_not_complete(coverage) or "all there is"),
        "the index is being kept up to date" if coverage.daemon_pid is not None else "no daemon keeps it up to date",
        MODES["rocketmq"] if asked.mode == "rocketmq" and asked.by in BY_INDEX else None,
    ]
    return element("p", "; ".join(word for word in words if word) + ".", class_="soft covered")


def _range_of(hits: Sequence[Hit], begin: int, end: int) -> tuple[int, int]:
    # What was asked for, or where that is open, what was found.
    times = [hit.store_timestamp for hit in hits if hit.store_timestamp is not None] or [0]
    first = min(times) if begin == TIME_MIN else begin
    last = max(times) if end == TIME_MAX else end
    return (first, last) if last > first else (first - 500, first + 500)


def _api_of(asked: Asked) -> str:
    begin, end = asked.times()
    pairs: dict[str, str] = {"topic": asked.topic, "key": asked.q}
    kind = INDEX_TYPES[asked.by]
    if kind is not None:
        pairs["index_type"] = kind
    if begin != TIME_MIN:
        pairs["begin"] = str(begin)
    if end != TIME_MAX:
        pairs["end"] = str(end)
    if asked.most:
        pairs["max"] = str(asked.max_num)
    if asked.before:
        pairs["before"] = asked.before
    if asked.mode == "rocketmq":
        pairs["mode"] = asked.mode
    return "/api/v1/messages/by-key?" + urlencode(pairs, errors="replace")


def _now() -> int:
    return int(time.time() * 1000)
