"""Says why the keys of a hole are not findable, and what a crash of the broker right now would cost.

RocketMQ begins an index file only behind a full one and counts its first time difference from the end of that one; it
passes over messages below the end of its last file. An unclean start throws away every index file whose end time lies
behind the checkpoint's, and dispatches the log again from the begin of a segment (spec rocketmq-store 1.4, 3.4, 4.2,
4.4, 7.2). So a file that was thrown away, one that was deleted, a log that was replaced and messages that nobody
indexed leave different holes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from indexd.audit.plan import AuditPlan, index_folder
from indexd.audit.result import Audit, BrokerFile, Hole
from indexd.commitlog.lookup import FrameReader
from indexd.commitlog.segments import list_segments
from indexd.config import Config
from indexd.config.load import index_key, writes_index
from indexd.errors import CorruptDataError, MissingOk
from indexd.flush.frontier import StoreCheckpoint
from indexd.index.entries import first_entry_at
from indexd.index.file import time_difference
from indexd.pages.wording import counted
from indexd.storage.disk import Disk
from indexd.storage.lock import BrokerLock, look_at_lock


@dataclass(frozen=True, slots=True)
class SegmentStart:
    """Segment from ``begin`` on; ``store_timestamp`` of its first frame, ms, None when no frame stands there."""

    begin: int
    store_timestamp: int | None


@dataclass(frozen=True, slots=True)
class StoreState:
    """What stands around an index; ``checkpoint`` is None where there is none, or too short a one.

    ``looked_at`` is a wall clock, ms.
    """

    lock: BrokerLock
    has_lock_file: bool
    has_abort: bool
    checkpoint: StoreCheckpoint | None
    segments: tuple[SegmentStart, ...]
    looked_at: int

    @property
    def is_live(self) -> bool:
        """Whether a broker runs or loads, as far as that can be told."""
        return self.lock.alive is True


def read_checkpoint(disk: Disk, store: Path) -> StoreCheckpoint | None:
    """The broker's checkpoint; None where there is none, or too short a one."""
    with suppress(CorruptDataError), MissingOk():
        return StoreCheckpoint.unpack(disk.read(store / "checkpoint"), store / "checkpoint")
    return None


def look_at_store(disk: Disk, config: Config) -> StoreState:
    """Look once. Raises UsageError, UnsafeStoreError and DiskError, and what listing the log raises."""
    store = index_folder(config).parent
    log = list_segments(disk, config.store.commit_log_directories, config.store.segment_size)
    with FrameReader(disk, log) as frames:
        firsts = [(segment, frames.evidence(segment.base)) for segment in log.segments]
    return StoreState(
        lock=look_at_lock(store / "lock"),
        has_lock_file=disk.exists(store / "lock"),
        has_abort=disk.exists(store / "abort"),
        checkpoint=read_checkpoint(disk, store),
        segments=tuple(
            SegmentStart(segment.base, first.store_timestamp if first is not None else None)
            for segment, first in firsts
        ),
        looked_at=int(time.time() * 1000),
    )


