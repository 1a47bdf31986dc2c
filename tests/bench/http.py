"""Queries by key over HTTP: wrk against a running daemon, on the processors that they share, one index file of default
size that is nearly full and in the page cache.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from bench.ground import BenchError, Ground, Report, Row, progress, warm_log
from bench.indexd import Daemon, call, kernels_compiled, options
from bench.keyed import ENTRIES_PER_MESSAGE, KEYS_PER_MESSAGE, TOPIC, Sample, Sizes, keys_of, write_log

NAME = "http"
#: A Java client against a real broker reached 2,631 on two processors that they shared.
TARGET_PER_SECOND = 2500
_SAMPLES = 5000
_CHECKED = 200
_CONNECTIONS = (1, 8, 16, 64)
_JUDGED = 16
_WARM_SECONDS, _SECONDS = 3, 10
_START_SECONDS = 600
_PATH = "/api/v1/messages/by-key"
_SCRIPT = """\
local paths, number = {}, 0
for line in io.lines("%s") do paths[#paths + 1] = line end
request = function()
  number = number %% #paths + 1
  return wrk.format("GET", paths[number])
end
"""


@dataclass(frozen=True, slots=True)
class _Figures:
    """What wrk says: queries a second, latencies in ms, answers other than 200."""

    per_second: float
    median: float
    p99: float
    failed: int


def measure(ground: Ground, report: Report) -> None:
    """Prints the table and leaves the verdict."""
    if shutil.which("wrk") is None:
        raise BenchError("wrk is not installed: apt-get install wrk")
    sizes = Sizes.of(ground.messages, 0)
    store, data = ground.work / "http", ground.work / "http.data"
    progress(f"http: writing {sizes.base:,} messages with {ENTRIES_PER_MESSAGE} keys each")
    offsets, _ = write_log(store, sizes)
    with kernels_compiled(ground):
        call(ground, "rebuild", *options(ground, store), *sizes.flags, "--out", str(data), "--json")
    warm_log(store)
    choice = random.Random(1)
    samples = [_sample(choice.randrange(sizes.base), choice, offsets) for _ in range(_SAMPLES)]
    script = _write_script(ground.work, samples)
    found: dict[int, _Figures] = {}
    with Daemon(ground, store, data, *sizes.flags, "--http", "127.0.0.1:0") as daemon:
        daemon.wait_for_event("running", _START_SECONDS)
        url = f"http://{daemon.event('listening')['http']}"
        for sample in samples[:_CHECKED]:
            _check(url, sample)
        _wrk(url, script, _JUDGED, _WARM_SECONDS)
        for connections in _CONNECTIONS:
            progress(f"http: {connections} connections, {_SECONDS} s")
            found[connections] = _wrk(url, script, connections, _SECONDS)
    shutil.rmtree(store)
    shutil.rmtree(data)
    rows: list[Row] = [("connections", "queries a second", "p50", "p99", "failed")]
    rows += [
        (str(count), f"{one.per_second:,.0f}", f"{one.median:.2f} ms", f"{one.p99:.2f} ms", str(one.failed))
        for count, one in found.items()
    ]
    figures = {
        str(count): {"perSecond": one.per_second, "medianMs": one.median, "p99Ms": one.p99, "failed": one.failed}
        for count, one in found.items()
    }
    entries = f"{sizes.base * ENTRIES_PER_MESSAGE:,} entries in one file"
    report.part(NAME, f"GET {_PATH}, {_SAMPLES:,} random keys, {entries}, wrk beside it", rows, figures)
    judged = found[_JUDGED]
    target = f"at least {TARGET_PER_SECOND:,} key queries a second over {_JUDGED} connections"
    held = judged.per_second >= TARGET_PER_SECOND and judged.failed == 0
    report.verdict(NAME, target, f"{judged.per_second:,.0f}", held)


def _sample(number: int, choice: random.Random, offsets: list[int]) -> Sample:
    return Sample(keys_of(number)[choice.randrange(KEYS_PER_MESSAGE)], offsets[number])


def _path(sample: Sample) -> str:
    return f"{_PATH}?topic={TOPIC}&key={quote(sample.key)}"


def _write_script(work: Path, samples: list[Sample]) -> Path:
    paths, script = work / "http.paths", work / "http.lua"
    paths.write_text("".join(f"{_path(sample)}\n" for sample in samples))
    script.write_text(_SCRIPT % paths)
    return script


def _check(url: str, sample: Sample) -> None:
    # What is measured answers rightly: BenchError if not.
    with urllib.request.urlopen(url + _path(sample), timeout=30) as answer:
        row = json.load(answer)
    if str(sample.phy_offset) not in [hit["phyOffset"] for hit in row["messages"]]:
        raise BenchError(f"the key {sample.key} was not found at {sample.phy_offset}: {row}")


def _wrk(url: str, script: Path, connections: int, seconds: int) -> _Figures:
    words = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}", "--latency", "-s", str(script), url]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=seconds + 60)
    rate = re.search(r"Requests/sec:\s+([0-9.]+)", done.stdout)
    if rate is None:
        raise BenchError(f"wrk said {done.stdout[-500:]}")
    failed = re.search(r"Non-2xx or 3xx responses: ([0-9]+)", done.stdout)
    return _Figures(
        float(rate[1]),
        _milliseconds(done.stdout, "50%"),
        _milliseconds(done.stdout, "99%"),
        int(failed[1]) if failed is not None else 0,
    )


def _milliseconds(said: str, percent: str) -> float:
    found = re.search(rf"{percent}\s+([0-9.]+)(us|ms|s)", said)
    if found is None:
        raise BenchError(f"wrk said {said[-500:]}")
    return float(found[1]) * {"us": 0.001, "ms": 1.0, "s": 1000.0}[found[2]]
