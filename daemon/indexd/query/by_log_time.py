"""The first message of the log that was stored at a time or later, without scanning the log (spec kafka-index 9).

Kafka's findOffsetByTimestamp, exactly: of all messages with that store time or a later one, the first in the order of
the log. Where the broker's clock fell, later messages may be older again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from indexd.errors import UsageError
from indexd.query.bound import scan_start
from indexd.query.coverage import Coverage, why_empty
from indexd.query.frames import Frame, FrameScan
from indexd.query.source import Look, QueryIndex


@dataclass(frozen=True, slots=True)
class LogTimeAnswer:
    """``phy_offset``, ``store_timestamp`` and the base of the segment, all None if there is none; ``why`` then is set.

    ``scanned`` counts the messages that were looked at. ``unreadable`` counts places of the covered log where bytes are
    no frame, and a message might have been.
    """

    timestamp: int
    phy_offset: int | None
    store_timestamp: int | None
    segment: int | None
    scanned: int
    unreadable: int
    coverage: Coverage
    why: str | None = None

    def to_json(self) -> dict[str, Any]:
        """One object; members that do not apply are left out."""
        row: dict[str, Any] = {
            "timestamp": self.timestamp,
            "phyOffset": self.phy_offset,
            "storeTimestamp": self.store_timestamp,
            "segment": self.segment,
            "scanned": self.scanned,
        }
        if self.unreadable:
            row["unreadable"] = self.unreadable
        if self.why is not None:
            row["why"] = self.why
        return row | {"coverage": self.coverage.to_json()}


def query_log_time(index: QueryIndex, timestamp: int) -> LogTimeAnswer:
    """The first covered message with a store time of at least ``timestamp`` ms; UsageError without sparse indexes."""
    look = index.look()
    if look.frontier.sparse is None:
        raise UsageError(
            f"{index.files.data} holds no sparse indexes", "run the daemon with sparse = true to have them built"
        )
    coverage = look.queue_coverage
    scan = FrameScan(index.log, coverage.uncovered)
    frame, scanned = _first(index, look, scan, timestamp)
    if frame is None:
        why = why_empty(coverage, index.log, expired=0, unreadable=scan.unreadable)
        return LogTimeAnswer(timestamp, None, None, None, scanned, scan.unreadable, coverage, why)
    segment = frame.phy_offset - frame.phy_offset % index.log.segment_size
    return LogTimeAnswer(
        timestamp, frame.phy_offset, frame.store_timestamp, segment, scanned, scan.unreadable, coverage
    )


def _first(index: QueryIndex, look: Look, scan: FrameScan, timestamp: int) -> tuple[Frame | None, int]:
    coverage, size = look.queue_coverage, index.log.segment_size
    begin, scanned = max(coverage.begin, coverage.log_begin or 0), 0
    while begin < coverage.end:
        begin = scan_start(index, look, timestamp, begin)
        segment_end = min(begin - begin % size + size, coverage.end)
        for frame in scan.frames(begin, segment_end):
            scanned += 1
            if frame.store_timestamp >= timestamp:
                return frame, scanned
        begin = segment_end
    return None, scanned
