"""KnownLog: what the log says today about the evidence that was kept when it was indexed (decision 7).

Decides whether this is the same log at all, and from where on the entries have to be compared with it. Reads only.
"""

from __future__ import annotations

from pathlib import Path

from indexd.commitlog.evidence import WATCHED_SIZE, Evidence, FrameReader, compare, newest
from indexd.commitlog.reader import LogReader
from indexd.compare.log import Compared, Comparison
from indexd.errors import UnsafeStoreError
from indexd.flush.frontier import Frontier
from indexd.storage.disk import Disk


class KnownLog:
    """The evidence of one frontier held against the log that ``reader`` has listed.

    ``recheck_size``: so many bytes before the end are compared even if every point agrees, because a rewritten stretch
    may lie between two points.
    """

    def __init__(
        self, disk: Disk, reader: LogReader, frontier: Frontier, recheck_size: int, *, is_forced: bool
    ) -> None:
        self._disk = disk
        self._reader = reader
        self._recheck_size = recheck_size
        self._is_forced = is_forced
        begin = reader.log.min_offset or 0
        self._evidence = frontier.evidence
        self._points = tuple(point for point in frontier.evidence if point.phy_offset >= begin)
        self._agreement = compare(disk, reader.log, self._points, 2 * frontier.segment_size)
        self._anchor: Evidence | None = None
        self._has_expired = begin > frontier.begin_offset

    def check_same_store(self, data: Path, frontier: Frontier) -> None:
        """Raise UnsafeStoreError if nothing of what was indexed is in this log, though it should be."""
        if not self._reader.log.segments and frontier.phy_offset > frontier.begin_offset:
            what = "its commitlog is empty"
        elif self._agreement.differs is not None and self._agreement.agrees is None:
            what = f"none of the {len(self._points)} messages that were noted is where it was"
        else:
            return
        raise UnsafeStoreError(
            f"{frontier.store} is not the store that {data} was built from: {what}",
            "mount or give the right --store; if this one is right, give a fresh --data or remove the old one",
        )

    @property
    def is_same_log(self) -> bool:
        """All that was noted, and has not expired, is as it was."""
        return self._agreement.differs is None and self._agreement.agrees is not None

    @property
    def doubtful_from(self) -> int | None:
        """Behind this physical offset the log was rewritten; None if all evidence agrees."""
        if self._agreement.differs is None:
            return None
        return self._agreement.agrees.phy_offset if self._agreement.agrees is not None else 0

    def comparison(self, end: int) -> Comparison:
        """What to compare of the log before ``end``; the reader is put where it begins."""
        base = None if self._is_forced else self._newest_before(end)
        self._reader.position = base.phy_offset if base else self._reader.log.min_offset or 0
        self._anchor = base or next(iter(self._points), None)
        return Comparison(
            self._reader,
            end,
            self._first_behind,
            is_whole=self._is_forced,
            has_expired=self._has_expired,
            anchor=self._anchor.phy_offset if self._anchor else 0,
        )

    def messages_counted(self, compared: Compared, phy_offset: int) -> int:
        """How many messages are counted before ``phy_offset``, up to which the comparison agreed; expired ones too."""
        if compared.since is not None:
            return compared.since.messages + compared.messages - compared.before_anchor
        if self._anchor is None:
            # All of it has expired.
            before = (point.messages for point in self._evidence if point.phy_offset <= phy_offset)
            return compared.messages + max(before, default=0)
        return self._anchor.messages + compared.messages - compared.before_anchor

    def evidence_before(self, phy_offset: int) -> tuple[Evidence, ...]:
        """The points before ``phy_offset`` that are still true."""
        before = tuple(point for point in self._points if point.phy_offset < phy_offset)
        doubtful = before
        if before and self._agreement.differs is None:
            doubtful = newest(before, WATCHED_SIZE)  # a segment in the middle may be gone
        with FrameReader(self._disk, self._reader.log) as frames:
            return (*before[: len(before) - len(doubtful)], *(point for point in doubtful if frames.holds(point)))

    def _newest_before(self, end: int) -> Evidence | None:
        # The point at which to begin: a frame begins there, and what lies before it is not in doubt.
        last, limit = self._agreement.agrees, end - self._recheck_size
        if last is None:
            return None
        if self._agreement.differs is not None:
            # It was cut somewhere in the segment of the last point that agrees: that one may be stale, and others too.
            segment = self._reader.log.at(last.phy_offset)
            limit = min(limit, segment.base if segment else 0)
        sound = [point for point in self._points if point.phy_offset <= min(last.phy_offset, end)]
        return next((point for point in reversed(sound) if point.phy_offset <= limit), None)

    def _first_behind(self, phy_offset: int, store_timestamp: int) -> Evidence | None:
        behind = next((point for point in self._points if point.phy_offset > phy_offset), None)
        if behind is None or behind.store_timestamp < store_timestamp:
            # Nothing is known of it, or it is older than what stands before: left behind by a longer log.
            return None
        with FrameReader(self._disk, self._reader.log) as frames:
            return behind if frames.holds(behind) else None
