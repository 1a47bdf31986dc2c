"""LogReader over whole and damaged logs: every message once and in order, and damage costs only what it touches."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexd.commitlog.batcher import DispatchBatch, TopicTable
from indexd.commitlog.format import MAGIC_BLANK, Corrupt, NotYetWritten, Reason
from indexd.commitlog.reader import Skipped
from indexd.errors import DisturbedError, UnsafeStoreError
from indexd.index.format import FLAVOURS
from support.beside_log import DAMAGES, damaged_log, rows_of_whole_log
from support.commitlog_writer import CommitLogWriter, FrameSpec, blank_record, encode_frame
from support.naive import naive_frames
from support.reading import READ_SIZE, SEGMENT_SIZE, Clock, Drained, drain, filled, open_reader, patch, segment
from support.strategies import Sample, logs
from support.twins import DispatchRequest, encode, naive_request


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
        assert (drained.end, reader.position) == (NotYetWritten(writer.max_offset), writer.max_offset)


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


def each(root: Path, name: Callable[[str], str], *, folder: str = "a", step: int = 1) -> None:
    """Move every segment, or every second one, to another folder or name."""
    for path in sorted((root / "a").iterdir())[::step]:
        path.rename(root / folder / name(path.name))


IN_OTHER_DIGITS = {ord("0") + n: ord("٠") + n for n in range(10)}


@pytest.mark.parametrize(
    "arrange",
    [
        pytest.param(lambda root: each(root, str, folder="b", step=2), id="spread"),
        pytest.param(lambda root: filled(root / "b", 100, body=300), id="names that an earlier directory has already"),
        pytest.param(lambda root: each(root, lambda name: name.translate(IN_OTHER_DIGITS)), id="a locale's own digits"),
        pytest.param(lambda root: (root / "a/notes.txt").write_bytes(b"x"), id="a file that is no segment"),
        pytest.param(lambda root: (root / "a/00000000000000065536.bak").write_bytes(b"x"), id="a copy"),
        pytest.param(lambda root: (root / "b" / f"{SEGMENT_SIZE:020d}").mkdir(), id="a directory of that name"),
        pytest.param(lambda root: (root / "a" / f"{10 * SEGMENT_SIZE:020d}").touch(), id="a segment about to be made"),
    ],
)
def test_which_files_are_the_log(tmp_path: Path, arrange: Callable[[Path], object]) -> None:
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
_AHEAD = {"segment_size": _LONG, "read_size": 64 << 10, "rows_max": 2000, "frame_size_max": 1 << 20}


@pytest.fixture(scope="module")
def long_log(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[DispatchRequest]]:
    """A log of three segments, and its messages as the naive check reads them; some are longer than the probe."""
    rng, directory = random.Random(1), tmp_path_factory.mktemp("long")
    with CommitLogWriter(directory, _LONG) as writer:
        for number in range(9000):
            properties = {"KEYS": f"k{number} user-{rng.randrange(99)}", "TAGS": "t"}
            body = rng.randbytes(rng.randrange(1400) if number % 300 else 100_000)
            writer.append(FrameSpec(f"T{rng.randrange(5)}", body, properties, store_timestamp=1_000_000 + number))
    assert writer.max_offset > 2 * _LONG
    return directory, [naive_request(found, FLAVOURS["5.4"]) for found in naive_frames(directory, _LONG)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("check_tail", [True, False])
def test_every_message_once_and_in_order(
    long_log: tuple[Path, list[DispatchRequest]], workers: int, check_tail: bool
) -> None:
    directory, wanted = long_log
    reader = open_reader(directory, **_AHEAD, workers=workers, check_tail=check_tail)
    assert drain(reader).requests == wanted
    # What was read ahead is forgotten when the reader goes elsewhere.
    reader.position = wanted[1000].commit_log_offset
    for _ in range(5):
        reader.poll()
    reader.position = wanted[7000].commit_log_offset
    assert drain(reader).requests == wanted[7000:]


@pytest.mark.parametrize("workers", [0, 2])
def test_damage_in_a_stretch_is_met_at_its_offset(
    long_log: tuple[Path, list[DispatchRequest]], tmp_path: Path, workers: int
) -> None:
    directory = shutil.copytree(long_log[0], tmp_path / "damaged")
    offsets = [request.commit_log_offset for request in long_log[1]]
    bad = next(at for at in offsets if at > _LONG + _LONG // 2)
    patch(directory / f"{_LONG:020d}", bad - _LONG + 4, b"\xff\xff")
    reader = open_reader(directory, **_AHEAD, workers=workers)
    drained = drain(reader)
    assert drained.offsets == [at for at in offsets if at < bad]
    assert drained.end == Corrupt(bad, Reason.BAD_MAGIC.text, directory / f"{_LONG:020d}")
    reader.options = replace(reader.options, skip_corrupt=True)
    assert drain(reader, drained).offsets == [at for at in offsets if at != bad]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_older_log_behind_the_end_is_not_taken_for_a_proof(tmp_path: Path, workers: int) -> None:
    """Frames of one size, an old log overwritten up to a half-written frame: the old heads line up behind it."""

    def spec(number: int, key: str, time: int) -> FrameSpec:
        return FrameSpec("T", b"x" * 100, {"KEYS": f"{key}{number:06d}"}, store_timestamp=time)

    with CommitLogWriter(tmp_path, _LONG) as writer:
        old = [writer.append(spec(number, "old", 1000 + number)) for number in range(6_000)]
    with CommitLogWriter(tmp_path, _LONG) as writer:
        new = [writer.append(spec(number, "new", 50_000 + number)) for number in range(3_000)]
    assert new == old[:3_000]
    # The last frame's properties are still the old ones: only its body is covered by a CRC.
    frame = (tmp_path / f"{0:020d}").read_bytes()[new[-1] : old[3_000]]
    patch(tmp_path / f"{0:020d}", new[-1], frame.replace(b"new", b"old"))
    reader, drained = open_reader(tmp_path, **_AHEAD, workers=workers), Drained()
    while not reader.settling_size:
        found = reader.poll()
        if isinstance(found, DispatchBatch):
            drained.take(found)
    assert drained.offsets == new[:-1]


WIDE = 1 << 20


def flip(directory: Path, offset: int, segment_size: int = SEGMENT_SIZE) -> None:
    path = directory / f"{offset - offset % segment_size:020d}"
    patch(path, offset % segment_size, bytes([path.read_bytes()[offset % segment_size] ^ 1]))


def in_segment(offsets: list[int], base: int) -> list[int]:
    return [offset for offset in offsets if base <= offset < base + SEGMENT_SIZE]


# --- corrupt in a closed segment ---


def test_stop_stands_at_the_first_corrupt_byte(tmp_path: Path) -> None:
    offsets = filled(tmp_path, 400)
    at = in_segment(offsets, SEGMENT_SIZE)[7]
    flip(tmp_path, at + 5)
    reader = open_reader(tmp_path)
    drained = drain(reader)
    assert drained.end == Corrupt(at, Reason.BAD_MAGIC.text, tmp_path / f"{SEGMENT_SIZE:020d}")
    assert drained.offsets == [offset for offset in offsets if offset < at]
    assert drain(reader).end == drained.end
    # Mended, it goes on by itself.
    flip(tmp_path, at + 5)
    assert drain(reader).offsets == [offset for offset in offsets if offset >= at]


@pytest.mark.parametrize("where", [0, 3, 5, 30, 84, 87, 88 + 500, 88 + 502])
def test_skip_passes_over_one_frame_and_counts_its_bytes(tmp_path: Path, where: int) -> None:
    """Its total size, magic, physical offset or a length inside it."""
    offsets = filled(tmp_path, 400)
    first = in_segment(offsets, SEGMENT_SIZE)
    flip(tmp_path, first[7] + where)
    reader = open_reader(tmp_path, skip_corrupt=True)
    drained = drain(reader)
    assert drained.offsets == [offset for offset in offsets if offset != first[7]]
    assert [(skipped.begin, skipped.end) for skipped in drained.skipped] == [(first[7], first[8])]
    assert (reader.counters.corrupt_found, reader.counters.corrupt_bytes) == (1, first[8] - first[7])


_SIZE = len(encode_frame(FrameSpec("T", bytes(500)), 0))
_LAST = (SEGMENT_SIZE - 8) // _SIZE * _SIZE
_BLANKS = [0, 8, 500, SEGMENT_SIZE, 0x7FFFFFFF, 0xFFFFFFF8]


@pytest.mark.parametrize(
    ("count", "at", "junk", "end", "reason"),
    [
        # Nothing is left of a segment, and some frames of it are zeros.
        (400, _LAST, b"\7" * (SEGMENT_SIZE - _LAST), SEGMENT_SIZE, Reason.BAD_MAGIC),
        (400, 5 * _SIZE, bytes(4 * _SIZE), 9 * _SIZE, Reason.ZEROS_BEFORE_END),
        # A blank record of another length costs one frame and not the rest, in a closed segment and in another.
        *(
            (count, 40 * _SIZE, left.to_bytes(4, "big") + MAGIC_BLANK.to_bytes(4, "big"), 41 * _SIZE, Reason.BAD_BLANK)
            for left in _BLANKS
            for count in (80, 200)
        ),
    ],
)
def test_where_a_reader_stops_and_what_it_skips(
    tmp_path: Path, count: int, at: int, junk: bytes, end: int, reason: Reason
) -> None:
    offsets = filled(tmp_path, count)
    patch(tmp_path / f"{0:020d}", at, junk)
    assert drain(open_reader(tmp_path, corrupt_after=0.0)).end == Corrupt(at, reason.text, tmp_path / f"{0:020d}")
    drained = drain(open_reader(tmp_path, skip_corrupt=True, corrupt_after=0.0))
    assert drained.skipped == [Skipped(at, end, reason.text)]
    assert drained.offsets == [offset for offset in offsets if not at <= offset < end]


def skipped_between(
    tmp_path: Path, first: bytes, junk: bytes, last: bytes = b"", size: int = SEGMENT_SIZE
) -> tuple[list[int], list[Skipped]]:
    """The messages and what was skipped of a closed segment that holds these, and of the next one's only message."""
    data = first + junk + last
    segment(tmp_path, 0, data + (blank_record(size - len(data)) if last else b""), size)
    segment(tmp_path, size, encode_frame(FrameSpec("T"), size), size)
    drained = drain(open_reader(tmp_path, segment_size=size, skip_corrupt=True))
    return drained.offsets, drained.skipped


