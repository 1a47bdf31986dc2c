"""Have the kernels of an audit compiled, or loaded from where they are kept, before there is work to wait for them."""

from __future__ import annotations

import numpy as np

from indexd.audit.kernel import NOTED_COLUMNS, count_missing, match_rows, walk_chains
from indexd.audit.queues.kernel import FOUND_COLUMNS, KIND_COUNT, STATE_SIZE, scan_units
from indexd.audit.samples.kernel import find_sampled, sieve_of
from indexd.commitlog import batcher
from indexd.commitlog.batcher import make_columns
from indexd.config import Config
from indexd.index.check import ENTRY_KINDS
from indexd.index.check_kernel import check_entries
from indexd.recovery.open import decode_rules


def load_kernels(config: Config) -> None:
    """Seconds when they have to be compiled, half a second when not."""
    batcher.load_kernels(decode_rules(config))
    columns = make_columns(1, 1)
    columns.key_start[:] = 0
    entries, numbers, some = np.zeros((0, 5), np.uint32), np.zeros(0, np.uint32), np.zeros(5, np.int64)
    taken, noted, row = np.zeros(1, np.uint8), np.zeros((1, NOTED_COLUMNS), np.int64), np.uint64(0)
    match_rows(columns, row, 0, 0, entries, numbers, 0, taken, some, taken, some, some, some, noted)
    count_missing(columns, 0, 0, 0, taken, np.zeros(1, np.int32), some)
    find_sampled(columns, 0, 0, 0, numbers, sieve_of(numbers), some, some, np.zeros((0, 2), np.int64))
    links = np.zeros(1, np.int32)
    walk_chains(numbers, links, np.zeros(1, np.uint32), links, links, np.zeros(1, np.uint32), taken)
    counts, found = np.zeros(len(ENTRY_KINDS), np.int64), np.zeros((1, 4), np.int64)
    units, rows = np.frombuffer(b"", np.uint32).reshape(-1, 5), np.zeros((KIND_COUNT, 1, FOUND_COLUMNS), np.int64)
    scan_units(units, 0, 0, np.zeros(STATE_SIZE, np.int64), np.zeros(KIND_COUNT, np.int64), rows)
    check_entries(entries, 1, np.zeros(1, np.uint32), False, 2, 0, 0, np.zeros(3, np.int64), counts, found)
