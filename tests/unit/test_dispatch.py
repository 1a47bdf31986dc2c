"""The queue is bounded and drops nothing, drains are on time, the tail loop waits; where a log ends for one reading."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from indexd.commitlog.batcher import DispatchBatch, TopicTable, make_columns, trimmed
from indexd.commitlog.format import Corrupt, NotYetWritten
from indexd.commitlog.reader import Skipped
from indexd.config import ReaderConfig
from indexd.dispatch.reput import DispatchQueue, Item, ReputState, drain, poll_patiently, reput
from indexd.errors import CorruptDataError
from indexd.recovery.recover import WholeLog, once
from support.commitlog_writer import CommitLogWriter, FrameSpec
from support.reading import SEGMENT_SIZE, open_reader, patch


def no_problem(error: object, seconds: float) -> None:
    raise AssertionError(error)


CONFIG = ReaderConfig(poll_min_ms=1, poll_max_ms=20)


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


async def test_a_drain_is_early_by_what_the_last_one_took_and_at_once_when_full_or_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue, now = DispatchQueue(rows_max=10, bytes_max=1 << 20), 100.0
    waits: list[float] = []
    built: list[int] = []

    async def wait(due: asyncio.Event, seconds: float) -> None:
        nonlocal now
        waits.append(seconds)
        now += 0.0 if due.is_set() else seconds
        if len(waits) == 2:
            await queue.put(batch(0))
            blocked.append(asyncio.create_task(queue.put(batch(10))))
            await asyncio.sleep(0)
            assert queue.is_blocked
            assert due.is_set()
        if len(waits) == 4:
            queue.close()

    async def build(items: list[Item]) -> None:
        nonlocal now
        now += 0.3
        built.append(len(items))
        await asyncio.sleep(0)

    blocked: list[asyncio.Task[None]] = []
    monkeypatch.setattr("indexd.dispatch.reput.pause", wait)
    monkeypatch.setattr("indexd.dispatch.reput.time.monotonic", lambda: now)
    await drain(queue, lambda: 1.0, build)
    assert blocked[0].done()
    # 1.0 less the reading time; then less the 0.3 of the build: what comes in is found within the interval.
    assert waits == pytest.approx([0.9, 0.3, 0.3, 0.3])
    assert built == [0, 1, 1, 0]


async def test_the_tail_loop_passes_on_reports_and_ends() -> None:
    script = [
        batch(0),
        Skipped(10, 20, "expired"),
        Corrupt(20, "bad", None),
        batch(20),
        NotYetWritten(30),
    ]
    queue, state, stop = DispatchQueue(1000, 1 << 20), ReputState(), asyncio.Event()
    events: list[object] = []

    async def poll() -> object:
        if not script:
            stop.set()
            return NotYetWritten(30)
        return script.pop(0)

    started = time.monotonic()
    await asyncio.wait_for(reput(poll, queue, lambda: 60.0, state, stop, events.append, no_problem), 10.0)  # type: ignore[arg-type]
    assert queue.closed
    assert [type(item) for item in queue.drain()] == [DispatchBatch, Skipped, DispatchBatch]
    assert events == [Skipped(10, 20, "expired"), Corrupt(20, "bad", None), None]
    assert time.monotonic() - started >= 1.0, "a corrupt log is read again after a pause, not at once"
    assert state.corrupt is None


async def test_a_stop_does_not_wait_for_a_full_queue() -> None:
    queue, stop = DispatchQueue(10, 1 << 20), asyncio.Event()

    async def poll() -> DispatchBatch:
        return batch(0)

    task = asyncio.create_task(reput(poll, queue, lambda: 60.0, ReputState(), stop, lambda event: None, no_problem))
    await asyncio.wait_for(queue.due.wait(), 5.0)
    assert queue.is_blocked
    stop.set()
    queue.stop()
    await asyncio.wait_for(task, 1.0)
    assert queue.waiting.rows == 20, "the batch that it waited with, and no more"


def test_looks_become_rarer_while_the_log_is_quiet() -> None:
    state, stop, looks = ReputState(), threading.Event(), 0

    def poll() -> NotYetWritten:
        nonlocal looks
        looks += 1
        return NotYetWritten(0)

    # The first time it says so at once: what came before the start is to be built.
    poll_patiently(poll, CONFIG, state, stop)
    assert looks == 1
    state.has_caught_up = True
    started = time.monotonic()
    assert poll_patiently(poll, CONFIG, state, stop) == NotYetWritten(0)
    assert 0.9 < time.monotonic() - started < 2.0
    assert 20 < looks < 80
    assert state.caught_up
    assert state.pause == 0.02
    stop.set()
    started = time.monotonic()
    poll_patiently(poll, CONFIG, state, stop)
    assert time.monotonic() - started < 0.5


def write(directory: Path, count: int, *, times: list[int] | None = None) -> list[int]:
    with CommitLogWriter(directory, SEGMENT_SIZE) as writer:
        stamps = times or [1000 + number for number in range(count)]
        return [writer.append(FrameSpec("T", b"x" * 50, {"KEYS": f"k{at}"}, store_timestamp=at)) for at in stamps]


def read(directory: Path, *, skip_corrupt: bool = False, take_older: bool = False) -> tuple[WholeLog, list[int]]:
    import time

    reader = open_reader(directory, time.monotonic, settle=0.01, corrupt_after=5.0, skip_corrupt=skip_corrupt)
    reader.set_options(replace(once(reader._options), take_older=take_older))
    log = WholeLog(reader)
    offsets: list[int] = []
    for item in log:
        if isinstance(item, DispatchBatch):
            offsets += item.columns.phy_offset[: item.rows].tolist()
    reader.close()
    return log, offsets


def test_a_sound_log_is_read_to_its_end(tmp_path: Path) -> None:
    wanted = write(tmp_path, 30)
    log, offsets = read(tmp_path)
    assert offsets == wanted
    assert log.unreadable is None


def test_garbage_at_the_end_is_said(tmp_path: Path) -> None:
    """As a broker's crash leaves it: nothing behind it proves itself."""
    wanted = write(tmp_path, 30)
    patch(tmp_path / f"{0:020d}", wanted[-1] + 4, b"\xff" * 40)
    log, offsets = read(tmp_path)
    assert offsets == wanted[:-1]
    assert log.unreadable is not None
    assert log.unreadable.offset == wanted[-1]


