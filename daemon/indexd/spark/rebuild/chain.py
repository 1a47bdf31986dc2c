"""The chain of runs: each has to begin where the one before it ended, as one process would have read the log.

Splits are planned where messages begin, but a log is another process's memory: it is cut, written on, and holds bytes
that are no frame. What does not chain is read again from where the run before it stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from indexd.commitlog.evidence import Evidence, thinned
from indexd.commitlog.suspects import AT_FIRST, Stand
from indexd.errors import DisturbedError
from indexd.flush.frontier import UNPROVEN, Uncovered, add_uncovered
from indexd.spark.rebuild.runs import Run
from indexd.spark.rebuild.stage_one import Unreadable
from indexd.spark.splits import Split

# As the daemon has it: the first frame of so many segments is kept, however close they lie.
_SEGMENTS_NOTED = 64


def chain(found: Sequence[Run | Unreadable], begin: int, end: int, segment_size: int) -> tuple[list[Run], Split | None]:
    """The runs that one process would have made of log bytes ``[begin, end)``, and a split that is missing among them.

    Runs that stand elsewhere do not count. Raises the error of a split that could not be read where it is needed, and
    DisturbedError for a run that came to nothing.
    """
    at = {item.split.begin: item for item in found}
    runs: list[Run] = []
    position = begin
    while position < end:
        item = at.get(position)
        if item is None:
            return runs, _missing(position, at, end, segment_size)
        if runs and position % segment_size and _begins_badly(item):
            # A message was to begin there: whoever comes from the one before knows what does.
            if runs[-1].split.end >= item.split.end:
                break
            return runs, Split(runs[-1].split.begin, item.split.end)
        if isinstance(item, Unreadable):
            raise item.error
        runs.append(item)
        # Where others were planned behind it, the end of the log is looked at once more.
        if item.unreadable is not None or (item.ends_log and (item.split.end >= end or item.next_offset == position)):
            break
        if item.next_offset <= position:
            raise DisturbedError(f"the log at {position} changed while it was read", "run it again")
        position = item.next_offset
    return runs, None


def _begins_badly(item: Run | Unreadable) -> bool:
    if isinstance(item, Unreadable):
        return item.offset == item.split.begin
    return bool(item.skipped) and item.skipped[0].begin == item.split.begin


def _missing(position: int, begins: dict[int, Run | Unreadable], end: int, segment_size: int) -> Split:
    segment_end = position - position % segment_size + segment_size
    later = min((begin for begin in begins if begin > position), default=end)
    return Split(position, min(later, segment_end, end))


def evidence_of(runs: Sequence[Run], segment_size: int) -> tuple[Evidence, ...]:
    """The evidence of all runs as that of one log, thinned as the daemon thins it."""
    points: list[Evidence] = []
    messages = 0
    for run in runs:
        points += (replace(point, messages=messages + point.messages) for point in run.evidence)
        messages += run.messages
    if not points:
        return ()
    newest = points[-1].phy_offset // segment_size * segment_size
    bases = range(newest - (_SEGMENTS_NOTED - 1) * segment_size, newest + 1, segment_size)
    return thinned(points, points[-1].phy_offset, bases)


def uncovered_of(runs: Sequence[Run], stand: Stand = AT_FIRST) -> tuple[Uncovered, ...]:
    """What was passed over and what nobody can prove, as one process writes it down."""
    gaps: tuple[Uncovered, ...] = ()
    for run in runs:
        for gap in run.skipped:
            gaps = add_uncovered(gaps, Uncovered(gap.begin, gap.end, gap.reason))
    if stand.unproven_from is not None:
        end = max(run.batch_end for run in runs)
        gaps = add_uncovered(gaps, Uncovered(stand.unproven_from, end, UNPROVEN))
    return gaps


def stand_behind(runs: Sequence[Run], segment_size: int) -> Stand:
    """What one process knows of suspects at the end: those before the last segment that is in use are none."""
    newest = runs[-1].split.begin // segment_size if runs else 0
    stand = AT_FIRST
    for run in runs:
        if run.first_offset is None:
            continue
        if run.split.begin // segment_size < newest:
            stand = Stand(run.last_timestamp)
        else:
            stand = stand.after(run.first_offset, run.stand)
    return stand
