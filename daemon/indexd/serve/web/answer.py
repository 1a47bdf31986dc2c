"""The answer to a search: the hits and where they lie, or why there are none and what that leaves open."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlencode

from indexd.errors import IndexdError
from indexd.pages.markup import Child, Html, element, joined
from indexd.query import TIME_MAX, Answer, Coverage, Data, Hit, KeyQuery, NotFound, OffsetAnswer, query_rocketmq
from indexd.query import coverage as reasons
from indexd.query.queues import NO_FOLDER
from indexd.serve.web.asked import BY_INDEX, INDEX_TYPES, MODES, TIME_MIN, WAYS, Asked
from indexd.serve.web.drawing import log_strip, timeline
from indexd.serve.web.message import message_section
from indexd.serve.web.wording import moment, name, show_count, show_size

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
