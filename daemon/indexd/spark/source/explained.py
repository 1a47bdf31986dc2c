"""Errors that end up in Spark's own text keep their hint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from indexd.errors import IndexdError


@contextmanager
def explained() -> Iterator[None]:
    """Lets an IndexdError through with its hint as a note: of what a data source raises, Spark shows the traceback."""
    try:
        yield
    except IndexdError as error:
        if error.hint and error.hint not in getattr(error, "__notes__", ()):
            error.add_note(error.hint)
        raise
