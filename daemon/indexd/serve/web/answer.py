"""The answer to a search: the hits and where they lie, one message with its body, or why there is none."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any
from urllib.parse import urlencode

from markupsafe import Markup

from indexd.commitlog.decoder import Message
from indexd.errors import IndexdError
from indexd.pages.wording import show_size
from indexd.query import Answer, Coverage, Data, Hit, NotFound, OffsetAnswer
from indexd.query import coverage as reasons
from indexd.query.message import Body, message_fields, unpack_body
from indexd.query.questions import ByKey, ByMessage
from indexd.serve.queries import result_of
from indexd.serve.web.page import render
from indexd.serve.web.search_form import BY_INDEX, MODES, WAYS, SearchForm

#: A part of the page, and how the search ended, as the status counts it.
Shown = tuple[Markup, str]
_TEXT_SIZE_MAX = 256 << 10
_HEX_SIZE_MAX = 8 << 10
_HEX_WIDTH = 16
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_TYPES = {0x0: "", 0x4: "prepared", 0x8: "commit", 0xC: "rollback"}
# What is there is seen: no part of the log is drawn narrower.
_PART_SHARE_MIN = 0.004


def answer_to(data: Data, form: SearchForm, size_max: int) -> Shown:
    """Look it up and write it down; raises IndexdError. ``size_max``: most bytes of a body."""
    question, note = form.question(), None
    if isinstance(question, ByMessage):
        where: Any = question.id or question.offset
    else:
        answer = question.answer(data.index)
        if isinstance(question, ByKey):
            return _by_key(form, question, answer)
        if isinstance(answer, OffsetAnswer):
            return _by_queue(form, answer)
        if answer.phy_offset is None:
            return _nothing(form, answer.coverage, answer.why or reasons.BEHIND_LAST)
        where, note = answer.phy_offset, "The first message of the log that was stored then or later."
    found = data.message(where)
    if isinstance(found, NotFound):
        links = [("search again", form.link(), "")]
        if form.by == "id" and form.topic:
            links.append(("search as unique key", form.link(by="unique"), ""))
        lines = [f"{found.reason[:1].upper()}{found.reason[1:]}."]
        html = render("answer.html", kind="nothing", why=None, links=links, lines=lines, log=None)
        return html, "empty_covered"
    return message_section(form, found, size_max, note), "found"


def problem_section(error: IndexdError) -> Markup:
    """An error as the page shows it: what happened, and what to do."""
    return render("answer.html", kind="problem", words=str(error.args[0]), hint=error.hint)


def _by_key(form: SearchForm, asked: ByKey, answer: Answer) -> Shown:
    if not answer.hits:
        return _nothing(form, answer.coverage, answer.why or reasons.ABSENT)
    title = _counted(answer.hits)
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
    return _hits(form, title, links, [words for words, is_so in notes.items() if is_so], answer.coverage, answer.hits)


def _by_queue(form: SearchForm, answer: OffsetAnswer) -> Shown:
    asked = answer.query
    bounds = f"The queue holds offsets {answer.min_offset:,} to {answer.max_offset:,}."
    if not answer.hits:
        more = [bounds] if answer.max_offset > 0 else []
        return _nothing(form, answer.coverage, answer.why or reasons.ABSENT, more)
    links = []
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
    title = f"{_counted(hits)} of queue {asked.queue_id}"
    return _hits(form, title, links, [bounds, *notes], answer.coverage, hits)


def _counted(hits: Sequence[Hit]) -> str:
    return f"{len(hits):,} {'message' if len(hits) == 1 else 'messages'}"


def _hits(
    form: SearchForm,
    title: str,
    links: list[tuple[str, str, str]],
    notes: list[str],
    coverage: Coverage,
    hits: Sequence[Hit],
) -> Shown:
    html = render(
        "answer.html", kind="hits", title=title, links=links, notes=notes, log=log_strip(coverage, hits), hits=hits,
        form=form, covered=_covered(form, coverage),
    )  # fmt: skip
    return html, "found"


def _nothing(form: SearchForm, coverage: Coverage, why: str, more: Sequence[str] = ()) -> Shown:
    lines = [*(_reason(form, coverage, one) for one in why.split("; ")), *more]
    links = [("search again", form.link(), "")]
    if (form.begin or form.end) and form.by in BY_INDEX:
        links.append(("search all of time", form.link(begin="", end="", before=""), ""))
    if form.by != "key" and form.by in BY_INDEX:
        links.append((f"search as {WAYS['key'].lower()}", form.link(by="key"), ""))
    html = render(
        "answer.html", kind="nothing", why=why.partition(":")[0], links=links, lines=lines,
        log=log_strip(coverage, ()), covered=_covered(form, coverage),
    )  # fmt: skip
    return html, result_of(0, why)


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
    return words.get(kind, f"{why[:1].upper()}{why[1:]}.")


def _covered(form: SearchForm, coverage: Coverage) -> str:
    words = [
        f"Covers log bytes {coverage.begin:,} to {coverage.end:,}, "
        + (reasons.why_not_complete(coverage) or "all there is"),
        "the index is being kept up to date" if coverage.daemon_pid is not None else "no daemon keeps it up to date",
        MODES["rocketmq"] if form.mode == "rocketmq" and form.by in BY_INDEX else None,
    ]
    return "; ".join(word for word in words if word) + "."


def message_section(form: SearchForm, found: Message, size_max: int, note: str | None = None) -> Markup:
    """The message as a card; ``note`` is a line above it, ``size_max`` the most bytes of its body."""
    own = replace(form, by="offset", q=str(found.phy_offset), begin="", end="", most="", mode="exact", before="")
    queue = SearchForm(by="queue", topic=found.topic, most="16", zone=own.zone)
    links = [
        ("its queue", queue.link(q=f"{found.queue_id}/{max(found.queue_offset - 7, 0)}"), ""),
        # The next frame begins where this one ends; where a segment ends there the page says so.
        ("next in the log", own.link(q=str(found.phy_offset + found.size), view=""), ""),
        ("link", own.link(), ""),
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
    data, text, most = body.data, None, min(_TEXT_SIZE_MAX, size_max)
    with suppress(UnicodeDecodeError):
        # Not so strict as Body.text: what turns text around or joins signs is shown as an escape.
        text = data.decode("utf-8")
    is_text = text is not None and not _CONTROL.search(text)
    shown = {"json": _indented(text or "") if is_text and len(data) <= most else None}
    shown |= {"text": data[:most].decode("utf-8", "replace"), "hex": _hex(data[: min(_HEX_SIZE_MAX, size_max)])}
    views = {view: content for view, content in shown.items() if content is not None}
    fitting = next(iter(views)) if is_text else "hex"
    view = form.view if form.view in views else fitting
    size = min(_HEX_SIZE_MAX, size_max) if view == "hex" else most
    words = f"{len(data):,} bytes"
    if body.compression is not None:
        words += f", {body.compression}" + (", unpacked" if body.is_unpacked else ", as stored: not unpacked here")
    # Line ends and tabs stay; other controls, and what turns text around, become escapes.
    visible = "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in views[view])
    return {
        "size": len(data),
        "words": words,
        "tabs": [{"words": one, "href": form.link(view=one), "is_current": one == view} for one in views],
        "view": view,
        "text": visible,
        "cut": f"The first {show_size(size)} of {show_size(len(data))}; the API has all of it."
        if len(data) > size
        else None,
    }


def _indented(text: str) -> str | None:
    # None for what is no JSON, and for what would lose by it: digits of a number, a name that stands twice.
    with suppress(ValueError, RecursionError):
        shown = json.dumps(json.loads(text), ensure_ascii=False, indent=2)
        if shown[:1] in "{[" and "".join(shown.split()) == "".join(text.split()):
            return shown
    return None


def _hex(data: bytes) -> str:
    lines, half = [], _HEX_WIDTH // 2
    for place in range(0, len(data), _HEX_WIDTH):
        row = data[place : place + _HEX_WIDTH]
        digits = f"{row[:half].hex(' ')}  {row[half:].hex(' ')}".ljust(3 * _HEX_WIDTH)
        signs = "".join(chr(byte) if 0x20 <= byte < 0x7F else "·" for byte in row)
        lines.append(f"{place:08x}  {digits}  {signs}\n")
    return "".join(lines)


def log_strip(coverage: Coverage, hits: Sequence[Hit]) -> dict[str, Any]:
    """The log from its oldest byte that matters to where the answer ends, with a mark for each hit; in per cent."""
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
    shares = [(hit.phy_offset, min(max((hit.phy_offset - first) / span, 0.001), 0.999)) for hit in hits]
    marks = [{"phy_offset": offset, "x": f"{100 * share:.3f}%"} for offset, share in shares]
    return {"begin": first, "end": last, "parts": shown, "marks": marks}
