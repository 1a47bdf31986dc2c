"""RocketMQ's own store at work on logs that exist: cut, written over, recovered; with a daemon of ours beside it.

``Rewriter`` is the JVM; a ``Way`` is one history of a log, told to it step by step.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from support.daemon import Daemon, assert_same_index
from support.goldens import Golden
from support.naive import NaiveMessage, key_hash, naive_frames
from support.reopened import config_for, named_for, reopen
from support.rocketmq import EARLIER, Program, arguments, start
from support.same_index import old_queue_files
from support.small_log import HASH_SLOT_NUM, INDEX_NUM, QUEUE_FILE_SIZE, SEGMENT_SIZE, SIZES

MESSAGES = 4000
_CLEAN_SECONDS = 60.0
STORED = {"segment": SEGMENT_SIZE, "slots": HASH_SLOT_NUM, "entries": INDEX_NUM, "queuefile": QUEUE_FILE_SIZE}


@dataclass
class Rewriter:
    """``Rewrite``, a JVM for all tests: RocketMQ's own code at work on one store after another, in one ``version``."""

    home: Path
    program: Program | None = None
    version: str | None = None

    def write(self, store: Path, **options: object) -> dict[str, Any]:
        """Open the store and do to it what the options say; the figures.

        What RocketMQ is just flushing when it cleans stays until it does again, so it is told to until none stays.
        """
        figures = self._ask("write", store=store, **options)
        deadline = time.monotonic() + _CLEAN_SECONDS
        while "drop" in options and old_queue_files(store, figures["minOffset"]):
            assert time.monotonic() < deadline
            self._ask("write", store=store, clean=True, exit=options["exit"])
        return figures

    def reindex(self, store: Path, index: Path, **options: object) -> dict[str, Any]:
        """The index that RocketMQ's own IndexService builds from the log as it is now."""
        return self._ask("reindex", store=store, index=index, **options)

    def find(self, store: Path, **options: object) -> dict[str, Any]:
        """Every key asked of the index as it is now; see Findable."""
        return self._ask("find", store=store, **options)

    def stop(self) -> int:
        """Stop all stores that are open, in order; how many they were."""
        return int(self._tell("stop").figures(60)["stopped"])

    def halt_after(self, milliseconds: int) -> None:
        """Everything ends some time from now, in the middle of whatever it does then."""
        self._tell("halt", str(milliseconds))
        self.close()

    def write_until_halted(self, store: Path, **options: object) -> None:
        """The same, but everything ends in the middle of it."""
        self._say("write", store=store, **options)
        self.close()

    def close(self) -> None:
        if self.program is not None:
            with self.program:
                pass
        self.program = None

    def _say(self, mode: str, **options: object) -> Program:
        return self._tell(mode, *arguments(**STORED | options))

    def _tell(self, *words: str) -> Program:
        if self.program is None or self.program.poll() is not None:
            self.close()
            self.program = start("Rewrite", home=self.home, version=self.version)
        assert self.program.stdin is not None
        self.program.stdin.write(" ".join(words) + "\n")
        self.program.stdin.flush()
        return self.program

    def _ask(self, mode: str, **options: object) -> dict[str, Any]:
        figures = self._say(mode, **options).figures(60)
        if options.get("exit") == "halt":
            self.close()
        return figures


@dataclass(frozen=True)
class Before:
    """A store as RocketMQ wrote it, and data directories built from it: after a clean stop, and after kill -9."""

    store: Path
    stopped: Path
    killed: Path
    frames: list[NaiveMessage]

    def at(self, share: float) -> int:
        """Where the message begins that stands so far into the log."""
        return self.frames[int(len(self.frames) * share)].phy_offset

    @property
    def end(self) -> int:
        return end_of(self.frames)


def end_of(frames: list[NaiveMessage]) -> int:
    return frames[-1].phy_offset + frames[-1].size


def frames_of(store: Path) -> list[NaiveMessage]:
    return list(naive_frames(store / "commitlog", SEGMENT_SIZE))


