"""Where hits lie, in time and in the log: SVG whose places are per cent, so that it fits any width without a script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from indexd.pages.markup import Html, element, joined
from indexd.query import Coverage, Hit
from indexd.serve.web.wording import moment, show_count, show_size, show_utc

_BINS = 60
_BARS_HEIGHT = 38
_RUG_HEIGHT = 10
# What is there is seen: no part of the log is drawn narrower.
_PART_SHARE_MIN = 0.004


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of the log ``[begin, end)`` and what is the matter with it, a class of page.css."""

    begin: int
    end: int
    kind: str
    words: str


def timeline(hits: Sequence[Hit], begin: int, end: int) -> Html:
    """Hits by store time between two times in ms: bars of how many, and a mark for each."""
    times = [(hit.phy_offset, hit.store_timestamp) for hit in hits if hit.store_timestamp is not None]
    span = max(end - begin, 1)
    counts = [0] * _BINS
    for _, time in times:
        counts[min(max((time - begin) * _BINS // span, 0), _BINS - 1)] += 1
    highest = max(*counts, 1)
    bars = [
        element(
            "rect",
            element("title", _bin_words(number, count, begin, span)),
            class_="bar",
            x=f"{100 * number / _BINS:.3f}%",
            width=f"{100 / _BINS - 0.25:.3f}%",
            y=_BARS_HEIGHT - _height(count, highest),
            height=_height(count, highest),
        )
        for number, count in enumerate(counts)
        if count
    ]
    top, bottom = _BARS_HEIGHT + 3, _BARS_HEIGHT + 3 + _RUG_HEIGHT
    marks = [_mark(phy_offset, (time - begin) / span, top, bottom) for phy_offset, time in times]
    drawn = element(
        "svg", bars, element("line", class_="axis", x1="0", x2="100%", y1=_BARS_HEIGHT + 1, y2=_BARS_HEIGHT + 1), marks,
        class_="timeline", width="100%", height=bottom, role="img",
        aria_label=f"{len(times)} hits between {show_utc(begin)} and {show_utc(end)} UTC",
    )  # fmt: skip
    return element("figure", drawn, element("p", moment(begin), moment(end), class_="ends"), class_="where")


def log_strip(coverage: Coverage, hits: Sequence[Hit]) -> Html:
    """The log from its oldest byte that matters to where the answer ends, with a mark for each hit."""
    parts = parts_of(coverage)
    begin, end = parts[0].begin, max(part.end for part in parts)
    span = max(end - begin, 1)
    boxes = [
        element(
            "rect",
            element("title", f"{part.words}: {show_count(part.begin)} to {show_count(part.end)}"),
            class_=f"part {part.kind}",
            x=f"{100 * (part.begin - begin) / span:.3f}%",
            width=f"{100 * max((part.end - part.begin) / span, _PART_SHARE_MIN):.3f}%",
            y=0,
            height=12,
        )
        for part in parts
        if part.end > part.begin
    ]
    marks = [_mark(hit.phy_offset, (hit.phy_offset - begin) / span, 15, 25) for hit in hits]
    drawn = element(
        "svg", boxes, marks, class_="strip", width="100%", height=25 if marks else 12, role="img",
        aria_label=f"log bytes {begin} to {end}: " + ", ".join(part.words for part in parts),
    )  # fmt: skip
    size = show_size(end - begin)
    words = joined(
        element("span", show_count(begin)), element("span", f"{size} of log"), element("span", show_count(end))
    )
    return element("figure", drawn, element("p", words, class_="ends"), class_="where")


def parts_of(coverage: Coverage) -> list[Part]:
    """The log in the order of its bytes; holes come last, to be drawn over the rest. Never empty."""
    log_begin = coverage.begin if coverage.log_begin is None else coverage.log_begin
    begin, end = coverage.begin, coverage.end
    parts = []
    if log_begin > begin:
        parts.append(Part(begin, min(log_begin, end), "expired", "expired"))
    elif log_begin < begin:
        parts.append(Part(log_begin, begin, "hole", "before the index begins"))
    parts.append(Part(min(max(begin, log_begin), end), end, "durable", "indexed"))
    parts += [Part(gap.begin, gap.end, "hole", f"not indexed, {gap.reason}") for gap in coverage.uncovered]
    return parts


def _mark(phy_offset: int, share: float, top: int, bottom: int) -> Html:
    x = f"{100 * min(max(share, 0.001), 0.999):.3f}%"
    return element("line", class_="mark", data_offset=str(phy_offset), x1=x, x2=x, y1=top, y2=bottom)


def _height(count: int, highest: int) -> int:
    return max(round(_BARS_HEIGHT * count / highest), 3)


def _bin_words(number: int, count: int, begin: int, span: int) -> str:
    first, last = begin + span * number // _BINS, begin + span * (number + 1) // _BINS
    return f"{count} between {show_utc(first)} and {show_utc(last)} UTC"
