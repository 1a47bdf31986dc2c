"""``indexd verify`` of ConsumeQueues and sparse indexes, without the log: each damage is found, by file and byte."""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING

import pytest

from indexd.consumequeue.format import UNIT_SIZE, QueueMark
from support.outputs import UNITS, Built, build, copied, found
from support.reopened import config_for, undisturbed
from support.small_log import SEGMENT_SIZE
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
