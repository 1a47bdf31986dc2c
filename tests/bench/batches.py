"""indexd's half of ``lookup``, a process of its own as the other side's is, and told and saying the same.

``python -m bench.batches offset|time DIR ROUNDS``, ``python -m bench.batches queue DATA TOPIC QUEUE TARGETS ROUNDS``.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.lookup_data import BASE, INDEX_SIZE, TARGET_FILES, Int64s, as_bytes, read
from indexd.consumequeue.check import units_of
from indexd.consumequeue.format import QueueMark, Unit
from indexd.consumequeue.reader import ConsumeQueueReader
from indexd.flush.frontier import read_frontier
from indexd.sparse.offset_index import OffsetIndex
from indexd.sparse.table import OffsetTable, TimeTable, append_offsets, append_times, load_kernels
from indexd.sparse.time_index import TimeIndex
from indexd.storage.disk import Disk
from indexd.storage.names import DataFiles

# A lookup of one target in Python takes some microseconds.
_SINGLE_LOOKUPS = 20_000


def main(arguments: list[str]) -> None:
    """One line of JSON a round: the seconds of each step, and the SHA-256 of what came of it."""
    kind, *words = arguments
    rounds: Iterable[dict[str, Any]]
    if kind == "queue":
        data, topic, queue_id, targets, count = words
        rounds = _queue(Path(data), topic, int(queue_id), read(Path(targets)), int(count))
    else:
        directory, count = words
        rounds = _index(kind, Path(directory), int(count))
    for number, row in enumerate(rounds):
        print(json.dumps({"round": number, **row}), flush=True)


def _index(kind: str, directory: Path, rounds: int) -> Iterable[dict[str, Any]]:
    load_kernels()
    disk, path = Disk(), directory / "indexd"
    entries = read(directory / "entries").reshape(-1, 2)
    keys, values = entries[:, 0].copy(), entries[:, 1].copy()
    targets = {name: read(directory / name) for name in TARGET_FILES}
    for _ in range(rounds):
        row: dict[str, Any] = {}
        if kind == "time":
            times = TimeIndex.create(disk, path, BASE, INDEX_SIZE)
            row["append"], _nothing = _timed(append_times, times, keys, values)
            times.close()
        else:
            offsets = OffsetIndex.create(disk, path, BASE, INDEX_SIZE)
            row["append"], _nothing = _timed(append_offsets, offsets, keys, values)
            offsets.close()
        data = path.read_bytes()
        row["file"] = hashlib.sha256(data).hexdigest()
        row["open"], table = _timed(TimeTable if kind == "time" else OffsetTable, data, BASE)
        for name, some in targets.items():
            row[name], found = _timed(table.lookup, some)
            row[f"{name}Answers"] = _digest(np.stack(found, axis=1))
        row["python"] = _single_lookups(kind, disk, path, targets["random"], len(keys))
        disk.unlink(path)
        yield row


def _single_lookups(kind: str, disk: Disk, path: Path, targets: Int64s, entries: int) -> float:
    some = targets[:_SINGLE_LOOKUPS].tolist()
    with (TimeIndex if kind == "time" else OffsetIndex).load(disk, path, BASE, entries) as index:
        index.lookup(BASE)  # reads the file
        seconds, _ = _timed(_all_of, index.lookup, some)
    return seconds / len(some)


def _queue(data: Path, topic: str, queue_id: int, targets: Int64s, rounds: int) -> Iterable[dict[str, Any]]:
    disk, files = Disk(), DataFiles(data)
    frontier = read_frontier(disk, files.frontier)
    assert frontier is not None
    assert frontier.queues is not None
    mark = next(mark for mark in frontier.queues if (mark.topic, mark.queue_id) == (topic, queue_id))
    place = (disk, files.consumequeue, frontier.queue_file_size, mark)
    for _ in range(rounds):
        order, found = _timed(units_of, *place, mark.min_offset, mark.max_offset)
        with ConsumeQueueReader.of_mark(disk, files.consumequeue, mark, frontier.queue_file_size) as reader:
            batches, units = _timed(_in_order, reader)
            single, ones = _timed(_all_of, reader.unit, targets.tolist())
        gather, rows = _timed(_gathered, *place, targets)
        assert _digest(_numbers(units)) == _digest(_columns(found))
        assert _digest(_columns(rows)) == _digest(_numbers(ones))
        yield {
            "units": len(found),
            "order": order,
            "batches": batches,
            "single": single,
            "gather": gather,
            "orderAnswers": _digest(_columns(found)),
            "singleAnswers": _digest(_columns(rows)),
        }


def _gathered(disk: Disk, root: Path, file_size: int, mark: QueueMark, targets: Int64s) -> NDArray[np.void]:
    # Many offsets of one queue at once: its units as an array, and then the rows that are asked for.
    units = units_of(disk, root, file_size, mark, mark.min_offset, mark.max_offset)
    return units[targets - mark.min_offset]


def _in_order(reader: ConsumeQueueReader) -> list[Unit]:
    units: list[Unit] = []
    while found := reader.get(len(units), reader.max_offset):
        units += found
    return units


def _columns(units: NDArray[np.void]) -> Int64s:
    return np.stack([units[name].astype(np.int64) for name in ("phy_offset", "size", "tags_code")], axis=1)


def _numbers(units: list[Unit]) -> Int64s:
    return np.array(units, dtype=np.int64)


def _all_of(work: Callable[[int], object], numbers: list[int]) -> list[object]:
    return [work(number) for number in numbers]


def _timed(work: Callable[..., Any], *arguments: object) -> tuple[float, Any]:
    began = time.perf_counter()
    found = work(*arguments)
    return time.perf_counter() - began, found


def _digest(numbers: Int64s) -> str:
    return hashlib.sha256(as_bytes(numbers)).hexdigest()


if __name__ == "__main__":
    main(sys.argv[1:])
