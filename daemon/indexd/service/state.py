"""DATA/state: where a running daemon stands, replaced whole at every drain, never synced.

Believed only while the process that wrote it holds the lock of the directory: after a crash the frontier alone counts.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any

from indexd.commitlog.reader import LogReader
from indexd.dispatch.queue import DispatchQueue
from indexd.dispatch.reput import ReputState
from indexd.errors import IndexdError
from indexd.flush.building import Building
from indexd.flush.flusher import Progress
from indexd.storage.disk import Disk
from indexd.storage.names import DataFiles


def behind_bytes(reader: LogReader, built: Progress, reput: ReputState) -> int:
    """Bytes of log that are there and not built yet; exact when the reader has caught up, else at most."""
    if reput.caught_up or not reader.log.segments:
        return max(reader.position - built.phy_offset, 0)
    return max(reader.log.segments[-1].end - built.phy_offset, 0)


def behind_millis(built: Progress, queue: DispatchQueue, reput: ReputState) -> int:
    """How old the oldest message is that is not built yet: the queue's when caught up, else by the clock."""
    waiting = int(queue.oldest_seconds * 1000)
    if reput.caught_up or built.store_timestamp == 0:
        return waiting
    return max(int(time.time() * 1000) - built.store_timestamp, waiting)


def state_row(
    reader: LogReader,
    building: Building,
    queue: DispatchQueue,
    reput: ReputState,
    problems: Mapping[str, IndexdError],
) -> dict[str, Any]:
    """The object that is written: of what is built only what is published, so that a query can rely on it."""
    corrupt, built, index = reput.corrupt, building.progress, building.outputs.index
    return {
        "pid": os.getpid(),
        "writtenAt": int(time.time() * 1000),
        "beginOffset": built.begin_offset,
        "phyOffset": built.phy_offset,
        "filledOffset": built.filled_offset,
        "storeTimestamp": built.store_timestamp,
        "durableOffset": building.flusher.frontier.phy_offset,
        "readOffset": reader.position,
        "commitLogMinOffset": reader.log.min_offset or 0,
        "caughtUp": reput.caught_up,
        "dispatchBehindBytes": behind_bytes(reader, built, reput),
        "dispatchBehindMilliseconds": behind_millis(built, queue, reput),
        "messages": built.messages,
        "indexEntries": index.counters.entries,
        "indexFiles": index.file_count,
        **_beside(building),
        "expiredBytes": reader.counters.expired_bytes,
        "corruptBytes": reader.counters.corrupt_bytes,
        "uncovered": [[gap.begin, gap.end, gap.reason] for gap in built.uncovered],
        "corrupt": None if corrupt is None else {"offset": corrupt.offset, "reason": corrupt.reason},
        "problems": {stage: error.line() for stage, error in problems.items()},
    }


def _beside(building: Building) -> dict[str, Any]:
    # What stands in queues and sparse indexes, and the messages that got no unit, by why.
    queues, sparse = building.outputs.queues, building.outputs.sparse
    row: dict[str, Any] = {}
    if queues is not None:
        counters = queues.counters
        row["consumeQueues"] = len(queues)
        row["consumeQueueUnits"] = counters.units
        row["consumeQueueGaps"] = counters.gaps
        row["consumeQueueRepeats"] = counters.repeats
        row["batchMessages"] = counters.batch_messages
        row["leftOutMessages"] = counters.nameless + counters.left_out
    if sparse is not None:
        row["sparseEntries"] = sparse.counters.entries
    return row


def write_state(disk: Disk, files: DataFiles, row: dict[str, Any]) -> None:
    """Replace DATA/state; raises DiskError."""
    disk.write_atomically(files.state, json.dumps(row).encode() + b"\n", durable=False)
