"""Numbers, sizes and times as people read them; ``show.js`` says the same in a browser."""

from __future__ import annotations

import time
from datetime import UTC, datetime

from indexd.config.units import printable
from indexd.pages.markup import Html, element, foreign

_NAME_LENGTH_MAX = 200


def show_count(value: int) -> str:
    """In full, by thousands."""
    return f"{value:,}"


def show_size(size: float) -> str:
    """Bytes with a binary unit, three digits at most before it."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            digits = 0 if unit == "B" or size >= 100 else 1 if size >= 10 else 2
            return f"{size:.{digits}f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def show_duration(millis: int) -> str:
    """A time span with its two largest units."""
    if millis < 1000:
        return f"{millis} ms"
    if millis < 60_000:
        return f"{millis / 1000:.1f} s"
    parts, rest = [], millis // 1000
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        count, rest = divmod(rest, size)
        if count:
            parts.append(f"{count:,} {unit}")
    return " ".join(parts[:2])


def show_utc(millis: int) -> str:
    """``2026-11-22 03:15:20.123`` in UTC, the bare number where no calendar has it."""
    try:
        moment = datetime.fromtimestamp(millis // 1000, tz=UTC)
    except (OverflowError, OSError, ValueError):
        return f"{millis} ms"
    return f"{moment:%Y-%m-%d %H:%M:%S}.{millis % 1000:03d}"


def moment(millis: int | None) -> Html:
    """A ``time`` element in UTC; a browser may show it in its own zone instead."""
    if millis is None:
        return element("span", "-", class_="soft")
    text = show_utc(millis)
    if text.endswith("ms"):
        return element("span", text)
    return element("time", text, datetime=text.replace(" ", "T") + "Z", data_ms=str(millis))


def age(millis: int, now: int | None = None) -> str:
    """How long ago that was, or how far ahead the clock that stored it was."""
    passed = (int(time.time() * 1000) if now is None else now) - millis
    return f"{show_duration(passed)} ago" if passed >= 0 else f"{show_duration(-passed)} ahead"


def name(text: str | None) -> Html:
    """A topic, key or tag on one line; the very long are cut, with all of it in the title."""
    if text is None or text == "":
        return element("span", "-", class_="soft")
    if len(text) <= _NAME_LENGTH_MAX:
        return foreign(text)
    return element("span", foreign(text[: _NAME_LENGTH_MAX - 1]), "…", title=printable(text[:4000]))
