"""Queries: questions to the data directory, bounded in number and in patience, answered in other threads.

Every outlet that answers questions has one of its own, so that none waits behind the clients of another.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, TypeVar

from indexd.config import Config
from indexd.errors import IndexdError, UsageError
from indexd.query import Data, QueryIndex, open_index
from indexd.query.log import TimeUpError
from indexd.serve.board import Board
from indexd.serve.workers import StoppedError, TooManyError, TurnOverError, Workers
from indexd.storage.disk import HastyDisk, WouldWaitError

T = TypeVar("T")
#: Phases in which what is on disk may be asked; while it is opened and recovered its files are changed.
ANSWERING = ("running", "stopping")
#: How a query proper ended, as the board counts it.
FOUND, EMPTY_COVERED, EMPTY_UNCOVERED, ERROR = "found", "empty_covered", "empty_uncovered", "error"
_WAITING_PER_THREAD = 32
# Open files hold the space of what the broker removes.
_KEPT_SECONDS = 10.0
# What is answered at once, in the event loop's own thread, has no longer than this for itself, and goes by what was
# seen of the files so long ago: everything else there waits.
_AT_ONCE_SECONDS, _LOOK_SECONDS = 0.002, 0.1
#: A query that takes longer is ended: it holds a thread that others wait for. A walk keeps what it has found, and has
#: so much longer to say it.
QUERY_SECONDS, _SAY_SECONDS = 10.0, 2.0
# At a stop: one that no check reaches, since a disk does not answer, is left behind.
_CLOSE_SECONDS = 2.0


class NotAnsweredError(Exception):
    """There is no answer now, and there may be one to whoever asks again. str(): why, one line without a hint.

    ``is_refusal``: nothing failed, it was only not the time to ask.
    """

    is_refusal = False


class NotOpenError(NotAnsweredError):
    """There is no index yet, or it is being recovered (``recovering``: the board's row of that)."""

    def __init__(self, detail: str, phase: str, recovering: Any = None, hint: str | None = None) -> None:
        super().__init__(detail)
        self.phase, self.recovering, self.hint = phase, recovering, hint


class CrowdedError(NotAnsweredError):
    """As many queries run and wait as may."""

    is_refusal = True


class StoppingError(NotAnsweredError):
    """The daemon stops."""

    is_refusal = True

    def __init__(self) -> None:
        super().__init__("the daemon stops: ask again when it is back")


class TooLongError(NotAnsweredError, TimeUpError):
    """The query was ended after ``QUERY_SECONDS``."""

    def __init__(self) -> None:
        super().__init__(f"the query took longer than {QUERY_SECONDS:.0f} s, and was ended")


class Compiled(Protocol):
    """What compiled code needs of an open index (``remoting.key_queries.IndexTables``)."""

    def prepare(self) -> Any:
        """Its files as they are now, opened as far as the disk may be waited for."""


class _Opened(NamedTuple):
    data: Data
    disk: HastyDisk
    used: float
    compiled: Compiled | None


class Queries:
    """One for a server, of at most ``threads`` queries at once; its methods belong to the server's event loop.

    ``load_compiled`` is called in a thread of its own at the first question, and returns what makes ``Compiled``.
    """

    def __init__(
        self,
        config: Config,
        board: Board,
        threads: int,
        load_compiled: Callable[[], Callable[[QueryIndex], Compiled] | None] | None = None,
    ) -> None:
        self.config = config
        self.board = board
        self._threads = threads
        self._workers = Workers(threads, threads * _WAITING_PER_THREAD)
        #: Open and not in use, the last used at the end, with when that was.
        self._idle: list[_Opened] = []
        self._at_once_until = 0.0
        # It may have to compile: nobody waits for that.
        self._load_compiled = load_compiled
        self._compiled_of: Callable[[QueryIndex], Compiled] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._tidying: asyncio.Task[None] | None = None
        self._is_stopping = False

    def __repr__(self) -> str:
        return f"Queries({self.config.store.data}, {self._workers})"

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
        except TooManyError:
            raise CrowdedError(f"{self._threads} queries run, and as many wait as may") from None
        except StoppedError:
            raise StoppingError from None
        self._check_phase()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_KEPT_SECONDS, self._tidy)
        return answer

    def ask_compiled(self, question: Callable[[Compiled], T]) -> T:
        """What ``question`` returns, called here and now with what a worker has prepared; else WouldWaitError.

        It may not take long, and the disk is not waited for. It is not counted.
        """
        if self._is_stopping or self.board.phase not in ANSWERING:
            raise WouldWaitError
        try:
            opened = self._idle.pop()
        except IndexError:
            raise WouldWaitError from None
        data, disk, _, compiled = opened
        self._at_once_until = time.monotonic() + _AT_ONCE_SECONDS
        data.set_check(self._check_at_once)
        disk.is_hasty, data.index.look_seconds = True, _LOOK_SECONDS
        try:
            if compiled is None:
                raise WouldWaitError
            return question(compiled)
        except IndexdError as error:  # it may be gone for who looks anew
            raise WouldWaitError from error
        finally:
            disk.is_hasty, data.index.look_seconds = False, 0.0
            self._idle.append(opened)

    def _check_at_once(self) -> None:
        if time.monotonic() > self._at_once_until:
            raise WouldWaitError

    async def query(self, question: Callable[[Data], T], result: Callable[[T], str]) -> T:
        """The same for a query proper: timed, and counted on the board by what ``result`` says of the answer.

        Of what was raised only failures are counted: not the caller's faults, and not what only came at a bad time.
        """
        began, kind = time.perf_counter(), None
        try:
            answer = await self.ask(question)
            kind = result(answer)
        except NotAnsweredError as error:
            kind = None if error.is_refusal else ERROR
            raise
        except IndexdError as error:
            kind = None if isinstance(error, UsageError) else ERROR
            raise
        finally:
            if kind is not None:
                self.count(kind, began)
        return answer

    def count(self, kind: str, began: float, queries: int = 1) -> None:
        """So many queries ended like this; each of those that were answered together took its share of the time."""
        self.board.queries[kind] += queries
        self.board.query_seconds.observe((time.perf_counter() - began) / queries, queries)

    def stop(self) -> None:
        """What waits and what comes is refused from now on, and what runs ends where it next looks at a message."""
        self._is_stopping = True
        if self._timer is not None:
            self._timer.cancel()
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
            data, disk, _, compiled = self._idle.pop()
        except IndexError:
            (data, disk), compiled = self._open(), None
        end = time.monotonic() + QUERY_SECONDS

        def check() -> None:
            nonlocal end
            if self._is_stopping:
                raise StoppingError
            end += self._workers.give_way()
            if time.monotonic() > end:
                end += _SAY_SECONDS
                raise TooLongError

        data.set_check(check)
        try:
            answer = question(data)
            compiled = self._prepare(data, compiled)
        except TurnOverError:
            self._idle.append(_Opened(data, disk, time.monotonic(), compiled))
            raise
        except BaseException:
            data.close()
            raise
        self._idle.append(_Opened(data, disk, time.monotonic(), compiled))
        return answer

    def _prepare(self, data: Data, compiled: Compiled | None) -> Compiled | None:
        # Opens here, where the disk may be waited for, what ``ask_compiled`` needs to be open.
        if self._compiled_of is None:
            return None
        data.set_check(lambda: None)
        compiled = compiled or self._compiled_of(data.index)
        data.index.look_seconds = _LOOK_SECONDS  # the question has just looked
        with suppress(IndexdError):
            compiled.prepare()
        data.index.look_seconds = 0.0
        return compiled

    def _load(self, load_compiled: Callable[[], Callable[[QueryIndex], Compiled] | None]) -> None:
        self._compiled_of = load_compiled()

    def _open(self) -> tuple[Data, HastyDisk]:
        load_compiled, self._load_compiled = self._load_compiled, None
        if load_compiled is not None:
            threading.Thread(target=self._load, args=(load_compiled,), name="query-compile", daemon=True).start()
        disk = HastyDisk()
        try:
            return Data(open_index(disk, self.config)), disk
        except UsageError as error:  # there is nothing yet; no caller can help that
            raise NotOpenError(str(error.args[0]), self.board.phase, hint=error.hint) from error

    def _tidy(self) -> None:
        # Files are closed in a worker: the last one to close a file that was removed waits until it is gone.
        self._timer = None
        self._tidying = asyncio.create_task(self._close_unused())

    async def _close_unused(self) -> None:
        with suppress(TooManyError, StoppedError):
            await self._workers.ask(self._drop)
        if self._idle and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_KEPT_SECONDS, self._tidy)

    def _drop(self) -> None:
        while True:
            try:
                opened = self._idle.pop(0)
            except IndexError:
                return
            if time.monotonic() - opened.used < _KEPT_SECONDS:
                self._idle.insert(0, opened)
                return
            opened.data.close()
