"""Commands that run once: where the log ends for them, and what unreadable bytes at its end mean."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from indexd.commitlog.batcher import DispatchBatch
from indexd.errors import CorruptDataError
from indexd.recovery.recover import WholeLog, once
from support.commitlog_writer import CommitLogWriter, FrameSpec
from support.reading import SEGMENT_SIZE, open_reader, patch


def write(directory: Path, count: int, *, times: list[int] | None = None) -> list[int]:
    with CommitLogWriter(directory, SEGMENT_SIZE) as writer:
        stamps = times or [1000 + number for number in range(count)]
        return [writer.append(FrameSpec("T", b"x" * 50, {"KEYS": f"k{at}"}, store_timestamp=at)) for at in stamps]


def read(directory: Path, *, skip_corrupt: bool = False, take_older: bool = False) -> tuple[WholeLog, list[int]]:
    import time

    reader = open_reader(directory, time.monotonic, settle=0.01, corrupt_after=5.0, skip_corrupt=skip_corrupt)
    reader.set_options(replace(once(reader._options), take_older=take_older))
    log = WholeLog(reader)
    offsets: list[int] = []
    for item in log:
        if isinstance(item, DispatchBatch):
            offsets += item.columns.phy_offset[: item.rows].tolist()
    reader.close()
    return log, offsets


def test_a_sound_log_is_read_to_its_end(tmp_path: Path) -> None:
    wanted = write(tmp_path, 30)
    log, offsets = read(tmp_path)
    assert offsets == wanted
    assert log.unreadable is None


def test_garbage_at_the_end_is_said(tmp_path: Path) -> None:
    """As a broker's crash leaves it: nothing behind it proves itself."""
    wanted = write(tmp_path, 30)
    patch(tmp_path / f"{0:020d}", wanted[-1] + 4, b"\xff" * 40)
    log, offsets = read(tmp_path)
    assert offsets == wanted[:-1]
    assert log.unreadable is not None
    assert log.unreadable.offset == wanted[-1]


def test_damage_behind_which_the_log_goes_on_is_an_error(tmp_path: Path) -> None:
    wanted = write(tmp_path, 30)
    patch(tmp_path / f"{0:020d}", wanted[20] + 4, b"\xff")
    with pytest.raises(CorruptDataError, match=f"offset {wanted[20]}"):
        read(tmp_path)
    log, offsets = read(tmp_path, skip_corrupt=True)
    assert offsets == wanted[:20] + wanted[21:]
    assert log.unreadable is None


@pytest.mark.parametrize("skip_corrupt", [False, True])
def test_what_an_older_log_left_behind_the_end_is_not_the_log(tmp_path: Path, skip_corrupt: bool) -> None:
    write(tmp_path, 30, times=list(range(100, 130)))
    with CommitLogWriter(tmp_path, SEGMENT_SIZE) as writer:
        wanted = [writer.append(FrameSpec("T", b"y" * 77, {"KEYS": "n"}, store_timestamp=at)) for at in range(500, 510)]
    log, offsets = read(tmp_path, skip_corrupt=skip_corrupt)
    assert offsets == wanted
    assert log.unreadable is not None


def test_a_clock_that_steps_back_costs_a_settle_time_and_no_message(tmp_path: Path) -> None:
    wanted = write(tmp_path, 30, times=[*range(500, 515), *range(400, 415)])
    assert read(tmp_path)[1] == wanted


def test_a_build_of_a_log_leaves_older_frames_behind_its_end_to_nobody(tmp_path: Path) -> None:
    """They may be its own: no end of the log for who takes them, but an error, or passed over and not proven."""
    older = write(tmp_path, 30, times=list(range(100, 130)))
    with CommitLogWriter(tmp_path, SEGMENT_SIZE) as writer:
        wanted = [writer.append(FrameSpec("T", b"y" * 77, {"KEYS": "n"}, store_timestamp=at)) for at in range(500, 510)]
        end = writer.max_offset
    with pytest.raises(CorruptDataError, match=f"offset {end}"):
        read(tmp_path, take_older=True)
    _, offsets = read(tmp_path, skip_corrupt=True, take_older=True)
    assert offsets == wanted + [at for at in older if at > end]


def test_zeros_before_intact_frames_are_no_end_of_a_build(tmp_path: Path) -> None:
    wanted = write(tmp_path, 30)
    patch(tmp_path / f"{0:020d}", wanted[0], bytes(wanted[1]))
    with pytest.raises(CorruptDataError, match="offset 0 "):
        read(tmp_path, take_older=True)
    assert read(tmp_path, skip_corrupt=True, take_older=True)[1] == wanted[1:]


def test_half_a_frame_before_intact_frames_is_no_end_of_a_build(tmp_path: Path) -> None:
    """Its magic is not there yet, as while a broker writes it; but frames stand behind it."""
    wanted = write(tmp_path, 30)
    patch(tmp_path / f"{0:020d}", wanted[17] + 4, bytes(4))
    with pytest.raises(CorruptDataError, match=f"offset {wanted[17]} "):
        read(tmp_path, take_older=True)
    log, offsets = read(tmp_path, skip_corrupt=True, take_older=True)
    assert offsets == wanted[:17] + wanted[18:]
    assert log.unreadable is None
