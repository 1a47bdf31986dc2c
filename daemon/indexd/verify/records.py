"""What stands in a data directory, and whether its frontier and checkpoint are sane and agree."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

from indexd.commitlog.format import FRAME_SIZE_MIN
from indexd.consumequeue.format import UNIT_SIZE, QueueMark
from indexd.errors import CorruptDataError, DiskError
from indexd.findings import Findings
from indexd.flush.frontier import CHECKPOINT_SIZE, Frontier, StoreCheckpoint
from indexd.index.check import Condition
from indexd.index.format import FileMark, IndexHeader
from indexd.query.source import known_frontier
from indexd.sparse.format import INT32_MAX, SparseMark
from indexd.storage.disk import Disk
from indexd.storage.lock import owner_pid
from indexd.storage.names import DataFiles, is_index_name

FRONTIER = "frontier"
CHECKPOINT = "checkpoint"
# The checkpoint is replaced just before the frontier: between the two, both have to be read again.
_LOOKS = 20
_PAUSE = 0.05
_USED_SIZE = 40


def check_frontier(frontier: Frontier, findings: Findings, *, is_at_rest: bool) -> bool:
    """What no flusher writes: offsets out of order, marks that do not go on where the one before ended.

    False if the layout itself cannot be. Not ``is_at_rest``: the disk may have refused in the middle of a drain, and
    then files hold some of what lies behind the frontier's physical offset.
    """

    def wrong(text: str) -> None:
        findings.add(FRONTIER, 0, "frontier", text)

    layout = frontier.layout
    if layout.hash_slot_num < 1 or layout.index_num < 1 or frontier.segment_size < 1:
        wrong(f"{layout.hash_slot_num} slots, {layout.index_num} entries, segments of {frontier.segment_size} bytes")
        return False
    if not 0 <= frontier.begin_offset <= frontier.phy_offset:
        wrong(f"beginOffset {frontier.begin_offset} and phyOffset {frontier.phy_offset} are no range of a log")
    for gap in frontier.uncovered:
        if not 0 <= gap.begin < gap.end <= frontier.phy_offset:
            wrong(f"uncovered range {gap.begin} to {gap.end} is none before phyOffset {frontier.phy_offset}")
    if frontier.filled_offset > frontier.phy_offset:
        wrong(f"refillOffset {frontier.filled_offset} lies behind phyOffset {frontier.phy_offset}")
    if frontier.queues is not None and not _is_queue_file_size(frontier.queue_file_size):
        wrong(f"queue files of {frontier.queue_file_size} bytes")
    for queue in frontier.queues or ():
        if not _is_sound(queue, frontier):
            wrong(f"queue {queue.topic}/{queue.queue_id}: {queue[2:]} is nothing that a queue can be")
    if len({queue[:2] for queue in frontier.queues or ()}) < len(frontier.queues or ()):
        wrong("a queue is named twice")
    for text in _check_sparse(frontier.sparse, frontier) if frontier.sparse is not None else ():
        wrong(f"sparse indexes: {text}")
    before: FileMark | None = None
    for mark in frontier.index:
        for text in _check_mark(mark, before, frontier, is_at_rest=is_at_rest):
            wrong(f"index file {mark.name}: {text}")
        before = mark
    return True


def sound_queues(frontier: Frontier) -> tuple[QueueMark, ...]:
    """The queues whose marks can be: only of those are there files to be looked at."""
    if not _is_queue_file_size(frontier.queue_file_size):
        return ()
    return tuple({mark[:2]: mark for mark in frontier.queues or () if _is_sound(mark, frontier)}.values())


def _is_queue_file_size(size: int) -> bool:
    return 0 < size <= INT32_MAX and size % UNIT_SIZE == 0


def _is_sound(mark: QueueMark, frontier: Frontier) -> bool:
    # Blank or expired units only in its oldest file, and no more messages than the log can have had. Where the disk
    # refused in the middle of a drain, its units may reach behind the frontier's physical offset.
    units = max(frontier.queue_file_size // UNIT_SIZE, 1)
    return (
        0 <= mark.first_offset <= mark.min_offset <= mark.max_offset
        and mark.first_offset % units == 0
        and mark.min_offset - mark.first_offset <= units
        and 0 <= mark.begin_offset <= mark.max_offset
        and (mark.max_offset - mark.min_offset) * FRAME_SIZE_MIN <= frontier.phy_offset + frontier.segment_size
    )


def _check_sparse(mark: SparseMark, frontier: Frontier) -> list[str]:
    found = [
        f"{list(segment)} is nothing that a segment can be"
        for segment in mark.segments
        if segment.base % frontier.segment_size
        or segment.base >= mark.phy_offset
        or not 1 <= segment.messages <= frontier.segment_size // FRAME_SIZE_MIN
        or not 0 <= segment.offset_entries < segment.messages
        or not 0 <= segment.time_entries <= segment.offset_entries + 1
    ]
    active = mark.active
    if active is not None and not (
        0 <= active.bytes_since <= frontier.segment_size
        and 0 <= active.max_timestamp_offset < mark.segments[-1].messages
        and active.last_timestamp <= active.max_timestamp
    ):
        found.append(f"{list(active)} is nothing that building can go on with")
    return found


def _check_mark(mark: FileMark, before: FileMark | None, frontier: Frontier, *, is_at_rest: bool) -> list[str]:
    end = frontier.phy_offset + (0 if is_at_rest else frontier.segment_size)
    header, index_num = mark.header, frontier.layout.index_num
    found = []
    if not is_index_name(mark.name):
        found.append("that is no index file's name")
    # The last file may have come to its last entry, and is called full when another entry begins the next one.
    if not 1 <= header.index_count <= max(index_num, 1) or (mark.full and header.index_count < index_num):
        found.append(f"index count {header.index_count} of {index_num}, {'full' if mark.full else 'not full'}")
    if header.entries:
        if header.begin_phy_offset > header.end_phy_offset:
            found.append(f"phy offsets {header.begin_phy_offset} to {header.end_phy_offset}")
        if header.begin_phy_offset < frontier.begin_offset or header.end_phy_offset >= end:
            found.append(f"phy offsets {header.begin_phy_offset} to {header.end_phy_offset} outside what is covered")
    if before is None:
        return found
    if not before.full:
        found.append(f"it follows {before.name}, which is not full")
    end_time, end_phy = max(before.header.end_timestamp, 0), max(before.header.end_phy_offset, 0)
    if header.entries == 0 and header != IndexHeader(end_time, end_time, end_phy, end_phy):
        found.append(f"empty, but its header is not what it inherits from {before.name}")
    if header.entries and header.begin_phy_offset < end_phy:
        found.append(f"it begins at phy offset {header.begin_phy_offset}, before {before.name} ends, {end_phy}")
    return found


def check_checkpoint(disk: Disk, files: DataFiles, state: StoreState, findings: Findings) -> None:
    """The checkpoint against the frontier: the same after a clean stop, never behind it while a daemon runs.

    After an unclean stop, too, it may be the newer one, but not the older.
    """
    for _ in range(_LOOKS):
        text = _checkpoint_problem(disk, files, state)
        if text is None:
            return
        if state.owner is None:
            break
        time.sleep(_PAUSE)
        state = look(disk, files)
    findings.add(CHECKPOINT, 0, "checkpoint", text or "")


def _checkpoint_problem(disk: Disk, files: DataFiles, state: StoreState) -> str | None:
    if not disk.exists(files.checkpoint):
        return "it is missing"
    data = disk.read(files.checkpoint)
    if len(data) != CHECKPOINT_SIZE:
        return f"{len(data)} bytes, not {CHECKPOINT_SIZE}"
    if any(data[_USED_SIZE:]):
        return f"bytes behind the first {_USED_SIZE} are not zero"
    try:
        read = StoreCheckpoint.unpack(data, files.checkpoint)
    except CorruptDataError as error:
        return error.line()
    frontier = state.frontier
    if read.master_flushed_offset:
        return "masterFlushedOffset is not zero"
    may_differ = state.owner is not None or state.is_unclean or state.is_opening
    if may_differ and read.confirm_phy_offset > frontier.phy_offset:
        return None
    full = [mark for mark in frontier.index if mark.full]
    has_queues = frontier.queues is not None and frontier.filled_offset == frontier.phy_offset
    for name, found, wanted in (
        ("physicMsgTimestamp", read.physic_msg_timestamp, frontier.store_timestamp),
        ("logicsMsgTimestamp", read.logics_msg_timestamp, frontier.store_timestamp if has_queues else 0),
        ("indexMsgTimestamp", read.index_msg_timestamp, full[-1].header.end_timestamp if full else 0),
        ("confirmPhyOffset", read.confirm_phy_offset, frontier.phy_offset),
    ):
        if found != wanted:
            return f"{name} is {found}, but the frontier says {wanted}"
    return None


@dataclass(frozen=True, slots=True)
class StoreState:
    """``owner`` holds the lock; while it ``is_opening``, recovery may be at work. ``sizes`` of the index files by name.

    ``is_unclean``: no one holds the lock, and the last one who did was killed.
    """

    frontier: Frontier
    owner: int | None
    is_opening: bool
    is_unclean: bool
    sizes: dict[str, int]

    @property
    def is_at_rest(self) -> bool:
        """Nobody works there, and the last one who did has stopped cleanly."""
        return self.owner is None and not self.is_unclean

    def condition(self, mark: FileMark) -> Condition:
        """What may be asked of a file: a full one never changes again."""
        if mark.full or self.is_at_rest:
            return Condition.AT_REST
        return Condition.CUT_SHORT if self.is_unclean or self.is_opening else Condition.GROWING

    def same_as(self, other: StoreState) -> bool:
        """Whether nobody came, went or wrote a frontier between the two looks."""
        return (self.frontier, self.owner, self.is_opening, self.is_unclean) == (
            other.frontier,
            other.owner,
            other.is_opening,
            other.is_unclean,
        )

    def notes(self) -> list[str]:
        """What is not asked because of who works there, or was killed there."""
        if self.is_unclean:
            return [
                "the last stop was unclean: indexd --recover or the next start mends it; "
                "of the open file only the entries that the frontier names were checked"
            ]
        if self.is_opening:
            return [f"indexd, pid {self.owner}, is opening the directory: of the open file only entries were checked"]
        if self.owner is not None:
            return [f"indexd, pid {self.owner}, is at work: what it has built since the last flush was not checked"]
        return []


def look(disk: Disk, files: DataFiles) -> StoreState:
    """What stands there now. Raises UsageError without a frontier, CorruptDataError for one that cannot be read."""
    owner = owner_pid(files.lock)
    unclean = owner is None and disk.exists(files.abort)
    frontier = known_frontier(disk, files)
    try:
        sizes = {name: size for name, size in disk.list_dir(files.index) if is_index_name(name)}
    except DiskError as error:
        if not error.is_missing:
            raise
        sizes = {}
    return StoreState(frontier, owner, owner is not None and not _is_building(disk, files, owner), unclean, sizes)


def _is_building(disk: Disk, files: DataFiles, owner: int) -> bool:
    # A daemon writes where it stands at each drain, from the first one behind its recovery on.
    try:
        row = json.loads(disk.read(files.state))
    except (DiskError, ValueError):
        return False
    return isinstance(row, dict) and row.get("pid") == owner and "phyOffset" in row
