"""The log as a strip: what is findable, holes, what could not be read, and the index files below it, in SVG.

Places are per cent of the width, so it fits a screen and a phone without a script. What is narrower than a line is
drawn as one, and what would lie on one another then is drawn together. A hole is a link to its row in the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from indexd.audit.holes import Hole
from indexd.audit.page.bands import Band, lanes_of
from indexd.audit.page.scale import MERGED, Scale, Tick, apart, time_ticks
from indexd.audit.report import AuditReport
from indexd.audit.verdict import is_pending
from indexd.config.units import printable
from indexd.pages.markup import Html, element, joined
from indexd.pages.wording import show_local, show_size

# Pixels, from the top: the log, numbers of holes, the files, the axis.
_LOG_TOP, _LOG_HEIGHT = 22, 46
_NUMBERS_AT = 84
_FILES_TOP, _FILE_HEIGHT = 108, 13
_AXIS_HEIGHT = 40
# Per cent: columns of holes that lie close together are at most so wide.
_COLUMN = 1.0
# A column is never lower than this share of the log's height.
_SHARE_MIN = 0.1
# Per cent that words need, on a screen and on a phone.
_NUMBERS_WIDE, _NUMBERS_NARROW = 4.0, 12.0
_TICKS_WIDE, _TICKS_NARROW = 7.5, 22.0
_SEGMENTS_MAX = 120
# So near to an end of the axis words stand beside their tick, not below its middle.
_EDGE = 4.0


@dataclass(frozen=True, slots=True)
class Mark:
    """Holes that are drawn as one, ``[first, behind)`` per cent; ``number`` is that of the one with most keys.

    ``share`` is how much of the log there is in holes, 1 where it is too narrow for that to be seen.
    """

    first: float
    behind: float
    holes: tuple[int, ...]
    number: int
    share: float


def marks_of(holes: Sequence[Hole], scale: Scale) -> list[Mark]:
    """Holes in the order of the log; those that a screen could not tell apart are put together, column by column."""
    groups: list[tuple[float, float, list[int]]] = []
    for number, hole in enumerate(holes):
        first, behind = scale.at(hole.begin), scale.at(hole.end)
        before = groups[-1][1] if groups else 0.0
        if groups and first - before < MERGED and max(behind, before) - groups[-1][0] < _COLUMN:
            groups[-1] = (groups[-1][0], max(behind, before), [*groups[-1][2], number])
        else:
            first = max(first, before)
            groups.append((first, max(behind, first + MERGED), [number]))
    return [_mark(holes, scale, first, min(behind, 100.0), numbers) for first, behind, numbers in groups]


def _mark(holes: Sequence[Hole], scale: Scale, first: float, behind: float, numbers: Sequence[int]) -> Mark:
    width = sum(scale.at(holes[number].end) - scale.at(holes[number].begin) for number in numbers)
    share = min(width / (behind - first), 1.0) if behind - first > _COLUMN / 2 else 1.0
    return Mark(first, behind, tuple(numbers), max(numbers, key=lambda number: holes[number].keys), share)


def scale_of(report: AuditReport) -> Scale:
    """The log, and as much beside it as index files point to."""
    audit = report.audit
    files = [file for file in audit.files if file.entries]
    first = min([audit.log_begin, *(file.begin for file in files)])
    last = max([audit.log_end, *(file.end + 1 for file in files)])
    return Scale(audit.log_begin, max(audit.log_end, audit.log_begin + 1), max(first, 0), last)


def draw_strip(report: AuditReport, links: dict[int, str]) -> Html:
    """The drawing; ``links`` say where a hole, by its number in ``report.audit.holes``, is told of in full."""
    scale = scale_of(report)
    lanes = lanes_of(report, scale)
    axis = _FILES_TOP + max(len(lanes), 1) * (_FILE_HEIGHT + 3) + 4
    marks = marks_of(report.audit.holes, scale)
    return element(
        "svg",
        element("title", _summary(report)),
        _patterns(),
        _ends(report, scale),
        _log(report, scale),
        [_hole(report, mark, links) for mark in marks],
        _numbers(marks),
        element("text", _files_words(report), x=0, y=_FILES_TOP - 6, class_="quiet"),
        [_band(band, lane) for lane, bands in enumerate(lanes) for band in bands],
        _axis(report, scale, axis),
        class_="strip",
        width="100%",
        height=axis + _AXIS_HEIGHT,
        role="group",
        aria_label=_summary(report),
    )


def swatch(kind: str) -> Html:
    """A small piece of what the strip is drawn with, for its legend."""
    box = element("rect", class_=kind, width=22, height=12)
    return element("svg", box, class_="swatch", width=22, height=12, aria_hidden="true")


def _summary(report: AuditReport) -> str:
    audit = report.audit
    words = f"The log from byte {audit.log_begin:,} to {audit.log_end:,}, {len(audit.files):,} index files"
    return f"{words}, {audit.hole_count:,} holes, {len(audit.gaps):,} ranges that could not be read"


def _patterns() -> Html:
    # Told apart without colour, too: on paper, and by those who see no difference between red and green.
    def pattern(name: str, size: int, *lines: str, turned: int = 0) -> Html:
        ground = element("rect", width=size, height=size, class_=f"{name}-ground")
        drawn = [element("path", d=line, class_=f"{name}-line") for line in lines]
        turn = f"rotate({turned})" if turned else None
        units: dict[str, str | None] = {"patternUnits": "userSpaceOnUse", "patternTransform": turn}
        return element("pattern", ground, drawn, id=f"p-{name}", width=size, height=size, **units)

    return element(
        "defs",
        pattern("hole", 7, "M0 3.5H7", turned=-45),
        pattern("pending", 6, "M1.5 3a1.4 1.4 0 1 0 2.8 0a1.4 1.4 0 1 0 -2.8 0"),
        pattern("gap", 6, "M0 0L6 6", "M6 0L0 6"),
        pattern("expired", 8, "M0 4H8", turned=90),
        pattern("wrong", 5, "M0 2.5H5", turned=45),
    )


def _ends(report: AuditReport, scale: Scale) -> Html:
    audit = report.audit
    size = show_size(audit.log_end - audit.log_begin)
    return joined(
        element("text", f"byte {audit.log_begin:,}", x=_percent(scale.log_begins_at), y=14, class_="quiet"),
        element("text", f"{size} of log", x="50%", y=14, text_anchor="middle", class_="quiet wide"),
        element("text", f"{audit.log_end:,}", x=_percent(scale.log_ends_at), y=14, text_anchor="end", class_="quiet"),
    )


def _log(report: AuditReport, scale: Scale) -> Html:
    audit = report.audit
    boxes = [_box("log", scale.log_begins_at, scale.log_ends_at, "findable, where nothing else is drawn")]
    if scale.first < scale.begin:
        words = f"expired: index files still point to log bytes {scale.first:,} to {scale.begin:,}, which are gone"
        boxes.insert(0, _box("expired", 0, scale.log_begins_at, words + " (not to scale)"))
    if scale.last > scale.end:
        words = f"index files point behind the end of the log, to byte {scale.last:,} (not to scale)"
        boxes.append(_box("behind", scale.log_ends_at, 100, words))
    begins = [segment.begin for segment in report.standing.segments if audit.log_begin < segment.begin < audit.log_end]
    lines = [
        element("line", x1=_percent(at), x2=_percent(at), y1=_LOG_TOP, y2=_LOG_TOP + _LOG_HEIGHT, class_="segment")
        for at in (scale.at(begin) for begin in begins if len(begins) <= _SEGMENTS_MAX)
    ]
    gaps = [
        _box("gap", first, behind, words)
        for first, behind, words in _merged(
            (scale.at(gap.begin), scale.at(gap.end), f"bytes {gap.begin:,} to {gap.end:,} not read: {gap.reason}")
            for gap in audit.gaps
        )
    ]
    return joined(boxes, lines, gaps)


def _merged(boxes: Iterable[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    merged: list[tuple[float, float, str]] = []
    count = 1
    for first, behind, words in boxes:
        if merged and first - merged[-1][1] < MERGED:
            count += 1
            merged[-1] = (merged[-1][0], max(behind, merged[-1][1]), f"{count:,} ranges that could not be read")
        else:
            count = 1
            merged.append((first, max(behind, first + MERGED), words))
    return merged


def _box(kind: str, first: float, behind: float, words: str, top: int = _LOG_TOP, height: int = _LOG_HEIGHT) -> Html:
    title = element("title", printable(words))
    return element("rect", title, class_=kind, x=_percent(first), width=_percent(behind - first), y=top, height=height)


def _hole(report: AuditReport, mark: Mark, links: dict[int, str]) -> Html:
    holes = [report.audit.holes[number] for number in mark.holes]
    times = f"{show_local(min(hole.begin_timestamp for hole in holes))} to "
    times += show_local(max(hole.end_timestamp for hole in holes))
    keys = f"{sum(hole.keys for hole in holes):,} keys not findable"
    if len(holes) == 1:
        words = f"Hole {mark.number + 1}, {times}: {keys}, {show_size(holes[0].size)}; "
    else:
        words = f"{len(holes):,} holes, {times}: {keys}; the largest is number {mark.number + 1}: "
    words += report.causes[mark.number].words
    kind = "pending" if all(is_pending(report.causes[number]) for number in mark.holes) else "hole"
    height = round(_LOG_HEIGHT * max(mark.share, _SHARE_MIN))
    box = _box(kind, mark.first, mark.behind, words, _LOG_TOP + _LOG_HEIGHT - height, height)
    target = links.get(mark.number, "#holes")
    return element("a", box, href=target, aria_label=printable(words))


def _numbers(marks: Sequence[Mark]) -> list[Html]:
    middles = [(mark.first + mark.behind) / 2 for mark in marks]
    narrow = set(apart(middles, _NUMBERS_NARROW))
    return [
        element(
            "text", f"{marks[at].number + 1}" + ("+" if len(marks[at].holes) > 1 else ""), x=_percent(middles[at]),
            y=_NUMBERS_AT, text_anchor=_anchor(middles[at]), class_="number" + ("" if at in narrow else " wide"),
        )
        for at in apart(middles, _NUMBERS_WIDE)
    ]  # fmt: skip


def _band(band: Band, lane: int) -> Html:
    words = ("with findings: " if band.is_wrong else "") + band.words
    kind = "file wrong" if band.is_wrong else "file"
    return _box(kind, band.first, band.behind, words, _FILES_TOP + lane * (_FILE_HEIGHT + 3), _FILE_HEIGHT)


def _files_words(report: AuditReport) -> str:
    count = len(report.audit.files)
    return "no index file" if not count else f"{count:,} index file{'' if count == 1 else 's'}"


def _axis(report: AuditReport, scale: Scale, top: int) -> Html:
    begin, end = _percent(scale.log_begins_at), _percent(scale.log_ends_at)
    ticks = time_ticks(scale, known_times(report))
    narrow = set(apart([tick.at for tick in ticks], _TICKS_NARROW))
    shown = apart([tick.at for tick in ticks], _TICKS_WIDE)
    line = element("line", x1=begin, x2=end, y1=top, y2=top, class_="axis")
    return joined(line, [_tick(ticks[number], top, is_wide=number not in narrow) for number in shown])


def _tick(tick: Tick, top: int, *, is_wide: bool) -> Html:
    x, anchor = _percent(tick.at), _anchor(tick.at)
    mark = element("line", x1=x, x2=x, y1=top, y2=top + 4, class_="axis")
    text = element("text", tick.text, x=x, y=top + 17, text_anchor=anchor)
    day = element("text", tick.day, x=x, y=top + 32, text_anchor=anchor, class_="quiet") if tick.day else None
    return element("g", mark, text, day, class_="wide" if is_wide else None)


def known_times(report: AuditReport) -> list[tuple[int, int]]:
    """Offsets and store timestamps: where segments begin, holes, and what files say that have no findings."""
    audit = report.audit
    wrong = {finding.file for finding in audit.findings}
    known = [(s.begin, s.store_timestamp) for s in report.standing.segments if s.store_timestamp is not None]
    for hole in audit.holes:
        known += [(hole.begin, hole.begin_timestamp), (hole.last, hole.end_timestamp)]
    for file in audit.files:
        if file.entries and f"index/{file.name}" not in wrong:
            known += [(file.begin, file.begin_timestamp), (file.end, file.end_timestamp)]
    return known


def _anchor(at: float) -> str:
    return "start" if at < _EDGE else "end" if at > 100 - _EDGE else "middle"


def _percent(value: float) -> str:
    return f"{value:.3f}%"
