"""The walk along Kafka's logs: buffers of any size, batches that go on behind them, faults, and how a log ends."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexd.commitlog.bytes_kernel import CRC_TABLES
from indexd.kafka import kernel
from indexd.kafka.format import Fault, WalkEnd
from indexd.kafka.records import LogWalk
from indexd.storage.disk import Disk
from support.kafka_records import (
    Batch,
    batch,
    crc32c,
    log_bytes,
    old_record,
    segments,
)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kafka") / "00000000000000000000.log"


def walk(path: Path, data: bytes, buffer_size: int = 4096, base: int = 0) -> tuple[list[tuple[int, ...]], LogWalk]:
    """(position, size, last offset, timestamp, fault) of every batch, and the walk that is over."""
    path.write_bytes(data)
    rows: list[tuple[int, ...]] = []
    with Disk().open_read(path) as file:
        walked = LogWalk(file, base, buffer_size=buffer_size)
        for batches in walked:
            columns = [kernel.POSITION, kernel.SIZE, kernel.LAST_OFFSET, kernel.MAX_TIMESTAMP, kernel.FAULT]
            rows += map(tuple, batches[columns].T.tolist())
    return rows, walked


def made(sizes: list[int]) -> list[Batch]:
    """Batches of two offsets each, with so many bytes of records."""
    return [batch(2 * i, 2 * i + 1, 1000 + i, bytes([i % 256]) * size) for i, size in enumerate(sizes)]


@pytest.mark.parametrize("kind", ["new", "old"])
def test_a_batch_much_larger_than_the_buffer(log: Path, kind: str) -> None:
    large = batch(1, 5, 7, bytes(range(256)) * 400) if kind == "new" else old_record(5, 7, bytes(range(256)) * 400)
    batches = [batch(0, 0, 5, b"x"), large, batch(6, 6, 8)]
    rows, walked = walk(log, log_bytes(batches), 300)
    assert [row[2] for row in rows] == [0, 5, 6]
    assert (walked.outcome, [row[4] for row in rows]) == (WalkEnd.END, [0, 0, 0])
    data = bytearray(log_bytes(batches))
    data[60_000] ^= 1
    rows, walked = walk(log, bytes(data), 300)
    assert [row[4] for row in rows] == [Fault.NONE, Fault.CRC, Fault.NONE]
    assert walked.outcome == WalkEnd.END


@pytest.mark.parametrize(
    ("edits", "faults", "outcome", "fault"),
    [
        # A wrong checksum is passed over where the offsets go on; behind the last batch is the end.
        ({302: 1, 413: 1}, [0, 0, Fault.CRC, Fault.CRC, 0], WalkEnd.END, Fault.NONE),
        ({302: 1, 413: 1, 524: 1}, [0, 0, Fault.CRC, Fault.CRC, Fault.CRC], WalkEnd.END, Fault.NONE),
        # A wrong length ends the walk before the batch, and so does an unknown magic.
        *(({233: 99 ^ wrong}, [0, 0], WalkEnd.CORRUPT, Fault.CRC) for wrong in (60, 98, 100, 209)),
        ({127: 2 ^ 3}, [0], WalkEnd.CORRUPT, Fault.MAGIC),
    ],
)
def test_batches_with_a_fault(
    log: Path, edits: dict[int, int], faults: list[int], outcome: WalkEnd, fault: Fault
) -> None:
    data = bytearray(log_bytes(made([50] * 5)))
    for position, bits in edits.items():
        data[position] ^= bits
    rows, walked = walk(log, bytes(data))
    assert [row[4] for row in rows] == faults
    assert (walked.end, walked.outcome, walked.fault) == (111 * len(faults), outcome, fault)


def test_an_older_batch_that_a_wrong_length_leads_to(log: Path) -> None:
    """What was in a payload is not what follows: its offsets do not go on."""
    old = batch(1, 1, 5, bytes(30))
    batches = [*made([50] * 2), batch(4, 5, 6, old.data + bytes(30)), batch(6, 7, 8)]
    data = bytearray(log_bytes(batches))
    data[222 + 8 : 222 + 12] = (61 - 12).to_bytes(4, "big")
    rows, walked = walk(log, bytes(data))
    assert (len(rows), walked.outcome, walked.fault) == (2, WalkEnd.CORRUPT, Fault.CRC)


@pytest.mark.parametrize(
    ("tail", "outcome"),
    [
        (log_bytes(made([50] * 4))[333:-1], WalkEnd.HALF),
        (b"\x01" * 5, WalkEnd.HALF),
        (bytes(5), WalkEnd.ZEROS),
        (bytes(10_000), WalkEnd.ZEROS),
        (bytes(9_999) + b"\x01", WalkEnd.CORRUPT),
        (b"\xff" * 100, WalkEnd.CORRUPT),
    ],
)
def test_how_a_log_can_end(log: Path, tail: bytes, outcome: WalkEnd) -> None:
    rows, walked = walk(log, log_bytes(made([50] * 3)) + tail)
    assert (len(rows), walked.outcome, walked.end, walked.fault) == (3, outcome, 333, Fault.NONE)


def test_a_log_that_is_cut_while_it_is_read(log: Path) -> None:
    log.write_bytes(log_bytes(made([400] * 40)))
    with Disk().open_read(log) as file:
        walked = LogWalk(file, 0, buffer_size=1000)
        count = 0
        for batches in walked:
            count += batches.shape[1]
            if count == 4:
                with Disk().open_write(log) as other:
                    other.truncate(461 * 6 + 100)
    assert (count, walked.outcome, walked.end) == (6, WalkEnd.HALF, 461 * 6)


def walk_buffer(data: bytes, log_size: int | None = None) -> tuple[np.ndarray, int]:
    """The rows and how it ended, from the first byte."""
    table = np.zeros((64, kernel.COLUMNS), dtype=np.int64)
    size = len(data) if log_size is None else log_size
    buffer = np.frombuffer(data, dtype=np.uint8)
    count, outcome = kernel.walk(buffer, 0, len(data), 0, size, kernel.CRC32C_TABLES, CRC_TABLES, table)
    return table[: int(count)], int(outcome)


def naive_walk(data: bytes) -> tuple[list[tuple[int, int, int, int]], int]:
    """(position, size, last offset, fault) up to the first fault, and how it ends."""
    rows, position = [], 0
    while position < len(data):
        left = len(data) - position
        if left <= 17:
            return rows, WalkEnd.HALF
        offset, size = struct.unpack_from(">qi", data, position)
        magic = data[position + 16]
        if size < 14 or (size + 12 > left and magic > 2):
            return rows, WalkEnd.CORRUPT
        if size + 12 > left:
            return rows, WalkEnd.HALF
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
    return rows, WalkEnd.END


@st.composite
def damaged_logs(draw: st.DrawFn) -> bytes:
    """Batches of all magics, some bytes of which were changed, cut off or added."""
    batches = draw(segments(draw(st.integers(0, 1 << 40)), 6))
    data = bytearray(log_bytes(batches))
    for _ in range(draw(st.integers(0, 3)) if data else 0):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data) + draw(
        st.binary(max_size=30)
    )


@given(damaged_logs())
def test_damaged_logs_as_the_slow_walk_sees_them(data: bytes) -> None:
    rows, outcome = walk_buffer(data)
    columns = [kernel.POSITION, kernel.SIZE, kernel.LAST_OFFSET, kernel.FAULT]
    assert ([tuple(row) for row in rows[:, columns].tolist()], outcome) == naive_walk(data)


@given(st.binary(max_size=300), st.integers(0, 1 << 31))
def test_a_log_that_is_longer(data: bytes, more: int) -> None:
    rows, outcome = walk_buffer(data, log_size=len(data) + more)
    assert outcome in {*WalkEnd, kernel.GO_ON, kernel.BEHIND_BUFFER}
    assert (rows[:, kernel.SIZE] >= 26).all()
