"""inspect: every kind of file and directory, in words and as JSON lines; what is damaged is shown and counted."""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING

import pytest

from indexd.cli.inspect_records import fitting_layouts
from indexd.flush.frontier import StoreCheckpoint, Uncovered, write_abort
from indexd.index.format import IndexLayout
from indexd.storage.disk import Disk
from support.data_directory import LAYOUT, SEGMENT, T0, Store, spec
from support.inspecting import Inspect
from support.naive import key_hash

if TYPE_CHECKING:
    from pathlib import Path


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


# --- index files ---


def test_an_index_file(store: Store, inspect: Inspect) -> None:
    (row,) = inspect.rows(index_file(store))
    assert inspect.code == 0
    header = store.frontier.index[0].header
    assert (row["kind"], row["hashSlotNum"], row["indexNum"], row["full"]) == ("index", 7, 10, False)
    assert (row["beginTimestamp"], row["endPhyOffset"], row["usedSlotCount"], row["indexCount"]) == (
        T0, header.end_phy_offset, header.used_slot_count, 6,
    )  # fmt: skip
    out = inspect.words(index_file(store), "--slots", "--entries", ":")
    assert "entries  5 of 9, used slots" in out
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


def test_the_layout_comes_from_flags_or_frontier_and_must_fit(store: Store, inspect: Inspect, tmp_path: Path) -> None:
    alone = tmp_path / "20270101000000000"
    alone.write_bytes(index_file(store).read_bytes())
    assert inspect.words(alone) == ""
    assert (inspect.code, "5000000 slots" in inspect.err) == (2, True)
    assert inspect.rows(alone, "--hash-slot-num", 7, "--index-num", 10)[0]["indexNum"] == 10
    inspect.words(alone, "--hash-slot-num", 7, "--index-num", 11)
    assert "try --hash-slot-num 7 --index-num 10" in inspect.err
    copy = tmp_path / "copy"
    copy.write_bytes(alone.read_bytes())
    assert inspect.rows(copy, "--hash-slot-num", 7, "--index-num", 10)[0]["kind"] == "index"
    os.truncate(index_file(store), 100)
    inspect.words(index_file(store))
    assert (inspect.code, "100 bytes" in inspect.err) == (4, True)
    os.truncate(index_file(store), 10)
    assert "cut off: 10 bytes" in inspect.words(store.data)


def test_layouts_that_fit() -> None:
    assert fitting_layouts(84_040, IndexLayout(5_000_000, 20_000_000)) == [IndexLayout(1000, 4000)]
    assert IndexLayout(1000, 60_000) in fitting_layouts(1_204_040, IndexLayout(1000, 9))
    assert IndexLayout(1000, 60_000) in fitting_layouts(1_204_040, IndexLayout(9, 60_000))
    assert fitting_layouts(3, IndexLayout(9, 9)) == []


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
    assert "end of the segment" in out


def test_a_log_directory_and_its_bounds(store: Store, inspect: Inspect) -> None:
    log = store.root / "commitlog"
    outcomes = [row.get("outcome") for row in inspect.rows(log, "--frames", 0) if row["kind"] == "frame"]
    assert outcomes == ["message"] * 3 + ["endOfFile", "message", "notYetWritten", "notYetWritten"]
    rows = inspect.rows(log, "--frames", 2)
    third = store.messages()[2].phy_offset
    assert [row["phyOffset"] for row in rows if row["kind"] != "segment"] == [0, store.messages()[1].phy_offset, third]
    assert rows[-1]["kind"] == "more"
    (row,) = (row for row in inspect.rows(log, "--frames", 1, "--offset", third) if row["kind"] == "frame")
    assert (row["phyOffset"], row["tags"]) == (third, "t")
    frames = [row for row in inspect.rows(log, "--offset", third + 1) if row["kind"] == "frame"]
    assert (inspect.code, frames[0]["outcome"]) == (1, "corrupt")
    inspect.words(log, "--offset", 10**9)
    assert inspect.code == 2


def test_frames_longer_than_one_read(tmp_path: Path, inspect: Inspect) -> None:
    store = Store(tmp_path, segment=8 << 20)
    offsets = store.append(spec(size=3 << 20), spec(size=5), spec(size=(1 << 20) - 60), spec(size=2 << 20))
    frames = [row for row in inspect.rows(store.root / "commitlog" / f"{0:020d}") if row["kind"] == "frame"]
    assert [row["phyOffset"] for row in frames] == [*offsets, store.writer.max_offset]
    assert frames[-1]["outcome"] == "notYetWritten"


def test_corrupt_frames_say_which_rule(store: Store, inspect: Inspect, tmp_path: Path) -> None:
    segment = store.root / "commitlog" / f"{SEGMENT:020d}"
    content = bytearray(segment.read_bytes())
    content[500] ^= 1
    segment.write_bytes(bytes(content))
    assert "corrupt: a body that its CRC denies" in inspect.words(segment)
    assert inspect.code == 1
    (tmp_path / "copy").write_bytes(bytes(content))
    assert inspect.rows(tmp_path / "copy")[0]["base"] == SEGMENT


# --- the small files, and whole directories ---


def test_checkpoint_frontier_abort_and_state(store: Store, inspect: Inspect) -> None:
    StoreCheckpoint(T0, 0, T0 + 1, 0, 77).write(Disk(), store.data / "checkpoint")
    write_abort(Disk(), store.data / "abort")
    (store.data / "state").write_text('{"pid": 5, "phyOffset": 9}')
    store.change_frontier(uncovered=(Uncovered(1, 2, "why\x1b"),))
    (row,) = inspect.rows(store.data / "checkpoint")
    assert (row["physicMsgTimestamp"], row["indexMsgTimestamp"], row["confirmPhyOffset"]) == (T0, T0 + 1, 77)
    assert "confirmPhyOffset     77" in inspect.words(store.data / "checkpoint")
    (row,) = inspect.rows(store.data / "frontier")
    assert (row["flavour"], row["phyOffset"]) == ("5.4", store.writer.max_offset)
    assert r"log bytes 1 to 2: why\x1b" in inspect.words(store.data / "frontier")
    assert inspect.rows(store.data / "abort")[0]["pid"] == os.getpid()
    assert inspect.rows(store.data / "state")[0]["phyOffset"] == 9
    kinds = [row["kind"] for row in inspect.rows(store.data)]
    assert kinds == ["frontier", "checkpoint", "abort", "state", "lock", *["index"] * len(store.frontier.index)]
    assert "no indexd holds it" in inspect.words(store.data)
    assert [row["kind"] for row in inspect.rows(store.data / "index")] == ["index"] * len(store.frontier.index)


def test_a_store(store: Store, inspect: Inspect) -> None:
    (store.root / "abort").touch()
    rows = inspect.rows(store.root)
    assert [row["kind"] for row in rows][:4] == ["abort", "segment", "segment", "segment"]
    assert inspect.code == 0


def test_what_it_does_not_know(tmp_path: Path, inspect: Inspect) -> None:
    (tmp_path / "note").write_text("hello")
    (tmp_path / "checkpoint").write_bytes(b"short")
    (tmp_path / "state").write_text("[]")
    (tmp_path / "empty").mkdir()
    for name, code in (("note", 2), ("checkpoint", 4), ("state", 2), ("empty", 2), ("absent", 2)):
        assert inspect.words(tmp_path / name) == ""
        assert (inspect.code, inspect.err.count("\n")) == (code, 1), name
