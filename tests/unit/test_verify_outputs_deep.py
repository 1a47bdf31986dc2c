"""``indexd verify --deep`` of ConsumeQueues and sparse indexes: damage is found, and what is none is not."""

from __future__ import annotations

import errno
import random
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexd.commitlog.reader import LogReader
from indexd.consumequeue.format import UNIT_SIZE
from indexd.errors import DiskError, IndexdError
from indexd.findings import Findings
from indexd.flush.frontier import StoreCheckpoint, write_abort
from indexd.flush.pipeline import Pipeline
from indexd.recovery.open import open_data, reader_options
from indexd.recovery.recover import WholeLog, once
from indexd.storage.disk import Disk, DiskFile
from indexd.storage.names import DataFiles, segment_name
from indexd.verify import whole
from indexd.verify.whole import look
from support.beside_log import frames, over_queues, spec, write
from support.commitlog_writer import CommitLogWriter
from support.daemon import assert_same_index, indexd_here
from support.goldens import GOLDENS, unpack
from support.outputs import UNITS, Built, build, copied, found, live_bytes
from support.reopened import config_for, named_for, reopen, undisturbed
from support.small_log import SEGMENT_SIZE, messages
from support.verifying import change, check, kinds

if TYPE_CHECKING:
    from pathlib import Path

    from indexd.verify import Report


SEGMENT = 4096
T0 = 1_700_000_000_000


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("outputs"))


@pytest.fixture
def built(base: Built, tmp_path: Path) -> Built:
    return copied(base, tmp_path)


