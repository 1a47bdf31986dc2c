"""What a request asks for: its ext fields, read as the broker reads them; and what is said when there is no answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, Generic, NamedTuple, TypeVar

from indexd.commitlog.properties import parse_java_number
from indexd.errors import IndexdError
from indexd.query import Data
from indexd.serve.queries import NotAnsweredError, Queries, TooLongError
from indexd.serve.remoting.codes import ResponseCode
from indexd.serve.remoting.command import RemotingCommand

T = TypeVar("T")
Handler = Callable[[Queries, RemotingCommand], Awaitable[RemotingCommand]]
_SHOWN_MAX = 80


class FieldError(Exception):
    """An ext field is missing or of no use; str(): which, and why."""


class Asking(NamedTuple, Generic[T]):
    """A request as a question to the data: what is asked, how the board counts the answer, and what is sent."""

    question: Callable[[Data], T]
    result: Callable[[T], str]
    answer: Callable[[T], RemotingCommand]


class QueryHandler:
    """The handler of a query proper: ``ask`` reads the request. It raises nothing, as those of ``handler``."""

    def __init__(self, ask: Callable[[Queries, RemotingCommand], Asking[Any]]) -> None:
        self._ask = ask
        self._patient = handler(self._answer)

    def at_once(self, queries: Queries, command: RemotingCommand) -> RemotingCommand | None:
        """The answer if nothing has to be waited for; None: it takes a call."""
        try:
            asking = self._ask(queries, command)
            return asking.answer(queries.query_at_once(asking.question, asking.result))
        except Exception:  # noqa: BLE001 - whatever it is, the patient way meets it again, and says it
            return None

    async def __call__(self, queries: Queries, command: RemotingCommand) -> RemotingCommand:
        """See ``Handler``."""
        return await self._patient(queries, command)

    async def _answer(self, queries: Queries, command: RemotingCommand) -> RemotingCommand:
        asking = self._ask(queries, command)
        return asking.answer(await queries.query(asking.question, asking.result))


def handler(answer: Handler) -> Handler:
    """``answer``, but that it raises nothing that a query raises: the client is told in a remark.

    SYSTEM_BUSY where asking again may help, else SYSTEM_ERROR.
    """

    @wraps(answer)
    async def answer_all(queries: Queries, command: RemotingCommand) -> RemotingCommand:
        try:
            return await answer(queries, command)
        except FieldError as error:
            return command.answer(ResponseCode.SYSTEM_ERROR, str(error))
        except TooLongError as error:
            return command.answer(ResponseCode.SYSTEM_ERROR, str(error))
        except NotAnsweredError as error:
            return command.answer(ResponseCode.SYSTEM_BUSY, str(error))
        except IndexdError as error:
            return command.answer(ResponseCode.SYSTEM_ERROR, error.line())

    return answer_all


def text(command: RemotingCommand, name: str) -> str:
    """A field that has to be there; FieldError."""
    value = command.ext_fields.get(name)
    if value is None:
        raise FieldError(f"ext field {name} is missing")
    return value


def whole(command: RemotingCommand, name: str, bits: int = 64, default: int | None = None) -> int:
    """A field that has to be a whole number of so many bits, as Java reads one; FieldError.

    ``default``: for a field that need not be there.
    """
    value = command.ext_fields.get(name)
    if value is None and default is not None:
        return default
    number = parse_java_number(text(command, name) if value is None else value, bits)
    if number is None:
        raise FieldError(f"ext field {name} is no whole number of {bits} bits: {value!r:.{_SHOWN_MAX}}")
    return number
