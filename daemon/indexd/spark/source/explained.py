"""Errors that end up in Spark's own text keep their hint, which names options where the command line has flags."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from indexd.errors import IndexdError
from indexd.spark.source.options import OPTIONS_HINT

_HELP = re.compile(r"see indexd --help( for all of them)?")
# With the value that a hint may give; what is behind ``indexd`` is a command, and stays one.
_FLAG = re.compile(r"(?<!indexd )--([a-z]+(?:-[a-z]+)*)(?:[ =](skip\b|\d+))?")
_OTHER_NAMES = {"on-corrupt": "corrupt", "store": "path"}


@contextmanager
def explained() -> Iterator[None]:
    """Lets an IndexdError through with its hint as a note: of what a data source raises, Spark shows the traceback."""
    try:
        yield
    except IndexdError as error:
        error.hint = with_options(error.hint)
        if error.hint and error.hint not in getattr(error, "__notes__", ()):
            error.add_note(error.hint)
        raise


def with_options(hint: str) -> str:
    """A hint for the command line as one for ``option(...)``: ``--segment-size 5`` is ``the option segmentSize=5``."""
    return _FLAG.sub(_option, _HELP.sub(OPTIONS_HINT, hint))


def _option(flag: re.Match[str]) -> str:
    first, *rest = flag[1].split("-")
    name = _OTHER_NAMES.get(flag[1]) or first + "".join(word.capitalize() for word in rest)
    return f"the option {name}={flag[2]}" if flag[2] else f"the option {name}"