def prepared(home: Path, rewriter: Rewriter, profile: str, leave: str) -> Before:
    store = home / "store"
    figures = rewriter.write(store, count=MESSAGES, profile=profile, exit=leave)
    before = Before(store, home / "stopped", home / "killed", frames_of(store))
    assert (len(before.frames), before.end) == (MESSAGES, figures["maxOffset"])
    assert reopen(config_for(store, before.stopped)).phy_offset == before.end
    assert_same_index(before.stopped, store)
    with Daemon(store, before.killed, *SIZES) as daemon:
        daemon.wait_durable(before.end)
    return before


@dataclass(frozen=True)
class Beside:
    """A copy of a store, copies of its data directories, and a daemon that runs beside it all."""

    rewriter: Rewriter
    before: Before
    store: Path
    daemon: Daemon

    def cut(self, offset: int, **options: object) -> dict[str, Any]:
        figures = self.rewriter.write(self.store, to=offset, seed=2, first=1_000_000, **options)
        assert figures["truncatedTo"] == offset
        return figures

    def wait_built(self, end: int) -> None:
        self.daemon.wait_state(lambda row: bool(row["phyOffset"] == end), timeout=20)


def copied(before: Before, home: Path) -> tuple[Path, dict[str, Path]]:
    """The store again, and the data directories of three daemons as if they had been built from it."""
    store = home / "store"
    shutil.copytree(before.store, store)
    datas = {name: home / name for name in ("beside", "stopped", "killed")}
    for name, data in datas.items():
        shutil.copytree(before.killed if name == "killed" else before.stopped, data)
        named_for(store, data)
    return store, datas


# --- the ways in which a log is rewritten: each returns where it was cut and where RocketMQ then says it ends ---

Way = Callable[[Beside], tuple[int, int]]


def cut(share: float, **options: object) -> Way:
    def way(beside: Beside) -> tuple[int, int]:
        offset = beside.before.at(share)
        return offset, beside.cut(offset, **options)["maxOffset"]

    return way


def cut_at_segment(beside: Beside) -> tuple[int, int]:
    end = beside.before.end
    offset = end - end % SEGMENT_SIZE - 3 * SEGMENT_SIZE
    return offset, beside.cut(offset, count=600, profile="varied", exit="open")["maxOffset"]


def cut_and_wait(beside: Beside) -> tuple[int, int]:
    """Between the cut and the next message, the stale ones of the segment stand there as if they were the log's."""
    offset = beside.before.at(0.55)
    beside.cut(offset, exit="open")
    segment_end = offset - offset % SEGMENT_SIZE + SEGMENT_SIZE
    beside.daemon.wait_state(lambda row: bool(segment_end - SEGMENT_SIZE < row["phyOffset"] <= segment_end))
    figures = beside.rewriter.write(beside.store, count=3, profile="plain", seed=2, exit="open")
    return offset, figures["maxOffset"]


def halt_inside(beside: Beside) -> tuple[int, int]:
    """Cut, and while it is written on everything ends; then the store recovers and writes on."""
    offset = beside.before.at(0.4)
    words = {"count": 1_000_000, "profile": "varied", "seed": 2}
    beside.rewriter.write_until_halted(beside.store, to=offset, haltAfter=int(1.5 * SEGMENT_SIZE), **words)
    assert (beside.store / "abort").exists()
    figures = beside.rewriter.write(beside.store, count=200, profile="varied", seed=3, exit="open")
    assert figures["openedAt"] > offset + SEGMENT_SIZE
    return offset, figures["maxOffset"]


def lose_power(beside: Beside) -> tuple[int, int]:
    """What was not on the disk yet is zeros, from the middle of a message on; then the store recovers and writes on."""
    offset = beside.before.at(0.8)
    zero_from(beside.store, offset + 50)
    figures = beside.rewriter.write(beside.store, count=300, profile="varied", seed=2, exit="open")
    assert figures["openedAt"] == offset
    return offset, figures["maxOffset"]


