"""QueueWatcher: the messages of one stretch held against the units of all queues, block by block."""

from __future__ import annotations

import time
import weakref
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from indexd.audit.part import Part
from indexd.audit.plan import NEVER, AuditTask
from indexd.audit.queues.compare import NO_MESSAGES, Compared, Messages, compare, joined
from indexd.audit.queues.ground import FOLDER, LMQ_PREFIX, QueueGround
from indexd.audit.queues.seen import KEPT_MAX, Difference, QueueName
from indexd.audit.queues.units import BEHIND_ALL, Place, QueueUnits, Units
from indexd.audit.stretch import Rows
from indexd.commitlog.batcher import TopicTable
from indexd.commitlog.decoder import decode_utf8
from indexd.commitlog.reader import Skipped
from indexd.commitlog.segments import list_segments
from indexd.config import Config
from indexd.consumequeue.format import FLAG_INNER_BATCH, is_topic_name, queue_directory
from indexd.storage.disk import Disk

# Messages of a block: some 40 MiB, and as much again while they are sorted by queue.
_ROWS_MAX = 1 << 20
# A broker dispatches a message some milliseconds after it was written.
_PAUSE = 0.05
_PATIENCE = 1.0
_LOOK_AGAIN = 1.0
_TRANSACTION, _COMMIT = 0xC, 0x8
_LOW_32 = 0xFFFFFFFF
# What a topic's number is when its messages are not compared.
_NAMELESS, _BATCH, _LMQ = -1, -2, -3
# Units that are at hand at a time where nothing is compared with them.
_UNITS_MAX = 1 << 20


