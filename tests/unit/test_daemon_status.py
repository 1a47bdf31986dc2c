"""What a running daemon says of itself: its row in every phase, events and histograms, how far behind it is; scrubs."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexd.commitlog.batcher import DispatchBatch, TopicTable, make_columns, trimmed
from indexd.commitlog.reader import ReaderCounters
from indexd.commitlog.segments import list_segments, log_end
from indexd.config import LogConfig
from indexd.dispatch.reput import DispatchQueue, ReputState
from indexd.errors import DiskError, MissingStoreError
from indexd.index.format import HEADER_SIZE, FileMark, IndexHeader, IndexLayout
from indexd.recovery.recover import Damage, DamagedError
from indexd.serve.daemon_status import DaemonStatus, Histogram, Status
from indexd.serve.events import Events
from indexd.service.daemon import Daemon, Scrubbing
from indexd.service.instance import configure_log
from indexd.service.state import Lag, LagMeter
from indexd.storage.disk import Disk
from indexd.storage.names import segment_name
from indexd.verify.scrub import Scrub
from support.commitlog_writer import CommitLogWriter
from support.daemon import index_files
from support.inside import config_of, notifier_of, opened_inside, row_of, running, wait_until
from support.sim_daemon import SilentLog
from support.small_log import HASH_SLOT_NUM, INDEX_NUM, SEGMENT_SIZE, messages, write_log

ALWAYS = {
    "version", "pid", "bootId", "startedAt", "cluster", "nodeId", "mode", "flavour", "store", "data", "hashSlotNum",
    "indexNum", "phase", "http", "remoting", "broker", "lastEvent", "queries", "memoryBytes", "diskUsedRatio",
    "diskUsedMax", "lastShutdownClean", "recoveries", "lastRecovery", "scrub", "stalled", "problems",
    "recoveryRemainingBytes", "recoveryRemainingFiles", "compiling", "findings", "summary",
}  # fmt: skip


@pytest.fixture
def status(tmp_path: Path) -> DaemonStatus:
    return DaemonStatus(config_of(tmp_path / "store", tmp_path / "data", cluster="c1", node_id="broker-a"))


def test_who_it_is(status: DaemonStatus, tmp_path: Path) -> None:
    row = status.row()
    assert row.keys() == ALWAYS
    assert Status.model_validate(row).model_fields_set, "each key has its field"
    assert (row["cluster"], row["nodeId"], row["data"]) == ("c1", "broker-a", str(tmp_path / "data"))
    assert row["bootId"] == status.boot_id != DaemonStatus(config_of(tmp_path, tmp_path)).boot_id
    assert row["memoryBytes"] > 1 << 20


def test_the_phases_in_their_order_and_what_is_left_of_each(status: DaemonStatus) -> None:
    def looks() -> tuple[str, object, object]:
        row = status.row()
        json.dumps(row)
        return row["phase"], row["recoveryRemainingBytes"], row["recoveryRemainingFiles"]

    size = IndexLayout(HASH_SLOT_NUM, INDEX_NUM).file_size
    assert looks() == ("opening", None, None)
    for step, done, total, left in (("replay", 1, 4, (3 * size, 3)), ("compare", 1000, 5000, (4000, 0))):
        status.recovering(step, done, total)
        assert looks() == ("recovering", *left)
    progress = {"step": "compare", "unit": "bytes", "done": 1000, "total": 5000}
    assert status.row()["recovering"].items() > progress.items()
    status.recovered("recovered", {"keptEntries": 7})
    status.running(lambda: {"phyOffset": 5})
    assert looks() == ("running", 0, 0)
    row = status.row()
    assert "recovering" not in row, "who reads DATA/state takes that for a recovery"
    last = row["lastRecovery"]
    assert (row["phyOffset"], row["recoveries"], last["event"], last["keptEntries"]) == (5, 1, "recovered", 7)
    status.stopping()
    assert (status.row()["phase"], status.row()["phyOffset"]) == ("stopping", 5)
    status.leaving("opening")  # disturbed: it is opened again
    assert looks() == ("opening", None, None)
    assert status.row().keys() == ALWAYS, "nothing of the run before is said to be true"


def test_rows_are_whole_while_everything_changes(status: DaemonStatus) -> None:
    """Phases, outlets and events change in another thread; no row mixes two phases, none fails."""
    stop = threading.Event()

    def change() -> None:
        for number in itertools.takewhile(lambda _: not stop.is_set(), itertools.count()):
            status.recovering("compare", 1, 2)
            status.outlets[f"outlet{number % 50}"] = lambda: {"dropped": 1}
            status.outlets.pop(f"outlet{(number + 25) % 50}", None)
            status.running(lambda: {"phyOffset": 1, "caughtUp": True})
            status.events.tell("rolled", {"files": 1})
            status.leaving("opening")

    with ThreadPoolExecutor(1) as pool:
        changing = pool.submit(change)
        for _ in range(1000):
            row = status.row()
            json.dumps(row)
            phase = row["phase"]
            assert ("recovering" in row, "phyOffset" in row) == (phase == "recovering", phase == "running")
        stop.set()
        changing.result()


def test_a_histogram_loses_nothing_between_threads() -> None:
    histogram = Histogram()

    def observe(seconds: float) -> None:
        for _ in range(5000):
            histogram.observe(seconds)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(observe, (0.1, 0.5, 2.0)))
    counts = dict(histogram.cumulative())
    assert [counts[bound] for bound in ("0.05", "0.1", "0.5", "2.5", "+Inf")] == [0, 5000, 10_000, 15_000, 15_000]
    assert (histogram.count, histogram.total) == (15_000, pytest.approx(5000 * 2.6))


def test_numbers_grow_by_one_whatever_the_kind() -> None:
    events = Events()
    assert events.since(0) == []
    for name in ("rolled", "flushed", "corrupt", "no event of ours", "flushed"):
        events.tell(name, {"offset": 1})
    assert [(event.number, event.kind, event.name) for event in events.since(0)] == [
        (1, "roll", "rolled"),
        (2, "flush", "flushed"),
        (3, "corrupt", "corrupt"),
        (4, "flush", "flushed"),
    ]
    assert [event.number for event in events.since(2)] == [3, events.last]
    assert events.since(4) == events.since(99) == []
    assert events.since(0)[0].fields == {"offset": 1}


def test_what_comes_every_few_seconds_does_not_push_out_what_comes_once_a_night() -> None:
    events = Events()
    events.tell("corrupt", {})
    for name, kept in (("flushed", 101), ("rolled", 1100)):
        for _ in range(5000):
            events.tell(name, {})
        numbers = [event.number for event in events.since(0)]
        assert len(numbers) == kept
        assert numbers == sorted(numbers)
        assert (1 in numbers) == (name == "flushed")


def test_every_line_of_the_log_that_has_a_kind_becomes_an_event(capsys: pytest.CaptureFixture[str]) -> None:
    """Also one that is not logged because of its level."""
    events = Events()
    log = configure_log(LogConfig(log_level="error", log_format="json"), events.tap)
    log.info("rolled", files=2, phy_offset=99)
    log.debug("drained", rows=1)
    log.error("degraded", stage="build", problem="disk full")
    log.warning("skipped", begin=1, end=2)
    told = [(event.kind, event.fields) for event in events.since(0)]
    assert told == [
        ("roll", {"files": 2, "phy_offset": 99}),
        ("disk", {"stage": "build", "problem": "disk full"}),
        ("hole", {"begin": 1, "end": 2}),
    ]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert '"event": "degraded"' in lines[0]


NEVER = -(1 << 63)
SEGMENT = 64 << 10


class Scene:
    """A daemon in numbers: 1000 messages of 100 bytes are built, the clock stands at 5,000 s."""

    def __init__(self) -> None:
        self.now = 5000.0
        self.meter = LagMeter(1000, lambda: self.now)
        self.built: Any = SimpleNamespace(phy_offset=100_000, messages=1000)
        self.queue = DispatchQueue(1 << 20, 1 << 30)
        self.reader: Any = SimpleNamespace(position=100_000, newest_timestamp=NEVER, counters=ReaderCounters())
        self.reput = ReputState()

    def read(self, rows: int, *, age: float = 1.0) -> DispatchBatch:
        """The reader takes so many messages, the first of which was stored ``age`` seconds ago."""
        columns = make_columns(rows, 1)
        columns.key_start[:] = 0
        columns.store_timestamp[:] = int((self.now - age) * 1000)
        begin = self.reader.position
        self.reader.position += 100 * rows
        self.reader.newest_timestamp = int((self.now - age) * 1000)
        self.reader.counters.messages += rows
        self.reader.counters.bytes += 100 * rows
        return DispatchBatch(trimmed(columns, rows, 0), rows, begin, self.reader.position, TopicTable(4, 64))

    def look(self, *, is_at_end: bool) -> None:
        self.reput.caught_up = is_at_end
        self.meter.looked(self.reader.position, is_at_end=is_at_end)

    def lag(self) -> Lag:
        return self.meter.measure(self.built, self.queue, self.reader, self.reput)


async def test_a_message_on_its_way_is_as_late_as_it_is_old() -> None:
    scene = Scene()
    scene.look(is_at_end=True)
    assert scene.lag() == Lag(100_000, 0, 0, 0)
    batch = scene.read(10, age=0.5)
    await scene.queue.put(batch)
    scene.look(is_at_end=True)
    assert scene.lag() == Lag(101_000, 1000, 500, 10)
    items = scene.queue.drain()
    scene.meter.take(items)
    scene.now += 2
    scene.look(is_at_end=True)
    assert scene.lag() == Lag(101_000, 1000, 2500, 10), "being built is not found yet"
    scene.built.phy_offset, scene.built.messages = 101_000, 1010
    assert scene.lag() == Lag(101_000, 0, 0, 0), "what is found is not late, whoever has not let go of it yet"


async def test_behind_the_log_what_was_not_read_is_estimated() -> None:
    scene = Scene()
    scene.look(is_at_end=True)
    scene.now += 60
    await scene.queue.put(scene.read(50, age=20))
    scene.look(is_at_end=False)
    scene.meter.seen_end = 205_000
    assert scene.lag() == Lag(205_000, 105_000, 20_000, 50 + 1000)
    scene.built.phy_offset, scene.built.messages = 105_000, 1050
    scene.queue.drain()
    assert scene.lag() == Lag(205_000, 100_000, 20_000, 1000), "the next one is younger than the last that was read"


def test_a_reader_that_stands_is_late_since_it_last_saw_the_end() -> None:
    scene = Scene()
    scene.look(is_at_end=True)
    scene.now += 2
    assert scene.lag().milliseconds == 0
    scene.now += 40
    assert scene.lag().milliseconds == 42_000, "the log may have gone on unseen"
    scene.look(is_at_end=True)
    assert scene.lag().milliseconds == 0
    scene.reput.problem = MissingStoreError("unmounted")
    scene.now += 1
    assert scene.lag().milliseconds == 1000


def test_nothing_is_ever_negative() -> None:
    """A clock that was set back, and a look at the log that is older than the reader."""
    scene = Scene()
    scene.look(is_at_end=True)
    scene.now -= 100
    scene.meter.seen_end = 50
    scene.reput.problem = MissingStoreError("unmounted")
    assert scene.lag() == Lag(100_000, 0, 0, 0)


@given(end=st.integers(0, 4 * SEGMENT), known=st.integers(0, 4 * SEGMENT), ahead=st.integers(0, 2))
def test_the_end_is_found_to_the_byte(
    tmp_path_factory: pytest.TempPathFactory, end: int, known: int, ahead: int
) -> None:
    root = tmp_path_factory.mktemp("log")
    for base in range(0, end + ahead * SEGMENT + 1, SEGMENT):
        with (root / segment_name(base)).open("wb") as file:
            file.write((b"\x01" * SEGMENT)[: max(min(end - base, SEGMENT), 0)])
            file.truncate(SEGMENT)
    log = list_segments(Disk(), (root,), SEGMENT)
    assert log_end(Disk(), log, min(known, end)) == end
    assert log_end(Disk(), log, 0) == end


# --- while it runs

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
    assert row.keys() >= RUN
    Status.model_validate(row)  # each key has its field, of its type
    json.dumps(row)
    assert row["beginOffset"] <= row["phyOffset"] <= row["readOffset"] <= row["commitLogMaxOffset"]
    assert row["dispatchBehindBytes"] == row["commitLogMaxOffset"] - row["phyOffset"] >= 0
    assert min(row["dispatchBehindMilliseconds"], row["dispatchBehindMessages"]) >= 0
    assert row["durableOffset"] <= row["readOffset"]
    assert [output["output"] for output in row["outputs"]] == ["key", "cq", "sparse"]
    for output in row["outputs"]:
        assert output["behindBytes"] == row["commitLogMaxOffset"] - output["phyOffset"]
        assert output["phyOffset"] <= row["readOffset"]
        assert output["fillRatio"] is None or 0 <= output["fillRatio"] <= 1


async def test_rows_from_two_threads_while_a_log_grows(tmp_path: Path) -> None:
    """The figures of every one hold together, and those of the last are the files'."""
    store, data, count = tmp_path / "store", tmp_path / "data", 12_000
    stop, seen = threading.Event(), [0, 0]
    (store / "commitlog").mkdir(parents=True)

    def look(daemon: Daemon, number: int) -> None:
        last: dict[str, Any] = {}
        while not stop.wait(0.002):  # the others are to have a turn, too
            row = row_of(daemon)
            check(row)
            for key in ("phyOffset", "readOffset", "messages", "indexEntries", "drains", "flushes", "rollOvers"):
                assert row[key] >= last.get(key, 0), key
            last = row
            seen[number] += 1

    def write(daemon: Daemon) -> None:
        endless = messages(7)
        with CommitLogWriter(store / "commitlog", SEGMENT_SIZE) as writer:
            for number in range(count):
                writer.append(next(endless))
                # The second half comes behind a flush, however slow the machine is.
                while number == count // 2 and not row_of(daemon)["flushes"]:
                    stop.wait(0.002)

    with opened_inside(store, data) as daemon, ThreadPoolExecutor(3) as pool:
        async with running(daemon):
            await wait_until(lambda: row_of(daemon)["phase"] == "running")
            working = [pool.submit(look, daemon, number) for number in range(2)]
            writing = pool.submit(write, daemon)

            def is_written() -> bool:
                row = row_of(daemon)
                return writing.done() and row["messages"] == count and row["durableOffset"] == row["phyOffset"]

            try:
                await wait_until(lambda: is_written() or any(each.done() for each in working))
            finally:
                stop.set()
            for each in (*working, writing):
                each.result(30)
            assert min(seen) > 20
            row = row_of(daemon)
            zero = ("dispatchBehindBytes", "dispatchBehindMilliseconds", "dispatchBehindMessages", "queueRows")
            assert [row[key] for key in (*zero, "queueBytes", "queueOldestMilliseconds")] == [0] * 6
            assert (row["caughtUp"], row["readMessages"]) == (True, count)
            assert row["readBytesTotal"] >= row["phyOffset"] - SEGMENT_SIZE
            assert min(row["drains"], row["flushes"], daemon._board.flush_seconds.count) > 1
            assert min(row["lastDrainMilliseconds"], row["lastFlushMilliseconds"]) > 0
        assert row_of(daemon)["phase"] == "stopping"
    check_files(row, data)


