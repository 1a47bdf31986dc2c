"""A session as a command would open it with these flags, for scripts that run in a process of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from indexd.cli.engine import spark_session
from indexd.cli.options import common_options, given_flags
from indexd.config import load

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@contextmanager
def session_of(flags: Sequence[str]) -> Iterator[SparkSession]:
    """``--master ... --conf ...`` as words of a command line."""
    config = load(given_flags(common_options().parse_args(list(flags))), None, os.environ)
    with spark_session(config, "tests") as spark:
        yield spark
