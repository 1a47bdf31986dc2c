"""inspect of sparse indexes: what each is, what stands in it, what can not be."""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING

import pytest

from indexd.consumequeue.format import UNIT_SIZE
from support.inspecting import Inspect
from support.outputs import UNITS, Built, build
from support.small_log import QUEUE_FILE_SIZE, SEGMENT_SIZE
from support.verifying import change

if TYPE_CHECKING:
    from pathlib import Path

NAME = "00000000000000000000"


@pytest.fixture
def inspect(capsys: pytest.CaptureFixture[str]) -> Inspect:
    return Inspect(capsys)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("outputs"))


def entries(*rows: tuple[int, int], code: str = ">ii") -> bytes:
    return b"".join(struct.pack(code, *row) for row in rows)


def test_an_offset_index(tmp_path: Path, inspect: Inspect) -> None:
    path = tmp_path / f"{500:020d}.index"
    path.write_bytes(entries((3, 400), (9, 900)))
    head, *rows = inspect.rows(path)
    assert inspect.code == 0
    assert head == {
        "kind": "offsetIndex",
        "path": str(path),
        "size": 16,
        "base": 500,
        "entries": 2,
        "slots": 2,
        "tail": 0,
        "check": "passed",
        "first": {"offset": 503, "position": 400},
        "last": {"offset": 509, "position": 900},
    }
    assert rows == [
        {"kind": "entry", "number": 0, "offset": 503, "position": 400},
        {"kind": "entry", "number": 1, "offset": 509, "position": 900},
    ]
    out = inspect.words(path, "--entries", "1:")
    assert "entries  2 of 2 slots" in out
    assert "Kafka's sanity check: passed" in out
    assert out.endswith("  entry 1: offset 509 at position 900\n")


def test_a_time_index_with_a_tail_of_unused_slots(tmp_path: Path, inspect: Inspect) -> None:
    path = tmp_path / f"{500:020d}.timeindex.deleted"
    path.write_bytes(entries((1700000000000, 0), (1700000000500, 7), code=">qi") + bytes(36))
    head, *rows = inspect.rows(path)
    # For Kafka every slot counts; what is used holds.
    assert (inspect.code, head["kind"], head["entries"], head["slots"], head["tail"]) == (0, "timeIndex", 2, 5, 3)
    assert "timestamp 0" in head["check"]
    assert [row["offset"] for row in rows] == [500, 507]
    assert "tail     3 unused slots: it grows, or was not trimmed" in inspect.words(path)
    rows = inspect.of_kind("entry", path, "--entries", "1:9")
    assert [row.get("unused", False) for row in rows] == [False, True, True, True]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("index", b"\xff" * 8, "its last offset 499 is below its base 500"),
        ("index", bytes(7) + b"\1" * 4, "its 11 bytes are no multiple of 8"),
        ("timeindex", entries((5, 1), (4, 2), code=">qi"), "timestamp 4"),
        ("timeindex", entries((5, -1), code=">qi"), "its last offset 499 is below its base 500"),
    ],
)
def test_what_cannot_be(tmp_path: Path, inspect: Inspect, name: str, content: bytes, words: str) -> None:
    path = tmp_path / f"{500:020d}.{name}"
    path.write_bytes(content)
    head, *_ = inspect.rows(path)
    assert inspect.code == 1
    assert words in head["damage"]
    assert f"damage   {head['damage']}" in inspect.words(path)


def test_empty_ones_and_one_that_is_too_long(tmp_path: Path, inspect: Inspect) -> None:
    path = tmp_path / f"{0:020d}.timeindex"
    for size in (0, 1200):
        path.write_bytes(bytes(size))
        (head,) = inspect.rows(path)
        assert (inspect.code, head["entries"], head["slots"]) == (0, 0, size // 12)
    os.truncate(path, 1 << 40)
    (head,) = inspect.rows(path)
    assert (inspect.code, head["damage"]) == (1, f"{1 << 40} bytes, more than can be mapped")


def test_ours(built: Built, inspect: Inspect) -> None:
    sparse = built.frontier.sparse
    assert sparse is not None
    for at, segment in enumerate(sparse.segments):
        for path, count in zip(built.pair(at), (segment.offset_entries, segment.time_entries), strict=True):
            head, *rows = inspect.rows(path, "--frames", 0)
            assert (inspect.code, head["entries"], len(rows)) == (0, count, count)
            assert (head["tail"] > 0) == (segment is sparse.segments[-1])
    assert [row["kind"] for row in inspect.rows(built.data / "sparse")] == ["offsetIndex", "timeIndex"] * 4
    kinds = [row["kind"] for row in inspect.rows(built.data)]
    assert kinds[-9:] == ["offsetIndex", "timeIndex"] * 4 + ["queues"]
    out = inspect.words(built.data)
    assert "queues       16, " in out
    assert "sparse       4 pairs, an entry in 1000 B of log" in out
    mark = next(mark for mark in built.marks if mark.max_offset > 2 * UNITS)
    path = built.queue_file(mark, UNITS)
    head, *rows = inspect.rows(path, "--frames", 0)
    assert (head["firstUnit"], head["units"], head["places"]) == (UNITS, UNITS, QUEUE_FILE_SIZE // UNIT_SIZE)
    assert [row["unit"] for row in rows] == list(range(UNITS, 2 * UNITS))
    assert head["endPhyOffset"] <= 4 * SEGMENT_SIZE


def test_damage_in_ours_is_told_in_the_summary_of_a_folder(built: Built, inspect: Inspect, tmp_path: Path) -> None:
    path = tmp_path / built.pair(0)[0].name
    path.write_bytes(built.pair(0)[0].read_bytes())
    change(path, path.stat().st_size - 8, b"\xff")
    assert "damage: its last offset" in inspect.words(tmp_path)