def check_files(row: dict[str, Any], data: Path) -> None:
    """The figures of the outputs are those of the files on the disk."""
    key, queues, sparse = row["outputs"]
    files = index_files(data)
    entries = [IndexHeader.unpack(path.read_bytes()[:HEADER_SIZE]).entries for path in files]
    assert key["files"] == row["indexFiles"] == len(files) == row["rollOvers"] + 1
    assert key["entries"] == row["indexEntries"] == sum(entries)
    assert key["bytes"] == sum(path.stat().st_size for path in files)
    assert key["fillRatio"] == pytest.approx(entries[-1] / (INDEX_NUM - 1), abs=1e-3)
    units = [path for path in (data / "consumequeue").rglob("*") if path.is_file()]
    assert (queues["files"], queues["fillRatio"]) == (len(units), None)
    assert queues["entries"] == row["consumeQueueUnits"] == queues["bytes"] / 20
    pairs = sorted((data / "sparse").iterdir())
    assert (sparse["files"], sparse["entries"]) == (len(pairs), row["sparseEntries"])
    assert 0 < sparse["bytes"] <= sum(path.stat().st_size for path in pairs)


async def test_a_log_that_waits_is_behind_by_what_is_in_it(tmp_path: Path) -> None:
    """Nothing is built, because the disk is said to be full; what is behind is known, and goes when it has room."""
    end = write_log(tmp_path / "store", 3000)
    with opened_inside(tmp_path / "store", tmp_path / "data", queue_rows="500", retry_max_seconds="0.1") as daemon:
        full = DiskError("index into", tmp_path, OSError(28, "full"))
        with mock.patch.object(daemon._watermark, "check", side_effect=full):
            async with running(daemon):
                await wait_until(lambda: "build" in row_of(daemon)["problems"] and daemon.queue.is_blocked)
                daemon.state.meter.seen_end = end
                row = row_of(daemon)
                check(row)
                assert (row["phyOffset"], row["dispatchBehindBytes"], row["caughtUp"]) == (0, end, False)
                assert 500 <= row["dispatchBehindMessages"] <= 9000
                assert row["dispatchBehindMilliseconds"] > 1000
                assert row["queueRows"] > 0
                # It waits and says so: no stall, and the service manager hears why.
                await wait_until(lambda: any("waiting (build)" in text for _, text in notifier_of(daemon).said))
                assert row["stalled"] == {}
                daemon._apply_config()  # which looks at the disk anew
                await wait_until(lambda: row_of(daemon)["caughtUp"] and not row_of(daemon)["dispatchBehindBytes"])
                kinds = [event.name for event in daemon._board.events.since(0) if event.kind == "disk"]
                assert (row_of(daemon)["problems"], kinds[0], kinds[-1]) == ({}, "degraded", "healed")


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
            assert [row[key] for key in ("corruptRecords", "skippedBytes", "uncoveredBytes")] == [1, 0, 0]
            assert (row["corrupt"]["offset"], row["caughtUp"]) == (row["readOffset"], False)
            assert "standing at corrupt bytes" in daemon._status()
            config = config_of(store, tmp_path / "data", on_corrupt="skip", corrupt_after_ms="20", settle_ms="10")
            daemon._instance.reload_config = lambda: config
            daemon._on_reload()
            await wait_until(lambda: row_of(daemon)["caughtUp"] and not row_of(daemon)["dispatchBehindBytes"])
            row = row_of(daemon)
            check(row)
            assert row["corrupt"] is None
            assert row["skippedBytes"] == row["corruptBytes"] == row["uncoveredBytes"] >= 4096
            assert {"corrupt", "hole", "reload"} <= {event.kind for event in daemon._board.events.since(0)}


