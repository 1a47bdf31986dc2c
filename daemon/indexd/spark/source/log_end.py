"""Where the log ends now, or a stretch of so many bytes does: an offset at which a message ends and one may begin.

Found by the daemon's own reader, so the newest frame counts by the same rules. Closed segments are not read: the next
one begins where they end.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from indexd.commitlog.batcher import DispatchBatch
from indexd.commitlog.evidence import FrameReader
from indexd.commitlog.format import BLANK_SIZE, Corrupt, NotYetWritten
from indexd.commitlog.reader import LogReader
from indexd.commitlog.segments import Segment, SegmentList
from indexd.config import Config
from indexd.errors import DiskError
from indexd.recovery.open import decode_rules, reader_options
from indexd.recovery.whole_log import once
from indexd.storage.disk import Disk

_PAUSE = 0.002
# So many newest messages one after the other, none of which stayed the newest: what is there by now is enough.
_NEWEST_MAX = 3


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
        # Neither key hashes nor the columns of a queue are needed to see where messages end.
        outputs = config.outputs.model_copy(update={"consume_queue": False, "sparse": False})
        index = config.index.model_copy(update={"flavour": "3.x"})
        rules = decode_rules(config.model_copy(update={"outputs": outputs, "index": index}))
        options = replace(once(reader_options(config)), check_tail=False)
        self._reader = LogReader(disk, config.store.commit_log_directories, rules, options)

    def __repr__(self) -> str:
        return f"LogEnd({self._reader})"

    @property
    def log(self) -> SegmentList:
        """The segments as they were listed last."""
        return self._reader.log

    def refresh(self) -> None:
        """List the segments again."""
        self._reader.refresh()

    def evidence(self, message: int) -> int | None:
        """The CRC-32 of the frame at ``message`` as it is now (its first 64 KiB); None if none stands there."""
        with FrameReader(self._disk, self.log) as frames:
            found = frames.evidence(message)
        return None if found is None else found.crc

    def store_timestamp(self, message: int) -> int | None:
        """Of the frame at ``message``, ms; None if none stands there."""
        with FrameReader(self._disk, self.log) as frames:
            found = frames.evidence(message)
        return None if found is None else found.store_timestamp

    def is_closed(self, segment: Segment) -> bool:
        """Whether a later segment holds anything: then nothing more is written into this one."""
        return any(self.is_in_use(later) for later in self.log.segments if later.base >= segment.end)

    def from_here(self, begin: int, end: int | None = None) -> End:
        """The last end of a message from ``begin``, where a message or a segment begins, up to ``end``.

        ``end`` None: the end of the log. A first message that is longer than that is taken all the same. Waits for the
        newest message to settle.
        """
        reader = self._reader
        reader.refresh()
        reader.position = self._last_segment(begin, end)
        message: int | None = None
        patience = _Patience(reader)
        try:
            while end is None or reader.position < end:
                found = reader.poll()
                if isinstance(found, Corrupt):
                    follows = found.path is None or reader.frames_follow()
                    return End(found.offset, message, found if follows else None)
                if isinstance(found, NotYetWritten):
                    if not (reader.is_undecided and patience.lasts()):
                        break
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
        return next((segment.base for segment in reversed(following) if self.is_in_use(segment)), begin)

    def is_in_use(self, segment: Segment) -> bool:
        """Whether the segment holds anything: a broker makes one ahead."""
        try:
            with self._disk.open_read(segment.path) as file:
                return any(file.pread(BLANK_SIZE, 0))
        except DiskError as error:
            if not error.is_missing:
                raise
            return False  # expired just now, or not made yet


class _Patience:
    """Waits for each newest message to settle, but not for ever behind a writer that always puts another one there."""

    def __init__(self, reader: LogReader) -> None:
        self._reader = reader
        self._settled = reader.counters.settled
        self._offset = -1
        self._offsets = 0

    def lasts(self) -> bool:
        """Whether to wait once more at the reader's position."""
        settled = self._reader.counters.settled
        if settled != self._settled:
            self._settled, self._offsets = settled, 0
        if self._reader.position != self._offset:
            self._offset = self._reader.position
            self._offsets += 1
        return self._offsets <= _NEWEST_MAX


def _rows_until(batch: DispatchBatch, end: int, *, is_first: bool) -> int:
    # How many messages of the batch end at ``end`` or before; one at least of the first.
    if batch.end_offset <= end:
        return batch.rows
    begins = batch.columns.phy_offset[: batch.rows]
    rows = int(np.searchsorted(begins, end, side="right")) - 1
    return max(rows, 1) if is_first else max(rows, 0)
