"""Queries: questions to the data directory, bounded in number and in patience, answered in other threads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from indexd.config import Config
from indexd.errors import IndexdError, UsageError
from indexd.query import Data, open_index
from indexd.serve.board import Board
from indexd.serve.http.problem import ProblemError, of_error, stopping
from indexd.serve.http.workers import StoppedError, TooManyError, Workers
from indexd.storage.disk import Disk

T = TypeVar("T")
#: Phases in which what is on disk may be asked; while it is opened and recovered its files are changed.
ANSWERING = ("running", "stopping")
_WAITING_PER_THREAD = 32
# A walk ends here, with a cursor to go on from: nobody waits for minutes, and no thread is held for long.
_WALK_MAX = 100_000
# Open files hold the space of what the broker removes.
_KEPT_SECONDS = 10.0
_OPENING_RETRY = 5
_BUSY_RETRY = 1
#: A query that takes longer is ended: it holds a thread that others wait for.
QUERY_SECONDS = 10.0
# At a stop: one that no check reaches, since a disk does not answer, is left behind.
_CLOSE_SECONDS = 2.0


class Queries:
    """One for a server; its methods belong to the server's event loop."""

    def __init__(self, config: Config, board: Board) -> None:
        bounded = config.query.model_copy(update={"query_walk_max": min(config.query.query_walk_max, _WALK_MAX)})
        self._config, self._board, self._disk = config.model_copy(update={"query": bounded}), board, Disk()
        threads = config.http.http_queries_max
        self._workers = Workers(threads, threads * _WAITING_PER_THREAD)
        #: Open and not in use, the last used at the end, with when that was.
        self._idle: list[tuple[Data, float]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._tidying: asyncio.Task[None] | None = None
        self._is_stopping = False

    def __repr__(self) -> str:
        return f"Queries({self._config.store.data}, {self._workers})"

    async def ask(self, question: Callable[[Data], T]) -> T:
        """What ``question`` returns, called with an open data directory in another thread; ProblemError."""
        self._check_phase()
        try:
            answer: T = await self._workers.ask(lambda: self._call(question))
        except IndexdError as error:
            self._check_phase()  # it may be being opened again
            raise of_error(error) from error
        except TooManyError:
            detail = f"{self._config.http.http_queries_max} queries run, and as many wait as may"
            raise ProblemError(503, "busy", detail, retry=_BUSY_RETRY, is_refusal=True) from None
        except StoppedError:
            raise stopping() from None
        self._check_phase()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_KEPT_SECONDS, self._tidy)
        return answer

    async def query(self, question: Callable[[Data], T], result: Callable[[T], str]) -> T:
        """The same for a query proper: counted on the board by what ``result`` says of the answer, and timed."""
        began, kind = time.perf_counter(), None
        try:
            answer = await self.ask(question)
            kind = result(answer)
        except ProblemError as problem:
            kind = "error" if problem.status >= 500 and not problem.is_refusal else None
            raise
        finally:
            if kind is not None:
                self._board.queries[kind] += 1
                self._board.query_seconds.observe(time.perf_counter() - began)
        return answer

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
            self._idle.pop()[0].close()
        return left

    def _check_phase(self) -> None:
        phase = self._board.phase
        if phase not in ANSWERING:
            row = self._board.row()
            members = {"phase": phase, "recovering": row.get("recovering")}
            raise ProblemError(503, "not-open-yet", f"the index is {phase}", members, retry=_OPENING_RETRY)

    def _call(self, question: Callable[[Data], T]) -> T:
        try:
            data = self._idle.pop()[0]
        except IndexError:
            data = self._open()
        end = time.monotonic() + QUERY_SECONDS

        def check() -> None:
            if self._is_stopping:
                raise stopping()
            if time.monotonic() > end:
                raise _too_long()

        data.set_check(check)
        try:
            answer = question(data)
        except BaseException:
            data.close()
            raise
        self._idle.append((data, time.monotonic()))
        return answer

    def _open(self) -> Data:
        try:
            return Data(self._disk, self._config, open_index(self._disk, self._config))
        except UsageError as error:  # there is nothing yet; no caller can help that
            detail, hint = str(error.args[0]), {"hint": error.hint}
            raise ProblemError(503, "not-open-yet", detail, hint, retry=_OPENING_RETRY) from error

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
                data, used = self._idle.pop(0)
            except IndexError:
                return
            if time.monotonic() - used < _KEPT_SECONDS:
                self._idle.insert(0, (data, used))
                return
            data.close()


def _too_long() -> ProblemError:
    detail = f"the query took longer than {QUERY_SECONDS:.0f} s, and was ended"
    hint = "ask for fewer messages (max), a shorter time (begin, end), or without bodies"
    return ProblemError(503, "too-long", detail, {"hint": hint}, retry=_BUSY_RETRY)
