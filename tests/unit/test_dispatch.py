"""The queue is bounded and drops nothing; drains are on time, or at once when it is full; the tail loop waits."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from indexd.commitlog.batcher import DispatchBatch, TopicTable, make_columns, trimmed
from indexd.commitlog.format import Corrupt, NotYetWritten
from indexd.commitlog.reader import Skipped
from indexd.config import ReaderConfig
from indexd.dispatch.reput import DispatchQueue, Item, ReputState, drain, poll_patiently, reput


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
        seen += await queue.drain()
    await producer
    assert seen == items


async def test_bytes_are_bounded_too_and_a_huge_batch_passes_alone() -> None:
    queue = DispatchQueue(rows_max=1 << 30, bytes_max=batch(0).size + 1)
    await queue.put(batch(0))
    waiting = asyncio.create_task(queue.put(batch(10, rows=1000)))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    assert len(await queue.drain()) == 1
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
    assert [type(item) for item in await queue.drain()] == [DispatchBatch, Skipped, DispatchBatch]
    assert events == [Skipped(10, 20, "expired"), Corrupt(20, "bad", None), None]
    assert time.monotonic() - started >= 1.0, "a corrupt log is read again after a pause, not at once"
    assert state.corrupt is None


async def test_a_stop_does_not_wait_for_a_full_queue() -> None:
    queue, state, stop = DispatchQueue(10, 1 << 20), ReputState(), asyncio.Event()

    async def poll() -> DispatchBatch:
        return batch(0)

    task = asyncio.create_task(reput(poll, queue, lambda: 60.0, state, stop, lambda event: None, no_problem))
    await asyncio.sleep(0.05)
    stop.set()
    await asyncio.wait_for(task, 1.0)
    assert queue.waiting.rows == 10


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
