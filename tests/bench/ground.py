"""Ground: the work directory, the store that the parts share, and the environment of everything that is started."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from indexd.commitlog.writer import CommitLogWriter, FrameSpec
from support.rocketmq import arguments, figures_of, run, why_missing

SEGMENT_SIZE = 1 << 30
SLOTS, ENTRIES = 5_000_000, 20_000_000
QUEUE_FILE_SIZE = 6_000_000
BODY_SIZE = 100
ENTRIES_PER_MESSAGE = 4
# RocketMQ's own defaults; the programs take small ones unless told otherwise.
DEFAULT_SIZES = {"segment": SEGMENT_SIZE, "slots": SLOTS, "entries": ENTRIES, "queuefile": QUEUE_FILE_SIZE}
# What a message takes in the log, with room to spare, to see beforehand whether the disk will do.
BYTES_PER_MESSAGE = 450
_BLOCK = 4 << 20
_KILL_SECONDS = 60
_UNIQUE_PREFIX = "7F00000100002A13"


class Ground:
    """Everything that a part needs to know; ``work`` is ours alone and removed at the end."""

    def __init__(self, work: Path, messages: int, seconds: int) -> None:
        self.work = work
        self.messages = messages
        self.seconds = seconds
        self.jvm_home = work / "jvm"
        self.java_missing = why_missing()
        # An empty one, so that neither the machine's nor the user's configuration is measured.
        self.config_file = work / "indexd.toml"
        self.config_file.touch()
        self._store: Path | None = None
        self._processes: list[subprocess.Popen[Any]] = []

    def __repr__(self) -> str:
        return f"Ground({self.work}, messages={self.messages}, java_missing={self.java_missing!r})"

    @property
    def made_by(self) -> str:
        """Who wrote the store."""
        return "the built-in writer" if self.java_missing else "RocketMQ's store"

    def environment(self) -> dict[str, str]:
        """Without whatever would configure indexd or its compiler; the compiler's cache is the user's own."""
        return {
            name: value
            for name, value in os.environ.items()
            if name in ("NUMBA_CACHE_DIR", "INDEXD_TEST_CACHE") or not name.startswith(("INDEXD_", "NUMBA_", "PYTHON"))
        }

    def note_process(self, process: subprocess.Popen[Any]) -> None:
        """One that was started here; whoever started it ends it, but a signal may come between."""
        self._processes.append(process)

    def end_processes(self) -> None:
        """Kill those that still run, so that nobody writes into what is removed next."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait(_KILL_SECONDS)

    def store(self) -> Path:
        """The store of ``messages`` plain messages, made at the first call."""
        if self._store is None:
            path = self.work / "store"
            progress(f"writing {self.messages:,} messages with {self.made_by}")
            if self.java_missing:
                write_store(path, self.messages)
            else:
                words = arguments(
                    store=path, count=self.messages, body=BODY_SIZE, set_messageIndexEnable=False, **DEFAULT_SIZES
                )
                seconds = 300 + self.messages / 5000
                said = run("Store", "write", *words, home=self.jvm_home, timeout=seconds)
                written = figures_of(said.splitlines()[-1])
                progress(f"written in {written['seconds']:.1f} s")
            self._store = path
        return self._store


def write_store(
    store: Path, messages: int, body_size: int = BODY_SIZE, queues: int = 8, segment_size: int = SEGMENT_SIZE
) -> None:
    """What RocketMQ's programs call plain messages, by the built-in writer; ``queues`` of the two topics together."""
    choice = random.Random(1)
    noise = choice.randbytes(1 << 16)
    now = int(time.time() * 1000)
    with CommitLogWriter(store / "commitlog", segment_size) as writer:
        for i in range(messages):
            begin = choice.randrange(len(noise) - body_size)
            properties = {
                "KEYS": f"order-{i} user-{choice.randrange(1_000_000)}",
                "UNIQ_KEY": f"{_UNIQUE_PREFIX}{1 << 40 ^ i:016X}",
                "TAGS": "TagA",
            }
            writer.append(
                FrameSpec(
                    topic=choice.choice(("TopicTest", "OrderPaid")),
                    body=noise[begin : begin + body_size],
                    properties=properties,
                    queue_id=choice.randrange(queues // 2),
                    born_timestamp=now,
                    store_timestamp=now + i // 200,
                )
            )


def warm_log(store: Path) -> None:
    """Read the whole log once, so that every run finds it in the page cache; wait until the disk has nothing to do."""
    block = bytearray(_BLOCK)
    for path in sorted((store / "commitlog").iterdir()):
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass
    os.sync()


def progress(text: str) -> None:
    """A line on standard error; standard output is for results."""
    sys.stderr.write(f"bench: {text}\n")
    sys.stderr.flush()
