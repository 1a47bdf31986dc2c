"""Queries of this outlet: whatever is no answer is a problem."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from indexd.config import Config
from indexd.errors import IndexdError
from indexd.query import Data
from indexd.serve import queries
from indexd.serve.board import Board
from indexd.serve.http.problem import ProblemError, of_error, stopping

T = TypeVar("T")
_OPENING_RETRY = 5
_BUSY_RETRY = 1


class Queries:
    """One for a server; its methods belong to the server's event loop."""

    def __init__(self, config: Config, board: Board) -> None:
        self._queries = queries.Queries(config, board, config.http.http_queries_max)

    def __repr__(self) -> str:
        return repr(self._queries)

    async def ask(self, question: Callable[[Data], T]) -> T:
        """What ``question`` returns, called with an open data directory in another thread; ProblemError."""
        try:
            return await self._queries.ask(question)
        except queries.NotAnsweredError as error:
            raise _of_no_answer(error) from error
        except IndexdError as error:
            raise of_error(error) from error

    async def query(self, question: Callable[[Data], T], result: Callable[[T], str]) -> T:
        """The same for a query proper: counted on the board by what ``result`` says of the answer, and timed."""
        try:
            return await self._queries.query(question, result)
        except queries.NotAnsweredError as error:
            raise _of_no_answer(error) from error
        except IndexdError as error:
            raise of_error(error) from error

    def stop(self) -> None:
        """What waits and what comes is refused from now on, and what runs ends where it next looks at a message."""
        self._queries.stop()

    def close(self) -> int:
        """Close all files behind a ``stop``, in any thread; how many queries are left behind after two seconds."""
        return self._queries.close()


def _of_no_answer(error: queries.NotAnsweredError) -> ProblemError:
    detail = str(error)
    if isinstance(error, queries.NotOpenError):
        members = {"phase": error.phase, "recovering": error.recovering} if error.hint is None else {"hint": error.hint}
        return ProblemError(503, "not-open-yet", detail, members, retry=_OPENING_RETRY)
    if isinstance(error, queries.CrowdedError):
        return ProblemError(503, "busy", detail, retry=_BUSY_RETRY, is_refusal=True)
    if isinstance(error, queries.StoppingError):
        return stopping()
    hint = "ask for fewer messages (max), a shorter time (begin, end), or without bodies"
    return ProblemError(503, "too-long", detail, {"hint": hint}, retry=_BUSY_RETRY)
