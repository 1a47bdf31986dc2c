"""What a program hands to the Python API, checked before it is used; UsageError says which argument is wrong."""

from __future__ import annotations

from collections.abc import Collection
from operator import index as to_int

from indexd.errors import UsageError

_HINT = "see help(indexd.query.Data)"


def whole(name: str, value: object, *, at_least: int | None = None) -> int:
    """``value`` as an int: one, or what numpy and the like have for it; True and False are none."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = to_int(value)  # type: ignore[arg-type]  # that is what is being asked
    except TypeError:
        raise UsageError(f"{name} has to be a whole number, not {value!r}", _HINT) from None
    if at_least is not None and number < at_least:
        raise UsageError(f"{name} has to be at least {at_least}, not {number}", _HINT)
    return number


def text(name: str, value: object) -> str:
    """``value`` if it is a str that is not empty."""
    if not isinstance(value, str):
        raise UsageError(f"{name} has to be text, not {value!r}", _HINT)
    if not value:
        raise UsageError(f"{name} is empty", _HINT)
    return value


def one_of(name: str, value: object, choices: Collection[str | None]) -> None:
    """Nothing, if ``value`` is one of ``choices``."""
    if not isinstance(value, str | None) or value not in choices:
        raise UsageError(f"{name} has to be one of {', '.join(map(repr, choices))}, not {value!r}", _HINT)
