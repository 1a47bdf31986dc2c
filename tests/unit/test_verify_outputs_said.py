"""``indexd verify`` of ConsumeQueues and sparse indexes, the frontier's word for them, bounds and the command."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from indexd.consumequeue.format import QueueMark
from indexd.errors import CorruptDataError
from indexd.findings import KEPT_MAX
from indexd.sparse.format import ActiveMark
from support.daemon import indexd_here
from support.outputs import UNITS, Built, build, copied, found
from support.small_log import QUEUE_FILE_SIZE, SEGMENT_SIZE
from support.verifying import change, check, kinds

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("outputs"))


@pytest.fixture
def built(base: Built, tmp_path: Path) -> Built:
    return copied(base, tmp_path)


def queue(built: Built) -> QueueMark:
    """One with several files, the last of them with room behind its units."""
    return next(mark for mark in built.marks if mark.max_offset > 2 * UNITS and mark.max_offset % UNITS)


# --- what the frontier says ---


def replaced(rows: tuple[tuple[int, ...], ...], at: int, field: int, value: int) -> tuple[tuple[int, ...], ...]:
    row = rows[at]
    return (*rows[:at], type(row)(*row[:field], value, *row[field + 1 :]), *rows[at + 1 :])


@pytest.mark.parametrize(
    ("field", "value"),
    [(2, 1), (2, -UNITS), (3, -1), (3, UNITS + 1), (3, 1 << 40), (4, -1), (4, 1 << 40), (6, -1), (6, 1 << 40)],
)
def test_a_queue_that_cannot_be(built: Built, field: int, value: int) -> None:
    built.change_frontier(queues=replaced(built.marks, 3, field, value))
    report = check(built.data)
    assert found(report)[0][2] == "frontier"
    assert f"queue {built.marks[3].topic}/{built.marks[3].queue_id}" in report.findings.kept[0].text


def test_a_queue_that_is_named_twice_or_not_at_all(built: Built) -> None:
    marks = built.marks
    built.change_frontier(queues=(*marks, marks[0]))
    assert [what for _, _, what in found(check(built.data))] == ["frontier"]
    built.change_frontier(queues=marks[1:])
    assert kinds(check(built.data)).keys() == {"file-unnamed"}


@pytest.mark.parametrize("size", [-20, 0, 1, 1190, 1 << 40])
def test_queue_files_of_no_possible_size(built: Built, size: int) -> None:
    built.change_frontier(queue_file_size=size)
    with pytest.raises(CorruptDataError, match="is no frontier"):
        check(built.data, deep=True)


@pytest.mark.parametrize(
    ("field", "value"),
    [(0, 5), (0, SEGMENT_SIZE * 100), (1, 0), (1, 1 << 30), (2, 1 << 30), (3, 1 << 30), (2, 1), (3, 1)],
)
def test_a_segment_that_cannot_be(built: Built, field: int, value: int) -> None:
    sparse = built.frontier.sparse
    assert sparse is not None
    segments = tuple(sorted(replaced(sparse.segments, 1, field, value)))
    built.change_frontier(sparse=sparse._replace(segments=segments))
    report = check(built.data)
    assert kinds(report)
    if field < 2 or value > 1:
        assert "is nothing that a segment can be" in report.findings.kept[0].text


@pytest.mark.parametrize("field", [1, 2, 3])
def test_counts_that_no_index_can_hold(built: Built, field: int) -> None:
    sparse = built.frontier.sparse
    assert sparse is not None
    built.change_frontier(sparse=sparse._replace(segments=tuple(replaced(sparse.segments, 1, field, 1 << 40))))
    with pytest.raises(CorruptDataError, match="is no frontier"):
        check(built.data)


@pytest.mark.parametrize(
    "active",
    [ActiveMark(-1, 5, 0, 5), ActiveMark(1 << 40, 5, 0, 5), ActiveMark(0, 5, 1 << 40, 5), ActiveMark(0, 5, 0, 6)],
)
def test_what_building_cannot_go_on_with(built: Built, active: ActiveMark) -> None:
    sparse = built.frontier.sparse
    assert sparse is not None
    built.change_frontier(sparse=sparse._replace(active=active))
    report = check(built.data)
    assert found(report)[0][2] == "frontier"
    assert "is nothing that building can go on with" in report.findings.kept[0].text


def test_a_growing_pair_that_the_frontier_calls_sealed_and_the_opposite(built: Built) -> None:
    sparse = built.frontier.sparse
    assert sparse is not None
    built.change_frontier(sparse=sparse._replace(active=None))
    assert kinds(check(built.data)) == {"file-size": 2}
    built.change_frontier(sparse=sparse._replace(segments=sparse.segments[:-1]))
    assert "segment-end" in kinds(check(built.data))


# --- bounds, and the command ---


def test_wrong_all_over_is_counted_and_cut_off(built: Built) -> None:
    for path in (built.data / "consumequeue").rglob("0" * 10 + "*"):
        path.write_bytes(b"\xff" * QUEUE_FILE_SIZE)
    for path in (built.data / "sparse").iterdir():
        path.write_bytes(b"\x81" * path.stat().st_size)
    report = check(built.data)
    assert kinds(report)["unit-phy-offset"] == sum(mark.max_offset for mark in built.marks)
    assert len(report.findings) > 4000
    assert len(report.findings.kept) <= 2 * KEPT_MAX
    done = indexd_here("verify", "--data", built.data)
    assert (done.returncode, done.stderr) == (1, "")
    assert len(done.stdout.splitlines()) < 200


def test_a_file_as_long_as_a_disk_takes_no_memory(built: Built) -> None:
    for path in (built.queue_file(queue(built), 0), built.pair(0)[0], built.pair(-1)[1]):
        os.truncate(path, 1 << 40)
    assert kinds(check(built.data)) == {"file-size": 2}


def test_the_command(built: Built) -> None:
    done = indexd_here("verify", "--data", built.data)
    assert done.returncode == 0
    assert f"{sum(mark.max_offset for mark in built.marks):,} units of 16 queues" in done.stdout
    assert "sparse indexes of 4 segments" in done.stdout
    path = built.queue_file(queue(built), 0)
    change(path, 48, bytes(4))
    done = indexd_here("verify", "--data", built.data)
    assert done.returncode == 1
    assert done.stdout.startswith(f"{built.name(path)} byte 48: unit 2: the size 0 is not more than 0\n")
    done = indexd_here("verify", "--data", built.data, "--json")
    finding, summary = (json.loads(line) for line in done.stdout.splitlines())
    assert finding == {
        "kind": "finding",
        "file": built.name(path),
        "position": 48,
        "what": "unit-size",
        "text": "unit 2: the size 0 is not more than 0",
    }
    assert (summary["findings"], summary["counts"]) == (1, {"unit-size": 1})
