"""A store whose data directory also holds ConsumeQueues and sparse indexes."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from indexd.commitlog.batcher import DispatchBatch, TopicTable
from indexd.consumequeue.format import UNIT_SIZE, QueueMark, QueuesMark, file_name
from indexd.consumequeue.store import ConsumeQueueStore
from indexd.output import Output
from indexd.sparse.format import SparseMark
from indexd.sparse.service import SparseService
from indexd.storage.disk import Disk
from indexd.storage.names import DataFiles
from support.data_directory import Store
from support.naive import QueueMessage
from support.queues import batch_of

if TYPE_CHECKING:
    from pathlib import Path

    from support.naive import NaiveIndexService, NaiveMessage

FILE_UNITS = 8
INTERVAL = 300


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


def build_queues(data: Path, messages: list[NaiveMessage], marked: list[NaiveMessage]) -> tuple[QueueMark, ...]:
    """Files with the units of ``messages``; the marks count those of ``marked``, the first of them."""
    store = ConsumeQueueStore(Disk(), DataFiles(data).consumequeue, FILE_UNITS * UNIT_SIZE, 1000)
    held: QueuesMark = _built(store, messages, marked)
    return held.queues


def build_sparse(data: Path, messages: list[NaiveMessage], marked: list[NaiveMessage], segment_size: int) -> SparseMark:
    """The same for sparse indexes."""
    held: SparseMark = _built(SparseService(Disk(), DataFiles(data).sparse, segment_size, INTERVAL), messages, marked)
    return held


def _built(output: Output[Any], messages: list[NaiveMessage], marked: list[NaiveMessage]) -> Any:
    output.directory.mkdir(parents=True, exist_ok=True)
    table = TopicTable(64)
    output.build(queue_batch(marked, table))
    held = output.mark().held
    output.build(queue_batch(messages[len(marked) :], table))
    output.publish()
    output.close()
    return held


def queue_batch(messages: list[NaiveMessage], table: TopicTable) -> DispatchBatch:
    """These messages as a reader hands them on to queues and sparse indexes."""
    batch = batch_of([QueueMessage.of(message) for message in messages], table)
    batch.columns.store_timestamp[:] = [message.store_timestamp for message in messages]
    return batch


def write_queue(directory: Path, first: int, content: bytes) -> None:
    """The files of one queue from unit ``first`` on, zeros behind the last unit."""
    directory.mkdir(parents=True, exist_ok=True)
    size = FILE_UNITS * UNIT_SIZE
    for at in range(0, len(content), size):
        part = content[at : at + size]
        (directory / file_name(first * UNIT_SIZE + at)).write_bytes(part.ljust(size, b"\0"))
