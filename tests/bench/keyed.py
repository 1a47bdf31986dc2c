"""One open index file of RocketMQ's default size, nearly full, over a log that stays small: kill -9 over it and the
next start of both sides, queries by key in process, and over HTTP.

The messages have many keys each and say that they were stored at an even pace until a moment ago, which RocketMQ's
recovery goes by. Where it can be run, RocketMQ's own store then opens the log, indexes it, writes some more messages
and is halted, so that its index, its consume queues and its checkpoint are what an unclean stop of it leaves.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench.ground import (
    ENTRIES,
    QUEUE_FILE_SIZE,
    SECONDS,
    SLOTS,
    BenchError,
    Daemon,
    Ground,
    Report,
    Row,
    megabytes,
    percentile,
    progress,
    same_files,
    warm_log,
)
from indexd.index.format import HEADER_SIZE, IndexHeader
from indexd.query import Answer, KeyQuery, open_data, query_rocketmq
from support.commitlog_writer import CommitLogWriter, FrameSpec
from support.rocketmq import arguments, figures_of, run, start

TOPIC = "TopicTest"
KEYS_PER_MESSAGE = 20
ENTRIES_PER_MESSAGE = KEYS_PER_MESSAGE + 1  # and the unique key
_FULL_SCALE_MESSAGES = 3_000_000
# A log of 20,000,000 entries has seven segments of 1 GiB at 4 entries and 1.4 kB a message; these messages are smaller
# by entry, so their segments are, too. How much RocketMQ throws away depends on that.
_FULL_SEGMENT = 64 << 20
# What the store times say the log took, and more than the last one of its segments by far: RocketMQ goes back by time.
_SPAN_MS = 900_000
_DELTA_MESSAGES = 5000
# What RocketMQ's store writes itself, in some seconds, so that its timers have flushed and its checkpoint has moved.
_TAIL_MESSAGES, _TAIL_ENTRIES_PER_MESSAGE = 500, 4
_HALTED = 137


class Sample(NamedTuple):
    """A key that one message alone has, and where that stands; -1 for a key that nobody has."""

    key: str
    phy_offset: int


class KeyedLog:
    """A log of a share of RocketMQ's 20,000,000 entries a file, by ``--messages``; the file has room for ``deltas``."""

    def __init__(self, ground: Ground, name: str, deltas: int = 0) -> None:
        self.ground, self.store, self.data = ground, ground.work / name, ground.work / f"{name}.data"
        scale = max(1 / 200, min(1.0, ground.messages / _FULL_SCALE_MESSAGES))
        self.slots, self.index_num = int(SLOTS * scale), int(ENTRIES * scale)
        self.segment = -(-int(_FULL_SEGMENT * scale) // 4096) * 4096
        self.delta = max(1, int(_DELTA_MESSAGES * scale))
        room = self.index_num - _TAIL_MESSAGES * _TAIL_ENTRIES_PER_MESSAGE - deltas * self.delta * ENTRIES_PER_MESSAGE
        self.base = room // ENTRIES_PER_MESSAGE - 1
        self.flags = [
            f"--segment-size={self.segment}", f"--hash-slot-num={self.slots}", f"--index-num={self.index_num}",
        ]  # fmt: skip
        self.words: dict[str, object] = {
            "segment": self.segment, "slots": self.slots, "entries": self.index_num, "queuefile": QUEUE_FILE_SIZE,
        }  # fmt: skip
        progress(f"{name}: writing {self.base:,} messages with {ENTRIES_PER_MESSAGE} keys each")
        begin = int(time.time() * 1000) - _SPAN_MS
        self.offsets, self.end = self._append(0, [begin + i * _SPAN_MS // self.base for i in range(self.base)])

    def _append(self, first: int, times: Sequence[int]) -> tuple[list[int], int]:
        begin = self.end if first else 0
        with CommitLogWriter(self.store / "commitlog", self.segment, start_offset=begin) as writer:
            found = [writer.append(_message(first + at, stored)) for at, stored in enumerate(times)]
            return found, writer.max_offset

    def append(self, number: int) -> Sample:
        """One more delta, ``number`` 0, 1, ...; a key of its last message."""
        first, now = self.base + number * self.delta, int(time.time() * 1000)
        offsets, self.end = self._append(first, [now] * self.delta)
        return Sample(keys_of(first + self.delta - 1)[0], offsets[-1])

    def samples(self, count: int) -> list[Sample]:
        """Keys of random messages."""
        choice = random.Random(1)
        numbers = [choice.randrange(self.base) for _ in range(count)]
        return [Sample(choice.choice(keys_of(number)), self.offsets[number]) for number in numbers]

    def build(self) -> None:
        """By a rebuild; log and index are in the page cache then."""
        with self.ground.kernels_compiled():
            self.ground.call("rebuild", *self.flags, "--out", str(self.data), store=self.store)
        warm_log(self.store)
        for path in (self.data / "index").iterdir():
            path.read_bytes()

    def remove(self) -> None:
        """With what was built of it."""
        shutil.rmtree(self.store)
        shutil.rmtree(self.data)


def _message(number: int, stored: int) -> FrameSpec:
    keys = {"KEYS": " ".join(keys_of(number)), "UNIQ_KEY": f"7F00000100002A14{number:016X}"}
    return FrameSpec(TOPIC, bytes(100), keys, born_timestamp=stored, store_timestamp=stored)


def keys_of(number: int) -> list[str]:
    """The keys of a message, by its number."""
    # Without order, as real ones hash: counted numbers would fall into neighbouring slots.
    digits = hashlib.shake_128(b"%d" % number).hexdigest(KEYS_PER_MESSAGE * 5)
    return [digits[at : at + 10] for at in range(0, len(digits), 10)]


def count_entries(directory: Path) -> int:
    """The entries of all index files of a directory, by their headers."""
    return sum(IndexHeader.unpack(path.read_bytes()[:HEADER_SIZE]).entries for path in directory.iterdir())


_TURNS, _KILLS_PER_TURN = 3, 2
# How RocketMQ's store was ended and told to start again; which of indexd's times stands beside it.
_THEIRS = (
    ("killed, messageIndexSafe=true", True, False, "killed, to the first answer"),
    ("killed, default", False, False, "killed, to the first answer"),
    ("stopped", False, True, "stopped, to the event running"),
)


def measure_recover(ground: Ground, report: Report) -> None:
    """Kill -9 over the open index file; the next start of indexd, and RocketMQ's own, in turns.

    indexd goes on being killed, each time when it has drained messages that no flush has made durable yet. RocketMQ is
    halted once, and every restart of it works on a copy of what that left. All of it comes from the page cache, on both
    sides: a process was killed, not the machine.
    """
    log = KeyedLog(ground, "recover", _TURNS * _KILLS_PER_TURN)
    samples, their_end = log.samples(2000), 0
    halted = ground.work / "halted"
    shutil.copytree(log.store, halted)
    if ground.java_missing is None:
        progress("recover: RocketMQ's store indexes it, writes some more and is halted")
        # With this file it indexes from the first message on; without, it leaves that one out.
        (halted / "abort").touch()
        words = arguments(store=halted, count=_TAIL_MESSAGES, pauseEvery=100, pauseMs=1000, exit="halt", **log.words)
        said = run("Store", "write", *words, home=ground.jvm_home, timeout=900, ends_with=_HALTED)
        their_end = log.end = figures_of(said.splitlines()[-1])["maxOffset"]
        shutil.rmtree(log.store)
        shutil.copytree(halted / "commitlog", log.store / "commitlog")
    ours: dict[str, list[float]] = {}
    theirs: dict[str, list[tuple[float, float, int, int]]] = {text: [] for text, *_ in _THEIRS}
    with ground.kernels_compiled():
        with Daemon(ground, log.store, log.data, *log.flags) as daemon:
            daemon.wait_offset(log.end)
        if their_end:
            same = same_files(log.data / "index", halted / "index")
            report.verdict("recover", "the same bytes as RocketMQ's index", "the same" if same else "others", same)
        before = count_entries(log.data / "index")
        for turn in range(_TURNS):
            progress(f"recover: turn {turn + 1} of {_TURNS}")
            for text, safe, clean, _ in _THEIRS if their_end else ():
                theirs[text].append(_restart(ground, log, halted, samples, safe=safe, clean=clean))
            for kill in range(_KILLS_PER_TURN):
                os.sync()
                for name, seconds in _kill(log, samples[kill], turn * _KILLS_PER_TURN + kill).items():
                    ours.setdefault(name, []).append(seconds)
    lost = before + _TURNS * _KILLS_PER_TURN * log.delta * ENTRIES_PER_MESSAGE - count_entries(log.data / "index")
    questions = _questions(ground.work / "questions", samples)
    words = ["--data", str(log.data), "--json", "--batch", str(questions), *log.flags]
    found = _count_found(samples, ground.call("query-key", *words, store=log.store)[0].splitlines())
    rows: list[Row] = [("", "best", "median", "entries after", "keys found", "runs")]
    for name, times in ours.items():
        cells = (f"{before - lost:,}", f"{found / len(samples):.1%}") if "first answer" in name else ("", "")
        rows.append((f"indexd, {name}", f"{min(times):.3f} s", f"{median(times):.3f} s", *cells, str(len(times))))
    for text, _, _, name in _THEIRS if their_end else ():
        whole, inner = [one[0] for one in theirs[text]], [one[1] for one in theirs[text]]
        left = f"{theirs[text][0][2]:,}", f"{theirs[text][0][3] / len(samples):.1%}"
        for what, times, more in (("load and start", inner, ("", "")), ("the whole process", whole, left)):
            both = f"{min(times):.3f} s", f"{median(times):.3f} s"
            rows.append((f"RocketMQ, {text}, {what}", *both, *more, str(len(times))))
        ratios = min(whole) / min(ours[name]), median(whole) / median(ours[name])
        rows.append((f"  as many times indexd's {name}", *(f"{value:.2f}" for value in ratios), "", "", ""))
    filled = f"{before:,} entries in one open file, {log.delta * ENTRIES_PER_MESSAGE:,} more not flushed"
    report.part("recover", f"{filled}, {megabytes(log.end)} of log in segments of {megabytes(log.segment)}", rows)
    ready, lost = median(ours["killed, to the first answer"]), lost + len(samples) - found
    report.verdict("recover", "an answer within 2.0 s", f"{ready:.3f} s", ready < 2)
    report.verdict("recover", "no key lost", f"{lost} lost", lost == 0)
    shutil.rmtree(halted)
    log.remove()


def _kill(log: KeyedLog, durable: Sample, number: int) -> dict[str, float]:
    # One kill -9 and the start after it; seconds since the execution.
    with Daemon(log.ground, log.store, log.data, *log.flags) as daemon:
        daemon.wait_event("running", SECONDS)
        stopped = daemon.age()
        daemon.wait_offset(log.end)
        newest = log.append(number)
        daemon.wait_offset(log.end)
        if (state := daemon.state())["durableOffset"] >= log.end:
            raise BenchError(f"indexd flushed before it could be killed: {state}")
        daemon.kill()
    with Daemon(log.ground, log.store, log.data, *log.flags) as daemon:
        daemon.wait_event("running", SECONDS)
        found = {"killed, recovery alone": 0.0, "killed, to the event running": daemon.age()}
        found["killed, to the first answer"] = _ask_until_right(log, daemon, durable)
        daemon.wait_offset(log.end)
        found["killed, to the first answer about the delta"] = _ask_until_right(log, daemon, newest)
        found["killed, recovery alone"] = daemon.events("recovered")[0]["seconds"]
    return found | {"stopped, to the event running": stopped}


def _ask_until_right(log: KeyedLog, daemon: Daemon, sample: Sample) -> float:
    words = ["--data", str(log.data), "--json", *log.flags, "-t", TOPIC, "-k", sample.key]
    while daemon.age() < SECONDS:
        said, _ = log.ground.call("query-key", *words, store=log.store)
        seconds = daemon.age()
        if sample.phy_offset in json.loads(said)["phyOffsets"]:
            return seconds
    raise BenchError(f"indexd does not find the key {sample.key}")


def _restart(
    ground: Ground, log: KeyedLog, halted: Path, samples: list[Sample], *, safe: bool, clean: bool
) -> tuple[float, float, int, int]:
    # On a copy; ``safe`` is messageIndexSafe, ``clean`` takes the abort file away first. Seconds of the whole process
    # and inside it until all is dispatched; entries then, and how many of the samples it finds.
    copy = ground.work / "restarted"
    shutil.copytree(halted, copy)
    os.sync()
    if clean:
        (copy / "abort").unlink()
    questions, answers = _questions(ground.work / "questions", samples), ground.work / "answers"
    words = arguments(store=copy, index_safe=safe, in_=questions, out=answers, **log.words)
    began = time.perf_counter()
    with start("Store", "recover", *words, home=ground.jvm_home) as program:
        figures = program.figures(SECONDS)
        seconds = time.perf_counter() - began
        program.line(SECONDS)
    entries = count_entries(copy / "index")
    shutil.rmtree(copy)
    return seconds, figures["readySeconds"], entries, _count_found(samples, answers.read_text().splitlines())


def _questions(path: Path, samples: list[Sample]) -> Path:
    path.write_text("".join(f"{TOPIC}\t{one.key}\t64\t0\t{1 << 60}\n" for one in samples))
    return path


def _count_found(samples: list[Sample], answers: list[str]) -> int:
    return sum(one.phy_offset in json.loads(line)["phyOffsets"] for one, line in zip(samples, answers, strict=True))


def measure_key(ground: Ground, report: Report) -> None:
    """Queries by key in process."""
    log = KeyedLog(ground, "key")
    log.build()
    samples, choice = log.samples(5000), random.Random(2)
    # Other letters than a key's: nothing but its hash can be found.
    absent = [Sample(sample.key.upper() + "-", -1) for sample in samples]
    taken: dict[str, list[float]] = {}
    with open_data(log.data) as opened:
        exact = partial(opened.by_key, TOPIC)

        def as_broker(key: str) -> Answer:
            return query_rocketmq(opened.index, KeyQuery(TOPIC, key, 64))

        for number in range(4):  # the first does not count
            for name, asked, ask in (
                ("a key, exact", samples, exact),
                ("a key that is not there, exact", absent, exact),
                (
                    "a key, as RocketMQ answers",
                    samples,
                    as_broker,
                ),
            ):
                seconds = [_ask(ask, sample) * 1e6 for sample in choice.sample(asked, len(asked))]
                if number:
                    taken.setdefault(name, []).extend(seconds)
    rows: list[Row] = [("", "median", "p99", "worst", "queries a second")]
    for name, values in taken.items():
        cells = (f"{value:.0f} us" for value in (median(values), percentile(values, 99), max(values)))
        rows.append((name, *cells, f"{1e6 * len(values) / sum(values):,.0f}"))
    title = f"{log.base * ENTRIES_PER_MESSAGE:,} entries in one file, 15,000 queries of each kind, in process"
    report.part("key", title, rows)
    middle = median(taken["a key, exact"])
    report.verdict("key", "the median of queries by key below 100 us", f"{middle:.0f} us", middle < 100)
    log.remove()


def _ask(ask: Callable[[str], Answer], sample: Sample) -> float:
    began = time.perf_counter()
    answer = ask(sample.key)
    seconds = time.perf_counter() - began
    found = [hit.phy_offset for hit in answer.hits]
    if (sample.phy_offset not in found) if sample.phy_offset >= 0 else found:
        raise BenchError(f"the key {sample.key} was found at {found}, not at {sample.phy_offset}")
    return seconds


_PATH = "/api/v1/messages/by-key"
_SCRIPT = """\
local paths, number = {}, 0
for line in io.lines("%s") do paths[#paths + 1] = line end
request = function()
  number = number %% #paths + 1
  return wrk.format("GET", paths[number])
end
"""


def measure_http(ground: Ground, report: Report) -> None:
    """Queries by key over HTTP: wrk against a running daemon, on the processors that they share."""
    if shutil.which("wrk") is None:
        raise BenchError("wrk is not installed: apt-get install wrk")
    log = KeyedLog(ground, "http")
    log.build()
    samples, script = log.samples(5000), ground.work / "http.lua"
    paths = [f"{_PATH}?topic={TOPIC}&key={sample.key}" for sample in samples]
    (ground.work / "http.paths").write_text("".join(f"{path}\n" for path in paths))
    script.write_text(_SCRIPT % (ground.work / "http.paths"))
    rows: list[Row] = [("connections", "queries a second", "p50", "p99", "failed")]
    with Daemon(ground, log.store, log.data, *log.flags) as daemon:
        daemon.wait_event("running", SECONDS)
        url = f"http://{daemon.wait_event('listening')['http']}"
        for sample, path in zip(samples[:200], paths, strict=False):  # what is measured answers rightly
            with urllib.request.urlopen(url + path, timeout=30) as answer:
                row = json.load(answer)
            if str(sample.phy_offset) not in [hit["phyOffset"] for hit in row["messages"]]:
                raise BenchError(f"the key {sample.key} was not found at {sample.phy_offset}: {row}")
        _wrk(url, script, 16, 3)
        for connections in (1, 8, 16, 64):
            progress(f"http: {connections} connections, 10 s")
            rows.append((str(connections), *_wrk(url, script, connections, 10)))
    log.remove()
    entries = f"{log.base * ENTRIES_PER_MESSAGE:,} entries in one file"
    report.part("http", f"GET {_PATH}, 5,000 random keys, {entries}, wrk beside it", rows)
    # A Java client against a real broker reached 2,631 on two processors that they shared.
    rate, failed = rows[3][1], rows[3][4]
    held = float(rate.replace(",", "")) >= 2500 and failed == "0"
    report.verdict("http", "at least 2,500 key queries a second over 16 connections", rate, held)


def _wrk(url: str, script: Path, connections: int, seconds: int) -> Row:
    words = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}", "--latency", "-s", str(script), url]
    said = subprocess.run(words, capture_output=True, text=True, check=True, timeout=seconds + 60).stdout
    rate = re.search(r"Requests/sec:\s+([0-9.]+)", said)
    latencies = [re.search(rf"{percent}%\s+([0-9.]+[a-z]+)", said) for percent in (50, 99)]
    if rate is None or None in latencies:
        raise BenchError(f"wrk said {said[-500:]}")
    failed = re.search(r"Non-2xx or 3xx responses: ([0-9]+)", said)
    return f"{float(rate[1]):,.0f}", *(found[1] for found in latencies if found), failed[1] if failed else "0"


PARTS = {"recover": measure_recover, "key": measure_key, "http": measure_http}