#: ``now``: the broker runs, and its end would be followed by that start; ``next-start``: it has ended uncleanly, and
#: that start is the next one; ``later``: it has ended cleanly, so only an end after the next start counts.
When = Literal["now", "next-start", "later"]
_WHEN: dict[When, tuple[str, str]] = {
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
        (start, verb), files = _WHEN[self.when], counted(len(self.thrown), "index file")
        throws = f"{start} {verb} throw away {files} with {counted(self.keys, 'key')}"
        is_built = self.thrown and self.is_index_written
        lines = (
            (
                not self.has_checkpoint,
                "there is no checkpoint: an unclean start trusts no index file, and reads the log from its begin",
            ),
            (not self.thrown, f"{start} {verb} throw away no index file"),
            (
                self.thrown and not is_built,
                f"{throws}, and nothing {verb} build them again: indexing is off in broker.conf",
            ),
            (
                is_built and not self.lost_keys,
                f"{throws} and build all of them again from log byte {self.dispatch_offset} on",
            ),
            (
                is_built and self.lost_keys,
                f"{throws}, build again what stands from log byte {self.dispatch_offset} on, "
                f"and {self.lost_keys:,} keys {verb} be lost",
            ),
            (
                self.lost_keys and self.when == "next-start",
                "indexd repair before that start keeps them: the checkpoint then vouches for these files",
            ),
        )
        return [words for holds, words in lines if holds]

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


def crash_cost(disk: Disk, config: Config, plan: AuditPlan, state: StoreState) -> CrashCost:
    """Apply RocketMQ's own rules to what stands there; reads some entries of the files that would go."""
    checkpoint, flavour = state.checkpoint or StoreCheckpoint(), plan.eras[-1].flavour
    start = dispatch_start(state.segments, checkpoint, config, flavour)
    is_written = writes_index(config.broker, flavour)
    # In the order of their names. A file of another size is thrown away, too, by what its header says.
    thrown = [file for file in plan.files if file.header.end_timestamp > checkpoint.index_msg_timestamp]
    begin = start.begin if start is not None else plan.log_begin
    counts = [_count(disk, file, plan, max(begin, plan.log_begin)) for file in thrown]
    keys, before = sum(map(sum, counts)), sum(first for first, _ in counts)
    # A broker that runs has an abort file, too.
    ended: When = "later" if not state.has_abort else "now" if state.lock.alive is None else "next-start"
    return CrashCost(
        thrown=tuple(file.name for file in thrown),
        keys=keys,
        lost_keys=before if is_written else keys,
        dispatch_offset=begin,
        when="now" if state.is_live else ended,
        dispatch_timestamp=start.store_timestamp if start is not None else None,
        has_checkpoint=state.checkpoint is not None,
        is_index_written=is_written,
    )


def dispatch_start(
    segments: Sequence[SegmentStart], checkpoint: StoreCheckpoint, config: Config, flavour: str
) -> SegmentStart | None:
    """The segment from which an unclean start dispatches again (spec 7.2, 7.3); None without any."""
    flushed = max(0, min(checkpoint.physic_msg_timestamp, checkpoint.logics_msg_timestamp) - _FLUSH_SLACK)
    if config.broker.message_index_enable and config.broker.message_index_safe:
        flushed = min(flushed, checkpoint.index_msg_timestamp)
    looked_at = segments[-_LOOKED_AT_MAX:] if flavour == "5.4" else segments
    # A segment that has no first frame, or one of time 0, is not the one.
    flushed_ones = (one for one in reversed(looked_at) if one.store_timestamp and one.store_timestamp <= flushed)
    return next(flushed_ones, looked_at[0] if looked_at else None)


def _count(disk: Disk, file: BrokerFile, plan: AuditPlan, begin: int) -> tuple[int, int]:
    # Entries of messages before ``begin``, and from there on; those that point before the log are nobody's loss.
    if not file.is_readable or file.entries == 0:
        return 0, 0
    with MissingOk(), disk.open_read(plan.folder / file.name) as opened:
        bounds = (plan.log_begin, begin)
        first, split = (first_entry_at(opened, plan.layout, 1, file.count, offset) for offset in bounds)
        return split - first, file.count - split
    return 0, 0


# Segments whose frames a broker goes through when it starts, before and from 5.4 on (spec rocketmq-store 7.2).
_CHECKED_SEGMENTS = 3
_CHECKED_SEGMENTS_5_4 = 1


def log_cut(audit: Audit, state: StoreState, dispatch_offset: int) -> tuple[int, str | None]:
    """The physical offset where the log ends after the next start, and why, if it ends in bytes that are no frame.

    An index that reaches behind that has the broker pass over what it writes there (spec rocketmq-store 4.2, 7.4, 7.5).
    ``dispatch_offset`` is from where an unclean start goes through the log.
    """
    begins = [segment.begin for segment in state.segments if segment.begin < audit.log_end]
    count = _CHECKED_SEGMENTS_5_4 if audit.eras[-1].flavour == "5.4" else _CHECKED_SEGMENTS
    checked_from = begins[-count:][0] if begins else audit.log_begin
    if state.has_abort or state.is_live:
        checked_from = min(checked_from, dispatch_offset)
    gap = next((gap for gap in audit.gaps if gap.end > checked_from), None)
    return (audit.log_end, audit.unreadable) if gap is None else (max(gap.begin, checked_from), gap.reason)


_WORDS = {
    "unclean-stop": "unclean stop",
    "file-deleted": "index file deleted",
    "index-off": "indexing was off",
    "roll-over-failure": "roll-over to a new file failed",
    "log-replaced": "log cut or replaced",
    "not-dispatched-yet": "not dispatched yet",
    "behind-unreadable": "behind unreadable log",
    "file-damaged": "index file damaged",
    "log-damaged": "log damaged",
    "file-unreadable": "index file unreadable",
    "unknown": "no cause is evident",
}
#: Of holes that nobody mends before the log is mended.
LOG_CAUSES = frozenset({"behind-unreadable", "log-damaged"})
_NAMES_SHOWN = 3
# What a file's own check says of one whose entries or slots were not left so by putKey.
_BROKEN = ("chain-", "slot", "entry-key-hash", "entry-phy-offset", "header-index-count")
# A message as young as this (ms), when the store was looked at, may just not have been dispatched.
_FRESH = 30_000
# How far apart the parts of one copy may be, ms.
_COPY = 60_000


@dataclass(frozen=True, slots=True)
class Cause:
    """``what`` is a stable identifier for programs, ``words`` the same for people; ``evidence``: one line a fact."""

    what: str
    words: str
    evidence: tuple[str, ...] = ()


def make_cause(what: str, *evidence: str) -> Cause:
    """One of the known causes."""
    return Cause(what, _WORDS[what], evidence)


def hole_causes(audit: Audit, state: StoreState, config: Config) -> tuple[Cause, ...]:
    """The likely cause of each hole of ``audit.holes``, in the same order; reads nothing."""
    return tuple(map(_Judge(audit, state, config).cause, audit.holes))


class _Around:
    # ``before`` ends before the hole, ``behind`` begins behind it; ``across`` has entries on both sides, ``inside`` are
    # all others that point into it. ``cut`` counts entries behind the hole's begin that are not there. ``orphans`` are
    # of files that hold by themselves; of one wrong entry, its own message is the one whose key is missing. ``begin``:
    # how the hole begins, in words. A message that straddles two files has entries in both, so both may touch the hole.
    def __init__(self, hole: Hole, audit: Audit, files: list[BrokerFile], broken: set[str]) -> None:
        self.hole = hole
        before = [file for file in files if file.end <= hole.begin]
        self.before = last = max(before, key=lambda one: (one.end, one.name), default=None)
        behind = (file for file in files if file.end > hole.begin and file.begin >= hole.last)
        self.behind = min(behind, key=lambda one: (one.begin, one.name), default=None)
        rest = [file for file in files if file.end > hole.begin and file.begin < hole.last]
        across = [file for file in rest if file.begin <= hole.begin and file.end >= hole.last]
        self.across = across[-1] if across else None
        self.inside = [file for file in rest if file not in across]
        cut = (file for file in reversed(before) if file.header.index_count > file.count)
        self.cut = next((file for file in cut if file.header.end_phy_offset >= hole.begin), None)
        overlapping = (one for one in audit.orphans if one.low < hole.end and one.high >= hole.begin)
        self.orphans = [one for one in overlapping if one.name not in broken]
        places = [(one.low, one.high) for one in self.orphans]
        self.is_one_wrong_entry = hole.messages == 1 and places == [(hole.begin, hole.begin)]
        where = "with the log" if hole.begin == audit.log_begin else "at a message"
        self.begin = f"it begins {where}, and no index file stands before it"
        if last is not None:
            self.begin = f"it begins right behind index/{last.name}, which is {'full' if last.is_full else 'not full'}"


# What may be the cause, the first that holds: its name, whether it holds, and what speaks for it.
_Rules = tuple[tuple[str, object, str], ...]


class _Judge:
    def __init__(self, audit: Audit, state: StoreState, config: Config) -> None:
        self._audit, self._state, self._config = audit, state, config
        self._files = [file for file in audit.files if file.entries]
        found = [(one.file.removeprefix("index/"), one.what) for one in audit.findings]
        self._broken = {name for name, what in found if what.startswith(_BROKEN)}
        self._unreadable = sorted({name for name, what in found if what == "file-size"})
        self._flavour = audit.eras[-1].flavour
        start = dispatch_start(state.segments, state.checkpoint or StoreCheckpoint(), config, self._flavour)
        self._dispatch_offset = start.begin if start is not None else audit.log_begin
        # Where a broker's start would cut the log, and why, if it ends in bytes that are no frame.
        self._cut = log_cut(audit, state, self._dispatch_offset)

    def cause(self, hole: Hole) -> Cause:
        around = _Around(hole, self._audit, self._files, self._broken)
        if found := self._of_the_log(around) or self._of_a_file(around):
            return found
        rules, evidence = self._tail(around) if hole == self._audit.tail else self._between(around)
        what, _, why = next(rule for rule in rules if rule[1])
        return make_cause(what, *(one for one in (*evidence, why) if one))

    def _of_the_log(self, around: _Around) -> Cause | None:
        audit, hole, orphans, files = self._audit, around.hole, around.orphans, self._files
        gap = next((gap for gap in audit.gaps if gap.begin == hole.end and not gap.is_missing), None)
        if gap is not None and hole.messages == 1 and orphans:
            # A frame whose own end was hit: its head is whole, so it is read as a message, and its keys are others now.
            return make_cause(
                "log-damaged",
                f"it ends where the log cannot be read, at {gap.begin} ({gap.reason})",
                f"an entry of index/{orphans[0].name} names another key of its message: what makes the log unreadable "
                "there begins inside that message, and the entry is likely right",
            )
        cut, reason = self._cut
        if hole.begin >= cut and reason is not None:
            return make_cause(
                "behind-unreadable",
                f"the log from byte {cut} on cannot be read ({reason}), and goes on behind that",
                "a broker that starts cuts its log there, so nobody indexes what is behind: the log wants a look first",
            )
        rule = "RocketMQ passes over a message below the end of its last file, without a word"
        # The last file by name is the one that RocketMQ goes on with.
        if hole == audit.tail and files and files[-1].end >= audit.log_end:
            text = f"index/{files[-1].name} ends at log byte {files[-1].end}, and the log ends at {audit.log_end}"
            return make_cause("log-replaced", text, rule)
        if not orphans or around.is_one_wrong_entry:
            return None
        pointing = [
            f"{counted(one.count, 'entry')} of index/{one.name} point to log bytes {one.low} to {one.high}, "
            "where the log holds other messages now"
            for one in orphans[-_NAMES_SHOWN:]
        ]
        high = max(one.high for one in orphans)
        ends = f"it ends at {hole.end}, and the last of these entries points to {high}"
        return make_cause("log-replaced", *pointing, ends, rule)

    def _of_a_file(self, around: _Around) -> Cause | None:
        hole, cut, across = around.hole, around.cut, around.across
        touched = [file.name for file in (across, *around.inside) if file is not None and file.name in self._broken]
        names = [
            f"index/{name}"
            for name in self._unreadable
            if not (around.before and name <= around.before.name) and not (around.behind and name >= around.behind.name)
        ]
        keys = counted(hole.keys, "key")
        rules: _Rules = (
            (
                "file-damaged",
                hole.unreachable * 2 >= hole.keys,
                f"{hole.unreachable:,} of its {keys} have an entry that no walk along the chains meets",
            ),
            (
                "file-damaged",
                cut,
                f"index/{cut.name} counts {cut.header.entries:,} entries up to log byte {cut.header.end_phy_offset}, "
                f"and behind entry {cut.entries} there are only zeros"
                if cut
                else "",
            ),
            (
                "file-damaged",
                around.is_one_wrong_entry,
                "the entry of an index file that points there is of no key of that message",
            ),
            *(
                ("file-damaged", name, f"the chains or slots of index/{name} do not hold: see its findings")
                for name in touched
            ),
            (
                "index-off",
                across,
                f"index/{across.name} has entries of messages on both sides of it, so no file is missing: RocketMQ did "
                "not index these messages when it dispatched them"
                if across
                else "",
            ),
            (
                "file-unreadable",
                names,
                f"by its name {', '.join(names[:_NAMES_SHOWN])} belongs there, and its size is that of no index file",
            ),
        )
        found = [(what, why) for what, holds, why in rules if holds]
        return make_cause(found[0][0], *(why for what, why in found if what == found[0][0])) if found else None

    def _between(self, around: _Around) -> tuple[_Rules, list[str]]:
        # A hole with other files before and behind it, or with none before it.
        hole, before, behind = around.hole, around.before, around.behind
        # Dispatching begins at a segment's first frame; the first message there with keys may stand further behind.
        last = behind.begin if behind is not None else hole.end
        segment = next((one.begin for one in self._state.segments if hole.end <= one.begin <= last), None)
        # Entry 1 counts from the end of the file that was the last one when it was put.
        difference, is_next, is_gone = behind.first_time_difference if behind is not None else 0, False, False
        if behind is not None and before is not None:
            is_next = difference == time_difference(behind.header.begin_timestamp, before.header.end_timestamp)
            is_gone = not is_next
        elif behind is not None and difference:
            # With nothing before it: a file that ended before the hole began has expired since.
            is_gone = behind.header.begin_timestamp - 1000 * difference > hole.begin_timestamp
        counts = ""
        if behind is not None and (is_next or difference):
            gone = f"a file that is not here, which ended {difference:,} s before it"
            counts = (
                f"index/{behind.name} counts from the end of {f'index/{before.name}' if is_next and before else gone}"
            )
        files, rest = divmod(hole.keys, self._config.index.index_num - 1)
        many = counted(files, "index file")
        fills = f"{hole.keys:,} keys fill exactly {many}" if files and not rest else ""
        is_begun = behind is not None and before is None and not difference
        rules: _Rules = (
            (
                "unknown",
                before is not None and not before.is_full,
                "RocketMQ would have gone on in that file, so files were put here or taken away by hand",
            ),
            (
                "file-deleted",
                behind is not None and hole.last == behind.begin,
                "some keys of its last message are in the file behind it: the others stood in a file that is gone",
            ),
            ("file-deleted", is_gone, fills),
            (
                "unclean-stop",
                segment is not None,
                f"it ends where the segment at {segment} begins: after an unclean stop RocketMQ throws the open file "
                "away and dispatches again from the begin of a segment",
            ),
            ("file-deleted", fills, fills),
            ("roll-over-failure", before and behind, f"it ends in the middle of a segment, at {hole.end}"),
            ("index-off", is_begun, "the file behind it counts from the end of no file: the index was begun there"),
            ("unknown", True, ""),
        )
        return rules, [around.begin, counts]

    def _tail(self, around: _Around) -> tuple[_Rules, list[str]]:
        # A hole behind which no key is findable: the broker is about to index it, or it is not. How far the broker has
        # dispatched stands in the checkpoint: it builds its ConsumeQueues and its index in one go (spec 4.1, 6.1).
        state, hole, before, begin = self._state, around.hole, around.before, around.begin
        checkpoint, is_full = state.checkpoint or StoreCheckpoint(), before is not None and before.is_full
        if not writes_index(self._config.broker, self._flavour):
            return (("index-off", True, f"{index_key(self._flavour)} is false in broker.conf"),), [begin]
        known, is_dispatched = "", checkpoint.logics_msg_timestamp > hole.begin_timestamp
        if is_dispatched:
            known = "by the checkpoint messages of it are in the ConsumeQueues: only the index was not written"
        elif checkpoint.logics_msg_timestamp:
            known = "by the checkpoint the ConsumeQueues end there, too"
        if state.is_live:
            age = max(state.looked_at - hole.begin_timestamp, 0)
            runs = f"a broker runs{'' if state.lock.pid is None else f' (pid {state.lock.pid})'}"
            return (
                ("not-dispatched-yet", age < _FRESH, f"its first message was {age / 1000:.0f} s old"),
                ("roll-over-failure", is_full, known),
                ("not-dispatched-yet", known and not is_dispatched, known),
                ("index-off", True, known),
            ), [runs, begin]
        if state.has_abort:
            ended = "no broker runs, and there is an abort file: it ended without a clean stop"
            mended = f"the broker's next start dispatches again from log byte {self._dispatch_offset} on"
            mends = "that mends it" if self._dispatch_offset <= hole.begin else "that mends it from there on only"
            return (
                ("unclean-stop", before is None or is_full, f"{mended}: {mends}"),
                ("index-off", is_dispatched, f"{mended}: {mends}"),
                ("not-dispatched-yet", True, f"{mended}: {mends}"),
            ), [ended, begin, known]
        is_copy = not state.has_lock_file
        is_older = is_copy and not is_full and hole.end_timestamp - hole.begin_timestamp < _COPY
        ended = "no broker runs, and there is no abort file: it was stopped cleanly, when all was dispatched"
        had_file = "by the checkpoint there was a full index file"
        return (
            (
                "not-dispatched-yet",
                before is not None and is_older,
                "it spans less than a minute: the index was copied before the log",
            ),
            ("file-deleted", is_full, begin),
            ("file-deleted", before is None and checkpoint.index_msg_timestamp, had_file),
            # Whether it was never written or taken away, nothing here tells.
            ("unknown", not self._files, "there is no index file"),
            ("index-off", True, begin),
        ), ["there is no lock file and no abort file: this is a copy" if is_copy else ended]
