"""RocketMQ's own store started again on copies of a store on which it was halted: how long, and what is left."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from bench.ground import Ground
from bench.keyed import TOPIC, KeyedStore, Sample
from bench.report import BenchError
from indexd.index.format import HEADER_SIZE, IndexHeader
from support.rocketmq import arguments, start

_READY_SECONDS = 900
_FOREVER = 1 << 60


@dataclass(frozen=True, slots=True)
class Restarted:
    """Seconds of the whole process and inside it until all is dispatched; what the index answers then."""

    seconds: float
    inner_seconds: float
    entries: int
    found: int


def restart(ground: Ground, store: KeyedStore, *, safe: bool, clean: bool = False) -> Restarted:
    """On a copy; ``safe`` is messageIndexSafe, ``clean`` takes the abort file away first."""
    copy = ground.work / "restarted"
    shutil.copytree(store.path, copy)
    os.sync()
    if clean:
        (copy / "abort").unlink()
    questions, answers = copy.with_suffix(".in"), copy.with_suffix(".out")
    questions.write_text("".join(f"{TOPIC}\t{one.key}\t64\t0\t{_FOREVER}\n" for one in store.samples))
    words = arguments(store=copy, index_safe=safe, in_=questions, out=answers, **store.sizes.words)
    began = time.perf_counter()
    with start("Store", "recover", *words, home=ground.jvm_home) as program:
        ground.note_process(program)
        figures = program.figures(_READY_SECONDS)
        seconds = time.perf_counter() - began
        program.line(_READY_SECONDS)
    if figures["maxOffset"] != store.end_offset:
        raise BenchError(f"RocketMQ's log ends at {figures['maxOffset']}, not at {store.end_offset}")
    rows = [json.loads(line)["phyOffsets"] for line in answers.read_text().splitlines()]
    found = count_found(store.samples, rows)
    entries = count_entries(copy / "index")
    shutil.rmtree(copy)
    return Restarted(seconds, figures["readySeconds"], entries, found)


def count_found(samples: tuple[Sample, ...], answers: list[list[int]]) -> int:
    """How many of the samples their answers hold."""
    return sum(one.phy_offset in offsets for one, offsets in zip(samples, answers, strict=True))


def count_entries(directory: Path) -> int:
    """The entries of all index files of a directory, by their headers."""
    entries = 0
    for path in directory.iterdir():
        with path.open("rb") as file:
            entries += IndexHeader.unpack(file.read(HEADER_SIZE)).entries
    return entries
