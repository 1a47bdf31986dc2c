"""Draw: a look as a person wants it at three in the morning: what is the matter, how far behind, then the rest.

On a terminal with colours and redrawn in place; anywhere else plain text of one width, so that it can be kept and
compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from indexd.cli import status_words as words
from indexd.cli.output import show_bytes
from indexd.cli.status_ask import Look
from indexd.config.units import printable

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
    words.LEFT_OUT: ("×", "x", "red", "left out"),
    words.NOT_READ: ("·", ".", "yellow", "not read yet"),
    words.READ: ("▒", "-", "cyan", "read"),
    words.INDEXED: ("▓", "+", "blue", "indexed"),
    words.DURABLE: ("█", "#", "green", "durable"),
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
        for label, value in (*self._figures(look, rates), *words.details(look)):
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
        head = Text(f"{sign} " if self._is_utf8 else "", colour).append_text(
            self._text(words.standing(look), f"bold {colour}")
        )
        for word in words.head(look):
            head.append("  ").append_text(self._text(word))
        return head.append("\n").append_text(self._text(words.asked(look), "dim"))

    def _figures(self, look: Look, rates: Mapping[str, float]) -> Iterator[tuple[str, str | Text]]:
        row = look.row
        if row.get("recovering"):
            ratio, text = words.recovery(row["recovering"])
            yield "recovery", self._bar(ratio, _PROGRESS_WIDTH).append("  ").append_text(self._text(text))
        if "dispatchBehindBytes" in row:
            is_good = row.get("caughtUp") and look.phase != "unreachable"
            yield "lag", self._text(words.lag(look), "green" if is_good else "yellow")
            yield "rates", words.rates(rates)
        if words.knows_log(look):
            yield "log", self._strip(look)
        if "phyOffset" in row:
            yield "offsets", words.offsets(row)
            yield "covered", words.covered(look)

    def _bar(self, ratio: float, width: int) -> Text:
        filled = round(max(0.0, min(ratio, 1.0)) * width)
        full, empty = ("█", "░") if self._is_utf8 else ("#", ".")
        return Text.assemble((full * filled, "green"), (empty * (width - filled), "dim"))

    def _strip(self, look: Look) -> Text:
        found, cells = Text(), words.strip(look.row, _STRIP_WIDTH)
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
            times = [words.clock(file[key]) if file.get(key) else "-" for key in ("beginTimestamp", "endTimestamp")]
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
            fields = self._text(words.values(event.get("fields") or {}))
            table.add_row(words.clock(event["at"]), self._text(event.get("name")), fields)
        return table