@pytest.mark.parametrize("left", [1, 7, 8, 35, 40])
def test_a_closed_segment_without_a_blank_record(tmp_path: Path, left: int) -> None:
    """Nothing a broker leaves; what is left of the segment may be too short even for a head."""
    first = encode_frame(FrameSpec("T", b"x" * (SEGMENT_SIZE - left - len(encode_frame(FrameSpec("T"), 0)))), 0)
    reason = Reason.CUT_OFF if left < 8 else Reason.ZEROS_BEFORE_END
    skipped = [Skipped(len(first), SEGMENT_SIZE, reason.text)]
    assert skipped_between(tmp_path, first, b"") == ([0, SEGMENT_SIZE], skipped)
    assert drain(open_reader(tmp_path)).end == Corrupt(len(first), reason.text, tmp_path / f"{0:020d}")


@pytest.mark.parametrize("gap", [100, *range(READ_SIZE - 40, READ_SIZE + 41, 8), 3 * READ_SIZE - 1, 5 * READ_SIZE + 17])
def test_the_next_frame_is_found_across_reads(tmp_path: Path, gap: int) -> None:
    """Wherever its head lies to the windows that are searched; in a segment of 16 of them."""
    first = encode_frame(FrameSpec("T", b"first"), 0)
    at = len(first) + gap
    frames = encode([Sample(FrameSpec("T", b"x" * size)) for size in (10, 2 * READ_SIZE, 10)], at)
    offsets, skipped = skipped_between(tmp_path, first, b"\7" * gap, frames, WIDE)
    assert skipped == [Skipped(len(first), at, Reason.BAD_MAGIC.text)]
    assert (len(offsets), offsets[:2]) == (5, [0, at])


