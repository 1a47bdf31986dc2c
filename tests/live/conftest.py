"""What the tests of the remoting outlet stand on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.daemon import rebuild
from support.small_log import SIZES, write_log


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a store of 300 messages and its data directory."""
    place = tmp_path_factory.mktemp("built")
    write_log(place / "store", 300)
    rebuild(place / "store", place / "data", *SIZES)
    return place


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Leaves what a test enters at its end."""
    with ExitStack() as stack:
        yield stack
