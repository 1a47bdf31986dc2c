"""inspect of queue files and sparse indexes: what each is, what stands in it, what can not be."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from indexd.consumequeue.format import BATCH_UNIT, BLANK_UNIT, EXT_HEAD, UNIT
from support.goldens import unpack
from support.inspecting import Inspect
from support.outputs import Built, build

if TYPE_CHECKING:
    from pathlib import Path

NAME = "00000000000000000000"


@pytest.fixture
def inspect(capsys: pytest.CaptureFixture[str]) -> Inspect:
    return Inspect(capsys)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("outputs"))


def queue_file(root: Path, content: bytes, name: str = NAME, folder: str = "consumequeue", size: int = 200) -> Path:
    path = root / folder / "Topic\x07" / "3" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.ljust(size, b"\0"))
    return path


def units(*rows: tuple[int, int, int]) -> bytes:
    return b"".join(UNIT.pack(*row) for row in rows)


# --- ConsumeQueues ---


def test_a_consume_queue_file(tmp_path: Path, inspect: Inspect) -> None:
    path = queue_file(tmp_path, units((7, 100, 5), (107, 100, -9), (300, 50, 1700000000000)), f"{400:020d}")
    head, *rows = inspect.rows(path)
    assert inspect.code == 0
    assert head == {
        "kind": "consumeQueue",
        "path": str(path),
        "size": 200,
        "firstUnit": 20,
        "topic": "Topic\x07",
        "queueId": 3,
        "units": 3,
        "blankUnits": 0,
        "places": 10,
        "beginPhyOffset": 7,
        "endPhyOffset": 350,
        "damagedUnits": 0,
    }
    assert [(row["kind"], row["unit"], row["phyOffset"], row["size"], row["tagsCode"]) for row in rows] == [
        ("consumeQueueUnit", 20, 7, 100, 5),
        ("consumeQueueUnit", 21, 107, 100, -9),
        ("consumeQueueUnit", 22, 300, 50, 1700000000000),
    ]
    out = inspect.words(path)
    assert r"topic Topic\x07, queue 3" in out
    assert "units    20 to 23, 3 of 10 places" in out
    assert "messages from 7 to 350 of the log" in out
    assert "unit 21: phy offset 107, size 100, tags code -9" in out


def test_blank_units_and_addresses_in_the_extension(tmp_path: Path, inspect: Inspect) -> None:
    path = queue_file(tmp_path, BLANK_UNIT * 2 + units((0, 99, -(1 << 63) + 77), (99, 5, -2147483648)))
    head, *rows = inspect.rows(path)
    assert (head["units"], head["blankUnits"], head["beginPhyOffset"]) == (4, 2, 0)
    assert [row.get("blank", False) for row in rows] == [True, True, False, False]
    assert [row.get("extAddress") for row in rows] == [None, None, 77, None]
    out = inspect.words(path)
    assert "the first 2 blank: the queue begins at 2" in out
    assert "unit 0: blank" in out
    assert "unit 2: phy offset 0, size 99, tags code in ConsumeQueueExt, at 77" in out


def test_which_units_are_shown(tmp_path: Path, inspect: Inspect) -> None:
    path = queue_file(tmp_path, units(*((100 * at, 100, 0) for at in range(50))), f"{2000:020d}", size=2000)

    def shown(*argv: object) -> list[int]:
        return [row["unit"] for row in inspect.of_kind("consumeQueueUnit", path, *argv)]

    assert shown() == list(range(100, 120))
    assert inspect.rows(path)[-1] == {"kind": "more", "unit": 120}
    assert shown("--frames", 0) == list(range(100, 150))
    assert shown("--frames", 2) == [100, 101]
    assert shown("--entries", "110:112") == [110, 111]
    assert shown("--entries", "148:") == [148, 149]
    assert shown("--entries", "148:152") == [148, 149, 150, 151]
    assert shown("--entries", ":103") == [100, 101, 102]
    assert shown("--entries", "0:5") == shown("--entries", "9:3") == []
    inspect.words(path, "--entries", "5")
    assert (inspect.code, inspect.err.count("\n")) == (2, 1)


GOOD = ((10, 100, 1), (110, 100, 2), (210, 100, 3))


@pytest.mark.parametrize(
    ("content", "damaged", "first"),
    [
        (units(GOOD[0], (0, 0, 0), GOOD[1]), 1, 1),
        (units(GOOD[0], (-1, 5, 0), GOOD[1]), 1, 1),
        (units(GOOD[0], (200, 0, 0), GOOD[1]), 1, 1),
        (units(GOOD[0], (50, 5, 0), GOOD[1]), 1, 1),
        (units(GOOD[0], (1 << 50, 5, 0), GOOD[1], GOOD[2]), 1, 2),
        (units(GOOD[0]) + BLANK_UNIT + units(GOOD[1]), 1, 1),
        (bytes(40) + units(*GOOD), 2, 0),
        (units(*GOOD) + bytes(100) + b"\1", 6, 3),
        (b"\xff" * 200, 10, 0),
    ],
)
def test_units_that_can_be_none(tmp_path: Path, inspect: Inspect, content: bytes, damaged: int, first: int) -> None:
    path = queue_file(tmp_path, content)
    head, *rows = inspect.rows(path)
    assert (inspect.code, head["damagedUnits"]) == (1, damaged)
    assert head["damage"] == f"{damaged} units that can be none, unit {first} first"
    assert sum("damage" in row for row in rows) == damaged
    assert next(row["unit"] for row in rows if "damage" in row) == first
    assert inspect.words(path).count("  <- it can be no unit here") == damaged


def test_a_ragged_end_and_an_empty_file(tmp_path: Path, inspect: Inspect) -> None:
    path = queue_file(tmp_path, units(*GOOD), size=205)
    assert inspect.rows(path)[0]["damage"] == "5 bytes behind the last whole unit"
    assert inspect.code == 1
    assert inspect.rows(queue_file(tmp_path, b"", size=0))[0]["units"] == 0
    assert inspect.rows(queue_file(tmp_path, b""))[0]["units"] == 0
    assert inspect.code == 0


def test_a_file_with_a_hole_of_a_terabyte(tmp_path: Path, inspect: Inspect) -> None:
    path = queue_file(tmp_path, units(*GOOD))
    os.truncate(path, 1 << 40)
    assert inspect.rows(path)[0]["units"] == 3
    with path.open("r+b") as file:
        file.seek(20 << 34)
        file.write(units((400, 5, 5)))
    (head, *_, more) = inspect.rows(path)
    assert (head["units"], head["damagedUnits"], more["kind"]) == ((1 << 34) + 1, (1 << 34) - 3, "more")


def test_a_copy_is_known_by_its_units(tmp_path: Path, inspect: Inspect) -> None:
    for name in ("copy", f"{600:020d}"):
        path = tmp_path / name
        path.write_bytes(units(*GOOD).ljust(400, b"\0"))
        assert inspect.rows(path)[0]["kind"] == "consumeQueue"
    path.write_bytes(BLANK_UNIT + units(GOOD[0]))
    assert [row.get("unit") for row in inspect.rows(path)] == [None, 30, 31]
    for content in (units(GOOD[1], GOOD[0]), units((0, 0, 0), GOOD[0]), units((5, -1, 0)), bytes(400)):
        path.write_bytes(content)
        assert inspect.rows(path)[0]["kind"] == "segment"


def test_every_file_of_a_broker_and_the_folders(tmp_path: Path, inspect: Inspect) -> None:
    golden = unpack("rocketmq-5.4-clean", tmp_path)
    folder = next(iter(sorted((golden.root / "consumequeue").iterdir())))
    for path in sorted(folder.rglob(NAME[:5] + "*")):
        (head, *rows) = inspect.rows(path, "--frames", 0)
        assert (inspect.code, head["kind"], head["damagedUnits"]) == (0, "consumeQueue", 0)
        assert len(rows) == head["units"] > 0
    rows = inspect.rows(folder / "0")
    assert [row["kind"] for row in rows] == ["queueFile"] * len(list((folder / "0").iterdir()))
    assert rows[0]["topic"] == folder.name
    counted = inspect.of_kind("queues", golden.root)[0]
    assert counted["files"] == sum(path.is_file() for path in (golden.root / "consumequeue").rglob("*"))
    assert inspect.rows(golden.root / "consumequeue") == [counted]
    # Segments are named alike.
    assert inspect.rows(golden.root / "commitlog" / NAME)[0]["kind"] == "segment"
    assert inspect.rows(golden.root / "commitlog")[0]["kind"] == "segment"


# --- what only a broker writes ---


def batch(phy_offset: int, base_offset: int, count: int = 4) -> bytes:
    return BATCH_UNIT.pack(phy_offset, 100, 5, 1700000000000, base_offset, count, -1, 0)


def test_a_batch_consume_queue(tmp_path: Path, inspect: Inspect) -> None:
    content = batch(0, 10) + batch(100, 14, 7)
    for path in (queue_file(tmp_path, content, folder="batchconsumequeue", size=460), tmp_path / "copy"):
        path.write_bytes(content.ljust(460, b"\0"))
        head, first, second = inspect.rows(path)
        assert (head["kind"], head["units"], head["places"], inspect.code) == ("batchConsumeQueue", 2, 10, 0)
        assert (first["kind"], first["phyOffset"], first["baseOffset"]) == ("batchConsumeQueueUnit", 0, 10)
        assert (second["unit"], second["batchSize"], second["storeTimestamp"]) == (1, 7, 1700000000000)
        assert "phy offset 100, size 100, tags code 5, queue offsets 14 to 21, " in inspect.words(path)
    path.write_bytes((content + batch(150, 21)).ljust(460, b"\0"))
    assert inspect.rows(path)[0]["damage"] == "1 units that can be none, unit 2 first"
    assert inspect.code == 1


def ext_unit(time: int, bitmap: bytes) -> bytes:
    return EXT_HEAD.pack(20 + len(bitmap), 5, time, len(bitmap)) + bitmap


def test_a_consume_queue_extension(tmp_path: Path, inspect: Inspect) -> None:
    content = ext_unit(1700000000000, b"abc") + ext_unit(1700000000500, b"")
    path = queue_file(tmp_path, content, folder="consumequeue_ext")
    (row,) = inspect.rows(path)
    assert inspect.code == 0
    assert (row["kind"], row["units"], row["end"], row["ended"]) == ("consumeQueueExt", 2, 43, False)
    assert (row["beginTimestamp"], row["endTimestamp"], row["queueId"]) == (1700000000000, 1700000000500, 3)
    path.write_bytes(content + b"\xff\xff")
    assert inspect.rows(path)[0]["ended"]
    assert "units    2 in 43 bytes, and the mark of the end" in inspect.words(path)
    many = ext_unit(1700000000000, bytes(range(97))) * 20000
    path.write_bytes(many)
    assert inspect.rows(path)[0]["units"] == 20000


@pytest.mark.parametrize(
    "tail",
    [
        b"\0\1",
        b"\x7f\xff",
        EXT_HEAD.pack(30, 0, 0, 11),
        EXT_HEAD.pack(20, 0, 0, -1),
        EXT_HEAD.pack(90, 0, 0, 70),
        b"\x80\0",
    ],
)
def test_an_extension_that_is_damaged(tmp_path: Path, inspect: Inspect, tail: bytes) -> None:
    path = queue_file(tmp_path, b"", folder="consumequeue_ext", size=0)
    path.write_bytes(ext_unit(1, b"abc") + tail)
    (row,) = inspect.rows(path)
    assert (inspect.code, row["units"]) == (1, 1)
    assert row["damage"].startswith("at byte 23 a unit says that it has ")