def zero_from(store: Path, offset: int) -> None:
    for path in (store / "commitlog").iterdir():
        kept = max(offset - int(path.name), 0)
        if kept < SEGMENT_SIZE:
            with path.open("r+b") as file:
                file.seek(kept)
                file.write(bytes(SEGMENT_SIZE - kept))
    (store / "abort").touch()


def stale_behind(beside: Beside) -> tuple[int, int]:
    """Stale messages follow without a gap. RocketMQ takes them for its own at its next start, and so do we at once."""
    offset = beside.before.at(0.55)
    end = beside.cut(offset, count=3, profile="even", exit="open")["maxOffset"]
    stale = end_of(frames_of(beside.store))
    assert stale > end
    return offset, stale


def written_over(beside: Beside) -> tuple[int, int]:
    """The same; but the store was not started again, and writes over those that are indexed by then."""
    offset, stale = stale_behind(beside)
    beside.wait_built(stale)
    beside.rewriter.write(beside.store, count=100, profile="even", seed=3, first=2_000_000, exit="open")
    figures = beside.rewriter.write(beside.store, count=1000, profile="plain", seed=4, first=3_000_000, exit="open")
    return offset, figures["maxOffset"]


def come_to_life(beside: Beside) -> tuple[int, int]:
    """The same; but the store is stopped and started again, keeps the stale messages, and writes on behind them."""
    offset = beside.before.at(0.55)
    end = beside.cut(offset, count=3, profile="even", exit="halt")["maxOffset"]
    stale = end_of(frames_of(beside.store))
    figures = beside.rewriter.write(beside.store, count=100, profile="even", seed=3, first=2_000_000, exit="open")
    assert figures["openedAt"] == stale > end
    return offset, figures["maxOffset"]


#: A key of a message: physical offset, key hash. One that a message has twice is there twice.
Keys = Counter[tuple[int, int]]
LATEST = "5.4.0"
VERSIONS = (LATEST, EARLIER)
SEGMENT, QUEUE_FILE = 64 << 10, 6000
# Both are written down once in ten seconds unless told otherwise: nobody waits that long here.
_FLUSHED = {"set_flushCommitLogThoroughInterval": 300, "set_flushConsumeQueueThoroughInterval": 300}
# Answers to one question.
_MANY = {"set_maxMsgsNumBatch": 1_000_000}
_LARGE = 200_000
_TORN_SIZE = 100_000
_LIVES = (5000, 4200)  # milliseconds, and up to a second more

Step = dict[str, object]
#: What happens to a store after its last death, as steps of ``Rewriter.write``; it is stopped after each.
LAST_STEPS: dict[str, list[Step]] = {
    "stopped": [{"count": 20}],
    "expired": [{"drop": 6, "count": 300}],
    "cut": [{"to": 0.9, "count": 150}],
    "cut-far": [{"to": 0.6, "count": 150}],
    "prepared": [{"count": 20, "profile": "prepared"}, {}, {"count": 5, "profile": "prepared"}],
    # The new messages stand where old ones did, and behind them the old ones come to life.
    "even-cut": [{"to": 0.9, "count": 40}, {}],
    # Power was lost, too: the end of the log never reached the disk, and full index files point there.
    "torn": [{"count": 150}],
    "safe": [{"count": 20}],
    "one-file": [{}],
}
_SIZES = {
    "stopped": (97, 500),
    "one-file": (1000, 60_000),
    "cut": (50, 6000),
    "even-cut": (300, 3000),
    "torn": (200, 700),
}


@dataclass(frozen=True)
class History:
    """``store`` was stopped at last; ``killed`` is a copy from before the first start after its first death."""

    name: str
    store: Path
    killed: Path
    slots: int
    entries: int
    segment: int = SEGMENT

    @property
    def profile(self) -> str:
        """Of which kind the messages are."""
        return "even" if self.name.startswith("even") else "varied"

    @property
    def settings(self) -> dict[str, object]:
        """What RocketMQ is told each time."""
        sizes = {"segment": self.segment, "slots": self.slots, "entries": self.entries, "queuefile": QUEUE_FILE}
        return {**sizes, **_FLUSHED, **_MANY, "index_safe": self.name == "safe"}


