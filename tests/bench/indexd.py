"""Runs the installed command as an operator would, and reads what the kernel says about it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from bench.ground import BenchError, Ground, write_store
from indexd.config import state_directory

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
#: Options that leave out every output but the key index, which is all that RocketMQ's IndexService builds.
INDEX_ALONE = ("--consume-queue", "false", "--sparse", "false")
# 16 MiB of log: a reader that catches up calls kernels that one at the end does not.
_WARM_MESSAGES, _WARM_BODY_SIZE = 4000, 4096
_COMPILE_SECONDS = 600
_COMPILE_QUERIES = """
from indexd.config.compiled import prepare_compiler
prepare_compiler()
from indexd.serve.remoting.key_queries import load_key_queries
load_key_queries()
"""
_STOP_SECONDS = 120
# Finer than what is measured with it.
_POLL_SECONDS = 0.003


@dataclass(frozen=True, slots=True)
class Usage:
    """A process at one moment: CPU seconds so far, resident bytes, and those of them that are no file's."""

    cpu_seconds: float
    rss: int
    anonymous: int


def usage(pid: int) -> Usage:
    """From /proc; raises OSError when the process is gone."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    if "VmRSS" not in status:
        raise ProcessLookupError(f"process {pid} has ended")
    rss, anonymous = (int(status[name].split()[0]) * 1024 for name in ("VmRSS", "RssAnon"))
    return Usage((int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND, rss, anonymous)


def command(*words: str) -> list[str]:
    """The command line of indexd: the one beside our own Python."""
    installed = Path(sys.executable).with_name("indexd")
    return [str(installed), *words]


def call(ground: Ground, *words: str, timeout: float = 600) -> tuple[str, float]:
    """Run to the end; standard output, and the wall time of the whole process. BenchError unless it ends with 0."""
    began = time.perf_counter()
    done = subprocess.run(
        command(*words),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
        env=ground.environment(),
    )
    seconds = time.perf_counter() - began
    if done.returncode != 0:
        raise BenchError(f"indexd {words[0]} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout, seconds


def options(ground: Ground, store: Path) -> list[str]:
    """What every command here is given."""
    return ["--config", str(ground.config_file), "--store", str(store)]


def rebuild(ground: Ground, store: Path, out: Path, *flags: str) -> dict[str, Any]:
    """``indexd rebuild --json``: its figures, with ``wallSeconds`` as seen from outside."""
    words = [*options(ground, store), *flags, "--out", str(out), "--json"]
    said, seconds = call(ground, "rebuild", *words, timeout=_COMPILE_SECONDS)
    figures: dict[str, Any] = json.loads(said.splitlines()[-1])
    return figures | {"wallSeconds": seconds}


@contextmanager
def kernels_compiled(ground: Ground) -> Iterator[None]:
    """Every kernel is in the compiler's cache, and stays as it is: BenchError if the block made the compiler work."""
    _compile_kernels(ground)
    before = _compiled()
    yield
    if _compiled() != before:
        raise BenchError("kernels were compiled meanwhile, so the numbers mean nothing; is their source being edited?")


def _compiled() -> set[tuple[str, int]]:
    own = os.environ.get("NUMBA_CACHE_DIR")
    place = Path(own) if own else state_directory(os.environ) / "compiled"
    return {(str(path), path.stat().st_mtime_ns) for path in place.rglob("*.nbc")}


def _compile_kernels(ground: Ground) -> None:
    # A small store through a rebuild, the daemon and a forced recovery calls all but that of queries.
    store, out = ground.work / "small", ground.work / "small.out"
    if out.exists():
        return
    write_store(store, _WARM_MESSAGES, _WARM_BODY_SIZE)
    rebuild(ground, store, out)
    with Daemon(ground, store, ground.work / "small.data") as daemon:
        daemon.wait_for_event("running", _COMPILE_SECONDS)
        daemon.wait_for_messages(_WARM_MESSAGES, _COMPILE_SECONDS)
    call(ground, "--recover", *options(ground, store), "--data", str(daemon.data), timeout=_COMPILE_SECONDS)
    words = [sys.executable, "-c", _COMPILE_QUERIES]
    subprocess.run(words, env=ground.environment(), timeout=_COMPILE_SECONDS, check=True)


