"""Draws the log of an audit as a strip in SVG: holes, what could not be read, and the index files below it.

Places are per cent of the width, so it fits a screen and a phone without a script. What lies too close to be told apart
is drawn as one. What index files say of log that has expired, or that is not written, gets a narrow zone beside the
log, not to scale. A hole is a link to its row in the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from indexd.audit.holes import Hole
from indexd.audit.report import AuditReport
from indexd.audit.verdict import is_pending
from indexd.config.units import printable
from indexd.pages.markup import Html, element, joined
from indexd.pages.wording import show_local, show_size

# Per cent of the width: what is nearer is drawn as one; the zones beside the log; columns of holes; between words.
_MERGED, _EXPIRED_WIDTH, _BEHIND_WIDTH, _COLUMN = 0.15, 7.0, 4.0, 1.0
_NUMBERS_WIDE, _NUMBERS_NARROW = 4.0, 12.0
_TICKS_WIDE, _TICKS_NARROW, _EDGE = 14.0, 30.0, 7.0
# Pixels, from the top.
_LOG_TOP, _LOG_HEIGHT, _NUMBERS_AT, _FILES_TOP, _FILE_HEIGHT, _AXIS_TOP, _HEIGHT = 22, 46, 84, 108, 13, 128, 168
_SEGMENTS_MAX = 120
# Holes that are drawn as one are never lower than this share of the log's height.
_SHARE_MIN = 0.1


@dataclass(frozen=True, slots=True)
class Scale:
    """``[begin, end)`` is the log; ``first`` is before it where files point to expired log, ``last`` likewise."""

    begin: int
    end: int
    first: int
    last: int

    @property
    def bounds(self) -> tuple[float, float]:
        """Where the log's first byte lies, and the byte behind its last one."""
        return _EXPIRED_WIDTH * (self.first < self.begin), 100.0 - _BEHIND_WIDTH * (self.last > self.end)

    def at(self, offset: int) -> float:
        """The place of ``offset``: never outside the drawing."""
        low, high = self.bounds
        if offset < self.begin:
            return max((offset - self.first) / max(self.begin - self.first, 1), 0.0) * low
        if offset > self.end:
            return high + min((offset - self.end) / max(self.last - self.end, 1), 1.0) * (100.0 - high)
        return low + (offset - self.begin) / max(self.end - self.begin, 1) * (high - low)


@dataclass(frozen=True, slots=True)
class Box:
    """Things that are drawn as one, ``[first, behind)`` per cent: their numbers, and the width that they fill."""

    first: float
    behind: float
    numbers: tuple[int, ...]
    width: float


def boxes_of(scale: Scale, ranges: Sequence[tuple[int, int]], column: float = 100.0) -> list[Box]:
    """Ranges of the log in order of their begins; those that a screen could not tell apart are put together.

    Put together they are at most ``column`` wide, but for one that is wider by itself.
    """
    boxes: list[Box] = []
    for number, (begin, end) in enumerate(ranges):
        first, behind = scale.at(begin), scale.at(end)
        last = boxes[-1] if boxes else Box(-1.0, -1.0, (), 0.0)
        width = behind - first
        if first - last.behind < _MERGED and max(behind, last.behind) - last.first < column:
            behind, numbers = max(behind, last.behind), (*last.numbers, number)
            boxes[-1] = Box(last.first, behind, numbers, last.width + width)
        else:
            first = max(first, last.behind)
            boxes.append(Box(first, max(behind, first + _MERGED), (number,), width))
    return [replace(box, behind=min(box.behind, 100.0)) for box in boxes]


def scale_of(report: AuditReport) -> Scale:
    """The log, and as much beside it as index files point to."""
    audit = report.audit
    files = [file for file in audit.files if file.entries]
    first = min([audit.log_begin, *(file.begin for file in files)])
    last = max([audit.log_end, *(file.end + 1 for file in files)])
    return Scale(audit.log_begin, max(audit.log_end, audit.log_begin + 1), max(first, 0), last)


def draw_strip(report: AuditReport, links: dict[int, str]) -> Html:
    """The drawing; ``links`` say where a hole, by its number in ``report.audit.holes``, is told of in full."""
    audit, scale = report.audit, scale_of(report)
    words = (
        f"The log from byte {audit.log_begin:,} to {audit.log_end:,}, {len(audit.files):,} index files, "
        f"{audit.hole_count:,} holes, {len(audit.gaps):,} ranges that could not be read"
    )
    holes = boxes_of(scale, [(hole.begin, hole.end) for hole in audit.holes], _COLUMN)
    return element(
        "svg",
        element("title", words),
        _patterns(),
        _log(report, scale),
        [_hole(report, box, links) for box in holes],
        _numbers(audit.holes, holes),
        _files(report, scale),
        _axis(report, scale),
        class_="strip",
        width="100%",
        height=_HEIGHT,
        role="group",
        aria_label=words,
    )


