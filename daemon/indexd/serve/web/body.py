"""A message's body: as JSON with its lines made, as text, and as hex with its bytes beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from indexd.pages.markup import Html, element, joined
from indexd.query.message import Body
from indexd.serve.web.asked import Asked
from indexd.serve.web.wording import show_count, show_size

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
