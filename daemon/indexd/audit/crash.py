"""What a crash of the broker right now would cost: RocketMQ's own rules, applied to what stands there (spec 1.4, 7).

An unclean start throws away every index file whose end time lies behind the checkpoint's, and dispatches the log again
from the first frame of a segment. What those files held of the log before that segment is in no index then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from indexd.audit.ground import BrokerFile
from indexd.audit.plan import AuditPlan, layout_of
from indexd.audit.standing import SegmentStart, Standing
from indexd.config import Config
from indexd.config.load import writes_index
from indexd.errors import DiskError
from indexd.flush.frontier import StoreCheckpoint
from indexd.index.entries import first_entry_at
from indexd.index.format import IndexLayout
from indexd.storage.disk import Disk

#: ``now``: the broker runs, and its end would be followed by that start; ``next-start``: it has ended uncleanly, and
#: that start is the next one; ``later``: it has ended cleanly, so only an end after the next start counts.
When = Literal["now", "next-start", "later"]
_WORDS: dict[When, tuple[str, str]] = {
    "now": ("if the broker were killed right now, its next start", "would"),
    "next-start": ("the broker ended without a clean stop: its next start", "will"),
    "later": ("if the broker were killed soon after its next start, the start after that", "would"),
}
# Before this time (ms) of the checkpoint everything counts as flushed (spec 6.1).
_FLUSH_SLACK = 3000
# Segments that 5.4.0 looks at, going backwards, before it takes the one where it stands (commitLogRecoverMaxNum).
_LOOKED_AT_MAX = 10


@dataclass(frozen=True, slots=True)
class CrashCost:
    """``thrown`` are the files that the next unclean start removes; of their ``keys`` it builds those again that point
    to ``dispatch_offset`` and behind, and ``lost_keys`` are gone until somebody rebuilds them.

    ``dispatch_timestamp``: of the first message that is built again, ms, None where none stands there.
    ``has_checkpoint`` is False where there is none: the broker makes one of zeros, so all files go and all segments are
    read. ``is_index_written`` is False where broker.conf says that nothing is indexed: nothing is built again then.
    """

    thrown: tuple[str, ...]
    keys: int
    lost_keys: int
    dispatch_offset: int
    when: When = "now"
    dispatch_timestamp: int | None = None
    has_checkpoint: bool = True
    is_index_written: bool = True

    def lines(self) -> list[str]:
        """The same in words, one line as a rule."""
        start, verb = _WORDS[self.when]
        found = []
        if not self.has_checkpoint:
            found.append(
                "there is no checkpoint: an unclean start trusts no index file, and reads the log from its begin"
            )
        if not self.thrown:
            found.append(f"{start} {verb} throw away no index file")
        elif not self.is_index_written:
            found.append(f"{self._throws()}, and nothing {verb} build them again: indexing is off in broker.conf")
        elif not self.lost_keys:
            found.append(f"{self._throws()} and build all of them again from log byte {self.dispatch_offset} on")
        else:
            again = f"build again what stands from log byte {self.dispatch_offset} on"
            found.append(f"{self._throws()}, {again}, and {self.lost_keys:,} keys {verb} be lost")
        if self.lost_keys and self.when == "next-start":
            found.append("indexd repair before that start keeps them: the checkpoint then vouches for these files")
        return found

    def _throws(self) -> str:
        start, verb = _WORDS[self.when]
        files = f"index/{self.thrown[0]}" if len(self.thrown) == 1 else f"{len(self.thrown)} index files"
        return f"{start} {verb} throw away {files} with {self.keys:,} {'key' if self.keys == 1 else 'keys'}"

    def to_json(self) -> dict[str, Any]:
        """A line of ``--json``."""
        return {
            "kind": "crash",
            "when": self.when,
            "thrownFiles": list(self.thrown),
            "keys": self.keys,
            "lostKeys": self.lost_keys,
            "dispatchOffset": self.dispatch_offset,
            "dispatchTimestamp": self.dispatch_timestamp,
            "checkpoint": self.has_checkpoint,
            "indexWritten": self.is_index_written,
        }


def crash_cost(disk: Disk, config: Config, plan: AuditPlan, standing: Standing) -> CrashCost:
    """Work it out; reads some entries of the files that would go. Raises DiskError."""
    checkpoint = standing.checkpoint or StoreCheckpoint()
    flavour = plan.eras[-1].flavour if plan.eras else config.index.flavour
    start = dispatch_start(standing.segments, checkpoint, config, flavour)
    is_written = writes_index(config.broker, flavour)
    # In the order of their names. A file of another size is thrown away, too, by what its header says.
    thrown = [file for file in plan.files if file.header.end_timestamp > checkpoint.index_msg_timestamp]
    begin = start.begin if start is not None else plan.log_begin
    keys = lost = 0
    for file in thrown:
        counted = _count(disk, layout_of(config), file, plan, max(begin, plan.log_begin))
        keys += sum(counted)
        lost += counted[0] if is_written else sum(counted)
    return CrashCost(
        thrown=tuple(file.name for file in thrown),
        keys=keys,
        lost_keys=lost,
        dispatch_offset=begin,
        when=_when(standing),
        dispatch_timestamp=start.store_timestamp if start is not None else None,
        has_checkpoint=standing.checkpoint is not None,
        is_index_written=is_written,
    )


def dispatch_start(
    segments: Sequence[SegmentStart], checkpoint: StoreCheckpoint, config: Config, flavour: str
) -> SegmentStart | None:
    """The segment from which an unclean start dispatches again (spec 7.2, 7.3); None without any."""
    flushed = max(0, min(checkpoint.physic_msg_timestamp, checkpoint.logics_msg_timestamp) - _FLUSH_SLACK)
    if config.broker.message_index_enable and config.broker.message_index_safe:
        flushed = min(flushed, checkpoint.index_msg_timestamp)
    looked_at_max = _LOOKED_AT_MAX if flavour == "5.4" else len(segments)
    for number, segment in enumerate(reversed(segments), 1):
        # Which has no first frame, or one of time 0, is not the one.
        if segment.store_timestamp and segment.store_timestamp <= flushed:
            return segment
        if number == looked_at_max:
            return segment
    return segments[0] if segments else None


def _when(standing: Standing) -> When:
    if standing.is_live:
        return "now"
    if not standing.has_abort:
        return "later"
    # A broker that runs has an abort file, too.
    return "now" if standing.lock.alive is None else "next-start"


def _count(disk: Disk, layout: IndexLayout, file: BrokerFile, plan: AuditPlan, begin: int) -> tuple[int, int]:
    # Entries of messages before ``begin``, and from there on; those that point before the log are nobody's loss.
    if not file.is_readable or file.entries == 0:
        return 0, 0
    try:
        with disk.open_read(plan.folder / file.name) as opened:
            first, split = (first_entry_at(opened, layout, 1, file.count, offset) for offset in (plan.log_begin, begin))
    except DiskError as error:
        if not error.is_missing:
            raise
        return 0, 0
    return split - first, file.count - split
