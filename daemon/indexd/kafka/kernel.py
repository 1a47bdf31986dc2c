"""The walk along the batches of a log, and the tables of CRC-32C; compiled.

Every position in a buffer is uint64, every number of a batch int64. No read goes behind ``limit``, whatever a batch
says about its length.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from indexd.commitlog.bytes_kernel import crc_go_on, crc_tables, load_u32, load_u64, signed_32
from indexd.kafka import format as log_format

_0 = np.uint64(0)
_1 = np.uint64(1)
_8 = np.uint64(8)
_12 = np.uint64(12)
_16 = np.uint64(16)
_17 = np.uint64(17)
_18 = np.uint64(18)
_21 = np.uint64(21)
_23 = np.uint64(23)
_35 = np.uint64(35)
_ONES = np.uint32(0xFFFFFFFF)
_POLYNOMIAL = 0x82F63B78  # Castagnoli's, the lowest bit first
_MAGIC_V2 = np.uint64(log_format.MAGIC_V2)
_LOG_OVERHEAD = np.int64(log_format.LOG_OVERHEAD)
_TOO_SHORT_FOR_A_HEAD = np.int64(log_format.HEAD_SIZE_UP_TO_MAGIC)
_HEAD_SIZE_V2 = np.int64(log_format.HEAD_SIZE_V2)
_RECORD_OVERHEAD_V0 = np.int64(log_format.RECORD_OVERHEAD_V0)
_END = int(log_format.Outcome.END)
_HALF = int(log_format.Outcome.HALF)
_CORRUPT = int(log_format.Outcome.CORRUPT)
_NONE = int(log_format.Fault.NONE)
_CRC = int(log_format.Fault.CRC)
_MAGIC = int(log_format.Fault.MAGIC)
_SIZE = int(log_format.Fault.SIZE)

#: What ``walk`` returns besides the values of Outcome: to go on behind the last row; or that the batch there, or its
#: head, goes on behind the buffer.
GO_ON = -1
BEHIND_BUFFER = -2

#: The columns of a row that ``walk`` fills, int64.
POSITION, SIZE, BASE_OFFSET, LAST_OFFSET, MAX_TIMESTAMP, MAGIC, FAULT = range(7)
COLUMNS = 7


def _crc32c_table() -> NDArray[np.uint32]:
    row = np.zeros(256, dtype=np.uint32)
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (_POLYNOMIAL if crc & 1 else 0)
        row[byte] = crc
    return row


#: For ``crc_go_on``, as ``commitlog.crc.CRC_TABLES`` is for zlib's polynomial.
CRC32C_TABLES = crc_tables(_crc32c_table())


@numba.njit(nogil=True)
def _fields(buffer, i, position, total, row):  # type: ignore[no-untyped-def]
    # What the head of the batch at i says; of magic 2 all 61 bytes are there, of others 26 or the whole record.
    magic = np.uint64(buffer[i + _16])
    row[POSITION] = position
    row[SIZE] = total
    row[MAGIC] = np.int64(magic)
    row[FAULT] = _NONE
    row[BASE_OFFSET] = np.int64(load_u64(buffer, i))
    row[LAST_OFFSET] = row[BASE_OFFSET]
    row[MAX_TIMESTAMP] = np.int64(-1)
    if magic == _MAGIC_V2:
        if total < _HEAD_SIZE_V2:
            row[FAULT] = _SIZE
            return
        delta = np.uint64(signed_32(load_u32(buffer, i + _23)))
        row[LAST_OFFSET] = np.int64(load_u64(buffer, i) + delta)
        row[MAX_TIMESTAMP] = np.int64(load_u64(buffer, i + _35))
    elif magic > _MAGIC_V2:
        row[FAULT] = _MAGIC
    elif magic == _1:
        row[MAX_TIMESTAMP] = np.int64(load_u64(buffer, i + _18))


@numba.njit(nogil=True)
def _head(buffer, i, limit, position, log_size, row):  # type: ignore[no-untyped-def]
    # GO_ON with the row filled, or an outcome; BEHIND_BUFFER if even the head does not end within the buffer.
    left = log_size - position
    if left <= np.int64(0):
        return _END
    if left <= _TOO_SHORT_FOR_A_HEAD:
        return _HALF
    there = np.int64(limit - i)
    if there < min(left, _HEAD_SIZE_V2):
        return BEHIND_BUFFER
    size = signed_32(load_u32(buffer, i + _8))
    if size < _RECORD_OVERHEAD_V0:
        return _CORRUPT
    total = size + _LOG_OVERHEAD
    if total > left:
        return _HALF if np.uint64(buffer[i + _16]) <= _MAGIC_V2 else _CORRUPT
    _fields(buffer, i, position, total, row)
    return GO_ON


@numba.njit(nogil=True, cache=True)
def batch_sum(buffer, start):  # type: ignore[no-untyped-def]
    """(checksum that the batch at ``start`` carries as uint32, where the bytes that it covers begin)."""
    i = np.uint64(start)
    if np.uint64(buffer[i + _16]) == _MAGIC_V2:
        return np.uint32(load_u32(buffer, i + _17)), i + _21
    return np.uint32(load_u32(buffer, i + _12)), i + _16


@numba.njit(nogil=True, cache=True)
def walk(buffer, start, limit, position, log_size, crc32c_tables, crc32_tables, rows):  # type: ignore[no-untyped-def]
    """Batch by batch from ``buffer[start]``, which is byte ``position`` of a log of ``log_size`` bytes, to ``limit``.

    Fills ``rows`` (n, 7), int64, from the front, until it is full, the buffer ends, a batch has a fault (its row is the
    last one then), or no batch follows. Returns (rows filled, an Outcome or GO_ON or BEHIND_BUFFER). With BEHIND_BUFFER
    one more row holds the head of the batch that goes on there, its checksum not looked at; its FAULT is -1 if not even
    the head is there.
    """
    i = np.uint64(start)
    end = np.uint64(limit)
    at = np.int64(position)
    size = np.int64(log_size)
    count = _0
    while count < np.uint64(len(rows)):
        row = rows[count]
        row[FAULT] = np.int64(-1)
        outcome = _head(buffer, i, end, at, size, row)
        if outcome != GO_ON:
            return count, outcome
        total = np.uint64(row[SIZE])
        if row[FAULT] == _NONE:
            if total > end - i:
                return count, BEHIND_BUFFER
            crc, covered = batch_sum(buffer, i)
            tables = crc32c_tables if row[MAGIC] == np.int64(_MAGIC_V2) else crc32_tables
            if crc_go_on(buffer, covered, i + total, _ONES, tables) ^ _ONES != crc:
                row[FAULT] = _CRC
        count += _1
        if row[FAULT] != _NONE:
            break
        at += row[SIZE]
        i += total
    return count, GO_ON
