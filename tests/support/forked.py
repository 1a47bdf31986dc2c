"""``indexd`` in forks of a process that has everything loaded: a tenth of the time that an interpreter takes to start.

``start`` returns a process that is used as one of ``subprocess.Popen``. Each runs ``indexd.__main__.main`` with the
words and the environment that it is given, as the command does; the command itself is started where a test says so.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_PAUSE = 0.003
_NEVER = 1e9


class Forked:
    """One process, with what tests use of ``subprocess.Popen``."""

    def __init__(self, server: _Server, words: Sequence[str], env: Mapping[str, str], out: Path, errors: Path) -> None:
        self._server, self.args = server, list(words)
        self.pid = server.fork(self.args, env, out, errors)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, the negative number of the signal that ended it, or None."""
        if self.returncode is None and (code := self._server.ended(self.pid)) is not None:
            self.returncode = code
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The same once it has ended; raises subprocess.TimeoutExpired."""
        deadline = time.monotonic() + (_NEVER if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            time.sleep(_PAUSE)
        return code

    def send_signal(self, number: int) -> None:
        """Nothing where it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


def start(words: Sequence[object], env: Mapping[str, str], out: Path, errors: Path) -> Forked:
    """Run ``indexd WORDS``; its two streams are written to files. One that is not waited for ends with this process."""
    return Forked(_server(os.getpid()), [str(word) for word in words], env, out, errors)


@functools.cache
def _server(_pid: int) -> _Server:
    return _Server()


class _Server:
    """This side of the process that forks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffer = b""
        self._codes: dict[int, int] = {}
        self._ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={name: os.environ[name] for name in os.environ if name != "NUMBA_DISABLE_JIT"},
                pass_fds=(theirs.fileno(),),
            )
        with self._lock:
            assert self._line() == ["ready"]

    def fork(self, words: Sequence[str], env: Mapping[str, str], out: Path, errors: Path) -> int:
        """The new process's id."""
        asked = {"words": words, "env": dict(env), "cwd": str(Path.cwd()), "out": str(out), "errors": str(errors)}
        with self._lock:
            self._ours.sendall(json.dumps(asked).encode() + b"\n")
            while (line := self._line())[0] != "forked":
                self._codes[line[1]] = line[2]
            pid: int = line[1]
            self._codes.pop(pid, None)
            return pid

    def ended(self, pid: int) -> int | None:
        """How a process has ended, if it has."""
        with self._lock:
            while select.select([self._ours], [], [], 0)[0] or b"\n" in self._buffer:
                _, ended, code = self._line()
                self._codes[ended] = code
            # Given out once: another process may get the same id.
            return self._codes.pop(pid, None)

    def _line(self) -> list[Any]:
        while b"\n" not in self._buffer:
            data = self._ours.recv(65536)
            assert data, "the process that forks has ended"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        found: list[Any] = json.loads(line)
        return found


# --- the process that forks -----------------------------------------------------------------------------------------


def _load() -> None:
    """Import and compile what a daemon needs, by what commands do with a small log; no thread is left."""
    import starlette.applications  # noqa: F401 - what follows a fork finds it imported
    import uvicorn  # noqa: F401 - the same

    from indexd.cli.main import main
    from indexd.service import daemon  # noqa: F401 - the same

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from support.small_log import SIZES, write_log

    with tempfile.TemporaryDirectory(prefix="indexd-forked-") as name:
        store, data = Path(name, "store"), Path(name, "data")
        write_log(store, 200)
        silent = os.open(os.devnull, os.O_WRONLY)
        errors = os.dup(2)
        os.dup2(silent, 2)
        words = ["--store", str(store), "--data", str(data), *SIZES]
        for command in ("--recover", "verify --deep", "audit", "query-key -t T -k k"):
            with contextlib.suppress(SystemExit):
                main([*command.split(), *(words[2:4] if command.startswith("query") else words)])
        os.dup2(errors, 2)
        os.close(errors)
        os.close(silent)
        assert (data / "frontier").exists()
    assert threading.active_count() == 1, threading.enumerate()


def _serve(theirs: socket.socket) -> list[str]:
    """Fork as asked until the other side is gone; returns in each fork, with the words of its command."""
    wakes, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    theirs.sendall(b'["ready"]\n')
    buffer = b""
    children: set[int] = set()
    while True:
        ready = select.select([theirs.fileno(), wakes], [], [])[0]
        if wakes in ready:
            os.read(wakes, 4096)
        if theirs.fileno() in ready:
            data = theirs.recv(65536)
            if not data:
                for pid in children:
                    os.kill(pid, signal.SIGKILL)
                os._exit(0)
            buffer += data
        while b"\n" in buffer:
            line, _, buffer = buffer.partition(b"\n")
            asked = json.loads(line)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                os.close(wake)
                os.close(wakes)
                theirs.close()
                return _become(asked)
            children.add(pid)
            theirs.sendall(json.dumps(["forked", pid]).encode() + b"\n")
        for pid in list(children):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                children.remove(pid)
                theirs.sendall(json.dumps(["ended", pid, os.waitstatus_to_exitcode(status)]).encode() + b"\n")


def _become(asked: dict[str, Any]) -> list[str]:
    """Directory, environment, streams and signals of a process that was just started."""
    os.chdir(str(asked["cwd"]))
    os.environ.clear()
    os.environ.update(asked["env"])
    for descriptor, path in ((1, asked["out"]), (2, asked["errors"])):
        file = os.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    words: list[str] = asked["words"]
    return words


if __name__ == "__main__":
    _load()
    gc.freeze()
    sys.argv = ["indexd", *_serve(socket.socket(fileno=int(sys.argv[1])))]
    from indexd.__main__ import main

    main()
