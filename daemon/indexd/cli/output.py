"""Standard output: words for people, one JSON object a line for programs."""

from __future__ import annotations

import json
import re
import sys
import time
from contextlib import suppress
from typing import Any

_LONE = re.compile("[\ud800-\udfff]")


def print_json(row: dict[str, Any]) -> None:
    """One object, one line; text in any script stays readable where standard output is UTF-8.

    A file's name that is no UTF-8 makes the whole line ASCII: a lone surrogate for each such byte, as ``os.fsencode``
    takes it back.
    """
    is_utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    line = json.dumps(row, ensure_ascii=not is_utf8, separators=(",", ":"))
    if _LONE.search(line):
        line = json.dumps(row, separators=(",", ":"))
    sys.stdout.write(line + "\n")


def print_line(text: str = "") -> None:
    """One line of words; a lone surrogate or what the terminal cannot show becomes an escape."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")


def until_reader_leaves() -> suppress:
    """For what is said when all is done: whoever reads may have enough of it, and the exit code stays what it is."""
    return suppress(BrokenPipeError)


def show_time(millis: int) -> str:
    """A time in ms as local time with its zone, or the bare number if no clock can show it."""
    try:
        local = time.localtime(millis // 1000)
        return f"{time.strftime('%Y-%m-%d %H:%M:%S', local)}.{millis % 1000:03d} {time.strftime('%Z', local)}"
    except (OverflowError, OSError, ValueError):
        return str(millis)


def show_bytes(size: float) -> str:
    """A size with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")