def test_every_byte_is_held_against_the_log(built: Built) -> None:
    rand, rows = random.Random(6), live_bytes(built)
    for path, size in [rows[0], rows[-1], rows[-2], *rand.choices(rows, k=40)]:
        position = rand.randrange(size)
        data = path.read_bytes()
        change(path, position, bytes([data[position] ^ 1 << rand.randrange(8)]))
        report = check(built.data, deep=True)
        width = UNIT_SIZE if "consumequeue" in path.parts else 8 if path.suffix == ".index" else 12
        wanted = (built.name(path), position // width * width, "unit-log" if width == UNIT_SIZE else "entry-log")
        assert wanted in found(report), (path, position)
        assert len(report.findings) <= 4
        assert {finding.file for finding in report.findings.kept} == {built.name(path)}
        path.write_bytes(data)
    assert kinds(check(built.data, deep=True)) == {}


# --- what the frontier says ---


@pytest.mark.parametrize(("field", "by"), [(3, 1), (4, -1), (4, 1), (5, -1), (5, 1)])
def test_each_number_of_a_queue(built: Built, field: int, by: int) -> None:
    row = list(built.marks[3])
    row[field] += by
    built.change_frontier(queues=(*built.marks[:3], type(built.marks[3])(*row), *built.marks[4:]))
    assert kinds(check(built.data, deep=True))


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize("at", [1, -1])
def test_each_number_of_a_segment_and_of_the_growing_one(built: Built, number: int, by: int, at: int) -> None:
    sparse = built.frontier.sparse
    assert sparse is not None
    assert sparse.active is not None
    row = list(sparse.segments[at])
    if number:
        row[number] += by
        segments = list(sparse.segments)
        segments[at] = type(sparse.segments[0])(*row)
        built.change_frontier(sparse=sparse._replace(segments=tuple(segments)))
        assert kinds(check(built.data, deep=True))
    active = list(sparse.active)
    active[number] += by
    built.change_frontier(sparse=sparse._replace(active=type(sparse.active)(*active)))
    assert kinds(check(built.data, deep=True))


def test_units_called_expired_that_the_log_still_has(built: Built) -> None:
    marks = list(built.marks)
    marks[2] = marks[2]._replace(min_offset=5)
    built.change_frontier(queues=tuple(marks))
    report = check(built.data, deep=True)
    assert found(report) == [(built.name(built.queue_file(marks[2], 0)), 0, "queue-min")]
    assert "is in the log, and called expired" in report.findings.kept[0].text


def test_queues_and_segments_that_the_frontier_leaves_out(built: Built) -> None:
    sparse = built.frontier.sparse
    assert sparse is not None
    mark, segment = built.marks[0], sparse.segments[1]
    (built.data / "abort").write_bytes(b"1")
    segments = tuple(one for one in sparse.segments if one != segment)
    built.change_frontier(queues=built.marks[1:], sparse=sparse._replace(segments=segments))
    report = check(built.data, deep=True)
    assert found(report) == [
        (built.name(built.queue_file(mark, 0)), 0, "unit-log"),
        (built.name(built.pair_of(segment.base)[0]), 0, "entry-log"),
    ]
    assert "the unit is none" in report.findings.kept[0].text
    assert "the frontier names no sparse indexes of it" in report.findings.kept[1].text


def test_queues_and_segments_of_which_the_log_has_nothing(built: Built) -> None:
    # The same frontier over a log that ends earlier: its last segment is gone, the end cut off the one before.
    store = built.root / "shorter"
    shutil.copytree(built.store, store)
    log = frames(built.store, SEGMENT_SIZE)
    last = log[-1].phy_offset // SEGMENT_SIZE * SEGMENT_SIZE
    (store / "commitlog" / segment_name(last)).unlink()
    built.change_frontier(commit_log_paths=(str(store / "commitlog"),))
    report = check(built.data, deep=True)
    assert kinds(report) == {"log-end": 1, "entry-behind-log": 1}
    assert "queues and sparse indexes were not compared from there on" in " ".join(report.notes)


# --- hostile ---


def no_traceback(data: Path) -> Report | None:
    try:
        return check(data, deep=True)
    except IndexdError:
        return None


def test_bytes_of_every_kind_are_no_more_than_findings(built: Built) -> None:
    rand = random.Random(9)
    rows = live_bytes(built)
    for _ in range(25):
        saved = {}
        for path, size in rand.choices(rows, k=3):
            saved.setdefault(path, path.read_bytes())
            block = rand.choice([bytes(64), b"\xff" * 64, b"\x7f" * 64, rand.randbytes(64), b"\x80" + bytes(63)])
            change(path, rand.randrange(size), block)
            if rand.randrange(4) == 0:
                path.write_bytes(path.read_bytes()[: rand.randrange(size)])
        report = no_traceback(built.data)
        assert report is not None
        assert len(report.findings) > 0
        for path, data in saved.items():
            path.write_bytes(data)
    assert kinds(check(built.data, deep=True)) == {}


def test_after_an_unclean_stop_what_is_behind_the_marks_is_nobodys(built: Built) -> None:
    (built.data / "abort").write_bytes(b"1")
    mark = next(mark for mark in built.marks if mark.max_offset % UNITS)
    change(built.queue_file(mark, mark.max_offset), mark.max_offset % UNITS * UNIT_SIZE, b"\x07" * UNIT_SIZE)
    assert built.frontier.sparse is not None
    change(built.pair(-1)[0], built.frontier.sparse.segments[-1].offset_entries * 8, b"\x07" * 8)
    for name in ("Topic/0", "TopicTest/77"):
        (built.data / "consumequeue" / name).mkdir(parents=True)
        (built.data / "consumequeue" / name / f"{0:020d}").write_bytes(b"half")
    (built.data / "sparse" / f"{SEGMENT_SIZE * 50:020d}.timeindex").write_bytes(b"")
    assert kinds(check(built.data, deep=True)) == {}


def expire(built: Built, segments: int, store: Path) -> None:
    """The same log without its first segments, and a data directory that still knows all of it."""
    shutil.copytree(built.store, store)
    for number in range(segments):
        (store / "commitlog" / segment_name(number * SEGMENT_SIZE)).unlink()
    built.change_frontier(commit_log_paths=(str(store / "commitlog"),))


@pytest.mark.parametrize("segments", [1, 2, 3])
def test_messages_that_have_expired(built: Built, segments: int) -> None:
    expire(built, segments, built.root / "expired")
    report = check(built.data, deep=True)
    assert kinds(report) == {}
    assert "which have expired" in " ".join(report.notes)
    # Damage to units of messages that the log still has is found, to others it is not, but to their order.
    last = built.queue_file(built.marks[0], built.marks[0].max_offset - 1)
    change(last, (built.marks[0].max_offset - 1) % UNITS * UNIT_SIZE + 15, b"\x09")
    change(built.queue_file(built.marks[1], 0), 15, b"\x09")
    assert [(file, what) for file, _, what in found(check(built.data, deep=True))] == [(built.name(last), "unit-log")]


@pytest.mark.parametrize("segments", [1, 2, 3])
def test_files_that_went_with_them(built: Built, segments: int) -> None:
    store = built.root / "expired"
    expire(built, segments, store)
    named_for(store, built.data)
    write(store, over_queues(5, 2), SEGMENT_SIZE)
    reopen(config_for(store, built.data, sparse_interval=1000))
    assert built.frontier.sparse is not None
    assert built.frontier.sparse.segments[0].base == segments * SEGMENT_SIZE
    report = check(built.data, deep=True)
    assert kinds(report) == {}
    if segments > 1:
        assert max(mark.first_offset for mark in built.marks) > 0


def test_an_output_that_was_asked_for_later(built: Built) -> None:
    config = config_for(built.store, built.data, sparse_interval=1000, consume_queue="false")
    reopen(config)
    assert built.frontier.queues is None
    assert kinds(check(built.data, deep=True)) == {}
    reopen(config_for(built.store, built.data, sparse_interval=1000))
    report = check(built.data, deep=True)
    assert (kinds(report), report.notes) == ({}, [])
    assert report.queues == 16


def test_verified_while_other_outputs_are_asked_for(built: Built, base: Built) -> None:
    for flags in (("--consume-queue", "false", "--sparse", "false"), ("--sparse", "false")):
        done = indexd_here("verify", "--deep", "--data", built.data, *flags)
        assert (done.returncode, "units of 16 queues" in done.stdout) == (0, True), done.stdout


def test_a_refill_that_was_broken_off(built: Built) -> None:
    built.change_frontier(refill_offset=SEGMENT_SIZE)
    frontier = built.frontier
    full = [mark for mark in frontier.index if mark.full]
    times = (frontier.store_timestamp, 0, full[-1].header.end_timestamp)
    (built.data / "checkpoint").write_bytes(StoreCheckpoint(*times, 0, frontier.phy_offset).pack())
    (built.data / "abort").write_bytes(b"1")
    change(built.queue_file(built.marks[0], 0), 15, b"\x09")
    report = check(built.data, deep=True)
    assert kinds(report) == {}
    assert f"they are filled up to {SEGMENT_SIZE} only" in " ".join(report.notes)


def take_all(pipeline: Pipeline, reader: LogReader) -> None:
    for item in WholeLog(reader):
        pipeline.apply([item], 0)


@pytest.mark.parametrize(
    ("call", "folder", "after"),
    [
        ("allocate", "index", 1),
        ("pwrite", "consumequeue", 3),
        ("pwrite", "consumequeue", 20),
        ("truncate", "consumequeue", 9),
        ("pwrite", "sparse", 2),
        ("truncate", "sparse", 2),
        ("truncate", "sparse", 5),
    ],
)
def test_a_daemon_that_waits_for_the_disk_in_the_middle_of_a_drain(
    base: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, folder: str, after: int
) -> None:
    calls = 0

    def refuse(do: Any) -> Any:
        def called(self: DiskFile, *args: Any) -> None:
            nonlocal calls
            calls += folder in self.path.parts
            if folder in self.path.parts and calls > after:
                raise DiskError(call, self.path, OSError(errno.ENOSPC, "No space left on device"))
            do(self, *args)

        return called

    disk, config = Disk(), config_for(base.store, tmp_path / "data", sparse_interval=50)
    disk.make_dir(config.store.data)
    with monkeypatch.context() as patch:
        opened = open_data(config, disk, lambda *_: None, unclean=False)
        write_abort(disk, config.store.data / "abort")
        pipeline = opened.pipeline
        opened.reader.set_options(once(reader_options(config)))
        patch.setattr(DiskFile, call, refuse(getattr(DiskFile, call)))
        with pytest.raises(DiskError):
            take_all(pipeline, opened.reader)
    # A stop, say, as soon as the disk does what it is asked for again.
    pipeline.persist(pipeline.mark())
    opened.reader.close()
    pipeline.close()
    for deep_too in (False, True):
        report = check(config.store.data, deep=deep_too)
        assert kinds(report) == {}
    assert report.compared is not None
    assert report.compared.messages < 3000
    # And the next start takes up from there.
    reopen(config, unclean=True)
    assert_same_index(config.store.data, undisturbed(config, tmp_path / "whole"))


def test_ranges_that_are_not_covered(tmp_path: Path) -> None:
    store, data = tmp_path / "store", tmp_path / "data"
    with CommitLogWriter(store / "commitlog", SEGMENT_SIZE) as writer:
        endless = messages(3)
        offsets = [writer.append(next(endless)) for _ in range(2000)]
    segment = store / "commitlog" / segment_name(0)
    whole = segment.read_bytes()
    change(segment, offsets[300] + 20, bytes(offsets[310] - offsets[300]))
    config = config_for(store, data, on_corrupt="skip", sparse_interval=1000)
    undisturbed(config, data)
    built = Built(store, data)
    assert len(built.frontier.uncovered) == 1
    report = check(data, deep=True)
    assert kinds(report) == {}
    assert "not covered" in report.notes[0]
    # Nor is what stands there held against them once it can be read again.
    segment.write_bytes(whole)
    assert kinds(check(data, deep=True)) == {}
    # But what is behind it is compared.
    path, size = live_bytes(built)[0]
    change(path, size - 3, b"\x55")
    assert (built.name(path), size - UNIT_SIZE, "unit-log") in found(check(data, deep=True))


@pytest.mark.parametrize("which", ["queue", "sparse"])
def test_files_that_expire_while_they_are_compared(built: Built, which: str) -> None:
    ground = look(Disk(), DataFiles(built.data))
    mark = built.marks[0]
    for path in (built.queue_file(mark, 0),) if which == "queue" else built.pair(0):
        path.unlink()
    findings = Findings()
    config = config_for(built.store, built.data)
    compared = whole.DeepComparison(config, Disk(), ground, findings).run(lambda _: None)
    assert len(findings) == 0
    text = "1 queues were not compared to their ends" if which == "queue" else "2 files of sparse indexes"
    assert text in " ".join(compared.left_out)


def test_another_interval_of_broken_bytes_ends_the_comparison(built: Built) -> None:
    store = built.root / "torn"
    shutil.copytree(built.store, store)
    change(store / "commitlog" / segment_name(SEGMENT_SIZE), 5000, bytes(3000))
    built.change_frontier(commit_log_paths=(str(store / "commitlog"),))
    report = check(built.data, deep=True)
    assert kinds(report) == {}
    assert "queues and sparse indexes were not compared from there on" in " ".join(report.notes)
    # What came before it was.
    change(built.queue_file(built.marks[0], 0), 15, b"\x09")
    assert kinds(check(built.data, deep=True)) == {"unit-log": 1}


def test_a_key_index_that_is_given_up_does_not_end_it(built: Built) -> None:
    for path in (built.data / "index").iterdir():
        change(path, 40 + 4 * 500, bytes(range(251)) * 300)
    change(built.queue_file(built.marks[0], 0), 15, b"\x09")
    change(built.pair(-1)[0], 4, b"\x09")
    report = check(built.data, deep=True)
    assert report.compared is not None
    assert {"unit-log", "entry-log"} <= kinds(report).keys()


@settings(max_examples=25)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 3), st.integers(-3, 9), st.integers(0, 900), st.integers(-50, 50)), max_size=60
    ),
    begins=st.lists(st.sampled_from([0, 0, 1, 3, 4, 8, 1000]), min_size=4, max_size=4),
    interval=st.sampled_from([0, 1, 300, 4096]),
    upto=st.integers(0, 3),
)
def test_whatever_a_broker_writes_nothing_is_wrong(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[int, int, int, int]],
    begins: list[int],
    interval: int,
    upto: int,
) -> None:
    """Queues that start late, queue offsets that repeat or jump, clocks that go back, segments that expire."""
    root = tmp_path_factory.mktemp("any")
    store, data = root / "store", root / "data"
    with CommitLogWriter(store / "commitlog", SEGMENT) as writer:
        for number, (queue, step, body, time) in enumerate(rows):
            key = ("T", queue)
            known = writer.queue_offsets.get(key, begins[queue])
            writer.queue_offsets[key] = max(known + (step if step in (-1, 2) else 0), 0)
            writer.append(spec(number, "T", queue, time=T0 + time, body=body))
    config = config_for(store, data, segment_size=SEGMENT, consume_queue_file_size=80, sparse_interval=interval)
    undisturbed(config, data)
    for segment in sorted((store / "commitlog").iterdir())[:-1][:upto]:
        segment.unlink()
    for deep_too in (False, True):
        report = check(data, deep=deep_too)
        assert kinds(report) == {}


@pytest.mark.parametrize("name", GOLDENS)
def test_goldens(tmp_path: Path, name: str) -> None:
    golden = unpack(name, tmp_path)
    out = tmp_path / "out"
    flags = ("--segment-size", golden.segment_size, "--hash-slot-num", golden.hash_slot_num)
    sizes = ("--index-num", golden.index_num, "--consume-queue-file-size", 6000, "--sparse-interval", 500)
    words = ("rebuild", "--store", golden.root, "--data", tmp_path / "d", "--out", out, *flags, *sizes)
    assert indexd_here(*words).returncode == 0
    report = check(out, deep=True)
    assert (kinds(report), report.notes) == ({}, [])
    assert report.units > 0
    assert report.segments > 0
