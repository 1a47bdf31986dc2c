"""Audits beside a broker at work, gentle ones, and those that are interrupted and go on."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexd.audit import (
    AuditOptions,
    AuditTask,
    TaskResult,
    audit_task,
    load_kernels,
    plan,
    plan_audit,
    run_audit,
    task,
)
from indexd.audit.report import resume_file
from indexd.audit.task import RateLimiter
from indexd.config import Config
from indexd.consumequeue.format import UNIT
from indexd.errors import BusyError, UsageError
from indexd.index.format import IndexLayout
from indexd.storage.disk import Disk, DiskFile
from support.auditing import (
    LAYOUT,
    Runs,
    audit_plan,
    audit_queues,
    build_queues,
    config_for,
    config_with_queues,
    copied,
    files_of,
    index_log,
    store_of,
    wrong_store,
)
from support.commitlog_writer import CommitLogWriter, FrameSpec
from support.data_directory import SEGMENT, T0, Store, spec
from support.page_cache import PAGE, Watched, forget, in_use, resident
from support.repairing import report_of
from support.small_log import SEGMENT_SIZE, messages, write_log
from support.verifying import change


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> None:
    # A lock that this process holds itself is not another's: tests/real has a broker that runs.
    monkeypatch.setattr(plan, "is_live", lambda *_: True)


@pytest.mark.usefixtures("live")
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
    found = audit_plan(made, config)
    assert found.is_sound, list(found.rows())
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


@pytest.mark.usefixtures("live")
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
    found = audit_plan(plan_audit(Dispatching(path, whole), config), config)
    assert found.is_sound, list(found.rows())
    assert found.keys == 80


@pytest.mark.usefixtures("live")
def test_units_behind_the_end_are_the_brokers(tmp_path: Path) -> None:
    write_log(tmp_path / "store", 500)
    config = config_with_queues(tmp_path / "store")
    build_queues(config)
    (store_of(config) / "index").mkdir()
    assert audit_queues(config).is_sound
    # A unit that was dispatched since the end of the log was looked for.
    queue = store_of(config) / "consumequeue" / "OrderPaid" / "1"
    newest = max(queue.iterdir())
    used = len(newest.read_bytes().rstrip(b"\0"))
    change(newest, -(-used // 20) * 20, UNIT.pack(1 << 40, 100, 0))
    assert audit_queues(config).is_sound


LARGE_SEGMENT = 4 << 20


def test_so_many_bytes_a_second_at_most() -> None:
    # Time goes by only where somebody sleeps.
    slept: list[float] = []
    limiter = RateLimiter(1000, lambda: sum(slept), slept.append)
    limiter.wait(0)
    assert slept == []
    for _ in range(10):
        limiter.wait(500)
    assert sum(slept) == pytest.approx(5.0)
    # What was not used is not saved up, but for a moment.
    slept.append(60)
    limiter.wait(1000)
    assert slept[-1] == pytest.approx(0.9)
    RateLimiter(0, lambda: sum(slept), slept.append).wait(1 << 40)
    assert slept[-1] == pytest.approx(0.9)


def test_all_that_is_read_is_paid_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_log(tmp_path / "store", 2000)
    config = config_for(tmp_path / "store", LAYOUT, SEGMENT_SIZE)
    index_log(config)
    load_kernels(config)
    free = report_of(config)
    asked: list[int] = []
    monkeypatch.setattr(task.RateLimiter, "wait", lambda _, size: asked.append(size))
    slow = report_of(config_for(tmp_path / "store", LAYOUT, SEGMENT_SIZE, read_rate_max="1MiB"))
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
        assert report_of(config).is_sound
        assert not any(0 in resident(path) for path in used)
    read = [path for path in (*segments[:-3], *files[:-1]) if path not in used]
    # The plan looks at some messages and entries of each file.
    sizes = {path.name: PAGE * sum(resident(path)) for path in read}
    assert sum(sizes.values()) < len(files) << 20, sizes
    assert all(sum(watched.asked(path)) > 0.7 * len(watched.asked(path)) for path in read)
    # The newest segments and the newest index file are the broker's and its consumers': they are left as they come.
    for path in (*used, *segments[-2:], files[-1]):
        assert 1 not in watched.asked(path)


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Much is wrong in it; not to be changed."""
    return wrong_store(tmp_path_factory.mktemp("wrong") / "store")


def test_an_audit_that_is_interrupted_anywhere_goes_on(wrong: Config, tmp_path: Path) -> None:
    wanted = Runs(wrong).rows(None, samples=20)
    assert {row["kind"] for row in wanted} >= {"file", "hole", "finding", "summary"}

    @settings(max_examples=10)
    @given(
        st.lists(st.tuples(st.integers(0, 5), st.integers(0, 99)), max_size=4),
        st.sampled_from([None, SEGMENT_SIZE]),
    )
    def check(runs: list[tuple[int, int]], size: int | None) -> None:
        path = tmp_path / "kept"
        path.unlink(missing_ok=True)
        for most, seed in runs:
            run = Runs(wrong, most, seed, size=size)
            try:
                run.rows(path, samples=20)
            except KeyboardInterrupt as error:
                (words,) = error.args
                assert words.startswith(f"interrupted; {path} keeps ")
        assert Runs(wrong, size=size).rows(path, samples=20) == wanted
        # The stretch at the end of the log is always read again, and with it nothing else.
        again = Runs(wrong, size=size)
        assert again.rows(path, samples=20) == wanted
        assert len(again.tasks) == 1

    check()


