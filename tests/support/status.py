"""What the tests of the command status share: a log, a data directory, and the command itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.daemon import compile_kernels, indexd
from support.small_log import SIZES, write_log

MESSAGES = 3000


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log that nobody writes any more."""
    compile_kernels()
    root = tmp_path_factory.mktemp("status") / "store"
    write_log(root, MESSAGES)
    return root


@pytest.fixture(scope="module")
def stopped(store: Path) -> Path:
    """The data directory of that log, whole; copies are the tests' own."""
    data = store.parent / "stopped"
    done = indexd("--recover", "--store", store, "--data", data, *SIZES)
    assert done.returncode == 0, done.stderr
    return data


def status(data: Path, *words: object, code: int = 0, **env: str) -> str:
    """Standard output; nothing may stand on the other one."""
    done = indexd("status", "--data", data, *words, env={"COLUMNS": "40", **env})
    assert done.stderr == ""
    assert done.returncode == code, done.stdout
    return done.stdout


def row_of(data: Path, *words: object, code: int = 0, **env: str) -> dict[str, Any]:
    """The object of --json."""
    (line,) = status(data, "--json", *words, code=code, **env).splitlines()
    row: dict[str, Any] = json.loads(line)
    return row
