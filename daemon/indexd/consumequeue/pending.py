"""PendingUnits: units that are in the store and not written yet, in the order of the log until they are sorted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from indexd.commitlog.dispatch import DispatchBatch, make_columns
from indexd.consumequeue.kernel import UNITS, group_units, put_units
from indexd.consumequeue.queues import Queues

# Units that are collected before they are written: 1.25 MiB, or more if there are many queues, so that an open and a
# write are worth it. The memory of the longest buffers is the system's until it is used.
UNITS_PER_WRITE = 1 << 16
_UNITS_A_QUEUE = 128
_UNITS_MAX = 1 << 20


class PendingUnits:
    """What the kernel collects, and the same sorted by queue: ``grouped``, (n, 5) uint32, the bytes of the files."""

    def __init__(self) -> None:
        self._units = np.empty((_UNITS_MAX, 5), dtype=np.uint32)
        self._slots = np.empty(_UNITS_MAX, dtype=np.int32)
        self._touched = np.empty(_UNITS_MAX, dtype=np.int32)
        self._lengths = np.empty(_UNITS_MAX, dtype=np.int64)
        self._used = np.zeros(2, dtype=np.int64)
        self.grouped = np.empty((_UNITS_MAX, 5), dtype=np.uint32)
        #: See the kernel; they only grow.
        self.counts = np.zeros(6, dtype=np.int64)

    def __repr__(self) -> str:
        return f"PendingUnits({self._used[0]} of {self._used[1]} queues, {self.counts[UNITS]} so far)"

    def clear(self) -> None:
        """Forget what is there."""
        self._used[:] = 0

    def put(self, batch: DispatchBatch, row: int, queues: Queues, numbers: NDArray[np.int32]) -> tuple[int, int]:
        """Take rows from ``row`` on; why it stopped (DONE, NEW_QUEUE, BUFFER_FULL), and at which row.

        ``numbers`` are ``queues.numbers`` of the batch.
        """
        status, next_row = put_units(
            batch.columns,
            batch.rows,
            row,
            numbers,
            queues.table_keys,
            queues.table_slots,
            queues.is_closed,
            queues.state,
            self._units[: max(UNITS_PER_WRITE, min(_UNITS_A_QUEUE * len(queues), _UNITS_MAX))],
            self._slots,
            self._used,
            self._touched,
            self.counts,
        )
        return int(status), int(next_row)

    def group(self, queues: Queues) -> list[tuple[int, int, int]]:
        """Sort what is there into ``grouped``; each queue's slot, first and last row, the one that came first last."""
        touched = self._touched[: self._used[1]].tolist()
        group_units(self._units, self._slots, self._used, self._touched, queues.state, self.grouped, self._lengths)
        ends = np.cumsum(self._lengths[: len(touched)]).tolist()
        return list(zip(touched, [0, *ends], ends, strict=False))[::-1]


def load_kernels() -> None:
    """Have putMessagePositionInfo compiled, or loaded from where it is kept."""
    queues = Queues(Path(), 1, 1)
    queues.begin("T", 0, 0, 0)
    units, slots = np.empty((1, 5), dtype=np.uint32), np.empty(1, dtype=np.int32)
    used, counts = np.zeros(2, dtype=np.int64), np.zeros(6, dtype=np.int64)
    keys, table, state = queues.table_keys, queues.table_slots, queues.state
    put_units(make_columns(1, 1), 0, 0, slots, keys, table, False, state, units, slots, used, slots, counts)
    group_units(units, slots, used, slots, state, units, counts)
