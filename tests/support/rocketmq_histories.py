"""Stores with a past, made by RocketMQ's own code: killed at random moments, started again, cut, expired, stopped.

All stores of a version live in one JVM at a time and are killed together, wherever each of them is then.
"""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from support.goldens import Golden
from support.naive import key_hash
from support.rocketmq_jvm import EARLIER
from support.rocketmq_rewrite import Rewriter

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