class Daemon:
    """``indexd run`` in a ``with`` block: asked to stop at its end, killed if it does not; ``flags`` are more options.

    ``began`` is when it was executed, on the clock of ``time.perf_counter``.
    """

    def __init__(self, ground: Ground, store: Path, data: Path, *flags: str) -> None:
        self.data = data
        self._log = data.with_name(data.name + ".log")
        self._killed = False
        words = ["run", *options(ground, store), "--data", str(data), "--log-format", "json"]
        words += ["--http", "127.0.0.1:0", "--disk-used-max", "1", *flags]
        with self._log.open("wb") as log:
            self.began = time.perf_counter()
            self._process = subprocess.Popen(
                command(*words),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env=ground.environment(),
            )
        ground.note_process(self._process)
        self.pid = self._process.pid

    def __repr__(self) -> str:
        return f"Daemon(pid={self.pid}, data={self.data})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._process.poll() is None:
            self._process.terminate()
        try:
            code = self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait(_STOP_SECONDS)
        if code != 0 and kind is None and not self._killed:
            raise BenchError(f"indexd run ended with {code}: {self._said()}")

    def kill(self) -> None:
        """As kill -9 does; it is gone when this returns, and the ``with`` block is content with that."""
        self._killed = True
        self._process.kill()
        self._process.wait(_STOP_SECONDS)

    def usage(self) -> Usage:
        """Its CPU time and memory now."""
        return usage(self.pid)

    def state(self) -> dict[str, Any] | None:
        """DATA/state, None while there is none."""
        try:
            row: dict[str, Any] = json.loads((self.data / "state").read_bytes())
        except FileNotFoundError:
            return None
        return row

    def wait_for_event(self, event: str, seconds: float) -> float:
        """Until it has logged the event; the seconds from its execution to then."""
        self._wait(f"logged no {event!r}", seconds, lambda: event in self._events())
        return time.perf_counter() - self.began

    def event(self, *names: str) -> dict[str, Any]:
        """The line it has logged of the first of these events that there is; BenchError without one."""
        events = self._events()
        for name in names:
            if name in events:
                return events[name]
        raise BenchError(f"indexd run logged none of {names}: {self._said()}")

    def wait_for_offset(self, phy_offset: int, seconds: float) -> float:
        """Until everything before ``phy_offset`` is built; the seconds from its execution to then."""

        def built() -> bool:
            row = self.state()
            return row is not None and row["pid"] == self.pid and row.get("phyOffset", -1) >= phy_offset

        self._wait(f"has not reached offset {phy_offset}", seconds, built)
        return time.perf_counter() - self.began

    def wait_for_messages(self, messages: int, seconds: float) -> None:
        """Until that many are built and it has seen the log's end."""

        def built() -> bool:
            row = self.state()
            return row is not None and row.get("messages", -1) >= messages and row["caughtUp"]

        self._wait(f"has not indexed {messages} messages", seconds, built)

    def check_running(self) -> None:
        """BenchError, with what it said, if it has ended."""
        if self._process.poll() is not None:
            raise BenchError(f"indexd run ended with {self._process.returncode}: {self._said()}")

    def _wait(self, problem: str, seconds: float, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            self.check_running()
            if time.monotonic() > deadline:
                raise BenchError(f"indexd run {problem} within {seconds:.0f} s: {self._said()}")
            time.sleep(_POLL_SECONDS)

    def _events(self) -> dict[str, dict[str, Any]]:
        # The last line may be half written.
        lines = self._log.read_text(errors="replace").split("\n")[:-1]
        rows = [json.loads(line) for line in lines if line.startswith("{")]
        return {row.get("event", ""): row for row in rows}

    def _said(self) -> str:
        return self._log.read_text(errors="replace").strip()[-800:]
