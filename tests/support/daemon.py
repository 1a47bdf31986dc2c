"""The real ``indexd`` command in a process of its own: one that runs beside a store, or one that ends by itself.

::

    with Daemon(store, data, "--segment-size", "256KiB") as daemon:
        daemon.wait_caught_up()
        assert daemon.terminate() == 0
    done = indexd("rebuild", "--store", store, "--out", out)
    assert_same_index(data, out)

Whatever is set in ``INDEXD_...`` outside does not reach these processes; ``NUMBA_CACHE_DIR``, which conftest.py sets,
does, so that the kernels are compiled once for all of them.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import signal
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar
from unittest import mock

import pytest

from indexd.cli.main import main
from indexd.storage.names import segment_base, segment_name
from support.forked import Forked, start
from support.same_index import assert_same_index, index_files
from support.small_log import SIZES, write_log

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Daemon", "DaemonError", "assert_same_index", "compile_kernels", "index_files", "indexd", "indexd_here"]

T = TypeVar("T")
COMMAND = Path(sysconfig.get_path("scripts")) / "indexd"
#: Short intervals, so that a test of a few seconds sees many drains and flushes.
QUICK = {
    "INDEXD_DRAIN_INTERVAL": "0.05",
    "INDEXD_FLUSH_INTERVAL": "0.1",
    # Tests kill it again and again; what gives up then has tests of its own.
    "INDEXD_UNCLEAN_STARTS_MAX": "0",
    # Many run at once, on machines whose disk may be as full as it likes.
    "INDEXD_HTTP": "off",
    "INDEXD_DISK_USED_MAX": "1",
}
WAIT_SECONDS = 60.0
_PAUSE = 0.005


def indexd(
    *args: object, env: Mapping[str, str] | None = None, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; whatever its exit code is, it is for the caller to judge."""
    with tempfile.TemporaryDirectory(prefix="indexd-said-") as name:
        out, errors = Path(name, "out"), Path(name, "errors")
        process = start(args, environment(env), out, errors)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        return subprocess.CompletedProcess(process.args, code, out.read_text("utf-8"), errors.read_text("utf-8"))


def indexd_here(*args: object) -> subprocess.CompletedProcess[str]:
    """The same in this process, for tests with many commands; what the compiler needs is loaded once then."""
    if os.environ.get("NUMBA_DISABLE_JIT") == "1":
        return indexd(*args)
    words = [str(arg) for arg in args]
    out, errors = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, environment(), clear=True),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(errors),
        pytest.raises(SystemExit) as end,
    ):
        main(words)
    assert isinstance(end.value.code, int)
    return subprocess.CompletedProcess(words, end.value.code, out.getvalue(), errors.getvalue())


def rebuild(store: Path, out: Path, *flags: str) -> dict[str, Any]:
    """Build ``out`` from the log, undisturbed; the figures that it says.

    Where older frames stand behind the end and no broker can be asked, it ends with 4; a new daemon builds ``out``.
    """
    done = indexd_here("rebuild", "--json", "--store", store, "--data", out.with_name("unused"), "--out", out, *flags)
    if done.returncode == 4 and "skip" not in flags:
        out.mkdir()
        with Daemon(store, out, *flags) as daemon:
            daemon.wait_state(lambda row: bool(row.get("corrupt") or row.get("caughtUp")))
            assert daemon.terminate() == 0
        return {}
    assert done.returncode == 0, done.stderr
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


class DaemonError(AssertionError):
    """The daemon did not do in time what a test waits for; the message quotes its log."""


