"""The queue is bounded and drops nothing, drains are on time, the tail loop waits; where a log ends for one reading."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest

from indexd.commitlog.batcher import DispatchBatch, TopicTable, make_columns, trimmed
from indexd.dispatch.reput import DispatchQueue, Item
from indexd.errors import CorruptDataError
from indexd.recovery.recover import WholeLog, once
from support.commitlog_writer import CommitLogWriter, FrameSpec
from support.reading import SEGMENT_SIZE, open_reader, patch


def batch(begin: int, rows: int = 10) -> DispatchBatch:
    columns = make_columns(rows, 1)
    columns.key_start[:] = 0
    return DispatchBatch(trimmed(columns, rows, 0), rows, begin, begin + rows, TopicTable(4, 64))


async def test_a_full_queue_lets_the_producer_wait_and_loses_nothing() -> None:
    queue = DispatchQueue(rows_max=25, bytes_max=1 << 20)
    items = [batch(at) for at in range(0, 1000, 10)]

    async def produce() -> None:
        for item in items:
            await queue.put(item)
            assert queue.waiting.rows <= 25
        queue.close()

    producer = asyncio.create_task(produce())
    seen: list[Item] = []
    while not (queue.closed and len(queue) == 0):
        await asyncio.wait_for(queue.due.wait(), 5.0)
        seen += queue.drain()
    await producer
    assert seen == items


async def test_bytes_are_bounded_too_and_a_huge_batch_passes_alone() -> None:
    queue = DispatchQueue(rows_max=1 << 30, bytes_max=batch(0).size + 1)
    await queue.put(batch(0))
    waiting = asyncio.create_task(queue.put(batch(10, rows=1000)))
    await asyncio.wait_for(queue.due.wait(), 5.0)
    assert not waiting.done()
    assert len(queue.drain()) == 1
    await asyncio.wait_for(waiting, 1.0)
    assert queue.waiting.bytes > queue.bytes_max


def write(directory: Path, count: int, *, times: list[int] | None = None) -> list[int]:
    with CommitLogWriter(directory, SEGMENT_SIZE) as writer:
        stamps = times or [1000 + number for number in range(count)]
        return [writer.append(FrameSpec("T", b"x" * 50, {"KEYS": f"k{at}"}, store_timestamp=at)) for at in stamps]


def read(directory: Path, *, skip_corrupt: bool = False, take_older: bool = False) -> tuple[WholeLog, list[int]]:

    reader = open_reader(directory, time.monotonic, settle=0.01, corrupt_after=5.0, skip_corrupt=skip_corrupt)
    reader.options = replace(once(reader.options), take_older=take_older)
    log = WholeLog(reader)
    offsets: list[int] = []
    for item in log:
        if isinstance(item, DispatchBatch):
            offsets += item.columns.phy_offset[: item.rows].tolist()
    reader.close()
    return log, offsets


def test_a_log_is_read_to_its_end_and_garbage_there_is_said(tmp_path: Path) -> None:
    """As a broker's crash leaves it: nothing behind it proves itself."""
    wanted = write(tmp_path, 30)
    log, offsets = read(tmp_path)
    assert (offsets, log.unreadable) == (wanted, None)
    patch(tmp_path / f"{0:020d}", wanted[-1] + 4, b"\xff" * 40)
    log, offsets = read(tmp_path)
    assert offsets == wanted[:-1]
    assert log.unreadable is not None
    assert log.unreadable.offset == wanted[-1]


@pytest.mark.parametrize(
    ("number", "at", "data", "take_older"),
    [
        (20, 4, b"\xff", False),
        # Zeros before intact frames; a frame whose magic is not there yet, as while a broker writes it.
        (0, 0, None, True),
        (17, 4, bytes(4), True),
    ],
)
def test_damage_behind_which_the_log_goes_on_is_an_error(
    tmp_path: Path, number: int, at: int, data: bytes | None, take_older: bool
) -> None:
    wanted = write(tmp_path, 30)
    patch(tmp_path / f"{0:020d}", wanted[number] + at, data or bytes(wanted[1]))
    with pytest.raises(CorruptDataError, match=f"offset {wanted[number]} "):
        read(tmp_path, take_older=take_older)
    log, offsets = read(tmp_path, skip_corrupt=True, take_older=take_older)
    assert (offsets, log.unreadable) == (wanted[:number] + wanted[number + 1 :], None)


def test_what_an_older_log_left_behind_the_end_is_not_the_log(tmp_path: Path) -> None:
    """For who takes older frames they may be its own: an error, or passed over and not proven."""
    older = write(tmp_path, 30, times=list(range(100, 130)))
    with CommitLogWriter(tmp_path, SEGMENT_SIZE) as writer:
        wanted = [writer.append(FrameSpec("T", b"y" * 77, {"KEYS": "n"}, store_timestamp=at)) for at in range(500, 510)]
        end = writer.max_offset
    for skip_corrupt in (False, True):
        log, offsets = read(tmp_path, skip_corrupt=skip_corrupt)
        assert offsets == wanted
        assert log.unreadable is not None
    with pytest.raises(CorruptDataError, match=f"offset {end}"):
        read(tmp_path, take_older=True)
    _, offsets = read(tmp_path, skip_corrupt=True, take_older=True)
    assert offsets == wanted + [at for at in older if at > end]


def test_a_clock_that_steps_back_costs_a_settle_time_and_no_message(tmp_path: Path) -> None:
    wanted = write(tmp_path, 30, times=[*range(500, 515), *range(400, 415)])
    assert read(tmp_path)[1] == wanted
