"""Ground: the work directory, the store that the parts share, and the environment of everything that is started."""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from support.commitlog_writer import CommitLogWriter, FrameSpec
from support.rocketmq import arguments, figures_of, run, why_missing

Row = Sequence[str]


class BenchError(Exception):
    """Something could not be measured; the message says why."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One target; ``measured`` and ``held`` are None where there is no number."""

    part: str
    target: str
    measured: str | None
    held: bool | None


class Report:
    """Prints each part as soon as it is measured. ``hidden`` maps texts that must not be printed to what stands in."""

    def __init__(self, *, as_json: bool, hidden: dict[str, str]) -> None:
        self._as_json = as_json
        self._hidden = hidden
        self._verdicts: list[Verdict] = []
        self._failures = 0

    def note(self, text: str) -> None:
        """A line of its own between the tables; an object with ``note`` in JSON."""
        if self._as_json:
            self._json({"measurement": "note", "note": self._clean(text)})
        else:
            print(self._clean(text), flush=True)

    def part(self, name: str, title: str, rows: Sequence[Row], data: dict[str, Any]) -> None:
        """One part: ``rows`` (the first is the head) for people, ``data`` for machines."""
        if self._as_json:
            self._json({"measurement": name, **data})
        else:
            print(f"\n{name}: {title}", flush=True)
            print_table(rows)

    def verdict(self, part: str, target: str, measured: str | None, held: bool | None) -> None:
        """Remember for the end."""
        self._verdicts.append(Verdict(part, target, measured, held))
        self._failures += held is None

    def failure(self, part: str, reason: str) -> None:
        """A part, or a piece of it, that gave no number."""
        self._failures += 1
        reason = self._clean(reason)
        if self._as_json:
            self._json({"measurement": part, "failed": reason})
        else:
            print(f"\n{part}: not measured: {reason}", flush=True)

    def end(self) -> int:
        """Print the verdicts; the exit status: 1 if a number is missing."""
        if self._as_json:
            self._json({"measurement": "verdict", "targets": [asdict(verdict) for verdict in self._verdicts]})
        elif self._verdicts:
            print("\nverdict")
            words = {True: "yes", False: "NO", None: "not measured"}
            rows = [(v.part, v.target, v.measured or "-", words[v.held]) for v in self._verdicts]
            print_table([("part", "target", "measured", "held"), *rows])
        return 1 if self._failures else 0

    def _json(self, row: dict[str, Any]) -> None:
        print(json.dumps(row, ensure_ascii=False), flush=True)

    def _clean(self, text: str) -> str:
        for secret, word in self._hidden.items():
            text = text.replace(secret, word)
        return text


def print_table(rows: Sequence[Row]) -> None:
    """Columns side by side: those with a figure in them to the right, words and the first to the left."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [number > 0 and any(text[:1].isdigit() for text in column) for number, column in enumerate(columns)]
    for row in rows:
        cells = [
            text.rjust(width) if is_right else text.ljust(width)
            for text, width, is_right in zip(row, widths, right, strict=True)
        ]
        print("  " + "  ".join(cells).rstrip(), flush=True)


def per_second(rate: float) -> str:
    """A rate in words: 2.35 M/s, 812 k/s."""
    return f"{rate / 1e6:.2f} M/s" if rate >= 1e6 else f"{rate / 1e3:.0f} k/s"


def megabytes(size: float) -> str:
    """Millions of bytes."""
    return f"{size / 1e6:,.0f} MB"


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that ``percent`` of the values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(len(ordered) * percent / 100) - 1))]


def median(values: Sequence[float]) -> float:
    """The median; BenchError when there is nothing to take it of."""
    if not values:
        raise BenchError("no run gave a number")
    return statistics.median(values)


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