def test_damage_behind_which_the_log_goes_on_is_an_error(tmp_path: Path) -> None:
    wanted = write(tmp_path, 30)
    patch(tmp_path / f"{0:020d}", wanted[20] + 4, b"\xff")
    with pytest.raises(CorruptDataError, match=f"offset {wanted[20]}"):
        read(tmp_path)
    log, offsets = read(tmp_path, skip_corrupt=True)
    assert offsets == wanted[:20] + wanted[21:]
    assert log.unreadable is None


@pytest.mark.parametrize("skip_corrupt", [False, True])
def test_what_an_older_log_left_behind_the_end_is_not_the_log(tmp_path: Path, skip_corrupt: bool) -> None:
    write(tmp_path, 30, times=list(range(100, 130)))
    with CommitLogWriter(tmp_path, SEGMENT_SIZE) as writer:
        wanted = [writer.append(FrameSpec("T", b"y" * 77, {"KEYS": "n"}, store_timestamp=at)) for at in range(500, 510)]
    log, offsets = read(tmp_path, skip_corrupt=skip_corrupt)
    assert offsets == wanted
    assert log.unreadable is not None


def test_a_clock_that_steps_back_costs_a_settle_time_and_no_message(tmp_path: Path) -> None:
    wanted = write(tmp_path, 30, times=[*range(500, 515), *range(400, 415)])
    assert read(tmp_path)[1] == wanted


def test_a_build_of_a_log_leaves_older_frames_behind_its_end_to_nobody(tmp_path: Path) -> None:
    """They may be its own: no end of the log for who takes them, but an error, or passed over and not proven."""
    older = write(tmp_path, 30, times=list(range(100, 130)))
    with CommitLogWriter(tmp_path, SEGMENT_SIZE) as writer:
        wanted = [writer.append(FrameSpec("T", b"y" * 77, {"KEYS": "n"}, store_timestamp=at)) for at in range(500, 510)]
        end = writer.max_offset
    with pytest.raises(CorruptDataError, match=f"offset {end}"):
        read(tmp_path, take_older=True)
    _, offsets = read(tmp_path, skip_corrupt=True, take_older=True)
    assert offsets == wanted + [at for at in older if at > end]


def test_zeros_before_intact_frames_are_no_end_of_a_build(tmp_path: Path) -> None:
    wanted = write(tmp_path, 30)
    patch(tmp_path / f"{0:020d}", wanted[0], bytes(wanted[1]))
    with pytest.raises(CorruptDataError, match="offset 0 "):
        read(tmp_path, take_older=True)
    assert read(tmp_path, skip_corrupt=True, take_older=True)[1] == wanted[1:]


def test_half_a_frame_before_intact_frames_is_no_end_of_a_build(tmp_path: Path) -> None:
    """Its magic is not there yet, as while a broker writes it; but frames stand behind it."""
    wanted = write(tmp_path, 30)
    patch(tmp_path / f"{0:020d}", wanted[17] + 4, bytes(4))
    with pytest.raises(CorruptDataError, match=f"offset {wanted[17]} "):
        read(tmp_path, take_older=True)
    log, offsets = read(tmp_path, skip_corrupt=True, take_older=True)
    assert offsets == wanted[:17] + wanted[18:]
    assert log.unreadable is None
