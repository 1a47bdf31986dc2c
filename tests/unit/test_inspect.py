"""inspect: every kind of file and directory, in words and as JSON lines; what is damaged is shown and counted."""

from __future__ import annotations

import json
import os
import struct
from typing import TYPE_CHECKING, Any

import pytest

from indexd.cli.main import main
from indexd.consumequeue.format import BLANK_UNIT, UNIT, UNIT_SIZE
from indexd.flush.frontier import StoreCheckpoint, Uncovered, write_abort
from indexd.storage.disk import Disk
from support.data_directory import LAYOUT, SEGMENT, T0, Store, spec
from support.goldens import unpack
from support.naive import key_hash
from support.outputs import UNITS, Built, build
from support.small_log import QUEUE_FILE_SIZE
from support.verifying import change

if TYPE_CHECKING:
    from pathlib import Path


NAME = "00000000000000000000"


class Inspect:
    """Runs the command in this process; each call says the exit code that it must have."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def words(self, *argv: object, code: int = 0) -> str:
        """What it prints for people, behind its one error line if it is used wrongly or meets damage that ends it."""
        with pytest.raises(SystemExit) as stopped:
            main(["inspect", *map(str, argv)])
        out, err = self._capsys.readouterr()
        assert (stopped.value.code or 0, err.count("\n")) == (code, int(code > 1)), err
        return err + out

    def rows(self, *argv: object, code: int = 0) -> list[dict[str, Any]]:
        """What it prints for programs."""
        return [json.loads(line) for line in self.words(*argv, "--json", code=code).split("\n") if line]

    def of_kind(self, kind: str, *argv: object, code: int = 0) -> list[dict[str, Any]]:
        """The rows of one kind."""
        return [row for row in self.rows(*argv, code=code) if row["kind"] == kind]


@pytest.fixture
def inspect(capsys: pytest.CaptureFixture[str]) -> Inspect:
    return Inspect(capsys)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path)
    store.append(spec(KEYS="k 订单"), spec(time=T0 + 2000), spec(topic="L\x07", TAGS="t"), spec(size=3800))
    store.build()
    return store


def index_file(store: Store) -> Path:
    return store.data / "index" / store.frontier.index[0].name


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("outputs"))


# --- index files ---


def test_an_index_file(store: Store, inspect: Inspect) -> None:
    (row,) = inspect.rows(index_file(store))
    header = store.frontier.index[0].header
    expected = ("index", T0, header.end_phy_offset, header.used_slot_count, 6)
    members = ("kind", "beginTimestamp", "endPhyOffset", "usedSlotCount", "indexCount")
    assert tuple(row[member] for member in members) == expected
    out = inspect.words(index_file(store), "--slots", "--entries", ":")
    assert ("  indexCount           6\n" in out, out.count("  entry ")) == (True, 5)


def test_several_paths(store: Store, inspect: Inspect) -> None:
    segment = store.root / "commitlog" / NAME
    whole = inspect.rows(index_file(store)) + inspect.rows(segment)
    assert inspect.rows(index_file(store), segment) == whole
    assert {"index", "segment", "frame"} <= {row["kind"] for row in whole}
    with segment.open("r+b") as file:
        file.write(b"\0\0\0\x30damaged!")
    inspect.rows(segment, index_file(store), code=1)
    # Nothing is shown of the others when one is not there.
    error = inspect.words(index_file(store), store.root / "none", code=2)
    assert error == f"indexd: there is nothing at {store.root / 'none'}; check the path\n"


def test_slots_entries_and_chains(store: Store, inspect: Inspect) -> None:
    path = index_file(store)
    slots = inspect.of_kind("slot", path, "--slots")
    assert len(slots) == store.frontier.index[0].header.used_slot_count
    entries = inspect.of_kind("entry", path, "--entries", "1:6")
    assert [row["number"] for row in entries] == [1, 2, 3, 4, 5]
    assert (entries[0]["keyHash"], [row["timeDiff"] for row in entries[:3]]) == (key_hash("T#k"), [0, 0, 2])
    for row in slots:
        chain = inspect.of_kind("entry", path, "--chain", row["slot"])
        assert chain == [one for one in entries[::-1] if one["slot"] == row["slot"]]
    for words, numbers in (
        (("--topic", "T", "--key", "k"), [5, 3, 1]),
        (("--topic", "L\x07", "--key", "t", "--index-type", "T"), [4]),
    ):
        assert [row["number"] for row in inspect.of_kind("entry", path, *words)] == numbers
    inspect.rows(path, "--entries", "1:9", code=1)  # behind the index count


def test_damaged_slots_and_chains(store: Store, inspect: Inspect) -> None:
    slot, path = LAYOUT.slot_of(key_hash("T#k")), index_file(store)
    change(path, LAYOUT.entry_position(5) + 16, struct.pack(">i", 5))
    last = inspect.rows(path, "--chain", slot, code=1)[-1]
    assert (last["kind"], last["damage"]) == ("damage", "the chain goes from entry 5 to 5")
    change(path, LAYOUT.slot_position(slot), struct.pack(">i", -7))
    assert "names no entry" in inspect.words(path, "--slots", code=1)


def test_the_layout_comes_from_settings_or_frontier_and_must_fit(
    store: Store, inspect: Inspect, tmp_path: Path
) -> None:
    alone = tmp_path / "20270101000000000"
    alone.write_bytes(index_file(store).read_bytes())
    for words in ((), ("--hash-slot-num", 7, "--index-num", 11)):
        error = inspect.words(alone, "--entries", ":", *words, code=4).splitlines()[0]
        assert "give the --hash-slot-num and --index-num" in error
    assert inspect.of_kind("entry", alone, "--entries", ":", "--hash-slot-num", 7, "--index-num", 10)
    os.truncate(index_file(store), 100)
    assert "100 bytes" in inspect.words(index_file(store), code=4)
    os.truncate(index_file(store), 10)
    assert "cut off: 10 bytes" in inspect.words(store.data, code=1)


@pytest.mark.parametrize(
    "words",
    [["--topic", "T"], ["--key", "k"], ["--entries", "5"], ["--entries", "a:b"], ["--chain", "7"], ["--chain", "-1"]],
)
def test_wrong_words(store: Store, inspect: Inspect, words: list[str]) -> None:
    inspect.words(index_file(store), *words, code=2)


# --- logs ---


def test_a_segment(store: Store, inspect: Inspect) -> None:
    first, second, *_ = sorted((store.root / "commitlog").iterdir())
    offsets = [message.phy_offset for message in store.messages()]
    head, *frames = inspect.rows(first)
    assert (head["kind"], head["base"], head["size"]) == ("segment", 0, SEGMENT)
    assert [row["outcome"] for row in frames] == ["message"] * 3 + ["endOfFile"]
    assert [row["phyOffset"] for row in frames[:3]] == offsets[:3]
    assert (frames[0]["keys"], frames[2]["topic"]) == (["k", "订单"], "L\x07")
    assert [(row["phyOffset"], row["outcome"]) for row in inspect.of_kind("frame", second)] == [
        (SEGMENT, "message"),
        (store.writer.max_offset, "notYetWritten"),
    ]
    out = inspect.words(first)
    assert ("topic L\\x07" in out, "outcome endOfFile" in out) == (True, True)
    change(second, 500, bytes([second.read_bytes()[500] ^ 1]))
    assert "damage a body that its CRC denies" in inspect.words(second, code=1)


def test_a_log_directory_and_its_bounds(store: Store, inspect: Inspect) -> None:
    log = store.root / "commitlog"
    first, second, third = (message.phy_offset for message in store.messages()[:3])
    assert {row["kind"] for row in inspect.rows(log)} == {"segment"}
    shown = [(row["kind"], row["phyOffset"]) for row in inspect.rows(log / NAME, "--frames", 2)[1:]]
    assert shown == [("frame", first), ("frame", second), ("more", third)]
    (row,) = inspect.of_kind("frame", log, "--frames", 1, "--offset", third)
    assert (row["phyOffset"], row["tags"]) == (third, "t")
    assert inspect.of_kind("frame", log, "--offset", third + 1, code=1)[0]["outcome"] == "corrupt"
    for path in (log, log / NAME):
        assert "without --offset" in inspect.words(path, "--offset", 10**9, code=2)


def test_frames_longer_than_one_read(tmp_path: Path, inspect: Inspect) -> None:
    store = Store(tmp_path, segment=8 << 20)
    offsets = store.append(spec(size=3 << 20), spec(size=5), spec(size=(1 << 20) - 60), spec(size=2 << 20))
    frames = inspect.of_kind("frame", store.root / "commitlog" / NAME)
    assert [row["phyOffset"] for row in frames] == [*offsets, store.writer.max_offset]
    assert frames[-1]["outcome"] == "notYetWritten"


# --- the small files, and whole directories ---


def test_checkpoint_frontier_abort_and_state(store: Store, inspect: Inspect) -> None:
    data, indexes = store.data, ["index"] * len(store.frontier.index)
    (data / "checkpoint").write_bytes(StoreCheckpoint(T0, 0, T0 + 1, 0, 77).pack())
    write_abort(Disk(), data / "abort")
    (data / "state").write_text('{"pid": 5, "phyOffset": 9}')
    store.change_frontier(uncovered=(Uncovered(1, 2, "why\x1b"),))
    for name, members in (
        ("checkpoint", {"physicMsgTimestamp": T0, "indexMsgTimestamp": T0 + 1, "confirmPhyOffset": 77}),
        ("frontier", {"flavour": "5.4", "phyOffset": store.writer.max_offset}),
        ("abort", {"pid": str(os.getpid())}),
        ("state", {"phyOffset": 9}),
    ):
        (row,) = inspect.rows(data / name)
        assert members.items() <= row.items()
    assert "confirmPhyOffset     77" in inspect.words(data / "checkpoint")
    assert r"1; 2; why\x1b" in inspect.words(data / "frontier")
    kinds = [row["kind"] for row in inspect.rows(data)]
    assert kinds == ["abort", "checkpoint", "frontier", "state", *indexes]
    assert [row["kind"] for row in inspect.rows(data / "index")] == indexes
    (store.root / "abort").touch()
    assert [row["kind"] for row in inspect.rows(store.root)][:4] == ["abort", "segment", "segment", "segment"]


def test_what_it_does_not_know(tmp_path: Path, inspect: Inspect) -> None:
    for name, content in (("note", b"hello"), ("checkpoint", b"short"), ("state", b"[1]")):
        (tmp_path / name).write_bytes(content)
    (tmp_path / "empty").mkdir()
    for name, code in (("note", 2), ("checkpoint", 4), ("state", 2), ("empty", 2), ("absent", 2)):
        assert inspect.words(tmp_path / name, code=code).count("\n") == 1, name


# --- ConsumeQueues ---


def queue_file(root: Path, content: bytes, name: str = NAME, folder: str = "consumequeue", size: int = 200) -> Path:
    path = root / folder / "Topic\x07" / "3" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.ljust(size, b"\0"))
    return path


def units(*rows: tuple[int, int, int]) -> bytes:
    return b"".join(UNIT.pack(*row) for row in rows)


def test_a_consume_queue_file(tmp_path: Path, inspect: Inspect) -> None:
    path = queue_file(tmp_path, units((7, 100, 5), (107, 100, -9), (300, 50, 1700000000000)), f"{400:020d}")
    head, *rows = inspect.rows(path)
    assert head == {
        "kind": "consumeQueue",
        "path": str(path),
        "size": 200,
        "firstUnit": 20,
        "topic": "Topic\x07",
        "queueId": 3,
        "units": 3,
        "places": 10,
    }
    assert [tuple(row.values()) for row in rows] == [
        ("consumeQueueUnit", 20, 7, 100, 5),
        ("consumeQueueUnit", 21, 107, 100, -9),
        ("consumeQueueUnit", 22, 300, 50, 1700000000000),
    ]
    out = inspect.words(path)
    assert r"  topic                Topic\x07" in out
    assert "consumeQueueUnit 21: phyOffset 107, size 100 (100 B), tagsCode -9" in out


def test_which_units_are_shown(tmp_path: Path, inspect: Inspect) -> None:
    path = queue_file(tmp_path, units(*((100 * at, 100, 0) for at in range(50))), f"{2000:020d}", size=2000)
    for words, shown in (
        ((), range(100, 120)),
        (("--frames", 0), range(100, 150)),
        (("--frames", 2), range(100, 102)),
        (("--entries", "110:112"), range(110, 112)),
        (("--entries", "148:"), range(148, 150)),
        (("--entries", "148:152"), range(148, 152)),
        (("--entries", ":103"), range(100, 103)),
        (("--entries", "0:5"), ()),
        (("--entries", "9:3"), ()),
    ):
        assert [row["unit"] for row in inspect.of_kind("consumeQueueUnit", path, *words)] == list(shown), words


GOOD = ((10, 100, 1), (110, 100, 2), (210, 100, 3))


@pytest.mark.parametrize(
    ("content", "damaged", "first"),
    [
        (units(GOOD[0], (0, 0, 0), GOOD[1]), 1, 1),
        (BLANK_UNIT * 2 + units((0, 99, -(1 << 63) + 77)) + b"\xff" * 20, 1, 3),
        (units(GOOD[0], (-1, 5, 0), GOOD[1]), 1, 1),
        (units(GOOD[0], (200, 0, 0), GOOD[1]), 1, 1),
        (bytes(40) + units(*GOOD), 2, 0),
        (units(*GOOD) + bytes(100) + b"\1", 6, 3),
        (b"\xff" * 200, 10, 0),
    ],
)
def test_units_that_can_be_none(tmp_path: Path, inspect: Inspect, content: bytes, damaged: int, first: int) -> None:
    path = queue_file(tmp_path, content)
    head, *rows = inspect.rows(path, code=1)
    wrong = [row["unit"] for row in rows if "damage" in row]
    assert (head["damage"], len(wrong), wrong[0]) == (f"{damaged} units that can be none", damaged, first)
    assert inspect.words(path, code=1).count("damage it can be no unit here") == damaged


def test_a_ragged_end_and_an_empty_file(tmp_path: Path, inspect: Inspect) -> None:
    ragged = queue_file(tmp_path, units(*GOOD), size=205)
    assert inspect.rows(ragged, code=1)[0]["damage"] == "5 bytes behind the last whole unit"
    for size in (0, 200):
        assert inspect.rows(queue_file(tmp_path, b"", size=size))[0]["units"] == 0


def test_a_folder_of_a_broker_and_its_segments_that_are_named_alike(tmp_path: Path, inspect: Inspect) -> None:
    root = unpack("rocketmq-5.4-clean", tmp_path).root
    folder = min((root / "consumequeue").iterdir()) / "0"
    assert {(row["kind"], row["topic"]) for row in inspect.rows(folder)} == {("consumeQueue", folder.parent.name)}
    assert inspect.of_kind("queues", root) == inspect.rows(root / "consumequeue")
    assert inspect.rows(root / "commitlog" / NAME)[0]["kind"] == "segment"


# --- sparse indexes ---


def entries(*rows: tuple[int, int], code: str = ">ii") -> bytes:
    return b"".join(struct.pack(code, *row) for row in rows)


def test_an_offset_index(tmp_path: Path, inspect: Inspect) -> None:
    path = tmp_path / f"{500:020d}.index"
    path.write_bytes(entries((3, 400), (9, 900)))
    assert inspect.rows(path) == [
        {"kind": "offsetIndex", "path": str(path), "size": 16, "base": 500, "entries": 2, "slots": 2},
        {"kind": "entry", "number": 0, "offset": 503, "position": 400},
        {"kind": "entry", "number": 1, "offset": 509, "position": 900},
    ]
    assert inspect.words(path, "--entries", "1:").endswith("  entry 1: offset 509, position 900\n")


def test_a_time_index_with_a_tail_of_unused_slots(tmp_path: Path, inspect: Inspect) -> None:
    path = tmp_path / f"{500:020d}.timeindex.deleted"
    path.write_bytes(entries((1700000000000, 0), (1700000000500, 7), code=">qi") + bytes(36))
    head, *rows = inspect.rows(path)
    assert (head["kind"], head["entries"], head["slots"]) == ("timeIndex", 2, 5)
    assert [row["offset"] for row in rows] == [500, 507]
    assert [row["number"] for row in inspect.of_kind("entry", path, "--entries", "1:9")] == [1, 2, 3, 4]
    path.write_bytes(bytes(1200))
    (head,) = inspect.rows(path)
    assert (head["entries"], head["slots"]) == (0, 100)


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
    damage = inspect.rows(path, code=1)[0]["damage"]
    assert words in damage
    assert f"  damage               {damage}" in inspect.words(path, code=1)
    # It is told in the summary of the folder, too.
    assert f"damage {damage}" in inspect.words(tmp_path, code=1)


def test_ours(built: Built, inspect: Inspect) -> None:
    sparse = built.frontier.sparse
    assert sparse is not None
    for at, segment in enumerate(sparse.segments):
        for path, count in zip(built.pair(at), (segment.offset_entries, segment.time_entries), strict=True):
            head, *rows = inspect.rows(path, "--frames", 0)
            assert (head["entries"], len(rows)) == (count, count)
            assert (head["slots"] > head["entries"]) == (segment is sparse.segments[-1])
    kinds = [row["kind"] for row in inspect.rows(built.data)]
    assert kinds[-9:] == ["offsetIndex", "timeIndex"] * 4 + ["queues"]
    assert ": queues 16, files" in inspect.words(built.data)
    mark = next(mark for mark in built.marks if mark.max_offset > 2 * UNITS)
    head, *rows = inspect.rows(built.queue_file(mark, UNITS), "--frames", 0)
    assert (head["firstUnit"], head["units"], head["places"]) == (UNITS, UNITS, QUEUE_FILE_SIZE // UNIT_SIZE)
    assert [row["unit"] for row in rows] == list(range(UNITS, 2 * UNITS))
