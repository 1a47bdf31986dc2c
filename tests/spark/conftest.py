"""One Spark session for the whole run, local[2], started as the command line starts it.

The clusters (a standalone one, a Connect server) are processes of their own, and so is whoever uses them: a process has
one classic session at most. What starts such processes waits for most of the time, so it can run beside the rest::

    pytest -n 2 --dist loadgroup tests/spark
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.spark_cluster import FRUGAL, TESTS, ConnectServer, Standalone

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_PROCESSES = {"test_commands", "test_connect", "test_standalone"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Two groups: what has the one session, and what starts processes."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            group = "processes" if item.path.stem in _PROCESSES else "session"
            item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """The one session; workers can import ``support``."""
    from indexd.spark.session import SparkOptions, open_session

    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(TESTS), before]))
    conf = (("spark.driver.extraJavaOptions", FRUGAL), ("spark.sql.shuffle.partitions", "2"))
    try:
        with open_session(SparkOptions(master="local[2]", conf=conf), "tests") as session:
            yield session
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


@pytest.fixture(scope="session")
def standalone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    """A master and two workers on loopback; a test that kills a worker adds one again."""
    with Standalone(tmp_path_factory.mktemp("standalone"), workers=2) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def connect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConnectServer]:
    """A Spark Connect server on loopback."""
    with ConnectServer(tmp_path_factory.mktemp("connect")) as server:
        yield server