def test_only_a_frame_that_proves_itself_ends_the_search(tmp_path: Path) -> None:
    """Its magic, its own offset, its lengths and its CRC; a body may hold any bytes, frames among them."""
    first = encode_frame(FrameSpec("T", b"first"), 0)
    at = len(first)
    elsewhere = encode_frame(FrameSpec("T", b"copied"), 0)
    denied = encode_frame(FrameSpec("T", b"denied"), at + 8 + len(elsewhere)).replace(b"denied", b"deniee")
    junk = b"\7" * 8 + elsewhere + denied
    proven = encode_frame(FrameSpec("T", b"proven"), at + len(junk))
    skipped = [Skipped(at, at + len(junk), Reason.BAD_MAGIC.text)]
    assert skipped_between(tmp_path, first, junk, proven) == ([0, at + len(junk), SEGMENT_SIZE], skipped)


@given(st.data())
def test_any_damage_costs_only_the_frames_it_touches(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        offsets = filled(directory, 300, body=300)
        end = offsets[-1] - offsets[-1] % SEGMENT_SIZE
        begin = data.draw(st.integers(0, end - 1))
        size = min(data.draw(st.integers(1, 5000)), end - begin, SEGMENT_SIZE - begin % SEGMENT_SIZE)
        path = directory / f"{begin - begin % SEGMENT_SIZE:020d}"
        junk = data.draw(st.sampled_from([b"\0", b"\7", b"\xff"])) * size
        patch(path, begin % SEGMENT_SIZE, junk)
        reader = open_reader(directory, skip_corrupt=True, verify_crc=True)
        drained = drain(reader)
        frame = offsets[1] - offsets[0]
        touched = {offset for offset in offsets if offset < begin + size and begin < offset + frame}
        lost = set(offsets) - set(drained.offsets)
        assert lost <= touched
        assert drained.offsets == [offset for offset in offsets if offset not in lost]
        assert isinstance(drained.end, NotYetWritten)
        assert all(any(skip.begin <= offset < skip.end for skip in drained.skipped) for offset in lost)
        assert reader.counters.corrupt_bytes == sum(skip.end - skip.begin for skip in drained.skipped)


# --- CRCs of closed segments ---


@pytest.mark.parametrize(
    ("verify", "until", "bad"),
    [(False, 0, 0), (True, 0, 2), (False, SEGMENT_SIZE - 1, 0), (False, SEGMENT_SIZE, 1), (False, 2 * SEGMENT_SIZE, 2)],
)
def test_bodies_of_closed_segments_are_checked_where_that_is_asked_for(
    tmp_path: Path, verify: bool, until: int, bad: int
) -> None:
    """In all of them, or in those that recovery reads."""
    offsets = filled(tmp_path, 400)
    flipped = [in_segment(offsets, base)[3] for base in (0, SEGMENT_SIZE)]
    for offset in flipped:
        flip(tmp_path, offset + 100)
    reader = open_reader(tmp_path, skip_corrupt=True, verify_crc=verify)
    reader.check_until = until
    drained = drain(reader)
    found = [(skip.begin, skip.reason) for skip in drained.skipped]
    assert found == [(offset, Reason.BODY_CRC.text) for offset in flipped][:bad]
    assert len(drained.offsets) == len(offsets) - bad


@pytest.mark.parametrize("closed", [False, True])
def test_a_frame_larger_than_believed_is_corrupt(tmp_path: Path, closed: bool) -> None:
    data = encode([Sample(FrameSpec("T", b"x" * size)) for size in (10, 2000, 10)])
    segment(tmp_path, 0, data + blank_record(SEGMENT_SIZE - len(data)))
    if closed:
        segment(tmp_path, SEGMENT_SIZE, encode_frame(FrameSpec("T"), SEGMENT_SIZE))
    end = drain(open_reader(tmp_path, frame_size_max=1000, corrupt_after=0.0)).end
    assert (type(end), getattr(end, "reason", "")) == (Corrupt, Reason.BAD_TOTAL_SIZE.text)


# --- expiry and gaps ---


@pytest.mark.parametrize("interval", [0.0, 1000.0])
@pytest.mark.parametrize("gone", [1, 2, 3])
def test_segments_that_expire_under_the_reader(tmp_path: Path, gone: int, interval: float) -> None:
    """The one that is open is read to its end; what went after it is passed over as expired."""
    offsets = filled(tmp_path, 600)
    reader = open_reader(tmp_path, rows_max=5, list_interval=interval)
    first = Drained()
    first.take(reader.poll())
    for number in range(gone):
        (tmp_path / f"{number * SEGMENT_SIZE:020d}").unlink()
    drained = drain(reader)
    if interval:
        # Where a file turns out to be gone, the list is made again for the next poll.
        drained = drain(reader, into=drained)
    left = [offset for offset in offsets if offset < SEGMENT_SIZE or offset >= gone * SEGMENT_SIZE]
    assert first.offsets + drained.offsets == left
    assert [(skip.begin, skip.end) for skip in drained.skipped] == [(SEGMENT_SIZE, gone * SEGMENT_SIZE)][: gone - 1]
    assert reader.counters.expired_bytes == (gone - 1) * SEGMENT_SIZE
    assert drained.end == NotYetWritten(reader.position)


def test_a_missing_segment_in_the_middle(tmp_path: Path) -> None:
    offsets = filled(tmp_path, 600)
    (tmp_path / f"{SEGMENT_SIZE:020d}").unlink()
    reader = open_reader(tmp_path)
    end = drain(reader).end
    assert (getattr(end, "offset", 0), "missing" in getattr(end, "reason", "")) == (SEGMENT_SIZE, True)
    skipping = open_reader(tmp_path, skip_corrupt=True)
    drained = drain(skipping)
    assert [(skip.begin, skip.end) for skip in drained.skipped] == [(SEGMENT_SIZE, 2 * SEGMENT_SIZE)]
    assert drained.offsets == [offset for offset in offsets if offset // SEGMENT_SIZE != 1]
    assert (skipping.counters.corrupt_bytes, skipping.counters.expired_bytes) == (SEGMENT_SIZE, 0)
    # Put back, the one that stopped goes on.
    filled(tmp_path / "again", 600)
    (tmp_path / "again" / f"{SEGMENT_SIZE:020d}").rename(tmp_path / f"{SEGMENT_SIZE:020d}")
    assert drain(reader).offsets == [offset for offset in offsets if offset >= SEGMENT_SIZE]


@pytest.mark.parametrize("damage", DAMAGES, ids=str)
def test_a_reader_goes_on_behind_whole_segments_that_are_unreadable(tmp_path: Path, damage: tuple[str, ...]) -> None:
    end = damaged_log(tmp_path, damage)
    assert end - rows_of_whole_log(tmp_path)[-1] < 1000
