"""The walk along record batches and CRC-32C, against slow twins and with bytes that lie."""

from __future__ import annotations

import struct
import zlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from indexd.commitlog.bytes_kernel import CRC_TABLES
from indexd.kafka import kernel
from indexd.kafka.format import Fault, Outcome
from support.kafka_records import Batch, batch, crc32c, log_bytes, old_record


def walk(data: bytes, limit: int | None = None, rows: int = 64, log_size: int | None = None) -> tuple[np.ndarray, int]:
    """The rows and how it ended, from the first byte."""
    table = np.zeros((rows, kernel.COLUMNS), dtype=np.int64)
    buffer = np.frombuffer(data, dtype=np.uint8)
    end = len(data) if limit is None else limit
    size = len(data) if log_size is None else log_size
    count, outcome = kernel.walk(buffer, 0, end, 0, size, kernel.CRC32C_TABLES, CRC_TABLES, table)
    return table[: int(count)], int(outcome)


def naive_walk(data: bytes) -> tuple[list[tuple[int, int, int, int]], int]:
    """(position, size, last offset, fault) up to the first fault, and how it ends."""
    rows, position = [], 0
    while position < len(data):
        left = len(data) - position
        if left <= 17:
            return rows, Outcome.HALF
        offset, size = struct.unpack_from(">qi", data, position)
        magic = data[position + 16]
        if size < 14 or (size + 12 > left and magic > 2):
            return rows, Outcome.CORRUPT
        if size + 12 > left:
            return rows, Outcome.HALF
        one = data[position : position + size + 12]
        last, fault = offset, Fault.NONE
        if magic == 2 and len(one) < 61:
            fault = Fault.SIZE
        elif magic == 2:
            last = (offset + struct.unpack_from(">i", one, 23)[0] + 2**63) % 2**64 - 2**63
            fault = Fault.NONE if crc32c(one[21:]) == struct.unpack_from(">I", one, 17)[0] else Fault.CRC
        elif magic > 2:
            fault = Fault.MAGIC
        else:
            fault = Fault.NONE if zlib.crc32(one[16:]) == struct.unpack_from(">I", one, 12)[0] else Fault.CRC
        rows.append((position, len(one), last, int(fault)))
        if fault != Fault.NONE:
            return rows, kernel.GO_ON
        position += len(one)
    return rows, Outcome.END


@st.composite
def damaged_logs(draw: st.DrawFn) -> bytes:
    """Batches of all magics, some bytes of which were changed, cut off or added."""
    batches: list[Batch] = []
    offset = draw(st.integers(0, 1 << 40))
    for _ in range(draw(st.integers(0, 6))):
        payload = draw(st.binary(max_size=40))
        if draw(st.booleans()):
            last = offset + draw(st.integers(0, 9))
            batches.append(batch(offset, last, draw(st.integers(-1, 1 << 50)), payload))
        else:
            batches.append(old_record(offset, draw(st.integers(-1, 99)), payload, magic=draw(st.integers(0, 1))))
        offset = batches[-1].last_offset + draw(st.integers(1, 3))
    data = bytearray(log_bytes(batches))
    for _ in range(draw(st.integers(0, 3)) if data else 0):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data) + draw(
        st.binary(max_size=30)
    )


@given(damaged_logs())
def test_damaged_logs_as_the_slow_walk_sees_them(data: bytes) -> None:
    rows, outcome = walk(data)
    columns = [kernel.POSITION, kernel.SIZE, kernel.LAST_OFFSET, kernel.FAULT]
    assert ([tuple(row) for row in rows[:, columns].tolist()], outcome) == naive_walk(data)


@given(st.binary(max_size=300), st.integers(0, 1 << 31))
def test_bytes_at_random_with_a_log_that_is_longer(data: bytes, more: int) -> None:
    rows, outcome = walk(data, log_size=len(data) + more)
    assert outcome in {*Outcome, kernel.GO_ON, kernel.BEHIND_BUFFER}
    assert (rows[:, kernel.SIZE] >= 26).all()
