"""Composes a verification: the frontier and checkpoint, each output's own check, then the log if asked.

Works beside a daemon. What it finds counts only if nobody came, went or flushed meanwhile; otherwise it looks again,
at what the frontier names then: files expire, and recovery cuts them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from indexd.commitlog.segments import list_segments
from indexd.config import Config
from indexd.consumequeue.check import check_queues
from indexd.consumequeue.format import UNIT_SIZE
from indexd.errors import DiskError, IndexdError
from indexd.findings import Findings
from indexd.flush.frontier import Frontier
from indexd.index.check import Place, check_file
from indexd.index.format import FLAVOURS, FileMark, IndexHeader
from indexd.query.source import check_as_built
from indexd.sparse.check import check_sparse
from indexd.sparse.format import SparseMark
from indexd.storage.disk import Disk
from indexd.storage.names import DataFiles
from indexd.verify.deep import Compared, compare
from indexd.verify.records import StoreState, check_checkpoint, check_frontier, look, sound_queues


def check_secondary(disk: Disk, files: DataFiles, state: StoreState, on_bytes: Callable[[int], None]) -> Findings:
    """What the files say of themselves and of the frontier; of an output that is not built, that nothing is there."""
    found, frontier = Findings(), state.frontier
    queues = sound_queues(frontier)
    found.merge(
        check_queues(
            disk,
            files.consumequeue,
            frontier.queue_file_size,
            queues,
            is_at_rest=state.is_at_rest,
            is_owned=not state.is_at_rest or len(queues) < len(frontier.queues or ()),
            on_bytes=on_bytes,
        )
    )
    found.merge(
        check_sparse(
            disk,
            files.sparse,
            frontier.segment_size,
            frontier.sparse or SparseMark(0),
            is_at_rest=state.is_at_rest,
            is_owned=not state.is_at_rest,
            on_bytes=on_bytes,
        )
    )
    return found


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
    progress = _Progress(on_progress, state.frontier, deep=deep)
    report = Report()
    state = _Outputs(disk, files, config, report, progress).check(state)
    report.notes += state.notes()
    if deep and report.findings.counts["frontier"]:
        report.notes.append("the frontier contradicts itself: nothing was compared with the log")
    elif deep:
        report.compared = compare(config, disk, state, report.findings, progress)
        report.notes += report.compared.left_out
    report.notes = list(dict.fromkeys(report.notes))
    report.seconds = time.monotonic() - started
    return report


class _Progress:
    # Bytes of index files, then of log.
    def __init__(self, on_progress: OnProgress, frontier: Frontier, *, deep: bool) -> None:
        self._on_progress = on_progress
        self._done = 0
        self._total = len(frontier.index) * frontier.layout.file_size
        self._total += sum(UNIT_SIZE * (mark.max_offset - mark.first_offset) for mark in frontier.queues or ())
        if deep:
            self._total += frontier.phy_offset - frontier.begin_offset

    def __call__(self, more: int) -> None:
        self._done += more
        self._on_progress(self._done, max(self._total, self._done))


class _Outputs:
    # Each output's own check, whose state may change meanwhile.
    def __init__(
        self, disk: Disk, files: DataFiles, config: Config, report: Report, on_bytes: Callable[[int], None]
    ) -> None:
        self._disk, self._files, self._config = disk, files, config
        self._report, self._on_bytes = report, on_bytes
        # Files without findings need no second look while the frontier says the same of them.
        self._sound: dict[FileMark, IndexHeader | None] = {}

    def check(self, state: StoreState) -> StoreState:
        """Fill the report; returns the state that it describes."""
        for left in reversed(range(_LOOKS)):
            found = self._check_once(state)
            if len(found) == 0 or left == 0:
                break
            now = look(self._disk, self._files)
            if state.is_opening:
                time.sleep(_PAUSE)  # recovery cuts a file and gives it its size again: it looks short for a moment
            elif now.same_as(state):
                break
            state = now
        report, marks = self._report, state.frontier.index
        report.findings.merge(found)
        report.files, report.entries = len(marks), sum(mark.header.entries for mark in marks)
        report.bytes = len(marks) * state.frontier.layout.file_size
        queues, sparse = state.frontier.queues or (), state.frontier.sparse
        report.queues, report.units = (
            len(queues),
            sum(mark.max_offset - max(mark.first_offset, mark.begin_offset) for mark in queues),
        )
        report.segments = len(sparse.segments) if sparse is not None else 0
        return state

    def _check_once(self, state: StoreState) -> Findings:
        found, frontier = Findings(), state.frontier
        if not check_frontier(frontier, found, is_at_rest=state.is_at_rest):
            # With a layout that cannot be, every file would be read as what it is not.
            return found
        check_checkpoint(self._disk, self._files, state, found)
        # Nothing expired before the first entry of all, so nothing was inherited there.
        begin = frontier.index[0].header.begin_phy_offset if frontier.index else 0
        before = IndexHeader() if begin == frontier.begin_offset else None
        for mark in frontier.index:
            if mark not in self._sound or self._sound[mark] != before:
                wrong = self._check_file(state, mark, before)
                found.merge(wrong)
                if len(wrong) == 0:
                    self._sound[mark] = before
            before = mark.header
        found.merge(check_secondary(self._disk, self._files, state, self._on_bytes))
        if state.is_at_rest:
            for name in sorted(set(state.sizes) - {mark.name for mark in frontier.index}):
                found.add(f"index/{name}", 0, "file-unnamed", "the frontier does not name it, and no daemon runs")
        return found

    def _check_file(self, state: StoreState, mark: FileMark, before: IndexHeader | None) -> Findings:
        frontier = state.frontier
        place = Place(
            f"index/{mark.name}", mark, before, frontier.layout, FLAVOURS[frontier.flavour], state.condition(mark)
        )
        try:
            with self._disk.open_read(self._files.index / mark.name) as file:
                return check_file(file, place, self._on_bytes)
        except DiskError as error:
            if not error.is_missing:
                raise
        missing = Findings()
        begin = self._log_begin()
        if begin is not None and mark.full and mark.header.end_phy_offset < begin:
            self._report.notes.append(f"{place.name} is gone, and only named messages that have expired")
        else:
            missing.add(place.name, 0, "file-missing", "the frontier names it, but it is not there")
        return missing

    def _log_begin(self) -> int | None:
        store = self._config.store
        try:
            return list_segments(self._disk, store.commit_log_directories, store.segment_size).min_offset
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
    outputs = {"consume_queue": frontier.queues is not None, "sparse": frontier.sparse is not None}
    return config.model_copy(
        update={
            "store": config.store.model_copy(update=store),
            "index": config.index.model_copy(update=index),
            "outputs": config.outputs.model_copy(update=outputs),
        }
    )
