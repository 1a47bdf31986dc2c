"""DATA/state: where a running daemon stands, replaced whole at every drain, never synced.

Believed only while the process that wrote it holds the lock of the directory: after a crash the frontier alone counts.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from indexd.commitlog.reader import LogReader
from indexd.consumequeue.format import UNIT_SIZE, QueueMark
from indexd.dispatch.queue import DispatchQueue
from indexd.dispatch.reput import ReputState
from indexd.flush.building import Building
from indexd.flush.flusher import Progress
from indexd.flush.frontier import Frontier
from indexd.service.lag import Lag, LagMeter
from indexd.service.telling import Tally
from indexd.sparse.format import OFFSET_ENTRY_SIZE, TIME_ENTRY_SIZE
from indexd.sparse.segment import slots
from indexd.storage.disk import Disk
from indexd.storage.names import DataFiles

Row = dict[str, Any]


class DaemonState:
    """The figures of one opened data directory. ``row`` may be called from any thread at any time.

    Everything it looks at is a number, or an object that is replaced and never changed.
    """

    def __init__(
        self, reader: LogReader, building: Building, queue: DispatchQueue, reput: ReputState, tally: Tally | None = None
    ) -> None:
        self.building, self.reput = building, reput
        self._reader, self._queue = reader, queue
        self.tally = Tally() if tally is None else tally
        self.meter = LagMeter(building.progress.messages)
        # Of so many queues as there may be, counted once while they stay the same.
        self._queues_of: tuple[tuple[QueueMark, ...], Row] | None = None

    def lag(self) -> Lag:
        """How far what can be found is behind the log."""
        return self.meter.measure(self.building.progress, self._queue, self._reader, self.reput)

    def row(self) -> Row:
        """The object that is written: of what is built only what is published, so that a query can rely on it."""
        building, reader, tally = self.building, self._reader, self.tally
        corrupt, is_held = self.reput.corrupt, self.meter.held_at == reader.position
        caught_up = self.reput.caught_up and not is_held and not reader.is_undecided
        built, frontier = building.progress, building.flusher.frontier
        begin = reader.log.min_offset or 0
        lag = self.meter.measure(built, self._queue, reader, self.reput)
        return {
            "pid": os.getpid(),
            "writtenAt": int(time.time() * 1000),
            "beginOffset": built.begin_offset,
            "phyOffset": built.phy_offset,
            "filledOffset": built.filled_offset,
            "storeTimestamp": built.store_timestamp,
            "durableOffset": frontier.phy_offset,
            "readOffset": min(reader.position, lag.log_end),  # it goes on meanwhile
            "commitLogMinOffset": begin,
            "commitLogMaxOffset": lag.log_end,
            "caughtUp": caught_up,
            "dispatchBehindBytes": lag.bytes,
            "dispatchBehindMilliseconds": lag.milliseconds,
            "dispatchBehindMessages": lag.messages,
            "outputs": self._outputs(built, frontier, lag),
            "messages": built.messages,
            **_counted(building),
            **self._waiting(),
            **_read(reader, tally),
            "drains": tally.drains,
            "lastDrainMilliseconds": _millis(tally.drain_seconds),
            "uncovered": [[gap.begin, gap.end, gap.reason] for gap in built.uncovered],
            "uncoveredBytes": sum(max(gap.end - max(gap.begin, begin), 0) for gap in built.uncovered),
            "corrupt": None if corrupt is None else {"offset": corrupt.offset, "reason": corrupt.reason},
            "problems": {stage: error.line() for stage, error in tally.problems.items()},
        }

    def _waiting(self) -> Row:
        waiting = self._queue.waiting
        oldest = 0.0 if waiting.since is None else time.monotonic() - waiting.since
        return {
            "queueRows": waiting.rows,
            "queueBytes": waiting.bytes,
            "queueOldestMilliseconds": int(oldest * 1000),
        }

    def _outputs(self, built: Progress, frontier: Frontier, lag: Lag) -> list[Row]:
        # A batch goes through all outputs before any progress is published, so they are behind alike.
        outputs = self.building.outputs
        layout, marks = outputs.index.layout, built.index.files
        rows: list[Row] = [
            {
                "output": "key",
                "phyOffset": built.phy_offset,
                "durableOffset": frontier.phy_offset,
                "files": len(marks),
                "entries": sum(mark.header.entries for mark in marks),
                "bytes": len(marks) * layout.file_size,
                "fillRatio": _ratio(marks[-1].header.entries if marks else 0, layout.index_num - 1),
            }
        ]
        beside = {"phyOffset": built.filled_offset, "durableOffset": frontier.filled_offset}
        if built.queues is not None and outputs.queues is not None:
            rows.append({"output": "cq", **beside, **self._of_queues(built.queues.marks, outputs.queues.file_size)})
        if built.sparse is not None and outputs.sparse is not None:
            segments = built.sparse.mark.segments
            offsets = sum(segment.offset_entries for segment in segments)
            times = sum(segment.time_entries for segment in segments)
            room = slots(outputs.sparse.segment_size, outputs.sparse.interval)
            rows.append(
                {
                    "output": "sparse",
                    **beside,
                    "files": 2 * len(segments),
                    "entries": offsets + times,
                    "bytes": offsets * OFFSET_ENTRY_SIZE + times * TIME_ENTRY_SIZE,
                    "fillRatio": _ratio(segments[-1].offset_entries if segments else 0, room),
                }
            )
        behind = {"behindMilliseconds": lag.milliseconds, "behindMessages": lag.messages}
        return [{**row, "behindBytes": max(lag.log_end - row["phyOffset"], 0), **behind} for row in rows]

    def _of_queues(self, marks: tuple[QueueMark, ...], file_size: int) -> Row:
        known = self._queues_of
        if known is not None and known[0] is marks:
            return known[1]
        units = file_size // UNIT_SIZE
        row = {
            "files": sum(-(-(mark.max_offset - mark.first_offset) // units) for mark in marks),
            "entries": sum(mark.max_offset - mark.min_offset for mark in marks),
            "bytes": UNIT_SIZE * sum(mark.max_offset - mark.first_offset for mark in marks),
            "fillRatio": None,
        }
        self._queues_of = (marks, row)
        return row


def _counted(building: Building) -> Row:
    # What has been built since it was opened, and the messages that got no unit, by why.
    outputs, flushes = building.outputs, building.flusher.counters
    index, queues, sparse = outputs.index, outputs.queues, outputs.sparse
    row: Row = {
        "indexEntries": index.counters.entries,
        "indexFiles": index.file_count,
        "rollOvers": index.counters.rolls,
        "expiredFiles": index.counters.expired_files,
        "flushes": flushes.flushes,
        "lastFlushMilliseconds": _millis(flushes.last_seconds if flushes.flushes else None),
    }
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


def _read(reader: LogReader, tally: Tally) -> Row:
    counters = reader.counters
    return {
        "readMessages": counters.messages,
        "readBytesTotal": counters.bytes,
        "expiredBytes": counters.expired_bytes,
        "corruptBytes": counters.corrupt_bytes,
        "skippedBytes": counters.expired_bytes + counters.corrupt_bytes,
        # Those that were stood at, and those that were passed over at once.
        "corruptRecords": tally.corrupt_found + counters.corrupt_found,
    }


def _millis(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


def _ratio(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole > 0 else 0.0


def write_state(disk: Disk, files: DataFiles, row: Row) -> None:
    """Replace DATA/state; raises DiskError."""
    disk.write_atomically(files.state, json.dumps(row).encode() + b"\n", durable=False)
