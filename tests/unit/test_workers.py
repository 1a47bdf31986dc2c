"""Workers: questions are answered by as few threads as keep up, within their bounds."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from indexd.serve import queries as query_workers
from indexd.serve.queries import CrowdedError, StoppingError, Workers

MakeWorkers = Callable[[int, int], Workers]


@pytest.fixture
def make_workers() -> Iterator[MakeWorkers]:
    made: list[Workers] = []

    def make(threads_max: int, waiting_max: int) -> Workers:
        made.append(Workers(threads_max, waiting_max))
        return made[-1]

    yield make
    for workers in made:
        workers.stop()
        assert workers.close(10) == 0


async def test_answers_and_errors_come_back_to_who_asked(make_workers: MakeWorkers) -> None:
    workers = make_workers(3, 100)

    def fail(number: int) -> int:
        raise KeyError(number)

    answers = await asyncio.gather(*(workers.ask(lambda n=n: n * n) for n in range(50)))
    assert answers == [n * n for n in range(50)]
    errors = await asyncio.gather(*(workers.ask(lambda n=n: fail(n)) for n in range(9)), return_exceptions=True)
    assert [error.args for error in errors if isinstance(error, KeyError)] == [(n,) for n in range(9)]


async def test_others_help_when_it_is_held_up_and_no_more_than_may(make_workers: MakeWorkers) -> None:
    workers = make_workers(3, 100)
    lock, under_way, most = threading.Lock(), 0, 0

    def slow() -> None:
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        time.sleep(0.3)
        with lock:
            under_way -= 1

    began = time.monotonic()
    await asyncio.gather(*(workers.ask(slow) for _ in range(9)))
    assert most == 3
    assert time.monotonic() - began < 9 * 0.3


async def test_a_bounded_waiting_room(make_workers: MakeWorkers) -> None:
    workers = make_workers(1, 5)
    gate = threading.Event()
    first = asyncio.create_task(workers.ask(lambda: gate.wait(10)))
    await asyncio.sleep(0.1)
    waiting = [asyncio.create_task(workers.ask(lambda: 7)) for _ in range(5)]
    await asyncio.sleep(0)
    with pytest.raises(CrowdedError):
        await workers.ask(lambda: 8)
    gate.set()
    assert await first is True
    assert await asyncio.gather(*waiting) == [7] * 5
    assert await workers.ask(lambda: 9) == 9


async def test_bounded_patience(monkeypatch: pytest.MonkeyPatch, make_workers: MakeWorkers) -> None:
    monkeypatch.setattr(query_workers, "PATIENCE_SECONDS", 0.2)
    workers = make_workers(1, 5)
    asked: list[int] = []
    first = asyncio.create_task(workers.ask(lambda: time.sleep(0.5)))
    await asyncio.sleep(0.1)
    with pytest.raises(CrowdedError):
        await workers.ask(lambda: asked.append(1))
    await first
    assert asked == []


async def test_who_has_gone_is_not_answered(make_workers: MakeWorkers) -> None:
    workers = make_workers(1, 5)
    gate, asked = threading.Event(), list[int]()
    first = asyncio.create_task(workers.ask(lambda: gate.wait(10)))
    await asyncio.sleep(0.1)
    gone = asyncio.create_task(workers.ask(lambda: asked.append(1)))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.sleep(0)
    gate.set()
    await first
    assert await workers.ask(lambda: 1) == 1
    assert asked == []


async def test_a_stop_refuses_at_once_and_leaves_behind_what_does_not_end(make_workers: MakeWorkers) -> None:
    workers = make_workers(1, 5)
    gate = threading.Event()
    under_way = asyncio.create_task(workers.ask(lambda: gate.wait(20)))
    await asyncio.sleep(0.1)
    waiting = [asyncio.create_task(workers.ask(lambda: 1)) for _ in range(5)]
    await asyncio.sleep(0)
    workers.stop()
    answers = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 1)
    assert [type(answer) for answer in answers] == [StoppingError] * 5
    began = time.monotonic()
    assert await asyncio.to_thread(workers.close, 0.3) == 1
    assert time.monotonic() - began < 2
    gate.set()
    assert await under_way is True
    assert workers.close(10) == 0


def test_a_storm_of_questions_from_pauses_of_all_lengths(make_workers: MakeWorkers) -> None:
    async def storm() -> int:
        workers = make_workers(3, 10_000)
        total = 0
        for number in range(400):
            total += sum(await asyncio.gather(*(workers.ask(lambda: 1) for _ in range(number % 7))))
            await asyncio.sleep(0.0005 * (number % 3))
        return total

    with ThreadPoolExecutor(2) as pool:
        totals = list(pool.map(lambda _: asyncio.run(asyncio.wait_for(storm(), 60)), range(2)))
    assert totals == [sum(number % 7 for number in range(400))] * 2


async def test_long_questions_take_turns_with_short_ones(make_workers: MakeWorkers) -> None:
    workers = make_workers(2, 100)
    answered = threading.Event()

    def long() -> bool:
        end = time.monotonic() + 20
        while not answered.is_set() and time.monotonic() < end:
            workers.check_turn()
        return answered.is_set()

    try:
        walks = [asyncio.create_task(workers.ask(long)) for _ in range(5)]
        for _ in range(3):  # in the first turn of a long one, and when each has had its own
            assert await asyncio.wait_for(workers.ask(lambda: 7), 15) == 7
        assert not any(walk.done() for walk in walks)
        answered.set()
        assert all(await asyncio.gather(*walks))
    finally:
        answered.set()


async def test_no_thread_can_be_had(monkeypatch: pytest.MonkeyPatch, make_workers: MakeWorkers) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    workers = make_workers(2, 5)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(CrowdedError):
            await asyncio.wait_for(workers.ask(lambda: 1), 10)
    assert await workers.ask(lambda: 2) == 2
