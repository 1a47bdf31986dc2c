"""Batcher: bytes of the log at hand -> one DispatchBatch and what stands behind it."""

from __future__ import annotations

import zlib
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from indexd.commitlog.dispatch import DispatchBatch, TopicTable, make_columns, trimmed
from indexd.commitlog.format import Outcome, Reason
from indexd.commitlog.heads_kernel import find_frame, last_head, store_timestamp_at
from indexd.commitlog.kernel import Rules, decode_frames


class Stretch(NamedTuple):
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
    ) -> Stretch:
        """Frames of ``buffer[:limit]``, whose byte 0 stands at physical offset ``position``.

        The batch has a checksum of its bytes where those of its messages are checked, and with ``sum_up``.
        """
        while True:
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
            if outcome != Outcome.BATCH_FULL or rows:
                break
            self.topics = self.topics.grown()
        batch = None
        if rows:
            columns = trimmed(self._columns, int(rows), int(keys), want_queue=rules.want_queue)
            whole = (rules.check_crc or sum_up) and int(taken) <= limit
            crc = zlib.crc32(buffer[: int(taken)].data) if whole else None
            batch = DispatchBatch(columns, int(rows), position, position + int(taken), self.topics, crc)
        return Stretch(Outcome(outcome), Reason(reason), int(taken), int(total), batch)


def load_kernels(rules: Rules) -> None:
    """Have the decoder compiled, or loaded from where it is kept: a quarter of a second that is nobody's work."""
    nothing = np.zeros(8, dtype=np.uint8)
    Batcher(1).decode(nothing, 0, 0, 8, rules)
    last_head(nothing, np.uint64(0), np.uint64(0), np.uint64(0), np.uint64(8), rules.frame_size_max)
    find_frame(nothing, np.uint64(0), np.uint64(0), np.uint64(0))
    store_timestamp_at(np.zeros(76, dtype=np.uint8), np.uint64(0))
