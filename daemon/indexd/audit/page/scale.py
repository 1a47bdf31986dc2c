"""Where a physical offset lies on a drawing of the log, in per cent of its width, and what the time was there.

What index files say of log that has expired gets a narrow zone before the log's first byte, not to scale, and what they
say of log that is not written a narrower one behind its last: neither may push the log itself aside.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

#: Per cent: what is nearer than this is drawn as one.
MERGED = 0.15
_EXPIRED_WIDTH = 7.0
_BEHIND_WIDTH = 4.0
_SECOND, _MINUTE, _HOUR, _DAY = 1000, 60_000, 3_600_000, 86_400_000
_STEPS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500,
    *(_SECOND * n for n in (1, 2, 5, 10, 15, 30)), *(_MINUTE * n for n in (1, 2, 5, 10, 15, 30)),
    *(_HOUR * n for n in (1, 2, 3, 6, 12)), *(_DAY * n for n in (1, 2, 7, 14, 30, 90, 365)),
)  # fmt: skip
_TICKS_MAX = 8
# Farther apart than this no two messages of a log are; one of the times is wrong.
_SPAN_MAX = 8 * 365 * _DAY


@dataclass(frozen=True, slots=True)
class Scale:
    """``[begin, end)`` is the log; ``first`` is before it where files point to expired log, ``last`` likewise."""

    begin: int
    end: int
    first: int
    last: int

    @property
    def log_begins_at(self) -> float:
        """Where the log's first byte lies."""
        return _EXPIRED_WIDTH if self.first < self.begin else 0.0

    @property
    def log_ends_at(self) -> float:
        """Where the byte behind the log's last one lies."""
        return 100.0 - _BEHIND_WIDTH if self.last > self.end else 100.0

    def at(self, offset: int) -> float:
        """The place of ``offset``: never outside the drawing."""
        if offset < self.begin:
            share = (offset - self.first) / max(self.begin - self.first, 1)
            return max(share, 0.0) * self.log_begins_at
        if offset > self.end:
            share = (offset - self.end) / max(self.last - self.end, 1)
            return self.log_ends_at + min(share, 1.0) * (100.0 - self.log_ends_at)
        share = (offset - self.begin) / max(self.end - self.begin, 1)
        return self.log_begins_at + share * (self.log_ends_at - self.log_begins_at)


@dataclass(frozen=True, slots=True)
class Tick:
    """A time on the axis: its place, the time on this machine's clock, and the day where that is another."""

    at: float
    text: str
    day: str | None


def time_ticks(scale: Scale, known: Sequence[tuple[int, int]]) -> list[Tick]:
    """Round times by what is ``known``, physical offsets with their store timestamps (ms); none if that is too little.

    Between two known places the log is taken to have grown evenly.
    """
    points = _growing(scale, known)
    if len(points) < 2 or not 0 < points[-1][1] - points[0][1] <= _SPAN_MAX:
        return []
    try:
        zone = time.localtime(points[0][1] // 1000).tm_gmtoff * 1000
    except (OverflowError, OSError, ValueError):
        return []
    span = points[-1][1] - points[0][1]
    step = next((step for step in _STEPS if span // step <= _TICKS_MAX), _STEPS[-1])
    moment = -((-points[0][1] - zone) // step) * step - zone
    ticks: list[Tick] = []
    day: str | None = None
    for before, behind in pairwise(points):
        while before[1] <= moment <= behind[1]:
            grown = (moment - before[1]) / max(behind[1] - before[1], 1)
            text, today = _words(moment, step)
            ticks.append(Tick(scale.at(int(before[0] + grown * (behind[0] - before[0]))), text, today))
            moment += step
    for number, tick in enumerate(ticks):
        ticks[number] = Tick(tick.at, tick.text, tick.day if tick.day != day else None)
        day = tick.day
    return ticks


def _growing(scale: Scale, known: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    # A clock that went back has no place on an axis.
    points: list[tuple[int, int]] = []
    for offset, moment in sorted(set(known)):
        if scale.begin <= offset <= scale.end and moment > 0 and (not points or moment >= points[-1][1]):
            points.append((offset, moment))
    return points


def _words(moment: int, step: int) -> tuple[str, str | None]:
    local = time.localtime(moment // 1000)
    if step >= _DAY:
        return time.strftime("%d %b", local).lstrip("0"), time.strftime("%Y", local)
    text = time.strftime("%H:%M" if step >= _MINUTE else "%H:%M:%S", local)
    text += f".{moment % 1000:03d}" if step < _SECOND else ""
    return text, time.strftime("%d %b", local).lstrip("0")


def apart(places: Sequence[float], least: float) -> Iterator[int]:
    """The numbers of those places, of a rising list, that stand ``least`` per cent apart from the one before."""
    last = -100.0
    for number, place in enumerate(places):
        if place - last >= least:
            last = place
            yield number