def flip(path: Path, position: int) -> None:
    change(path, position, bytes([path.read_bytes()[position] ^ 0x40]))


def replace_by_copy(path: Path, position: int) -> None:
    new = path.with_suffix(".new")
    shutil.copy2(path, new)
    flip(new, position)
    os.utime(new, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    new.replace(path)


#: What may happen to a store between two runs: to a file of a folder, by its number.
CHANGES: dict[str, tuple[str, int, Callable[[Path], object]]] = {
    "entry": ("index", 1, lambda path: flip(path, LAYOUT.entry_position(700))),
    "slot": ("index", 3, lambda path: flip(path, 2000)),
    "header": ("index", 1, lambda path: flip(path, 7)),
    "header of the first": ("index", 0, lambda path: flip(path, 15)),
    "replaced": ("index", 2, lambda path: replace_by_copy(path, LAYOUT.entry_position(50))),
    "removed": ("index", 1, Path.unlink),
    "first removed": ("index", 0, Path.unlink),
    "last removed": ("index", -1, Path.unlink),
    "foreign": ("index", 0, lambda path: path.with_name("notes.txt").write_text("x")),
    "expired": ("commitlog", 0, Path.unlink),
    "cut": ("commitlog", -1, Path.unlink),
    "log": ("commitlog", 2, lambda path: change(path, 70_000, bytes(2000))),
    "log replaced": ("commitlog", 3, lambda path: replace_by_copy(path, 4)),
    "grown": ("index", 0, lambda _: None),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_has_changed_meanwhile_is_done_again(wrong: Config, tmp_path: Path, what: str) -> None:
    config, kept = copied(wrong, tmp_path / "store"), tmp_path / "kept"
    before = Runs(config).rows(kept)
    folder, number, spoil = CHANGES[what]
    spoil(files_of(config, folder)[number])
    if what == "grown":
        index_log(config, begin=4 * SEGMENT_SIZE, name=20270101000000000)
    run = Runs(config)
    assert run.rows(kept) == Runs(config).rows(None) != before
    assert len(run.tasks) < len(plan_audit(Disk(), config).tasks)


def test_what_changes_while_a_task_runs_is_not_kept(wrong: Config, tmp_path: Path) -> None:
    config, kept = copied(wrong, tmp_path / "store"), tmp_path / "kept"

    def run(tasks: Sequence[AuditTask], ended: Callable[[AuditTask, TaskResult], None]) -> list[TaskResult]:
        parts = [audit_task(one, Disk(), config) for one in tasks]
        flip(files_of(config)[1], LAYOUT.entry_position(9))
        for one, part in zip(tasks, parts, strict=True):
            ended(one, part)
        return parts

    run_audit(config, Disk(), AuditOptions(samples=0, kept=kept), lambda: plan_audit(Disk(), config), run)
    assert Runs(config).rows(kept) == Runs(config).rows(None)


def refused(config: Config, kept: Path) -> str:
    with pytest.raises(UsageError) as error, resume_file(Disk(), kept, config, {"samples": 0, "queues": False}):
        pass
    assert "\n" not in error.value.line()
    return error.value.line()


@pytest.fixture
def kept(wrong: Config, tmp_path: Path) -> Path:
    """A finished one."""
    Runs(wrong).rows(tmp_path / "kept")
    return tmp_path / "kept"


def test_a_line_that_is_damaged_costs_one_task(wrong: Config, kept: Path) -> None:
    data = kept.read_bytes()
    last = data.rindex(b"\n", 0, len(data) - 1) + 1
    wanted = Runs(wrong).rows(None)
    for end in (last + 1, (last + len(data)) // 2, len(data) - 1):
        kept.write_bytes(data[:end])
        run = Runs(wrong)
        assert run.rows(kept) == wanted
        assert len(run.tasks) == 2
        assert sorted(kept.read_bytes().splitlines()) == sorted(data.splitlines())
    # A crash of the machine may leave zeros there, or what is no part.
    line = json.loads(data[last:])
    odd = (json.dumps(row).encode() + b"\n" for row in (7, {"task": 1}, line | {"part": None}, {"task": line["task"]}))
    for torn in (bytes(90), data[last : last + 40] + bytes(90) + b"\n", *odd):
        kept.write_bytes(data[:last] + torn)
        assert Runs(wrong).rows(kept) == wanted
    # So may one that came before anything was written down.
    for end in (0, 4, 30):
        kept.write_bytes(data[:end])
        assert Runs(wrong).rows(kept) == wanted


def test_what_is_not_of_this_audit_is_refused_and_left_alone(wrong: Config, kept: Path, tmp_path: Path) -> None:
    head, _, parts = kept.read_bytes().partition(b"\n")
    other = head.replace(b'"segmentSize": ', b'"segmentSize": 1')
    for bad in (b"hello\n", b"{}\n" * 3, b"\x7fELF", b"x", bytes(100), other + b"\n" + parts):
        kept.write_bytes(bad)
        assert "is not of this audit" in refused(wrong, kept)
        assert kept.read_bytes() == bad
    assert "cannot create" in refused(wrong, tmp_path / "none" / "kept")


def test_one_at_a_time(wrong: Config, kept: Path) -> None:
    asked = {"samples": 0, "queues": False}
    with (
        resume_file(Disk(), kept, wrong, asked),
        pytest.raises(BusyError, match="is in use by another audit"),
        resume_file(Disk(), kept, wrong, asked),
    ):
        pass
    with resume_file(Disk(), kept, wrong, asked):
        pass
