"""Splits: the log in stretches that tasks read side by side, each beginning with a message.

A driver plans them and reads little for it; a worker reads one with SplitReader, which is the daemon's own LogReader.
What a split came to says where it ended: where that is not where the next one begins, the log has changed meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from indexd.commitlog.batcher import DispatchBatch, before
from indexd.commitlog.cursor import SplitPoints
from indexd.commitlog.format import Corrupt
from indexd.commitlog.lookup import FrameReader
from indexd.commitlog.reader import LogReader, Skipped
from indexd.config import Config
from indexd.errors import DisturbedError
from indexd.recovery.open import decode_rules, reader_options
from indexd.recovery.recover import WholeLog, once
from indexd.storage.disk import Disk

# A task costs some 30 ms whatever it reads: less than this is not worth one.
_SIZE_MIN = 16 << 20
_NO_LIMIT = 1 << 63


@dataclass(frozen=True, slots=True)
class Split:
    """Messages that begin in log bytes ``[begin, end)``; the first begins at ``begin``, the next split at ``end``."""

    begin: int
    end: int

    @property
    def size(self) -> int:
        """Bytes of log; where segments are missing, they count, too."""
        return self.end - self.begin


def plan_splits(
    disk: Disk,
    config: Config,
    *,
    size: int | None = None,
    slots: int | None = None,
    begin: int | None = None,
    end: int | None = None,
) -> list[Split]:
    """The log in splits of about ``size`` bytes, none over two segments, in log order and without a gap.

    Without ``size`` it is a segment, or less when there would be too few for ``slots`` tasks at a time, by default one
    a processor. ``begin`` and ``end`` need not be where messages begin: those that begin between them are taken. Raises
    what reading the log does.
    """
    store, first, limit = config.store, begin or 0, _NO_LIMIT if end is None else end
    if first >= limit:
        return []
    rules = decode_rules(config)
    points = SplitPoints(disk, store.commit_log_directories, store.segment_size, rules, config.reader.read_bytes)
    try:
        segments = [
            segment
            for segment in points.log.segments
            if first < segment.end and segment.base < limit and points.is_in_use(segment.base)
        ]
        if size is None:
            total = sum(segment.size for segment in segments)
            size = min(max(-(-total // (2 * (slots or len(os.sched_getaffinity(0))))), _SIZE_MIN), store.segment_size)
        starts: list[int] = []
        for segment in segments:
            # Stretches of one size, rather than a short one at the end.
            known, pieces = segment.base, -(-segment.size // size)
            for number in range(pieces):
                target = max(segment.base + number * segment.size // pieces, first)
                found = points.at(target, known) if known <= target < limit else known
                if found is None:
                    break
                if not starts or found > starts[-1]:
                    starts.append(found)
                known = found
        if not starts:
            return []
        last = segments[-1].end
        if limit < last:
            known = max((start for start in starts if start <= limit), default=starts[0])
            last = points.at(limit, max(known, segments[-1].base)) or last
        ends = [*starts[1:], last]
        return [Split(first, behind) for first, behind in zip(starts, ends, strict=True) if first < behind]
    finally:
        points.close()


class SplitReader:
    """Iterates over the messages of a split. ``next_offset`` is where it stands; behind the iteration, where it ended.

    Raises CorruptDataError for unreadable bytes behind which the log goes on, unless the configuration says that they
    are skipped, and DisturbedError when the split has expired.
    """

    def __init__(self, disk: Disk, config: Config, split: Split) -> None:
        self._disk = disk
        self.split = split
        options = replace(once(reader_options(config)), check_tail=False, take_older=True)
        self._reader = LogReader(disk, config.store.commit_log_directories, decode_rules(config), options, split.begin)
        self._log = WholeLog(self._reader)
        self.next_offset = split.begin
        #: The log ended inside the split: nothing behind it counts.
        self.ends_log = False

    @property
    def unreadable(self) -> Corrupt | None:
        """Bytes at the end of the log that are no frame, as after a crash of the broker."""
        return self._log.unreadable

    def __iter__(self) -> Iterator[DispatchBatch | Skipped]:
        try:
            if self.split.begin >= self.split.end:
                return
            for found in self._log:
                if isinstance(found, Skipped):
                    if found.begin >= self.split.end:
                        # Behind a segment's end the reader has looked into the next one: that is the next split's.
                        self.next_offset = self.split.end
                        return
                    if found.is_expired:
                        raise DisturbedError(f"the log up to {found.end} expired while it was read")
                    self.next_offset = found.end
                else:
                    found = self._cut(found)  # noqa: PLW2901 - the rest is the next split's
                    self.next_offset = found.end_offset
                yield found
                if self._reader.position >= self.split.end:
                    return
            self.next_offset = self._reader.position
            self.ends_log = self.next_offset < self.split.end
        finally:
            self._reader.close()

    def _cut(self, batch: DispatchBatch) -> DispatchBatch:
        if batch.end_offset <= self.split.end:
            return batch
        batch = before(batch, self.split.end)
        if not batch.rows or not len(batch.columns.size):
            return batch
        # No message reaches over the split's end, unless the log has been written anew since the splits were planned.
        end = int(batch.columns.phy_offset[batch.rows - 1]) + int(batch.columns.size[batch.rows - 1])
        return replace(batch, end_offset=max(end, self.split.end))

    def frames(self, batch: DispatchBatch) -> NDArray[np.uint8]:
        """The bytes of a batch of this split, read again; fewer where the log holds fewer by now."""
        with FrameReader(self._disk, self._reader.log) as frames:
            return np.frombuffer(frames.read(batch.begin_offset, batch.end_offset), dtype=np.uint8)


def check_chain(splits: Sequence[Split], next_offsets: Sequence[int]) -> list[int]:
    """Indexes of the splits that did not end where the next one begins; the last one may end anywhere."""
    return [
        number
        for number, (split, found) in enumerate(zip(splits[:-1], next_offsets[:-1], strict=True))
        if found != split.end
    ]
