"""One Spark session for the whole run, local[2], started as the command line starts it.

What needs a cluster or a Connect server is in tests/real: a process has one classic session at most.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from indexd.config import SparkConfig
from indexd.spark.session import open_session
from support.spark_cluster import FRUGAL, TESTS


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """The one session; workers can import ``support``."""
    conf = (("spark.driver.extraJavaOptions", FRUGAL), ("spark.sql.shuffle.partitions", "2"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
        with open_session(SparkConfig(master="local[2]", conf=conf), "tests") as session:
            yield session
