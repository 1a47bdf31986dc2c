"""What a running daemon says of itself: true at any time, and from any thread."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import pytest

from indexd.errors import DiskError
from indexd.index.format import HEADER_SIZE, IndexHeader, IndexLayout
from indexd.serve.status import Status
from support.commitlog_writer import CommitLogWriter
from support.daemon import index_files
from support.inside import config_of, notifier_of, opened_inside, row_of, running, wait_until
from support.small_log import HASH_SLOT_NUM, INDEX_NUM, SEGMENT_SIZE, messages, write_log

if TYPE_CHECKING:
    from pathlib import Path

    from indexd.service.daemon import Daemon

RUN = {
    "writtenAt", "beginOffset", "phyOffset", "filledOffset", "storeTimestamp", "durableOffset", "readOffset",
    "commitLogMinOffset", "commitLogMaxOffset", "caughtUp", "dispatchBehindBytes", "dispatchBehindMilliseconds",
    "dispatchBehindMessages", "outputs", "messages", "indexEntries", "indexFiles", "rollOvers", "expiredFiles",
    "flushes", "lastFlushMilliseconds", "consumeQueues", "consumeQueueUnits", "consumeQueueGaps", "consumeQueuesMoved",
    "consumeQueueRepeats", "batchMessages", "leftOutMessages", "sparseEntries", "queueRows", "queueBytes",
    "queueOldestMilliseconds", "readMessages", "readBytesTotal", "expiredBytes", "corruptBytes", "skippedBytes",
    "corruptRecords", "drains", "lastDrainMilliseconds", "uncovered", "uncoveredBytes", "corrupt", "problems",
}  # fmt: skip


def check(row: dict[str, Any]) -> None:
    """What holds of every row of a running daemon."""
    assert "rowProblem" not in row, row["rowProblem"]
    assert row.keys() >= RUN
    Status.model_validate(row)  # each key has its field, of its type
    json.dumps(row)
    assert row["beginOffset"] <= row["phyOffset"] <= row["readOffset"] <= row["commitLogMaxOffset"]
    assert row["dispatchBehindBytes"] == row["commitLogMaxOffset"] - row["phyOffset"] >= 0
    assert row["dispatchBehindMilliseconds"] >= 0
    assert row["dispatchBehindMessages"] >= 0
    assert row["durableOffset"] <= row["readOffset"]
    assert [output["output"] for output in row["outputs"]] == ["key", "cq", "sparse"]
    for output in row["outputs"]:
        assert output["behindBytes"] == row["commitLogMaxOffset"] - output["phyOffset"]
        assert output["phyOffset"] <= row["readOffset"]
        assert output["fillRatio"] is None or 0 <= output["fillRatio"] <= 1


async def test_rows_from_three_threads_while_a_log_grows(tmp_path: Path) -> None:
    """The figures of every one hold together, and those of the last are the files'."""
    store, data, count = tmp_path / "store", tmp_path / "data", 12_000
    stop, seen, problems = threading.Event(), [0, 0, 0], []
    (store / "commitlog").mkdir(parents=True)

    def look(daemon: Daemon, number: int) -> None:
        last: dict[str, Any] = {}
        while not stop.is_set():
            row = row_of(daemon)
            try:
                check(row)
                for key in ("phyOffset", "readOffset", "messages", "indexEntries", "drains", "flushes", "rollOvers"):
                    assert row[key] >= last.get(key, 0), key
            except AssertionError as error:
                problems.append(error)
                return
            last = row
            seen[number] += 1

    def write() -> None:
        endless = messages(7)
        with CommitLogWriter(store / "commitlog", SEGMENT_SIZE) as writer:
            for _ in range(count // 100):
                for _ in range(100):
                    writer.append(next(endless))
                stop.wait(0.002)

    with opened_inside(store, data) as daemon:
        async with running(daemon):
            await wait_until(lambda: row_of(daemon)["phase"] == "running")
            threads = [threading.Thread(target=look, args=(daemon, number)) for number in range(3)]
            writer = threading.Thread(target=write)
            for thread in (*threads, writer):
                thread.start()
            await wait_until(lambda: not writer.is_alive() or problems)
            await wait_until(lambda: row_of(daemon)["messages"] == count or problems)
            await wait_until(lambda: row_of(daemon)["durableOffset"] == row_of(daemon)["phyOffset"] or problems)
            stop.set()
            for thread in threads:
                thread.join()
            assert not problems, problems
            assert min(seen) > 20
            row = row_of(daemon)
            assert row["caughtUp"]
            assert row["dispatchBehindBytes"] == row["dispatchBehindMilliseconds"] == row["dispatchBehindMessages"] == 0
            assert (row["queueRows"], row["queueBytes"], row["queueOldestMilliseconds"]) == (0, 0, 0)
            assert row["readMessages"] == count
            assert row["readBytesTotal"] >= row["phyOffset"] - SEGMENT_SIZE
            assert row["drains"] == daemon._board.drain_seconds.count > 1
            assert row["flushes"] >= daemon._board.flush_seconds.count > 1
            assert row["lastDrainMilliseconds"] > 0
            assert row["lastFlushMilliseconds"] > 0
        assert row_of(daemon)["phase"] == "stopping"
    check_files(row, data)


def check_files(row: dict[str, Any], data: Path) -> None:
    """The figures of the outputs are those of the files on the disk."""
    key, queues, sparse = row["outputs"]
    files = index_files(data)
    entries = [IndexHeader.unpack(path.read_bytes()[:HEADER_SIZE]).entries for path in files]
    layout = IndexLayout(HASH_SLOT_NUM, INDEX_NUM)
    assert key["files"] == row["indexFiles"] == len(files) == row["rollOvers"] + 1
    assert key["entries"] == row["indexEntries"] == sum(entries)
    assert key["bytes"] == sum(path.stat().st_size for path in files) == len(files) * layout.file_size
    assert key["fillRatio"] == pytest.approx(entries[-1] / (INDEX_NUM - 1), abs=1e-3)
    units = [path for path in (data / "consumequeue").rglob("*") if path.is_file()]
    assert queues["files"] == len(units)
    assert queues["entries"] == row["consumeQueueUnits"] == queues["bytes"] / 20
    assert queues["fillRatio"] is None
    pairs = list((data / "sparse").iterdir())
    assert sparse["files"] == len(pairs)
    assert sparse["entries"] == row["sparseEntries"]
    sealed = sum(path.stat().st_size for path in sorted(pairs)[:-2])
    assert sealed <= sparse["bytes"] <= sum(path.stat().st_size for path in pairs)


async def test_a_log_that_waits_is_behind_by_what_is_in_it(tmp_path: Path) -> None:
    """Nothing is built, because the disk is said to be full; what is behind is known, and goes when it has room."""
    end = write_log(tmp_path / "store", 3000)
    with opened_inside(tmp_path / "store", tmp_path / "data", queue_rows="500", retry_max_seconds="0.1") as daemon:
        full = DiskError("index into", tmp_path, OSError(28, "full"))

        def refuse() -> None:
            raise full

        daemon._watermark.check = refuse  # type: ignore[method-assign]
        async with running(daemon):
            await wait_until(lambda: "build" in row_of(daemon)["problems"])
            await wait_until(lambda: daemon.queue.is_blocked)
            daemon.state.meter.seen_end = end
            row = row_of(daemon)
            check(row)
            assert row["phyOffset"] == 0
            assert row["dispatchBehindBytes"] == end
            assert 500 <= row["dispatchBehindMessages"] <= 9000
            assert row["dispatchBehindMilliseconds"] > 1000
            assert row["queueRows"] > 0
            assert not row["caughtUp"]
            assert row["outputs"][0]["behindBytes"] == end
            # It waits and says so: no stall, and the service manager hears why.
            await wait_until(lambda: any("waiting (build)" in text for _, text in notifier_of(daemon).said))
            assert row["stalled"] == {}
            daemon._apply_config()
            await wait_until(lambda: row_of(daemon)["caughtUp"] and not row_of(daemon)["dispatchBehindBytes"])
            assert row_of(daemon)["problems"] == {}
            kinds = [event.name for event in daemon._board.events.since(0) if event.kind == "disk"]
            assert kinds[0] == "degraded"
            assert kinds[-1] == "healed"


async def test_corruption_and_what_was_passed_over_are_counted(tmp_path: Path) -> None:
    store = tmp_path / "store"
    write_log(store, 3000)
    segment = sorted((store / "commitlog").iterdir())[1]
    with segment.open("r+b") as file:
        file.seek(1 << 16)
        file.write(b"\x5a" * 4096)
    with opened_inside(
        store, tmp_path / "data", corrupt_after_ms="20", settle_ms="10", retry_max_seconds="0.05"
    ) as daemon:
        async with running(daemon):
            await wait_until(lambda: row_of(daemon)["corrupt"])
            row = row_of(daemon)
            check(row)
            assert row["corruptRecords"] == 1
            assert row["skippedBytes"] == row["uncoveredBytes"] == 0
            assert row["corrupt"]["offset"] == row["readOffset"]
            assert not row["caughtUp"]
            assert "standing at corrupt bytes" in daemon._status()
            config = config_of(store, tmp_path / "data", on_corrupt="skip", corrupt_after_ms="20", settle_ms="10")
            daemon._instance.reload_config = lambda: config
            daemon._on_reload()
            await wait_until(lambda: row_of(daemon)["caughtUp"] and not row_of(daemon)["dispatchBehindBytes"])
            row = row_of(daemon)
            check(row)
            assert row["corrupt"] is None
            assert row["skippedBytes"] == row["corruptBytes"] == row["uncoveredBytes"] >= 4096
            assert sum(end - begin for begin, end, _ in row["uncovered"]) == row["uncoveredBytes"]
            kinds = [event.kind for event in daemon._board.events.since(0)]
            assert {"corrupt", "hole", "reload"} <= set(kinds)
