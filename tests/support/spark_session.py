"""A session as a command would open it with these flags, for scripts that run in a process of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from indexd.cli.output import common_options, given_flags
from indexd.cli.spark import spark_session
from indexd.config import load
from support.rows import rows_of_log

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@contextmanager
def session_of(flags: Sequence[str]) -> Iterator[SparkSession]:
    """``--master ... --conf ...`` as words of a command line."""
    config = load(given_flags(common_options().parse_args(list(flags))), None, os.environ)
    with spark_session(config, "tests") as spark:
        yield spark


def read_source(spark: SparkSession, store: Path, split_size: int) -> dict[str, Any]:
    """What the data source finds in ``store``, and what it says of one that is not there."""
    log = spark.read.format("rocketmq_commitlog").option("columns", "phyOffset,topic,keys")
    log = log.option("splitSize", str(split_size))
    rows = log.load(str(store)).collect()
    missing = ""
    try:
        log.load(str(store / "nothing")).count()
    except Exception as error:  # noqa: BLE001 - whichever Spark makes of it, the line is what counts
        missing = str(error)
    return {"rows": sorted([row["phyOffset"], row["topic"], row["keys"]] for row in rows), "missing": missing}


def check_source(seen: dict[str, Any], store: Path) -> None:
    """Every message of the log, once, as a reading without Spark has it."""
    rows = rows_of_log(store / "commitlog")
    assert seen["rows"] == [[row["phyOffset"], row["topic"], row["keys"]] for row in rows]
    assert str(store / "nothing") in seen["missing"]
