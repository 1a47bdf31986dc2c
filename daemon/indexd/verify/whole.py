"""``indexd verify``: everything in a data directory read again and held against everything else.

First frontier and checkpoint: whether they are sane and agree. Then each output's own check, then the log if asked. It
works beside a daemon. What it finds counts only if nobody came, went or flushed meanwhile; otherwise it looks again, at
what the frontier names then: files expire, and recovery cuts them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from indexd.commitlog.decoder import DecoderOptions
from indexd.commitlog.lookup import LogView
from indexd.commitlog.reader import LogReader
from indexd.commitlog.segments import list_segments
from indexd.compare.deep import Compared, DeepComparison
from indexd.config import Config
from indexd.errors import CorruptDataError, DiskError, IndexdError
from indexd.findings import Findings
from indexd.flush.frontier import CHECKPOINT_SIZE, Frontier, StoreCheckpoint
from indexd.flush.registry import all_outputs
from indexd.output import CheckScope, Condition, LogBounds, Output, Progress
from indexd.query.coverage import find_behind, read_state
from indexd.query.source import check_as_built, known_frontier
from indexd.recovery.open import decode_rules, frame_size_max, reader_options
from indexd.recovery.whole_log import once
from indexd.storage.disk import Disk
from indexd.storage.lock import owner_pid
from indexd.storage.names import DataFiles

# What is found counts if nothing has changed meanwhile; so often it is looked again.
_LOOKS = 5
_PAUSE = 0.2
_DEFAULT = "default"


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


@dataclass(slots=True)
class Report:
    """``findings`` are what does not hold; ``notes`` what was not asked, and why. ``bytes`` are those of the files.

    ``units`` of ``queues``, and ``segments`` with sparse indexes.
    """

    findings: Findings = field(default_factory=Findings)
    notes: list[str] = field(default_factory=list)
    files: int = 0
    entries: int = 0
    bytes: int = 0
    queues: int = 0
    units: int = 0
    segments: int = 0
    seconds: float = 0.0
    compared: Compared | None = None

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


def verify(config: Config, disk: Disk, *, deep: bool, on_progress: Callable[[int, int], None]) -> Report:
    """Read everything again; ``on_progress`` gets (bytes done, bytes in all). Raises IndexdError where it cannot."""
    started = time.monotonic()
    files = DataFiles(config.store.data)
    state = look(disk, files)
    config = _as_built(config, state.frontier)
    outputs = [output for output, _ in all_outputs(config, disk, files.data)]
    held, total = state.frontier.outputs, state.frontier.phy_offset - state.frontier.begin_offset if deep else 0
    total += sum(output.totals(held[output.name])["bytes"] for output in outputs if output.name in held)
    report, progress = Report(), Progress(on_progress, total)
    state = _check_outputs(config, disk, files, outputs, state, report, progress)
    report.notes += state.notes()
    if deep and report.findings.counts["frontier"]:
        report.notes.append("the frontier contradicts itself: nothing was compared with the log")
    elif deep:
        report.compared = compare(config, disk, state, report.findings, progress)
        report.notes += report.compared.left_out
        if state.owner is None:
            report.notes += _behind(config, disk, state.frontier)
        elif isinstance(corrupt := read_state(disk, files.state).get("corrupt"), dict):
            report.notes.append(f"the log from {corrupt.get('offset')} on: {corrupt.get('reason')}")
    report.notes = list(dict.fromkeys(report.notes))
    report.seconds = time.monotonic() - started
    return report


def compare(
    config: Config, disk: Disk, state: StoreState, findings: Findings, on_bytes: Callable[[int], None]
) -> Compared:
    """Compare what the frontier covers and the log still has; ``config`` is that of the data directory."""
    options = replace(once(reader_options(config)), skip_corrupt=True)
    reader = LogReader(disk, config.store.commit_log_directories, decode_rules(config), options)
    reader.refresh()
    frontier, incomparable = state.frontier, ""
    if state.is_opening:
        incomparable = f"indexd, pid {state.owner}, is opening the directory"
    elif frontier.filled_offset < frontier.phy_offset:
        incomparable = f"they are filled up to {frontier.filled_offset} only"
    try:
        comparison = DeepComparison(config, disk, frontier, reader, findings, incomparable)
        comparison.run(on_bytes)
    finally:
        reader.close()
    return comparison.compared


def _behind(config: Config, disk: Disk, frontier: Frontier) -> list[str]:
    # Bytes behind the end of the index that are no frame, though the log goes on in them.
    directories, size = config.store.commit_log_directories, config.store.segment_size
    with closing(LogView(disk, directories, size, DecoderOptions(frame_size_max=frame_size_max(config)))) as log:
        behind = find_behind(log, frontier.phy_offset, frontier.stale_head)
    if behind is None or behind.reason is None:
        return []
    return [f"the log from {behind.phy_offset} on: {behind.reason}"]


def _check_outputs(
    config: Config,
    disk: Disk,
    files: DataFiles,
    outputs: Sequence[Output[Any]],
    state: StoreState,
    report: Report,
    on_bytes: Callable[[int], None],
) -> StoreState:
    # Each output's own check, whose state may change meanwhile; the state that the report describes.
    scope = CheckScope(Condition.AT_REST, True, on_bytes, log_begin=partial(_log_begin, config, disk))
    for left in reversed(range(_LOOKS)):
        found = _check_once(disk, files, outputs, state, scope)
        if len(found) == 0 or left == 0:
            break
        if state.owner is not None:
            # Recovery cuts a file and gives it its size again; a checkpoint is replaced just before its frontier.
            time.sleep(_PAUSE)
        now = look(disk, files)
        if now == state and not state.is_opening:
            break
        state = now
    report.notes += scope.notes
    report.findings.merge(found)
    frontier = state.frontier
    report.files, report.entries = len(frontier.index), sum(mark.header.entries for mark in frontier.index)
    report.bytes = len(frontier.index) * frontier.layout.file_size
    queues = frontier.queues or ()
    report.queues = len(queues)
    report.units = sum(mark.max_offset - max(mark.first_offset, mark.begin_offset) for mark in queues)
    report.segments = len(frontier.sparse.segments) if frontier.sparse is not None else 0
    return state


def _check_once(
    disk: Disk, files: DataFiles, outputs: Sequence[Output[Any]], state: StoreState, scope: CheckScope
) -> Findings:
    found, frontier = Findings(), state.frontier
    if problem := _layout_problem(frontier):
        found.add("frontier", 0, "frontier", problem)
        return found
    # Where the disk refused in the middle of a drain, files hold some of what lies behind the physical offset.
    slack = 0 if state.is_at_rest else frontier.segment_size
    bounds = LogBounds(frontier.begin_offset, frontier.phy_offset, frontier.segment_size, slack)
    for text in check_frontier(frontier, outputs, bounds):
        found.add("frontier", 0, "frontier", text)
    if (problem := _checkpoint_problem(disk, files, state)) is not None:
        found.add("checkpoint", 0, "checkpoint", problem)
    scope = replace(scope, condition=state.condition, is_complete=state.is_at_rest, bounds=bounds)
    for output in outputs:
        found.merge(output.check(frontier.outputs.get(output.name, output.empty), scope))
    return found


def _log_begin(config: Config, disk: Disk) -> int | None:
    store = config.store
    try:
        return list_segments(disk, store.commit_log_directories, store.segment_size).min_offset
    except IndexdError:
        return None


def _as_built(config: Config, frontier: Frontier) -> Config:
    # What the data directory was built with holds where nothing was given; something else that was given is an error.
    check_as_built(config, frontier)
    store: dict[str, object] = {}
    if config.store.store is None and not config.store.commit_log_paths:
        store["commit_log_paths"] = tuple(Path(path) for path in frontier.commit_log_paths)
    if config.provenance.get("segment_size", _DEFAULT) == _DEFAULT:
        store["segment_size"] = frontier.segment_size
    index = {
        "flavour": frontier.flavour,
        "hash_slot_num": frontier.layout.hash_slot_num,
        "index_num": frontier.layout.index_num,
    }
    # Whatever is asked for now, the log has to be decoded for all that is there.
    outputs: dict[str, object] = {"consume_queue": frontier.queues is not None, "sparse": frontier.sparse is not None}
    if frontier.queues is not None:
        store["consume_queue_file_size"] = frontier.queue_file_size
    if frontier.sparse is not None:
        outputs["sparse_interval"] = frontier.sparse.interval
    return config.model_copy(
        update={
            "store": config.store.model_copy(update=store),
            "index": config.index.model_copy(update=index),
            "outputs": config.outputs.model_copy(update=outputs),
        }
    )


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


def _layout_problem(frontier: Frontier) -> str | None:
    """Why nothing can be read with this layout: every file would be read as what it is not."""
    layout = frontier.layout
    if layout.hash_slot_num < 1 or layout.index_num < 1 or frontier.segment_size < 1:
        return f"{layout.hash_slot_num} slots, {layout.index_num} entries, segments of {frontier.segment_size} bytes"
    return None


def _checkpoint_problem(disk: Disk, files: DataFiles, state: StoreState) -> str | None:
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
