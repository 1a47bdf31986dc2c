"""Workers: questions are answered by as few threads as keep up, within their bounds."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest

from indexd.serve import queries as query_workers
from indexd.serve.queries import CrowdedError, StoppingError, Workers

Held = tuple[Workers, asyncio.Task[bool], threading.Event]


@asynccontextmanager
async def working(threads_max: int, waiting_max: int) -> AsyncIterator[Workers]:
    workers = Workers(threads_max, waiting_max)
    yield workers
    workers.stop()
    assert await asyncio.to_thread(workers.close, 10) == 0


@asynccontextmanager
async def held(
    threads_max: int, waiting_max: int
) -> AsyncIterator[tuple[Workers, asyncio.Task[bool], threading.Event]]:
    """Their first thread is busy until the gate is set."""
    begun, gate = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    async with working(threads_max, waiting_max) as workers:

        def wait() -> bool:
            loop.call_soon_threadsafe(begun.set)
            return gate.wait(20)

        first = asyncio.create_task(workers.ask(wait))
        await begun.wait()
        try:
            yield workers, first, gate
        finally:
            gate.set()


async def ask_soon(workers: Workers, call: Callable[[], object], count: int = 1) -> list[asyncio.Task[object]]:
    """Questions that wait by now."""
    tasks = [asyncio.create_task(workers.ask(call)) for _ in range(count)]
    await asyncio.sleep(0)
    return tasks


async def test_answers_and_errors_come_back_to_who_asked() -> None:
    def fail(number: int) -> int:
        raise KeyError(number)

    async with working(3, 100) as workers:
        answers = await asyncio.gather(*(workers.ask(partial(pow, n, 2)) for n in range(50)))
        assert answers == [n * n for n in range(50)]
        errors = await asyncio.gather(*(workers.ask(partial(fail, n)) for n in range(9)), return_exceptions=True)
        assert [error.args for error in errors if isinstance(error, KeyError)] == [(n,) for n in range(9)]


async def test_a_bounded_waiting_room() -> None:
    async with held(1, 5) as (workers, first, gate):
        waiting = await ask_soon(workers, lambda: 7, 5)
        with pytest.raises(CrowdedError):
            await workers.ask(lambda: 8)
        gate.set()
        assert await first is True
        assert await asyncio.gather(*waiting) == [7] * 5
        assert await workers.ask(lambda: 9) == 9


async def test_bounded_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query_workers, "PATIENCE_SECONDS", -1.0)
    asked: list[int] = []
    async with working(1, 5) as workers:
        with pytest.raises(CrowdedError):
            await workers.ask(lambda: asked.append(1))
    assert asked == []


async def test_who_has_gone_is_not_answered() -> None:
    asked: list[int] = []
    async with held(1, 5) as (workers, first, gate):
        (gone,) = await ask_soon(workers, lambda: asked.append(1))
        gone.cancel()
        await asyncio.sleep(0)
        gate.set()
        await first
        assert await workers.ask(lambda: 1) == 1
    assert asked == []


async def test_a_stop_refuses_at_once_and_leaves_behind_what_does_not_end() -> None:
    async with held(1, 5) as (workers, first, gate):
        waiting = await ask_soon(workers, lambda: 1, 5)
        workers.stop()
        answers = await asyncio.wait_for(asyncio.gather(first, *waiting, return_exceptions=True), 5)
        assert [type(answer) for answer in answers] == [StoppingError] * 6
        with pytest.raises(StoppingError):
            await workers.ask(lambda: 1)
        assert await asyncio.to_thread(workers.close, 0.3) == 1
        gate.set()
        assert await asyncio.to_thread(workers.close, 10) == 0


async def test_a_storm_of_questions_from_pauses_of_all_lengths() -> None:
    async with working(3, 10_000) as workers:
        total = 0
        for number in range(400):
            total += sum(await asyncio.gather(*(workers.ask(lambda: 1) for _ in range(number % 7))))
            await asyncio.sleep(0.0005 * (number % 3))
    assert total == sum(number % 7 for number in range(400))


@pytest.mark.parametrize("threads_max", [1, 2, 4])
async def test_long_questions_take_turns_with_short_ones(threads_max: int) -> None:
    answered, lock, under_way, most = threading.Event(), threading.Lock(), 0, 0
    async with working(threads_max, 100) as workers:

        def long() -> bool:
            nonlocal under_way, most
            with lock:
                under_way += 1
                most = max(most, under_way)
            try:
                while not answered.wait(0.001):
                    workers.check_turn()
            finally:
                with lock:
                    under_way -= 1
            return True

        walks = [asyncio.create_task(workers.ask(long)) for _ in range(5)]
        try:
            for _ in range(3):  # in the first turn of a long one, and when each has had its own
                assert await asyncio.wait_for(workers.ask(lambda: 7), 15) == 7
            assert not any(walk.done() for walk in walks)
        finally:
            answered.set()
        assert all(await asyncio.gather(*walks))
    assert 1 < most <= max(threads_max, 2)


async def test_an_answer_does_not_wait_for_the_long_question_behind_it() -> None:
    async with held(2, 5) as (workers, first, gate):
        ended = threading.Event()

        def long() -> None:
            while not ended.wait(0.001):
                workers.check_turn()

        (walk,) = await ask_soon(workers, long)
        gate.set()
        assert await asyncio.wait_for(first, 10) is True
        assert not walk.done()
        ended.set()
        await walk
