"""Composes a verification: the frontier and checkpoint, each output's own check, then the log if asked.

Works beside a daemon. What it finds counts only if nobody came, went or flushed meanwhile; otherwise it looks again,
at what the frontier names then: files expire, and recovery cuts them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from indexd.commitlog.decoder import DecoderOptions
from indexd.commitlog.reader import LogReader
from indexd.commitlog.segments import list_segments
from indexd.compare.deep import Compared, DeepComparison
from indexd.config import Config
from indexd.errors import IndexdError
from indexd.findings import Findings
from indexd.flush.frontier import Frontier
from indexd.flush.registry import all_outputs
from indexd.output import CheckScope, Condition, LogBounds, Output
from indexd.query.coverage import find_behind
from indexd.query.log import LogView
from indexd.query.source import check_as_built
from indexd.recovery.open import decode_rules, frame_size_max, reader_options
from indexd.recovery.whole_log import once
from indexd.storage.disk import Disk
from indexd.storage.names import DataFiles
from indexd.verify.records import FRONTIER, StoreState, check_checkpoint, check_frontier, layout_problem, look


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
                "gaveUp": self.compared.gave_up,
            }
        return row


OnProgress = Callable[[int, int], None]

_LOOKS = 5
_PAUSE = 0.2
_DEFAULT = "default"


def verify(config: Config, disk: Disk, *, deep: bool, on_progress: OnProgress) -> Report:
    """Read everything again; ``on_progress`` gets (bytes done, bytes in all). Raises IndexdError where it cannot."""
    started = time.monotonic()
    files = DataFiles(config.store.data)
    state = look(disk, files)
    config = _as_built(config, state.frontier)
    outputs = [output for output, _ in all_outputs(config, disk, files.data)]
    progress = _Progress(on_progress, state.frontier, outputs, deep=deep)
    report = Report()
    state = _check_outputs(config, disk, files, outputs, state, report, progress)
    report.notes += state.notes()
    if deep and report.findings.counts["frontier"]:
        report.notes.append("the frontier contradicts itself: nothing was compared with the log")
    elif deep:
        report.compared = compare(config, disk, state, report.findings, progress)
        report.notes += report.compared.left_out
        if state.owner is None:
            report.notes += _behind(config, disk, state.frontier)
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
    frontier, incomparable = state.frontier, None
    if state.is_opening:
        incomparable = f"indexd, pid {state.owner}, is opening the directory"
    elif frontier.filled_offset < frontier.phy_offset:
        incomparable = f"they are filled up to {frontier.filled_offset} only"
    try:
        comparison = DeepComparison(config, disk, frontier, reader, incomparable)
        comparison.run(on_bytes)
    finally:
        reader.close()
    for found in comparison.found:
        findings.merge(found)
    return comparison.compared


def _behind(config: Config, disk: Disk, frontier: Frontier) -> list[str]:
    # Bytes behind the end of the index that are no frame, though the log goes on in them.
    directories, size = config.store.commit_log_directories, config.store.segment_size
    with closing(LogView(disk, directories, size, DecoderOptions(frame_size_max=frame_size_max(config)))) as log:
        behind = find_behind(log, frontier.phy_offset, frontier.stale_head)
    if behind is None or behind.reason is None:
        return []
    return [f"the log from {behind.phy_offset} on: {behind.reason}"]


class _Progress:
    # Bytes of files, then of log.
    def __init__(
        self, on_progress: OnProgress, frontier: Frontier, outputs: Sequence[Output[Any]], *, deep: bool
    ) -> None:
        self._on_progress = on_progress
        self._done = 0
        held = frontier.outputs
        self._total = sum(output.totals(held[output.name])["bytes"] for output in outputs if output.name in held)
        if deep:
            self._total += frontier.phy_offset - frontier.begin_offset

    def __call__(self, more: int) -> None:
        self._done += more
        self._on_progress(self._done, max(self._total, self._done))


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
        now = look(disk, files)
        if state.is_opening:
            time.sleep(_PAUSE)  # recovery cuts a file and gives it its size again: it looks short for a moment
        elif now == state:
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
    if problem := layout_problem(frontier):
        found.add(FRONTIER, 0, "frontier", problem)
        return found
    # Where the disk refused in the middle of a drain, files hold some of what lies behind the physical offset.
    slack = 0 if state.is_at_rest else frontier.segment_size
    bounds = LogBounds(frontier.begin_offset, frontier.phy_offset, frontier.segment_size, slack)
    for text in check_frontier(frontier, outputs, bounds):
        found.add(FRONTIER, 0, "frontier", text)
    check_checkpoint(disk, files, state, found)
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
