"""The kept entries against the log itself: where the two part, everything behind is the log's to give again.

The log is decoded once more and each key of each message is held against the next entry, in order, without writing. The
first entry that differs, that belongs to no message, or that lies behind the end of the log ends what is kept. Every
start compares the last stretch; ``indexd --recover`` all of it. Entries of messages that have expired cannot be
compared; they stand on the chain check alone.

The log from where a reader stands to where it ends now: for commands that run once, and do not wait for more.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from indexd.commitlog.batcher import DispatchBatch, before
from indexd.commitlog.evidence import Evidence, Stretch
from indexd.commitlog.format import Corrupt, NotYetWritten
from indexd.commitlog.reader import LogReader, ReaderOptions, Skipped
from indexd.compare.queues import QueueComparison
from indexd.errors import CorruptDataError
from indexd.index.format import FileMark, Flavour, IndexHeader, IndexLayout
from indexd.index.kernel import BUFFER_FULL, DONE, MISMATCH, match_batch
from indexd.recovery.replay import ENTRIES_PER_READ, first_entry_at, phy_offset_of, read_entries, time_diff_of
from indexd.storage.disk import Disk, DiskFile

_SETTLE_PAUSE = 0.01
_EVERYTHING = 1 << 62


@dataclass(frozen=True, slots=True)
class Comparison:
    """What to compare: the log that ``reader`` stands in, up to physical offset ``end``.

    ``first_behind`` tells of an offset at which no frame stands, and the store timestamp of the message before it, the
    next frame that is as it was: then the log is damaged there, and was not cut. ``is_whole``: from the begin of
    the log. ``has_expired``: messages before that begin were indexed once, and the file that held them may be gone.
    """

    reader: LogReader
    end: int
    first_behind: Callable[[int, int], Evidence | None]
    is_whole: bool
    has_expired: bool = False
    #: A physical offset before which the messages of the comparison are counted.
    anchor: int = 0
    #: What the queues hold of the log from a physical offset on, up to ``end``; None where that cannot be compared.
    queues_from: Callable[[int], QueueComparison | None] = lambda _: None
    #: All that was noted of the log is as it was: where queues say something else, it is they that are damaged.
    is_same_log: bool = False


@dataclass(slots=True)
class Compared:
    """How many messages of the log agree, how many of them lie before the anchor, when the last of them was stored.

    ``tail``: the last bytes that agreed, as they were then.
    """

    messages: int = 0
    before_anchor: int = 0
    store_timestamp: int = 0
    tail: deque[Stretch] = field(default_factory=lambda: deque(maxlen=64))
    #: The queues agree with the log before this physical offset and not behind it; None: as far as was compared.
    queues_until: int | None = None
    #: What is known of the log behind the last damage; ``before_anchor`` counts up to there.
    since: Evidence | None = None
    #: Where damage was passed over.
    damaged: tuple[int, ...] = ()

    def copy(self) -> Compared:
        """What agrees so far."""
        return replace(self, tail=self.tail.copy())

    def pass_over(self, phy_offset: int, behind: Evidence) -> None:
        """There is damage at ``phy_offset``, before ``behind``: nobody knows how many messages it held."""
        self.since, self.before_anchor = behind, self.messages
        self.damaged += (phy_offset,)

    def add(self, batch: DispatchBatch, stop: int, anchor: int) -> None:
        """The rows of ``batch`` before physical offset ``stop`` agree."""
        anchor = anchor if self.since is None else self.since.phy_offset
        offsets = batch.columns.phy_offset[: batch.rows]
        agreeing = int(np.searchsorted(offsets, stop))
        self.messages += agreeing
        self.before_anchor += int(np.searchsorted(offsets, min(stop, anchor)))
        if agreeing == batch.rows and batch.crc is not None:
            self.tail.append(Stretch(batch.begin_offset, batch.end_offset, batch.crc))
        if agreeing:
            self.store_timestamp = int(batch.columns.store_timestamp[agreeing - 1])


@dataclass(frozen=True, slots=True)
class Agreed:
    """The log agrees with the entries of messages before ``phy_offset``, or with all of them if that is None.

    ``reason`` is empty when there is nothing to tell.
    """

    phy_offset: int | None
    compared: Compared
    reason: str = ""


class _Cursor:
    """Walks the entries of all kept files in order, keeping the header as it was when each was put."""

    def __init__(
        self, disk: Disk, directory: Path, layout: IndexLayout, files: tuple[FileMark, ...], *, has_expired: bool
    ) -> None:
        self._disk, self._directory, self._layout = disk, directory, layout
        self._files = files
        self._has_expired = has_expired
        self._at = 0
        self._number = 1
        self.state = np.array(IndexHeader().values(), dtype=np.int64)
        self.window: NDArray[np.uint32] = np.empty((0, 5), dtype=np.uint32)
        self.position = 0

    @property
    def is_done(self) -> bool:
        """No entry is left; looks into the next file if need be."""
        if self.position >= len(self.window):
            self._load()
        return self._at >= len(self._files)

    @property
    def phy_offset(self) -> int:
        """Of the next entry; far behind everything when none is left."""
        return _EVERYTHING if self.is_done else phy_offset_of(self.window[self.position])

    def used(self, position: int) -> None:
        """The window is matched up to ``position``."""
        self._number += position - self.position
        self.position = position

    def seek(self, phy_offset: int) -> None:
        """Go on at the first entry of a message at ``phy_offset`` or behind it."""
        while self._at < len(self._files) and self._files[self._at].header.end_phy_offset < phy_offset:
            self._next_file()
        self.window, self.position = self.window[:0], 0
        if self._at >= len(self._files):
            return
        header = self._files[self._at].header
        with self._open() as file:
            number = first_entry_at(file, self._layout, self._number, header.index_count, phy_offset)
            if number > self._number:
                last = phy_offset_of(read_entries(file, self._layout, number - 1, 1)[0])
                self._number = number
                self.state[:] = replace(header, end_phy_offset=last, index_count=number).values()

    def _next_file(self) -> None:
        header = self._files[self._at].header
        self._at, self._number = self._at + 1, 1
        timestamp, phy_offset = max(header.end_timestamp, 0), max(header.end_phy_offset, 0)
        self.state[:] = IndexHeader(timestamp, timestamp, phy_offset, phy_offset).values()

    def _load(self) -> None:
        while self._at < len(self._files) and self._number >= self._files[self._at].header.index_count:
            self._next_file()
        self.window, self.position = self.window[:0], 0
        if self._at < len(self._files):
            count = min(self._files[self._at].header.index_count - self._number, ENTRIES_PER_READ)
            with self._open() as file:
                self.window = read_entries(file, self._layout, self._number, count)
            if self._at == 0 and self._number == 1 and self._has_expired:
                # It counts from the end of a file that nobody knows any more: that time difference is taken as it is.
                begin = self._files[0].header.begin_timestamp
                self.state[0] = begin - 1000 * time_diff_of(self.window[0])

    def _open(self) -> DiskFile:
        return self._disk.open_read(self._directory / self._files[self._at].name)


def compare_with_log(
    disk: Disk,
    directory: Path,
    layout: IndexLayout,
    flavour: Flavour,
    files: tuple[FileMark, ...],
    comparison: Comparison,
    on_progress: Callable[[int], None],
) -> Agreed:
    """Hold ``files`` against the log from where the reader of ``comparison`` stands; reads only."""
    begin = comparison.reader.position
    cursor = _Cursor(disk, directory, layout, files, has_expired=comparison.has_expired)
    cursor.seek(begin)
    agreed = _walk(cursor, flavour, comparison, on_progress)
    if agreed.phy_offset is not None and agreed.compared.queues_until is not None:
        # It was the log after all, and it changed before the first entry that differs.
        return Agreed(begin, Compared(), agreed.reason)
    return agreed


def _walk(cursor: _Cursor, flavour: Flavour, comparison: Comparison, on_progress: Callable[[int], None]) -> Agreed:
    reader, begin, end = comparison.reader, comparison.reader.position, comparison.end
    # Behind a stretch that cannot be read nobody knows what units it came to: they are compared anew from there on.
    compared, compared_until, queues = Compared(), begin, comparison.queues_from(begin)
    sound = compared.copy()
    while reader.position < end or not cursor.is_done:
        poll = reader.poll()
        if isinstance(poll, NotYetWritten) and reader.is_settling:
            # The newest message of the log: there it is, it only has to prove itself.
            time.sleep(_SETTLE_PAUSE)
            continue
        if isinstance(poll, (NotYetWritten, Corrupt)):
            behind = comparison.first_behind(poll.offset, compared.store_timestamp)
            if behind is None:
                # An entry before it is of a message that stood where the segment before ends now.
                stop = compared_until if cursor.phy_offset < poll.offset else poll.offset
                agreed = Agreed(stop, compared, f"the log holds no message at offset {stop}")
                return _without_more(queues, Agreed(begin, sound), agreed)
            # Frame by frame from the next one on: the log may have been cut behind it, and before what is known.
            compared.pass_over(poll.offset, behind)
            reader.pass_over(behind.phy_offset)
        if not isinstance(poll, DispatchBatch):
            begin = compared_until = reader.position
            cursor.seek(begin)
            sound, queues = compared.copy(), comparison.queues_from(begin)
        else:
            differs = _match(cursor, flavour, poll, compared_until, end)
            if differs is None and poll.end_offset > end and _frame_before(poll, compared_until, end) != end:
                differs = _frame_before(poll, compared_until, end)
            if queues is not None:
                stop = end if differs is None else differs
                found = _queues_differ(queues, poll, begin, compared_until, stop)
                if found is not None and comparison.is_same_log:
                    compared.queues_until, queues, found = found, None, None
                differs = _first(differs, found)
            if differs == begin:
                return Agreed(begin, sound, f"the queues say something else than the log from offset {begin} on")
            compared.add(poll, end if differs is None else differs, comparison.anchor)
            if differs is not None:
                reason = f"the log says something else from offset {differs} on"
                return _without_more(queues, Agreed(begin, sound), Agreed(differs, compared, reason))
            compared_until = poll.end_offset
            on_progress(poll.end_offset)
    if queues is not None and queues.more():
        if comparison.is_same_log:
            compared.queues_until = begin
            return Agreed(None, compared)
        return Agreed(begin, sound, f"the queues hold more than the log from offset {begin} on")
    if compared.damaged:
        at = compared.damaged[0]
        return Agreed(None, compared, f"what the log still says agrees; it is unreadable at offset {at}")
    return Agreed(None, compared, "every entry agrees with the log" if comparison.is_whole else "")


def _without_more(queues: QueueComparison | None, sound: Agreed, agreed: Agreed) -> Agreed:
    # A message without keys that entered a queue, and where it stood the log has one that enters none: only the unit
    # that is left over tells; then no more than ``sound`` agrees.
    assert agreed.phy_offset is not None
    if queues is None:
        return agreed
    left = min((offset for more in queues.more() for offset in more.phy_offsets), default=agreed.phy_offset)
    if left >= agreed.phy_offset:
        return agreed
    return replace(sound, reason=f"the queues name a message at {left} that the log does not hold")


def _match(cursor: _Cursor, flavour: Flavour, batch: DispatchBatch, begin: int, end: int) -> int | None:
    # Where the frame begins from which on batch and entries differ, or None. At ``end`` the entries may end; ``begin``
    # is where the last batch ended, which lies before this one where a segment ends in between.
    row, key = 0, -1
    while True:
        is_done = cursor.is_done
        status, row, key, at = match_batch(
            batch.columns,
            batch.rows,
            int(row),
            int(key),
            flavour.skip_mask,
            cursor.window,
            cursor.position,
            cursor.state,
        )
        cursor.used(int(at))
        if status == MISMATCH:
            return _frame_before(batch, begin, min(int(batch.columns.phy_offset[int(row)]), cursor.phy_offset))
        if status == DONE:
            # An entry inside the batch that no key came to is of a message that is not there.
            return _frame_before(batch, begin, cursor.phy_offset) if cursor.phy_offset < batch.end_offset else None
        assert status == BUFFER_FULL
        if is_done:
            # A message with keys, and no entry left.
            phy_offset = int(batch.columns.phy_offset[int(row)])
            return phy_offset if phy_offset < end else None


def _queues_differ(
    queues: QueueComparison, batch: DispatchBatch, begin: int, batch_begin: int, stop: int
) -> int | None:
    # The same for the queues' units; where one points before the batch, all of the comparison is in doubt.
    differs = queues.differs(before(batch, stop))
    if differs is None:
        return None
    return _frame_before(batch, batch_begin, differs) if differs >= batch.begin_offset else begin


def _first(one: int | None, other: int | None) -> int | None:
    return min((offset for offset in (one, other) if offset is not None), default=None)


def _frame_before(batch: DispatchBatch, begin: int, phy_offset: int) -> int:
    # The begin of the last frame of the batch that begins at phy_offset or before; ``begin`` if none does.
    offsets = batch.columns.phy_offset[: batch.rows]
    row = int(np.searchsorted(offsets, phy_offset, side="right"))
    return int(offsets[row - 1]) if row else begin


_PAUSE = 0.002
# Bytes at the end that are no frame are given so long to become one; the daemon, which has time, gives them more.
_CORRUPT_AFTER = 0.25


def once(options: ReaderOptions) -> ReaderOptions:
    """Options for reading a log once."""
    return replace(options, corrupt_after=min(options.corrupt_after, _CORRUPT_AFTER))


class WholeLog:
    """Iterates over a log; ``unreadable`` is set when its last bytes are no frame, as after a crash of the broker.

    Raises CorruptDataError for unreadable bytes behind which the log goes on, unless the reader may skip them.
    """

    def __init__(self, reader: LogReader) -> None:
        self._reader = reader
        self.unreadable: Corrupt | None = None

    def __iter__(self) -> Iterator[DispatchBatch | Skipped]:
        while True:
            found = self._reader.poll()
            if isinstance(found, Corrupt):
                self._judge(found)
                return
            if not isinstance(found, NotYetWritten):
                yield found
            elif self._reader.is_undecided:
                time.sleep(_PAUSE)
            else:
                return

    def _judge(self, corrupt: Corrupt) -> None:
        if corrupt.path is None or self._reader.frames_follow():
            where = f" of {corrupt.path}" if corrupt.path else ""
            raise CorruptDataError(
                f"the log is corrupt at offset {corrupt.offset}{where}: {corrupt.reason}",
                "give --on-corrupt skip to go on at the next frame that proves itself",
            )
        self.unreadable = corrupt
