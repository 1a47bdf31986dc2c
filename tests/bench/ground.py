"""What the parts share: the report, the store, indexd as an operator runs it, and what the kernel says about it."""

from __future__ import annotations

import filecmp
import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

from support import daemon
from support.commitlog_writer import CommitLogWriter, FrameSpec
from support.rocketmq import arguments, figures_of, run, why_missing

Row = Sequence[str]


class BenchError(Exception):
    """Something could not be measured; the message says why."""


class Report:
    """Prints each part as soon as it is measured. ``hidden`` maps texts that must not be printed to what stands in."""

    def __init__(self, hidden: dict[str, str]) -> None:
        self._hidden = hidden
        self._verdicts: list[Row] = []
        self._has_failed = False

    def note(self, part: str, text: str) -> None:
        """A line of its own between the tables."""
        for secret, shown in self._hidden.items():
            text = text.replace(secret, shown)
        print(f"\n{part}: {text}", flush=True)

    def failure(self, part: str, reason: str) -> None:
        """A part, or a piece of it, that gave no number."""
        self._has_failed = True
        self.note(part, f"not measured: {reason}")

    def part(self, name: str, title: str, rows: Sequence[Row]) -> None:
        """One part: ``rows``, of which the first is the head."""
        print(f"\n{name}: {title}", flush=True)
        columns = list(zip(*rows, strict=True))
        widths = [max(map(len, column)) for column in columns]
        # Words and the first column stand to the left.
        right = [number > 0 and any(text[:1].isdigit() for text in column) for number, column in enumerate(columns)]
        for row in rows:
            cells = zip(row, widths, right, strict=True)
            words = (text.rjust(width) if is_right else text.ljust(width) for text, width, is_right in cells)
            print("  " + "  ".join(words).rstrip(), flush=True)

    def verdict(self, part: str, target: str, measured: str, held: bool) -> None:
        """One target; remembered for the end."""
        self._verdicts.append((part, target, measured, "yes" if held else "NO"))

    def end(self) -> int:
        """Print the verdicts; the exit status: 1 if a number is missing."""
        self.part("verdict", "", [("part", "target", "measured", "held"), *self._verdicts])
        return int(self._has_failed)


def per_second(rate: float) -> str:
    """A rate in words: 2.35 M/s, 812 k/s."""
    return f"{rate / 1e6:.2f} M/s" if rate >= 1e6 else f"{rate / 1e3:.0f} k/s"


def megabytes(size: float) -> str:
    """Millions of bytes."""
    return f"{size / 1e6:,.0f} MB"


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that ``percent`` of the values do not exceed (nearest rank)."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


SEGMENT_SIZE = 1 << 30
SLOTS, ENTRIES = 5_000_000, 20_000_000
QUEUE_FILE_SIZE = 6_000_000
BODY_SIZE = 100
ENTRIES_PER_MESSAGE = 4
# RocketMQ's own defaults; the programs take small ones unless told otherwise.
DEFAULT_SIZES = {"segment": SEGMENT_SIZE, "slots": SLOTS, "entries": ENTRIES, "queuefile": QUEUE_FILE_SIZE}
#: Options that leave out every output but the key index, which is all that RocketMQ's IndexService builds.
INDEX_ALONE = ("--consume-queue", "false", "--sparse", "false")
#: What support.daemon sets for tests, as it is by default.
_DEFAULTS = {"INDEXD_DRAIN_INTERVAL": "3", "INDEXD_FLUSH_INTERVAL": "30", "INDEXD_UNCLEAN_STARTS_MAX": "5"}
SECONDS = 600
# 16 MiB of log: a reader that catches up calls kernels that one at the end does not.
_WARM_MESSAGES, _WARM_BODY_SIZE = 4000, 4096
_COMPILE_QUERIES = "from indexd.serve.remoting.key_queries import load_key_queries; load_key_queries()"


