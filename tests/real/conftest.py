"""Stores with a past, made once for all test files that look at them."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.browser import Browser
from support.rocketmq_rewrite import VERSIONS, RealStore, make_histories


@pytest.fixture(scope="session")
def histories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where those of each version are, by its name; not to be changed. Other workers of pytest-xdist have them, too."""
    home = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        home = home.parent
    home /= "histories"
    home.mkdir(exist_ok=True)
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (home / "made").exists():
            # They are asleep for most of the time.
            with ThreadPoolExecutor(len(VERSIONS)) as threads:
                list(threads.map(lambda version: _make(home, version), VERSIONS))
            (home / "made").touch()
    return home


def _make(home: Path, version: str) -> None:
    real = RealStore(version, home / version / "jvm")
    try:
        make_histories(home / version, real, seed=len(version))
    finally:
        real.rewriter.close()


@pytest.fixture(scope="module", params=VERSIONS)
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealStore]:
    """RocketMQ's own classes, of one version after the other."""
    real = RealStore(request.param, tmp_path_factory.mktemp("jvm"))
    yield real
    real.rewriter.close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A Chromium, which the tests of a module share."""
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser
