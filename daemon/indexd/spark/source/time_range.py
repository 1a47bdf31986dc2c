"""Which part of the log can hold messages of a time range; what is read is then looked at row by row all the same.

Nothing is left out by guess unless somebody asks for it. The sparse indexes of a data directory say for sure before
which offset every message is older: each segment's has its largest time. The smallest is not known, so the end of a
range leaves nothing out.

With ``timeSlack`` the first message of each segment must do: the log is taken to be in order of time but for the
slack, by which the broker's clock may have gone back. A clock that was off by more inside a segment, and was right
again at the next one's begin, then leaves messages out.
"""

from __future__ import annotations

from itertools import accumulate

from indexd.query.bound import scan_start
from indexd.query.source import open_index
from indexd.spark.source.log_end import LogEnd
from indexd.spark.source.options import SourceOptions
from indexd.storage.disk import Disk

_NEVER, _ALWAYS = -(1 << 63), (1 << 63) - 1


def time_range(disk: Disk, options: SourceOptions, log_end: LogEnd) -> tuple[int | None, int | None]:
    """(begin, end): physical offsets outside of which no message is of the time asked for; None sets no bound.

    A message begins at each, or a segment. Raises what opening a data directory does where one is given.
    """
    start_time, end_time = options.start_time, options.end_time
    slack = options.time_slack
    begin = end = None
    if start_time is not None and options.has_data:
        begin = _by_sparse_indexes(disk, options, start_time)
    if slack is None or (start_time is None and end_time is None):
        return begin, end
    log_end.refresh()
    bases, times = _first_messages(log_end)
    if start_time is not None and begin is None:
        begin = segment_before(bases, times, start_time - slack)
    if end_time is not None:
        end = segment_behind(bases, times, end_time + slack)
    return begin, end


def segment_before(bases: list[int], times: list[int | None], time: int) -> int | None:
    """The last segment up to whose first message all first messages are older than ``time``; an unknown one is not."""
    newest = accumulate((_ALWAYS if found is None else found for found in times), max)
    older = [base for base, found in zip(bases, newest, strict=True) if found < time]
    return older[-1] if older else None


def segment_behind(bases: list[int], times: list[int | None], time: int) -> int | None:
    """The first segment from which on all first messages are of ``time`` or later; an unknown one is not."""
    oldest = list(accumulate((_NEVER if found is None else found for found in reversed(times)), min))[::-1]
    later = [base for base, found in zip(bases, oldest, strict=True) if found >= time]
    return later[0] if later else None


def _first_messages(log_end: LogEnd) -> tuple[list[int], list[int | None]]:
    # Of the segments in use: where they begin, and the store time of what stands there.
    segments = [segment for segment in log_end.log.segments if log_end.is_in_use(segment)]
    bases = [segment.base for segment in segments]
    return bases, [log_end.store_timestamp(base) for base in bases]


def _by_sparse_indexes(disk: Disk, options: SourceOptions, start_time: int) -> int | None:
    index = open_index(disk, options.config)
    try:
        look = index.look()
        coverage = look.queue_coverage
        if coverage.starts_late or look.frontier.sparse is None:
            return None
        begin = max(coverage.begin, coverage.log_begin or 0)
        found = scan_start(index, look, start_time, begin)
        # What was left out when it was built may be read now.
        return min([found, *(gap.begin for gap in coverage.uncovered if gap.end > begin)])
    finally:
        index.close()
