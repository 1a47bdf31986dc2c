"""Finds the first entry that disagrees with the log; what lies behind it is built again.

The log is decoded once more and each key of each message is held against the next entry, in order, without writing; the
ConsumeQueues' units likewise. The first that differs, that belongs to no message, or that lies behind the end of the
log ends what is kept. Every start compares the last part; ``indexd --recover`` all of it. Entries of messages that have
expired cannot be compared; they stand on the chain check alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import numpy as np

from indexd.commitlog.batcher import DispatchBatch, within
from indexd.commitlog.format import Corrupt, NotYetWritten
from indexd.commitlog.lookup import Evidence, RangeChecksum
from indexd.commitlog.reader import LogReader
from indexd.compare.index import ComparedFile, Keys, keys_of
from indexd.compare.secondary import QueueComparison, phy_offsets
from indexd.errors import DisturbedError
from indexd.index.entries import phy_offset_of
from indexd.index.format import FileMark, Flavour, IndexLayout
from indexd.storage.disk import Disk

_SETTLE_PAUSE = 0.01
_NEVER = 1 << 62


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
class LogComparison:
    """How many messages of the log agree, how many of them lie before the anchor, when the last of them was stored.

    ``tail``: the last bytes that agreed, as they were then.
    """

    messages: int = 0
    before_anchor: int = 0
    store_timestamp: int = 0
    tail: deque[RangeChecksum] = field(default_factory=lambda: deque(maxlen=64))
    #: The queues agree with the log before this physical offset and not behind it; None: as far as was compared.
    queues_until: int | None = None
    #: What is known of the log behind the last damage; ``before_anchor`` counts up to there.
    since: Evidence | None = None
    #: Where damage was passed over.
    damaged: tuple[int, ...] = ()

    def copy(self) -> LogComparison:
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
            self.tail.append(RangeChecksum(batch.begin_offset, batch.end_offset, batch.crc))
        if agreeing:
            self.store_timestamp = int(batch.columns.store_timestamp[agreeing - 1])


@dataclass(frozen=True, slots=True)
class Agreed:
    """The log agrees with the entries of messages before ``phy_offset``, or with all of them if that is None.

    ``reason`` is empty when there is nothing to tell.
    """

    phy_offset: int | None
    compared: LogComparison
    reason: str = ""


class _EntryStream:
    # The entries of all files, one behind the other. If a file before the first one ``has_expired``, nobody knows from
    # which end entry 1 counts.
    def __init__(
        self, disk: Disk, directory: Path, layout: IndexLayout, marks: tuple[FileMark, ...], *, has_expired: bool
    ) -> None:
        self._disk, self._directory, self._layout, self._marks = disk, directory, layout, marks
        self._ends = [None if has_expired else 0, *(mark.header.end_timestamp for mark in marks)]
        self._files: deque[ComparedFile] = deque()

    def seek(self, phy_offset: int) -> None:
        """To the first entry of a message at ``phy_offset`` or behind it."""
        self._files = deque(
            ComparedFile(self._disk, self._directory / mark.name, self._layout, mark.header, previous_end=end)
            for mark, end in zip(self._marks, self._ends, strict=False)
            if mark.header.end_phy_offset >= phy_offset
        )
        for file in islice(self._files, 1):
            file.select(phy_offset, _NEVER, is_ordered=True)

    @property
    def phy_offset(self) -> int:
        """Of the next entry; far behind everything when none is left."""
        while self._files:
            file = self._files[0]
            offset = file.next_offset
            if file.is_gone:
                raise DisturbedError(f"{file.name} was removed or cut while it was compared with the log")
            if offset is not None:
                return offset
            self._files.popleft()
        return _NEVER

    def differs(self, keys: Keys, bound: int, end: int) -> int | None:
        """Where entries and keys below ``bound`` begin to differ, or None. Behind ``end`` there may be no entries."""
        at = 0
        while self.phy_offset < bound:
            entries = self._files[0].take_below(bound)
            right = self._files[0].count_right(keys, at, entries)
            at += right
            if right < len(entries.number):
                due = keys.phy_offset[keys.row[at : at + 1]].tolist()
                return min([phy_offset_of(entries.rows[right]), *map(int, due)])
        if at == len(keys.row):
            return None
        missing = int(keys.phy_offset[keys.row[at]])
        return missing if missing < end or self.phy_offset < _NEVER else None


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
    entries = _EntryStream(disk, directory, layout, files, has_expired=comparison.has_expired)
    entries.seek(begin)
    agreed = _walk(entries, flavour, comparison, on_progress)
    if agreed.phy_offset is not None and agreed.compared.queues_until is not None:
        # It was the log after all, and it changed before the first entry that differs.
        return Agreed(begin, LogComparison(), agreed.reason)
    return agreed


def _walk(
    entries: _EntryStream, flavour: Flavour, comparison: Comparison, on_progress: Callable[[int], None]
) -> Agreed:
    reader, begin, end = comparison.reader, comparison.reader.position, comparison.end
    # Behind a stretch that cannot be read nobody knows what units it came to: they are compared anew from there on.
    compared, compared_until, queues = LogComparison(), begin, comparison.queues_from(begin)
    sound = compared.copy()
    while reader.position < end or entries.phy_offset < _NEVER:
        poll = reader.poll()
        if isinstance(poll, NotYetWritten) and reader.settling_size:
            # The newest message of the log: there it is, it only has to prove itself.
            time.sleep(_SETTLE_PAUSE)
            continue
        if isinstance(poll, (NotYetWritten, Corrupt)):
            behind = comparison.first_behind(poll.offset, compared.store_timestamp)
            if behind is None:
                # An entry before it is of a message that stood where the segment before ends now.
                stop = compared_until if entries.phy_offset < poll.offset else poll.offset
                agreed = Agreed(stop, compared, f"the log holds no message at offset {stop}")
                return _without_more(queues, Agreed(begin, sound), agreed)
            # Frame by frame from the next one on: the log may have been cut behind it, and before what is known.
            compared.pass_over(poll.offset, behind)
            reader.pass_over(behind.phy_offset)
        if not isinstance(poll, DispatchBatch):
            begin = compared_until = reader.position
            entries.seek(begin)
            sound, queues = compared.copy(), comparison.queues_from(begin)
        else:
            differs = entries.differs(keys_of(poll, flavour.skip_mask), poll.end_offset, end)
            if differs is None and poll.end_offset > end and _frame_before(poll, compared_until, end) != end:
                differs = end
            # Where that frame begins; the last batch ended before this one where a segment ends in between.
            differs = None if differs is None else _frame_before(poll, compared_until, differs)
            if queues is not None:
                stop = end if differs is None else differs
                found = _queues_differ(queues, poll, begin, compared_until, stop)
                if found is not None and comparison.is_same_log:
                    compared.queues_until, queues, found = found, None, None
                differs = min((offset for offset in (differs, found) if offset is not None), default=None)
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
    left = min((offset for more in queues.more() for offset in phy_offsets(more)), default=agreed.phy_offset)
    if left >= agreed.phy_offset:
        return agreed
    return replace(sound, reason=f"the queues name a message at {left} that the log does not hold")


def _queues_differ(
    queues: QueueComparison, batch: DispatchBatch, begin: int, batch_begin: int, stop: int
) -> int | None:
    # The same for the queues' units; where one points before the batch, all of the comparison is in doubt.
    differs = queues.differs(within(batch, batch.begin_offset, stop))
    if differs is None:
        return None
    return _frame_before(batch, batch_begin, differs) if differs >= batch.begin_offset else begin


def _frame_before(batch: DispatchBatch, begin: int, phy_offset: int) -> int:
    # The begin of the last frame of the batch that begins at phy_offset or before; ``begin`` if none does.
    offsets = batch.columns.phy_offset[: batch.rows]
    row = int(np.searchsorted(offsets, phy_offset, side="right"))
    return int(offsets[row - 1]) if row else begin
