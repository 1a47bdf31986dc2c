"""Workers: threads that answer questions for an event loop, as few as keep up with them.

Questions are short and mostly Python: two threads that run at the same time spend more on handing the interpreter to
each other than on answers, and so do a worker and the event loop. So one thread answers all that has come in one turn
of the loop, and the loop is told when all of it is answered. A second thread helps when the oldest question has waited:
then the first is held up by a disk or a long walk; what it has answered by then is fetched.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

_LOOK_SECONDS = 0.02
#: Who has waited longer is told so; nobody waits for an answer then.
PATIENCE_SECONDS = 5.0


class TooManyError(Exception):
    """As many wait as may, or this one has waited too long."""


class StoppedError(Exception):
    """No questions are answered any more."""


@dataclass(slots=True)
class _Question:
    call: Callable[[], Any]
    future: asyncio.Future[Any]
    asked: float


class Workers:
    """At most ``threads_max`` threads and ``waiting_max`` questions that wait.

    All methods but ``close`` are the event loop's.
    """

    def __init__(self, threads_max: int, waiting_max: int) -> None:
        self._threads_max, self._waiting_max = threads_max, waiting_max
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: deque[_Question] = deque()
        self._done: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        self._is_starting = False
        self._lock = threading.Lock()
        self._active = 0
        self._parked: list[threading.Lock] = []
        self._threads: list[threading.Thread] = []
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        return f"Workers({self._active} of {self._threads_max} work, {len(self._waiting)} questions wait)"

    async def ask(self, call: Callable[[], Any]) -> Any:
        """What ``call`` returns or raises in a worker; TooManyError, StoppedError."""
        if self._is_closed:
            raise StoppedError
        if len(self._waiting) >= self._waiting_max:
            raise TooManyError
        loop = self._loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._waiting.append(_Question(call, future, time.monotonic()))
        with self._lock:
            is_idle = self._active == 0
        if is_idle and not self._is_starting:
            self._is_starting = True
            loop.call_soon(self._start, loop)
        return await future

    def stop(self) -> None:
        """Questions that wait or are still to come are not asked; each thread ends behind the one that it is at."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        while self._waiting:
            with suppress(IndexError):  # a thread has taken it
                self._done.append((self._waiting.popleft().future, None, StoppedError()))
        self._deliver()
        with self._lock:
            parked, self._parked = self._parked, []
        for latch in parked:
            latch.release()

    def close(self, seconds: float) -> int:
        """Wait so long for the threads of stopped workers, in any thread: how many are left, which hold up nothing."""
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(end - time.monotonic(), 0))
        return sum(thread.is_alive() for thread in self._threads)

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_starting = False
        if not self._is_closed:
            self._activate()
            if self._timer is None:
                self._timer = loop.call_later(_LOOK_SECONDS, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._deliver()
        with self._lock:
            active = self._active
        self._timer = None
        if active == 0 or self._is_closed:
            return
        with suppress(IndexError):  # another thread empties it
            if time.monotonic() - self._waiting[0].asked >= _LOOK_SECONDS and active < self._threads_max:
                self._activate()
        self._timer = loop.call_later(_LOOK_SECONDS, self._look, loop)

    def _activate(self) -> None:
        with self._lock:
            self._active += 1
            latch = self._parked.pop() if self._parked else None
        if latch is not None:
            latch.release()
        else:
            thread = threading.Thread(target=self._work, name=f"query-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self) -> None:
        latch = threading.Lock()
        latch.acquire()
        while True:
            if self._is_over():
                self._tell()
                return
            try:
                question = self._waiting.popleft()
            except IndexError:
                self._tell()
                with self._lock:
                    # Whoever asks looks at the number of the active behind its question, and ``stop`` at the parked
                    # behind its word, both under the same lock.
                    if self._waiting or self._is_over():
                        continue
                    self._active -= 1
                    self._parked.append(latch)
                latch.acquire()
                continue
            self._answer(question)

    def _is_over(self) -> bool:
        return self._is_closed

    def _answer(self, question: _Question) -> None:
        answer, error = None, None
        if question.future.cancelled():
            return
        try:
            if time.monotonic() - question.asked > PATIENCE_SECONDS:
                raise TooManyError
            answer = question.call()
        except BaseException as raised:  # noqa: BLE001 - it is raised again where the question came from
            error = raised
        self._done.append((question.future, answer, error))

    def _tell(self) -> None:
        if self._done and self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        while self._done:
            future, answer, error = self._done.popleft()
            if future.done():
                continue
            if error is None:
                future.set_result(answer)
            else:
                future.set_exception(error)