class QueueWatcher:
    """Compares the messages of a stretch with the queues of ``task``, into ``part.queues``.

    With ``is_live`` a broker writes behind the last units: what appears later is waited for.
    """

    def __init__(self, disk: Disk, config: Config, task: AuditTask, part: Part, *, is_live: bool) -> None:
        assert config.store.store is not None
        assert task.queues is not None
        assert part.queues is not None
        self._disk, self._config, self._task, self._is_live = disk, config, task, is_live
        self._part, self._seen, self._batch_topics = part, part.queues, task.queues.batch_topics
        self._root = config.store.store / FOLDER
        self._done = task.begin
        self._names: list[str] = []
        self._numbers: dict[str, int] = {}
        self._numbers_of: weakref.WeakKeyDictionary[TopicTable, NDArray[np.int64]] = weakref.WeakKeyDictionary()
        self._queues: dict[QueueName, QueueUnits] = {}
        self._blocks: list[tuple[NDArray[np.int64], Messages]] = []
        self._rows = 0
        self._patience = _PATIENCE
        # The farthest message that any unit stands for: a broker dispatches in the order of the log.
        self._frontier = max((file.highest for queue in task.queues.queues for file in queue.files), default=-1)
        self._log_begin, self._looked_at = -1, -_LOOK_AGAIN
        for ground in task.queues.queues:
            self._queues[ground.topic, ground.queue_id] = self._units(ground)

    def __repr__(self) -> str:
        return f"QueueWatcher({len(self._queues)} queues, {self._rows} messages from {self._done} on)"

    def take(self, rows: Rows) -> None:
        """The next messages."""
        batch, first, last = rows
        columns, part = batch.columns, slice(first, last)
        topic_ids = columns.topic_id[part]
        numbers = self._topic_numbers(batch.topics, int(topic_ids.max()) + 1)[topic_ids]
        flags = columns.sys_flag[part]
        transaction = flags & _TRANSACTION
        enters = (transaction == 0) | (transaction == _COMMIT)
        is_batch = (flags & FLAG_INNER_BATCH).astype(np.bool_) | (numbers == _BATCH)
        seen = self._seen
        seen.batch_messages += int((enters & is_batch).sum())
        seen.lmq_messages += int((enters & ~is_batch & (numbers == _LMQ)).sum())
        seen.nameless_messages += int((enters & ~is_batch & (numbers == _NAMELESS)).sum())
        keys = numbers << 32 | (columns.queue_id[part].astype(np.int64) & _LOW_32)
        keys[~enters | is_batch | (numbers < 0)] = -1
        messages = Messages(
            columns.phy_offset[part], columns.size[part], columns.queue_offset[part], columns.tags_code[part]
        )
        self._blocks.append((keys, messages))
        self._rows += len(keys)
        if self._rows >= _ROWS_MAX:
            self._compare(int(messages.phy_offset[-1]) + 1)

    def skip(self, skipped: Skipped) -> None:
        """Log that could not be read: units that point there stand for themselves."""
        self._compare(skipped.begin)
        for queue in self._queues.values():
            while queue.next_phy_offset < skipped.end:
                units, _ = queue.take(skipped.end, _UNITS_MAX, _UNITS_MAX)
                if skipped.is_expired:
                    self._seen.expired_units += len(units)
                else:
                    self._seen.left_out_units += len(units)
        self._done = skipped.end

    def close(self) -> None:
        """The stretch is at its end, and the part says whether the log ends inside."""
        end, log_end = self._task.end, self._part.log_end
        self._compare(end if log_end is None else log_end)
        if log_end is None:
            return
        end = end if end < NEVER else BEHIND_ALL
        for name, queue in self._queues.items():
            while queue.next_phy_offset < end:
                units, offsets = queue.take(end, _UNITS_MAX, _UNITS_MAX)
                # Those of a working broker may stand for messages that nobody has read yet.
                rows = np.flatnonzero(offsets < queue.known_end)
                rows = rows[np.lexsort((offsets[rows], units["phy_offset"][rows]))]
                pairs = zip(units["phy_offset"][rows].tolist(), offsets[rows].tolist(), strict=True)
                first = [Difference(*pair) for _, pair in zip(range(KEPT_MAX), pairs, strict=False)]
                self._seen.add(name, "unit-behind-log", len(rows), first)

    def _topic_numbers(self, topics: TopicTable, count: int) -> NDArray[np.int64]:
        # By topic id. Not all of the table: its reader may be at work on the next batch.
        known = self._numbers_of.get(topics)
        if known is None or count > len(known):
            old = [] if known is None else known.tolist()
            new = [self._number(decode_utf8(topics.raw_name(topic_id))) for topic_id in range(len(old), count)]
            known = self._numbers_of[topics] = np.array(old + new, dtype=np.int64)
        return known

    def _number(self, topic: str) -> int:
        if topic in self._batch_topics:
            return _BATCH
        if topic.startswith(LMQ_PREFIX):
            return _LMQ
        if not is_topic_name(topic):
            return _NAMELESS
        if topic not in self._numbers:
            self._numbers[topic] = len(self._names)
            self._names.append(topic)
        return self._numbers[topic]

    def _units(self, ground: QueueGround) -> QueueUnits:
        folder = queue_directory(self._root, ground.topic, ground.queue_id)
        return QueueUnits(self._disk, folder, ground, self._done)

    def _compare(self, end: int) -> None:
        # The block of messages that were taken, and all units that point before ``end``.
        blocks, self._blocks, self._rows = self._blocks, [], 0
        begins = NO_MESSAGES.phy_offset
        if blocks:
            keys = np.concatenate([keys for keys, _ in blocks])
            columns = joined([messages for _, messages in blocks])
            begins = columns.phy_offset
            order = np.argsort(keys, kind="stable")
            keys = keys[order]
            cuts = [0, *(np.flatnonzero(keys[1:] != keys[:-1]) + 1).tolist(), len(keys)]
            for first, last in pairwise(cuts):
                key, rows = int(keys[first]), order[first:last]
                if key >= 0:
                    queue_id = (key & _LOW_32) - ((key & 0x80000000) << 1)
                    messages = columns.rows(rows)
                    self._compare_queue((self._names[key >> 32], queue_id), messages, begins, end)
        for name, queue in self._queues.items():
            if queue.next_phy_offset < end:
                self._compare_queue(name, NO_MESSAGES, begins, end)
        self._done = end

    def _compare_queue(self, name: QueueName, messages: Messages, begins: NDArray[np.int64], end: int) -> None:
        queue = self._queues.get(name)
        if queue is None:
            queue = self._queues[name] = self._units(QueueGround(*name, (), 0))
        place, count = queue.place, len(messages.phy_offset)
        found = queue.take(end, count)
        compared = compare(messages, found, begins)
        if compared.differences and self._is_live:
            found, compared = self._look_again(queue, place, messages, begins, end, (found, compared))
        if compared.differences and (log_begin := self._log_begin_now()) > int(begins[0] if len(begins) else 0):
            # Messages that have expired since they were read: what pointed to them may have, too.
            found, messages = self._without_expired(found, messages, log_begin)
            compared = compare(messages, found, begins)
        seen = self._seen
        seen.messages += len(messages.phy_offset)
        seen.units += len(found[0])
        seen.ext_units += compared.ext_units
        if len(found[0]):
            self._frontier = max(self._frontier, int(found[0]["phy_offset"].max()))
        for what, (number, first) in compared.differences.items():
            is_gone = what == "unit-missing" and not self._disk.exists(queue.folder)
            seen.add(name, "queue-missing" if is_gone else what, number, first)

    def _look_again(
        self,
        queue: QueueUnits,
        place: Place,
        messages: Messages,
        begins: NDArray[np.int64],
        end: int,
        last: tuple[Units, Compared],
    ) -> tuple[Units, Compared]:
        # The broker works: what it has dispatched since, and what it is about to dispatch.
        found, compared = last
        while compared.differences:
            if queue.grow():
                self._patience = _PATIENCE
            elif self._patience > 0 and self._may_change(queue, messages, compared):
                time.sleep(_PAUSE)
                self._patience -= _PAUSE
            else:
                break
            queue.rewind(place)
            found = queue.take(end, len(messages.phy_offset))
            compared = compare(messages, found, begins)
        return found, compared

    def _may_change(self, queue: QueueUnits, messages: Messages, compared: Compared) -> bool:
        # Messages behind all that any queue has, and units that were not there when the audit began.
        late = messages.phy_offset[compared.missing] > self._frontier
        return bool(late.any() or (compared.wrong_units >= queue.known_end).any())

    def _log_begin_now(self) -> int:
        if time.monotonic() - self._looked_at >= _LOOK_AGAIN:
            store = self._config.store
            log = list_segments(self._disk, store.commit_log_directories, store.segment_size)
            self._log_begin, self._looked_at = log.min_offset or 0, time.monotonic()
        return self._log_begin

    def _without_expired(self, found: Units, messages: Messages, log_begin: int) -> tuple[Units, Messages]:
        units, offsets = found
        kept = units["phy_offset"] >= log_begin
        self._seen.expired_units += len(units) - int(kept.sum())
        rows = messages.phy_offset >= log_begin
        return (units[kept], offsets[kept]), messages.rows(rows)
