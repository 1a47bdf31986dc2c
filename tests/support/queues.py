"""Batches for ConsumeQueues: read from a log, or made by hand; and trees of queue files to compare."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from indexd.commitlog.batcher import DispatchBatch, TopicTable, make_columns
from indexd.commitlog.reader import Skipped
from indexd.consumequeue.format import file_name, queue_folders
from support.naive_queue import NaiveMessage
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
            if not reader.is_settling:
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


def batch_of(messages: Sequence[NaiveMessage], table: TopicTable) -> DispatchBatch:
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


def stream(seed: int, count: int, queues: int, *, begin: int = 0) -> list[NaiveMessage]:
    """Messages as a broker writes them, over ``queues`` queues of two topics; some start late."""
    rand = random.Random(seed)
    offsets = [rand.choice([0, 0, 5, 1000 + number]) for number in range(queues)]
    messages, phy_offset = [], begin
    for _ in range(count):
        number = rand.randrange(queues)
        size = rand.randrange(100, 300)
        topic = f"Topic{number % 2}"
        messages.append(NaiveMessage(topic, number // 2, offsets[number], phy_offset, size, rand.randrange(1 << 31)))
        offsets[number] += 1
        phy_offset += size
    return messages


def batches(messages: Sequence[NaiveMessage], size: int) -> Iterator[DispatchBatch]:
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
