"""Draws one look at a daemon with rich: what is the matter, how far behind it is, then the rest.

On a terminal with colours and redrawn in place; anywhere else plain text of one width, so that it can be kept and
compared. Each line is one of ``LINES``: its label, and what it says of a look, None where it does not apply.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from indexd.cli.output import show_bytes
from indexd.cli.status_ask import Look
from indexd.config.units import printable

Row = Mapping[str, Any]
Rates = Mapping[str, float]
#: What a cell of the log's strip can be, worst first: a cell is what is worst in it.
LEFT_OUT, NOT_READ, READ, INDEXED, DURABLE = range(5)
#: What a cell is drawn as: in UTF-8, in ASCII, in colour, and its word.
_CELLS = (
    ("×", "x", "red", "left out"),
    ("·", ".", "yellow", "not read yet"),
    ("▒", "-", "cyan", "read"),
    ("▓", "+", "blue", "indexed"),
    ("█", "#", "green", "durable"),
)
_PLAIN_WIDTH = 100
_STRIP_WIDTH = 60
_PROGRESS_WIDTH = 30
_BAR_WIDTH = 12
_LABEL_WIDTH = 8
_SIGNS = {"running": ("●", "green")} | dict.fromkeys(("opening", "recovering", "stopping"), ("◐", "yellow"))
_NOT_RUNNING = ("○", "red")


def span(seconds: float) -> str:
    """A time that passed."""
    if seconds < 1:
        return f"{max(seconds, 0) * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours = int(seconds) // 60, int(seconds) // 3600
    if hours < 1:
        return f"{minutes} min {int(seconds) % 60} s"
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24} days {hours % 24} h"


def clock(millis: float) -> str:
    """A time in ms as local time to the second, or the bare number if no clock can show it."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(millis // 1000))
    except (OverflowError, OSError, ValueError):
        return str(millis)


def values(fields: Row) -> str:
    """Names and values of an event, or of an outlet; without those that are not known."""
    found = ((name, _value(value)) for name, value in fields.items() if value is not None)
    return ", ".join(f"{name} {words}" for name, words in found if words)


def _value(value: object) -> str:
    # An empty list says nothing.
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return values(value)
    return "; ".join(map(_value, value)) if isinstance(value, list | tuple) else str(value)


def _listed(*words: str | None) -> str:
    return ", ".join(word for word in words if word)