# --- when a scrub is due, how fast it reads, and what happens when the disk refuses or the daemon stops

DAY = 86_400


class Scrubbed:
    """A daemon that is opened and does not run, and what scrubs it."""

    def __init__(self, daemon: Any) -> None:
        self.instance, self.pipeline = daemon._instance, daemon.pipeline
        self.log = self.instance.log = SilentLog()
        self.stop = threading.Event()
        self.scrubbing = Scrubbing(self.instance, self.pipeline, self.stop)

    @property
    def row(self) -> Any:
        return self.instance.board.scrub

    def left(self) -> float:
        return self.scrubbing.seconds_left


@pytest.fixture
def ground(tmp_path: Path) -> Iterator[Scrubbed]:
    write_log(tmp_path / "store", 500)
    with opened_inside(tmp_path / "store", tmp_path / "data") as daemon:
        while not daemon.pipeline.built.messages:
            found = daemon.reader.poll()
            if hasattr(found, "rows"):
                daemon.pipeline.build(found)
        daemon.pipeline.persist(daemon.pipeline.mark())
        daemon.pipeline.scrubbed_at = None  # a new directory waits for a day
        yield Scrubbed(daemon)
        daemon.pipeline.close()
        daemon.reader.close()


def test_it_is_due_at_once_and_then_every_interval(ground: Scrubbed) -> None:
    assert ground.left() == 0
    ground.scrubbing.run()
    assert ground.log.events == ["scrubbed"]
    assert DAY - 60 < ground.left() <= DAY
    assert (ground.row["bytes"] > 0, ground.row["damaged"], ground.row["brokenOff"]) == (True, 0, 0)
    # Written down with the next frontier, and so for the process that comes after.
    ground.pipeline.persist(ground.pipeline.mark())
    assert ground.pipeline.frontier.scrubbed_at == ground.pipeline.scrubbed_at
    # A clock that was ahead then does not put it off for ever.
    ground.pipeline.scrubbed_at = int((time.time() + 10 * DAY) * 1000)
    assert ground.left() == 0


