"""check: every index of a partition held against its log, entry by entry; reads only, and only what nobody writes.

Kafka's own tool looks at the entries up to the first zero one. It says nothing about missing files, about what stands
behind the zeros, nor about whether a sealed segment's time index ends with its largest timestamp, by which a search by
time chooses the segment.
"""

from __future__ import annotations

import time
from pathlib import Path

from indexd.findings import Findings
from indexd.kafka.check_segment import SegmentCheck
from indexd.kafka.directory import Partition, find_partitions, log_bytes
from indexd.kafka.entries import refuse_interval
from indexd.kafka.lock import refuse_while_locked
from indexd.kafka.report import CheckReport, Note, OnProgress, Progress
from indexd.storage.disk import Disk


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


def passing_notes(partition: Partition) -> list[Note]:
    """The files of a partition that are left alone because a broker's next start removes or renames them."""
    return [
        Note(partition.label(partition.path / name), "left_alone", "a deletion, cleaning or swap that has not ended")
        for name in partition.passing
    ]


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
