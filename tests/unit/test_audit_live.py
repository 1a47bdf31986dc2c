"""An audit beside a broker at work: what it writes meanwhile, and that no more is taken than may be."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from indexd.audit import (
    Audit,
    AuditOptions,
    AuditPlan,
    AuditReport,
    audit_here,
    audit_task,
    join,
    load_kernels,
    plan,
    plan_audit,
    task,
)
from indexd.audit.task import RateLimiter
from indexd.config import Config
from indexd.consumequeue.format import UNIT
from indexd.index.format import IndexLayout
from indexd.storage.disk import Disk, DiskFile
from support.auditing import config_for, index_log, rows_of
from support.auditing_queues import audit_queues, build_queues, config_of, store_of
from support.commitlog_writer import CommitLogWriter, FrameSpec
from support.data_directory import SEGMENT, T0, Store, spec
from support.page_cache import PAGE, Watched, forget, in_use, resident
from support.small_log import SEGMENT_SIZE, messages, write_log

LAYOUT = IndexLayout(500, 2000)


@pytest.fixture(autouse=True)
def _runs(monkeypatch: pytest.MonkeyPatch) -> None:
    # A lock that this process holds itself is not another's: tests/real has a broker that runs.
    monkeypatch.setattr(plan, "is_live", lambda *_: True)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    store = tmp_path / "store"
    write_log(store, 4000)
    (store / "index").mkdir()
    return config_for(store, LAYOUT, SEGMENT_SIZE, read_bytes=64 << 10)


def run(made: AuditPlan, config: Config) -> Audit:
    return join(made, [audit_task(one, Disk(), config) for one in made.tasks])


def test_what_the_broker_writes_meanwhile_is_not_asked_for(tmp_path: Path) -> None:
    store, every = tmp_path / "store", messages(5)
    config = config_for(store, LAYOUT, SEGMENT_SIZE)
    with CommitLogWriter(store / "commitlog", SEGMENT_SIZE) as writer:
        for message in islice(every, 1500):
            writer.append(message)
        index_log(config)
        made, end = plan_audit(Disk(), config), writer.max_offset
        for message in islice(every, 1500):
            writer.append(message)
    assert (made.is_live, made.log_end) == (True, end)
    index_log(config, begin=end, name=20270101000000000)
    found = run(made, config)
    assert found.is_sound, rows_of(found)
    assert (found.messages, found.log_end) == (1500, end)


class Dispatching(Disk):
    """At the third look at an index file the broker has put the rest into it."""

    def __init__(self, path: Path, whole: bytes) -> None:
        self.path, self.whole, self.looks = path, whole, 0

    def open_read(self, path: Path) -> DiskFile:
        self.looks += path == self.path
        if self.looks == 3:
            self.path.write_bytes(self.whole)
        return super().open_read(path)


def test_a_broker_between_two_keys_of_a_message_is_given_a_moment(tmp_path: Path) -> None:
    store = Store(tmp_path, LAYOUT)
    for number in range(20):
        store.append(spec(T0 + number, KEYS="a b c", UNIQ_KEY=f"u{number}"))
    config = config_for(store.root, LAYOUT, SEGMENT, flavour="5.4")
    index_log(config)
    (path,) = (store.root / "index").iterdir()
    whole = path.read_bytes()
    # As it was two entries ago: their slots name those before them, and the header does not count them.
    count = int.from_bytes(whole[36:40], "big")
    data = bytearray(whole)
    for number in (count - 1, count - 2):
        at = LAYOUT.entry_position(number)
        slot = LAYOUT.slot_position(LAYOUT.slot_of(int.from_bytes(data[at : at + 4], "big")))
        data[slot : slot + 4] = data[at + 16 : at + 20]
        data[at : at + 20] = bytes(20)
    data[36:40] = (count - 2).to_bytes(4, "big")
    path.write_bytes(data)
    found = run(plan_audit(Dispatching(path, whole), config), config)
    assert found.is_sound, rows_of(found)
    assert found.keys == 80


def test_units_behind_the_end_are_the_brokers(tmp_path: Path) -> None:
    write_log(tmp_path / "store", 500)
    config = config_of(tmp_path / "store")
    build_queues(config)
    (store_of(config) / "index").mkdir()
    assert audit_queues(config).is_sound
    # A unit that was dispatched since the end of the log was looked for.
    queue = store_of(config) / "consumequeue" / "OrderPaid" / "1"
    newest = max(queue.iterdir())
    used = len(newest.read_bytes().rstrip(b"\0"))
    with newest.open("r+b") as file:
        file.seek(-(-used // 20) * 20)
        file.write(UNIT.pack(1 << 40, 100, 0))
    assert audit_queues(config).is_sound


GENTLE = IndexLayout(500, 2000)
LARGE_SEGMENT = 4 << 20


def run_gently(config: Config, **options: Any) -> AuditReport:
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
    config = config_for(tmp_path / "store", GENTLE, SEGMENT_SIZE)
    index_log(config)
    load_kernels(config)
    free = run_gently(config)
    asked: list[int] = []
    monkeypatch.setattr(task.RateLimiter, "wait", lambda _, size: asked.append(size))
    slow = run_gently(config_for(tmp_path / "store", GENTLE, SEGMENT_SIZE, read_rate_max="1MiB"))
    assert sum(asked) > 0.5 * free.bytes_read
    assert slow.audit == free.audit


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
        assert run_gently(config).is_sound
        assert not any(0 in resident(path) for path in used)
    read = [path for path in (*segments[:-3], *files[:-1]) if path not in used]
    # The plan looks at some messages and entries of each file.
    sizes = {path.name: PAGE * sum(resident(path)) for path in read}
    assert sum(sizes.values()) < len(files) << 20, sizes
    assert all(sum(watched.asked(path)) > 0.7 * len(watched.asked(path)) for path in read)
    # The newest segments and the newest index file are the broker's and its consumers': they are left as they come.
    for path in (*used, *segments[-2:], files[-1]):
        assert 1 not in watched.asked(path)
