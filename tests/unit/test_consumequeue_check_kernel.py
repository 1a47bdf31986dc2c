"""The check of ConsumeQueues: silent about what RocketMQ's rules make, and not about anything else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from indexd.consumequeue.check import check_queues
from indexd.consumequeue.format import BLANK_UNIT, UNIT, QueueMark, QueuesMark
from indexd.consumequeue.store import ConsumeQueueStore
from indexd.errors import DiskError
from indexd.findings import Findings
from indexd.output import CheckScope, Condition
from indexd.storage.disk import Disk
from support.queues import batches, stream

FILE_SIZE = 80
NAME = "00000000000000000000"


class Built:
    """Queues in a directory, and their marks."""

    def __init__(self, root: Path, file_size: int = FILE_SIZE) -> None:
        self.root, self.file_size = root, file_size
        self.messages = stream(25, 200, 6)
        store = ConsumeQueueStore(Disk(), root, file_size, 1000)
        for batch in batches(self.messages, 50):
            store.build(batch)
        self.marks: Sequence[QueueMark] = store.mark().held.queues
        store.close()
        self.mark = next(mark for mark in self.marks if mark.min_offset == 0 and mark.max_offset % 4)
        self.folder = root / self.mark.topic / str(self.mark.queue_id)
        self.name = f"consumequeue/{self.mark.topic}/{self.mark.queue_id}"

    def write(self, unit: int, data: bytes, at: int = 0) -> str:
        """Overwrite a part of a unit; the name of its file."""
        position = unit * 20
        path = self.folder / f"{position // self.file_size * self.file_size:020d}"
        with path.open("r+b") as file:
            file.seek(position % self.file_size + at)
            file.write(data)
        return f"{self.name}/{path.name}"

    def check(self, on_bytes: Callable[[int], None] = lambda _: None, **how: bool) -> Findings:
        condition = Condition.AT_REST if how.get("is_at_rest", True) else Condition.GROWING
        scope = CheckScope(condition, how.get("is_complete", True), on_bytes)
        return check_queues(Disk(), self.root, QueuesMark(self.file_size, tuple(self.marks)), scope)


@pytest.fixture
def built(tmp_path: Path) -> Built:
    return Built(tmp_path / "q")


@pytest.mark.parametrize("file_size", [20, 80, 60_000, 6_000_000])
def test_nothing_is_found_in_what_was_built(tmp_path: Path, file_size: int) -> None:
    built, done = Built(tmp_path / "q", file_size), 0

    def count(more: int) -> None:
        nonlocal done
        done += more

    assert built.check(count).kept == []
    assert done == sum(mark.max_offset - mark.first_offset for mark in built.marks) * 20


@pytest.mark.parametrize(
    ("at", "data", "kind", "words"),
    [
        (0, b"\x80", "unit-phy-offset", "is negative"),
        (0, bytes(8), "unit-order", "the phy offset 0 lies before the end of the message before it"),
        (8, bytes(4), "unit-size", "the size 0 is not more than 0"),
        (8, b"\xff", "unit-size", "is not more than 0"),
        (0, BLANK_UNIT, "unit-blank", "a blank unit stands where a message's should"),
        (0, bytes(20), "unit-size", "the size 0 is not more than 0"),
    ],
)
@pytest.mark.parametrize("unit", [1, 5])
def test_a_unit_that_cannot_be_is_found(built: Built, unit: int, at: int, data: bytes, kind: str, words: str) -> None:
    name = built.write(unit, data, at)
    found = built.check()
    assert found.kept[0].file == name
    assert found.kept[0].position // 20 == unit % 4
    assert found.kept[0].what == kind
    assert words in found.kept[0].text
    assert f"unit {unit}:" in found.kept[0].text
    assert found.counts.total() == 1


def test_a_first_unit_that_is_blank_is_found_where_the_queue_begins_there(built: Built) -> None:
    built.write(0, BLANK_UNIT)
    assert [finding.what for finding in built.check().kept] == ["unit-blank"]


def test_a_queue_that_ends_elsewhere_is_found(built: Built) -> None:
    unit = built.mark.max_offset - 1
    built.write(unit, (1 << 40).to_bytes(8, "big"))
    assert [finding.what for finding in built.check().kept] == ["queue-end"]


def test_files_that_are_missing_or_of_another_size_are_found(built: Built) -> None:
    (built.folder / NAME).unlink()
    (built.folder / "00000000000000000080").write_bytes((built.folder / "00000000000000000080").read_bytes()[:70])
    (built.folder / "00000000000000000160").write_bytes((built.folder / "00000000000000000160").read_bytes() + b"x")
    kinds = [(finding.file.rpartition("/")[2][-3:], finding.what) for finding in built.check().kept]
    assert kinds == [("000", "file-missing"), ("080", "file-size"), ("160", "file-size")]


def test_a_queue_that_is_wrong_all_over_is_found_in_bounded_memory(tmp_path: Path) -> None:
    root = tmp_path / "q"
    (root / "T/0").mkdir(parents=True)
    (root / "T/0" / NAME).write_bytes(UNIT.pack(7, -1, 0) * 50_000)
    mark = QueueMark("T", 0, 0, 0, 50_000, 1)
    scope = CheckScope(Condition.AT_REST, True, lambda _: None)
    found = check_queues(Disk(), root, QueuesMark(1_000_000, (mark,)), scope)
    assert found.counts == {"unit-size": 50_000}
    assert len(found.kept) <= 1000


def test_what_may_not_be_read_is_an_error(built: Built) -> None:
    path = built.folder / NAME
    path.unlink()
    path.mkdir()
    with pytest.raises(DiskError):
        built.check()
