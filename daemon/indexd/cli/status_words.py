"""Words: the figures of a look as people say them, and the log as a strip; nothing here knows how it is drawn.

Draw: a look as a person wants it at three in the morning: what is the matter, how far behind, then the rest.

On a terminal with colours and redrawn in place; anywhere else plain text of one width, so that it can be kept and
compared.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from indexd.cli.output import show_bytes
from indexd.cli.status_ask import Look
from indexd.config.units import printable

Row = Mapping[str, Any]
#: What a cell of the strip can be, worst first: a cell is what is worst in it.
LEFT_OUT, NOT_READ, READ, INDEXED, DURABLE = range(5)
_RATE_WORDS = {
    "writtenBytesPerSecond": "written",
    "readBytesPerSecond": "read",
    "indexedBytesPerSecond": "indexed",
}
_OFFSET_WORDS = {
    "commitLogMinOffset": "begins at",
    "durableOffset": "durable to",
    "phyOffset": "indexed to",
    "readOffset": "read to",
    "commitLogMaxOffset": "ends at",
}


def strip(row: Row, width: int) -> list[int]:
    """The log from its begin to its end in ``width`` cells, each the worst that is in it."""
    built = int(row["phyOffset"])
    begin, durable, read = (
        int(row.get(key) or default)
        for key, default in (("commitLogMinOffset", 0), ("durableOffset", 0), ("readOffset", built))
    )
    end = max(int(row.get("commitLogMaxOffset") or 0), read, built, begin + 1)
    gaps = [(int(gap[0]), int(gap[1])) for gap in row.get("uncovered") or ()]
    gaps.append((0, int(row.get("beginOffset") or 0)))
    found = []
    for number in range(width):
        first = begin + (end - begin) * number // width
        last = max(begin + (end - begin) * (number + 1) // width, first + 1)
        if any(low < last and high > first for low, high in gaps):
            found.append(LEFT_OUT)
        elif last <= durable:
            found.append(DURABLE)
        elif last <= built:
            found.append(INDEXED)
        else:
            found.append(READ if last <= read else NOT_READ)
    return found


def knows_log(look: Look) -> bool:
    """Whether the end of the log is known, so that a strip can be drawn."""
    return "phyOffset" in look.row and ("commitLogMaxOffset" in look.row or look.row.get("caughtUp") is True)


def head(look: Look) -> list[str]:
    """Who it is."""
    row = look.row
    words = [f"pid {row['pid']}"] if row.get("pid") else []
    if row.get("startedAt") and not look.is_over:
        words.append(f"up {span(look.at - row['startedAt'] / 1000)}")
    if row.get("cluster"):
        words.append(f"{row['cluster']} / {row.get('nodeId')}")
    if row.get("mode"):
        words.append(f"mode {row['mode']}")
    if row.get("version"):
        words.append(f"indexd {row['version']}")
    return words


def recovery(progress: Row) -> tuple[float, str]:
    """How much of the step is done, and in words; files or bytes of log, as the step counts."""
    done, total = int(progress["done"]), int(progress["total"])
    ratio = done / total if total > 0 else 0.0
    if progress.get("unit") == "files":
        words = f"{done:,} of {total:,} files"
    else:
        words = f"{show_bytes(done)} of {show_bytes(total)}"
    return ratio, f"{ratio:.0%}  {progress['step']}: {words}"


def standing(look: Look) -> str:
    """What it does, as the headline has it."""
    if look.phase == "opening" and look.row.get("compiling"):
        return "opening: compiling, once"
    if look.phase != "unreachable" or "lastPhase" not in look.row:
        return look.phase
    return f"does not answer (figures are {span(look.age)} old)"


def asked(look: Look) -> str:
    """Whom it was asked, and when; of what was written down, how old that is and what it was doing then."""
    words = f"asked {look.asked}, {clock(look.at * 1000)}"
    if look.age:
        words += f", written {span(look.age)} ago"
    if "lastPhase" in look.row:
        words += f", when it was {look.row['lastPhase']}"
    return words


def lag(look: Look) -> str:
    """How far the index is behind the log, or was when one wrote it down that does not answer now."""
    row = look.row
    then = " then" if look.phase == "unreachable" else ""
    words = [show_bytes(row["dispatchBehindBytes"]), span((row.get("dispatchBehindMilliseconds") or 0) / 1000)]
    if row.get("dispatchBehindMessages") is not None:
        words.append(f"{row['dispatchBehindMessages']:,} messages")
    return ", ".join([*words, f"{'caught up' if row.get('caughtUp') else 'catching up'}{then}"])


def rates(found: Mapping[str, float]) -> str:
    """How fast it grows; "not known yet" is no rate of nothing."""
    if not found:
        return "not known yet"
    words = [f"{word} {show_bytes(found[name])}/s" for name, word in _RATE_WORDS.items() if name in found]
    if "indexedBytesPerSecond" not in found:
        words.append("indexed not known yet")
    if "readMessagesPerSecond" in found:
        words.append(f"{found['readMessagesPerSecond']:,.0f} messages/s")
    return ", ".join(words)


def offsets(row: Row) -> str:
    """The offsets of the log, from its begin to its end."""
    return ", ".join(f"{word} {row[key]}" for key, word in _OFFSET_WORDS.items() if row.get(key) is not None)


def covered(look: Look) -> str:
    """Which part of the log the index speaks for."""
    row = look.row
    words = f"log bytes {row.get('beginOffset', 0)} to {row['phyOffset']}"
    if gaps := row.get("uncovered"):
        size = show_bytes(sum(int(gap[1]) - int(gap[0]) for gap in gaps))
        words += f", without {len(gaps)} {'range' if len(gaps) == 1 else 'ranges'} of {size}"
    if look.is_over and "caughtUp" in row:
        words += ", all of the log" if row["caughtUp"] else ", the log goes on behind that"
    return words


def details(look: Look) -> Iterator[tuple[str, str]]:
    """The lines that are plain words, each with its label."""
    row = look.row
    if "messages" in row:
        entries = f", {row['indexEntries']:,} entries in {row['indexFiles']} index files" if look.is_over else ""
        yield "holds", f"{row['messages']:,} messages{entries}"
    if row.get("queueRows") is not None:
        oldest = span((row.get("queueOldestMilliseconds") or 0) / 1000)
        yield "queue", f"{row['queueRows']:,} messages, {show_bytes(row['queueBytes'])}, the oldest waits for {oldest}"
    if opening := row.get("lastRecovery"):
        kept = f", {opening['keptEntries']:,} entries kept, {opening['droppedEntries']:,} dropped"
        yield "opening", f"{opening['event']} in {span(opening['seconds'])}{kept}"
    if (scrub := row.get("scrub")) and scrub.get("endedAt"):
        found = f"damage found by {scrub['damaged']:,}" if scrub["damaged"] else "no damage found"
        yield "scrub", f"the last ended {clock(scrub['endedAt'])}, {show_bytes(scrub['bytes'])} read, {found}"
    if row.get("broker"):
        yield "broker", broker(row["broker"])
    if outlet := row.get("remoting"):
        yield "remoting", f"{outlet['address']}, {int(outlet.get('connections', 0)):,} connections"
    if row.get("mqtt"):
        yield "mqtt", values(row["mqtt"])
    if row.get("diskUsedRatio") is not None:
        most = f", indexing waits above {row['diskUsedMax']:.0%}" if row.get("diskUsedMax", 1) < 1 else ""
        yield "limits", f"disk {row['diskUsedRatio']:.0%} full{most}; memory {show_bytes(row.get('memoryBytes') or 0)}"
    for name in ("store", "data"):
        if row.get(name):
            yield name, str(row[name])


def broker(row: Row) -> str:
    """What is known of the broker."""
    alive = "it is not known whether it is alive"
    if row.get("alive") is not None:
        alive = "alive" if row["alive"] else "not running"
    words = [f"{alive}, pid {row['pid']}" if row.get("pid") else alive]
    if row.get("indexing") is not None:
        words.append("keeps an index itself" if row["indexing"] else "keeps no index itself")
    if row.get("maxOffset") is not None:
        words.append(f"its log ends at {row['maxOffset']}")
    return ", ".join(words)


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
    if isinstance(value, list | tuple):
        return "; ".join(_value(item) for item in value)
    return str(value)


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


_PLAIN_WIDTH = 100
_STRIP_WIDTH = 60
_PROGRESS_WIDTH = 30
_BAR_WIDTH = 12
_LABEL_WIDTH = 8
_SIGNS = {
    "running": ("●", "green"),
    "opening": ("◐", "yellow"),
    "recovering": ("◐", "yellow"),
    "stopping": ("◐", "yellow"),
}
_NOT_RUNNING = ("○", "red")
#: What a cell is drawn as: in UTF-8, in ASCII, in colour, and its word.
_CELLS = {
    LEFT_OUT: ("×", "x", "red", "left out"),
    NOT_READ: ("·", ".", "yellow", "not read yet"),
    READ: ("▒", "-", "cyan", "read"),
    INDEXED: ("▓", "+", "blue", "indexed"),
    DURABLE: ("█", "#", "green", "durable"),
}


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

    def __repr__(self) -> str:
        return f"Drawing({self._console})"

    def show(self, looks: Iterator[tuple[Look, dict[str, float]]], *, is_watching: bool) -> int:
        """Each look as it comes; 1 if the last one found something, else 0."""
        code = 0
        if not is_watching or not self._console.is_terminal:
            for look, rates in looks:
                code = int(bool(look.findings))
                try:
                    self._print(self.draw(look, rates))
                    if is_watching:
                        self._console.file.write("\n")
                    self._console.file.flush()
                except BrokenPipeError:  # who reads has enough: this look was the last
                    break
            return code
        last: RenderableType = ""
        try:
            with Live(console=self._console, screen=True, auto_refresh=False) as live:
                for look, rates in looks:
                    last, code = self.draw(look, rates), int(bool(look.findings))
                    live.update(last, refresh=True)
        finally:
            self._print(last)  # what was last seen stays
        return code

    def draw(self, look: Look, rates: Mapping[str, float]) -> Group:
        """All of it."""
        parts: list[RenderableType] = [self._head(look)]
        parts += [Text("! ", "bold red").append_text(self._text(text, "red")) for text in look.findings]
        parts += [self._text(f"  {text}", "dim") for text in look.notes]
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold", min_width=_LABEL_WIDTH, no_wrap=True)
        table.add_column(overflow="fold")
        for label, value in (*self._figures(look, rates), *details(look)):
            table.add_row(label, value if isinstance(value, Text) else self._text(value))
        if table.row_count:
            parts += ["", table]
        for further in (self._outputs(look), self._files(look), self._events(look)):
            if further is not None:
                parts += ["", further]
        return Group(*parts)

    def _print(self, drawn: RenderableType) -> None:
        with self._console.capture() as captured:
            self._console.print(drawn)
        for line in captured.get().splitlines():
            self._console.file.write(line.rstrip() + "\n")

    def _text(self, value: object, style: str = "") -> Text:
        # Nothing that a terminal obeys, and nothing that it cannot show.
        encoding = self._console.encoding
        return Text(printable(str(value)).encode(encoding, "backslashreplace").decode(encoding), style)

    def _head(self, look: Look) -> Text:
        sign, colour = _SIGNS.get(look.phase, _NOT_RUNNING)
        title = Text(f"{sign} " if self._is_utf8 else "", colour).append_text(
            self._text(standing(look), f"bold {colour}")
        )
        for word in head(look):
            title.append("  ").append_text(self._text(word))
        return title.append("\n").append_text(self._text(asked(look), "dim"))

    def _figures(self, look: Look, speeds: Mapping[str, float]) -> Iterator[tuple[str, str | Text]]:
        row = look.row
        if row.get("recovering"):
            ratio, text = recovery(row["recovering"])
            yield "recovery", self._bar(ratio, _PROGRESS_WIDTH).append("  ").append_text(self._text(text))
        if "dispatchBehindBytes" in row:
            is_good = row.get("caughtUp") and look.phase != "unreachable"
            yield "lag", self._text(lag(look), "green" if is_good else "yellow")
            yield "rates", rates(speeds)
        if knows_log(look):
            yield "log", self._strip(look)
        if "phyOffset" in row:
            yield "offsets", offsets(row)
            yield "covered", covered(look)

    def _bar(self, ratio: float, width: int) -> Text:
        filled = round(max(0.0, min(ratio, 1.0)) * width)
        full, empty = ("█", "░") if self._is_utf8 else ("#", ".")
        return Text.assemble((full * filled, "green"), (empty * (width - filled), "dim"))

    def _strip(self, look: Look) -> Text:
        found, cells = Text(), strip(look.row, _STRIP_WIDTH)
        signs = {cell: (wide if self._is_utf8 else plain) for cell, (wide, plain, *_) in _CELLS.items()}
        for cell in cells:
            found.append(signs[cell], _CELLS[cell][2])
        for number, cell in enumerate(sorted(set(cells), reverse=True)):
            _, _, colour, word = _CELLS[cell]
            found.append("  " if number else "\n").append(signs[cell], colour).append(f" {word}", "dim")
        return found

    def _table(self, *columns: str, right: int = 0) -> Table:
        # The ``right`` columns behind the first are numbers.
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
        for number, name in enumerate(columns):
            table.add_column(name, justify="right" if 0 < number <= right else "left", overflow="fold")
        return table

    def _outputs(self, look: Look) -> Table | None:
        if not look.row.get("outputs"):
            return None
        table = self._table("output", "indexed to", "durable to", "behind", "files", "entries", "bytes", right=6)
        for item in look.row["outputs"]:
            table.add_row(
                self._text(item["output"]),
                str(item["phyOffset"]),
                str(item["durableOffset"]),
                show_bytes(item["behindBytes"]),
                f"{item['files']:,}",
                f"{item['entries']:,}",
                show_bytes(item["bytes"]),
            )
        return table

    def _files(self, look: Look) -> Table | None:
        if not look.files:
            return None
        most = int(look.row.get("indexNum") or 2) - 1
        table = self._table("index file", "entries", "fill", "", "from", "to", right=1)
        for file in look.files:
            ratio = file["entries"] / most
            times = [clock(file[key]) if file.get(key) else "-" for key in ("beginTimestamp", "endTimestamp")]
            bar = self._bar(ratio, _BAR_WIDTH)
            table.add_row(self._text(file["name"]), f"{file['entries']:,}", bar, f"{ratio:.0%}", *times)
        more = int(look.row.get("indexFiles") or 0) - len(look.files)
        if more > 0:
            table.add_row(Text(f"and {more:,} older", "dim"))
        return table

    def _events(self, look: Look) -> Table | None:
        if not look.events:
            return None
        table = self._table("last events", "", "")
        for event in look.events:
            fields = self._text(values(event.get("fields") or {}))
            table.add_row(clock(event["at"]), self._text(event.get("name")), fields)
        return table
