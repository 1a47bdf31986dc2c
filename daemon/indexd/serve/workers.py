"""Workers: threads that answer questions for an event loop, as few as keep up with them.

Questions are short and mostly Python: two threads that run at the same time spend more on handing the interpreter to
each other than on answers, and so do a worker and the event loop. So one thread answers all that has come in one turn
of the loop, and the loop is told when all of it is answered. A second thread helps when the oldest question has waited:
then the first is held up by a disk or a long walk; what it has answered by then is fetched.

Long questions take turns with short ones: one that has had its first turn while others wait begins anew behind them
(``give_way``), and from then on answers those that come meanwhile before it goes on.
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
# A long question has waited for others that came later: it may wait longer.
_LONG_PATIENCE = 4
_TURN_SECONDS = 0.01
# So many of them at once: more only take the interpreter from each other, and from the event loop.
_LONG_AT_ONCE = 2


class TurnOverError(Exception):
    """A question has had its first turn: it is asked again behind those that have had none."""


class TooManyError(Exception):
    """As many wait as may, or this one has waited too long."""


class StoppedError(Exception):
    """No questions are answered any more."""


@dataclass(slots=True)
class _Question:
    call: Callable[[], Any]
    future: asyncio.Future[Any]
    asked: float
    #: It has had its first turn.
    is_long: bool = False
    #: When it gives way: the thread's own time at the end of its first turn, None until it has looked; then the clock.
    gives_way: float | None = None


class Workers:
    """At most ``threads_max`` threads and ``waiting_max`` questions that wait.

    All methods but ``close`` are the event loop's.
    """

    def __init__(self, threads_max: int, waiting_max: int) -> None:
        self._threads_max, self._waiting_max = threads_max, waiting_max
        self._loop: asyncio.AbstractEventLoop | None = None
        #: Those that have had no turn, and those that have had one.
        self._waiting: deque[_Question] = deque()
        self._long: deque[_Question] = deque()
        self._long_running = 0
        #: What a thread works at, the last one answered within those before it.
        self._work_of = threading.local()
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
        if len(self._waiting) + len(self._long) >= self._waiting_max:
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

    def give_way(self) -> float:
        """Called again and again by a question while it is answered; the seconds for which it was held up by that.

        Those that wait for their first turn are answered now, as many as wait; but one that is in its own first turn
        ends by TurnOverError when that is over.
        """
        running: list[_Question] = getattr(self._work_of, "questions", [])
        if not (running and self._waiting) and len(running) < 2:
            return 0.0
        question = running[-1]
        if not question.is_long:
            # By the thread's own time: a machine that has much to do makes no short question a long one.
            used = time.thread_time()
            if question.gives_way is None:
                question.gives_way = used + _TURN_SECONDS
            if used >= question.gives_way:
                raise TurnOverError
            return 0.0
        now = time.monotonic()
        if question.gives_way is not None and now < question.gives_way:
            return 0.0
        for _ in range(len(self._waiting)):
            with suppress(IndexError):  # another thread has taken it
                self._answer(self._waiting.popleft())
        self._tell()
        ended = time.monotonic()
        question.gives_way = 2 * ended - now  # as long as it has waited it goes on
        return ended - now

    def stop(self) -> None:
        """Questions that wait or are still to come are not asked; each thread ends behind the one that it is at."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        while self._waiting or self._long:
            with suppress(IndexError), self._lock:  # a thread has taken it
                lane = self._waiting or self._long
                self._done.append((lane.popleft().future, None, StoppedError()))
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
            lane = self._waiting or self._long
            if time.monotonic() - lane[0].asked >= _LOOK_SECONDS and active < self._threads_max:
                self._activate()
        self._timer = loop.call_later(_LOOK_SECONDS, self._look, loop)

    def _activate(self) -> None:
        with self._lock:
            self._active += 1
            latch = self._parked.pop() if self._parked else None
        if latch is not None:
            latch.release()
            return
        thread = threading.Thread(target=self._work, name=f"query-{len(self._threads)}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no memory for a thread
            self._has_no_thread()
        else:
            self._threads.append(thread)

    def _has_no_thread(self) -> None:
        # Those that are there go on; where there is none, nobody waits for nothing.
        with self._lock:
            self._active -= 1
            is_idle = self._active == 0
        if is_idle:
            while self._waiting:
                self._done.append((self._waiting.popleft().future, None, TooManyError()))
            self._deliver()

    def _work(self) -> None:
        latch = threading.Lock()
        latch.acquire()
        while True:
            if self._is_over():
                self._tell()
                return
            question = self._next()
            if question is None:
                self._tell()
                with self._lock:
                    # Whoever asks looks at the number of the active behind its question, and ``stop`` at the parked
                    # behind its word, both under the same lock.
                    if self._waiting or self._may_be_long() or self._is_over():
                        continue
                    self._active -= 1
                    self._parked.append(latch)
                latch.acquire()
                continue
            was_long = question.is_long
            self._answer(question)
            with self._lock:
                self._long_running -= was_long

    def _next(self) -> _Question | None:
        with suppress(IndexError):
            return self._waiting.popleft()
        with self._lock:
            if not self._may_be_long():
                return None
            self._long_running += 1
            return self._long.popleft()

    def _may_be_long(self) -> bool:
        # Under the lock, as all that takes one out of the lane.
        return bool(self._long) and self._long_running < _LONG_AT_ONCE

    def _is_over(self) -> bool:
        return self._is_closed

    def _answer(self, question: _Question) -> None:
        answer, error = None, None
        if question.future.cancelled():
            return
        running = self._work_of.__dict__.setdefault("questions", [])
        running.append(question)
        try:
            patience = PATIENCE_SECONDS * (_LONG_PATIENCE if question.is_long else 1)
            if time.monotonic() - question.asked > patience:
                raise TooManyError
            answer = question.call()
        except TurnOverError:
            question.is_long, question.asked, question.gives_way = True, time.monotonic(), None
            self._long.append(question)
            return
        except BaseException as raised:  # noqa: BLE001 - it is raised again where the question came from
            error = raised
        finally:
            running.pop()
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