def swatch(kind: str) -> Html:
    """A small piece of what the strip is drawn with, for its legend."""
    box = element("rect", class_=kind, width=22, height=12)
    return element("svg", box, class_="swatch", width=22, height=12, aria_hidden="true")


def _patterns() -> Html:
    # Told apart without colour, too: on paper, and by those who see no difference between red and green.
    shapes = (
        ("hole", 7, "M0 3.5H7", -45),
        ("pending", 6, "M1.5 3a1.4 1.4 0 1 0 2.8 0a1.4 1.4 0 1 0 -2.8 0", 0),
        ("gap", 6, "M0 0L6 6M6 0L0 6", 0),
        ("expired", 8, "M0 4H8", 90),
        ("wrong", 5, "M0 2.5H5", 45),
    )
    drawn = []
    for name, size, line, turned in shapes:
        ground = element("rect", width=size, height=size, class_=f"{name}-ground")
        units = {"patternUnits": "userSpaceOnUse", "patternTransform": f"rotate({turned})"}
        path = element("path", d=line, class_=f"{name}-line")
        drawn.append(element("pattern", ground, path, id=f"p-{name}", width=size, height=size, **units))
    return element("defs", drawn)


def _log(report: AuditReport, scale: Scale) -> Html:
    audit, (low, high) = report.audit, scale.bounds
    boxes = [_rect("log", low, high, "findable, where nothing else is drawn")]
    if scale.first < scale.begin:
        words = f"expired: index files still point to log bytes {scale.first:,} to {scale.begin:,} (not to scale)"
        boxes.append(_rect("expired", 0, low, words))
    if scale.last > scale.end:
        words = f"index files point behind the end of the log, to byte {scale.last:,} (not to scale)"
        boxes.append(_rect("behind", high, 100, words))
    begins = [segment.begin for segment in report.standing.segments if audit.log_begin < segment.begin < audit.log_end]
    lines = [
        element("line", x1=at, x2=at, y1=_LOG_TOP, y2=_LOG_TOP + _LOG_HEIGHT, class_="segment")
        for at in (_percent(scale.at(begin)) for begin in begins if len(begins) <= _SEGMENTS_MAX)
    ]
    for box in boxes_of(scale, [(gap.begin, gap.end) for gap in audit.gaps]):
        gap = audit.gaps[box.numbers[0]]
        words = f"bytes {gap.begin:,} to {gap.end:,} not read: {gap.reason}"
        many = f"{len(box.numbers):,} ranges that could not be read"
        boxes.append(_rect("gap", box.first, box.behind, words if len(box.numbers) == 1 else many))
    return joined(
        element("text", f"byte {audit.log_begin:,}", x=_percent(low), y=14, class_="quiet"),
        element("text", f"{show_size(audit.log_end - audit.log_begin)} of log", x="50%", y=14,
                text_anchor="middle", class_="quiet wide"),
        element("text", f"{audit.log_end:,}", x=_percent(high), y=14, text_anchor="end", class_="quiet"),
        boxes[:1], lines, boxes[1:],
    )  # fmt: skip


def _rect(kind: str, first: float, behind: float, words: str, top: int = _LOG_TOP, height: int = _LOG_HEIGHT) -> Html:
    title = element("title", printable(words))
    return element("rect", title, class_=kind, x=_percent(first), width=_percent(behind - first), y=top, height=height)


def _hole(report: AuditReport, box: Box, links: dict[int, str]) -> Html:
    holes = [report.audit.holes[number] for number in box.numbers]
    largest = _largest(report.audit.holes, box)
    begin, end = min(hole.begin_timestamp for hole in holes), max(hole.end_timestamp for hole in holes)
    what = f"Hole {largest + 1}" if len(holes) == 1 else f"{len(holes):,} holes, the largest is number {largest + 1}"
    words = f"{what}, {show_local(begin)} to {show_local(end)}: {sum(hole.keys for hole in holes):,} keys not findable"
    words += f", {show_size(sum(hole.size for hole in holes))}; {report.causes[largest].words}"
    kind = "pending" if all(is_pending(report.causes[number]) for number in box.numbers) else "hole"
    # Where it is too narrow for that to be seen, it has the whole height.
    share = min(box.width / (box.behind - box.first), 1.0) if box.behind - box.first > _COLUMN / 2 else 1.0
    height = round(_LOG_HEIGHT * max(share, _SHARE_MIN))
    drawn = _rect(kind, box.first, box.behind, words, _LOG_TOP + _LOG_HEIGHT - height, height)
    return element("a", drawn, href=links.get(largest, "#holes"), aria_label=printable(words))


