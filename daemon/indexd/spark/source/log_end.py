"""Finds where the log ends now, plans the splits up to there, and tells later whether it is still the same log.

An end is an offset at which a message ends and one may begin, found by the daemon's own reader, so that the newest
frame counts by the same rules. Closed segments are not read: the next one begins where they end.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from indexd.commitlog.batcher import DispatchBatch
from indexd.commitlog.format import BLANK_SIZE, Corrupt, NotYetWritten
from indexd.commitlog.lookup import FrameReader
from indexd.commitlog.reader import LogReader
from indexd.commitlog.segments import Segment, SegmentList
from indexd.config import Config
from indexd.errors import DisturbedError, MissingOk
from indexd.recovery.open import decode_rules, reader_options
from indexd.recovery.recover import once
from indexd.spark.splits import Split, plan_splits
from indexd.storage.disk import Disk

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
class End:
    """``offset``: where a message ends; ``message``: where the last one before it begins, None if none was met.

    ``corrupt``: the unreadable bytes that stand there, behind which the log goes on.
    """

    offset: int
    message: int | None = None
    corrupt: Corrupt | None = None


class LogEnd:
    """Looks from any known offset; keeps nothing open between two looks. Raises what reading the log does."""

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

    @property
    def log(self) -> SegmentList:
        """The segments as they were listed last."""
        return self._reader.log

    @property
    def first(self) -> int:
        """Where the log begins; 0 without segments."""
        return self.log.min_offset or 0

    def refresh(self) -> None:
        """List the segments again."""
        self._reader.refresh()

    def position(self, end: End) -> Position:
        """What to keep of ``end``, to know later whether the log is still the one that was read up to there."""
        if end.message is not None:
            with FrameReader(self._disk, self.log) as frames:
                found = frames.evidence(end.message)
            if found is not None:
                return {"offset": end.offset, "message": end.message, "crc": found.crc}
        return {"offset": end.offset}

    def check_same(self, position: Position) -> None:
        """DisturbedError unless the log is still the one that was read up to ``position``, as far as it can tell."""
        where, message = position["offset"], position.get("message")
        if self.log.segments and where > self.log.segments[-1].end:
            raise DisturbedError(f"the log was cut: it ends at {self.log.segments[-1].end}, before {where}", _ANEW)
        if message is None or message < self.first:
            return
        with FrameReader(self._disk, self.log) as frames:
            found = frames.evidence(message)
            is_same = found is not None and found.crc == position.get("crc")
            # Where a segment was over, nothing may follow that was not there before.
            if found is not None and is_same and message + found.size < where:
                is_same = frames.evidence(message + found.size) is None
        if not is_same:
            raise DisturbedError(f"the log was cut or written anew before {where}, up to where it was read", _ANEW)

    def from_here(self, begin: int, end: int | None = None) -> End:
        """The last end of a message from ``begin``, where a message or a segment begins, up to ``end``.

        ``end`` None: the end of the log. A first message that is longer than that is taken all the same. Waits for the
        newest message to settle.
        """
        reader = self._reader
        reader.refresh()
        reader.position = self._last_segment(begin, end)
        message: int | None = None
        left = _NEWEST_MAX * self._settle  # a writer may always put another one there
        try:
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
        finally:
            reader.close()

    def plan(self, begin: int, end: int, size: int | None) -> list[Split]:
        """The splits of log bytes ``[begin, end)``, both of which are where messages begin or end: all of them.

        What holds no message is in them, too: only a reader knows a blank record from bytes that are no frame.
        """
        if begin >= end:
            return []
        splits = plan_splits(self._disk, self._config, size=size, begin=begin, end=end)
        if not splits or splits[0].begin >= end:
            return [Split(begin, end)]
        if splits[0].begin > begin:
            splits.insert(0, Split(begin, splits[0].begin))
        last = splits[-1]
        splits[-1] = Split(last.begin, min(last.end, end))
        return splits if last.end >= end else [*splits, Split(last.end, end)]

    def trimmed(self, splits: list[Split]) -> list[Split]:
        """The same splits without what the log does not hold yet."""
        self.refresh()
        found = self.from_here(self.first)
        if found.corrupt is not None:
            return splits  # the task that meets it says so, or passes over it
        return [replace(split, end=min(split.end, found.offset)) for split in splits if split.begin < found.offset]

    def _last_segment(self, begin: int, end: int | None) -> int:
        # Where to begin to look: at the last segment before ``end`` that is in use, if none is missing in between.
        following: list[Segment] = []
        last_end: int | None = None
        for segment in self.log.segments:
            if segment.base <= begin < segment.end:
                last_end = segment.end
            elif segment.base == last_end and (end is None or segment.base <= end):
                following.append(segment)
                last_end = segment.end
        return next((segment.base for segment in reversed(following) if self._is_in_use(segment)), begin)

    def _is_in_use(self, segment: Segment) -> bool:
        """Whether the segment holds anything: a broker makes one ahead."""
        with MissingOk(), self._disk.open_read(segment.path) as file:
            return any(file.pread(BLANK_SIZE, 0))
        return False  # expired just now, or not made yet


def _rows_until(batch: DispatchBatch, end: int, *, is_first: bool) -> int:
    # How many messages of the batch end at ``end`` or before; one at least of the first.
    if batch.end_offset <= end:
        return batch.rows
    begins = batch.columns.phy_offset[: batch.rows]
    rows = int(np.searchsorted(begins, end, side="right")) - 1
    return max(rows, 1) if is_first else max(rows, 0)
