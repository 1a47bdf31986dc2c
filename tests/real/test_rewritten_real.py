"""RocketMQ's own store cuts its log, writes over it, recovers or cleans it: the index is what the log says then."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from indexd.index.format import IndexHeader, IndexLayout, unpack_entry
from support.daemon import Daemon, assert_same_index, index_files, indexd_here
from support.naive import naive_frames
from support.reopened import named_for
from support.rocketmq import REAL, Program, arguments, start
from support.small_log import HASH_SLOT_NUM, INDEX_NUM, SEGMENT_SIZE, SIZES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from support.naive_log import NaiveMessage

pytestmark = REAL

MESSAGES = 4000
UNSAFE = 3
ASKED = 300
ALL_TIME = f"10000\t0\t{2**63 - 1}"
#: What may be said beside a log that is rewritten: nothing of damage to our own files.
STORED = {"segment": SEGMENT_SIZE, "slots": HASH_SLOT_NUM, "entries": INDEX_NUM}


@dataclass
class Rewriter:
    """``Rewrite``, a JVM for all tests: RocketMQ's own code at work on one store after another."""

    home: Path
    program: Program | None = None

    def write(self, store: Path, **options: object) -> dict[str, Any]:
        """Open the store and do to it what the options say; the figures."""
        return self._ask("write", store=store, **options)

    def reindex(self, store: Path, index: Path) -> dict[str, Any]:
        """The index that RocketMQ's own IndexService builds from the log as it is now."""
        return self._ask("reindex", store=store, index=index)

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
        if self.program is None or self.program.poll() is not None:
            self.close()
            self.program = start("Rewrite", home=self.home)
        assert self.program.stdin is not None
        self.program.stdin.write(" ".join([mode, *arguments(**STORED, **options)]) + "\n")
        self.program.stdin.flush()
        return self.program

    def _ask(self, mode: str, **options: object) -> dict[str, Any]:
        figures = self._say(mode, **options).figures(60)
        if options.get("exit") == "halt":
            self.close()
        return figures


@dataclass
class Before:
    """A store as RocketMQ left it when it stopped, and data directories that were built from it."""

    store: Path
    #: After a clean stop, and after kill -9.
    stopped: Path
    killed: Path
    frames: list[NaiveMessage] = field(default_factory=list)

    def at(self, share: float) -> int:
        """Where the message begins that stands so far into the log."""
        return self.frames[int(len(self.frames) * share)].phy_offset

    @property
    def end(self) -> int:
        return self.frames[-1].phy_offset + self.frames[-1].size


@pytest.fixture(scope="module")
def rewriter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rewriter]:
    rewriter = Rewriter(tmp_path_factory.mktemp("jvm"))
    yield rewriter
    rewriter.close()


def prepared(home: Path, rewriter: Rewriter, profile: str) -> Before:
    before = Before(home / "store", home / "stopped", home / "killed")
    figures = rewriter.write(before.store, count=MESSAGES, profile=profile)
    before.frames = list(naive_frames(before.store / "commitlog", SEGMENT_SIZE))
    assert (len(before.frames), before.end) == (MESSAGES, figures["maxOffset"])
    with Daemon(before.store, before.stopped, *SIZES) as daemon:
        daemon.wait_caught_up(before.end)
        assert daemon.terminate() == 0
    assert_same_index(before.stopped, before.store)
    with Daemon(before.store, before.killed, *SIZES) as daemon:
        daemon.wait_durable(before.end)
    return before


@pytest.fixture(scope="module")
def varied(tmp_path_factory: pytest.TempPathFactory, rewriter: Rewriter) -> Before:
    """Messages of every kind and size, in some ten segments."""
    return prepared(tmp_path_factory.mktemp("varied"), rewriter, "varied")


@pytest.fixture(scope="module")
def even(tmp_path_factory: pytest.TempPathFactory, rewriter: Rewriter) -> Before:
    """Messages of one size: wherever a new one ends, a stale one may begin."""
    before = prepared(tmp_path_factory.mktemp("even"), rewriter, "even")
    assert len({frame.size for frame in before.frames}) == 1
    return before


# --- the ways in which a log is rewritten: each returns where it was cut and RocketMQ's last word on it ---


def cut(share: float, **options: object) -> Callable[[Rewriter, Before, Path], tuple[int, dict[str, Any]]]:
    def way(rewriter: Rewriter, before: Before, store: Path) -> tuple[int, dict[str, Any]]:
        offset = before.at(share)
        figures = rewriter.write(store, to=offset, seed=2, first=1_000_000, **options)
        assert figures["truncatedTo"] == offset
        return offset, figures

    return way


def cut_at_segment(rewriter: Rewriter, before: Before, store: Path) -> tuple[int, dict[str, Any]]:
    offset = before.end - before.end % SEGMENT_SIZE - 3 * SEGMENT_SIZE
    figures = rewriter.write(store, to=offset, count=600, profile="varied", seed=2, exit="open")
    assert figures["truncatedTo"] == offset
    return offset, figures


def halt_inside(rewriter: Rewriter, before: Before, store: Path) -> tuple[int, dict[str, Any]]:
    """Cut, and while it is written on everything ends; then the store recovers and writes on."""
    offset = before.at(0.4)
    words = {"count": 1_000_000, "profile": "varied", "seed": 2}
    rewriter.write_until_halted(store, to=offset, haltAfter=int(1.5 * SEGMENT_SIZE), **words)
    assert (store / "abort").exists()
    figures = rewriter.write(store, count=200, profile="varied", seed=3, exit="open")
    assert figures["openedAt"] > offset + SEGMENT_SIZE
    return offset, figures


