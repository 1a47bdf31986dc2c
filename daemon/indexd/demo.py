"""``indexd demo``: the whole of indexd in under a minute, told in plain words.

A built-in writer stands in for a broker and makes a small commitlog of real frames that grows while the daemon runs.
The daemon is the same command that an operator runs, as a process of its own; it is killed with -9 on the way.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from indexd.commitlog.format import MAGIC_V1
from indexd.errors import IndexdError, SparkMissingError
from indexd.storage.disk import Disk
from indexd.storage.names import DataFiles, segment_name

_MESSAGES_PER_SECOND = 2000
_SEGMENT_SIZE = 1 << 30  # RocketMQ's own: none gets full
_TOPICS = ("OrderPaid", "StockChanged", "订单主题")
_WAIT_SECONDS = 120.0
_LINES_SHOWN = 20
_HOST = bytes([127, 0, 0, 1]) + struct.pack(">i", 10911)
# A demo's index file is small, so that some get full before the reader's eyes.
_FLAGS = ("--hash-slot-num", "2000", "--index-num", "20000")
_PROGRAM = os.path.relpath(Path(sys.executable).with_name("indexd"))


class DemoWriter:
    """Writes messages at a steady pace from a thread until ``stop``; ``last`` is one that is certainly in the log.

    The bytes are a broker's (``commitlog.format``), in the first segment of a log.
    """

    def __init__(self, store: Path, segment_size: int = _SEGMENT_SIZE) -> None:
        path = store / "commitlog" / segment_name(0)
        path.parent.mkdir(parents=True)
        self._file = path.open("wb", buffering=0)
        self._file.truncate(segment_size)
        self._queue_offsets = Counter[bytes]()
        self._random = random.Random(7)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self.count = 0
        self.last = self._append()
        self._thread.start()

    def _append(self) -> tuple[str, str, str, int]:
        now, offset = int(time.time() * 1000), self._file.tell()
        topic = self._random.choice(_TOPICS)
        key, unique = f"order-{self.count}", f"7F00000100002A9F{self.count:016X}"
        properties = {
            "KEYS": f"{key} user-{self._random.randrange(500)}",
            "UNIQ_KEY": unique,
            "TAGS": self._random.choice(("paid", "open", "加急")),
        }
        encoded, body = topic.encode(), f'{{"order": {self.count}, "at": {now}}}'.encode()
        text = "".join(f"{name}\x01{value}\x02" for name, value in properties.items()).encode()
        # Queue id, flag, queue offset, physical offset, sysFlag, born timestamp and host, store timestamp and host, ...
        rest = struct.pack(">iiqqiq", 0, 0, self._queue_offsets[encoded], offset, 0, now) + _HOST
        rest += struct.pack(">q", now) + _HOST + struct.pack(">iqi", 0, 0, len(body)) + body
        rest += bytes([len(encoded)]) + encoded + struct.pack(">h", len(text)) + text
        self._file.write(struct.pack(">iIi", len(rest) + 12, MAGIC_V1, zlib.crc32(body) & 0x7FFFFFFF) + rest)
        self._queue_offsets[encoded] += 1
        self.count += 1
        return topic, key, unique, offset

    def _run(self) -> None:
        while not self._stop.wait(0.02):
            for _ in range(_MESSAGES_PER_SECOND // 50):
                self.last = self._append()

    def stop(self) -> None:
        """End the thread; the log stays as a crashed broker's would. A second call does nothing."""
        self._stop.set()
        self._thread.join()
        self._file.close()


class DemoDaemon:
    """The daemon as a process; its log lines go to a file."""

    def __init__(self, store: Path, data: Path, log: Path) -> None:
        self.files, self._log = DataFiles(data), log
        # Beside whatever else runs here, on a disk as full as it likes.
        own = ("--store", str(store), "--data", str(data), *_FLAGS, "--http", "127.0.0.1:0", "--disk-used-max", "1")
        self._arguments = [sys.executable, "-m", "indexd", "run", *own]
        self.start()

    def start(self) -> None:
        """Start it, again."""
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def wait_until(self, offset: int) -> dict[str, Any]:
        """Until everything before ``offset`` can be found; DATA/state as it is then."""
        deadline = time.monotonic() + _WAIT_SECONDS
        while self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
            with suppress(OSError, ValueError):
                state: dict[str, Any] = json.loads(self.files.state.read_bytes())
                if state["pid"] == self.process.pid and state.get("phyOffset", -1) > offset:
                    return state
        what = f"has ended, or not come to offset {offset} in {_WAIT_SECONDS:.0f} s"
        raise IndexdError(f"the daemon {what}", f"read {self._log}")

    def end(self, number: signal.Signals) -> int:
        """Send a signal and wait; the exit code, or minus the signal."""
        self.process.send_signal(number)
        return self.process.wait(_WAIT_SECONDS)


