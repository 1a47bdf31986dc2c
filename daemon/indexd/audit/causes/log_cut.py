"""Where a broker that starts cuts its log: at the first bytes that are no frame, in the segments it goes through."""

from __future__ import annotations

from indexd.audit.standing import Standing
from indexd.audit.whole import Audit

# Segments whose frames a broker goes through when it starts, before and from 5.4 on (spec rocketmq-store 7.2).
_CHECKED_SEGMENTS = 3
_CHECKED_SEGMENTS_5_4 = 1


def log_cut(audit: Audit, standing: Standing, dispatch_offset: int) -> tuple[int, str | None]:
    """The physical offset where the log ends after the next start, and why, if it ends in bytes that are no frame.

    An index that reaches behind that has the broker pass over what it writes there (spec rocketmq-store 4.2, 7.4, 7.5).
    ``dispatch_offset`` is from where an unclean start goes through the log.
    """
    begins = [segment.begin for segment in standing.segments if segment.begin < audit.log_end]
    is_5_4 = bool(audit.eras) and audit.eras[-1].flavour == "5.4"
    count = _CHECKED_SEGMENTS_5_4 if is_5_4 else _CHECKED_SEGMENTS
    checked_from = begins[-count:][0] if begins else audit.log_begin
    if standing.has_abort or standing.is_live:
        checked_from = min(checked_from, dispatch_offset)
    for gap in audit.gaps:
        if gap.end > checked_from:
            return max(gap.begin, checked_from), gap.reason
    return audit.log_end, audit.unreadable
