"""Batches for ConsumeQueues and sparse indexes, read from a log or made by hand; and the files they must come to."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from indexd.commitlog.batcher import DispatchBatch, TopicTable, make_columns
from indexd.commitlog.reader import Skipped
from indexd.consumequeue.format import file_name, queue_folders
from indexd.flush.pipeline import sync_dirs, sync_files
from indexd.output import CheckScope, Condition, Output, OutputMark, OutputRecovery, Unsynced
from indexd.storage.disk import Disk
from support.naive import QueueMessage
from support.reading import Clock, open_reader
from support.sim_disk import SimDisk


def batches_of(log: Path, segment_size: int, *, rows_max: int = 4096) -> Iterator[DispatchBatch]:
    """All messages of a log that nobody writes."""
    clock = Clock()
    reader = open_reader(log, clock, segment_size=segment_size, rows_max=rows_max, read_size=1 << 18)
    while True:
        found = reader.poll()
        if isinstance(found, DispatchBatch):
            yield found
        elif not isinstance(found, Skipped):
            if not reader.settling_size:
                reader.close()
                return
            clock.now += 2.0


def topic_id(table: TopicTable, name: bytes) -> int:
    """The topic's id in a reader's table, where it is put if it is not there."""
    arrays, count = table.arrays, len(table)
    for known in range(count):
        if table.raw_name(known) == name:
            return known
    first = int(arrays.start[count])
    arrays.data[first : first + len(name)] = np.frombuffer(name, dtype=np.uint8)
    arrays.start[count + 1] = first + len(name)
    arrays.known[0] = count + 1
    return count


def batch_of(messages: Sequence[QueueMessage], table: TopicTable) -> DispatchBatch:
    """These messages as a reader with that topic table hands them on."""
    columns = make_columns(len(messages), 0)
    columns.key_start[:] = 0
    for row, message in enumerate(messages):
        columns.phy_offset[row], columns.size[row] = message.phy_offset, message.size
        columns.queue_id[row], columns.queue_offset[row] = message.queue_id, message.queue_offset
        columns.topic_id[row] = topic_id(table, message.topic.encode())
        columns.tags_code[row], columns.sys_flag[row] = message.tags_code, message.sys_flag
    end = messages[-1].phy_offset + messages[-1].size if messages else 0
    return DispatchBatch(columns, len(messages), messages[0].phy_offset if messages else 0, end, table)


def stream(seed: int, count: int, queues: int, *, begin: int = 0) -> list[QueueMessage]:
    """Messages as a broker writes them, over ``queues`` queues of two topics; some start late."""
    rand = random.Random(seed)
    offsets = [rand.choice([0, 0, 5, 1000 + number]) for number in range(queues)]
    messages, phy_offset = [], begin
    for _ in range(count):
        number = rand.randrange(queues)
        size = rand.randrange(100, 300)
        topic = f"Topic{number % 2}"
        messages.append(QueueMessage(topic, number // 2, offsets[number], phy_offset, size, rand.randrange(1 << 31)))
        offsets[number] += 1
        phy_offset += size
    return messages


def batches(messages: Sequence[QueueMessage], size: int) -> Iterator[DispatchBatch]:
    """The messages ``size`` at a time, all with one topic table."""
    table = TopicTable(64)
    for at in range(0, len(messages), size):
        yield batch_of(messages[at : at + size], table)


def tree(root: Path) -> dict[str, bytes]:
    """Every file below ``root`` by its path there."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def sim_tree(disk: SimDisk, root: Path) -> dict[str, bytes]:
    """The same of queue files on a simulated disk; no call of it, so no fault."""
    return {
        str((directory / file_name(begin)).relative_to(root)): disk.peek(directory / file_name(begin))
        for directory, sizes in queue_folders(disk.fork(), root).items()
        for begin in sizes
    }


def carried_out(disk: Disk, recovery: OutputRecovery[Any]) -> Unsynced:
    """Done, with what has to be synced for it."""
    unsynced = Unsynced()
    recovery.carry_out(disk, unsynced)
    return unsynced


def made_durable(disk: Disk, output: Output[Any]) -> OutputMark[Any]:
    """All that was built, as a clean stop leaves it; the output is closed."""
    output.flush()
    mark = output.mark()
    sync_files(disk, mark.unsynced)
    sync_dirs(disk, mark.directories)
    output.synced(mark)
    output.close()
    return mark


def scope_of(condition: Condition = Condition.AT_REST) -> CheckScope:
    return CheckScope(condition, condition is Condition.AT_REST, lambda _: None)


