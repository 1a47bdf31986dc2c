"""What stands in a data directory, and whether its frontier and checkpoint are sane and agree."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from indexd.errors import CorruptDataError, DiskError
from indexd.findings import Findings
from indexd.flush.frontier import CHECKPOINT_SIZE, Frontier, StoreCheckpoint
from indexd.output import Condition, LogBounds, Output
from indexd.query.source import known_frontier
from indexd.storage.disk import Disk
from indexd.storage.lock import owner_pid
from indexd.storage.names import DataFiles

FRONTIER = "frontier"
CHECKPOINT = "checkpoint"
# The checkpoint is replaced just before the frontier: between the two, both have to be read again.
_LOOKS = 20
_PAUSE = 0.05
_USED_SIZE = 40


def check_frontier(frontier: Frontier, outputs: Sequence[Output[Any]], bounds: LogBounds) -> list[str]:
    """What no pipeline writes: offsets out of order, and what no output says of itself."""
    found = []
    if not 0 <= frontier.begin_offset <= frontier.phy_offset:
        found.append(f"beginOffset {frontier.begin_offset} and phyOffset {frontier.phy_offset} are no range of a log")
    found += [
        f"uncovered range {gap.begin} to {gap.end} is none before phyOffset {frontier.phy_offset}"
        for gap in frontier.uncovered
        if not 0 <= gap.begin < gap.end <= frontier.phy_offset
    ]
    if frontier.filled_offset > frontier.phy_offset:
        found.append(f"refillOffset {frontier.filled_offset} lies behind phyOffset {frontier.phy_offset}")
    for output in outputs:
        if output.name in frontier.outputs:
            found += output.check_mark(frontier.outputs[output.name], bounds)
    return found


def layout_problem(frontier: Frontier) -> str | None:
    """Why nothing can be read with this layout: every file would be read as what it is not."""
    layout = frontier.layout
    if layout.hash_slot_num < 1 or layout.index_num < 1 or frontier.segment_size < 1:
        return f"{layout.hash_slot_num} slots, {layout.index_num} entries, segments of {frontier.segment_size} bytes"
    return None


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
    wanted = StoreCheckpoint.of(frontier)
    for name in ("physicMsgTimestamp", "logicsMsgTimestamp", "indexMsgTimestamp", "confirmPhyOffset"):
        field = re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", name)
        if getattr(read, field) != getattr(wanted, field):
            return f"{name} is {getattr(read, field)}, but the frontier says {getattr(wanted, field)}"
    return None


@dataclass(frozen=True, slots=True)
class StoreState:
    """``owner`` holds the lock; while it ``is_opening``, recovery may be at work.

    ``is_unclean``: no one holds the lock, and the last one who did was killed.
    """

    frontier: Frontier
    owner: int | None
    is_opening: bool
    is_unclean: bool

    @property
    def is_at_rest(self) -> bool:
        """Nobody works there, and the last one who did has stopped cleanly."""
        return self.owner is None and not self.is_unclean

    @property
    def condition(self) -> Condition:
        """What may be asked of the files that grow."""
        if self.is_at_rest:
            return Condition.AT_REST
        return Condition.CUT_SHORT if self.is_unclean or self.is_opening else Condition.GROWING

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
    return StoreState(frontier, owner, owner is not None and not _is_building(disk, files, owner), unclean)


def _is_building(disk: Disk, files: DataFiles, owner: int) -> bool:
    # A daemon writes where it stands at each drain, from the first one behind its recovery on.
    try:
        row = json.loads(disk.read(files.state))
    except (DiskError, ValueError):
        return False
    return isinstance(row, dict) and row.get("pid") == owner and "phyOffset" in row