@dataclass(frozen=True)
class Found:
    """``figures`` as Findable says them; ``lost`` are the keys that are not found."""

    figures: dict[str, Any]
    lost: Keys


@dataclass
class RealStore:
    """A JVM with the classes of one version, for one history after another."""

    version: str
    home: Path
    rewriter: Rewriter = field(init=False)

    def __post_init__(self) -> None:
        self.rewriter = Rewriter(self.home, version=None if self.version == LATEST else self.version)

    def open(self, history: History, store: Path, **options: object) -> dict[str, Any]:
        """Start RocketMQ on a store, which recovers as its abort file says, do what is said, and let it stay open."""
        return self.rewriter.write(store, **{"exit": "open"} | history.settings | options)

    def find(self, history: History, store: Path, **options: object) -> Found:
        """What RocketMQ's own index service finds there, that of the open store or one that is loaded for it."""
        out = self.home / "lost"
        figures = self.rewriter.find(store, out=out, **history.settings, **options)
        lost: Keys = Counter()
        for line in out.read_text("utf-8").split("\n"):
            if line:
                row = json.loads(line)
                lost.update((row["phyOffset"], key_hash(text)) for text in row["lost"])
        return Found(figures, lost)

    def reindexed(self, history: History, store: Path) -> Found:
        """The same of an index that its own index service builds from the whole log.

        In one large file: of small ones, two may get the name of one millisecond and be one.
        """
        index = self.home / "reindexed"
        shutil.rmtree(index, ignore_errors=True)
        large = replace(history, entries=_LARGE)
        self.rewriter.reindex(store, index, **large.settings)
        return self.find(large, store, index=index)


def histories_in(home: Path) -> dict[str, History]:
    """All of one version, by name; ``home`` is where they are made."""
    return {
        name: History(name, home / name / "store", home / name / "killed", *_SIZES.get(name, (1000, 9000)))
        for name in LAST_STEPS
    }


def golden_history(golden: Golden) -> History:
    """A store of tests/golden that was killed, as one of these."""
    return History(golden.name, golden.root, golden.root, golden.hash_slot_num, golden.index_num, golden.segment_size)


def make_histories(home: Path, real: RealStore, seed: int) -> None:
    """Write, kill and start again all of them."""
    rand, histories = random.Random(seed), histories_in(home)
    for life, least in enumerate(_LIVES):
        for number, history in enumerate(histories.values()):
            words = {"profile": history.profile, "seed": rand.randrange(1 << 30), "first": life * 1_000_000}
            real.open(history, history.store, count=50, pauseMs=60 + 15 * number, exit="busy", **words)
        real.rewriter.halt_after(least + rand.randrange(1000))
        if life == 0:
            for history in histories.values():
                shutil.copytree(history.store, history.killed)
    tear(histories["torn"].store)
    for number in range(max(map(len, LAST_STEPS.values()))):
        for history in histories.values():
            for step in LAST_STEPS[history.name][number : number + 1]:
                _take(real, history, step, {"seed": rand.randrange(1 << 30), "first": (2 + number) * 1_000_000})
        real.rewriter.stop()


def tear(store: Path) -> None:
    """Zeros in place of the end of the log, as a file system may leave that had no time to write it."""
    left = _TORN_SIZE
    for path in sorted((store / "commitlog").iterdir(), reverse=True):
        data = path.read_bytes()
        kept = data[: max(len(data.rstrip(b"\0")) - left, 0)]
        left -= len(data.rstrip(b"\0")) - len(kept)
        path.write_bytes(kept.ljust(len(data), b"\0"))
    assert left == 0


def open_all(real: RealStore, stores: Iterable[tuple[History, Path]]) -> None:
    """Start RocketMQ on all of them and stop it again."""
    for history, store in stores:
        real.open(history, store)
    real.rewriter.stop()


def _take(real: RealStore, history: History, step: Step, words: Step) -> None:
    share = step.get("to")
    if isinstance(share, float):
        words["to"] = int(real.open(history, history.store)["maxOffset"] * share)
    real.open(history, history.store, **{"profile": history.profile} | step | words)