class Ground:
    """Everything that a part needs to know; ``work`` is ours alone and removed at the end."""

    def __init__(self, work: Path, messages: int, seconds: int) -> None:
        self.work, self.messages, self.seconds = work, messages, seconds
        self.jvm_home = work / "jvm"
        self.java_missing = why_missing()
        work.mkdir(exist_ok=True)
        # An empty one, so that neither the machine's nor the user's configuration is measured.
        self.config_file = work / "indexd.toml"
        self.config_file.touch()

    @property
    def made_by(self) -> str:
        """Who wrote the store."""
        return "the built-in writer" if self.java_missing else "RocketMQ's store"

    def store(self) -> Path:
        """The store of ``messages`` plain messages, made at the first call."""
        path = self.work / "store"
        if path.exists():
            return path
        progress(f"writing {self.messages:,} messages with {self.made_by}")
        if self.java_missing:
            write_store(path, self.messages)
        else:
            words = arguments(
                store=path, count=self.messages, body=BODY_SIZE, set_messageIndexEnable=False, **DEFAULT_SIZES
            )
            run("Store", "write", *words, home=self.jvm_home, timeout=300 + self.messages / 5000)
        return path

    def call(self, name: str, *words: str, store: Path | None = None, timeout: float = SECONDS) -> tuple[str, float]:
        """Run to the end; standard output, and the wall time of the process. BenchError unless it ends with 0."""
        given = () if store is None else ("--config", str(self.config_file), "--store", str(store))
        began = time.perf_counter()
        done = subprocess.run(
            [daemon.COMMAND, name, *given, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
            env=daemon.environment(),
        )
        seconds = time.perf_counter() - began
        if done.returncode != 0:
            raise BenchError(f"indexd {name} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
        return done.stdout, seconds

    def figures(self, name: str, *words: str, store: Path) -> dict[str, Any]:
        """What a command says last with --json, with ``wallSeconds`` as seen from outside."""
        said, seconds = self.call(name, *words, "--json", store=store)
        found: dict[str, Any] = json.loads(said.splitlines()[-1])
        return found | {"wallSeconds": seconds}

    def reindex(self, store: Path, reference: Path, rounds: int) -> list[dict[str, Any]]:
        """RocketMQ's IndexService in one JVM; the figures of each round."""
        warm_log(store)
        words = arguments(store=store, index=reference, rounds=rounds, **DEFAULT_SIZES)
        said = run("Store", "reindex", *words, home=self.jvm_home, timeout=300 + self.messages * rounds / 10_000)
        os.sync()
        return [figures_of(line) for line in said.splitlines()]

    @contextmanager
    def kernels_compiled(self) -> Iterator[None]:
        """Every kernel is in the compiler's cache, and stays as it is: BenchError if the block made it work."""
        # A small store through a rebuild, the daemon and a forced recovery calls all but that of queries.
        store, out = self.work / "small", self.work / "small.out"
        if not out.exists():
            write_store(store, _WARM_MESSAGES, _WARM_BODY_SIZE)
            self.call("rebuild", "--out", str(out), store=store)
            with Daemon(self, store, self.work / "small.data") as warm:
                warm.wait_messages(_WARM_MESSAGES)
            self.call("--recover", "--data", str(warm.data), store=store)
            subprocess.run([sys.executable, "-c", _COMPILE_QUERIES], timeout=SECONDS, check=True)
        before = _compiled()
        yield
        if _compiled() != before:
            raise BenchError("kernels were compiled meanwhile: the numbers mean nothing; is their source being edited?")


def _compiled() -> set[tuple[str, int]]:
    place = Path(os.environ["NUMBA_CACHE_DIR"])
    return {(str(path), path.stat().st_mtime_ns) for path in place.rglob("*.nbc")}


class Usage(NamedTuple):
    """A process at one moment: CPU seconds so far, resident bytes, and those of them that are no file's."""

    cpu_seconds: float
    rss: int
    anonymous: int


class Daemon(daemon.Daemon):
    """``indexd run`` in a ``with`` block as an operator runs it: asked to stop at its end; ``flags`` are more options.

    ``began`` is when it was executed, on the clock of ``time.perf_counter``.
    """

    def __init__(self, ground: Ground, store: Path, data: Path, *flags: str) -> None:
        words = ["--config", str(ground.config_file), "--log-format", "json", "--http", "127.0.0.1:0"]
        # Behind a program, so that it is a process of its own and no fork of one that has all loaded.
        super().__init__(store, data, *words, *flags, env=_DEFAULTS, tracer=["env"])
        self.began = 0.0

    def __enter__(self) -> Self:
        daemon.compile_kernels()
        self.began = time.perf_counter()
        return super().__enter__()

    def __exit__(self, kind: object = None, *_: object) -> None:
        code = self.ended_within(0)
        if kind is None and code is None:
            code = self.terminate(timeout=SECONDS)
        self.kill()
        if kind is None and code not in (0, -9):  # whoever has killed it wanted that
            raise BenchError(f"indexd run ended with {code}, see {self.log}")

    def age(self) -> float:
        """Seconds since its execution."""
        return time.perf_counter() - self.began

    def wait_offset(self, phy_offset: int) -> float:
        """Until everything before ``phy_offset`` is built; the seconds from its execution to then."""
        self.wait_state(lambda row: bool(row.get("phyOffset", -1) >= phy_offset), SECONDS)
        return self.age()

    def wait_messages(self, messages: int) -> None:
        """Until that many are built and it has seen the log's end."""
        self.wait_state(lambda row: bool(row.get("messages", -1) >= messages and row["caughtUp"]), SECONDS)

    def usage(self) -> Usage:
        """From /proc; raises OSError when the process is gone."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        status = dict(line.split(":", 1) for line in Path(f"/proc/{self.pid}/status").read_text().splitlines())
        rss, anonymous = (int(status[name].split()[0]) * 1024 for name in ("VmRSS", "RssAnon"))
        return Usage((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), rss, anonymous)


def same_files(one: Path, other: Path) -> bool:
    """Whether the index files of two directories are the same, byte for byte; their names tell the time and differ."""
    left, right = (sorted(path for path in place.iterdir() if path.name.isdecimal()) for place in (one, other))
    pairs = zip(left, right, strict=False)
    return len(left) == len(right) > 0 and all(filecmp.cmp(a, b, shallow=False) for a, b in pairs)


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
                "UNIQ_KEY": f"7F00000100002A13{1 << 40 ^ i:016X}",
                "TAGS": "TagA",
            }
            spec = FrameSpec(
                topic=choice.choice(("TopicTest", "OrderPaid")),
                body=noise[begin : begin + body_size],
                properties=properties,
                queue_id=choice.randrange(queues // 2),
                born_timestamp=now,
                store_timestamp=now + i // 200,
            )
            writer.append(spec)


def warm_log(store: Path) -> None:
    """Read the whole log once, so that every run finds it in the page cache; wait until the disk has nothing to do."""
    block = bytearray(4 << 20)
    for path in sorted((store / "commitlog").iterdir()):
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass
    os.sync()


def progress(text: str) -> None:
    """A line on standard error; standard output is for results."""
    print(f"bench: {text}", file=sys.stderr, flush=True)