# --- sparse indexes: logs as rows (physical offset, size, store timestamp) ---

Row = tuple[int, int, int]
#: Not much, so that small examples have several segments.
SEGMENT_SIZE = 4096
_BLANK_SIZE = 8
_FRAME_SIZE_MIN = 91


def sparse_batch(rows: Sequence[Row], end_offset: int | None = None) -> DispatchBatch:
    """A batch of these rows with the columns that sparse indexes need; it ends behind the last one unless told."""
    columns = make_columns(len(rows), 0)
    for at, (phy_offset, size, timestamp) in enumerate(rows):
        columns.phy_offset[at], columns.size[at], columns.store_timestamp[at] = phy_offset, size, timestamp
    columns.key_start[:] = 0
    end = rows[-1][0] + rows[-1][1] if end_offset is None else end_offset
    return DispatchBatch(columns, len(rows), rows[0][0], end, TopicTable(16))


def sparse_batches(rows: Sequence[Row], split: Sequence[int]) -> list[DispatchBatch]:
    """All rows in batches of so many rows, round and round."""
    made: list[DispatchBatch] = []
    at = 0
    while at < len(rows):
        count = split[len(made) % len(split)]
        part = rows[at : at + count]
        at += count
        made.append(sparse_batch(part, rows[at][0] if at < len(rows) else None))
    return made


@st.composite
def log_rows(draw: st.DrawFn, segment_size: int = SEGMENT_SIZE, max_size: int = 60) -> list[Row]:
    """A log of several segments: frames of 91 bytes and more, blanks at ends, clocks that stand and go back."""
    rows: list[Row] = []
    position = segment_size * draw(st.integers(0, 2))
    timestamps = st.one_of(st.integers(1000, 1010), st.sampled_from([-1, 0, -(2**63), 2**63 - 1]), st.just(1005))
    sizes = st.one_of(st.integers(_FRAME_SIZE_MIN, 200), st.integers(_FRAME_SIZE_MIN, segment_size - _BLANK_SIZE))
    for _ in range(draw(st.integers(1, max_size))):
        size = draw(sizes)
        if position % segment_size + size + _BLANK_SIZE > segment_size:
            position += segment_size - position % segment_size
            if draw(st.integers(0, 9)) == 0:
                position += segment_size  # a segment that is not there
        rows.append((position, size, draw(timestamps)))
        position += size
    return rows


@dataclass
class Entries:
    """How a Kafka segment feeds its indexes, a batch at a time: a plain twin of the kernel (spec kafka-index 8)."""

    interval: int
    offsets: list[tuple[int, int]] = field(default_factory=list)
    times: list[tuple[int, int]] = field(default_factory=list)
    bytes_since: int = 0
    largest: tuple[int, int] | None = None

    def put(self, position: int, size: int, last_offset: int, timestamp: int) -> None:
        """One batch."""
        if timestamp > (-1 if self.largest is None else self.largest[0]):
            self.largest = (timestamp, last_offset)
        if self.bytes_since > self.interval:
            self.offsets.append((last_offset, position))
            self.roll()
            self.bytes_since = 0
        self.bytes_since += size

    def roll(self) -> None:
        """No more batches; or the time entry of an offset entry."""
        if self.largest is not None and (not self.times or self.largest[0] > self.times[-1][0]):
            self.times.append(self.largest)


def packed_entries(rows: Sequence[Row], base: int, interval: int, *, is_sealed: bool) -> tuple[bytes, bytes]:
    """The entries of the segment at ``base``, by the plain rule: its OffsetIndex and TimeIndex, trimmed."""
    entries = Entries(interval)
    for ordinal, (phy_offset, size, timestamp) in enumerate(rows):
        entries.put(phy_offset - base, size, ordinal, timestamp)
    if is_sealed:
        entries.roll()
    pairs = (">ii", entries.offsets), (">qi", entries.times)
    offsets, times = (b"".join(struct.pack(form, *entry) for entry in found) for form, found in pairs)
    return offsets, times


def expected_files(rows: Sequence[Row], interval: int, segment_size: int = SEGMENT_SIZE) -> dict[str, bytes]:
    """Name -> entries of every file; the last segment has not been rolled."""
    files: dict[str, bytes] = {}
    for number, part in groupby(rows, key=lambda row: row[0] // segment_size):
        base, is_sealed = number * segment_size, number < rows[-1][0] // segment_size
        pair = packed_entries(list(part), base, interval, is_sealed=is_sealed)
        files |= {f"{base:020d}{suffix}": data for suffix, data in zip((".index", ".timeindex"), pair, strict=True)}
    return files
