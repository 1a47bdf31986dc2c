"""Stores to be repaired by ``indexd repair``, and how they look before and after."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

from indexd.config import Config
from indexd.flush.frontier import StoreCheckpoint
from indexd.index.format import HEADER_SIZE, IndexHeader, IndexLayout
from support.auditing import config_for, index_log, lost_keys, restart_of_killed_broker
from support.daemon import environment, indexd_here
from support.goldens import Golden
from support.small_log import SEGMENT_SIZE, write_log

HASH_SLOT_NUM = 200
INDEX_NUM = 1000


def holed_store(root: Path, messages: int = 1500) -> Config:
    """A log of several segments, the oldest file of whose index is lost: some full files, an open one, a checkpoint."""
    write_log(root, messages)
    config = config_for(root, IndexLayout(HASH_SLOT_NUM, INDEX_NUM), SEGMENT_SIZE)
    index_log(config)
    files = sorted((root / "index").iterdir())
    assert len(files) > 3
    files[0].unlink()
    (root / "checkpoint").write_bytes(StoreCheckpoint(1, 2, newest_end(root / "index", full_only=True), 4, 5).pack())
    (root / "lock").write_text("lock")
    return config


def restarted(golden: Golden, config: Config) -> None:
    """What is left after an unclean start of a broker whose index has never rolled: nothing before segment 6."""
    restart_of_killed_broker(golden.root)
    index_log(config, begin=6 * golden.segment_size)


def words_of(config: Config) -> tuple[object, ...]:
    """The options that name the store and its sizes."""
    return (
        *("--store", config.store.store, "--segment-size", config.store.segment_size),
        *("--hash-slot-num", config.index.hash_slot_num, "--index-num", config.index.index_num),
    )


def index_of(store: Path) -> dict[str, bytes]:
    """Every index file."""
    return {path.name: path.read_bytes() for path in sorted((store / "index").iterdir())}


def newest_end(index: Path, *, full_only: bool = False) -> int:
    """The newest end timestamp, ms, that a file's header says."""
    headers = [IndexHeader.unpack(path.read_bytes()[:HEADER_SIZE]) for path in index.iterdir()]
    return max(header.end_timestamp for header in headers if header.index_count >= INDEX_NUM or not full_only)


def index_timestamp(store: Path) -> int:
    """The indexMsgTimestamp of the checkpoint."""
    path = store / "checkpoint"
    return StoreCheckpoint.unpack(path.read_bytes(), path).index_msg_timestamp


def assert_repaired(config: Config, flavour: str = "5.4") -> None:
    """RocketMQ's walk finds every key, and neither start of a broker throws a file away."""
    store = config.store.store
    assert store is not None
    assert not lost_keys(config, flavour)
    assert index_timestamp(store) >= newest_end(store / "index")


def folders_of(store: Path) -> list[str]:
    """The folders of repairs, undone ones included."""
    return sorted(path.name for path in store.iterdir() if path.name.startswith("indexd-repair-"))


def repair(config: Config, *more: object) -> tuple[int, str, str]:
    """``indexd repair`` in this process: exit code, standard output, standard error."""
    done = indexd_here("repair", *words_of(config), *more)
    return done.returncode, done.stdout, done.stderr


def tree(store: Path) -> dict[str, tuple[int, int, int]]:
    """All that a change of the store would change."""
    found = {path: path.stat() for path in sorted(store.rglob("*"))}
    return {str(path): (status.st_ino, status.st_size, status.st_mtime_ns) for path, status in found.items()}


#: Runs commands in forks of a process in which everything is loaded: one begins to work at once, and can be killed.
_FORKER = """
import contextlib, json, os, sys
from indexd.cli.main import main

with contextlib.suppress(SystemExit):
    main(json.loads(sys.argv[1]))
print("ready", flush=True)
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        os.dup2(0, 1)
        main(json.loads(line))
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Forker:
    """``indexd`` again and again, without the seconds that it takes to load; for use in a ``with`` block."""

    def __init__(self, *warming: object) -> None:
        # What is loaded by the first command, in the process itself, is there for all that follow.
        self._process = subprocess.Popen(
            [sys.executable, "-c", _FORKER, json.dumps([str(word) for word in warming])],
            env=environment(None),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        while self._line() != "ready":
            pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=60)

    def run(self, *words: object, kill_after: float | None = None) -> int:
        """The exit code; -9 if it was killed, which it is after ``kill_after`` seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([str(word) for word in words]) + "\n")
        self._process.stdin.flush()
        pid = int(self._line())
        if kill_after is not None:
            time.sleep(kill_after)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return int(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()
