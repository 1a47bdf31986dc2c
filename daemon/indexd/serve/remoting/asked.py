"""What a request asks for: its ext fields, read as the broker reads them; and what is said when there is no answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps

from indexd.commitlog.properties import parse_java_number
from indexd.errors import IndexdError
from indexd.serve.queries import NotAnsweredError, Queries, TooLongError
from indexd.serve.remoting.codes import ResponseCode
from indexd.serve.remoting.command import RemotingCommand

Handler = Callable[[Queries, RemotingCommand], Awaitable[RemotingCommand]]
_SHOWN_MAX = 80


class FieldError(Exception):
    """An ext field is missing or of no use; str(): which, and why."""


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
    number = parse_java_number(text(command, name), bits)
    if number is None:
        raise FieldError(f"ext field {name} is no whole number of {bits} bits: {value!r:.{_SHOWN_MAX}}")
    return number
