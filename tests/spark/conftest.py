"""One Spark session for the whole run, local[2], started as the command line starts it.

The clusters (a standalone one, a Connect server) are processes of their own, and so is whoever uses them: a process has
one classic session at most. What starts such processes waits for most of the time, so it can run beside the rest::

    pytest -n 2 --dist loadgroup tests/spark

Which tests share a process is said here and not by xdist's own marks: with some versions of pytest those are lost on
the way without a word, and each process then starts a session and clusters of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from support.spark_cluster import FRUGAL, TESTS, ConnectServer, Standalone

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# What a test's name holds that is not one of the session's. Those with a JVM of their own could run anywhere: with the
# session, both processes have as much to do, and no group is handed out early to one that is busy.
_GROUPS = {"_on_a_cluster": "cluster", "connect": "connect"}


def group_of(nodeid: str) -> str:
    """What has the one session, what uses the standalone cluster, and what the Connect server."""
    return next((group for part, group in _GROUPS.items() if part in nodeid), "session")


class _Groups(LoadScopeScheduling):
    """A group after the other is handed to the next process that has nothing to do."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """Asked by xdist, whatever ``--dist`` says."""
    return _Groups(config, log)


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """The one session; workers can import ``support``."""
    from indexd.config import SparkConfig
    from indexd.spark.session import open_session

    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(TESTS), before]))
    conf = (("spark.driver.extraJavaOptions", FRUGAL), ("spark.sql.shuffle.partitions", "2"))
    try:
        with open_session(SparkConfig(master="local[2]", conf=conf), "tests") as session:
            yield session
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    """A master and workers on loopback, of which tests kill some."""
    with Standalone(tmp_path_factory.mktemp("standalone"), workers=2) as cluster:
        yield cluster


@pytest.fixture
def standalone(cluster: Standalone) -> Standalone:
    """The cluster with two workers, those that a test before has killed made up for."""
    while len(cluster.workers) < 2:
        cluster.add_worker()
    return cluster


@pytest.fixture(scope="session")
def connect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConnectServer]:
    """A Spark Connect server on loopback."""
    with ConnectServer(tmp_path_factory.mktemp("connect")) as server:
        yield server