def run_demo(work: Path, *, with_spark: bool) -> None:
    """Tell the story on standard output; all that is written lies in ``work``. SparkMissingError without pyspark."""
    if with_spark and importlib.util.find_spec("pyspark") is None:
        raise SparkMissingError("pyspark is not installed")
    Disk().make_dir(work)
    store, data = work / "store", work / "data"
    _say(f"""\
1. A broker's commitlog grows in {store}: real frames, {len(_TOPICS)} topics, two keys, a unique key and a
   tag each, {_MESSAGES_PER_SECOND} messages a second. (A built-in writer stands in for the broker.)""")
    writer, daemon = DemoWriter(store), DemoDaemon(store, data, work / "daemon.log")
    try:
        _tell(writer, daemon)
    finally:
        daemon.end(signal.SIGKILL)
        writer.stop()
    files = "\n".join(f"   {path}  {path.stat().st_size} bytes" for path in sorted((data / "index").iterdir()))
    _say(f"""\
7. What was built, byte for byte as RocketMQ builds it:
{files}
   The daemon's log is {work / "daemon.log"}. Go on yourself:
   $ {_PROGRAM} {" ".join(("--store", str(store), "--data", str(data), *_FLAGS))}""")
    if with_spark:
        _say("8. The same from the log alone by Spark on two cores; starting a JVM takes a while:")
        common = ["--store", str(store), *_FLAGS, "--master", "local[2]"]
        _run("rebuild", *common, "--engine", "spark", "--out", str(work / "spark"))
        same = _contents(data) == _contents(work / "spark")
        _say(f"   Every file the daemon's, byte for byte: {'yes' if same else 'NO'}.")
        _say("9. What is in the log, as a page to look at:")
        _run("stats", *common, "--report", str(work / "stats.html"))


def _tell(writer: DemoWriter, daemon: DemoDaemon) -> None:
    abort = daemon.files.abort
    _say(
        f"2. The daemon is started (pid {daemon.process.pid}). The first start compiles its inner loops; then it drains"
        " every 3 s."
    )
    state = daemon.wait_until(writer.last[3])
    daemon.end(signal.SIGKILL)
    _say(f"""\
   After a drain {state["messages"]} messages are indexed, {state["indexEntries"]} entries in all, and
   {state["dispatchBehindBytes"]} bytes of log wait for the next one.
3. kill -9. The abort flag {abort} is left behind: {"yes" if abort.exists() else "no"}.""")
    killed_at = writer.count
    while writer.count < killed_at + _MESSAGES_PER_SECOND:
        time.sleep(0.05)
    _say(f"   The log went on growing without it, to {writer.count} messages.")
    topic, key, unique, offset = writer.last
    daemon.start()
    state = daemon.wait_until(offset)
    lag = f"{state['dispatchBehindMilliseconds']} ms ({state['dispatchBehindBytes']} bytes)"
    _say(f"""\
4. Started again (pid {daemon.process.pid}): the durable entries were kept, the rest was read from the log again.
   It stands at offset {state["phyOffset"]}, {state["messages"]} messages, lag {lag}.
5. A message that was written while the daemon was dead, by its keys:""")
    _run("query-key", "-t", topic, "-k", key, "--data", str(daemon.files.data))
    _run("query-unique-key", "-t", topic, "-i", unique, "--data", str(daemon.files.data))
    writer.stop()
    daemon.wait_until(writer.last[3])
    started, code = time.monotonic(), daemon.end(signal.SIGTERM)
    left, seconds = "STILL there" if abort.exists() else "gone", time.monotonic() - started
    _say(f"6. TERM: drained, flushed and stopped in {seconds:.1f} s with exit code {code}; the abort flag is {left}.")


def _contents(data: Path) -> list[tuple[str, bytes]]:
    # The names of index files tell when each was made; all others must be the same.
    folders = [data / name for name in ("index", "consumequeue", "sparse")]
    files = [path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()]
    return [("" if path.parent.name == "index" else str(path.relative_to(data)), path.read_bytes()) for path in files]


def _run(*arguments: str) -> None:
    _say(f"   $ {' '.join((_PROGRAM, *arguments))}")
    done = subprocess.run([sys.executable, "-m", "indexd", *arguments], capture_output=True, text=True, check=False)
    for line in (done.stdout + done.stderr).splitlines()[:_LINES_SHOWN]:
        _say(f"   {line}")
    if done.returncode != 0:
        raise IndexdError(f"indexd {arguments[0]} ended with {done.returncode}")


def _say(text: str) -> None:
    print(text, flush=True)
