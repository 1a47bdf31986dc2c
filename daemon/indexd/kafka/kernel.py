"""The walk along the batches of a log, and the tables of CRC-32C; compiled.

Every position in a buffer is uint64, every number of a batch int64. No read goes behind ``limit``, whatever a batch
says about its length.
"""

from __future__ import annotations

import numba
import numpy as np

from indexd.commitlog.bytes_kernel import crc_go_on, crc_tables, load_u32, load_u64, signed_32
from indexd.kafka.format import (
    HEAD_SIZE_UP_TO_MAGIC,
    HEAD_SIZE_V2,
    LOG_OVERHEAD,
    MAGIC_V2,
    RECORD_OVERHEAD_V0,
    Fault,
    WalkEnd,
)

_0 = np.uint64(0)
_1 = np.uint64(1)
_ONES = np.uint32(0xFFFFFFFF)
_END, _HALF, _CORRUPT = (int(one) for one in (WalkEnd.END, WalkEnd.HALF, WalkEnd.CORRUPT))
_NONE, _CRC, _MAGIC, _SIZE = map(int, Fault)

#: What ``walk`` returns besides the values of WalkEnd: to go on behind the last row; or that the batch there, or its
#: head, goes on behind the buffer.
GO_ON = -1
BEHIND_BUFFER = -2

#: The columns of a row that ``walk`` fills, int64.
POSITION, SIZE, BASE_OFFSET, LAST_OFFSET, MAX_TIMESTAMP, MAGIC, FAULT = range(7)
COLUMNS = 7


#: Castagnoli's polynomial, for ``crc_go_on``.
CRC32C_TABLES = crc_tables(0x82F63B78)


@numba.njit(nogil=True, cache=True)
def walk(buffer, start, limit, position, log_size, crc32c_tables, crc32_tables, rows):  # type: ignore[no-untyped-def]
    """Batch by batch from ``buffer[start]``, which is byte ``position`` of a log of ``log_size`` bytes, to ``limit``.

    Fills ``rows`` (n, 7), int64, from the front, until it is full, the buffer ends, a batch has a fault (its row is the
    last one then), or no batch follows. Returns (rows filled, a WalkEnd or GO_ON or BEHIND_BUFFER). With BEHIND_BUFFER
    one more row holds the head of the batch that goes on there, its checksum not looked at; its FAULT is -1 if not even
    the head is there.
    """
    i, end, count = np.uint64(start), np.uint64(limit), _0
    left = np.int64(log_size) - np.int64(position)
    while count < np.uint64(len(rows)):
        row = rows[count]
        row[FAULT] = np.int64(-1)
        if left <= np.int64(0):
            return count, _END
        if left <= HEAD_SIZE_UP_TO_MAGIC:
            return count, _HALF
        if np.int64(end - i) < min(left, np.int64(HEAD_SIZE_V2)):
            return count, BEHIND_BUFFER
        total = signed_32(load_u32(buffer, i + np.uint64(8))) + LOG_OVERHEAD
        magic = np.uint64(buffer[i + np.uint64(16)])
        if total < RECORD_OVERHEAD_V0 + LOG_OVERHEAD or (total > left and magic > MAGIC_V2):
            return count, _CORRUPT
        if total > left:
            return count, _HALF
        base_offset = load_u64(buffer, i)
        row[POSITION], row[SIZE], row[MAGIC], row[FAULT] = np.int64(log_size) - left, total, np.int64(magic), _NONE
        row[BASE_OFFSET], row[LAST_OFFSET], row[MAX_TIMESTAMP] = np.int64(base_offset), np.int64(base_offset), -1
        crc, covered, tables = load_u32(buffer, i + np.uint64(12)), i + np.uint64(16), crc32_tables
        if magic == MAGIC_V2 and total >= HEAD_SIZE_V2:
            # The head's 61 bytes are in the buffer.
            delta = np.uint64(signed_32(load_u32(buffer, i + np.uint64(23))))
            row[LAST_OFFSET] = np.int64(base_offset + delta)
            row[MAX_TIMESTAMP] = np.int64(load_u64(buffer, i + np.uint64(35)))
            crc, covered, tables = load_u32(buffer, i + np.uint64(17)), i + np.uint64(21), crc32c_tables
        elif magic >= MAGIC_V2:
            row[FAULT] = _SIZE if magic == MAGIC_V2 else _MAGIC
        elif magic == _1:
            row[MAX_TIMESTAMP] = np.int64(load_u64(buffer, i + np.uint64(18)))
        if row[FAULT] == _NONE:
            if np.uint64(total) > end - i:
                return count, BEHIND_BUFFER
            if crc_go_on(buffer, covered, i + np.uint64(total), _ONES, tables) ^ _ONES != np.uint32(crc):
                row[FAULT] = _CRC
        count += _1
        if row[FAULT] != _NONE:
            break
        left -= total
        i += np.uint64(total)
    return count, GO_ON
