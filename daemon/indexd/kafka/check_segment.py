"""SegmentCheck: one segment's log read once, and both its indexes held against it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from indexd.errors import CorruptDataError
from indexd.findings import Findings
from indexd.kafka.directory import Partition, Segment
from indexd.kafka.entries import recover_entries
from indexd.kafka.format import NO_TIMESTAMP, Outcome
from indexd.kafka.index_findings import (
    length_findings,
    offset_slot_findings,
    tail_findings,
    time_slot_findings,
)
from indexd.kafka.judge import Verdict, judge_offset_slots, judge_time_slots
from indexd.kafka.log_findings import LogFindings
from indexd.kafka.records import LogWalk
from indexd.kafka.report import CheckReport, Note, Progress
from indexd.kafka.slots import NO_OFFSET_SLOTS, NO_TIME_SLOTS, Slots, read_offset_slots, read_time_slots
from indexd.kafka.truth import LogTruth
from indexd.sparse.format import INT32_MAX
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
        slots = read_offset_slots(self._disk, segment.index) if segment.has_index else NO_OFFSET_SLOTS
        times = read_time_slots(self._disk, segment.time_index) if segment.has_time_index else NO_TIME_SLOTS
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
        offset_slot_findings(self._label(path), slots, verdicts, self._segment.base, found)
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
        time_slot_findings(self._label(path), slots, verdicts, self._segment.base, found)
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
