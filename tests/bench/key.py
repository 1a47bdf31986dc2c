"""Queries by key in process, on one index file of RocketMQ's default size that is nearly full and in the page cache."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from bench.ground import BenchError, Ground, Report, Row, median, megabytes, percentile, progress, warm_log
from bench.indexd import call, kernels_compiled, options
from bench.keyed import ENTRIES_PER_MESSAGE, KEYS_PER_MESSAGE, TOPIC, Sample, Sizes, keys_of, write_log
from indexd.query import Answer, Data, KeyQuery, open_data, query_rocketmq

NAME = "key"
TARGET_MICROSECONDS = 100
_QUERIES = 5000
_ROUNDS = 3  # of all queries, after one that does not count
_BLOCK = 4 << 20


def measure(ground: Ground, report: Report) -> None:
    """Prints the table and leaves the verdict."""
    sizes = Sizes.of(ground.messages, 0)
    store, data = ground.work / "key", ground.work / "key.data"
    progress(f"key: writing {sizes.base:,} messages with {ENTRIES_PER_MESSAGE} keys each")
    offsets, _ = write_log(store, sizes)
    with kernels_compiled(ground):
        call(ground, "rebuild", *options(ground, store), *sizes.flags, "--out", str(data), "--json")
    choice = random.Random(1)
    samples = [_sample(choice.randrange(sizes.base), choice, offsets) for _ in range(_QUERIES)]
    warm_log(store)
    size = _warm_index(data / "index")
    progress(f"key: {_QUERIES} queries, {_ROUNDS} rounds")
    with open_data(data) as opened:
        taken = _ask_all(opened, samples, choice)
    shutil.rmtree(store)
    shutil.rmtree(data)
    rows: list[Row] = [("", "median", "p99", "worst", "queries a second")]
    figures: dict[str, object] = {"entries": sizes.base * ENTRIES_PER_MESSAGE, "queries": _QUERIES}
    for name, text in (
        ("exact", "a key, exact"),
        ("absent", "a key that is not there, exact"),
        ("rocketmq", "a key, as RocketMQ answers"),
    ):
        values = [seconds * 1e6 for seconds in taken[name]]
        cells = (f"{value:.0f} us" for value in (median(values), percentile(values, 99), max(values)))
        rows.append((text, *cells, f"{len(values) / sum(taken[name]):,.0f}"))
        figures[name] = {"medianUs": median(values), "p99Us": percentile(values, 99), "maxUs": max(values)}
    filled = f"{sizes.base * ENTRIES_PER_MESSAGE:,} entries in one file of {megabytes(size)}"
    report.part(NAME, f"{filled}, {len(taken['exact']):,} queries of each kind, in process", rows, figures)
    middle = median(taken["exact"]) * 1e6
    target = f"the median of queries by key below {TARGET_MICROSECONDS} us"
    report.verdict(NAME, target, f"{middle:.0f} us", middle < TARGET_MICROSECONDS)


def _sample(number: int, choice: random.Random, offsets: list[int]) -> Sample:
    return Sample(keys_of(number)[choice.randrange(KEYS_PER_MESSAGE)], offsets[number])


def _warm_index(directory: Path) -> int:
    # The bytes of the one file that is to be there.
    (path,) = directory.iterdir()
    with path.open("rb", buffering=0) as file:
        while file.read(_BLOCK):
            pass
        return file.tell()


def _ask_all(data: Data, samples: list[Sample], choice: random.Random) -> dict[str, list[float]]:
    # Other letters than a key's: nothing but its hash can be found.
    absent = [Sample(sample.key.upper() + "-", -1) for sample in samples]
    kinds: list[tuple[str, list[Sample], Callable[[str], Answer]]] = [
        ("exact", samples, lambda key: data.by_key(TOPIC, key)),
        ("absent", absent, lambda key: data.by_key(TOPIC, key)),
        ("rocketmq", samples, lambda key: query_rocketmq(data.index, KeyQuery(TOPIC, key, 64))),
    ]
    taken: dict[str, list[float]] = {name: [] for name, _, _ in kinds}
    for number in range(_ROUNDS + 1):
        for name, asked, ask in kinds:
            order = choice.sample(asked, len(asked))
            seconds = [_ask(ask, sample) for sample in order]
            if number > 0:
                taken[name] += seconds
    return taken


def _ask(ask: Callable[[str], Answer], sample: Sample) -> float:
    began = time.perf_counter()
    answer = ask(sample.key)
    seconds = time.perf_counter() - began
    found = [hit.phy_offset for hit in answer.hits]
    if (sample.phy_offset not in found) if sample.phy_offset >= 0 else found:
        raise BenchError(f"the key {sample.key} was found at {found}, not at {sample.phy_offset}")
    return seconds
