"""``indexd verify --deep`` of ConsumeQueues and sparse indexes: each unit and each entry against the log."""

from __future__ import annotations

import random
import shutil
from typing import TYPE_CHECKING

import pytest

from indexd.consumequeue.format import UNIT_SIZE
from indexd.errors import IndexdError
from indexd.flush.frontier import write_frontier
from indexd.storage.disk import Disk
from indexd.storage.names import segment_name
from support.beside_log import frames
from support.data_directory import changed
from support.outputs import Built, build, copied, found, live_bytes
from support.small_log import SEGMENT_SIZE
from support.verifying import change, check, kinds

if TYPE_CHECKING:
    from pathlib import Path

    from indexd.verify import Report


SEGMENT = 4096
T0 = 1_700_000_000_000


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("outputs"))


@pytest.fixture
def built(base: Built, tmp_path: Path) -> Built:
    return copied(base, tmp_path)


def test_nothing_is_wrong(built: Built) -> None:
    report = check(built.data, deep=True)
    assert (kinds(report), report.notes) == ({}, [])


def test_every_byte_is_held_against_the_log(built: Built) -> None:
    rand, rows = random.Random(6), live_bytes(built)
    for path, size in [rows[0], rows[-1], rows[-2], *rand.choices(rows, k=40)]:
        position = rand.randrange(size)
        data = path.read_bytes()
        change(path, position, bytes([data[position] ^ 1 << rand.randrange(8)]))
        report = check(built.data, deep=True)
        width = UNIT_SIZE if "consumequeue" in path.parts else 8 if path.suffix == ".index" else 12
        wanted = (built.name(path), position // width * width, "unit-log" if width == UNIT_SIZE else "entry-log")
        assert wanted in found(report), (path, position)
        assert len(report.findings) <= 4
        assert {finding.file for finding in report.findings.kept} == {built.name(path)}
        path.write_bytes(data)
    assert kinds(check(built.data, deep=True)) == {}


# --- what the frontier says ---


@pytest.mark.parametrize("field", [3, 4, 5])
@pytest.mark.parametrize("by", [-1, 1])
def test_each_number_of_a_queue(built: Built, field: int, by: int) -> None:
    row = list(built.marks[3])
    row[field] += by
    built.change_frontier(queues=(*built.marks[:3], type(built.marks[3])(*row), *built.marks[4:]))
    assert kinds(check(built.data, deep=True))


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize("at", [1, -1])
def test_each_number_of_a_segment_and_of_the_growing_one(built: Built, number: int, by: int, at: int) -> None:
    sparse = built.frontier.sparse
    assert sparse is not None
    assert sparse.active is not None
    row = list(sparse.segments[at])
    if number:
        row[number] += by
        segments = list(sparse.segments)
        segments[at] = type(sparse.segments[0])(*row)
        built.change_frontier(sparse=sparse._replace(segments=tuple(segments)))
        assert kinds(check(built.data, deep=True))
    active = list(sparse.active)
    active[number] += by
    built.change_frontier(sparse=sparse._replace(active=type(sparse.active)(*active)))
    assert kinds(check(built.data, deep=True))


def test_units_called_expired_that_the_log_still_has(built: Built) -> None:
    marks = list(built.marks)
    marks[2] = marks[2]._replace(min_offset=5)
    built.change_frontier(queues=tuple(marks))
    report = check(built.data, deep=True)
    assert found(report) == [(built.name(built.queue_file(marks[2], 0)), 0, "queue-min")]
    assert "is in the log, and called expired" in report.findings.kept[0].text


def test_queues_and_segments_that_the_frontier_leaves_out(built: Built) -> None:
    sparse = built.frontier.sparse
    assert sparse is not None
    mark, segment = built.marks[0], sparse.segments[1]
    (built.data / "abort").write_bytes(b"1")
    segments = tuple(one for one in sparse.segments if one != segment)
    built.change_frontier(queues=built.marks[1:], sparse=sparse._replace(segments=segments))
    report = check(built.data, deep=True)
    assert found(report) == [
        (built.name(built.queue_file(mark, 0)), 0, "unit-log"),
        (built.name(built.pair_of(segment.base)[0]), 0, "entry-log"),
    ]
    assert "the unit is none" in report.findings.kept[0].text
    assert "the frontier names no sparse indexes of it" in report.findings.kept[1].text


def test_queues_and_segments_of_which_the_log_has_nothing(built: Built) -> None:
    # The same frontier over a log that ends earlier: its last segment is gone, the end cut off the one before.
    store = built.root / "shorter"
    shutil.copytree(built.store, store)
    log = frames(built.store, SEGMENT_SIZE)
    last = log[-1].phy_offset // SEGMENT_SIZE * SEGMENT_SIZE
    (store / "commitlog" / segment_name(last)).unlink()
    built.change_frontier(commit_log_paths=(str(store / "commitlog"),))
    report = check(built.data, deep=True)
    assert kinds(report) == {"log-end": 1, "entry-behind-log": 1}
    assert "queues and sparse indexes were not compared from there on" in " ".join(report.notes)


# --- hostile ---


def no_traceback(data: Path) -> Report | None:
    try:
        return check(data, deep=True)
    except IndexdError:
        return None


def test_bytes_of_every_kind_are_no_more_than_findings(built: Built) -> None:
    rand = random.Random(9)
    rows = live_bytes(built)
    for _ in range(25):
        saved = {}
        for path, size in rand.choices(rows, k=3):
            saved.setdefault(path, path.read_bytes())
            block = rand.choice([bytes(64), b"\xff" * 64, b"\x7f" * 64, rand.randbytes(64), b"\x80" + bytes(63)])
            change(path, rand.randrange(size), block)
            if rand.randrange(4) == 0:
                path.write_bytes(path.read_bytes()[: rand.randrange(size)])
        report = no_traceback(built.data)
        assert report is not None
        assert len(report.findings) > 0
        for path, data in saved.items():
            path.write_bytes(data)
    assert kinds(check(built.data, deep=True)) == {}


def test_numbers_of_every_kind_in_the_frontier(built: Built) -> None:
    rand, whole = random.Random(10), built.frontier
    assert whole.sparse is not None
    assert whole.sparse.active is not None
    numbers = [-(1 << 63) + 1, -1, 0, 1, 7, 60, 1 << 31, 1 << 40, (1 << 63) - 1]
    for _ in range(60):
        marks, segments = list(whole.queues or ()), list(whole.sparse.segments)
        active = whole.sparse.active
        what = rand.randrange(4)
        if what == 0:
            at = rand.randrange(len(marks))
            row = list(marks[at])
            row[rand.randrange(1, 7)] = rand.choice(numbers)
            marks[at] = type(marks[0])(*row)
        elif what == 1:
            at = rand.randrange(len(segments))
            row = list(segments[at])
            row[rand.randrange(1, 4)] = abs(rand.choice(numbers))
            segments[at] = type(segments[0])(*row)
        elif what == 2:
            row = list(active)
            row[rand.randrange(4)] = rand.choice(numbers)
            active = type(active)(*row)
        sparse = replace_sparse(whole, tuple(segments), active)
        size = rand.choice(numbers) if what == 3 else whole.queue_file_size
        made = changed(whole, queues=tuple(marks), sparse=sparse, queue_file_size=size)
        write_frontier(Disk(), built.data / "frontier", made, "0")
        no_traceback(built.data)
    write_frontier(Disk(), built.data / "frontier", whole, "0")
    assert kinds(check(built.data, deep=True)) == {}


def replace_sparse(whole, segments, active):  # type: ignore[no-untyped-def]
    return whole.sparse._replace(segments=segments, active=active)
