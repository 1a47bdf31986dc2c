"""The page's plots, as the plain objects that Plotly draws; what comes from the log is escaped, for it reads some HTML.

A colour is the name of one of the page's CSS variables, put in when the page is drawn, so that a plot follows the page
from light to dark.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from indexd.pages.wording import show_name, show_size, show_utc
from indexd.spark.stats.wording import show_range

Row = dict[str, Any]
#: Topics with a colour of their own; the rest are one more.
_TOPICS_MAX = 7
_HOUR = 3_600_000
_DAY = 24 * _HOUR
# More bars than this are days.
_HOURS_MAX = 24 * 40
_MARKS_MAX = 12


def plots_of(report: Row) -> dict[str, Row]:
    """Plot by the id of its place in the page: data, layout, and ``height`` in pixels."""
    found = {"hours": _hours(report), "sizes": _sizes(report["bodySizes"]["buckets"])}
    if report["index"] is not None and report["index"]["chains"]:
        found["chains"] = _chains(report["index"]["chains"])
    return {name: plot for name, plot in found.items() if plot["data"]}


def _label(text: str | None, longest: int = 28) -> str:
    return html.escape(show_name(text, longest))


def _hours(report: Row) -> Row:
    rows = [row for row in report["hours"] if row["hour"] is not None]
    if not rows:
        return {"data": []}
    first, last = min(row["hour"] for row in rows), max(row["hour"] for row in rows)
    step = _HOUR if (last - first) // _HOUR < _HOURS_MAX else _DAY
    own = [row["topic"] for row in report["topics"][:_TOPICS_MAX]]
    sums: dict[str | None, dict[int, int]] = {topic: {} for topic in own}
    for row in rows:
        of_topic = sums.setdefault(row["topic"] if row["topic"] in own else None, {})
        time = row["hour"] // step * step
        of_topic[time] = of_topic.get(time, 0) + row["messages"]
    others = len(report["topics"]) - len(own)
    data = []
    for number, (topic, counts) in enumerate(sums.items()):
        times = sorted(counts)
        name = _label(topic) if topic is not None else f"{others} other topics"
        data.append(
            {
                "type": "bar",
                "name": name,
                # The middle of the bar: it covers its hour.
                "x": [time + step // 2 for time in times],
                "y": [counts[time] for time in times],
                "width": step,
                "marker": {"color": f"--topic-{number if topic is not None else 'rest'}", "line": {"width": 0}},
                "customdata": [_hour_label(time, step) for time in times],
                "hovertemplate": f"{name}<br>%{{customdata}}<br><b>%{{y:,}}</b> messages<extra></extra>",
            }
        )
    shapes, notes = _marks(report["clock"])
    layout = {
        "barmode": "stack",
        "xaxis": {"type": "date", "fixedrange": False},
        "yaxis": {"title": {"text": "messages " + ("an hour" if step == _HOUR else "a day")}, "rangemode": "tozero"},
        "legend": {"orientation": "h", "y": -0.16, "x": 0, "traceorder": "normal"},
        "shapes": shapes,
        "annotations": notes,
    }
    return {"data": data, "layout": layout, "height": 400}


def _hour_label(time: int, step: int) -> str:
    return f"{show_utc(time)} UTC" if step == _HOUR else show_utc(time)[:10]


def _marks(clock: Row) -> tuple[list[Row], list[Row]]:
    # Steps of the clock as lines, silences as bands; the largest of each.
    shapes, notes = [], []
    for event in clock["largestSteps"][:_MARKS_MAX]:
        shapes.append(
            {"type": "line", "x0": event["before"], "x1": event["before"], "yref": "paper", "y0": 0, "y1": 1}
            | {"line": {"color": "--bad", "width": 1.5, "dash": "dot"}}
        )
        notes.append(_note(event["before"], "clock back", "--bad"))
    for event in clock["largestSilences"][:_MARKS_MAX]:
        shapes.append(
            {"type": "rect", "x0": event["before"], "x1": event["after"], "yref": "paper", "y0": 0, "y1": 1}
            | {"fillcolor": "--silence", "opacity": 0.35, "line": {"width": 0}, "layer": "below"}
        )
        notes.append(_note((event["before"] + event["after"]) // 2, "silence", "--soft"))
    return shapes, _apart(notes)


def _note(time: int, text: str, color: str) -> Row:
    place = {"x": time, "y": 1, "yref": "paper", "yanchor": "bottom", "xanchor": "center", "showarrow": False}
    return place | {"text": text, "font": {"size": 11, "color": color}}


def _apart(notes: list[Row]) -> list[Row]:
    # Where two would stand on one another, one is enough: its line is there.
    if not notes:
        return []
    notes.sort(key=lambda note: int(note["x"]))
    least = max((notes[-1]["x"] - notes[0]["x"]) // 10, _HOUR // 60)
    kept = [notes[0]]
    for note in notes[1:]:
        if note["x"] - kept[-1]["x"] >= least:
            kept.append(note)
    return kept


def _sizes(buckets: Sequence[Row]) -> Row:
    if not buckets:
        return {"data": []}
    filled = _filled(buckets, ("messages", "bytes"))
    labels = [f"{show_size(row['from'])} to {show_size(row['to'])}" for row in filled]
    data = {
        "type": "bar",
        "x": list(range(len(filled))),
        "y": [row["messages"] for row in filled],
        "marker": {"color": "--accent"},
        "customdata": [[label, show_size(row["bytes"])] for label, row in zip(labels, filled, strict=True)],
        "hovertemplate": "%{customdata[0]}<br><b>%{y:,}</b> messages, %{customdata[1]}<extra></extra>",
    }
    layout = {
        "bargap": 0.06,
        "xaxis": {"title": {"text": "body as stored"}} | _ticks([row["from"] for row in filled], show_size),
        "yaxis": {"title": {"text": "messages"}, "rangemode": "tozero"},
    }
    return {"data": [data], "layout": layout, "height": 300}


def _chains(buckets: Sequence[Row]) -> Row:
    filled = [row for row in _filled(buckets, ("slots", "entries")) if row["from"]]
    if not filled:
        return {"data": []}
    labels = [f"chains of {show_range(row['from'], row['to'])}" for row in filled]
    data = {
        "type": "bar",
        "x": list(range(len(filled))),
        "y": [row["slots"] or None for row in filled],
        "marker": {"color": "--accent"},
        "customdata": [[label, f"{row['entries']:,}"] for label, row in zip(labels, filled, strict=True)],
        "hovertemplate": "%{customdata[0]}<br><b>%{y:,}</b> slots, %{customdata[1]} entries<extra></extra>",
    }
    most = max(len(str(row["slots"])) for row in filled)
    layout = {
        "bargap": 0.06,
        "xaxis": {"title": {"text": "entries in the chain"}}
        | _ticks([row["from"] for row in filled], lambda n: f"{n:,}"),
        "yaxis": {"title": {"text": "slots, by powers of ten"}, "type": "log", "dtick": 1, "range": [-0.3, most]},
    }
    return {"data": [data], "layout": layout, "height": 300}


def _filled(buckets: Sequence[Row], columns: Sequence[str]) -> list[Row]:
    # Buckets of a power of two each, none left out: equal steps of a logarithmic axis.
    sums: dict[int, Row] = {}
    for row in buckets:
        bits = row["from"].bit_length()
        first, last = (1 << (bits - 1), (1 << bits) - 1) if bits else (0, 0)
        mine = sums.setdefault(bits, {"from": first, "to": last} | dict.fromkeys(columns, 0))
        for column in columns:
            mine[column] += row[column]
    for bits in range(min(sums), max(sums) + 1):
        first, last = (1 << (bits - 1), (1 << bits) - 1) if bits else (0, 0)
        sums.setdefault(bits, {"from": first, "to": last} | dict.fromkeys(columns, 0))
    return [sums[bits] for bits in sorted(sums)]


def _ticks(values: Sequence[int], show: Any) -> Row:
    every = -(-len(values) // 9)
    places = list(range(0, len(values), every))
    return {"tickvals": places, "ticktext": [show(values[place]) for place in places], "fixedrange": True}
