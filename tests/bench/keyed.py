"""A store of messages with many keys each: one open index file, nearly full, over a log that stays small.

The messages say that they were stored at an even pace until a moment ago, which RocketMQ's recovery goes by; where it
can be run, RocketMQ's own store then opens the log, indexes it, writes some more messages and is halted, so that its
index, its consume queues and its checkpoint are what an unclean stop of it leaves.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from bench.ground import ENTRIES, QUEUE_FILE_SIZE, SLOTS, BenchError, Ground, progress
from indexd.index.format import HEADER_SIZE, IndexHeader, IndexLayout
from support.commitlog_writer import CommitLogWriter, FrameSpec
from support.rocketmq import arguments, figures_of, run, start

TOPIC = "TopicTest"
KEYS_PER_MESSAGE = 20
ENTRIES_PER_MESSAGE = KEYS_PER_MESSAGE + 1  # and the unique key
_FULL_SCALE_MESSAGES = 3_000_000
_LEAST_SCALE = 1 / 200
# A log of 20,000,000 entries has so many segments of 1 GiB at 4 entries and 1.4 kB a message; these messages are
# smaller by entry, so their segments are, too. How much RocketMQ throws away depends on that.
_SEGMENTS = 7
_FULL_SEGMENT = 64 << 20
_PAGE = 4096
_KEY_DIGITS = 10
_BODY = bytes(100)
# What the store times say the log took, and more than the last one of its segments by far: RocketMQ goes back by time.
_SPAN_MS = 900_000
_DELTA_MESSAGES = 5000
_SAMPLES = 2000
# What RocketMQ's store writes itself, in some seconds, so that its timers have flushed and its checkpoint has moved.
_TAIL_MESSAGES, _TAIL_PAUSE_EVERY, _TAIL_PAUSE_MS = 500, 100, 1000
_TAIL_ENTRIES_PER_MESSAGE = 4
_HALTED = 137
_JVM_SECONDS = 900


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large everything is; ``scale`` 1 is RocketMQ's default of 20,000,000 entries a file."""

    scale: float
    slots: int
    index_num: int
    segment: int
    base: int
    delta: int

    @classmethod
    def of(cls, messages: int, deltas: int) -> Sizes:
        """For ``--messages``; the file has room for that many ``deltas`` and stays open."""
        scale = max(_LEAST_SCALE, min(1.0, messages / _FULL_SCALE_MESSAGES))
        index_num = int(ENTRIES * scale)
        delta = max(1, int(_DELTA_MESSAGES * scale))
        room = index_num - _TAIL_MESSAGES * _TAIL_ENTRIES_PER_MESSAGE - deltas * delta * ENTRIES_PER_MESSAGE
        segment = -(-int(_FULL_SEGMENT * scale) // _PAGE) * _PAGE
        return cls(scale, int(SLOTS * scale), index_num, segment, room // ENTRIES_PER_MESSAGE - 1, delta)

    @property
    def file_size(self) -> int:
        """Bytes of an index file."""
        return IndexLayout(self.slots, self.index_num).file_size

    @property
    def flags(self) -> list[str]:
        """As options of indexd."""
        return [f"--segment-size={self.segment}", f"--hash-slot-num={self.slots}", f"--index-num={self.index_num}"]

    @property
    def words(self) -> dict[str, object]:
        """As arguments of RocketMQ's programs."""
        sizes = {"segment": self.segment, "slots": self.slots, "entries": self.index_num}
        return {**sizes, "queuefile": QUEUE_FILE_SIZE}


@dataclass(frozen=True, slots=True)
class Sample:
    """A key that one message alone has, and where that stands."""

    key: str
    phy_offset: int


@dataclass(frozen=True, slots=True)
class KeyedStore:
    """What was made; ``theirs`` says whether RocketMQ's own store was there last."""

    path: Path
    sizes: Sizes
    end_offset: int
    messages: int
    samples: tuple[Sample, ...]
    theirs: bool


def make(ground: Ground, path: Path, sizes: Sizes) -> KeyedStore:
    """Write the log, and have RocketMQ's store index it and die."""
    progress(f"recover: writing {sizes.base:,} messages with {ENTRIES_PER_MESSAGE} keys each")
    offsets, end = write_log(path, sizes)
    step = max(1, sizes.base // _SAMPLES)
    samples = tuple(Sample(keys_of(i)[i % KEYS_PER_MESSAGE], offsets[i]) for i in range(0, sizes.base, step))
    if ground.java_missing is not None:
        return KeyedStore(path, sizes, end, sizes.base, samples, theirs=False)
    progress("recover: RocketMQ's store indexes it, writes some more and is halted")
    # With this file it indexes from the first message on; without, it leaves that one out.
    (path / "abort").touch()
    words = arguments(
        store=path,
        count=_TAIL_MESSAGES,
        pauseEvery=_TAIL_PAUSE_EVERY,
        pauseMs=_TAIL_PAUSE_MS,
        exit="halt",
        **sizes.words,
    )
    said = run("Store", "write", *words, home=ground.jvm_home, timeout=_JVM_SECONDS, ends_with=_HALTED)
    figures = figures_of(said.splitlines()[-1])
    return KeyedStore(path, sizes, figures["maxOffset"], sizes.base + _TAIL_MESSAGES, samples, theirs=True)


def write_log(path: Path, sizes: Sizes) -> tuple[list[int], int]:
    """The log alone: the physical offset of each message, and of the end."""
    begin = int(time.time() * 1000) - _SPAN_MS
    with CommitLogWriter(path / "commitlog", sizes.segment) as writer:
        offsets = [writer.append(_message(i, begin + i * _SPAN_MS // sizes.base)) for i in range(sizes.base)]
        return offsets, writer.max_offset


def append(store: KeyedStore, end_offset: int, number: int) -> tuple[int, Sample]:
    """One more delta, ``number`` 0, 1, ...: the new end of the log, and a key of its last message."""
    first = store.sizes.base + number * store.sizes.delta
    now = int(time.time() * 1000)
    with CommitLogWriter(store.path / "commitlog", store.sizes.segment, start_offset=end_offset) as writer:
        for i in range(first, first + store.sizes.delta):
            last = writer.append(_message(i, now))
        return writer.max_offset, Sample(keys_of(i)[0], last)


def _message(number: int, store_timestamp: int) -> FrameSpec:
    return FrameSpec(
        topic=TOPIC,
        body=_BODY,
        properties={"KEYS": " ".join(keys_of(number)), "UNIQ_KEY": f"7F00000100002A14{number:016X}"},
        born_timestamp=store_timestamp,
        store_timestamp=store_timestamp,
    )


def keys_of(number: int) -> list[str]:
    """The keys of a message, by its number."""
    # Without order, as real ones hash: counted numbers would fall into neighbouring slots.
    digits = hashlib.shake_128(b"%d" % number).hexdigest(KEYS_PER_MESSAGE * _KEY_DIGITS // 2)
    return [digits[at : at + _KEY_DIGITS] for at in range(0, len(digits), _KEY_DIGITS)]


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
