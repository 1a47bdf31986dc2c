"""Catching up in large stretches: the same messages as frame by frame, with workers and without."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from support.commitlog_writer import CommitLogWriter, FrameSpec
from support.naive import naive_frames
from support.reading import drain, open_reader, patch

SEGMENT = 4 << 20
# Twice the probe: stretches of a segment are many, and each ends at a head.
READ = 64 << 10
ROWS = 2000


def write_log(directory: Path, count: int, seed: int = 1, start: int = 0) -> list[int]:
    rng = random.Random(seed)
    with CommitLogWriter(directory, SEGMENT, start_offset=start) as writer:
        return [
            writer.append(
                FrameSpec(
                    f"T{rng.randrange(5)}",
                    rng.randbytes(rng.randrange(900)),
                    {"KEYS": f"k{number} user-{rng.randrange(99)}", "TAGS": "t"},
                    store_timestamp=1_000_000 + number,
                )
            )
            for number in range(count)
        ]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("check_tail", [True, False])
def test_every_message_once_and_in_order(tmp_path: Path, workers: int, check_tail: bool) -> None:
    offsets = write_log(tmp_path, 20_000)
    reader = open_reader(
        tmp_path, segment_size=SEGMENT, read_size=READ, rows_max=ROWS, workers=workers, check_tail=check_tail
    )
    drained = drain(reader)
    assert drained.offsets == offsets
    assert len(reader.log.segments) > 2
    found = [(r.topic, r.store_timestamp, r.tags_code, r.msg_size) for r in drained.requests]
    wanted = [(m.topic, m.store_timestamp, m.tags_code, m.size) for m in naive_frames(tmp_path, SEGMENT)]
    assert found == wanted
    reader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_most_of_it_is_read_ahead(tmp_path: Path, workers: int) -> None:
    """Or the other tests here would test the ordinary way."""
    write_log(tmp_path, 8_000)
    reader = open_reader(tmp_path, segment_size=SEGMENT, read_size=READ, rows_max=ROWS, workers=workers)
    taken = []
    take = reader._ahead.take
    reader._ahead.take = lambda *a, **k: taken.append(take(*a, **k)) or taken[-1]  # type: ignore[method-assign, func-returns-value]
    drain(reader)
    assert sum(batch is not None for batch in taken) > 20
    reader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_damage_in_a_stretch_is_met_at_its_offset(tmp_path: Path, workers: int) -> None:
    offsets = write_log(tmp_path, 20_000)
    bad = next(at for at in offsets if at > SEGMENT + SEGMENT // 2)
    patch(tmp_path / f"{SEGMENT:020d}", bad - SEGMENT + 4, b"\xff\xff")
    reader = open_reader(tmp_path, segment_size=SEGMENT, read_size=READ, rows_max=ROWS, workers=workers)
    drained = drain(reader)
    assert drained.offsets == [at for at in offsets if at < bad]
    assert drained.end is not None
    assert drained.end.offset == bad
    reader.set_options(reader._options.__class__(SEGMENT, READ, ROWS, skip_corrupt=True, workers=workers))
    drain(reader, drained)
    assert drained.offsets == [at for at in offsets if at != bad]
    reader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_an_older_log_behind_the_end_is_not_taken_for_a_proof(tmp_path: Path, workers: int) -> None:
    """Frames of one size, an old log overwritten up to a half-written frame: the old heads line up behind it."""

    def spec(number: int, key: str, time: int) -> FrameSpec:
        return FrameSpec("T", b"x" * 100, {"KEYS": f"{key}{number:06d}"}, store_timestamp=time)

    with CommitLogWriter(tmp_path, SEGMENT) as writer:
        old = [writer.append(spec(number, "old", 1000 + number)) for number in range(12_000)]
    with CommitLogWriter(tmp_path, SEGMENT) as writer:
        new = [writer.append(spec(number, "new", 50_000 + number)) for number in range(6_000)]
    assert new == old[:6_000]
    # The last frame's properties are still the old ones: only its body is covered by a CRC.
    with (tmp_path / f"{0:020d}").open("rb") as file:
        file.seek(new[-1])
        frame = file.read(new[-1] - new[-2])
    patch(tmp_path / f"{0:020d}", new[-1], frame.replace(b"new", b"old"))
    reader = open_reader(tmp_path, segment_size=SEGMENT, read_size=READ, rows_max=ROWS, workers=workers)
    read: list[int] = []
    while not reader.is_settling:
        found = reader.poll()
        if hasattr(found, "columns"):
            read += found.columns.phy_offset[: found.rows].tolist()
    assert read == new[:-1]
    reader.close()


def test_what_was_read_ahead_is_forgotten_when_the_reader_goes_elsewhere(tmp_path: Path) -> None:
    offsets = write_log(tmp_path, 12_000)
    reader = open_reader(tmp_path, segment_size=SEGMENT, read_size=READ, rows_max=ROWS, workers=2)
    for _ in range(5):
        reader.poll()
    reader.position = offsets[3000]
    assert drain(reader).offsets == offsets[3000:]
    reader.close()


def test_frames_longer_than_the_probe(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    with CommitLogWriter(tmp_path, SEGMENT) as writer:
        offsets = [
            writer.append(FrameSpec("T", rng.bytes(int(size)), {"KEYS": "k"}, store_timestamp=number))
            for number, size in enumerate(rng.integers(1, 200_000, 60))
        ]
    for workers in (0, 2):
        reader = open_reader(
            tmp_path, segment_size=SEGMENT, read_size=READ, rows_max=ROWS, workers=workers, frame_size_max=1 << 20
        )
        assert drain(reader).offsets == offsets
        reader.close()
