"""The board's row: every phase with its figures, whole at any time, from any thread."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING

import pytest

from indexd.dispatch.reput import resident_bytes
from indexd.index.format import IndexLayout
from indexd.serve.board import Board, Histogram, Row
from indexd.serve.status import Status
from support.inside import config_of
from support.small_log import HASH_SLOT_NUM, INDEX_NUM

if TYPE_CHECKING:
    from pathlib import Path

ALWAYS = {
    "version", "pid", "bootId", "startedAt", "cluster", "nodeId", "mode", "flavour", "store", "data", "hashSlotNum",
    "indexNum", "phase", "http", "remoting", "broker", "lastEvent", "queries", "memoryBytes", "diskUsedRatio",
    "diskUsedMax", "lastShutdownClean", "recoveries", "lastRecovery", "scrub", "stalled", "problems",
    "recoveryRemainingBytes", "recoveryRemainingFiles", "compiling", "findings", "summary",
}  # fmt: skip


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return Board(config_of(tmp_path / "store", tmp_path / "data", cluster="c1", node_id="broker-a"))


def test_who_it_is(board: Board, tmp_path: Path) -> None:
    row = board.row()
    assert row.keys() == ALWAYS
    assert Status.model_validate(row).model_fields_set, "each key has its field"
    assert (row["cluster"], row["nodeId"], row["data"]) == ("c1", "broker-a", str(tmp_path / "data"))
    assert row["bootId"] == board.boot_id != Board(config_of(tmp_path, tmp_path)).boot_id
    assert row["memoryBytes"] > 1 << 20


def test_the_phases_in_their_order_and_what_is_left_of_each(board: Board) -> None:
    def looks() -> tuple[str, object, object]:
        row = board.row()
        json.dumps(row)
        return row["phase"], row["recoveryRemainingBytes"], row["recoveryRemainingFiles"]

    size = IndexLayout(HASH_SLOT_NUM, INDEX_NUM).file_size
    assert looks() == ("opening", None, None)
    board.recovering("replay", 1, 4)
    assert looks() == ("recovering", 3 * size, 3)
    board.recovering("replay", 3, 4)
    board.recovering("compare", 1000, 5000)
    assert looks() == ("recovering", 4000, 0)
    progress = board.row()["recovering"]
    assert (progress["step"], progress["unit"], progress["done"], progress["total"]) == ("compare", "bytes", 1000, 5000)
    assert [(each["step"], each["unit"], each["done"]) for each in progress["steps"]] == [
        ("replay", "files", 3),
        ("compare", "bytes", 1000),
    ]
    assert progress["seconds"] >= progress["steps"][0]["seconds"] >= 0
    board.recovered("recovered", {"keptEntries": 7})
    board.running(lambda: {"phyOffset": 5})
    assert looks() == ("running", 0, 0)
    row = board.row()
    assert row["phyOffset"] == 5
    assert "recovering" not in row, "who reads DATA/state takes that for a recovery"
    assert row["recoveries"] == 1
    last = row["lastRecovery"]
    assert (last["event"], last["keptEntries"]) == ("recovered", 7)
    assert [step["step"] for step in last["steps"]] == ["replay", "compare"]
    board.stopping()
    assert (board.row()["phase"], board.row()["phyOffset"]) == ("stopping", 5)
    board.leaving("opening")  # disturbed: it is opened again
    assert looks() == ("opening", None, None)
    assert board.row().keys() == ALWAYS, "nothing of the run before is said to be true"
    board.waiting("open", "no space")
    assert board.row()["problems"] == {"open": "no space"}
    board.recovering("replay", 0, 1)
    assert board.row()["recovering"]["steps"][0]["done"] == 0
    assert board.row()["problems"] == {}


def test_a_figure_that_cannot_be_made_does_not_end_anything(board: Board) -> None:
    def source() -> Row:
        raise ZeroDivisionError("a defect")

    board.running(source)
    row = board.row()
    assert row["rowProblem"] == "ZeroDivisionError('a defect')"
    assert row["phase"] == "running"


def test_rows_are_whole_while_everything_changes(board: Board) -> None:
    """Phases, outlets, events and counts change in three threads; no row mixes two phases, none fails."""
    stop, problems = threading.Event(), []

    def change_phases() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            board.recovering("compare", number, 2 * number)
            board.running(lambda: {"phyOffset": 1, "caughtUp": True})
            board.stopping()
            board.leaving("opening")

    def change_outlets() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            board.outlets[f"outlet{number % 50}"] = {"dropped": number}
            board.outlets.pop(f"outlet{(number + 25) % 50}", None)
            board.broker = {"alive": bool(number % 2)}
            board.stalled = {"read": 1.0} if number % 2 else {}

    def tell() -> None:
        while not stop.is_set():
            board.events.tell("rolled", {"files": 1})

    threads = [threading.Thread(target=each) for each in (change_phases, change_outlets, tell)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3000):
            row = board.row()
            json.dumps(row)
            has_figures = "phyOffset" in row
            if ("recovering" in row) != (row["phase"] == "recovering"):
                problems.append(row)
            if row["phase"] in ("opening", "recovering") and has_figures:
                problems.append(row)
            if row["phase"] in ("running", "stopping") and not has_figures:
                problems.append(row)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not problems


def test_memory_is_what_the_kernel_says() -> None:
    held = bytearray(64 << 20)
    held[::4096] = b"x" * len(held[::4096])
    assert resident_bytes() > len(held)


def test_a_histogram_loses_nothing_between_threads() -> None:
    histogram = Histogram((0.1, 1.0))

    def observe() -> None:
        for _ in range(5000):
            histogram.observe(0.1)
            histogram.observe(0.5)
            histogram.observe(2.0)

    threads = [threading.Thread(target=observe) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert histogram.cumulative() == [("0.1", 20_000), ("1.0", 40_000), ("+Inf", 60_000)]
    assert histogram.count == 60_000
    assert histogram.total == pytest.approx(20_000 * 2.6)
