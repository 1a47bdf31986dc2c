"""An audit takes no more than it may: the rate, the page cache, the priority."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from indexd.audit import AuditOptions, AuditReport, audit_here, load_kernels, task
from indexd.audit.report import piece_size
from indexd.audit.task import RateLimiter
from indexd.config import Config
from indexd.index.format import IndexLayout
from indexd.storage.disk import Disk
from support.auditing import config_for, index_log
from support.commitlog_writer import CommitLogWriter, FrameSpec
from support.page_cache import PAGE, Watched, forget, in_use, resident
from support.small_log import SEGMENT_SIZE, write_log

LAYOUT = IndexLayout(500, 2000)
LARGE_SEGMENT = 4 << 20


def run(config: Config, **options: Any) -> AuditReport:
    return audit_here(config, Disk(), AuditOptions(samples=0, **options), lambda *_: None)


class Clock:
    """Time that goes by only where somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def test_so_many_bytes_a_second_at_most() -> None:
    clock = Clock()
    limiter = RateLimiter(1000, clock, clock.sleep)
    limiter.wait(0)
    assert clock.slept == []
    for _ in range(10):
        limiter.wait(500)
    assert clock.now == pytest.approx(5.0)
    # What was not used is not saved up, but for a moment.
    clock.now += 60
    limiter.wait(1000)
    assert clock.slept[-1] == pytest.approx(0.9)
    RateLimiter(0, clock, clock.sleep).wait(1 << 40)
    assert clock.slept[-1] == pytest.approx(0.9)


def test_all_that_is_read_is_paid_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_log(tmp_path / "store", 2000)
    config = config_for(tmp_path / "store", LAYOUT, SEGMENT_SIZE)
    index_log(config)
    load_kernels(config)
    free = run(config)
    asked: list[int] = []
    monkeypatch.setattr(task.RateLimiter, "wait", lambda _, size: asked.append(size))
    slow = run(config_for(tmp_path / "store", LAYOUT, SEGMENT_SIZE, read_rate_max="1MiB"))
    assert sum(asked) > 0.5 * free.bytes_read
    assert (slow.audit, slow.manner) == (free.audit, ("at most 1MiB a second",))
    assert free.manner == ()


def test_tasks_that_are_kept_are_minutes_of_reading(tmp_path: Path) -> None:
    def size(**keys: Any) -> int:
        return piece_size(config_for(tmp_path, IndexLayout(5_000_000, 20_000_000), 1 << 30, **keys))

    assert size() == 16 << 30
    assert size(read_rate_max="50MiB") == 6000 << 20
    assert size(read_rate_max="1MiB") >= 8 * (4 * 5_000_000 + 20 * 20_000_000)


def test_pages_that_were_not_there_are_given_back_and_others_stay(
    disk_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = disk_path / "store"
    with CommitLogWriter(store / "commitlog", LARGE_SEGMENT) as writer:
        number = 0
        while writer.max_offset < 60 << 20:
            writer.append(FrameSpec("T", os.urandom(900), {"UNIQ_KEY": f"{number:032X}"}, store_timestamp=number + 1))
            number += 1
    config = config_for(store, IndexLayout(250_000, 13_000), LARGE_SEGMENT)
    index_log(config, "4.7")
    segments, files = (sorted((store / name).iterdir()) for name in ("commitlog", "index"))
    assert len(segments) >= 15
    assert len(files) == 5
    for path in (*segments, *files):
        forget(path)
    used = (segments[4], files[1])
    watched = Watched(monkeypatch)
    with in_use(used[0]), in_use(used[1]):  # as by the broker
        assert run(config).is_sound
        assert not any(0 in resident(path) for path in used)
    read = [path for path in (*segments[:-3], *files[:-1]) if path not in used]
    # The plan looks at some messages and entries of each file.
    sizes = {path.name: PAGE * sum(resident(path)) for path in read}
    assert sum(sizes.values()) < len(files) << 20, sizes
    assert all(sum(watched.asked(path)) > 0.7 * len(watched.asked(path)) for path in read)
    # The newest segments and the newest index file are the broker's and its consumers': they are left as they come.
    for path in (*used, *segments[-2:], files[-1]):
        assert 1 not in watched.asked(path)