class Daemon:
    """``indexd --store STORE --data DATA FLAGS`` with ``QUICK`` and then ``env`` in its environment.

    ``--store`` is left out where FLAGS name a ``--broker-conf``, which says it too. ``tracer``: words before it all.
    Runs in a ``with`` block, at whose end it is killed if it still runs. Its log lines are in ``log``, beside ``data``.
    Without a tracer and with no other environment than INDEXD_... it is a fork of a process that has all loaded.
    """

    def __init__(
        self, store: Path, data: Path, *flags: object, env: Mapping[str, str] | None = None, tracer: Sequence[str] = ()
    ) -> None:
        self.store, self.data = store, data
        words = [] if "--broker-conf" in flags else ["--store", str(store)]
        self._words = [*words, "--data", str(data), *map(str, flags)]
        self._env, self._tracer = environment(QUICK | dict(env or {})), tracer
        # What was loaded in another environment, or by another program, is of no use.
        self._is_forked = not tracer and all(name.startswith("INDEXD_") for name in env or ())
        self._process: subprocess.Popen[bytes] | Forked | None = None
        data.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=data.parent, prefix=f"{data.name}-", suffix=".log")
        os.close(handle)
        self.log = Path(name)

    def __repr__(self) -> str:
        state = "not started" if self._process is None else f"pid {self.pid}, exit {self._process.poll()}"
        return f"Daemon({self.data}, {state})"

    def __enter__(self) -> Self:
        compile_kernels()
        if self._is_forked:
            self._process = start(self._words, self._env, Path(os.devnull), self.log)
            return self
        command = [*self._tracer, str(COMMAND), *self._words]
        with self.log.open("wb") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, env=self._env
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        """Its process id; it stays after the end."""
        return self._running.pid

    @property
    def _running(self) -> subprocess.Popen[bytes] | Forked:
        assert self._process is not None, "use it in a with block"
        return self._process

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        """The log lines so far, of one event or all; a line that is still being written is left out."""
        lines = self.log.read_text("utf-8").split("\n")[:-1]
        rows = [json.loads(line) for line in lines if line.startswith("{")]
        return [row for row in rows if name in (None, row["event"])]

    def wait_event(self, name: str, timeout: float = WAIT_SECONDS) -> dict[str, Any]:
        """The first log line of that event, as soon as it is there."""
        return self.wait_for(lambda: next(iter(self.events(name)), None), f"event {name}", timeout)

    def state(self) -> dict[str, Any]:
        """DATA/state as this process wrote it last; empty before its first drain."""
        try:
            row: dict[str, Any] = json.loads((self.data / "state").read_bytes())
        except FileNotFoundError:
            return {}
        return row if row["pid"] == self.pid and "recovering" not in row else {}

    def wait_caught_up(self, offset: int | None = None, timeout: float = WAIT_SECONDS) -> dict[str, Any]:
        """The state once everything before ``offset`` is built; without one, once no frame stands where it is."""

        def caught_up() -> dict[str, Any] | None:
            row = self.state()
            if not row or not row["caughtUp"] or row["dispatchBehindBytes"]:
                return None
            done = row["phyOffset"] >= offset if offset is not None else not self._is_written(row["phyOffset"])
            return row if done else None

        return self.wait_for(caught_up, f"to be caught up with {offset or 'the log'}", timeout)

    def wait_state(self, holds: Callable[[dict[str, Any]], bool], timeout: float = WAIT_SECONDS) -> dict[str, Any]:
        """The state as soon as that holds of it."""

        def look() -> dict[str, Any] | None:
            row = self.state()
            return row if row and holds(row) else None

        return self.wait_for(look, "its state", timeout)

    def wait_durable(self, offset: int) -> dict[str, Any]:
        """The state once everything before ``offset`` is on the disk: a kill loses nothing of that any more."""
        return self.wait_state(lambda row: bool(row["durableOffset"] >= offset))

    def kill(self) -> None:
        """SIGKILL, if it still runs, and wait for its end."""
        if self._running.poll() is None:
            self._running.kill()
        self._running.wait(WAIT_SECONDS)

    def terminate(self, number: signal.Signals = signal.SIGTERM, timeout: float = WAIT_SECONDS) -> int:
        """Ask it to stop; its exit code."""
        self._running.send_signal(number)
        return self.wait(timeout)

    def wait(self, timeout: float = WAIT_SECONDS) -> int:
        """Wait until it ends by itself; its exit code."""
        try:
            return self._running.wait(timeout)
        except subprocess.TimeoutExpired:
            raise DaemonError(f"{self} does not end: {self._tail()}") from None

    def ended_within(self, seconds: float) -> int | None:
        """Its exit code if it ends by itself so soon."""
        try:
            return self._running.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def peak_memory(self) -> int:
        """The most memory that it has held at a time, while it runs, in bytes."""
        return int(Path(f"/proc/{self.pid}/status").read_text().partition("VmHWM:")[2].split()[0]) << 10

    def wait_for(self, look: Callable[[], T | None], what: str, timeout: float = WAIT_SECONDS) -> T:
        """What ``look`` returns, as soon as that is not None."""
        deadline = time.monotonic() + timeout
        while True:
            ended = self._running.poll()
            found = look()
            if found is not None:
                return found
            if ended is not None or time.monotonic() > deadline:
                raise DaemonError(f"waited for {what} of {self}, state {self.state()}: {self._tail()}")
            time.sleep(_PAUSE)

    def _is_written(self, phy_offset: int) -> bool:
        directory = self.store / "commitlog"
        size = next((path.stat().st_size for path in directory.iterdir() if segment_base(path.name) is not None), 0)
        if size == 0:
            return False
        path = directory / segment_name(phy_offset - phy_offset % size)
        if not path.exists():
            return False
        with path.open("rb") as file:
            return any(os.pread(file.fileno(), 8, phy_offset % size))

    def _tail(self) -> str:
        return f"(all of it in {self.log})\n" + "\n".join(self.log.read_text("utf-8").splitlines()[-20:])


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """What such a process is given: none of our own variables but ``extra``, nothing that turns compiling off."""
    kept = {name: value for name, value in os.environ.items() if not re.match("INDEXD_|NUMBA_DISABLE_JIT$", name)}
    return {**kept, **(extra or {})}


@functools.cache
def compile_kernels() -> None:
    """Fill the shared cache once, so that no test waits for the compiler or is killed inside it."""
    with tempfile.TemporaryDirectory(prefix="indexd-compile-") as name:
        store, data = Path(name, "store"), Path(name, "data")
        write_log(store, 2000)
        for _ in range(2):  # the second compares what the first has built
            ended = indexd("--recover", "--store", store, "--data", data, *SIZES, timeout=600)
            assert ended.returncode == 0, ended.stderr
