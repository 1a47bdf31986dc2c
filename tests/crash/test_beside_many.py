"""Four thousand queues: few descriptors, memory that stays bounded, and a kill in the middle."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.beside_log import assert_beside, flags, spec, write
from support.daemon import Daemon, assert_same_index, rebuild
from support.faults import still_degraded
from support.missing import need
from support.queues import tree

if TYPE_CHECKING:
    from indexd.commitlog.writer import FrameSpec

SEGMENT_SIZE = 1 << 20
QUEUE_FILE_SIZE = 40
QUEUES, TOPICS = 4000, 100
DESCRIPTORS_MAX = 256
#: A kernel's compiled code and numpy alone take most of it.
MEMORY_MAX = 400 << 20
#: All files of a round are synced at each flush: not ten times a second.
CALM = {"INDEXD_FLUSH_INTERVAL": "2", "INDEXD_DRAIN_INTERVAL": "0.2"}
WORDS = flags(SEGMENT_SIZE, QUEUE_FILE_SIZE)
WAIT = 120.0


def round_of(number: int) -> list[FrameSpec]:
    """A message for every queue; no file holds more than two."""
    first = number * QUEUES
    return [spec(first + queue, f"Topic{queue % TOPICS}", queue // TOPICS, body=5) for queue in range(QUEUES)]


class Watched:
    """The most descriptors and bytes of memory that a process was seen to hold."""

    def __init__(self, daemon: Daemon) -> None:
        self.descriptors = self.memory = 0
        self._daemon = daemon
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Watched:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(0.01):
            try:
                opened = sum(1 for _ in Path(f"/proc/{self._daemon.pid}/fd").iterdir())
                self.descriptors = max(self.descriptors, opened)
                self.memory = max(self.memory, self._daemon.rss())
            except (FileNotFoundError, ProcessLookupError, ValueError):
                return


@pytest.fixture(scope="module")
def limited() -> tuple[str, ...]:
    """Words before a command that let it open few files."""
    return (need("prlimit"), f"--nofile={DESCRIPTORS_MAX}:{DESCRIPTORS_MAX}")


def test_thousands_of_queues(tmp_path: Path, limited: tuple[str, ...]) -> None:
    store, data, whole = (tmp_path / name for name in ("store", "data", "whole"))
    end = write(store, round_of(0), SEGMENT_SIZE)
    with Daemon(store, data, *WORDS, env=CALM, tracer=limited) as daemon, Watched(daemon) as watched:
        daemon.wait_state(lambda row: bool(row["durableOffset"] >= end), WAIT)
        end = write(store, [*round_of(1), *round_of(2)], SEGMENT_SIZE)
        # In the middle of building, of syncing or of writing it down.
        daemon.wait_state(lambda row: bool(row["messages"] > QUEUES))
        time.sleep(0.5)
        daemon.kill()
    assert not still_degraded(daemon)
    with Daemon(store, data, *WORDS, env=CALM, tracer=limited) as again, Watched(again) as watched_again:
        again.wait_event("recovered")
        again.wait_caught_up(end, WAIT)
        assert again.terminate() == 0
    assert not [row for row in again.events() if row["level"] != "info"]
    for seen in (watched, watched_again):
        print(f"{seen.descriptors} descriptors, {seen.memory >> 20} MiB")
        assert 0 < seen.descriptors < DESCRIPTORS_MAX // 2
        assert 0 < seen.memory < MEMORY_MAX
    assert_beside(data, store, SEGMENT_SIZE, QUEUE_FILE_SIZE)
    rebuild(store, whole, *WORDS)
    assert_same_index(data, whole)
    assert len(tree(data / "consumequeue")) == 2 * QUEUES


def test_thousands_of_queues_of_which_most_have_expired(tmp_path: Path, limited: tuple[str, ...]) -> None:
    """Each keeps its last file; those that go on expire theirs; removal needs no descriptors either."""
    store, data = tmp_path / "store", tmp_path / "data"
    end = write(store, [*round_of(0), *round_of(1), *round_of(2)], SEGMENT_SIZE)
    with Daemon(store, data, *WORDS, env=CALM, tracer=limited) as daemon:
        daemon.wait_state(lambda row: bool(row["durableOffset"] >= end), WAIT)
        segments = sorted((store / "commitlog").iterdir())
        for path in segments[:-1]:
            path.unlink()
        end = write(store, round_of(3)[:100], SEGMENT_SIZE)
        daemon.wait_event("expired_files", WAIT)
        daemon.wait_state(lambda row: bool(row["durableOffset"] >= end), WAIT)
        assert daemon.terminate() == 0
    assert not [row for row in daemon.events() if row["level"] != "info"]
    folders = [path for path in (data / "consumequeue").glob("*/*") if path.is_dir()]
    assert len(folders) == QUEUES
    assert {path.name for folder in folders for path in folder.iterdir()} == {f"{QUEUE_FILE_SIZE:020d}"}
