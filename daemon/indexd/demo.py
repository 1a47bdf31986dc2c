"""``indexd demo``: the whole of indexd in under a minute, told in plain words.

Where no broker is at hand a built-in writer makes a small live commitlog of real frames that grows while the daemon
runs. With a store of yours, that store is followed instead, and only read. The daemon is the same command that an
operator runs, as a process of its own; it is killed with -9 on the way.
"""

from __future__ import annotations

import importlib.util
import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from indexd.commitlog.decoder import Message
from indexd.commitlog.writer import CommitLogWriter, FrameSpec
from indexd.config import load
from indexd.config.load import check_outside
from indexd.errors import IndexdError
from indexd.query import open_index
from indexd.storage.disk import Disk
from indexd.storage.names import DataFiles

_SEGMENT_SIZE = 4 << 20
_MESSAGES_PER_SECOND = 2000
_TOPICS = ("OrderPaid", "StockChanged", "订单主题")
_WAIT_SECONDS = 120.0
_OUTPUTS = ("index", "consumequeue", "sparse")
_LINES_SHOWN = 20
# A demo's index file is small, so that some get full before the reader's eyes.
_DEMO_FLAGS = ("--segment-size", str(_SEGMENT_SIZE), "--hash-slot-num", "2000", "--index-num", "20000")