def _largest(holes: Sequence[Hole], box: Box) -> int:
    return max(box.numbers, key=lambda number: holes[number].keys)


def _numbers(holes: Sequence[Hole], boxes: Sequence[Box]) -> list[Html]:
    middles = [(box.first + box.behind) / 2 for box in boxes]
    narrow = set(apart(middles, _NUMBERS_NARROW))
    return [
        element(
            "text", f"{_largest(holes, boxes[at]) + 1}" + "+" * (len(boxes[at].numbers) > 1), x=_percent(middles[at]),
            y=_NUMBERS_AT, text_anchor=_anchor(middles[at]), class_="number" + ("" if at in narrow else " wide"),
        )
        for at in apart(middles, _NUMBERS_WIDE)
    ]  # fmt: skip


def _files(report: AuditReport, scale: Scale) -> Html:
    wrong = {finding.file for finding in report.audit.findings}
    files = sorted((file for file in report.audit.files if file.entries), key=lambda file: (file.begin, file.name))
    count = len(report.audit.files)
    drawn = [element("text", f"{count:,} index file{'' if count == 1 else 's'}", x=0, y=_FILES_TOP - 6, class_="quiet")]
    for box in boxes_of(scale, [(file.begin, file.end + 1) for file in files], _COLUMN):
        shown = [files[number] for number in box.numbers]
        is_wrong = any(f"index/{file.name}" in wrong for file in shown)
        words = f"{len(shown):,} index files, the last of them " if len(shown) > 1 else ""
        words += f"{shown[-1].name}: {shown[-1].entries:,} entries, log bytes {shown[-1].begin:,} to {shown[-1].end:,}"
        words = f"with findings: {words}" if is_wrong else words
        kind = "file wrong" if is_wrong else "file"
        drawn.append(_rect(kind, box.first, box.behind, words, _FILES_TOP, _FILE_HEIGHT))
    return joined(drawn)


def _axis(report: AuditReport, scale: Scale) -> Html:
    low, high = scale.bounds
    points = known_times(report, scale)
    places = [scale.at(offset) for offset, _ in points]
    narrow = set(apart(places, _TICKS_NARROW))
    drawn = [element("line", x1=_percent(low), x2=_percent(high), y1=_AXIS_TOP, y2=_AXIS_TOP, class_="axis")]
    day = ""
    for at in apart(places, _TICKS_WIDE):
        x, anchor, (today, _, moment) = (
            _percent(places[at]),
            _anchor(places[at]),
            show_local(points[at][1]).partition(" "),
        )
        mark = element("line", x1=x, x2=x, y1=_AXIS_TOP, y2=_AXIS_TOP + 4, class_="axis")
        text = element("text", moment or today, x=x, y=_AXIS_TOP + 17, text_anchor=anchor)
        below = element("text", today, x=x, y=_AXIS_TOP + 32, text_anchor=anchor, class_="quiet")
        drawn.append(element("g", mark, text, below if today != day else None, class_=None if at in narrow else "wide"))
        day = today
    return joined(drawn)


def known_times(report: AuditReport, scale: Scale) -> list[tuple[int, int]]:
    """Offsets in the log with their store timestamps, rising: where segments and holes begin."""
    known = [(one.begin, one.store_timestamp) for one in report.standing.segments if one.store_timestamp is not None]
    known += [(hole.begin, hole.begin_timestamp) for hole in report.audit.holes]
    points: list[tuple[int, int]] = []
    for offset, moment in sorted(known):
        # A clock that went back has no place on an axis.
        if scale.begin <= offset <= scale.end and moment > 0 and (not points or moment >= points[-1][1]):
            points.append((offset, moment))
    return points


def apart(places: Sequence[float], least: float) -> Iterator[int]:
    """The numbers of those places, of a rising list, that stand ``least`` per cent apart from the one before."""
    last = -100.0
    for number, place in enumerate(places):
        if place - last >= least:
            last = place
            yield number


def _anchor(at: float) -> str:
    return "start" if at < _EDGE else "end" if at > 100 - _EDGE else "middle"


def _percent(value: float) -> str:
    return f"{value:.3f}%"
