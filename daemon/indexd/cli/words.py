"""What the commands that query share: numbers as they are typed, tables, and what an answer covers."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from indexd.cli.output import print_line
from indexd.config.units import printable
from indexd.query.coverage import Coverage, why_not_complete

_INT64 = re.compile(r"-?[0-9]{1,19}", re.ASCII)


def int64(text: str) -> int:
    """A whole number of 64 bits, for argparse."""
    if not _INT64.fullmatch(text) or not -(2**63) <= int(text) < 2**63:
        raise argparse.ArgumentTypeError(f"{printable(text)!r} is no whole number of 64 bits")
    return int(text)


def cell(value: object) -> str:
    """A value of a table: ``-`` for none, and nothing that a terminal would obey."""
    return "-" if value is None or value == "" else printable(str(value))


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as their widest cell."""
    table = [head, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    for row in table:
        print_line("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def coverage_line(coverage: Coverage) -> str:
    """The last line of every answer."""
    rest = why_not_complete(coverage) or "all of the log"
    daemon = f"kept by pid {coverage.daemon_pid}" if coverage.daemon_pid is not None else "no daemon runs"
    return f"covered: log bytes {coverage.begin} to {coverage.end}, {rest}; {daemon}"
