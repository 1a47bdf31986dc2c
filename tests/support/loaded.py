"""Imports and compiles what a daemon needs, by what commands do with a small log; ``forked`` has it imported once."""

from __future__ import annotations

import fcntl
import gc
import os
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import starlette.applications  # noqa: F401 - what follows a fork finds it imported
import uvicorn  # noqa: F401 - the same

from indexd.cli.main import main
from indexd.service import daemon  # noqa: F401 - the same
from support.small_log import SIZES, write_log


def load() -> None:
    """No thread is left, and nothing is said."""
    cache = Path(os.environ["NUMBA_CACHE_DIR"])
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="indexd-forked-") as name, (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of many test processes one compiles
        store, data = Path(name, "store"), Path(name, "data")
        write_log(store, 200)
        silent, errors = os.open(os.devnull, os.O_WRONLY), os.dup(2)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        words = ["--store", str(store), "--data", str(data), *SIZES]
        for command in ("--recover", "verify --deep", "audit", "query-key -t T -k k"):
            with suppress(SystemExit):
                main([*command.split(), *(words[2:4] if command.startswith("query") else words)])
        os.dup2(errors, 2)
        assert (data / "frontier").exists()
    assert threading.active_count() == 1, threading.enumerate()
    gc.freeze()


load()
