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
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from indexd.commitlog.decoder import Message
from indexd.commitlog.writer import CommitLogWriter, FrameSpec
from indexd.config import load
from indexd.config.load import check_outside
from indexd.errors import IndexdError, SparkMissingError
from indexd.query import open_index
from indexd.storage.disk import Disk
from indexd.storage.names import DataFiles

_SEGMENT_SIZE = 4 << 20
_MESSAGES_PER_SECOND = 2000
_TOPICS = ("OrderPaid", "StockChanged", "订单主题")
_WAIT_SECONDS = 120.0
_LINES_SHOWN = 20
_OUTPUTS = ("index", "consumequeue", "sparse")
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
        self.files, self._log = DataFiles(data), log
        # Beside whatever else runs here, on a disk as full as it likes.
        own = ("--store", str(store), "--data", str(data), *flags, "--http", "127.0.0.1:0", "--disk-used-max", "1")
        self._arguments = [sys.executable, "-m", "indexd", "run", *own]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> int:
        """Start it; the pid."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        return self._process.pid

    def wait_until(self, offset: int) -> dict[str, Any]:
        """Until everything before ``offset`` can be found; DATA/state as it is then."""
        deadline = time.monotonic() + _WAIT_SECONDS
        while time.monotonic() < deadline and self._process is not None:
            with suppress(OSError, ValueError):
                state: dict[str, Any] = json.loads(self.files.state.read_bytes())
                is_new = state["pid"] == self._process.pid and state.get("phyOffset", -1) > offset
                if is_new and (state["messages"] or state["caughtUp"]):
                    return state
            if self._process.poll() is not None:
                last = self._log.read_text(errors="replace").strip().splitlines()[-1:]
                raise IndexdError(f"the daemon ended by itself: {''.join(last)}", f"read {self._log}")
            time.sleep(0.05)
        raise IndexdError(f"the daemon has not come to offset {offset} in {_WAIT_SECONDS:.0f} s", f"read {self._log}")

    def end(self, number: signal.Signals) -> int:
        """Send a signal and wait; the exit code, or minus the signal."""
        if self._process is None:
            return 0
        process, self._process = self._process, None
        process.send_signal(number)
        return process.wait(_WAIT_SECONDS)


def run_demo(store: Path | None, flags: tuple[str, ...], work: Path, *, with_spark: bool) -> None:
    """Tell the story on standard output; all that is written lies in ``work``. SparkMissingError without pyspark."""
    if with_spark and importlib.util.find_spec("pyspark") is None:
        raise SparkMissingError("pyspark is not installed")
    if store is not None:
        check_outside(load({"store": str(store)}, None, {}), work, "--work")
    Disk().make_dir(work)
    root, data = store or work / "store", work / "data"
    flags = flags if store else (*flags, *_DEMO_FLAGS)
    daemon = DemoDaemon(root, data, flags, work / "daemon.log")
    if store is not None:
        _say(f"1. Your store {store} is followed, and only read.")
    else:
        _say(f"""\
1. A broker's commitlog grows in {root}: real frames, {len(_TOPICS)} topics, two keys, a unique key and a
   tag each, {_MESSAGES_PER_SECOND} messages a second. (A built-in writer stands in for the broker.)""")
    writer = None if store else DemoWriter(root)
    try:
        _tell(writer, daemon)
    finally:
        daemon.end(signal.SIGKILL)
        if writer is not None:
            writer.stop()
    built = (*sorted((data / "index").iterdir()), data / "checkpoint", data / "frontier")
    files = "\n".join(f"   {path}  {path.stat().st_size} bytes" for path in built)
    _say(f"""\
7. What was built, byte for byte as RocketMQ builds it:
{files}
   The daemon's log is {work / "daemon.log"}. Go on yourself:
   $ {_program()} {" ".join(("--store", str(root), "--data", str(data), *flags))}""")
    if with_spark and writer is not None:
        _show_spark(root, data, work)


def _tell(writer: DemoWriter | None, daemon: DemoDaemon) -> None:
    pid, abort = daemon.start(), daemon.files.abort
    _say(f"2. The daemon is started (pid {pid}). The first start compiles its inner loops; then it drains every 3 s.")
    state = daemon.wait_until(writer.last[3] if writer else -1)
    daemon.end(signal.SIGKILL)
    _say(f"""\
   After a drain {state["messages"]} messages are indexed, {state["indexEntries"]} entries in all, and
   {state["dispatchBehindBytes"]} bytes of log wait for the next one.
3. kill -9. The abort flag {abort} is left behind: {"yes" if abort.exists() else "no"}.""")
    if writer:
        time.sleep(1)
        _say(f"   The log went on growing without it, to {writer.count} messages.")
    target, pid = writer.last if writer else None, daemon.start()
    state = daemon.wait_until(target[3] if target else -1)
    lag = f"{state['dispatchBehindMilliseconds']} ms ({state['dispatchBehindBytes']} bytes)"
    which = "A message that was written while the daemon was dead" if target else "The newest message"
    _say(f"""\
4. Started again (pid {pid}): the durable entries were kept, the rest was read from the log again.
   It stands at offset {state["phyOffset"]}, {state["messages"]} messages, lag {lag}.
5. {which}, by its keys:""")
    topic, key, unique, _ = target or _newest(daemon)
    if key:
        _run("query-key", "-t", topic, "-k", key, "--data", str(daemon.files.data))
    if unique:
        _run("query-unique-key", "-t", topic, "-i", unique, "--data", str(daemon.files.data))
    if writer:
        writer.stop()
        daemon.wait_until(writer.last[3])
    started, code = time.monotonic(), daemon.end(signal.SIGTERM)
    left, seconds = "STILL there" if abort.exists() else "gone", time.monotonic() - started
    _say(f"6. TERM: drained, flushed and stopped in {seconds:.1f} s with exit code {code}; the abort flag is {left}.")


def _newest(daemon: DemoDaemon) -> tuple[str, str | None, str | None, int]:
    # A store of yours is asked for what it certainly holds: the message of the newest index entry; nothing without one.
    with closing(open_index(Disk(), load({"data": str(daemon.files.data)}, None, {}))) as index:
        for reader, _ in index.newest_first(index.look()):
            message = index.log.at(reader.header().end_phy_offset) if reader.header().entries else None
            if isinstance(message, Message):
                return message.topic, next(iter(message.keys), None), message.uniq_key, message.phy_offset
    _say("   No message of the store has a key, so there is nothing to ask for.")
    return "", None, None, -1


def _show_spark(root: Path, data: Path, work: Path) -> None:
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
    command = [sys.executable, "-m", "indexd", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_WAIT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise IndexdError(f"indexd {arguments[0]} has not ended in {_WAIT_SECONDS:.0f} s", "try it by itself") from None
    for line in (done.stdout + done.stderr).splitlines()[:_LINES_SHOWN]:
        _say(f"   {line}")
    if done.returncode != 0:
        raise IndexdError(f"indexd {arguments[0]} ended with {done.returncode}")


def _program() -> str:
    # What to type from here: the command beside the interpreter that runs this, as short as it can be said.
    command = Path(sys.executable).with_name("indexd")
    return str(command.relative_to(Path.cwd())) if command.is_relative_to(Path.cwd()) else str(command)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def default_work_directory() -> Path:
    """A new directory of this run alone, kept for looking around in."""
    return Path(tempfile.mkdtemp(prefix="indexd-demo-"))
