"""Where no segment holds the reader's position: before the log, behind it, or in a hole of it."""

from __future__ import annotations

from indexd.commitlog.format import Corrupt, NotYetWritten
from indexd.commitlog.reading import Skipped
from indexd.commitlog.segments import SegmentList
from indexd.errors import DisturbedError

SEGMENTS_MISSING = "segments are missing"


def meet_gap(log: SegmentList, position: int, *, skip_corrupt: bool) -> NotYetWritten | Corrupt | Skipped:
    """What a reader at ``position`` has met; DisturbedError for a log that ends before what was read of it."""
    first = log.min_offset
    if first is None:
        return NotYetWritten(position)
    if position < first:
        return Skipped(position, first, "the log begins behind it: its segments have expired", True)
    later = log.after(position)
    if later is None:
        end = log.segments[-1].end
        if position > end:
            raise DisturbedError(f"the log was cut: it ends at {end}, before {position}, which was read")
        return NotYetWritten(position)
    if not skip_corrupt:
        name = f"{position // later.size * later.size:020d}"
        what = f"nothing is named {name}, or a link to no plain file"
        return Corrupt(position, f"the segments between here and {later.path} are missing: {what}", None)
    return Skipped(position, later.base, SEGMENTS_MISSING)
