"""Decodes bytes of the log into a DispatchBatch, which the builders of all outputs take.

A batch is a struct of arrays (kernel.Columns), one row a message in log order; nothing on the hot path makes a Python
object per message. A batch owns its arrays: the reader's buffer may be reused as soon as it is made.
"""

from __future__ import annotations

import mmap
import zlib
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from indexd.commitlog.bytes_kernel import CRC_TABLES
from indexd.commitlog.format import Outcome, Reason
from indexd.commitlog.kernel import (
    Columns,
    Rules,
    TopicArrays,
    decode_frames,
    find_frame,
    last_head,
    store_timestamp_at,
)
from indexd.errors import UnsafeStoreError

# The kernel asks for room for half of the longest properties text, 32767 bytes, before it takes a message.
KEYS_MIN = 32767 // 2 + 8
# What the key index does without.
QUEUE_COLUMNS = frozenset({"size", "queue_offset", "batch_size", "queue_id", "topic_id", "tags_code"})
# So many topics, with names of 64 MiB in all, one reader tells apart: as many as there may be queues by default.
TOPICS_MAX = 1 << 20


def _fresh(count: int, kind: type[np.generic]) -> NDArray[Any]:
    # Zeros of pages that nobody has used: numpy's own may be memory that was freed, which is cleared and so taken.
    size = max(count * np.dtype(kind).itemsize, 1)
    return np.frombuffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), kind)[:count]


class TopicTable:
    """Topic id <-> name, shared by every batch of a reader; memory is taken as topics come."""

    def __init__(self, topics_max: int = TOPICS_MAX, bytes_max: int = 1 << 26) -> None:
        self.arrays = TopicArrays(
            table=_fresh(4 * topics_max, np.int32),
            start=_fresh(2 * topics_max + 1, np.int64),
            data=_fresh(bytes_max, np.uint8),
            known=np.zeros(1, dtype=np.int64),
        )

    def __len__(self) -> int:
        return int(self.arrays.known[0])

    def raw_name(self, topic_id: int) -> bytes:
        """The topic's bytes as the log holds them."""
        first, last = self.arrays.start[topic_id : topic_id + 2]
        return self.arrays.data[first:last].tobytes()

    def __getstate__(self) -> TopicArrays:
        """Pickled with the names alone: no more topics can be added."""
        start = self.arrays.start[: len(self) + 1]
        return TopicArrays(np.zeros(0, np.int32), start, self.arrays.data[: start[-1]], self.arrays.known)

    def __setstate__(self, arrays: TopicArrays) -> None:
        self.arrays = arrays


@dataclass(frozen=True, slots=True)
class DispatchBatch:
    """Messages of one stretch of the log: ``[begin_offset, end_offset)``, in order, none left out.

    ``end_offset`` is where the next batch begins: behind the last message, or at the start of the next segment.
    ``crc``: CRC-32 of these bytes as they were read, where they may still be written anew. ``unproven_from``: from this
    physical offset on, which may lie before the batch, the log has messages that may have been removed from it.
    """

    columns: Columns
    rows: int
    begin_offset: int
    end_offset: int
    topics: TopicTable
    crc: int | None = None
    unproven_from: int | None = None
    #: What later messages are compared with, ms; None: what those before it said.
    newest_timestamp: int | None = None
    #: How the bytes at ``end_offset`` begin that are no message of the log: the broker says that it ends there.
    stale_head: bytes | None = None

    @property
    def keys(self) -> int:
        """How many index entries the rows come to."""
        return int(self.columns.key_start[self.rows])

    @property
    def size(self) -> int:
        """Bytes that the arrays hold: what the queue's bound counts."""
        return sum(column.nbytes for column in self.columns)

    @property
    def last_store_timestamp(self) -> int:
        """Of the last row, ms; 0 without rows."""
        return int(self.columns.store_timestamp[self.rows - 1]) if self.rows else 0


NEVER = -(1 << 63)
#: What cannot be read may have been written after everything else: every later message of the segment is a suspect.
UNREADABLE_TIMESTAMP = (1 << 63) - 1


class TailState(NamedTuple):
    """``newest``: what later messages are compared with, ms; from ``unproven_from`` on, if not None, are suspects.

    A suspect is a message of the segment being written that is older than one before it: the clock went back, or a
    longer log that was cut has left it behind its new end. A later message that is not older proves it: that was
    written after it and after the one before. Behind a frame that cannot be read every message is one: that frame may
    be the only one that was written after a cut.
    """

    newest: int = NEVER
    unproven_from: int | None = None

    def after(self, first: int, behind: TailState) -> TailState:
        """The state behind messages from offset ``first`` on that alone come to ``behind``."""
        if behind.newest >= self.newest:
            return behind
        return TailState(self.newest, first if self.unproven_from is None else self.unproven_from)


#: Before the first message.
AT_FIRST = TailState()


def tail_state(times: NDArray[np.int64], offsets: NDArray[np.int64]) -> TailState:
    """What so many messages, one at least, come to by themselves."""
    last = len(times) - int(times[::-1].argmax())
    return TailState(int(times[last - 1]), int(offsets[last]) if last < len(times) else None)


def first_older(times: NDArray[np.int64], newest: int) -> int | None:
    """The first of ``times`` that is before ``newest`` or before one before it."""
    older = times < np.maximum.accumulate(np.concatenate((np.array([newest]), times[:-1])))
    first = int(older.argmax())
    return first if older[first] else None