def lose_power(rewriter: Rewriter, before: Before, store: Path) -> tuple[int, dict[str, Any]]:
    """What was not on the disk yet is zeros, from the middle of a message on; then the store recovers and writes on."""
    offset = before.at(0.8)
    for path in sorted((store / "commitlog").iterdir()):
        keep = max(offset + 50 - int(path.name), 0)
        if keep < SEGMENT_SIZE:
            with path.open("r+b") as file:
                file.seek(keep)
                file.write(bytes(SEGMENT_SIZE - keep))
    (store / "abort").touch()
    figures = rewriter.write(store, count=300, profile="varied", seed=2, exit="open")
    assert figures["openedAt"] == offset
    return offset, figures


def come_to_life(rewriter: Rewriter, before: Before, store: Path) -> tuple[int, dict[str, Any]]:
    """A store that was cut and stopped takes the stale messages that follow for its own when it is opened again."""
    offset, figures = cut(0.5, count=3, profile="even")(rewriter, before, store)
    again = rewriter.write(store, count=100, profile="even", seed=3, first=2_000_000, exit="open")
    assert again["openedAt"] > figures["maxOffset"] + 10 * before.frames[0].size
    return offset, again


@dataclass(frozen=True)
class Log:
    """A store after it was rewritten, and what a build of it makes of it."""

    store: Path
    whole: Path
    frames: list[NaiveMessage]
    removed: list[NaiveMessage]
    new: list[NaiveMessage]
    end: int


def log_of(store: Path, before: Before, at: int, end: int) -> Log:
    frames = [frame for frame in naive_frames(store / "commitlog", SEGMENT_SIZE) if frame.phy_offset < end]
    assert frames[-1].phy_offset + frames[-1].size in (end, end - end % SEGMENT_SIZE)
    here = {frame.uniq_key for frame in frames}
    whole = store.with_name("whole")
    words = ("--store", store, "--data", store.with_name("unused"), "--out", whole, *SIZES)
    done = indexd_here("rebuild", "--json", *words)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["messages"] == len(frames)
    removed = [frame for frame in before.frames if frame.phy_offset >= at and frame.uniq_key not in here]
    return Log(store, whole, frames, removed, [frame for frame in frames if frame.phy_offset >= at], end)


def check(log: Log, data: Path) -> None:
    """What stands in a stopped data directory is what the log says now, and nothing of what it said before."""
    assert_same_index(data, log.whole)
    done = indexd_here("verify", "--deep", "--store", log.store, "--data", data, *SIZES)
    assert done.returncode == 0, done.stdout + done.stderr
    gone = [(frame.topic, frame.uniq_key, "U") for frame in log.removed if frame.uniq_key][-ASKED:]
    there = [(frame, key) for frame in log.new if (key := frame.uniq_key) and frame.sys_flag & 0xC != 0xC][:ASKED]
    assert gone
    assert there
    batch = data.with_name("questions")
    asked = [*gone, *((frame.topic, key, "U") for frame, key in there)]
    batch.write_text("".join(f"{topic}\t{key}\t{ALL_TIME}\t{kind}\n" for topic, key, kind in asked))
    done = indexd_here("query-key", "--batch", batch, "--data", data)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line)["phyOffsets"] for line in done.stdout.splitlines()]
    assert found == [[] for _ in gone] + [[frame.phy_offset] for frame, _ in there]


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("varied", cut(0.95, count=300, profile="varied", exit="clean")),
        ("varied", cut(0.4, count=1000, profile="varied", exit="open")),
        ("varied", cut(0.6, count=3000, profile="varied", exit="halt")),
        ("varied", cut(0.55, count=3, profile="plain", exit="clean")),
        ("even", cut(0.55, count=3, profile="even", exit="open")),
        ("varied", cut_at_segment),
        ("varied", halt_inside),
        ("varied", lose_power),
        ("even", come_to_life),
    ],
    ids=[
        *("last segment", "segments back", "longer than before", "few", "few of one size"),
        *("segment begin", "halted", "power loss", "stale ones come to life"),
    ],
)
def test_rewritten(
    tmp_path: Path, rewriter: Rewriter, request: pytest.FixtureRequest, kind: str,
    way: Callable[[Rewriter, Before, Path], tuple[int, dict[str, Any]]],
) -> None:  # fmt: skip
    before: Before = request.getfixturevalue(kind)
    store = tmp_path / "store"
    shutil.copytree(before.store, store)
    datas = {name: tmp_path / name for name in ("beside", "stopped", "killed")}
    for name, data in datas.items():
        shutil.copytree(before.killed if name == "killed" else before.stopped, data)
        named_for(store, data)
    with Daemon(store, datas["beside"], *SIZES, env={"INDEXD_CORRUPT_AFTER_MS": "200"}) as daemon:
        daemon.wait_caught_up(before.end)
        at, figures = way(rewriter, before, store)
        log = log_of(store, before, at, figures["maxOffset"])
        daemon.wait_for(lambda: len(daemon.events("running")) > 1 or None, "running again")
        daemon.wait_caught_up(log.end)
        assert daemon.terminate() == 0
        assert "the log was cut" in daemon.events("disturbed")[0]["problem"]
    check(log, datas["beside"])
    for name in ("stopped", "killed"):
        with Daemon(store, datas[name], *SIZES) as daemon:
            daemon.wait_caught_up(log.end)
            assert daemon.terminate() == 0
            assert not daemon.events("disturbed")
        check(log, datas[name])
