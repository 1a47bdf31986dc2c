"""DATA/state: where a running daemon stands, replaced whole at every drain, never synced.

Believed only while the process that wrote it holds the lock of the directory: after a crash the frontier alone counts.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from indexd.commitlog.reader import LogReader
from indexd.dispatch.queue import DispatchQueue
from indexd.dispatch.reput import ReputState
from indexd.flush.flusher import Flusher
from indexd.flush.outputs import Outputs
from indexd.storage.disk import Disk
from indexd.storage.names import DataFiles


def behind_bytes(reader: LogReader, outputs: Outputs, reput: ReputState) -> int:
    """Bytes of log that are there and not built yet; exact when the reader has caught up, else at most."""
    if reput.caught_up or not reader.log.segments:
        return max(reader.position - outputs.phy_offset, 0)
    return max(reader.log.segments[-1].end - outputs.phy_offset, 0)


def behind_millis(outputs: Outputs, queue: DispatchQueue, reput: ReputState) -> int:
    """How old the oldest message is that is not built yet: the queue's when caught up, else by the clock."""
    waiting = int(queue.oldest_seconds * 1000)
    if reput.caught_up or outputs.store_timestamp == 0:
        return waiting
    return max(int(time.time() * 1000) - outputs.store_timestamp, waiting)


def state_row(
    reader: LogReader, outputs: Outputs, flusher: Flusher, queue: DispatchQueue, reput: ReputState
) -> dict[str, Any]:
    """The object that is written."""
    corrupt = reput.corrupt
    return {
        "pid": os.getpid(),
        "writtenAt": int(time.time() * 1000),
        "beginOffset": outputs.begin_offset,
        "phyOffset": outputs.phy_offset,
        "storeTimestamp": outputs.store_timestamp,
        "durableOffset": flusher.frontier.phy_offset,
        "readOffset": reader.position,
        "commitLogMinOffset": reader.log.min_offset or 0,
        "caughtUp": reput.caught_up,
        "dispatchBehindBytes": behind_bytes(reader, outputs, reput),
        "dispatchBehindMilliseconds": behind_millis(outputs, queue, reput),
        "messages": outputs.messages,
        "indexEntries": outputs.index.counters.entries,
        "indexFiles": outputs.index.file_count,
        "expiredBytes": reader.counters.expired_bytes,
        "corruptBytes": reader.counters.corrupt_bytes,
        "uncovered": [[gap.begin, gap.end, gap.reason] for gap in outputs.uncovered],
        "corrupt": None if corrupt is None else {"offset": corrupt.offset, "reason": corrupt.reason},
    }


def write_state(disk: Disk, files: DataFiles, row: dict[str, Any]) -> None:
    """Replace DATA/state; raises DiskError."""
    disk.write_atomically(files.state, json.dumps(row).encode() + b"\n", durable=False)
