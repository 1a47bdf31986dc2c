"""LogReader over whole logs: every message once and in order, whatever the segments, reads and batches are cut to."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexd.commitlog.batcher import TopicTable
from indexd.commitlog.format import NotYetWritten
from indexd.errors import DisturbedError, UnsafeStoreError
from indexd.index.format import FLAVOURS
from support.commitlog_writer import CommitLogWriter, FrameSpec, blank_record, encode_frame
from support.goldens import GOLDENS, unpack
from support.naive import naive_frames
from support.reading import READ_SIZE, SEGMENT_SIZE, Clock, drain, filled, open_reader, patch, segment
from support.strategies import Sample, logs
from support.twins import encode, naive_request


@pytest.mark.parametrize("read_size", [1 << 16, 1 << 18, 4 << 20])
@pytest.mark.parametrize("name", GOLDENS)
def test_goldens_are_read_whole(name: str, read_size: int, tmp_path: Path) -> None:
    golden = unpack(name, tmp_path)
    for check_tail in (True, False):
        reader = open_reader(
            golden.root / "commitlog",
            segment_size=golden.segment_size,
            read_size=read_size,
            rows_max=1000,
            check_tail=check_tail,
            verify_crc=check_tail,
        )
        drained = drain(reader)
        rows = golden.messages()
        assert drained.offsets == [row["phyOffset"] for row in rows]
        assert [request.topic for request in drained.requests] == [row["topic"] for row in rows]
        assert isinstance(drained.end, NotYetWritten)
        assert drained.skipped == []
        assert reader.counters.messages == len(rows)
        assert reader.counters.bytes == sum(row["size"] for row in rows)


@given(logs(), st.booleans(), st.booleans(), st.integers(1, 30), st.sampled_from([1 << 14, 1 << 15]))
def test_any_log_is_read_whole(
    samples: list[Sample], clean: bool, prop_crc: bool, rows_max: int, segment_size: int
) -> None:
    """v1 and v2, IPv4 and IPv6, blank records, a segment made ahead or none."""
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        writer = CommitLogWriter(directory, segment_size, prop_crc=prop_crc)
        for sample in samples:
            sample.append(writer)
        writer.close(clean)
        expected = [naive_request(found, FLAVOURS["5.4"]) for found in naive_frames(directory, segment_size)]
        reader = open_reader(directory, segment_size=segment_size, rows_max=rows_max)
        drained = drain(reader)
        assert drained.requests == expected
        assert len(expected) == len(samples)
        assert drained.end == NotYetWritten(writer.max_offset)
        assert reader.position == writer.max_offset


def test_an_absent_next_segment_is_waited_for(tmp_path: Path) -> None:
    first = encode_frame(FrameSpec("T"), 0)
    segment(tmp_path, 0, first + blank_record(SEGMENT_SIZE - len(first)))
    clock = Clock()
    reader = open_reader(tmp_path, clock, list_interval=10.0)
    assert drain(reader).offsets == [0]
    assert reader.poll() == NotYetWritten(len(first))
    path = segment(tmp_path, SEGMENT_SIZE)
    assert reader.poll() == NotYetWritten(len(first))
    patch(path, 0, encode_frame(FrameSpec("T"), SEGMENT_SIZE))
    clock.now += 0.2  # at the end of a segment they are listed more often than every 10 s
    assert drain(reader).offsets == [SEGMENT_SIZE]


def spread(root: Path) -> None:
    """Over two directories."""
    for path in sorted((root / "a").iterdir())[::2]:
        path.rename(root / "b" / path.name)


def repeated(root: Path) -> None:
    """Names that an earlier directory has already."""
    filled(root / "b", 100, body=300)


def in_other_digits(root: Path) -> None:
    """As under a locale with digits of its own."""
    for path in sorted((root / "a").iterdir()):
        path.rename(path.with_name(path.name.translate({ord("0") + n: ord("٠") + n for n in range(10)})))


def beside_others(root: Path) -> None:
    """Files and a directory that are no segments."""
    (root / "a/notes.txt").write_bytes(b"x")
    (root / "a/00000000000000065536.bak").write_bytes(b"x")
    (root / "b" / f"{SEGMENT_SIZE:020d}").mkdir()


def followed_by_an_empty_file(root: Path) -> None:
    """A segment that is about to be made."""
    (root / "a" / f"{10 * SEGMENT_SIZE:020d}").touch()


@pytest.mark.parametrize("arrange", [spread, repeated, in_other_digits, beside_others, followed_by_an_empty_file])
def test_which_files_are_the_log(tmp_path: Path, arrange: Callable[[Path], None]) -> None:
    offsets = filled(tmp_path / "a", 300)
    (tmp_path / "b").mkdir()
    arrange(tmp_path)
    reader = open_reader([tmp_path / "a", tmp_path / "missing", tmp_path / "b"])
    assert drain(reader).offsets == offsets


_INNER = encode_frame(FrameSpec("T"), 48)
_DLEDGER = b"\0\0\0\1" + (48 + len(_INNER)).to_bytes(4, "big") + bytes(40) + _INNER


@pytest.mark.parametrize(
    ("base", "data", "size", "said"),
    [
        *(
            (SEGMENT_SIZE, b"", size, "segment_size")
            for size in (1, SEGMENT_SIZE - 1, SEGMENT_SIZE + 1, 2 * SEGMENT_SIZE)
        ),
        (SEGMENT_SIZE + 1, b"", SEGMENT_SIZE, "no multiple"),
        (0, _DLEDGER, SEGMENT_SIZE, "DLedger"),
    ],
)
@pytest.mark.parametrize("in_use", [False, True])
def test_a_segment_that_is_none_of_this_log_is_refused(
    tmp_path: Path, base: int, data: bytes, size: int, said: str, in_use: bool
) -> None:
    filled(tmp_path, 300 if base else 1)
    segment(tmp_path, base, data, size)
    if in_use:
        segment(tmp_path, 3 * SEGMENT_SIZE, b"\1" * 8)
    with pytest.raises(UnsafeStoreError, match=said) as caught:
        drain(open_reader(tmp_path))
    assert caught.value.exit_code == 3
    assert (str(size) if said == "segment_size" else f"{base:020d}") in caught.value.line()


def test_no_directory_at_all_is_refused_and_an_empty_one_waited_for(tmp_path: Path) -> None:
    with pytest.raises(UnsafeStoreError, match="no commitlog"):
        open_reader([tmp_path / "a", tmp_path / "b"]).poll()
    reader = open_reader(tmp_path)
    assert reader.poll() == NotYetWritten(0)
    # One that is made ahead is no end of the one before.
    offsets = filled(tmp_path, 3, clean=False)
    assert drain(reader).offsets == offsets
    assert drain(reader).offsets + drain(reader).offsets == []
    more = filled(tmp_path, 200, start=reader.position, clean=False)
    assert drain(reader).offsets == more
    with pytest.raises(DisturbedError, match="the log was cut: it ends at"):
        open_reader(tmp_path, position=9 * SEGMENT_SIZE).poll()


# --- reads smaller than a frame, batches smaller than a read ---

BIG = 1 << 22


@pytest.mark.parametrize("closed", [False, True])
def test_frames_larger_than_a_read(tmp_path: Path, closed: bool) -> None:
    sizes = [10, 1 << 20, 10, 1 << 19, 1 << 20]
    data = encode([Sample(FrameSpec("T", bytes([n + 1]) * size, {"KEYS": "k"})) for n, size in enumerate(sizes)])
    segment(tmp_path, 0, data + (blank_record(BIG - len(data)) if closed else b""), BIG)
    if closed:
        segment(tmp_path, BIG, encode_frame(FrameSpec("T", b"last"), BIG), BIG)
    reader = open_reader(tmp_path, segment_size=BIG, read_size=READ_SIZE)
    drained = drain(reader)
    assert [request.msg_size for request in drained.requests][:5] == [
        len(encode_frame(FrameSpec("T", bytes(size), {"KEYS": "k"}), 0)) for size in sizes
    ]
    assert len(drained.requests) == 5 + closed
    assert drained.end == NotYetWritten(BIG + len(encode_frame(FrameSpec("T", b"last"), 0)) if closed else len(data))


def test_batches_hold_no_more_rows_than_they_may(tmp_path: Path) -> None:
    offsets = filled(tmp_path, 250)
    reader = open_reader(tmp_path, rows_max=1)
    first = reader.poll()
    assert (first.begin_offset, first.end_offset, first.rows, first.keys) == (0, offsets[1], 1, 0)
    assert drain(reader).offsets == offsets[1:]


def test_a_log_of_more_topics_than_a_reader_tells_apart(tmp_path: Path) -> None:
    offsets = filled(tmp_path, 9)
    reader = open_reader(tmp_path)
    reader._batcher.topics = TopicTable(2, 0)
    with pytest.raises(UnsafeStoreError, match="topics"):
        drain(reader)
    reader._batcher.topics = TopicTable(2, 1)
    assert drain(reader).offsets == offsets


# --- catching up in large stretches: the same messages as frame by frame, with workers and without ---

_LONG = 4 << 20
# Twice the probe: stretches of a segment are many, and each ends at a head.
_READ = 64 << 10
_ROWS = 2000
_AHEAD = {"segment_size": _LONG, "read_size": _READ, "rows_max": _ROWS, "frame_size_max": 1 << 20}


def write_log(directory: Path, count: int, seed: int = 1, start: int = 0) -> list[int]:
    rng = random.Random(seed)
    with CommitLogWriter(directory, _LONG, start_offset=start) as writer:
        return [
            writer.append(
                FrameSpec(
                    f"T{rng.randrange(5)}",
                    rng.randbytes(rng.randrange(900) if number % 300 else 100_000),  # some are longer than the probe
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
    reader = open_reader(tmp_path, **_AHEAD, workers=workers, check_tail=check_tail)
    drained = drain(reader)
    assert drained.offsets == offsets
    assert len(reader.log.segments) > 2
    found = [(r.topic, r.store_timestamp, r.tags_code, r.msg_size) for r in drained.requests]
    wanted = [(m.topic, m.store_timestamp, m.tags_code, m.size) for m in naive_frames(tmp_path, _LONG)]
    assert found == wanted


@pytest.mark.parametrize("workers", [0, 2])
def test_damage_in_a_stretch_is_met_at_its_offset(tmp_path: Path, workers: int) -> None:
    offsets = write_log(tmp_path, 20_000)
    bad = next(at for at in offsets if at > _LONG + _LONG // 2)
    patch(tmp_path / f"{_LONG:020d}", bad - _LONG + 4, b"\xff\xff")
    reader = open_reader(tmp_path, **_AHEAD, workers=workers)
    drained = drain(reader)
    assert drained.offsets == [at for at in offsets if at < bad]
    assert drained.end is not None
    assert drained.end.offset == bad
    reader.set_options(reader._options.__class__(_LONG, _READ, _ROWS, skip_corrupt=True, workers=workers))
    drain(reader, drained)
    assert drained.offsets == [at for at in offsets if at != bad]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_older_log_behind_the_end_is_not_taken_for_a_proof(tmp_path: Path, workers: int) -> None:
    """Frames of one size, an old log overwritten up to a half-written frame: the old heads line up behind it."""

    def spec(number: int, key: str, time: int) -> FrameSpec:
        return FrameSpec("T", b"x" * 100, {"KEYS": f"{key}{number:06d}"}, store_timestamp=time)

    with CommitLogWriter(tmp_path, _LONG) as writer:
        old = [writer.append(spec(number, "old", 1000 + number)) for number in range(12_000)]
    with CommitLogWriter(tmp_path, _LONG) as writer:
        new = [writer.append(spec(number, "new", 50_000 + number)) for number in range(6_000)]
    assert new == old[:6_000]
    # The last frame's properties are still the old ones: only its body is covered by a CRC.
    with (tmp_path / f"{0:020d}").open("rb") as file:
        file.seek(new[-1])
        frame = file.read(new[-1] - new[-2])
    patch(tmp_path / f"{0:020d}", new[-1], frame.replace(b"new", b"old"))
    reader = open_reader(tmp_path, **_AHEAD, workers=workers)
    read: list[int] = []
    while not reader.is_settling:
        found = reader.poll()
        if hasattr(found, "columns"):
            read += found.columns.phy_offset[: found.rows].tolist()
    assert read == new[:-1]


def test_what_was_read_ahead_is_forgotten_when_the_reader_goes_elsewhere(tmp_path: Path) -> None:
    offsets = write_log(tmp_path, 12_000)
    reader = open_reader(tmp_path, **_AHEAD, workers=2)
    for _ in range(5):
        reader.poll()
    reader.position = offsets[3000]
    assert drain(reader).offsets == offsets[3000:]
