"""``indexd verify``: everything in a data directory read again and held against everything else.

First frontier and checkpoint: whether they are sane and agree. Then each output's own check, then the log if asked. It
works beside a daemon. What it finds counts only if nobody came, went or flushed meanwhile; otherwise it looks again, at
what the frontier names then: files expire, and recovery cuts them.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from indexd.commitlog.batcher import DispatchBatch, within
from indexd.commitlog.decoder import DecoderOptions
from indexd.commitlog.format import Corrupt
from indexd.commitlog.lookup import LogView
from indexd.commitlog.segments import list_segments
from indexd.compare.index import NO_KEYS, NOTED_MAX, ComparedFile, compare_files, keys_of
from indexd.compare.secondary import comparisons
from indexd.config import Config
from indexd.errors import CorruptDataError, IndexdError
from indexd.findings import Findings
from indexd.flush.frontier import CHECKPOINT_SIZE, Frontier, StoreCheckpoint
from indexd.flush.pipeline import all_outputs
from indexd.index.format import FLAVOURS, HEADER_SIZE
from indexd.output import CheckScope, Condition, Output, ProgressReporter
from indexd.query.source import check_as_built, find_behind, known_frontier, read_state, store_as_built
from indexd.recovery.open import LogRange, frame_size_max
from indexd.recovery.recover import NEVER
from indexd.storage.disk import Disk
from indexd.storage.lock import owner_pid
from indexd.storage.names import DataFiles

# What is found counts if nothing has changed meanwhile; so often it is looked again.
_LOOKS = 5
_PAUSE = 0.2


@dataclass(frozen=True, slots=True)
class DataOwner:
    """``owner`` holds the lock; while it ``is_opening``, recovery may be at work.

    ``is_unclean``: no one holds the lock, and the last one who did was killed.
    """

    frontier: Frontier
    owner: int | None
    is_opening: bool
    is_unclean: bool

    @property
    def condition(self) -> Condition:
        """What may be asked of the files that grow."""
        if self.is_unclean or self.is_opening:
            return Condition.CUT_SHORT
        return Condition.AT_REST if self.owner is None else Condition.GROWING

    def notes(self) -> list[str]:
        """What is not asked because of who works there, or was killed there."""
        daemon = f"indexd, pid {self.owner}, is"
        rows = (
            (
                self.is_unclean,
                "the last stop was unclean: indexd --recover or the next start mends it; "
                "of the open file only the entries that the frontier names were checked",
            ),
            (self.is_opening, f"{daemon} opening the directory: of the open file only entries were checked"),
            (
                self.owner is not None and not self.is_opening,
                f"{daemon} at work: what it has built since the last flush was not checked",
            ),
        )
        return [words for holds, words in rows if holds]


def look(disk: Disk, files: DataFiles) -> DataOwner:
    """What stands there now. Raises UsageError without a frontier, CorruptDataError for one that cannot be read."""
    owner = owner_pid(files.lock)
    unclean = owner is None and disk.exists(files.abort)
    frontier, row = known_frontier(disk, files), read_state(disk, files.state)
    # A daemon writes where it stands at each drain, from the first one behind its recovery on.
    is_building = row.get("pid") == owner and "phyOffset" in row
    return DataOwner(frontier, owner, owner is not None and not is_building, unclean)


@dataclass(slots=True)
class ComparedTotals:
    """How much was held against the log: messages and entries; what could not be, and why (``left_out``, in words)."""

    messages: int = 0
    entries: int = 0
    expired_entries: int = 0
    left_out_entries: int = 0
    left_out: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """``findings`` are what does not hold; ``notes`` what was not asked, and why. ``bytes`` are those of the files.

    ``units`` of ``queues``, and ``segments`` with sparse indexes.
    """

    findings: Findings
    notes: list[str]
    files: int
    entries: int
    bytes: int
    queues: int
    units: int
    segments: int
    seconds: float
    compared: ComparedTotals | None

    def to_json(self) -> dict[str, Any]:
        """The summary: the last line of ``--json``."""
        row: dict[str, Any] = {
            "kind": "summary",
            "files": self.files,
            "entries": self.entries,
            "bytes": self.bytes,
            "consumeQueues": self.queues,
            "consumeQueueUnits": self.units,
            "sparseSegments": self.segments,
            "seconds": round(self.seconds, 3),
            "findings": len(self.findings),
            "counts": dict(sorted(self.findings.counts.items())),
            "notes": self.notes,
            "deep": self.compared is not None,
        }
        if self.compared is not None:
            row |= {
                "comparedMessages": self.compared.messages,
                "comparedEntries": self.compared.entries,
                "expiredEntries": self.compared.expired_entries,
                "leftOutEntries": self.compared.left_out_entries,
                "leftOut": self.compared.left_out,
            }
        return row


def verify(config: Config, disk: Disk, *, deep: bool, on_progress: Callable[[int, int], None]) -> VerifyReport:
    """Read everything again; ``on_progress`` gets (bytes done, bytes in all). Raises IndexdError where it cannot."""
    started = time.monotonic()
    files = DataFiles(config.store.data)
    state = look(disk, files)
    config = _as_built(config, state.frontier)
    outputs = [output for output, _ in all_outputs(config, disk, files.data)]
    held, total = state.frontier.outputs, state.frontier.phy_offset - state.frontier.begin_offset if deep else 0
    total += sum(output.totals(held[output.name])["bytes"] for output in outputs if output.name in held)
    progress, compared = ProgressReporter(on_progress, total), None
    findings, notes, state = _check_outputs(config, disk, files, outputs, state, progress)
    frontier, notes = state.frontier, [*notes, *state.notes()]
    if deep and findings.counts["frontier"]:
        notes.append("the frontier contradicts itself: nothing was compared with the log")
    elif deep:
        compared = DeepComparison(config, disk, state, findings).run(progress)
        notes += compared.left_out
        if state.owner is None:
            notes += _behind(config, disk, frontier)
        elif isinstance(corrupt := read_state(disk, files.state).get("corrupt"), dict):
            notes.append(f"the log from {corrupt.get('offset')} on: {corrupt.get('reason')}")
    queues = frontier.queues or ()
    return VerifyReport(
        findings=findings,
        notes=list(dict.fromkeys(notes)),
        files=len(frontier.index),
        entries=sum(mark.header.entries for mark in frontier.index),
        bytes=len(frontier.index) * frontier.layout.file_size,
        queues=len(queues),
        units=sum(mark.max_offset - max(mark.first_offset, mark.begin_offset) for mark in queues),
        segments=len(frontier.sparse.segments) if frontier.sparse is not None else 0,
        seconds=time.monotonic() - started,
        compared=compared,
    )


def _behind(config: Config, disk: Disk, frontier: Frontier) -> list[str]:
    # Bytes behind the end of the index that are no frame, though the log goes on in them.
    directories, size = config.store.commit_log_directories, config.store.segment_size
    with LogView(disk, directories, size, DecoderOptions(frame_size_max=frame_size_max(config))) as log:
        behind = find_behind(log, frontier.phy_offset, frontier.stale_head)
    if behind is None or behind.reason is None:
        return []
    return [f"the log from {behind.phy_offset} on: {behind.reason}"]


def _check_outputs(
    config: Config,
    disk: Disk,
    files: DataFiles,
    outputs: Sequence[Output[Any]],
    state: DataOwner,
    on_bytes: Callable[[int], None],
) -> tuple[Findings, list[str], DataOwner]:
    # Each output's own check: what was found, what was not asked, and the state, which may have changed meanwhile.
    scope = CheckScope(Condition.AT_REST, True, on_bytes, log_begin=partial(_log_begin, config, disk))
    for left in reversed(range(_LOOKS)):
        found = _check_once(disk, files, outputs, state, scope)
        if len(found) == 0 or left == 0:
            break
        if state.owner is not None:
            # A checkpoint is replaced just before its frontier.
            time.sleep(_PAUSE)
        now = look(disk, files)
        if now == state and not state.is_opening:
            break
        state = now
    return found, scope.notes, state


def _check_once(
    disk: Disk, files: DataFiles, outputs: Sequence[Output[Any]], state: DataOwner, scope: CheckScope
) -> Findings:
    found, frontier = Findings(), state.frontier
    for text in _contradictions(frontier):
        found.add("frontier", 0, "frontier", text)
    if len(found):  # every file would be read as what it is not
        return found
    if (problem := _checkpoint_problem(disk, files, state)) is not None:
        found.add("checkpoint", 0, "checkpoint", problem)
    scope = replace(scope, condition=state.condition, is_complete=state.condition is Condition.AT_REST)
    for output in outputs:
        found.merge(output.check(frontier.outputs.get(output.name), scope))
    return found


def _log_begin(config: Config, disk: Disk) -> int | None:
    store = config.store
    with suppress(IndexdError):
        return list_segments(disk, store.commit_log_directories, store.segment_size).min_offset
    return None


def _as_built(config: Config, frontier: Frontier) -> Config:
    # What the data directory was built with holds where nothing was given; something else that was given is an error.
    check_as_built(config, frontier)
    store = store_as_built(config, frontier)
    index = {
        "flavour": frontier.flavour,
        "hash_slot_num": frontier.layout.hash_slot_num,
        "index_num": frontier.layout.index_num,
    }
    # Whatever is asked for now, the log has to be decoded for all that is there.
    outputs: dict[str, object] = {"consume_queue": frontier.queues is not None, "sparse": frontier.sparse is not None}
    if frontier.queues_mark is not None:
        store = store.model_copy(update={"consume_queue_file_size": frontier.queues_mark.file_size})
    if frontier.sparse is not None:
        outputs["sparse_interval"] = frontier.sparse.interval
    return config.model_copy(
        update={
            "store": store,
            "index": config.index.model_copy(update=index),
            "outputs": config.outputs.model_copy(update=outputs),
        }
    )


def _contradictions(frontier: Frontier) -> list[str]:
    # What no pipeline writes: files without room, offsets out of order.
    layout, segment_size, end = frontier.layout, frontier.segment_size, frontier.phy_offset
    rows = [
        (
            min(layout.hash_slot_num, layout.index_num, segment_size) < 1,
            f"{layout.hash_slot_num} slots, {layout.index_num} entries, segments of {segment_size} bytes",
        ),
        (
            not 0 <= frontier.begin_offset <= end,
            f"beginOffset {frontier.begin_offset} and phyOffset {end} are no range of a log",
        ),
        *(
            (
                not 0 <= gap.begin < gap.end <= end,
                f"uncovered range {gap.begin} to {gap.end} is none before phyOffset {end}",
            )
            for gap in frontier.uncovered
        ),
        (frontier.filled_offset > end, f"refillOffset {frontier.filled_offset} lies behind phyOffset {end}"),
    ]
    return [text for is_wrong, text in rows if is_wrong]


def _checkpoint_problem(disk: Disk, files: DataFiles, state: DataOwner) -> str | None:
    """What is wrong with the checkpoint beside the frontier: it is the same after a clean stop, else never older."""
    if not disk.exists(files.checkpoint):
        return "it is missing"
    data, wanted = disk.read(files.checkpoint), StoreCheckpoint.of(state.frontier)
    try:
        read = StoreCheckpoint.unpack(data, files.checkpoint)
    except CorruptDataError as error:
        return error.line()
    if data != read.pack():
        return f"its {len(data)} bytes are not {CHECKPOINT_SIZE}, zeros behind the five fields"
    may_be_newer = state.owner is not None or state.is_unclean
    if may_be_newer and not read.master_flushed_offset and read.confirm_phy_offset > wanted.confirm_phy_offset:
        return None
    fields = zip(asdict(read).items(), asdict(wanted).values(), strict=True)
    differing = [f"{name} is {here}, but the frontier says {there}" for (name, here), there in fields if here != there]
    return "; ".join(differing) or None


class DeepComparison:
    """All that the frontier covers and the log still has, held against every output; what differs goes to ``findings``.

    ``config`` is that of the data directory. ``findings`` name the files that do not hold by themselves already.
    """

    def __init__(self, config: Config, disk: Disk, state: DataOwner, findings: Findings) -> None:
        self.compared, self._config = ComparedTotals(), config
        self._disk, self._files = disk, DataFiles(config.store.data)
        self._frontier, self._findings = state.frontier, findings
        frontier, incomparable = state.frontier, ""
        if state.is_opening:
            incomparable = f"indexd, pid {state.owner}, is opening the directory"
        elif frontier.filled_offset < frontier.phy_offset:
            incomparable = f"they are filled up to {frontier.filled_offset} only"
        self._marks, self._open = deque(frontier.index), list[ComparedFile]()
        self._begins = [mark.header.begin_phy_offset for mark in frontier.index]
        self._damaged = {finding.file for finding in findings.kept}
        begin = list_segments(disk, config.store.commit_log_directories, config.store.segment_size).min_offset
        self._start = max(begin if begin is not None else frontier.phy_offset, frontier.begin_offset)
        self._secondary = comparisons(config, disk, self._files.data, frontier, self._start) if not incomparable else []
        if incomparable and len(frontier.outputs) > 1:
            self._say(f"queues and sparse indexes were not compared: {incomparable}")
        for gap in frontier.uncovered:
            self._say(f"log bytes {gap.begin} to {gap.end} are not covered: {gap.reason}")
        # From where entry 1 of the next file counts; nobody knows it of one behind messages that have expired.
        self._end = 0 if self._start == frontier.begin_offset else None
        # Of these ranges the entries are gone: their messages are not asked for.
        self._lost: list[tuple[int, int]] = []
        if begin is None:
            self._say("the log has no segments")

    def run(self, on_bytes: Callable[[int], None]) -> ComparedTotals:
        """To the frontier's physical offset, or to where the log ends."""
        frontier, compared, done = self._frontier, self.compared, self._start
        if self._start > frontier.begin_offset:
            compared.expired_entries = self._leave_out(frontier.begin_offset, self._start)
            if compared.expired_entries:
                self._say(f"{compared.expired_entries} entries of messages before {self._start}, which have expired")
        log = LogRange(self._start, frontier.phy_offset, self._start, frontier.flavour, want_queue=True)
        for item in log.read(self._disk, self._config, 0):
            if isinstance(item, DispatchBatch):
                self._compare_batch(item)
            else:
                compared.left_out_entries += self._leave_out(item.begin, item.end)
                self._say(f"log bytes {item.begin} to {item.end} were not compared: {item.reason}")
                is_known = any(gap.begin <= item.begin and item.end <= gap.end for gap in frontier.left_out)
                if item.is_expired or not is_known:  # else it was passed over when they were built, too
                    self._finish_secondary(item.reason)
            on_bytes(log.position - done)
            done = log.position
        if log.log_end is not None:
            self._meet_end(log.log_end, log.unreadable)
            self._finish_secondary(f"the comparison ended at {log.log_end}")
        self._finish_secondary()
        self._orphans_below(frontier.phy_offset)
        end = max((mark.header.end_phy_offset for mark in frontier.index if mark.header.entries), default=-1) + 1
        if refused := self._leave_out(frontier.phy_offset, max(end, frontier.phy_offset)):
            compared.left_out_entries += refused
            self._say(f"entries of messages behind {frontier.phy_offset}: the disk refused before all were built")
        self._orphans_below(NEVER)
        if compared.left_out_entries:
            self._say(f"{compared.left_out_entries} entries in all that were not compared for these reasons")
        return compared

    def _finish_secondary(self, unreadable: str = "") -> None:
        # Where the log cannot be read, what it comes to behind that nobody knows.
        if unreadable and self._secondary:
            self._say(f"queues and sparse indexes were not compared from there on: {unreadable}")
        for one in self._secondary:
            self._findings.merge(one.finish(None if unreadable else self._frontier.phy_offset))
            self.compared.left_out += one.left_out
        self._secondary = []

    def _meet_end(self, log_end: int, unreadable: Corrupt | None) -> None:
        # The log ends before what the frontier covers, or in bytes that are no frame.
        end = self._frontier.phy_offset
        self.compared.left_out_entries += self._leave_out(log_end, end)
        if unreadable is not None:
            self._say(f"log bytes {log_end} to {end} were not compared: {unreadable.reason}")
        else:
            text = f"the log ends at {log_end}, but the frontier covers it to {end}"
            self._findings.add("frontier", 0, "log-end", text)

    def _compare_batch(self, batch: DispatchBatch) -> None:
        done = batch.begin_offset
        for gap in self._frontier.left_out:
            begin, end = max(gap.begin, batch.begin_offset), min(gap.end, batch.end_offset)
            if begin < end:
                self._match(within(batch, done, begin))
                self.compared.left_out_entries += self._leave_out(begin, end)
                done = end
        self._match(within(batch, done, batch.end_offset))

    def _match(self, batch: DispatchBatch) -> None:
        if not batch.rows:
            return
        for one in self._secondary:
            one.take(batch)
        keys = keys_of(batch, FLAVOURS[self._frontier.flavour].skip_mask)
        bound = int(keys.phy_offset[-1]) + 1
        match = compare_files(keys, bound, self._reached(bound))
        self._close_files()
        is_lost = np.zeros(len(keys.phy_offset), dtype=np.bool_)
        for begin, end in self._lost:
            is_lost |= (keys.phy_offset >= begin) & (keys.phy_offset < end)
        self.compared.messages += int((~is_lost).sum())
        missing = match.unpaired[~is_lost[keys.row[match.unpaired]]]
        for key in missing[:NOTED_MAX].tolist():
            phy_offset, key_hash = keys.phy_offset[keys.row[key]], keys.key_hash[key]
            text = f"the message at {phy_offset} has a key with hash {key_hash}, and no entry for it here"
            at = max(bisect_right(self._begins, int(phy_offset)) - 1, 0)
            names = [f"index/{mark.name}" for mark in self._frontier.index[at : at + 1]] or ["frontier"]
            self._findings.add(names[0], HEADER_SIZE, "key-without-entry", text)
        self._findings.count("key-without-entry", max(len(missing) - NOTED_MAX, 0))

    def _reached(self, bound: int) -> list[ComparedFile]:
        # The files with entries that point below it, opened as the log comes to them.
        while self._marks and self._marks[0].header.begin_phy_offset < bound:
            mark = self._marks.popleft()
            header = replace(mark.header, index_count=max(mark.header.index_count, 1))
            path, layout = self._files.index / mark.name, self._frontier.layout
            file = ComparedFile(self._disk, path, layout, header, previous_end=self._end)
            self._end = header.end_timestamp
            file.select(-NEVER, NEVER, is_ordered=file.name not in self._damaged)
            self._open.append(file)
        return self._open

    def _close_files(self) -> None:
        for file in [file for file in self._open if file.is_over]:
            self._open.remove(file)
            if file.is_gone:
                self._lost.append((file.header.begin_phy_offset, file.header.end_phy_offset + 1))
                left = file.header.entries - file.taken
                self.compared.left_out_entries += left
                self._say(f"{left} entries of {file.name}, which is gone or too short")
            else:
                file.judge_times()
            self.compared.entries += file.compared
            self._findings.merge(file.findings)

    def _leave_out(self, begin: int, end: int) -> int:
        # Entries that point into [begin, end) stand for themselves; those before it have had their chance.
        self._orphans_below(begin)
        count = sum(len(file.take_below(end).number) for file in self._reached(end))
        self._close_files()
        return count

    def _orphans_below(self, phy_offset: int) -> None:
        compare_files(NO_KEYS, phy_offset, self._reached(phy_offset))
        self._close_files()

    def _say(self, text: str) -> None:
        self.compared.left_out.append(text)
