"""A store whose data directory also holds ConsumeQueues and sparse indexes, each message put in by hand."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from indexd.consumequeue.format import BLANK_UNIT, UNIT, UNIT_SIZE, QueueMark, file_name, queue_directory
from indexd.flush.frontier import Frontier, write_frontier
from indexd.sparse.format import (
    OFFSET_ENTRY,
    TIME_ENTRY,
    ActiveMark,
    SegmentMark,
    SparseMark,
    index_name,
    time_index_name,
)
from indexd.storage.disk import Disk
from indexd.storage.names import DataFiles
from support.data_directory import Store

if TYPE_CHECKING:
    from pathlib import Path

    from support.naive import NaiveIndexService, NaiveMessage

FILE_UNITS = 8
INTERVAL = 300
_PREPARED_AND_ROLLBACK = (0x4, 0xC)
# More entries than a segment of a test ever has.
_SLOTS = 400


class QueueStore(Store):
    """``build`` makes all three outputs. Queue files hold 8 units; the sparse interval is 300 bytes."""

    file_size = FILE_UNITS * UNIT_SIZE

    def build(self, *, upto: int | None = None) -> NaiveIndexService:
        """Cover the log, its messages before ``upto``: with that, files may hold more than the marks say."""
        service = super().build()
        messages = self.messages()
        marked = [m for m in messages if upto is None or m.phy_offset < upto]
        queues = build_queues(self.data, messages, marked)
        sparse = build_sparse(self.data, messages, marked, self.segment)
        end = self.frontier.phy_offset if upto is None else upto
        self.change_frontier(
            queues=queues, queue_file_size=self.file_size, sparse=sparse, refill_offset=end, phy_offset=end
        )
        return service

    def write_state(self, **members: Any) -> None:
        """What a daemon of this process would say; believed once somebody holds the lock."""
        row = {"pid": os.getpid(), "phyOffset": self.writer.max_offset, "beginOffset": self.frontier.begin_offset}
        (self.data / "state").write_text(json.dumps(row | members))

    def write(self, frontier: Frontier) -> None:
        """Another frontier over the same files."""
        self.frontier = frontier
        write_frontier(Disk(), self.data / "frontier", frontier, "0")


def build_queues(data: Path, messages: list[NaiveMessage], marked: list[NaiveMessage]) -> tuple[QueueMark, ...]:
    """Files with the units of ``messages``; the marks count those of ``marked``."""
    queues: dict[tuple[str, int], list[NaiveMessage]] = defaultdict(list)
    for message in messages:
        if message.sys_flag & 0xC not in _PREPARED_AND_ROLLBACK:
            queues[message.topic, message.queue_id].append(message)
    known = {message.phy_offset for message in marked}
    marks = []
    for (topic, queue_id), rows in queues.items():
        begin = rows[0].cq_offset
        first = begin - begin % FILE_UNITS
        content = BLANK_UNIT * (begin - first)
        content += b"".join(UNIT.pack(row.phy_offset, row.size, row.tags_code) for row in rows)
        write_queue(queue_directory(DataFiles(data).consumequeue, topic, queue_id), first, content)
        count = sum(row.phy_offset in known for row in rows)
        if count:
            last = rows[count - 1]
            marks.append(QueueMark(topic, queue_id, first, begin, begin + count, last.phy_offset + last.size))
    return tuple(marks)


def write_queue(directory: Path, first: int, content: bytes) -> None:
    """The files of one queue from unit ``first`` on, zeros behind the last unit."""
    directory.mkdir(parents=True, exist_ok=True)
    size = FILE_UNITS * UNIT_SIZE
    for at in range(0, len(content), size):
        part = content[at : at + size]
        (directory / file_name(first * UNIT_SIZE + at)).write_bytes(part.ljust(size, b"\0"))


def build_sparse(data: Path, messages: list[NaiveMessage], marked: list[NaiveMessage], segment_size: int) -> SparseMark:
    """Kafka's per-batch rule, each message a batch; a segment is sealed once a message stands behind it."""
    folder = DataFiles(data).sparse
    folder.mkdir(parents=True, exist_ok=True)
    for rows in _by_segment(messages, segment_size):
        is_last = rows[-1] is messages[-1]
        base, offsets, times, _ = _entries(rows, segment_size, is_sealed=not is_last)
        slots = _SLOTS if is_last else 0
        raw = b"".join(OFFSET_ENTRY.pack(*entry) for entry in offsets)
        (folder / index_name(base)).write_bytes(raw.ljust(slots * OFFSET_ENTRY.size, b"\0"))
        raw = b"".join(TIME_ENTRY.pack(*entry) for entry in times)
        (folder / time_index_name(base)).write_bytes(raw.ljust(slots * TIME_ENTRY.size, b"\0"))
    segments, active = [], None
    for rows in _by_segment(marked, segment_size):
        is_last = rows[-1] is marked[-1]
        base, offsets, times, active = _entries(rows, segment_size, is_sealed=not is_last)
        segments.append(SegmentMark(base, len(rows), len(offsets), len(times)))
    end = marked[-1].phy_offset + marked[-1].size if marked else 0
    return SparseMark(INTERVAL, end, tuple(segments), active)


def _by_segment(messages: list[NaiveMessage], segment_size: int) -> list[list[NaiveMessage]]:
    rows: dict[int, list[NaiveMessage]] = defaultdict(list)
    for message in messages:
        rows[message.phy_offset // segment_size].append(message)
    return list(rows.values())


def _entries(
    rows: list[NaiveMessage], segment_size: int, *, is_sealed: bool
) -> tuple[int, list[tuple[int, int]], list[tuple[int, int]], ActiveMark]:
    base = rows[0].phy_offset // segment_size * segment_size
    offsets: list[tuple[int, int]] = []
    times: list[tuple[int, int]] = []
    since, largest, ordinal_of_largest = 0, -1, 0

    def add_time() -> None:
        if largest > (times[-1][0] if times else -1):
            times.append((largest, ordinal_of_largest))

    for ordinal, row in enumerate(rows):
        if row.store_timestamp > largest:
            largest, ordinal_of_largest = row.store_timestamp, ordinal
        if since > INTERVAL:
            offsets.append((ordinal, row.phy_offset - base))
            add_time()
            since = 0
        since += row.size
    if is_sealed:
        add_time()
    return base, offsets, times, ActiveMark(since, largest, ordinal_of_largest, times[-1][0] if times else -1)