def strip(row: Row, width: int) -> list[int]:
    """The log from its begin to its end in ``width`` cells, each the worst that is in it."""
    built = int(row["phyOffset"])
    begin, durable, read = (
        int(row.get(key) or default)
        for key, default in (("commitLogMinOffset", 0), ("durableOffset", 0), ("readOffset", built))
    )
    end = max(int(row.get("commitLogMaxOffset") or 0), read, built, begin + 1)
    reached = (max(read, built, durable), max(built, durable), durable)
    gaps = [(0, int(row.get("beginOffset") or 0)), *((int(gap[0]), int(gap[1])) for gap in row.get("uncovered") or ())]
    found = []
    for number in range(width):
        first = begin + (end - begin) * number // width
        last = max(begin + (end - begin) * (number + 1) // width, first + 1)
        if any(low < last and high > first for low, high in gaps):
            found.append(LEFT_OUT)
        else:
            found.append(NOT_READ + sum(last <= offset for offset in reached))
    return found


def recovery(progress: Row) -> tuple[float, str]:
    """How much of the step is done, and in words; files or bytes of log, as the step counts."""
    done, total = int(progress["done"]), int(progress["total"])
    ratio = done / total if total > 0 else 0.0
    counted = f"{done:,} of {total:,} files" if progress.get("unit") == "files" else ""
    return ratio, f"{ratio:.0%}  {progress['step']}: {counted or f'{show_bytes(done)} of {show_bytes(total)}'}"


# --- the lines


def _lag(look: Look) -> str:
    row = look.row
    messages = row.get("dispatchBehindMessages")
    return _listed(
        show_bytes(row["dispatchBehindBytes"]),
        span((row.get("dispatchBehindMilliseconds") or 0) / 1000),
        None if messages is None else f"{messages:,} messages",
        ("caught up" if row.get("caughtUp") else "catching up") + (" then" if look.phase == "unreachable" else ""),
    )


def rates(found: Rates) -> str:
    """How fast it grows; "not known yet" is no rate of nothing."""
    words = [
        f"{word} {show_bytes(found[name])}/s"
        for name, word in (
            ("writtenBytesPerSecond", "written"),
            ("readBytesPerSecond", "read"),
            ("indexedBytesPerSecond", "indexed"),
        )
        if name in found
    ]
    if "indexedBytesPerSecond" not in found:
        words.append("indexed not known yet")
    if "readMessagesPerSecond" in found:
        words.append(f"{found['readMessagesPerSecond']:,.0f} messages/s")
    return ", ".join(words) if found else "not known yet"


def _offsets(row: Row) -> str:
    names = {
        "commitLogMinOffset": "begins at",
        "durableOffset": "durable to",
        "phyOffset": "indexed to",
        "readOffset": "read to",
        "commitLogMaxOffset": "ends at",
    }
    return _listed(*(f"{word} {row[key]}" for key, word in names.items() if row.get(key) is not None))


def _covered(look: Look) -> str:
    row = look.row
    words = f"log bytes {row.get('beginOffset', 0)} to {row['phyOffset']}"
    if gaps := row.get("uncovered"):
        size = show_bytes(sum(int(gap[1]) - int(gap[0]) for gap in gaps))
        words += f", without {len(gaps)} {'range' if len(gaps) == 1 else 'ranges'} of {size}"
    if look.is_over and "caughtUp" in row:
        words += ", all of the log" if row["caughtUp"] else ", the log goes on behind that"
    return words


def _holds(look: Look) -> str:
    row = look.row
    entries = f", {row['indexEntries']:,} entries in {row['indexFiles']} index files" if look.is_over else ""
    return f"{row['messages']:,} messages{entries}"


def _queue(row: Row) -> str:
    oldest = span((row.get("queueOldestMilliseconds") or 0) / 1000)
    return f"{row['queueRows']:,} messages, {show_bytes(row['queueBytes'])}, the oldest waits for {oldest}"


def _opening(last: Row) -> str:
    kept = f"{last['keptEntries']:,} entries kept, {last['droppedEntries']:,} dropped"
    return f"{last['event']} in {span(last['seconds'])}, {kept}"


def _scrub(scrub: Row) -> str:
    found = f"damage found by {scrub['damaged']:,}" if scrub["damaged"] else "no damage found"
    return f"the last ended {clock(scrub['endedAt'])}, {show_bytes(scrub['bytes'])} read, {found}"


def broker(row: Row) -> str:
    """What is known of the broker."""
    alive = {True: "alive", False: "not running"}.get(row.get("alive", ""), "it is not known whether it is alive")
    indexing = {True: "keeps an index itself", False: "keeps no index itself"}.get(row.get("indexing", ""))
    end = row.get("maxOffset")
    pid = f"pid {row['pid']}" if row.get("pid") else None
    return _listed(alive, pid, indexing, None if end is None else f"its log ends at {end}")


def _limits(row: Row) -> str:
    most = f", indexing waits above {row['diskUsedMax']:.0%}" if row.get("diskUsedMax", 1) < 1 else ""
    return f"disk {row['diskUsedRatio']:.0%} full{most}; memory {show_bytes(row.get('memoryBytes') or 0)}"


#: Label; the key of the row without which the line is left out; what it says of the look and of the key's value.
LINES: tuple[tuple[str, str, Callable[[Look, Any], str]], ...] = (
    ("offsets", "phyOffset", lambda look, _: _offsets(look.row)),
    ("covered", "phyOffset", lambda look, _: _covered(look)),
    ("holds", "messages", lambda look, _: _holds(look)),
    ("queue", "queueRows", lambda look, _: _queue(look.row)),
    ("opening", "lastRecovery", lambda _, last: _opening(last)),
    ("scrub", "scrub", lambda _, scrub: _scrub(scrub) if scrub.get("endedAt") else ""),
    ("broker", "broker", lambda _, known: broker(known) if known else ""),
    ("remoting", "remoting", lambda _, it: f"{it['address']}, {int(it.get('connections', 0)):,} connections"),
    ("mqtt", "mqtt", lambda _, link: values(link)),
    ("limits", "diskUsedRatio", lambda look, _: _limits(look.row)),
    ("store", "store", lambda _, path: str(path)),
    ("data", "data", lambda _, path: str(path)),
)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Let it be raised: rich ends the process with 1, which is an exit code of ours."""
        raise  # noqa: PLE0704 - it is called where the error is handled


class Drawing:
    """Draws looks on ``out``."""

    def __init__(self, out: TextIO) -> None:
        is_terminal = out.isatty()
        self._console = _Console(
            file=out,
            width=None if is_terminal else _PLAIN_WIDTH,
            color_system="auto" if is_terminal else None,
            force_terminal=is_terminal,
            markup=False,
            emoji=False,
            highlight=False,
        )
        self._is_utf8 = self._console.encoding.lower().replace("-", "").startswith("utf8")

    def show(self, looks: Iterator[tuple[Look, dict[str, float]]], *, is_watching: bool) -> int:
        """Each look as it comes; 1 if the last one found something, else 0."""
        code = 0
        if not is_watching or not self._console.is_terminal:
            for look, rates in looks:
                code = int(bool(look.findings))
                try:
                    self._print(self._draw(look, rates))
                    self._console.file.write("\n" if is_watching else "")
                    self._console.file.flush()
                except BrokenPipeError:  # who reads has enough: this look was the last
                    break
            return code
        last: RenderableType = ""
        try:
            with Live(console=self._console, screen=True, auto_refresh=False) as live:
                for look, rates in looks:
                    last, code = self._draw(look, rates), int(bool(look.findings))
                    live.update(last, refresh=True)
        finally:
            self._print(last)  # what was last seen stays
        return code

    def _print(self, drawn: RenderableType) -> None:
        with self._console.capture() as captured:
            self._console.print(drawn)
        self._console.file.writelines(line.rstrip() + "\n" for line in captured.get().splitlines())

    def _text(self, value: object, style: str = "") -> Text:
        # Nothing that a terminal obeys, and nothing that it cannot show.
        encoding = self._console.encoding
        return Text(printable(str(value)).encode(encoding, "backslashreplace").decode(encoding), style)

    def _draw(self, look: Look, speeds: Rates) -> Group:
        parts: list[RenderableType] = [self._head(look)]
        parts += [Text("! ", "bold red").append_text(self._text(text, "red")) for text in look.findings]
        parts += [self._text(f"  {text}", "dim") for text in look.notes]
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold", min_width=_LABEL_WIDTH, no_wrap=True)
        table.add_column(overflow="fold")
        for label, text in (*self._first_lines(look, speeds), *self._lines(look)):
            table.add_row(label, text)
        for further in (table, self._outputs(look.row), self._files(look), self._events(look)):
            parts += ["", further] if further.row_count else []
        return Group(*parts)

    def _head(self, look: Look) -> Text:
        row, phase = look.row, look.phase
        sign, colour = _SIGNS.get(phase, _NOT_RUNNING)
        if phase == "unreachable" and "lastPhase" in row:
            phase = f"does not answer (figures are {span(look.age)} old)"
        elif phase == "opening" and row.get("compiling"):
            phase = "opening: compiling, once"
        words = (
            f"pid {row['pid']}" if row.get("pid") else None,
            f"up {span(look.at - row['startedAt'] / 1000)}" if row.get("startedAt") and not look.is_over else None,
            f"{row['cluster']} / {row.get('nodeId')}" if row.get("cluster") else None,
            f"mode {row['mode']}" if row.get("mode") else None,
            f"indexd {row['version']}" if row.get("version") else None,
        )
        asked = _listed(
            f"asked {look.asked}, {clock(look.at * 1000)}",
            f"written {span(look.age)} ago" if look.age else None,
            f"when it was {row['lastPhase']}" if "lastPhase" in row else None,
        )
        title = Text(f"{sign} " if self._is_utf8 else "", colour)
        title.append_text(self._text(phase, f"bold {colour}"))
        title.append_text(self._text("".join(f"  {word}" for word in words if word)))
        return title.append("\n").append_text(self._text(asked, "dim"))

    def _first_lines(self, look: Look, speeds: Rates) -> Iterator[tuple[str, Text]]:
        row = look.row
        if row.get("recovering"):
            ratio, text = recovery(row["recovering"])
            yield "recovery", self._bar(ratio, _PROGRESS_WIDTH).append("  ").append_text(self._text(text))
        if "dispatchBehindBytes" in row:
            is_good = row.get("caughtUp") and look.phase != "unreachable"
            yield "lag", self._text(_lag(look), "green" if is_good else "yellow")
            yield "rates", self._text(rates(speeds))
        if "phyOffset" in row and ("commitLogMaxOffset" in row or row.get("caughtUp") is True):
            yield "log", self._strip(row)

    def _lines(self, look: Look) -> Iterator[tuple[str, Text]]:
        for label, key, words_of in LINES:
            value = look.row.get(key)
            words = "" if value is None else words_of(look, value)
            if words:
                yield label, self._text(words)

    def _bar(self, ratio: float, width: int) -> Text:
        filled = round(max(0.0, min(ratio, 1.0)) * width)
        full, empty = ("█", "░") if self._is_utf8 else ("#", ".")
        return Text.assemble((full * filled, "green"), (empty * (width - filled), "dim"))

    def _strip(self, row: Row) -> Text:
        cells = strip(row, _STRIP_WIDTH)
        drawn = [(wide if self._is_utf8 else plain, colour, word) for wide, plain, colour, word in _CELLS]
        found = Text.assemble(*(drawn[cell][:2] for cell in cells), "\n")
        for number, cell in enumerate(sorted(set(cells), reverse=True)):
            sign, colour, word = drawn[cell]
            found.append("  " if number else "").append(sign, colour).append(f" {word}", "dim")
        return found

    def _table(self, columns: Iterable[str], rows: Iterable[tuple[object, ...]], right: int = 0) -> Table:
        # The ``right`` columns behind the first are numbers.
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
        for number, name in enumerate(columns):
            table.add_column(name, justify="right" if 0 < number <= right else "left", overflow="fold")
        for row in rows:
            table.add_row(*(cell if isinstance(cell, Text) else self._text(cell) for cell in row))
        return table

    def _outputs(self, row: Row) -> Table:
        rows = (
            (
                item["output"],
                item["phyOffset"],
                item["durableOffset"],
                show_bytes(item["behindBytes"]),
                f"{item['files']:,}",
                f"{item['entries']:,}",
                show_bytes(item["bytes"]),
            )
            for item in row.get("outputs") or ()
        )
        columns = ("output", "indexed to", "durable to", "behind", "files", "entries", "bytes")
        return self._table(columns, rows, right=6)

    def _files(self, look: Look) -> Table:
        most = int(look.row.get("indexNum") or 2) - 1
        rows: list[tuple[object, ...]] = []
        for file in look.files:
            ratio = file["entries"] / most
            times = [clock(file[key]) if file.get(key) else "-" for key in ("beginTimestamp", "endTimestamp")]
            rows.append((file["name"], f"{file['entries']:,}", self._bar(ratio, _BAR_WIDTH), f"{ratio:.0%}", *times))
        more = int(look.row.get("indexFiles") or 0) - len(rows)
        if rows and more > 0:
            rows.append((Text(f"and {more:,} older", "dim"),))
        return self._table(("index file", "entries", "fill", "", "from", "to"), rows, right=1)

    def _events(self, look: Look) -> Table:
        rows = ((clock(event["at"]), event.get("name"), values(event.get("fields") or {})) for event in look.events)
        return self._table(("last events", "", ""), rows)
