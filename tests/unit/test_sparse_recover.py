"""What is kept of sparse indexes after a crash, a cut or damage, and that building goes on to the undisturbed files."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexd.errors import DiskError
from indexd.flush.pipeline import sync_dirs, sync_files
from indexd.output import OutputRecovery
from indexd.sparse.format import SparseMark
from indexd.sparse.service import SparseService
from indexd.storage.disk import Disk
from support.output_recovery import carried_out, made_durable, planned_sparse
from support.sim_disk import SimDisk
from support.sim_fault import SimCrash
from support.sparse_log import SEGMENT_SIZE, Row, batch_of, batches_of, expected_files, log_rows

INTERVALS = st.sampled_from([0, 91, 300, 1000])
SPLITS = st.lists(st.integers(1, 12), min_size=1, max_size=4)
ROOT = Path("/simulated")


def rows_of(segments: int, each: int = 30) -> list[Row]:
    return [
        (SEGMENT_SIZE * segment + 100 * number, 100, 1000 * segment + number)
        for segment in range(segments)
        for number in range(each)
    ]


def built(disk: Disk, directory: Path, rows: Sequence[Row], interval: int = 300) -> SparseMark:
    """Build, and close as a clean stop does."""
    service = SparseService(disk, directory, SEGMENT_SIZE, interval)
    service.build(batch_of(rows))
    mark: SparseMark = made_durable(disk, service).held
    service.close()
    return mark


def recovered(
    disk: Disk, directory: Path, mark: SparseMark, phy_offset: int, log_begin: int = 0
) -> OutputRecovery[SparseMark]:
    """Plan, and do it; a second plan has nothing to do."""
    first = planned_sparse(disk, directory, SEGMENT_SIZE, mark, phy_offset, log_begin=log_begin)
    carried_out(disk, first)
    second = planned_sparse(disk, directory, SEGMENT_SIZE, first.held, phy_offset, log_begin=log_begin)
    assert (second.held, second.delete, second.cut, second.reasons) == (first.held, (), (), ())
    return first


def go_on(
    disk: Disk, directory: Path, done: OutputRecovery[SparseMark], rows: Sequence[Row], interval: int = 300
) -> None:
    """Read the log again as far as needed, and on; the files are those of an undisturbed build."""
    service = SparseService(disk, directory, SEGMENT_SIZE, interval)
    service.load(done.held)
    begin = done.held.phy_offset if done.refill_from is None else done.refill_from
    left = [row for row in rows if row[0] >= begin]
    if left:
        service.build(batch_of(left))
    mark = service.mark().held
    service.close()
    found = {}
    for segment in mark.segments:
        for name, size in (
            (f"{segment.base:020d}.index", 8 * segment.offset_entries),
            (f"{segment.base:020d}.timeindex", 12 * segment.time_entries),
        ):
            data = disk.read(directory / name)
            assert not any(data[size:])
            assert segment is mark.segments[-1] or len(data) == size
            found[name] = data[:size]
    assert found == expected_files(rows, interval)
    assert found.keys() == {name for name, _ in disk.list_dir(directory)}


def test_a_clean_stop_leaves_nothing_to_do(tmp_path: Path) -> None:
    rows = rows_of(3)
    mark = built(Disk(), tmp_path, rows)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    done = recovered(Disk(), tmp_path, mark, mark.phy_offset)
    assert (done.held, done.refill_from, done.delete, done.reasons) == (mark, None, (), ())
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    go_on(Disk(), tmp_path, done, rows)


def test_no_directory_and_an_empty_mark(tmp_path: Path) -> None:
    done = planned_sparse(Disk(), tmp_path / "none", SEGMENT_SIZE, SparseMark(300), 12345, log_begin=0)
    assert (done.held, done.refill_from, done.delete) == (SparseMark(300), None, ())
    carried_out(Disk(), done)
    assert not list(tmp_path.iterdir())


def test_what_no_mark_names_goes_and_what_is_not_ours_stays(tmp_path: Path) -> None:
    mark = built(Disk(), tmp_path, rows_of(2))
    for name in (
        f"{9 * SEGMENT_SIZE:020d}.index",
        f"{5:020d}.timeindex",
        "notes.txt",
        f"{5:020d}.index.deleted",
        "5.index",
    ):
        (tmp_path / name).write_bytes(b"x")
    done = recovered(Disk(), tmp_path, mark, mark.phy_offset)
    assert {path.name for path in done.delete} == {f"{9 * SEGMENT_SIZE:020d}.index", f"{5:020d}.timeindex"}
    assert {"notes.txt", f"{5:020d}.index.deleted", "5.index"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize(
    "damage",
    ["missing", "missing time", "short", "long", "position", "offset", "time offset", "timestamp", "active short"],
)
def test_what_does_not_hold_is_built_again_with_all_behind(damage: str, tmp_path: Path) -> None:
    rows = rows_of(4)
    mark = built(Disk(), tmp_path, rows)
    number = 3 if damage in ("timestamp", "active short") else 1
    base = number * SEGMENT_SIZE
    index, time_index = tmp_path / f"{base:020d}.index", tmp_path / f"{base:020d}.timeindex"
    size, time_size = 8 * mark.segments[number].offset_entries, 12 * mark.segments[number].time_entries
    data, time_data = bytearray(index.read_bytes()), bytearray(time_index.read_bytes())
    match damage:
        case "missing":
            index.unlink()
        case "missing time":
            time_index.unlink()
        case "short":
            index.write_bytes(data[:-8])
        case "long":
            time_index.write_bytes(time_data + bytes(12))
        case "position":
            index.write_bytes(data[: size - 4] + bytes(4))
        case "offset":
            index.write_bytes(data[: size - 8] + b"\0\0\0\x7f" + data[size - 4 :])
        case "time offset":
            time_index.write_bytes(time_data[: time_size - 4] + b"\xff\xff\xff\xff" + time_data[time_size:])
        case "timestamp":
            time_index.write_bytes(time_data[: time_size - 5] + b"\x00" + time_data[time_size - 4 :])
        case "active short":
            index.write_bytes(data[: size - 1])
    done = recovered(Disk(), tmp_path, mark, mark.phy_offset)
    assert done.refill_from == base
    assert len(done.reasons) == 1
    assert f"{base:020d}" in done.reasons[0]
    assert done.held == SparseMark(300, base, mark.segments[:number], None)
    go_on(Disk(), tmp_path, done, rows)


@given(log_rows(), INTERVALS, st.data())
def test_a_log_that_was_cut_and_written_on(rows: list[Row], interval: int, data: st.DataObject) -> None:
    cut_at = data.draw(st.integers(0, len(rows)))
    phy_offset = rows[cut_at][0] if cut_at < len(rows) else rows[-1][0] + rows[-1][1]
    other = [(phy, size, time if at < cut_at else time ^ 1) for at, (phy, size, time) in enumerate(rows)]
    with tempfile.TemporaryDirectory() as name:
        mark = built(Disk(), Path(name), rows, interval)
        done = recovered(Disk(), Path(name), mark, phy_offset)
        assert done.held.phy_offset <= phy_offset
        read_again = phy_offset - (done.held.phy_offset if done.refill_from is None else done.refill_from)
        assert read_again < SEGMENT_SIZE or done.refill_from is None
        go_on(Disk(), Path(name), done, other, interval)


def test_segments_that_have_expired_are_left_out(tmp_path: Path) -> None:
    rows = rows_of(4)
    mark = built(Disk(), tmp_path, rows)
    (tmp_path / f"{0:020d}.index").unlink()
    done = recovered(Disk(), tmp_path, mark, mark.phy_offset, log_begin=2 * SEGMENT_SIZE)
    assert (done.held, done.refill_from) == (mark._replace(segments=mark.segments[2:]), None)
    assert len(done.delete) == 3
    go_on(Disk(), tmp_path, done, [row for row in rows if row[0] >= 2 * SEGMENT_SIZE])
    done = recovered(Disk(), tmp_path, done.held, mark.phy_offset, log_begin=9 * SEGMENT_SIZE)
    assert (done.held.segments, done.held.active, done.refill_from) == ((), None, None)


def test_bytes_behind_the_mark_become_zeros(tmp_path: Path) -> None:
    rows = rows_of(2)
    mark = built(Disk(), tmp_path, rows)
    path = tmp_path / f"{SEGMENT_SIZE:020d}.index"
    size = 8 * mark.segments[-1].offset_entries
    length = path.stat().st_size
    path.write_bytes(path.read_bytes()[:size] + bytes(20) + b"torn".ljust(length - size - 20, b"\0"))
    done = planned_sparse(Disk(), tmp_path, SEGMENT_SIZE, mark, mark.phy_offset, log_begin=0)
    assert done.cut == ((path, size, length),)
    carried_out(Disk(), done)
    assert path.stat().st_size == length
    assert not any(path.read_bytes()[size:])
    # Broken off between cutting and lengthening: the length comes back when it is opened.
    path.write_bytes(path.read_bytes()[:size])
    go_on(Disk(), tmp_path, recovered(Disk(), tmp_path, mark, mark.phy_offset), rows)
    assert path.stat().st_size == length


# --- a crash at any moment ---


@given(log_rows(max_size=40), INTERVALS, SPLITS, st.integers(0, 80), st.integers(0, 1 << 32), st.booleans())
def test_after_a_crash_at_any_change_the_last_mark_holds(
    rows: list[Row], interval: int, split: list[int], crash_at: int, seed: int, is_power_lost: bool
) -> None:
    disk = SimDisk(ROOT, seed)
    rand = random.Random(seed)
    durable = SparseMark(interval)
    disk.crash_at = crash_at
    service = SparseService(disk, ROOT, SEGMENT_SIZE, interval)
    try:
        for batch in batches_of(rows, split):
            service.build(batch)
            if rand.random() < 0.4:
                progress = service.mark()
                sync_files(disk, progress.unsynced)
                sync_dirs(disk, progress.directories)
                service.synced(progress)
                durable = progress.held
    except SimCrash:
        pass
    # The recovery is broken off, too, and done once more.
    for crash_again in (rand.randrange(6), None):
        disk.crash(rand) if is_power_lost else disk.kill()
        disk.crash_at = None if crash_again is None else disk.changes + crash_again
        try:
            done = planned_sparse(disk, ROOT, SEGMENT_SIZE, durable, durable.phy_offset, log_begin=0)
            assert (done.held, done.refill_from, done.reasons) == (durable, None, ())
            carried_out(disk, done)
        except SimCrash:
            continue
    go_on(
        disk, ROOT, planned_sparse(disk, ROOT, SEGMENT_SIZE, durable, durable.phy_offset, log_begin=0), rows, interval
    )


def test_a_disk_that_cannot_be_read_is_not_a_damaged_file(tmp_path: Path) -> None:
    class Unreadable(Disk):
        def open_read(self, path: Path):  # type: ignore[no-untyped-def]
            raise DiskError("open", path, OSError(13, "Permission denied"))

    mark = built(Disk(), tmp_path, rows_of(2))
    with pytest.raises(DiskError):
        planned_sparse(Unreadable(), tmp_path, SEGMENT_SIZE, mark, mark.phy_offset, log_begin=0)
