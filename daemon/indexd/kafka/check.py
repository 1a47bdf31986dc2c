"""Checks every index of a Kafka partition against its log, entry by entry; reads only, and only what nobody writes.

Kafka's own tool looks at the entries up to the first zero one. It says nothing about missing files, about what stands
behind the zeros, nor about whether a sealed segment's time index ends with its largest timestamp, by which a search by
time chooses the segment.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from indexd.errors import CorruptDataError
from indexd.findings import Findings
from indexd.kafka.format import (
    NO_TIMESTAMP,
    Outcome,
    Partition,
    Segment,
    find_partitions,
    log_bytes,
    refuse_while_locked,
)
from indexd.kafka.judge import (
    LogFindings,
    LogTruth,
    Verdict,
    judge_offset_slots,
    judge_time_slots,
    length_findings,
    slot_findings,
    tail_findings,
)
from indexd.kafka.rebuild import recover_entries, refuse_interval
from indexd.kafka.records import LogWalk, Slots, read_slots
from indexd.kafka.report import CheckReport, Note, OnProgress, Progress, passing_notes
from indexd.sparse.format import INT32_MAX
from indexd.sparse.kernel import OFFSET_ENTRY_TYPE, TIME_ENTRY_TYPE
from indexd.storage.disk import Disk


class SegmentCheck:
    """``run`` adds to a report what it finds; with ``interval`` the files are compared with a rebuild as well."""

    def __init__(self, disk: Disk, partition: Partition, segment: Segment, interval: int | None) -> None:
        self._disk = disk
        self._partition = partition
        self._segment = segment
        self._interval = interval
        # A broker that was killed leaves the newest segment's files as they grow; its next start builds them again.
        self._may_be_open = segment.is_last and not partition.was_stopped_cleanly
        self._notes: list[Note] = []

    def run(self, report: CheckReport, progress: Progress) -> int:
        """Returns the last offset in the log, base - 1 without any."""
        segment = self._segment
        slots = read_slots(self._disk, segment.index if segment.has_index else None, OFFSET_ENTRY_TYPE)
        times = read_slots(self._disk, segment.time_index if segment.has_time_index else None, TIME_ENTRY_TYPE)
        truth = LogTruth(segment.base, slots.second, slots.first, times.second)
        found = Findings()
        log = LogFindings(segment.base, self._label(segment.log), found)
        with self._disk.open_read(segment.log) as file:
            walk = LogWalk(file, segment.base, progress.within)
            for batches in walk:
                report.batches += len(batches)
                truth.put(batches)
                log.put(batches)
        progress.finish(walk.log_size)
        log.end(walk, zeros_are_wrong=not self._may_be_open)
        if walk.outcome == Outcome.ZEROS and self._may_be_open:
            self._note(segment.log, "not_closed", f"{walk.log_size - walk.end} zero bytes, as of a preallocated log")
        is_whole = walk.outcome in (Outcome.END, Outcome.ZEROS) and not found
        report.findings.merge(found)
        report.findings.merge(self._offset_index(slots, times, truth, walk))
        report.findings.merge(self._time_index(times, truth, walk, is_whole=is_whole))
        if self._interval is not None:
            self._compare(self._interval)
        report.segments += 1
        report.bytes += walk.log_size
        report.entries += slots.live + times.live
        report.notes += self._notes
        return log.last_offset

    def _offset_index(self, slots: Slots, times: Slots, truth: LogTruth, walk: LogWalk) -> Findings:
        found, path = Findings(), self._segment.index
        if not self._segment.has_index:
            if walk.log_size:  # Kafka makes the files of an empty segment when it first appends
                found.add(self._label(path), 0, "index_missing", "there is no OffsetIndex beside the log")
            return found
        verdicts = judge_offset_slots(slots, times, truth, walk)
        slot_findings(self._label(path), slots, verdicts, self._segment.base, found)
        self._verdict_notes(path, slots, verdicts)
        self._tail(path, slots, found)
        return found

    def _time_index(self, slots: Slots, truth: LogTruth, walk: LogWalk, *, is_whole: bool) -> Findings:
        found, path = Findings(), self._segment.time_index
        if not self._segment.has_time_index:
            if walk.log_size:
                text = "there is no TimeIndex beside the log: Kafka makes an empty one and leaves it so"
                found.add(self._label(path), 0, "time_index_missing", text)
            return found
        verdicts = judge_time_slots(slots, truth, walk)
        if slots.live == 1 and not (slots.first[0] or slots.second[0] or verdicts[0] == Verdict.EXACT):
            slots, verdicts = slots.without_first(), verdicts[:0]
        slot_findings(self._label(path), slots, verdicts, self._segment.base, found)
        self._verdict_notes(path, slots, verdicts)
        self._tail(path, slots, found)
        last = int(slots.first[-1]) if slots.judged else NO_TIMESTAMP
        if is_whole and not found and slots.judged == slots.live and last != truth.max_timestamp:
            text = f"it ends with timestamp {last}, and the log goes up to {truth.max_timestamp}"
            if self._may_be_open:
                self._note(path, "not_closed", text)
            else:
                text += ": a search by time passes the segment over"
                found.add(self._label(path), max(0, slots.live - 1) * slots.entry_size, "time_last_not_largest", text)
        return found

    def _tail(self, path: Path, slots: Slots, found: Findings) -> None:
        length_findings(self._label(path), slots, found)
        if self._may_be_open and not found:
            if slots.zeros:
                self._note(path, "not_closed", f"{slots.zeros} unused entries of zeros, as of a file that still grows")
        else:
            tail_findings(self._label(path), slots, found)

    def _verdict_notes(self, path: Path, slots: Slots, verdicts: NDArray[np.int64]) -> None:
        of_sets, unknown = (int(np.count_nonzero(verdicts == kind)) for kind in (Verdict.OF_A_SET, Verdict.UNKNOWN))
        if of_sets:
            text = f"{of_sets} entries name the last offset of a set of batches, as Kafka 3.9.0 and 4.0.0 wrote them"
            self._note(path, "entries_of_sets", f"{text}: lookups are right")
        if unknown:
            self._note(path, "not_judged", f"{unknown} entries point behind the place where the log cannot be read on")
        if slots.live > slots.judged:
            self._note(path, "not_judged", f"{slots.live - slots.judged} entries behind the first {slots.judged}")

    def _compare(self, interval: int) -> None:
        segment = self._segment
        try:
            with self._disk.open_read(segment.log) as file:
                made = recover_entries(LogWalk(file, segment.base), segment.base, interval, INT32_MAX)
        except CorruptDataError as error:
            self._note(segment.log, "not_compared", str(error))
            return
        for path, data, is_there in (
            (segment.index, made.index, segment.has_index),
            (segment.time_index, made.time_index, segment.has_time_index),
        ):
            if is_there and (self._disk.stamp(path).size != len(data) or self._disk.read(path) != data):
                text = f"it is not what recovery with index.interval.bytes={interval} makes"
                self._note(path, "differs", text)

    def _label(self, path: Path) -> str:
        return self._partition.label(path)

    def _note(self, path: Path, what: str, text: str) -> None:
        self._notes.append(Note(self._label(path), what, text))


def check(
    directory: Path, disk: Disk, *, interval: int | None = None, on_progress: OnProgress | None = None
) -> CheckReport:
    """Check the partition that ``directory`` is, or all partitions of the log directory that it is.

    With ``interval`` (index.interval.bytes) a note says which files differ from what recovery would make with it.
    UsageError if it is neither a partition nor a log directory, BusyError if a broker holds its lock before or after.
    """
    if interval is not None:
        refuse_interval(interval)
    started = time.monotonic()
    partitions = find_partitions(disk, directory)
    refuse_while_locked(disk, directory)
    progress = Progress(on_progress, log_bytes(disk, partitions))
    report = CheckReport(partitions=len(partitions))
    for partition in partitions:
        _check_partition(partition, disk, report, interval, progress)
    refuse_while_locked(disk, directory)  # a broker that was started meanwhile has written under our eyes
    report.seconds = time.monotonic() - started
    return report


def _check_partition(
    partition: Partition, disk: Disk, report: CheckReport, interval: int | None, progress: Progress
) -> None:
    report.notes += passing_notes(partition)
    others = Findings()
    for name in partition.orphans:
        text = "there is no log beside this index: Kafka removes it at its next start"
        others.add(partition.label(partition.path / name), 0, "orphan", text)
    last_offset = -1
    for segment in partition.segments:
        if last_offset >= segment.base:
            text = f"the segment begins at offset {segment.base}, the one before it goes on to {last_offset}"
            others.add(partition.label(segment.log), 0, "segments_overlap", text)
        last_offset = SegmentCheck(disk, partition, segment, interval).run(report, progress)
    report.findings.merge(others)
