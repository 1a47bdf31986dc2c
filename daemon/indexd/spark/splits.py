"""Splits: the log in stretches that tasks read side by side, each beginning with a message; and where the log ends.

A driver plans them and reads little for it; a worker reads one with SplitReader, which is the daemon's own LogReader.
What a split came to says where it ended: where that is not where the next one begins, the log has changed meanwhile.

LogEnd finds where the log ends now, and tells later whether it is still the same log. An end is an offset at which a
message ends and one may begin, found by the daemon's own reader, so that the newest frame counts by the same rules.
Closed segments are not read: the next one begins where they end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from indexd.commitlog.batcher import DispatchBatch, within
from indexd.commitlog.cursor import SplitPoints
from indexd.commitlog.format import BLANK_SIZE, Corrupt, NotYetWritten
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
_PAUSE = 0.002
# So many times a newest message may settle, none of which stayed the newest: what is there by now is enough.
_NEWEST_MAX = 3
_ANEW = "start with a new checkpointLocation; startingOffset says where"

Position = dict[str, Any]
"""``{"offset": n, "message": m, "crc": c}``: everything before physical offset n has been read, m is where the last
message before it begins, and c the CRC-32 of that frame (its first 64 KiB). m and c are left out where a segment has
just begun. What they cannot show is a log that was cut before m while its bytes still stand; it shows when the broker
writes over them.
"""


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
    window = config.reader.read_bytes
    with closing(SplitPoints(disk, store.commit_log_directories, store.segment_size, rules, window)) as points:
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
        return [Split(first, behind) for first, behind in pairwise([*starts, last]) if first < behind]


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
        batch = within(batch, batch.begin_offset, self.split.end)
        if not batch.rows or not len(batch.columns.size):
            return batch
        # No message reaches over the split's end, unless the log has been written anew since the splits were planned.
        end = int(batch.columns.phy_offset[batch.rows - 1]) + int(batch.columns.size[batch.rows - 1])
        return replace(batch, end_offset=max(end, self.split.end))

    def frames(self, batch: DispatchBatch) -> NDArray[np.uint8]:
        """The bytes of a batch of this split, read again; fewer where the log holds fewer by now."""
        with FrameReader(self._disk, self._reader.log) as frames:
            return np.frombuffer(frames.read(batch.begin_offset, batch.end_offset), dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class End:
    """``offset``: where a message ends; ``message``: where the last one before it begins, None if none was met.

    ``corrupt``: the unreadable bytes that stand there, behind which the log goes on.
    """

    offset: int
    message: int | None = None
    corrupt: Corrupt | None = None

    def cut_off(self, splits: list[Split]) -> list[Split]:
        """The splits without what the log did not hold yet."""
        if self.corrupt is not None:
            return splits  # the task that meets it says so, or passes over it
        return [replace(split, end=min(split.end, self.offset)) for split in splits if split.begin < self.offset]


class LogEnd:
    """One look at the log from any known offset. Raises what reading the log does."""

    def __init__(self, disk: Disk, config: Config) -> None:
        self._disk = disk
        self._config = config
        # Neither key hashes nor the columns of a queue are needed to see where messages end.
        outputs = config.outputs.model_copy(update={"consume_queue": False, "sparse": False})
        index = config.index.model_copy(update={"flavour": "3.x"})
        rules = decode_rules(config.model_copy(update={"outputs": outputs, "index": index}))
        options = replace(once(reader_options(config)), check_tail=False)
        self._settle = max(options.settle, options.corrupt_after)
        self._reader = LogReader(disk, config.store.commit_log_directories, rules, options)
        self._reader.refresh()
        self._log = self._reader.log
        #: Where the log begins; 0 without segments.
        self.first = self._log.min_offset or 0

    def position(self, end: End) -> Position:
        """What to keep of ``end``, to know later whether the log is still the one that was read up to there."""
        if end.message is not None:
            with FrameReader(self._disk, self._log) as frames:
                found = frames.evidence(end.message)
            if found is not None:
                return {"offset": end.offset, "message": end.message, "crc": found.crc}
        return {"offset": end.offset}

    def check_same(self, position: Position) -> None:
        """DisturbedError unless the log is still the one that was read up to ``position``, as far as it can tell."""
        where, message = position["offset"], position.get("message")
        if self._log.segments and where > self._log.segments[-1].end:
            raise DisturbedError(f"the log was cut: it ends at {self._log.segments[-1].end}, before {where}", _ANEW)
        if message is None or message < self.first:
            return
        with FrameReader(self._disk, self._log) as frames:
            found = frames.evidence(message)
            is_same = found is not None and found.crc == position.get("crc")
            # Where a segment was over, nothing may follow that was not there before.
            if found is not None and is_same and message + found.size < where:
                is_same = frames.evidence(message + found.size) is None
        if not is_same:
            raise DisturbedError(f"the log was cut or written anew before {where}, up to where it was read", _ANEW)

    def now(self) -> End:
        """Where the log ends."""
        return self.behind(plan_splits(self._disk, self._config))

    def behind(self, splits: list[Split]) -> End:
        """The same, found from the last of the splits that were planned: what is before it is not read."""
        return self.from_here(splits[-1].begin if splits else self.first)

    def from_here(self, begin: int, end: int | None = None) -> End:
        """The last end of a message from ``begin``, where a message or a segment begins, up to ``end``.

        ``end`` None: the end of the log. A first message that is longer than that is taken all the same. Waits for the
        newest message to settle.
        """
        message: int | None = None
        left = _NEWEST_MAX * self._settle  # a writer may always put another one there
        with closing(self._reader) as reader:
            reader.position = self._last_segment(begin, end)
            while end is None or reader.position < end:
                found = reader.poll()
                if isinstance(found, Corrupt):
                    follows = found.path is None or reader.frames_follow()
                    return End(found.offset, message, found if follows else None)
                if isinstance(found, NotYetWritten):
                    if not reader.is_undecided or left <= 0:
                        break
                    left -= _PAUSE
                    time.sleep(_PAUSE)
                elif isinstance(found, DispatchBatch):
                    rows = found.rows if end is None else _rows_until(found, end, is_first=found.begin_offset == begin)
                    if rows:
                        message = int(found.columns.phy_offset[rows - 1])
                    if rows < found.rows:
                        return End(int(found.columns.phy_offset[rows]), message)
            return End(reader.position, message)

    def plan(self, begin: int, end: int, size: int | None) -> list[Split]:
        """The splits of log bytes ``[begin, end)``, both of which are where messages begin or end: all of them.

        What holds no message is in them, too: only a reader knows a blank record from bytes that are no frame.
        """
        planned = plan_splits(self._disk, self._config, size=size, begin=begin, end=end)
        bounds = [begin, *(split.begin for split in planned if begin < split.begin < end), end]
        return [Split(first, behind) for first, behind in pairwise(bounds) if first < behind]

    def _last_segment(self, begin: int, end: int | None) -> int:
        # Where to begin to look: at the last segment before ``end`` that holds anything, a broker makes one ahead.
        with FrameReader(self._disk, self._log) as frames:
            for segment in reversed(self._log.after(begin + 1)):
                is_before = end is None or segment.base <= end
                if is_before and any(frames.read(segment.base, segment.base + BLANK_SIZE)):
                    return segment.base
        return begin


def _rows_until(batch: DispatchBatch, end: int, *, is_first: bool) -> int:
    # How many messages of the batch end at ``end`` or before; one at least of the first.
    if batch.end_offset <= end:
        return batch.rows
    rows = int(np.searchsorted(batch.columns.phy_offset[: batch.rows], end, side="right")) - 1
    return max(rows, 1) if is_first else max(rows, 0)
