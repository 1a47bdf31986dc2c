"""From the configuration to a session of Spark: what the commands share that run on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

from indexd.config import Config, flag_name
from indexd.config.compiled import prepare_compiler
from indexd.errors import SparkMissingError, UsageError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from indexd.spark.session import SparkOptions

_PLACES = ("master", "remote", "conf")


def uses_spark(config: Config) -> bool:
    """Whether rebuild or audit is to run on Spark; UsageError for a flag that says where and no word that it is to."""
    if config.spark.engine == "spark":
        return True
    for key in _PLACES:
        if config.provenance.get(key) == flag_name(key):
            raise UsageError(f"{flag_name(key)} is for Spark, and the engine is this process", "add --engine spark")
    return False


def spark_options(config: Config) -> SparkOptions:
    """Where the configuration's jobs run."""
    from indexd.spark.session import SparkOptions  # noqa: PLC0415 - no other command loads the package

    keys = config.spark
    return SparkOptions(keys.master, keys.remote, keys.conf, keys.java_home)


@contextmanager
def spark_session(
    config: Config,
    app: str,
    *,
    memory: str = "1g",
    warm: Callable[[], object] | None = None,
    has_other_engine: bool = False,
) -> Iterator[SparkSession]:
    """A session for the body, as :func:`indexd.spark.session.open_session`, the kernels' cache being known by then.

    `warm` compiles the kernels of the workers, or loads them: once here, while the JVM starts, in place of once in each
    of them at the same time. It is not called where the workers are on other machines. With `has_other_engine` the
    command can do without Spark, and says so where that is missing.
    """
    prepare_compiler()
    from indexd.spark.session import open_session  # noqa: PLC0415 - no other command loads the package

    options = spark_options(config)
    with ThreadPoolExecutor(1) as warming:
        warmed = warming.submit(warm) if warm is not None and options.is_local else None
        try:
            with open_session(options, app, memory=memory) as spark:
                if warmed is not None:
                    warmed.result()
                yield spark
        except SparkMissingError as error:
            error.hint += ", or give --engine process" if has_other_engine else ""
            raise