class DemoWriter:
    """Writes messages at a steady pace from a thread until ``stop``; ``last`` is one that is certainly in the log."""

    def __init__(self, store: Path) -> None:
        self._writer = CommitLogWriter(store / "commitlog", _SEGMENT_SIZE)
        self._random = random.Random(7)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self.count = 0
        self.last = self._append()
        self._thread.start()

    def _append(self) -> tuple[str, str, str, int]:
        now = int(time.time() * 1000)
        topic = self._random.choice(_TOPICS)
        key, unique = f"order-{self.count}", f"7F00000100002A9F{self.count:016X}"
        properties = {
            "KEYS": f"{key} user-{self._random.randrange(500)}",
            "UNIQ_KEY": unique,
            "TAGS": self._random.choice(("paid", "open", "加急")),
        }
        body = f'{{"order": {self.count}, "at": {now}}}'.encode()
        spec = FrameSpec(topic, body=body, properties=properties, born_timestamp=now, store_timestamp=now)
        offset = self._writer.append(spec)
        self.count += 1
        return topic, key, unique, offset

    def _run(self) -> None:
        while not self._stop.is_set():
            for _ in range(_MESSAGES_PER_SECOND // 50):
                self.last = self._append()
            self._stop.wait(0.02)

    def stop(self) -> None:
        """End the thread; the log stays as a crashed broker's would. A second call does nothing."""
        if not self._stop.is_set():
            self._stop.set()
            self._thread.join()
            self._writer.close(clean=False)


class DemoDaemon:
    """The daemon as a process; its log lines go to a file."""

    def __init__(self, store: Path, data: Path, flags: tuple[str, ...], log: Path) -> None:
        self.data = data
        self._log = log
        self._arguments = [sys.executable, "-m", "indexd", "run", "--store", str(store), "--data", str(data), *flags]
        # Beside whatever else runs here, on a disk as full as it likes.
        self._arguments += ["--http", "127.0.0.1:0", "--disk-used-max", "1"]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> int:
        """Start it; the pid."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        return self._process.pid

    def wait_until(self, offset: int) -> dict[str, Any]:
        """Until everything before ``offset`` can be found; DATA/state as it is then."""
        deadline = time.monotonic() + _WAIT_SECONDS
        while time.monotonic() < deadline:
            state = self.state()
            if state is not None and state["phyOffset"] > offset and (state["messages"] or state["caughtUp"]):
                return state
            if self._process is None or self._process.poll() is not None:
                last = self._log.read_text(errors="replace").strip().splitlines()[-1:]
                raise IndexdError(f"the daemon ended by itself: {''.join(last)}", f"read {self._log}")
            time.sleep(0.05)
        raise IndexdError(f"the daemon has not come to offset {offset} in {_WAIT_SECONDS:.0f} s", f"read {self._log}")

    def state(self) -> dict[str, Any] | None:
        """What this process wrote last into DATA/state, None before that."""
        with suppress(OSError, ValueError):
            state: dict[str, Any] = json.loads(DataFiles(self.data).state.read_bytes())
            if self._process is not None and state["pid"] == self._process.pid and "phyOffset" in state:
                return state
        return None

    def end(self, number: signal.Signals) -> int:
        """Send a signal and wait; the exit code, or minus the signal."""
        if self._process is None:
            return 0
        process, self._process = self._process, None
        process.send_signal(number)
        return process.wait(_WAIT_SECONDS)


def run_demo(store: Path | None, flags: tuple[str, ...], work: Path) -> None:
    """Tell the story on standard output; everything that is written lies in ``work``."""
    if store is not None:
        check_outside(load({"store": str(store)}, None, {}), work, "--work")
    Disk().make_dir(work)
    with _log_to_follow(store, work) as (root, writer):
        data = work / "data"
        daemon = DemoDaemon(root, data, (*flags, *(() if store else _DEMO_FLAGS)), work / "daemon.log")
        try:
            _tell(writer, daemon)
        finally:
            daemon.end(signal.SIGKILL)
    _show_files(root, data, work / "daemon.log", (*flags, *(() if store else _DEMO_FLAGS)))
    if writer is not None:
        _show_spark(root, data, work)


@contextmanager
def _log_to_follow(store: Path | None, work: Path) -> Iterator[tuple[Path, DemoWriter | None]]:
    if store is not None:
        _say(f"1. Your store {store} is followed, and only read.")
        yield store, None
        return
    root = work / "store"
    writer = DemoWriter(root)
    _say(f"1. A broker's commitlog grows in {root}: real frames, {len(_TOPICS)} topics, two keys, a unique key and a")
    _say(f"   tag each, {_MESSAGES_PER_SECOND} messages a second. (A built-in writer stands in for the broker.)")
    try:
        yield root, writer
    finally:
        writer.stop()


def _tell(writer: DemoWriter | None, daemon: DemoDaemon) -> None:
    pid = daemon.start()
    _say(f"2. The daemon is started (pid {pid}). The first start compiles its inner loops; then it drains every 3 s.")
    state = daemon.wait_until(writer.last[3] if writer else -1)
    _say(f"   After a drain {state['messages']} messages are indexed, {state['indexEntries']} entries in all, and")
    _say(f"   {state['dispatchBehindBytes']} bytes of log wait for the next one.")
    daemon.end(signal.SIGKILL)
    abort = DataFiles(daemon.data).abort
    _say(f"3. kill -9. The abort flag {abort} is left behind: {'yes' if abort.exists() else 'no'}.")
    if writer:
        time.sleep(1)
        _say(f"   The log went on growing without it, to {writer.count} messages.")
    target = writer.last if writer else None
    pid = daemon.start()
    state = daemon.wait_until(target[3] if target else -1)
    _say(
        f"4. Started again (pid {pid}): the durable entries were kept, the rest was read from the log again. It stands"
    )
    _say(f"   at offset {state['phyOffset']}, {state['messages']} messages, lag {_lag(state)}.")
    if target:
        topic, key, unique, _ = target
        _say(f"5. A message that was written while the daemon was dead, found by its key {key}:")
        _query(daemon.data, "query-key", "-t", topic, "-k", key)
        _say(f"   and by its unique key {unique}:")
        _query(daemon.data, "query-unique-key", "-t", topic, "-i", unique)
    else:
        _query_newest(daemon)
    if writer:
        writer.stop()
        daemon.wait_until(writer.last[3])
    started = time.monotonic()
    code = daemon.end(signal.SIGTERM)
    _say(f"6. TERM: drained, flushed and stopped in {time.monotonic() - started:.1f} s with exit code {code}; ", end="")
    _say("the abort flag is gone." if not abort.exists() else "the abort flag is STILL there.")


def _query_newest(daemon: DemoDaemon) -> None:
    # A store of yours is asked for what it certainly holds: the message of the newest index entry.
    config = load({"data": str(daemon.data)}, None, {})
    with closing(open_index(Disk(), config)) as index:
        look = index.look()
        newest = next((reader.header() for reader, _ in index.newest_first(look) if reader.header().entries), None)
        message = index.log.at(newest.end_phy_offset) if newest is not None else None
    if not isinstance(message, Message):
        _say("5. No message of the store has a key, so there is nothing to ask for.")
        return
    if message.keys:
        _say(f"5. The newest indexed message, found by its key {message.keys[0]}:")
        _query(daemon.data, "query-key", "-t", message.topic, "-k", message.keys[0])
    if message.uniq_key:
        _say(f"5. The newest indexed message, found by its unique key {message.uniq_key}:")
        _query(daemon.data, "query-unique-key", "-t", message.topic, "-i", message.uniq_key)


def _query(data: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "indexd", *arguments, "--data", str(data)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=_WAIT_SECONDS, check=False)
    shown = " ".join((_program(), *arguments, "--data", str(data)))
    _say(f"   $ {shown}")
    for line in (answer.stdout + answer.stderr).splitlines():
        _say(f"   {line}")
    if answer.returncode != 0:
        raise IndexdError(f"{shown} ended with {answer.returncode}")


def _show_files(root: Path, data: Path, log: Path, flags: tuple[str, ...]) -> None:
    _say("7. What was built, byte for byte as RocketMQ builds it:")
    for path in (*sorted((data / "index").iterdir()), data / "checkpoint", data / "frontier"):
        _say(f"   {path}  {path.stat().st_size} bytes")
    _say(f"   The daemon's log is {log}. Go on yourself:")
    _say(f"   $ {_program()} {' '.join(('--store', str(root), '--data', str(data), *flags))}")


def _show_spark(root: Path, data: Path, work: Path) -> None:
    if importlib.util.find_spec("pyspark") is None:
        _say("8. Spark is not installed: pip install 'rocketmq-indexd[spark]' adds rebuild by tasks and statistics.")
        return
    _say("8. The same from the log alone by Spark on two cores; starting a JVM takes a while:")
    common = ["--store", str(root), *_DEMO_FLAGS, "--master", "local[2]"]
    _run("rebuild", *common, "--engine", "spark", "--out", str(work / "spark"))
    same = all(_contents(data / folder) == _contents(work / "spark" / folder) for folder in _OUTPUTS)
    _say(f"   Every file the daemon's, byte for byte: {'yes' if same else 'NO'}.")
    _say("9. What is in the log, as a page to look at:")
    _run("stats", *common, "--report", str(work / "stats.html"))


def _contents(folder: Path) -> list[tuple[str, bytes]]:
    # The names of index files tell when each was made; all others must be the same.
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [("" if folder.name == "index" else str(path.relative_to(folder)), path.read_bytes()) for path in files]


def _run(*arguments: str) -> None:
    _say(f"   $ {' '.join((_program(), *arguments))}")
    done = subprocess.run(
        [sys.executable, "-m", "indexd", *arguments], capture_output=True, text=True, timeout=_WAIT_SECONDS, check=False
    )
    for line in (done.stdout + done.stderr).splitlines()[:_LINES_SHOWN]:
        _say(f"   {line}")
    if done.returncode != 0:
        raise IndexdError(f"indexd {arguments[0]} ended with {done.returncode}")


def _program() -> str:
    # What to type from here: the command beside the interpreter that runs this, as short as it can be said.
    command = Path(sys.executable).with_name("indexd")
    return str(command.relative_to(Path.cwd())) if command.is_relative_to(Path.cwd()) else str(command)


def _lag(state: dict[str, Any]) -> str:
    return f"{state['dispatchBehindMilliseconds']} ms ({state['dispatchBehindBytes']} bytes)"


def _say(text: str, end: str = "\n") -> None:
    sys.stdout.write(text + end)
    sys.stdout.flush()


def default_work_directory() -> Path:
    """A new directory of this run alone, kept for looking around in."""
    return Path(tempfile.mkdtemp(prefix="indexd-demo-"))
