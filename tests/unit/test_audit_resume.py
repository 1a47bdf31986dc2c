"""What an audit keeps for one that goes on: the same in the end, and not believed when what it was made from moved."""

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

from indexd.audit import AuditOptions, AuditTask, Part, audit_task, plan_audit, run_audit
from indexd.audit.report import resume_file
from indexd.config import Config
from indexd.errors import BusyError, UsageError
from indexd.storage.disk import Disk
from support.auditing import LAYOUT, Runs, config_for, index_log, wrong_store
from support.commitlog_writer import CommitLogWriter
from support.small_log import SEGMENT_SIZE, messages, write_log


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
        kept = 0
        for most, seed in runs:
            run = Runs(wrong, most, seed, size=size)
            try:
                run.rows(path, samples=20)
            except KeyboardInterrupt as error:
                (words,) = error.args
                assert words.startswith(f"interrupted; {path} keeps ")
            kept += most
        last = Runs(wrong, size=size)
        assert last.rows(path, samples=20) == wanted
        # The stretch at the end of the log is always read again, and with it nothing else.
        again = Runs(wrong, size=size)
        assert again.rows(path, samples=20) == wanted
        assert len(again.tasks) == 1

    check()


def flip(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ 0x40]))


def changes(store: Path) -> dict[str, Callable[[], object]]:
    """What may happen to a store between two runs."""

    def index(number: int) -> Path:
        return sorted((store / "index").iterdir())[number]

    def segment(number: int) -> Path:
        return sorted((store / "commitlog").iterdir())[number]

    def blank(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(70_000)
            file.write(bytes(2000))

    def replace_by_copy(path: Path, position: int) -> None:
        shutil.copy2(path, path.with_suffix(".new"))
        flip(path.with_suffix(".new"), position)
        os.utime(path.with_suffix(".new"), ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
        path.with_suffix(".new").replace(path)

    def grow() -> None:
        index_log(config_for(store, LAYOUT, SEGMENT_SIZE), begin=4 * SEGMENT_SIZE, name=20270101000000000)

    return {
        "entry": lambda: flip(index(1), LAYOUT.entry_position(700)),
        "slot": lambda: flip(index(3), 2000),
        "header": lambda: flip(index(1), 7),
        "header of the first": lambda: flip(index(0), 15),
        "replaced": lambda: replace_by_copy(index(2), LAYOUT.entry_position(50)),
        "removed": lambda: index(1).unlink(),
        "first removed": lambda: index(0).unlink(),
        "last removed": lambda: index(-1).unlink(),
        "expired": lambda: segment(0).unlink(),
        "cut": lambda: segment(-1).unlink(),
        "log": lambda: blank(segment(2)),
        "log replaced": lambda: replace_by_copy(segment(3), 4),
        "grown": grow,
        "foreign": lambda: (store / "index" / "notes.txt").write_text("x"),
    }


@pytest.mark.parametrize("what", changes(Path()))
def test_what_has_changed_meanwhile_is_done_again(wrong: Config, tmp_path: Path, what: str) -> None:
    store = Path(shutil.copytree(wrong.store.store or "", tmp_path / "store"))
    config, kept = config_for(store, LAYOUT, SEGMENT_SIZE), tmp_path / "kept"
    before = Runs(config).rows(kept)
    changes(store)[what]()
    run = Runs(config)
    assert run.rows(kept) == Runs(config).rows(None) != before
    assert len(run.tasks) < len(plan_audit(Disk(), config).tasks)


def test_a_broker_that_works_on(tmp_path: Path) -> None:
    store, kept = tmp_path / "store", tmp_path / "kept"
    end = write_log(store, 3000)
    config = config_for(store, LAYOUT, SEGMENT_SIZE)
    index_log(config)
    Runs(config, size=SEGMENT_SIZE).rows(kept)
    with CommitLogWriter(store / "commitlog", SEGMENT_SIZE, start_offset=end) as writer:
        for spec in islice(messages(1), 3000, 6000):
            writer.append(spec)
    index_log(config, begin=end, name=20270101000000000)
    for path in (store / "commitlog", store / "index"):  # and what is old expires
        min(path.iterdir()).unlink()
    run = Runs(config, size=SEGMENT_SIZE)
    (summary,) = [row for row in run.rows(kept) if row["kind"] == "summary"]
    assert summary["sound"]
    old = [task for task in run.tasks if task.end < end - SEGMENT_SIZE]
    assert [task.begin for task in old if task.begin < task.end] == [SEGMENT_SIZE]
    again = Runs(config, size=SEGMENT_SIZE)
    again.rows(kept)
    assert len(again.tasks) == 1


def test_what_changes_while_a_task_runs_is_not_kept(wrong: Config, tmp_path: Path) -> None:
    store = Path(shutil.copytree(wrong.store.store or "", tmp_path / "store"))
    config, kept = config_for(store, LAYOUT, SEGMENT_SIZE), tmp_path / "kept"

    def run(tasks: Sequence[AuditTask], ended: Callable[[AuditTask, Part], None]) -> list[Part]:
        parts = [audit_task(task, Disk(), config) for task in tasks]
        flip(sorted((store / "index").iterdir())[1], LAYOUT.entry_position(9))
        for task, part in zip(tasks, parts, strict=True):
            ended(task, part)
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