def within(batch: DispatchBatch, begin: int, end: int) -> DispatchBatch:
    """The messages of ``batch`` that begin in ``[begin, end)``, in the same arrays: nothing is copied."""
    if begin <= batch.begin_offset and batch.end_offset <= end:
        return batch
    columns = batch.columns
    first, last = (int(row) for row in columns.phy_offset[: batch.rows].searchsorted((begin, end)))
    cut = {name: column[first:last] for name, column in columns._asdict().items() if name != "key_hash"}
    cut["key_start"] = columns.key_start[first : last + 1]
    bounds = max(begin, batch.begin_offset), min(end, batch.end_offset)
    return replace(
        batch,
        columns=columns._replace(**cut),
        rows=last - first,
        begin_offset=bounds[0],
        end_offset=bounds[1],
        crc=None,
    )


def no_messages(offset: int, topics: TopicTable, **known: Any) -> DispatchBatch:
    """A batch of nothing at all, which tells what is ``known`` of the log that ends at ``offset``."""
    columns = make_columns(0, 0)
    columns.key_start[0] = 0
    return DispatchBatch(columns, 0, offset, offset, topics, crc=0, **known)


def make_columns(rows_max: int, keys_max: int) -> Columns:
    """Empty columns for at most ``rows_max`` messages and ``keys_max`` (at least KEYS_MIN) keys."""
    return Columns(
        phy_offset=np.empty(rows_max, dtype=np.int64),
        size=np.empty(rows_max, dtype=np.int32),
        store_timestamp=np.empty(rows_max, dtype=np.int64),
        queue_offset=np.empty(rows_max, dtype=np.int64),
        batch_size=np.empty(rows_max, dtype=np.int32),
        queue_id=np.empty(rows_max, dtype=np.int32),
        topic_id=np.empty(rows_max, dtype=np.int32),
        tags_code=np.empty(rows_max, dtype=np.int64),
        sys_flag=np.empty(rows_max, dtype=np.int32),
        key_start=np.empty(rows_max + 1, dtype=np.int64),
        key_hash=np.empty(max(keys_max, KEYS_MIN), dtype=np.uint32),
    )


def trimmed(columns: Columns, rows: int, keys: int, *, want_queue: bool = True) -> Columns:
    """Copies of the used part, so that the columns can be filled again; of a queue's columns only if they were."""
    kept = {
        name: column[: rows if want_queue or name not in QUEUE_COLUMNS else 0].copy()
        for name, column in columns._asdict().items()
    }
    kept["key_start"] = columns.key_start[: rows + 1].copy()
    kept["key_hash"] = columns.key_hash[:keys].copy()
    return Columns(**kept)


def make_rules(
    delay_levels_ms: tuple[int, ...],
    *,
    check_crc: bool,
    want_uniq_key: bool = True,
    want_tags: bool = True,
    want_queue: bool = True,
    frame_size_max: int,
) -> Rules:
    """What the kernel takes besides the bytes; ``frame_size_max`` is the largest total size that is believed."""
    return Rules(
        check_crc=check_crc,
        want_uniq_key=want_uniq_key,
        want_tags=want_tags,
        want_queue=want_queue,
        frame_size_max=np.uint64(frame_size_max),
        delay_ms=np.array(delay_levels_ms, dtype=np.int64),
        crc_tables=CRC_TABLES,
    )


class DecodeResult(NamedTuple):
    """Why decoding ended, how many bytes were taken, the total size that the next frame claims (or 0), the messages."""

    outcome: Outcome
    reason: Reason
    taken: int
    total: int
    batch: DispatchBatch | None


class Batcher:
    """Keeps the columns that the kernel fills, and the topics met so far."""

    def __init__(self, rows_max: int) -> None:
        self._columns = make_columns(rows_max, 8 * rows_max)
        self.topics = TopicTable()

    def decode(
        self,
        buffer: NDArray[np.uint8],
        limit: int,
        position: int,
        segment_end: int,
        rules: Rules,
        *,
        sum_up: bool = False,
    ) -> DecodeResult:
        """Frames of ``buffer[:limit]``, whose byte 0 stands at physical offset ``position``.

        The batch has a checksum of its bytes where those of its messages are checked, and with ``sum_up``.
        """
        outcome, reason, taken, total, rows, keys = decode_frames(
            buffer,
            np.uint64(0),
            np.uint64(limit),
            np.uint64(position),
            np.uint64(segment_end),
            rules,
            self._columns,
            self.topics.arrays,
        )
        if outcome == Outcome.BATCH_FULL and not rows:
            raise UnsafeStoreError(
                f"the log has more than {TOPICS_MAX} topics, or names of theirs of more than 64 MiB",
                "without ConsumeQueues and sparse indexes (consume_queue = false, sparse = false) no topic counts",
            )
        batch = None
        if rows:
            columns = trimmed(self._columns, int(rows), int(keys), want_queue=rules.want_queue)
            whole = (rules.check_crc or sum_up) and int(taken) <= limit
            crc = zlib.crc32(buffer[: int(taken)].data) if whole else None
            batch = DispatchBatch(columns, int(rows), position, position + int(taken), self.topics, crc)
        return DecodeResult(Outcome(outcome), Reason(reason), int(taken), int(total), batch)


def load_kernels(rules: Rules) -> None:
    """Have the decoder compiled, or loaded from where it is kept: a quarter of a second that is nobody's work."""
    nothing = np.zeros(8, dtype=np.uint8)
    Batcher(1).decode(nothing, 0, 0, 8, rules)
    last_head(nothing, np.uint64(0), np.uint64(0), np.uint64(0), np.uint64(8), rules.frame_size_max)
    find_frame(nothing, np.uint64(0), np.uint64(0), np.uint64(0))
    store_timestamp_at(np.zeros(76, dtype=np.uint8), np.uint64(0))
