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
    """``code`` and ``err`` are those of the last run."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.code = 0
        self.err = ""

    def words(self, *argv: object) -> str:
        """What it prints for people."""
        with pytest.raises(SystemExit) as stopped:
            main(["inspect", *map(str, argv)])
        self.code = int(stopped.value.code or 0)
        out, self.err = self._capsys.readouterr()
        return out

    def rows(self, *argv: object) -> list[dict[str, Any]]:
        """What it prints for programs."""
        return [json.loads(line) for line in self.words(*argv, "--json").split("\n") if line]

    def of_kind(self, kind: str, *argv: object) -> list[dict[str, Any]]:
        """The rows of one kind."""
        return [row for row in self.rows(*argv) if row["kind"] == kind]


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
    assert (inspect.code, row["kind"], row["beginTimestamp"], row["endPhyOffset"], row["usedSlotCount"]) == (
        0, "index", T0, header.end_phy_offset, header.used_slot_count,
    )  # fmt: skip
    assert row["indexCount"] == 6
    out = inspect.words(index_file(store), "--slots", "--entries", ":")
    assert "  indexCount           6\n" in out
    assert out.count("  entry ") == 5


def test_several_paths(store: Store, inspect: Inspect) -> None:
    segment = store.root / "commitlog" / f"{0:020d}"
    whole = inspect.rows(index_file(store)) + inspect.rows(segment)
    assert inspect.rows(index_file(store), segment) == whole
    assert {"index", "segment", "frame"} <= {row["kind"] for row in whole}
    assert inspect.code == 0
    with segment.open("r+b") as file:
        file.write(b"\0\0\0\x30damaged!")
    inspect.rows(segment, index_file(store))
    assert inspect.code == 1
    # Nothing is shown of the others when one is not there.
    assert inspect.words(index_file(store), store.root / "none") == ""
    assert inspect.code == 2
    assert f"there is nothing at {store.root / 'none'}" in inspect.err


def test_slots_entries_and_chains(store: Store, inspect: Inspect) -> None:
    slots = [row for row in inspect.rows(index_file(store), "--slots") if row["kind"] == "slot"]
    assert len(slots) == store.frontier.index[0].header.used_slot_count
    entries = [row for row in inspect.rows(index_file(store), "--entries", "1:6") if row["kind"] == "entry"]
    assert [row["number"] for row in entries] == [1, 2, 3, 4, 5]
    assert entries[0]["keyHash"] == key_hash("T#k")
    assert [row["timeDiff"] for row in entries[:3]] == [0, 0, 2]
    for row in slots:
        chain = [row for row in inspect.rows(index_file(store), "--chain", row["slot"]) if row["kind"] == "entry"]
        assert chain == [one for one in entries[::-1] if one["slot"] == row["slot"]]
    found = inspect.rows(index_file(store), "--topic", "T", "--key", "k")
    assert [row["number"] for row in found if row["kind"] == "entry"] == [5, 3, 1]
    found = inspect.rows(index_file(store), "--topic", "L\x07", "--key", "t", "--index-type", "T")
    assert [row["number"] for row in found if row["kind"] == "entry"] == [4]
    inspect.rows(index_file(store), "--entries", "1:9")
    assert inspect.code == 1  # behind the index count


def test_damaged_slots_and_chains(store: Store, inspect: Inspect) -> None:
    slot = LAYOUT.slot_of(key_hash("T#k"))
    content = bytearray(index_file(store).read_bytes())
    struct.pack_into(">i", content, LAYOUT.entry_position(5) + 16, 5)
    index_file(store).write_bytes(bytes(content))
    rows = inspect.rows(index_file(store), "--chain", slot)
    assert (inspect.code, rows[-1]["kind"], rows[-1]["damage"]) == (1, "damage", "the chain goes from entry 5 to 5")
    struct.pack_into(">i", content, LAYOUT.slot_position(slot), -7)
    index_file(store).write_bytes(bytes(content))
    assert "names no entry" in inspect.words(index_file(store), "--slots")
    assert inspect.code == 1


def test_the_layout_comes_from_settings_or_frontier_and_must_fit(
    store: Store, inspect: Inspect, tmp_path: Path
) -> None:
    alone = tmp_path / "20270101000000000"
    alone.write_bytes(index_file(store).read_bytes())
    for words in ((), ("--hash-slot-num", 7, "--index-num", 11)):
        inspect.words(alone, "--entries", ":", *words)
        assert (inspect.code, "give the --hash-slot-num and --index-num" in inspect.err) == (4, True)
    assert inspect.of_kind("entry", alone, "--entries", ":", "--hash-slot-num", 7, "--index-num", 10)
    os.truncate(index_file(store), 100)
    inspect.words(index_file(store))
    assert (inspect.code, "100 bytes" in inspect.err) == (4, True)
    os.truncate(index_file(store), 10)
    assert "cut off: 10 bytes" in inspect.words(store.data)


@pytest.mark.parametrize(
    "words",
    [["--topic", "T"], ["--key", "k"], ["--entries", "5"], ["--entries", "a:b"], ["--chain", "7"], ["--chain", "-1"]],
)
def test_wrong_words(store: Store, inspect: Inspect, words: list[str]) -> None:
    inspect.words(index_file(store), *words)
    assert (inspect.code, inspect.err.count("\n")) == (2, 1)


# --- logs ---


def test_a_segment(store: Store, inspect: Inspect) -> None:
    segments = sorted((store.root / "commitlog").iterdir())
    head, *frames = inspect.rows(segments[0])
    assert (head["kind"], head["base"], head["size"]) == ("segment", 0, SEGMENT)
    assert [row["outcome"] for row in frames] == ["message"] * 3 + ["endOfFile"]
    assert [row["phyOffset"] for row in frames[:3]] == [message.phy_offset for message in store.messages()][:3]
    assert (frames[0]["keys"], frames[2]["topic"]) == (["k", "订单"], "L\x07")
    head, *frames = inspect.rows(segments[1])
    assert [(row["phyOffset"], row["outcome"]) for row in frames] == [
        (SEGMENT, "message"),
        (store.writer.max_offset, "notYetWritten"),
    ]
    out = inspect.words(segments[0])
    assert "topic L\\x07" in out
    assert "outcome endOfFile" in out


def test_a_log_directory_and_its_bounds(store: Store, inspect: Inspect) -> None:
    log = store.root / "commitlog"
    first, second, third = (message.phy_offset for message in store.messages()[:3])
    assert {row["kind"] for row in inspect.rows(log)} == {"segment"}
    rows = inspect.rows(log / f"{0:020d}", "--frames", 2)
    assert [row["phyOffset"] for row in rows[1:]] == [first, second, third]
    assert rows[-1]["kind"] == "more"
    (row,) = inspect.of_kind("frame", log, "--frames", 1, "--offset", third)
    assert (row["phyOffset"], row["tags"]) == (third, "t")
    frames = inspect.of_kind("frame", log, "--offset", third + 1)
    assert (inspect.code, frames[0]["outcome"]) == (1, "corrupt")
    for path in (log, log / f"{0:020d}"):
        inspect.words(path, "--offset", 10**9)
        assert inspect.code == 2


def test_frames_longer_than_one_read(tmp_path: Path, inspect: Inspect) -> None:
    store = Store(tmp_path, segment=8 << 20)
    offsets = store.append(spec(size=3 << 20), spec(size=5), spec(size=(1 << 20) - 60), spec(size=2 << 20))
    frames = [row for row in inspect.rows(store.root / "commitlog" / f"{0:020d}") if row["kind"] == "frame"]
    assert [row["phyOffset"] for row in frames] == [*offsets, store.writer.max_offset]
    assert frames[-1]["outcome"] == "notYetWritten"


def test_corrupt_frames_say_which_rule(store: Store, inspect: Inspect) -> None:
    segment = store.root / "commitlog" / f"{SEGMENT:020d}"
    content = bytearray(segment.read_bytes())
    content[500] ^= 1
    segment.write_bytes(bytes(content))
    assert "damage a body that its CRC denies" in inspect.words(segment)
    assert inspect.code == 1


# --- the small files, and whole directories ---


def test_checkpoint_frontier_abort_and_state(store: Store, inspect: Inspect) -> None:
    (store.data / "checkpoint").write_bytes(StoreCheckpoint(T0, 0, T0 + 1, 0, 77).pack())
    write_abort(Disk(), store.data / "abort")
    (store.data / "state").write_text('{"pid": 5, "phyOffset": 9}')
    store.change_frontier(uncovered=(Uncovered(1, 2, "why\x1b"),))
    (row,) = inspect.rows(store.data / "checkpoint")
    assert (row["physicMsgTimestamp"], row["indexMsgTimestamp"], row["confirmPhyOffset"]) == (T0, T0 + 1, 77)
    assert "confirmPhyOffset     77" in inspect.words(store.data / "checkpoint")
    (row,) = inspect.rows(store.data / "frontier")
    assert (row["flavour"], row["phyOffset"]) == ("5.4", store.writer.max_offset)
    assert r"[1, 2, 'why\x1b']" in inspect.words(store.data / "frontier")
    assert inspect.rows(store.data / "abort")[0]["pid"] == str(os.getpid())
    assert inspect.rows(store.data / "state")[0]["phyOffset"] == 9
    kinds = [row["kind"] for row in inspect.rows(store.data)]
    assert kinds == ["abort", "checkpoint", "frontier", "state", *["index"] * len(store.frontier.index)]
    assert [row["kind"] for row in inspect.rows(store.data / "index")] == ["index"] * len(store.frontier.index)


def test_a_store(store: Store, inspect: Inspect) -> None:
    (store.root / "abort").touch()
    rows = inspect.rows(store.root)
    assert [row["kind"] for row in rows][:4] == ["abort", "segment", "segment", "segment"]
    assert inspect.code == 0


def test_what_it_does_not_know(tmp_path: Path, inspect: Inspect) -> None:
    (tmp_path / "note").write_text("hello")
    (tmp_path / "checkpoint").write_bytes(b"short")
    (tmp_path / "state").write_text("[1]")
    (tmp_path / "empty").mkdir()
    for name, code in (("note", 2), ("checkpoint", 4), ("state", 2), ("empty", 2), ("absent", 2)):
        assert inspect.words(tmp_path / name) == ""
        assert (inspect.code, inspect.err.count("\n")) == (code, 1), name


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
    assert inspect.code == 0
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
    assert [(row["kind"], row["unit"], row["phyOffset"], row["size"], row["tagsCode"]) for row in rows] == [
        ("consumeQueueUnit", 20, 7, 100, 5),
        ("consumeQueueUnit", 21, 107, 100, -9),
        ("consumeQueueUnit", 22, 300, 50, 1700000000000),
    ]
    out = inspect.words(path)
    assert r"  topic                Topic\x07" in out
    assert "consumeQueueUnit 21: phyOffset 107, size 100 (100 B), tagsCode -9" in out


def test_which_units_are_shown(tmp_path: Path, inspect: Inspect) -> None:
    path = queue_file(tmp_path, units(*((100 * at, 100, 0) for at in range(50))), f"{2000:020d}", size=2000)

    def shown(*argv: object) -> list[int]:
        return [row["unit"] for row in inspect.of_kind("consumeQueueUnit", path, *argv)]

    for words, units_shown in (
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
        assert shown(*words) == list(units_shown), words
    inspect.words(path, "--entries", "5")
    assert (inspect.code, inspect.err.count("\n")) == (2, 1)


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
    head, *rows = inspect.rows(path)
    assert (inspect.code, head["damage"]) == (1, f"{damaged} units that can be none")
    assert sum("damage" in row for row in rows) == damaged
    assert next(row["unit"] for row in rows if "damage" in row) == first
    assert inspect.words(path).count("damage it can be no unit here") == damaged


def test_a_ragged_end_and_an_empty_file(tmp_path: Path, inspect: Inspect) -> None:
    path = queue_file(tmp_path, units(*GOOD), size=205)
    assert inspect.rows(path)[0]["damage"] == "5 bytes behind the last whole unit"
    assert inspect.code == 1
    assert inspect.rows(queue_file(tmp_path, b"", size=0))[0]["units"] == 0
    assert inspect.rows(queue_file(tmp_path, b""))[0]["units"] == 0
    assert inspect.code == 0


def test_a_folder_of_a_broker_and_its_segments_that_are_named_alike(tmp_path: Path, inspect: Inspect) -> None:
    root = unpack("rocketmq-5.4-clean", tmp_path).root
    folder = min((root / "consumequeue").iterdir()) / "0"
    rows = inspect.rows(folder)
    assert [(row["kind"], row["topic"]) for row in rows] == [("consumeQueue", folder.parent.name)] * len(rows)
    assert inspect.of_kind("queues", root) == inspect.rows(root / "consumequeue")
    assert inspect.rows(root / "commitlog" / NAME)[0]["kind"] == "segment"


# --- sparse indexes ---


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
    }
    assert rows == [
        {"kind": "entry", "number": 0, "offset": 503, "position": 400},
        {"kind": "entry", "number": 1, "offset": 509, "position": 900},
    ]
    assert inspect.words(path, "--entries", "1:").endswith("  entry 1: offset 509, position 900\n")


def test_a_time_index_with_a_tail_of_unused_slots(tmp_path: Path, inspect: Inspect) -> None:
    path = tmp_path / f"{500:020d}.timeindex.deleted"
    path.write_bytes(entries((1700000000000, 0), (1700000000500, 7), code=">qi") + bytes(36))
    head, *rows = inspect.rows(path)
    assert (inspect.code, head["kind"], head["entries"], head["slots"]) == (0, "timeIndex", 2, 5)
    assert [row["offset"] for row in rows] == [500, 507]
    assert [row["number"] for row in inspect.of_kind("entry", path, "--entries", "1:9")] == [1, 2, 3, 4]
    path.write_bytes(bytes(1200))
    (head,) = inspect.rows(path)
    assert (inspect.code, head["entries"], head["slots"]) == (0, 0, 100)


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
    assert f"  damage               {head['damage']}" in inspect.words(path)


def test_ours(built: Built, inspect: Inspect) -> None:
    sparse = built.frontier.sparse
    assert sparse is not None
    for at, segment in enumerate(sparse.segments):
        for path, count in zip(built.pair(at), (segment.offset_entries, segment.time_entries), strict=True):
            head, *rows = inspect.rows(path, "--frames", 0)
            assert (inspect.code, head["entries"], len(rows)) == (0, count, count)
            assert (head["slots"] > head["entries"]) == (segment is sparse.segments[-1])
    assert [row["kind"] for row in inspect.rows(built.data / "sparse")] == ["offsetIndex", "timeIndex"] * 4
    kinds = [row["kind"] for row in inspect.rows(built.data)]
    assert kinds[-9:] == ["offsetIndex", "timeIndex"] * 4 + ["queues"]
    assert ": queues 16, files" in inspect.words(built.data)
    mark = next(mark for mark in built.marks if mark.max_offset > 2 * UNITS)
    path = built.queue_file(mark, UNITS)
    head, *rows = inspect.rows(path, "--frames", 0)
    assert (head["firstUnit"], head["units"], head["places"]) == (UNITS, UNITS, QUEUE_FILE_SIZE // UNIT_SIZE)
    assert [row["unit"] for row in rows] == list(range(UNITS, 2 * UNITS))


def test_damage_in_ours_is_told_in_the_summary_of_a_folder(built: Built, inspect: Inspect, tmp_path: Path) -> None:
    path = tmp_path / built.pair(0)[0].name
    path.write_bytes(built.pair(0)[0].read_bytes())
    change(path, path.stat().st_size - 8, b"\xff")
    assert "damage its last offset" in inspect.words(tmp_path)
    assert inspect.code == 1
