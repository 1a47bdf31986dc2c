"""Queries: questions to the data directory, bounded in number and in patience, answered in other threads.

Every outlet that answers questions has one of its own, so that none waits behind the clients of another.

Questions are short and mostly Python: two threads that run at the same time spend more on handing the interpreter to
each other than on answers. So one thread answers all that comes, and the loop is told when all of it is answered: what
is open is then free for ``ask_compiled``. A question that takes long while others wait, on a walk or for a disk, is
asked again in one of the other threads.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

from indexd.commitlog.lookup import TimeUpError
from indexd.config import Config
from indexd.errors import IndexdError, UsageError
from indexd.query import Data, QueryIndex, open_index
from indexd.query.source import ABSENT, ABSENT_BEFORE, BEHIND_LAST, NO_FOLDER, NO_QUEUE
from indexd.serve.daemon_status import DaemonStatus
from indexd.storage.disk import Disk, WouldWaitError

T = TypeVar("T")
#: Phases in which what is on disk may be asked; while it is opened and recovered its files are changed.
ANSWERING = ("running", "stopping")
#: How a query proper ended, as the board counts it.
FOUND, EMPTY_COVERED, EMPTY_UNCOVERED, ERROR = "found", "empty_covered", "empty_uncovered", "error"
_COVERED = (ABSENT, ABSENT_BEFORE, BEHIND_LAST, NO_FOLDER, NO_QUEUE)
_WAITING_PER_THREAD = 32
#: Who has waited longer is told so: nobody waits for an answer then. Behind a first turn there is more patience.
PATIENCE_SECONDS, _LONG_PATIENCE_SECONDS = 5.0, 20.0
# The first turn of a question while others wait.
_TURN_SECONDS = 0.02
# A walk that is ended keeps what it has found, and has so much longer to say it.
_SAY_SECONDS = 2.0
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
    """The query was ended after ``Queries.query_seconds``."""


class TurnOverError(Exception):
    """A question has had its first turn, and others wait: it is asked again behind the short ones."""


class _Question(NamedTuple):
    call: Callable[[], Any]
    future: asyncio.Future[Any]
    asked: float


class Workers:
    """A thread for first turns, and ``threads`` less one, but one at least, for what is long.

    ``waiting_max`` questions may wait. ``close`` alone is for any thread.
    """

    def __init__(self, threads: int, waiting_max: int) -> None:
        self._threads_max, self._waiting_max = max(threads, 2), waiting_max
        self._first: SimpleQueue[_Question | None] = SimpleQueue()
        self._long: SimpleQueue[_Question | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        #: Who waits for an answer.
        self._asked: set[asyncio.Future[Any]] = set()
        self._done: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        self._turn = threading.local()
        self._is_closed = False

    async def ask(self, call: Callable[[], Any]) -> Any:
        """What ``call`` returns or raises in a worker; CrowdedError, StoppingError."""
        if self._is_closed:
            raise StoppingError
        if self._first.qsize() + self._long.qsize() >= self._waiting_max:
            raise CrowdedError("as many queries wait as may")
        self._loop = asyncio.get_running_loop()
        while len(self._threads) < self._threads_max:
            number = len(self._threads)
            thread = threading.Thread(target=self._work, args=(number == 0,), name=f"query-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)
        future = self._loop.create_future()
        self._asked.add(future)
        future.add_done_callback(self._asked.discard)
        self._first.put(_Question(call, future, time.monotonic()))
        return await future

    def check_turn(self) -> None:
        """Called again and again by a question while it is answered; TurnOverError when its first turn is over."""
        if time.monotonic() > self._turn.end and (self._done or not self._first.empty()):
            raise TurnOverError

    def stop(self) -> None:
        """Who waits is refused, and whoever is still to come; each thread ends behind the question that it is at."""
        self._is_closed = True
        for future in self._asked:
            if not future.done():
                future.set_exception(StoppingError())
        for number in range(len(self._threads)):
            (self._long if number else self._first).put(None)

    def close(self, seconds: float) -> int:
        """Wait so long for the threads of stopped workers: how many are left, which hold up nothing."""
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(end - time.monotonic(), 0))
        return sum(thread.is_alive() for thread in self._threads)

    def _work(self, is_first: bool) -> None:
        questions = self._first if is_first else self._long
        while (question := questions.get()) is not None:
            if not self._is_closed and not question.future.done():
                self._answer(question, is_first)
            # The loop is told when all first turns are over: what is open is free then for ``ask_compiled``.
            if self._done and not (is_first and not questions.empty()):
                with suppress(RuntimeError):  # the loop has ended
                    self._loop.call_soon_threadsafe(self._deliver)

    def _answer(self, question: _Question, is_first: bool) -> None:
        answer, error, now = None, None, time.monotonic()
        self._turn.end = now + _TURN_SECONDS if is_first else math.inf
        try:
            if now - question.asked > (PATIENCE_SECONDS if is_first else _LONG_PATIENCE_SECONDS):
                raise CrowdedError("it has waited too long for its turn")
            answer = question.call()
        except TurnOverError:
            self._long.put(question)
            return
        except BaseException as raised:  # noqa: BLE001 - it is raised again where the question came from
            error = raised
        self._done.append((question.future, answer, error))

    def _deliver(self) -> None:
        while self._done:
            future, answer, error = self._done.popleft()
            if future.done():
                continue
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(answer)


@dataclass(slots=True)
class _Opened:
    data: Data
    disk: Disk
    #: When a question was last answered with it.
    used: float = 0.0
    #: For ``ask_compiled``; None until there is compiled code.
    compiled: Any = None


class Queries:
    """One for a server, of at most ``threads`` queries at once; its methods belong to the server's event loop.

    ``load_compiled`` is called in a thread of its own, and returns what makes of an open index
    that which compiled code reads (``remoting.key_queries.IndexTables``), or None; its ``prepare`` opens what it needs,
    and raises where that cannot be read so.
    """

    #: A query that takes longer is ended: it holds a thread that others wait for.
    query_seconds = 10.0
    #: Files that nobody asks are closed after so long: they hold the space of what the broker removes.
    kept_seconds = 10.0
    #: What is answered at once, in the event loop's own thread, goes by what was seen of the files so long ago.
    look_seconds = 0.1

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
        #: Open and not in use, the last used at the end.
        self._idle: list[_Opened] = []
        self._compiled_of: Callable[[QueryIndex], Any] | None = None
        self._tidying = asyncio.create_task(self._tidy())
        self._is_stopping = False
        if load_compiled is not None:  # it may have to compile: nobody waits for that
            threading.Thread(target=self._compile, args=(load_compiled,), name="query-compile", daemon=True).start()

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
        return answer

    def ask_compiled(self, question: Callable[[Any], T | None]) -> T | None:
        """What ``question`` returns, called here and now with what a worker has prepared.

        It may not take long, and the disk is not waited for. It is not counted. None where a worker has to be asked,
        which may wait, or says what is wrong.
        """
        if self._is_stopping or self.board.phase not in ANSWERING:
            return None
        try:
            opened = self._idle.pop()
        except IndexError:
            return None
        opened.disk.nonblocking, opened.data.index.look_seconds = True, self.look_seconds
        try:
            return None if opened.compiled is None else question(opened.compiled)
        except (IndexdError, WouldWaitError, OverflowError):
            return None
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
        end = time.monotonic() + self.query_seconds

        def check() -> None:
            nonlocal end
            self._workers.check_turn()
            if self._is_stopping:
                raise StoppingError
            if time.monotonic() > end:
                end += _SAY_SECONDS
                raise TooLongError(f"the query took longer than {self.query_seconds:.0f} s, and was ended")

        opened.data.set_check(check)
        try:
            answer = question(opened.data)
            if self._compiled_of is not None:
                self._prepare(opened, self._compiled_of)
        except BaseException:
            opened.data.close()
            raise
        opened.used = time.monotonic()
        self._idle.append(opened)
        return answer

    def _prepare(self, opened: _Opened, compiled_of: Callable[[QueryIndex], Any]) -> None:
        # Opens here, where the disk may be waited for, what ``ask_compiled`` needs to be open.
        opened.data.set_check(lambda: None)
        index = opened.data.index
        opened.compiled = opened.compiled or compiled_of(index)
        index.look_seconds = self.look_seconds  # the question has just looked
        with suppress(IndexdError, WouldWaitError, OverflowError):
            opened.compiled.prepare()
        index.look_seconds = 0.0

    def _open(self) -> _Opened:
        disk = Disk()
        try:
            return _Opened(Data(open_index(disk, self.config)), disk)
        except UsageError as error:  # there is nothing yet; no caller can help that
            raise NotOpenError(str(error.args[0]), self.board.phase, hint=error.hint) from error

    def _compile(self, load_compiled: Callable[[], Callable[[QueryIndex], Any] | None]) -> None:
        self._compiled_of = load_compiled()

    async def _tidy(self) -> None:
        # Files are closed in a worker: the last one to close a file that was removed waits until it is gone.
        while True:
            await asyncio.sleep(self.kept_seconds)
            if self._idle:
                with suppress(NotAnsweredError):
                    await self._workers.ask(self._drop)

    def _drop(self) -> None:
        with suppress(IndexError):  # an outlet's other thread takes one
            while time.monotonic() - self._idle[0].used >= self.kept_seconds:
                self._idle.pop(0).data.close()
