"""The page's plots as SVG that needs no script: a title on each column says what it counts, colours are the page's.

Places across are per cent of the width, so that text keeps its size on a phone; places down are pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from indexd.config.units import printable
from indexd.pages.markup import Html, element, joined
from indexd.pages.wording import show_duration, show_name, show_size, show_utc
from indexd.spark.stats.buckets import step_for
from indexd.spark.stats.wording import show_range

Row = dict[str, Any]
#: Topics with a colour of their own; the rest are one more.
_TOPICS_MAX = 7
_SECOND, _MINUTE, _HOUR, _DAY = 1000, 60_000, 3_600_000, 86_400_000
_TICK_STEPS = (
    *(_SECOND * n for n in (1, 2, 5, 10, 15, 30)), *(_MINUTE * n for n in (1, 2, 5, 10, 15, 30)),
    *(_HOUR * n for n in (1, 2, 3, 6, 12)), *(_DAY * n for n in (1, 2, 7, 14, 28)),
)  # fmt: skip
_TICKS_MAX = 8
_MARKS_MAX = 12
# Per cent of the width between two words.
_APART = 10.0
# Pixels above the columns, for words, and below them, for the axis.
_TOP, _BOTTOM = 18, 38


@dataclass(frozen=True, slots=True)
class _Column:
    # From ``left`` to ``left + width`` in per cent; ``parts``, from below: class, and height where 1 is all.
    left: float
    width: float
    words: str
    parts: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class _Tick:
    at: float
    text: str
    below: str | None = None


def plots_of(report: Row) -> dict[str, Html]:
    """Plot by the name that the page has for it; without those that would be empty."""
    found = {"times": _times(report), "sizes": _sizes(report["bodySizes"]["buckets"])}
    if report["index"] is not None:
        found["chains"] = _chains(report["index"]["chains"])
    return {name: plot for name, plot in found.items() if plot is not None}


def _times(report: Row) -> Html | None:
    rows = report["bins"]["rows"]
    if not rows:
        return None
    fine = report["bins"]["stepMs"]
    earliest, latest = rows[0]["begin"], rows[-1]["begin"]
    step = max(fine, step_for(latest - earliest))
    own = [row["topic"] for row in report["topics"][:_TOPICS_MAX]]
    sums: dict[int, dict[str | None, int]] = {}
    for row in rows:
        topic = row["topic"] if row["topic"] in own else None
        counts = sums.setdefault(row["begin"] // step * step, {})
        counts[topic] = counts.get(topic, 0) + row["messages"]
    first, behind = min(sums), max(sums) + step
    most = max(sum(counts.values()) for counts in sums.values())
    others = f"{len(report['topics']) - len(own)} other topics"
    order = [*own, None]
    columns = []
    for begin, counts in sums.items():
        shown = [(number, topic) for number, topic in enumerate(order) if topic in counts]
        lines = [f"{show_name(topic, 40) if topic is not None else others}: {counts[topic]:,}" for _, topic in shown]
        parts = tuple((f"t{number}", counts[topic] / most) for number, topic in shown)
        words = "\n".join((f"{show_utc(begin, seconds=step < _MINUTE)} UTC, {show_duration(step)}", *lines))
        columns.append(_Column(100 * (begin - first) / (behind - first), 100 * step / (behind - first), words, parts))

    def at(time: int) -> float:
        share: float = (time - first) / (behind - first)
        return 100 * min(max(share, 0.0), 1.0)

    marks = _marks(report["clock"], at)
    return _drawn(f"messages in {show_duration(step)}", 260, columns, _linear(most), _time_ticks(first, behind), marks)


def _marks(clock: Row, at: Callable[[int], float]) -> Callable[[int], Html]:
    # Steps of the clock as lines, silences as bands behind the columns; the largest of each.
    def drawn(height: int) -> Html:
        places = {"y": _TOP, "height": height}
        bands = [
            element("rect", x=_percent(at(event["before"])), width=_percent(at(event["after"]) - at(event["before"])),
                    class_="silence", **places)
            for event in clock["largestSilences"][:_MARKS_MAX]
        ]  # fmt: skip
        steps = clock["largestSteps"][:_MARKS_MAX]
        lines = [
            element("line", x1=x, x2=x, y1=_TOP, y2=_TOP + height, class_="step")
            for x in (_percent(at(event["before"])) for event in steps)
        ]
        notes = [(at(event["before"]), "clock back", "bad") for event in steps]
        notes += [
            ((at(event["before"]) + at(event["after"])) / 2, "silence", "") for event in clock["largestSilences"]
        ][:_MARKS_MAX]
        kept: list[tuple[float, str, str]] = []
        for note in sorted(notes):
            if not kept or note[0] - kept[-1][0] >= _APART:
                kept.append(note)
        words = [
            element("text", text, x=_percent(x), y=12, class_=kind or None, text_anchor=_anchor(x))
            for x, text, kind in kept
        ]
        return joined(bands, lines, words)

    return drawn


def _time_ticks(first: int, behind: int) -> list[_Tick]:
    span = behind - first
    step = next((step for step in _TICK_STEPS if span // step <= _TICKS_MAX), 28 * _DAY)
    while span // step > _TICKS_MAX:
        step *= 2
    found, day = [], ""
    for time in range(-(-first // step) * step, behind, step):
        try:
            moment = datetime.fromtimestamp(time / 1000, tz=UTC)
        except (OverflowError, OSError, ValueError):
            continue
        text, today = f"{moment:%H:%M:%S}" if step < _MINUTE else f"{moment:%H:%M}", f"{moment:%Y-%m-%d}"
        at = 100 * (time - first) / span
        found.append(_Tick(at, today) if step >= _DAY else _Tick(at, text, today if today != day else None))
        day = today
    return found


def _sizes(buckets: Sequence[Row]) -> Html | None:
    if not buckets:
        return None
    filled = _filled(buckets, ("messages", "bytes"))
    most = max(row["messages"] for row in filled)
    columns = _even(
        (f"{show_size(row['from'])} to {show_size(row['to'])}\n{row['messages']:,} messages, {show_size(row['bytes'])}",
         row["messages"] / most)
        for row in filled
    )  # fmt: skip
    return _drawn("messages by body as stored", 200, columns, _linear(most), _even_ticks(filled, show_size))


def _chains(buckets: Sequence[Row]) -> Html | None:
    filled = [row for row in _filled(buckets, ("slots", "entries")) if row["from"]] if buckets else []
    if not filled:
        return None
    most = max(math.ceil(math.log10(max(row["slots"] for row in filled))), 1)

    def height(value: float) -> float:
        # A little above the ground for 1, by powers of ten.
        return (math.log10(value) + 0.3) / (most + 0.3) if value else 0.0

    columns = _even(
        (f"chains of {show_range(row['from'], row['to'])}\n{row['slots']:,} slots, {row['entries']:,} entries",
         height(row["slots"]))
        for row in filled
    )  # fmt: skip
    lines = [(height(10**power), f"{10**power:,}") for power in range(most + 1)]
    ticks = _even_ticks(filled, lambda value: f"{value:,}")
    return _drawn("slots, by powers of ten, by entries in the chain", 200, columns, lines, ticks)


def _even(rows: Iterable[tuple[str, float]]) -> list[_Column]:
    given = list(rows)
    width = 100 / len(given)
    return [_Column(width * number, width, words, (("one", high),)) for number, (words, high) in enumerate(given)]


def _even_ticks(rows: Sequence[Row], show: Callable[[int], str]) -> list[_Tick]:
    every = -(-len(rows) // (_TICKS_MAX + 1))
    return [_Tick(100 * (place + 0.5) / len(rows), show(rows[place]["from"])) for place in range(0, len(rows), every)]


def _linear(most: int) -> list[tuple[float, str]]:
    # Three to six lines at round values.
    step = next(digit * 10**power for power in range(20) for digit in (1, 2, 5) if most // (digit * 10**power) <= 5)
    return [(value / most, f"{value:,}") for value in range(0, most + 1, step)]


def _filled(buckets: Sequence[Row], columns: Sequence[str]) -> list[Row]:
    # Buckets of a power of two each, none left out: equal steps of a logarithmic axis.
    sums: dict[int, Row] = {}
    for row in buckets:
        mine = sums.setdefault(row["from"].bit_length(), dict.fromkeys(columns, 0))
        for column in columns:
            mine[column] += row[column]
    found = []
    for bits in range(min(sums), max(sums) + 1):
        first, last = (1 << (bits - 1), (1 << bits) - 1) if bits else (0, 0)
        found.append({"from": first, "to": last} | sums.get(bits, dict.fromkeys(columns, 0)))
    return found


def _drawn(
    title: str,
    height: int,
    columns: Sequence[_Column],
    lines: Sequence[tuple[float, str]],
    ticks: Sequence[_Tick],
    marks: Callable[[int], Html] | None = None,
) -> Html:
    ground = _TOP + height
    grid = [
        joined(
            element("line", x1=0, x2="100%", y1=y, y2=y, class_="grid"),
            element("text", text, x=-8, y=y, dy="0.32em", text_anchor="end"),
        )
        for y, text in ((round(ground - height * share), text) for share, text in lines)
    ]
    axis = [
        element(
            "g",
            element("text", tick.text, x=_percent(tick.at), y=ground + 16, text_anchor=_anchor(tick.at)),
            tick.below
            and element("text", tick.below, x=_percent(tick.at), y=ground + 32, text_anchor=_anchor(tick.at)),
            class_="wide" if number % 2 else None,
        )
        for number, tick in enumerate(ticks)
    ]
    drawn = element(
        "svg", grid, marks(height) if marks else None, [_bar(column, ground, height) for column in columns], axis,
        width="100%", height=ground + _BOTTOM, role="img", aria_label=title,
    )  # fmt: skip
    return element("figure", element("figcaption", title, class_="soft"), drawn, class_="plot")


def _bar(column: _Column, ground: int, height: int) -> Html:
    y, rects = float(ground), []
    for kind, share in column.parts:
        # What is counted is seen, however little it is.
        high = max(height * share, 1.0) if share else 0.0
        y -= high
        rects.append(
            element("rect", class_=kind, x=_percent(column.left), width=_percent(max(column.width * 0.94, 0.1)),
                    y=f"{y:.1f}", height=f"{high:.1f}")
        )  # fmt: skip
    words = "\n".join(printable(line) for line in column.words.split("\n"))
    return element("g", element("title", words), rects, class_="column")


def _anchor(at: float) -> str:
    return "start" if at < _APART / 2 else "end" if at > 100 - _APART / 2 else "middle"


def _percent(value: float) -> str:
    return f"{value:.2f}%"
