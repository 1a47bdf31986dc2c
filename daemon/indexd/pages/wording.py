"""Numbers, times and names as people read them, on a terminal and on a page alike; ``units`` is the way back.

Nothing here raises for a value that came out of a damaged file: what no calendar has stays a number.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime

from indexd.config.units import printable

_LONGEST_NAME = 120


def show_number(value: float) -> str:
    """In full below a million, then three digits and a unit: 754,345, 4.56 M, 1.2 G."""
    if abs(value) < 1_000_000:
        return f"{value:,.0f}"
    for unit, factor in (("M", 1e6), ("G", 1e9), ("T", 1e12)):
        if abs(value) < 999.5 * factor or unit == "T":
            return f"{value / factor:.3g} {unit}"
    raise AssertionError("unreachable")


def show_size(size: float) -> str:
    """Bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}" if size < 100 else f"{size:.0f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def show_share(share: float | None) -> str:
    """A share as per cent; one that is not nothing and not all is never written as such."""
    if share is None:
        return "not known"
    if share in (0, 1):
        return f"{share:.0%}"
    if share < 0.0005:
        return "< 0.1 %"
    if share > 0.9995:
        return "> 99.9 %"
    return f"{100 * share:.1f} %"


def show_duration(millis: int) -> str:
    """A time span with its two largest units."""
    if millis < 1000:
        return f"{millis} ms"
    if millis < 60_000:
        return f"{millis / 1000:.3g} s"
    parts, rest = [], millis // 1000
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        count, rest = divmod(rest, size)
        if count:
            parts.append(f"{count:,} {unit}")
    return " ".join(parts[:2])


def show_utc(millis: int | None, *, seconds: bool = False) -> str:
    """A time in UTC; the bare number where no calendar has it."""
    if millis is None:
        return "-"
    try:
        moment = datetime.fromtimestamp(millis / 1000, tz=UTC)
    except (OverflowError, OSError, ValueError):
        return f"{millis:,} ms"
    return f"{moment:%Y-%m-%d %H:%M:%S}.{millis % 1000:03d}" if seconds else f"{moment:%Y-%m-%d %H:%M}"


def show_local(millis: int) -> str:
    """A time on this machine's clock, with its zone; the bare number where no calendar has it."""
    try:
        moment = datetime.fromtimestamp(millis // 1000, tz=UTC).astimezone()
    except (OverflowError, OSError, ValueError):
        return f"{millis:,} ms"
    return f"{moment:%Y-%m-%d %H:%M:%S}.{millis % 1000:03d} {moment:%Z}"


def show_name(text: str | None, longest: int = _LONGEST_NAME) -> str:
    """A topic, key or tag on one line: controls and what turns text around become escapes, the very long are cut."""
    if text is None:
        return "(its message is gone)"
    if not text:
        return "(empty)"
    shown = printable(text[: longest + 1])
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"


def counted(number: int, word: str) -> str:
    """``1 file``, ``2,000 files``, ``no files``."""
    several = re.sub("(?<=r)y$", "ie", re.sub("ch$", "che", word)) + "s"
    return f"{number:,} {word if number == 1 else several}" if number else f"no {several}"
