"""Queries: questions to the data directory, bounded in number and in patience, answered in other threads.

Every outlet that answers questions has one of its own, so that none waits behind the clients of another.

Questions are short and mostly Python: two threads that run at the same time spend more on handing the interpreter to
each other than on answers. So one thread (of Workers) answers all that has come in one turn of the event loop, and the
loop is told when all of it is answered: what is open is then free for ``ask_compiled``. A second thread helps when the
oldest question has waited: then the first is held up by a disk or a long walk. A question that takes long while others
wait is asked again behind those that are short, and such questions never have all threads.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from indexd.commitlog.lookup import TimeUpError
from indexd.config import Config
from indexd.errors import IndexdError, UsageError
from indexd.query import Data, QueryIndex, open_index
from indexd.query.coverage import ABSENT, ABSENT_BEFORE, BEHIND_LAST
from indexd.query.source import NO_FOLDER
from indexd.serve.daemon_status import DaemonStatus
from indexd.storage.disk import Disk, WouldWaitError

T = TypeVar("T")
#: Phases in which what is on disk may be asked; while it is opened and recovered its files are changed.
ANSWERING = ("running", "stopping")
#: How a query proper ended, as the board counts it.
FOUND, EMPTY_COVERED, EMPTY_UNCOVERED, ERROR = "found", "empty_covered", "empty_uncovered", "error"
_COVERED = (ABSENT, ABSENT_BEFORE, BEHIND_LAST, NO_FOLDER)
_WAITING_PER_THREAD = 32
#: Who has waited longer is told so; nobody waits for an answer then.
PATIENCE_SECONDS = 5.0
# Who has had its first turn and was put back for shorter ones has more of it.
_LONG_PATIENCE = 4
# One that waits so long gets another thread.
_HELP_SECONDS = 0.02
# The first turn of a question while others wait, of its thread's own time: no load of the machine makes it a long one.
_TURN_SECONDS = 0.01
# Open files hold the space of what the broker removes.
_KEPT_SECONDS = 10.0
# What is answered at once, in the event loop's own thread, goes by what was seen of the files so long ago.
_LOOK_SECONDS = 0.1
#: A query that takes longer is ended: it holds a thread that others wait for. A walk keeps what it has found, and has
#: so much longer to say it.
QUERY_SECONDS, _SAY_SECONDS = 10.0, 2.0
# At a stop: one that no check reaches, since a disk does not answer, is left behind.
_CLOSE_SECONDS = 2.0


def result_of(count: int, why: str | None) -> str:
    """Found, nothing there, or nothing there as far as the index speaks for the log."""
    if count:
        return FOUND
    return EMPTY_COVERED if why in _COVERED else EMPTY_UNCOVERED


class NotAnsweredError(Exception):
    """There is no answer now, and there may be one to whoever asks again. str(): why, one line without a hint."""


class NotOpenError(NotAnsweredError):
    """There is no index yet, or it is being recovered (``recovering``: the board's row of that)."""

    def __init__(self, detail: str, phase: str, recovering: Any = None, hint: str | None = None) -> None:
        super().__init__(detail)
        self.phase, self.recovering, self.hint = phase, recovering, hint


class CrowdedError(NotAnsweredError):
    """As many queries run and wait as may, or this one has waited too long."""


class StoppingError(NotAnsweredError):
    """The daemon stops."""

    def __init__(self) -> None:
        super().__init__("the daemon stops: ask again when it is back")


class TooLongError(NotAnsweredError, TimeUpError):
    """The query was ended after ``QUERY_SECONDS``."""

    def __init__(self) -> None:
        super().__init__(f"the query took longer than {QUERY_SECONDS:.0f} s, and was ended")


class TurnOverError(Exception):
    """A question has had its first turn, and others wait: it is asked again behind the short ones."""


class _Question(NamedTuple):
    call: Callable[[], Any]
    future: asyncio.Future[Any]
    asked: float
    #: It has had its first turn.
    is_long: bool = False


class Workers:
    """At most ``threads_max`` threads and ``waiting_max`` questions that wait; ``close`` alone is for any thread."""

    def __init__(self, threads_max: int, waiting_max: int) -> None:
        self._threads_max, self._waiting_max = threads_max, waiting_max
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: deque[_Question] = deque()
        self._long: deque[_Question] = deque()
        self._long_working, self._long_max = 0, max(threads_max - 1, 1)
        self._turn = threading.local()
        self._done: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        # How many threads work; the others wait for a permit to.
        self._lock, self._permits, self._working = threading.Lock(), threading.Semaphore(0), 0
        self._threads: list[threading.Thread] = []
        self._timer: asyncio.Handle | None = None
        self._is_closed = False

    async def ask(self, call: Callable[[], Any]) -> Any:
        """What ``call`` returns or raises in a worker; CrowdedError, StoppingError."""
        if self._is_closed:
            raise StoppingError
        if len(self._waiting) + len(self._long) >= self._waiting_max:
            raise CrowdedError(f"{self._threads_max} queries run, and as many wait as may")
        loop = self._loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._waiting.append(_Question(call, future, time.monotonic()))
        if self._timer is None or self._working == 0:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = loop.call_soon(self._look, loop)
        return await future

    def check_turn(self) -> None:
        """Called again and again by a question while it is answered; TurnOverError when its first turn is over."""
        if self._waiting and time.thread_time() > getattr(self._turn, "end", math.inf):
            raise TurnOverError

    def stop(self) -> None:
        """Questions that wait or are still to come are not asked; each thread ends behind the one that it is at."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._refuse(StoppingError())
        self._permits.release(len(self._threads) + 1)

    def close(self, seconds: float) -> int:
        """Wait so long for the threads of stopped workers: how many are left, which hold up nothing."""
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(end - time.monotonic(), 0))
        return sum(thread.is_alive() for thread in self._threads)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        # Once all has come that one turn of the loop brings, and again while some thread works.
        self._timer = None
        self._deliver()
        with suppress(IndexError):  # a thread empties it
            lane = self._waiting if self._waiting or not self._may_be_long() else self._long
            has_waited = time.monotonic() - lane[0].asked >= _HELP_SECONDS
            if self._working == 0 or (has_waited and self._working < self._threads_max):
                self._activate()
        if self._working and not self._is_closed:
            self._timer = loop.call_later(_HELP_SECONDS, self._look, loop)

    def _activate(self) -> None:
        with self._lock:
            self._working += 1
            is_there = self._working <= len(self._threads)
        if is_there:
            self._permits.release()
            return
        thread = threading.Thread(target=self._work, name=f"query-{len(self._threads)}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no memory for a thread: those that are there go on, else nobody waits for nothing
            with self._lock:
                self._working -= 1
            if self._working == 0:
                self._refuse(CrowdedError("there is no memory for a thread"))
        else:
            self._threads.append(thread)

    def _refuse(self, error: NotAnsweredError) -> None:
        for lane in (self._waiting, self._long):
            with suppress(IndexError):
                while True:
                    self._done.append((lane.popleft().future, None, error))
        self._deliver()

    def _work(self) -> None:
        while not self._is_closed:
            while (question := self._next()) is not None:
                self._answer(question)
                with self._lock:
                    self._long_working -= question.is_long
            self._tell()
            with self._lock:
                # Whoever asks looks at the number of those that work behind its question.
                if self._waiting or self._may_be_long():
                    continue
                self._working -= 1
            self._permits.acquire()
        self._tell()

    def _next(self) -> _Question | None:
        with suppress(IndexError):
            return self._waiting.popleft()
        with self._lock:
            if self._is_closed or not self._may_be_long():
                return None
            self._long_working += 1
            return self._long.popleft()

    def _may_be_long(self) -> bool:
        return bool(self._long) and self._long_working < self._long_max

    def _answer(self, question: _Question) -> None:
        if question.future.cancelled():
            return
        answer, error = None, None
        self._turn.end = math.inf if question.is_long else time.thread_time() + _TURN_SECONDS
        try:
            if time.monotonic() - question.asked > PATIENCE_SECONDS * (_LONG_PATIENCE if question.is_long else 1):
                raise CrowdedError("it has waited too long for its turn")
            answer = question.call()
        except TurnOverError:
            self._long.append(question._replace(asked=time.monotonic(), is_long=True))
            return
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
            if not future.done() and error is not None:
                future.set_exception(error)
            elif not future.done():
                future.set_result(answer)


class _Opened(NamedTuple):
    data: Data
    disk: Disk
    used: float = 0.0
    #: For ``ask_compiled``; None until there is compiled code.
    compiled: Any = None


class Queries:
    """One for a server, of at most ``threads`` queries at once; its methods belong to the server's event loop.

    ``load_compiled`` is called in a thread of its own at the first question, and returns what makes of an open index
    that which compiled code reads (``remoting.key_queries.IndexTables``), or None; its ``prepare`` opens what it needs.
    """

    def __init__(
        self,
        config: Config,
        board: DaemonStatus,
        threads: int,
        load_compiled: Callable[[], Callable[[QueryIndex], Any] | None] | None = None,
    ) -> None:
        self.config = config
        self.board = board
        self._workers = Workers(threads, threads * _WAITING_PER_THREAD)
        #: Open and not in use, the last used at the end, with when that was.
        self._idle: list[_Opened] = []
        # It may have to compile: nobody waits for that.
        self._load_compiled = load_compiled
        self._compiled_of: Callable[[QueryIndex], Any] | None = None
        self._tidying: asyncio.Task[None] | None = None
        self._is_stopping = False

    async def ask(self, question: Callable[[Data], T]) -> T:
        """What ``question`` returns, called with an open data directory in another thread.

        NotAnsweredError, or IndexdError of every kind that a query raises.
        """
        self._check_phase()
        try:
            answer: T = await self._workers.ask(lambda: self._call(question))
        except IndexdError:
            self._check_phase()  # it may be being opened again
            raise
        self._check_phase()
        if self._tidying is None or self._tidying.done():
            self._tidying = asyncio.create_task(self._tidy())
        return answer

    def ask_compiled(self, question: Callable[[Any], T]) -> T:
        """What ``question`` returns, called here and now with what a worker has prepared; else WouldWaitError.

        It may not take long, and the disk is not waited for. It is not counted.
        """
        if self._is_stopping or self.board.phase not in ANSWERING:
            raise WouldWaitError
        try:
            opened = self._idle.pop()
        except IndexError:
            raise WouldWaitError from None
        opened.disk.nonblocking, opened.data.index.look_seconds = True, _LOOK_SECONDS
        try:
            if opened.compiled is None:
                raise WouldWaitError
            return question(opened.compiled)
        except IndexdError as error:  # it may be gone for who looks anew
            raise WouldWaitError from error
        finally:
            opened.disk.nonblocking, opened.data.index.look_seconds = False, 0.0
            self._idle.append(opened)

    async def query(self, question: Callable[[Data], T], result: Callable[[T], str]) -> T:
        """The same for a query proper: timed, and counted on the board by what ``result`` says of the answer.

        Of what was raised only failures are counted: not the caller's faults, and not what only came at a bad time.
        """
        began = time.perf_counter()
        try:
            answer = await self.ask(question)
        except (NotAnsweredError, IndexdError) as error:
            if not isinstance(error, UsageError | CrowdedError | StoppingError):
                self.count(ERROR, began)
            raise
        self.count(result(answer), began)
        return answer

    def count(self, kind: str, began: float, queries: int = 1) -> None:
        """So many queries ended like this; each of those that were answered together took its share of the time."""
        self.board.queries[kind] += queries
        self.board.query_seconds.observe((time.perf_counter() - began) / queries, queries)

    def stop(self) -> None:
        """What waits and what comes is refused from now on, and what runs ends where it next looks at a message."""
        self._is_stopping = True
        if self._tidying is not None:
            self._tidying.cancel()
        self._workers.stop()

    def close(self) -> int:
        """Close all files behind a ``stop``, in any thread; how many queries are left behind after two seconds."""
        left = self._workers.close(_CLOSE_SECONDS)
        while self._idle:
            self._idle.pop().data.close()
        return left

    def _check_phase(self) -> None:
        phase = self.board.phase
        if phase not in ANSWERING:
            raise NotOpenError(f"the index is {phase}", phase, self.board.row().get("recovering"))

    def _call(self, question: Callable[[Data], T]) -> T:
        try:
            opened = self._idle.pop()
        except IndexError:
            opened = self._open()
        end = time.monotonic() + QUERY_SECONDS

        def check() -> None:
            nonlocal end
            self._workers.check_turn()
            if self._is_stopping:
                raise StoppingError
            if time.monotonic() > end:
                end += _SAY_SECONDS
                raise TooLongError

        opened.data.set_check(check)
        try:
            answer = question(opened.data)
            if self._compiled_of is not None:
                opened = self._prepare(opened, self._compiled_of)
        except BaseException:
            opened.data.close()
            raise
        self._idle.append(opened._replace(used=time.monotonic()))
        return answer

    def _prepare(self, opened: _Opened, compiled_of: Callable[[QueryIndex], Any]) -> _Opened:
        # Opens here, where the disk may be waited for, what ``ask_compiled`` needs to be open.
        opened.data.set_check(lambda: None)
        index = opened.data.index
        compiled = opened.compiled or compiled_of(index)
        index.look_seconds = _LOOK_SECONDS  # the question has just looked
        with suppress(IndexdError):
            compiled.prepare()
        index.look_seconds = 0.0
        return opened._replace(compiled=compiled)

    def _open(self) -> _Opened:
        load_compiled, self._load_compiled = self._load_compiled, None
        if load_compiled is not None:
            threading.Thread(target=self._compile, args=(load_compiled,), name="query-compile", daemon=True).start()
        disk = Disk()
        try:
            return _Opened(Data(open_index(disk, self.config)), disk)
        except UsageError as error:  # there is nothing yet; no caller can help that
            raise NotOpenError(str(error.args[0]), self.board.phase, hint=error.hint) from error

    def _compile(self, load_compiled: Callable[[], Callable[[QueryIndex], Any] | None]) -> None:
        self._compiled_of = load_compiled()

    async def _tidy(self) -> None:
        # Files are closed in a worker: the last one to close a file that was removed waits until it is gone.
        while self._idle:
            await asyncio.sleep(_KEPT_SECONDS)
            with suppress(NotAnsweredError):
                await self._workers.ask(self._drop)

    def _drop(self) -> None:
        with suppress(IndexError):  # an outlet's other thread takes one
            while time.monotonic() - self._idle[0].used >= _KEPT_SECONDS:
                self._idle.pop(0).data.close()
