"""What was measured, as tables or as JSON lines, and at the end which targets held."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

Row = Sequence[str]


class BenchError(Exception):
    """Something could not be measured; the message says why."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One target; ``measured`` and ``held`` are None where there is no number."""

    part: str
    target: str
    measured: str | None
    held: bool | None


class Report:
    """Prints each part as soon as it is measured. ``hidden`` maps texts that must not be printed to what stands in."""

    def __init__(self, *, as_json: bool, hidden: dict[str, str]) -> None:
        self._as_json = as_json
        self._hidden = hidden
        self._verdicts: list[Verdict] = []
        self._failures = 0

    def note(self, text: str) -> None:
        """A line of its own between the tables; an object with ``note`` in JSON."""
        if self._as_json:
            self._json({"measurement": "note", "note": self._clean(text)})
        else:
            print(self._clean(text), flush=True)

    def part(self, name: str, title: str, rows: Sequence[Row], data: dict[str, Any]) -> None:
        """One part: ``rows`` (the first is the head) for people, ``data`` for machines."""
        if self._as_json:
            self._json({"measurement": name, **data})
        else:
            print(f"\n{name}: {title}", flush=True)
            print_table(rows)

    def verdict(self, part: str, target: str, measured: str | None, held: bool | None) -> None:
        """Remember for the end."""
        self._verdicts.append(Verdict(part, target, measured, held))
        self._failures += held is None

    def failure(self, part: str, reason: str) -> None:
        """A part, or a piece of it, that gave no number."""
        self._failures += 1
        reason = self._clean(reason)
        if self._as_json:
            self._json({"measurement": part, "failed": reason})
        else:
            print(f"\n{part}: not measured: {reason}", flush=True)

    def end(self) -> int:
        """Print the verdicts; the exit status: 1 if a number is missing."""
        if self._as_json:
            self._json({"measurement": "verdict", "targets": [asdict(verdict) for verdict in self._verdicts]})
        elif self._verdicts:
            print("\nverdict")
            words = {True: "yes", False: "NO", None: "not measured"}
            rows = [(v.part, v.target, v.measured or "-", words[v.held]) for v in self._verdicts]
            print_table([("part", "target", "measured", "held"), *rows])
        return 1 if self._failures else 0

    def _json(self, row: dict[str, Any]) -> None:
        print(json.dumps(row, ensure_ascii=False), flush=True)

    def _clean(self, text: str) -> str:
        for secret, word in self._hidden.items():
            text = text.replace(secret, word)
        return text


def print_table(rows: Sequence[Row]) -> None:
    """Columns side by side: those with a figure in them to the right, words and the first to the left."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [number > 0 and any(text[:1].isdigit() for text in column) for number, column in enumerate(columns)]
    for row in rows:
        cells = [
            text.rjust(width) if is_right else text.ljust(width)
            for text, width, is_right in zip(row, widths, right, strict=True)
        ]
        print("  " + "  ".join(cells).rstrip(), flush=True)


def per_second(rate: float) -> str:
    """A rate in words: 2.35 M/s, 812 k/s."""
    return f"{rate / 1e6:.2f} M/s" if rate >= 1e6 else f"{rate / 1e3:.0f} k/s"


def megabytes(size: float) -> str:
    """Millions of bytes."""
    return f"{size / 1e6:,.0f} MB"


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that ``percent`` of the values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(len(ordered) * percent / 100) - 1))]


def median(values: Sequence[float]) -> float:
    """The median; BenchError when there is nothing to take it of."""
    if not values:
        raise BenchError("no run gave a number")
    return statistics.median(values)