def broken(error: Exception) -> Any:
    def run(_: Scrub) -> int:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "damaged"),
    [(DamagedError("a file", Damage()), 3), (DiskError("read", "a file", OSError(5, "Input/output error")), 0)],
    ids=["damage", "disk"],
)
def test_what_breaks_it_off_is_raised_and_puts_it_off_longer_each_time(
    ground: Scrubbed, monkeypatch: pytest.MonkeyPatch, error: Exception, damaged: int
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Scrub, "run", broken(error))
        for seconds in (60, 120, 240):
            with pytest.raises(type(error)):
                ground.scrubbing.run()
            assert seconds - 30 < ground.left() <= seconds
        assert (ground.row["damaged"], ground.row["brokenOff"]) == (damaged, 3)
        ground.instance.board.scrub = {**ground.row, "brokenOff": 1000}
        assert DAY - 60 < ground.left() <= DAY
    assert ground.log.events == []
    ground.scrubbing.run()
    assert (ground.row["damaged"], ground.row["brokenOff"]) == (damaged, 0)


def test_a_stop_ends_it_and_nothing_is_said_of_what_was_found_then(
    ground: Scrubbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    ground.stop.set()
    monkeypatch.setattr(Scrub, "run", broken(DamagedError("a file", Damage())))
    ground.scrubbing.run()
    assert ground.log.events == []
    assert ground.left() == 0


def test_the_rate_is_bounded(ground: Scrubbed, monkeypatch: pytest.MonkeyPatch) -> None:
    now, waited = [1000.0], []
    monkeypatch.setattr(ground.stop, "wait", lambda seconds: waited.append(seconds) or False)
    monkeypatch.setattr("indexd.service.daemon.time.monotonic", lambda: now[0])
    ground.scrubbing._on_bytes(64 << 20)
    now[0] = 2000.0  # what was slow for a while does not hurry afterwards
    ground.scrubbing._on_bytes(1 << 20)
    ground.scrubbing._on_bytes(32 << 20)
    assert waited == pytest.approx([1.0, 0, 1 / 32])


def test_only_a_full_file_that_is_still_there_takes_a_checksum_over(ground: Scrubbed) -> None:
    index = ground.pipeline.index
    full, other = FileMark("1", IndexHeader(), full=True), FileMark("2", IndexHeader(), full=True)
    index._full = [full]
    index.adopt(replace(full, entries_crc=7, slots_crc=8))
    index.adopt(replace(other, entries_crc=9, slots_crc=9))
    assert [(mark.name, mark.entries_crc, mark.slots_crc) for mark in index._full] == [("1", 7, 8)]
    index._full = []
