"""``indexd verify`` of ConsumeQueues and sparse indexes without the log: each damage is found, by file and byte."""

from __future__ import annotations

import json
import os
import struct
from typing import TYPE_CHECKING

import pytest

from indexd.consumequeue.format import UNIT_SIZE, QueueMark
from indexd.errors import CorruptDataError
from indexd.findings import KEPT_MAX
from support.daemon import indexd_here
from support.outputs import UNITS, Built, build, copied, found
from support.reopened import config_for, undisturbed
from support.small_log import QUEUE_FILE_SIZE, SEGMENT_SIZE
from support.verifying import change, check, kinds

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("outputs"))


@pytest.fixture
def built(base: Built, tmp_path: Path) -> Built:
    return copied(base, tmp_path)


def contents(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_nothing_is_wrong_and_nothing_is_changed(built: Built) -> None:
    before = contents(built.data)
    report = check(built.data)
    assert (kinds(report), report.notes) == ({}, [])
    assert contents(built.data) == before
    assert built.frontier.sparse is not None
    row = report.to_json()
    assert row["consumeQueues"] == len(built.marks) == 16
    assert row["consumeQueueUnits"] == sum(mark.max_offset for mark in built.marks)
    assert row["sparseSegments"] == len(built.frontier.sparse.segments) >= 3


@pytest.mark.parametrize(
    ("outputs", "there"),
    [
        ({"consume_queue": "false"}, {"sparse"}),
        ({"sparse": "false"}, {"consumequeue"}),
        ({"consume_queue": "false", "sparse": "false"}, set()),
        ({"sparse_interval": 0}, {"consumequeue", "sparse"}),
    ],
)
def test_outputs_that_are_not_built_are_not_asked_for(
    base: Built, tmp_path: Path, outputs: dict[str, object], there: set[str]
) -> None:
    data = undisturbed(config_for(base.store, tmp_path / "data", **outputs), tmp_path / "data")
    assert {path.name for path in data.iterdir()} & {"consumequeue", "sparse"} == there
    for deep in (False, True):
        report = check(data, deep=deep)
        assert (kinds(report), report.notes) == ({}, [])
        assert (bool(report.queues), bool(report.segments)) == ("consumequeue" in there, "sparse" in there)


def test_files_of_an_output_that_is_not_built_are_nobodys(built: Built) -> None:
    files = [path for name in ("consumequeue", "sparse") for path in (built.data / name).rglob("*") if path.is_file()]
    built.change_frontier(queues=None, sparse=None)
    (built.data / "checkpoint").unlink()
    report = check(built.data)
    assert kinds(report) == {"file-unnamed": len(files), "checkpoint": 1}
    assert {finding.file for finding in report.findings.kept} == {"checkpoint", *(built.name(path) for path in files)}


# --- ConsumeQueues: what the check of a queue finds has tests of its own; here that it is asked, and named ---


def queue(built: Built) -> QueueMark:
    """One with several files, the last of them with room behind its units."""
    return next(mark for mark in built.marks if mark.max_offset > 2 * UNITS and mark.max_offset % UNITS)


def test_queue_files_that_are_missing_cut_or_written_behind_their_end(built: Built) -> None:
    mark = queue(built)
    first, second, last = (built.queue_file(mark, unit) for unit in (0, UNITS, mark.max_offset))
    first.unlink()
    os.truncate(second, 100)
    end = mark.max_offset % UNITS * UNIT_SIZE
    change(last, end + 1, b"\1")
    (last.parent / "00000000000009999600").write_bytes(b"")
    (last.parent.parent / "99").mkdir()
    (last.parent.parent / "99" / "00000000000000000000").write_bytes(b"")
    (last.parent / "notes").write_text("mine")
    assert sorted(found(check(built.data))) == sorted(
        [
            (built.name(first), 0, "file-missing"),
            (built.name(second), 100, "file-size"),
            (built.name(last), end + 1, "behind-last-unit"),
            (built.name(last.parent / "00000000000009999600"), 0, "file-unnamed"),
            (built.name(last.parent.parent / "99" / "00000000000000000000"), 0, "file-unnamed"),
        ]
    )


# --- sparse indexes ---

SEALED, GROWING = 1, -1


def set_entry(path: Path, number: int, width: int, member: int, value: int) -> int:
    """Set one number of an entry; its byte."""
    at, code = number * width + (0 if member == 0 else width - 4), ">q" if (width, member) == (12, 0) else ">i"
    change(path, at, struct.pack(code, value))
    return at


@pytest.mark.parametrize("segment", [SEALED, GROWING])
@pytest.mark.parametrize(
    ("width", "member", "value", "kinds_of"),
    [
        (8, 0, lambda own, before: -1, {"entry-offset"}),
        (8, 0, lambda own, before: 1 << 30, {"entry-offset", "entry-order"}),
        (8, 0, lambda own, before: before, {"entry-order"}),
        (8, 1, lambda own, before: -1, {"entry-position"}),
        (8, 1, lambda own, before: SEGMENT_SIZE, {"entry-position", "entry-distance"}),
        (8, 1, lambda own, before: before + 1000, {"entry-distance"}),
        (12, 0, lambda own, before: before, {"entry-order"}),
        (12, 1, lambda own, before: -1, {"entry-offset"}),
        (12, 1, lambda own, before: before, {"entry-order"}),
    ],
)
def test_an_entry_that_cannot_be(
    built: Built, segment: int, width: int, member: int, value: Callable[[int, int], int], kinds_of: set[str]
) -> None:
    path = built.pair(segment)[width == 12]
    numbers = list(struct.iter_unpack(">ii" if width == 8 else ">qi", path.read_bytes()))
    at = set_entry(path, 5, width, member, value(numbers[5][member], numbers[4][member]))
    report = check(built.data)
    assert {(file, kind) for file, _, kind in found(report)} == {(built.name(path), kind) for kind in kinds_of}
    assert found(report)[0][1] == at
    assert len(report.findings) <= 2
    assert "entry 5: " in report.findings.kept[0].text


@pytest.mark.parametrize("number", [0, 1])
def test_the_first_entry_of_all(built: Built, number: int) -> None:
    offsets, times = built.pair(0)
    set_entry(times, 0, 12, 0, -5)
    assert found(check(built.data)) == [(built.name(times), 0, "entry-order")]
    change(offsets, 0, bytes(8))
    assert (built.name(offsets), 0, "entry-order") in found(check(built.data))


def test_sparse_files_that_are_missing_cut_too_long_or_not_named(built: Built) -> None:
    (missing, long), (cut, _) = built.pair(0), built.pair(1)
    missing.unlink()
    wanted = long.stat().st_size
    os.truncate(long, wanted + 5)
    os.truncate(cut, 20)
    extra = missing.with_name(f"{SEGMENT_SIZE * 77:020d}.index")
    extra.write_bytes(b"")
    missing.with_name("notes").write_text("mine")
    missing.with_name(missing.name + ".deleted").write_text("another's")
    assert sorted(found(check(built.data))) == sorted(
        [
            (built.name(missing), 0, "file-missing"),
            (built.name(long), wanted, "file-size"),
            (built.name(cut), 20, "file-size"),
            (built.name(extra), 0, "file-unnamed"),
        ]
    )


def test_what_stands_behind_the_entries_of_the_growing_pair(built: Built) -> None:
    assert built.frontier.sparse is not None
    *_, mark = built.frontier.sparse.segments
    offsets, times = built.pair(GROWING)
    change(offsets, mark.offset_entries * 8 + 3, b"\7")
    change(times, times.stat().st_size - 1, b"\7")
    wanted = [
        (built.name(offsets), mark.offset_entries * 8 + 3, "behind-last-entry"),
        (built.name(times), times.stat().st_size - 1, "behind-last-entry"),
    ]
    assert found(check(built.data)) == wanted
    (built.data / "abort").write_bytes(b"1")
    assert found(check(built.data)) == []


def test_a_growing_pair_that_ends_elsewhere(built: Built) -> None:
    assert built.frontier.sparse is not None
    *_, mark = built.frontier.sparse.segments
    _, times = built.pair(GROWING)
    at = (mark.time_entries - 1) * 12
    (timestamp,) = struct.unpack_from(">q", times.read_bytes(), at)
    change(times, at, struct.pack(">q", timestamp + 1))
    assert found(check(built.data)) == [(built.name(times), at, "segment-end")]


# --- what the frontier says ---


def replaced(rows: tuple[tuple[int, ...], ...], at: int, field: int, value: int) -> tuple[tuple[int, ...], ...]:
    row = rows[at]
    return (*rows[:at], type(row)(*row[:field], value, *row[field + 1 :]), *rows[at + 1 :])


def test_a_queue_that_is_not_named(built: Built) -> None:
    built.change_frontier(queues=built.marks[1:])
    assert kinds(check(built.data)).keys() == {"file-unnamed"}


@pytest.mark.parametrize("size", [-20, 0, 1, 1190, 1 << 40])
def test_queue_files_of_no_possible_size(built: Built, size: int) -> None:
    built.change_frontier(queue_file_size=size)
    with pytest.raises(CorruptDataError, match="is no frontier"):
        check(built.data, deep=True)


@pytest.mark.parametrize("field", [1, 2, 3])
def test_counts_that_no_index_can_hold(built: Built, field: int) -> None:
    sparse = built.frontier.sparse
    assert sparse is not None
    built.change_frontier(sparse=sparse._replace(segments=tuple(replaced(sparse.segments, 1, field, 1 << 40))))
    with pytest.raises(CorruptDataError, match="is no frontier"):
        check(built.data)


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
