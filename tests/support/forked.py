"""``indexd`` in forks of a process that has everything loaded: a tenth of the time that an interpreter takes to start.

``start`` returns a process that is used as one of ``subprocess.Popen``. Each runs ``indexd.__main__.main`` with the
words and the environment that it is given, as the command does; the command itself is started where a test says so.
The process that forks is multiprocessing's fork server, which imports ``support.loaded`` once.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock


class Forked:
    """One process, with what tests use of ``subprocess.Popen``."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str], out: Path, errors: Path) -> None:
        self.args = list(words)
        given = (self.args, dict(env), str(Path.cwd()), str(out), str(errors))
        self._process = multiprocessing.get_context("forkserver").Process(target=_run, args=given, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Its exit code, the negative number of the signal that ended it, or None."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The same once it has ended; raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        """Nothing where it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


def start(words: Sequence[object], env: Mapping[str, str], out: Path, errors: Path) -> Forked:
    """Run ``indexd WORDS``; its two streams are written to files. One that is not waited for ends with this process."""
    _load()
    return Forked([str(word) for word in words], env, out, errors)


@functools.cache
def _load() -> None:
    # What forks finds the same modules, and has its kernels compiled, whatever runs the tests.
    with mock.patch.dict(os.environ, {"PYTHONPATH": os.pathsep.join(sys.path)}):
        os.environ.pop("NUMBA_DISABLE_JIT", None)
        forkserver.set_forkserver_preload(["support.loaded"])
        forkserver.ensure_running()


def _run(words: list[str], env: dict[str, str], cwd: str, out: str, errors: str) -> None:
    # In the fork: directory, environment and streams of a process that was just started.
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for descriptor, path in ((1, out), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), descriptor)
    sys.argv = ["indexd", *words]
    from indexd.__main__ import main

    main()
