"""The end of a log that another process is writing: a frame is taken once it can no longer change, and not before."""

from __future__ import annotations

from pathlib import Path

import pytest

from indexd.commitlog.batcher import DispatchBatch
from indexd.commitlog.format import Corrupt, NotYetWritten, Reason
from indexd.commitlog.reader import LogReader, Skipped
from support.commitlog_writer import FrameSpec, blank_record, encode_frame
from support.reading import SEGMENT_SIZE, Clock, drain, open_reader, patch, segment
from support.twins import request_at

SPECS = {
    "keyed": FrameSpec("TopicA", b"hello, world", {"KEYS": "a b", "TAGS": "TagA"}, store_timestamp=1_700_000_000_000),
    "no body": FrameSpec("TopicA", b"", {"KEYS": "a b", "UNIQ_KEY": "u"}, store_timestamp=1_700_000_000_000),
    "IPv6, long": FrameSpec("L" + "x" * 199, b"x" * 300, {"KEYS": "k"}, born_host=("2001:db8::1", 1)),
    "no properties": FrameSpec("TopicA", b"hello"),
}
# A little more than the settle time, and exact in binary.
SETTLED = 0.0625
FIRST = encode_frame(FrameSpec("T", b"first"), 0)


class Tail:
    """A segment, what a broker does to it, and a reader with its clock."""

    def __init__(self, directory: Path, data: bytes = b"", **options: object) -> None:
        self.path = segment(directory, 0, data)
        self.clock = Clock()
        self.reader: LogReader = open_reader(directory, self.clock, **options)

    def after(self, seconds: float) -> object:
        """The next poll, so much later."""
        self.clock.now += seconds
        return self.reader.poll()

    def rows(self, seconds: float = 0.0) -> list[int]:
        """The offsets that the next poll brings."""
        found = self.after(seconds)
        assert isinstance(found, DispatchBatch), found
        return [request_at(found, row).commit_log_offset for row in range(found.rows)]


def waits(found: object, offset: int) -> bool:
    return isinstance(found, NotYetWritten) and found.offset == offset


# --- torn frames ---


@pytest.mark.parametrize("prop_crc", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_a_torn_newest_frame_is_not_returned_wherever_it_is_torn(name: str, prop_crc: bool, tmp_path: Path) -> None:
    """The rest is still zero: neither at once nor while it stays so, for longer than any writer takes."""
    data = encode_frame(SPECS[name], len(FIRST), prop_crc=prop_crc)
    for size in range(0, len(data.rstrip(b"\0")), 1 if len(data) < 250 else 7):
        tail = Tail(tmp_path, FIRST + data[:size])
        if size >= 36:
            assert tail.rows() == [0]
        else:
            assert waits(tail.after(0), 0)
            assert tail.rows(SETTLED) == [0]
        for seconds in (0, 0.5, 0.4375):
            assert waits(tail.after(seconds), len(FIRST)), size
        patch(tail.path, len(FIRST), data)
        assert waits(tail.after(0), len(FIRST))
        assert waits(tail.after(SETTLED / 2), len(FIRST))
        assert tail.rows(SETTLED) == [len(FIRST)]
        tail.reader.close()


@pytest.mark.parametrize("name", SPECS)
def test_bytes_that_come_in_any_order_are_not_returned_before_the_last(name: str, tmp_path: Path) -> None:
    """From the end to the front, as no writer does it."""
    data = encode_frame(SPECS[name], 0)
    for missing in (number for number in range(4, len(data), 7) if any(data[:number])):
        tail = Tail(tmp_path, bytes(missing) + data[missing:])
        for seconds in (0, 0.5, 0.4375):
            assert waits(tail.after(seconds), 0)
        patch(tail.path, 0, data)
        assert waits(tail.after(0), 0)
        assert tail.rows(SETTLED) == [0]
        tail.reader.close()


def test_each_change_starts_the_settle_time_again(tmp_path: Path) -> None:
    data = encode_frame(SPECS["no body"], 0)
    tail = Tail(tmp_path, data)
    assert waits(tail.after(0), 0)
    assert tail.reader.is_settling
    patch(tail.path, len(data) - 2, b"v")
    assert waits(tail.after(SETTLED), 0)
    assert waits(tail.after(SETTLED / 2), 0)
    patch(tail.path, len(data) - 2, b"w")
    assert waits(tail.after(SETTLED / 2), 0)
    assert tail.rows(SETTLED) == [0]
    assert not tail.reader.is_settling
    assert tail.reader.counters.settled == 1


def test_a_frame_with_a_nul_in_its_text_waits_longer(tmp_path: Path) -> None:
    data = encode_frame(FrameSpec("T", b"\0\0\0", {"KEYS": "a\0b"}), 0)
    tail = Tail(tmp_path, data)
    for seconds in (0, SETTLED, 0.875):
        assert waits(tail.after(seconds), 0)
    assert tail.rows(SETTLED) == [0]


# --- what stands behind ---


def test_a_later_head_frees_the_frames_before_it_at_once(tmp_path: Path) -> None:
    second = encode_frame(SPECS["keyed"], len(FIRST))
    third_at = len(FIRST) + len(second)
    third = encode_frame(SPECS["no body"], third_at)
    tail = Tail(tmp_path, FIRST)
    assert waits(tail.after(0), 0)
    patch(tail.path, len(FIRST), second)
    assert tail.rows() == [0]
    assert waits(tail.after(0), len(FIRST))
    patch(tail.path, third_at, third[:60])
    assert waits(tail.after(0), len(FIRST))
    patch(tail.path, third_at, third[:76])
    assert tail.rows() == [len(FIRST)]
    assert waits(tail.after(0), third_at)
    assert tail.reader.counters.settled == 0


# Frames of before, at other offsets than the new ones end.
_OLD = encode_frame(FrameSpec("T", b"of before the crash"), len(FIRST) + 10)[10:]


@pytest.mark.parametrize("behind", [b"", blank_record(SEGMENT_SIZE - len(FIRST)), _OLD], ids=["zeros", "blank", "old"])
@pytest.mark.parametrize("has_next", [False, True])
def test_what_stands_behind_frees_nothing(tmp_path: Path, behind: bytes, has_next: bool) -> None:
    """A blank record has no time, so an older and longer log may have left it there: it is no end of the segment before
    the next one is in use, and the frame before it settles. One of zeros is made ahead.
    """
    tail = Tail(tmp_path, FIRST + behind)
    if has_next:
        segment(tmp_path, SEGMENT_SIZE)
    assert waits(tail.after(0), 0)
    assert tail.rows(SETTLED) == [0]
    assert waits(tail.after(0), len(FIRST))
    assert waits(tail.after(1), len(FIRST))
    patch(tail.path, len(FIRST), encode_frame(FrameSpec("T", b"newer, and longer"), len(FIRST)))
    assert waits(tail.after(0), len(FIRST))
    assert tail.rows(SETTLED) == [len(FIRST)]


def test_a_next_segment_in_use_frees_the_last_frame_at_once(tmp_path: Path) -> None:
    tail = Tail(tmp_path, FIRST + blank_record(SEGMENT_SIZE - len(FIRST)))
    segment(tmp_path, SEGMENT_SIZE, encode_frame(FrameSpec("T"), SEGMENT_SIZE))
    assert tail.rows() == [0]
    assert waits(tail.after(0), SEGMENT_SIZE)
    assert tail.rows(SETTLED) == [SEGMENT_SIZE]


def test_what_a_truncation_left_behind_frees_nothing(tmp_path: Path) -> None:
    """Messages of one size: after the broker lost its end and writes over it, old heads stand where new frames end."""
    spec = FrameSpec("T", b"x", {"KEYS": "new"}, store_timestamp=2000)
    old = b"".join(
        encode_frame(FrameSpec("T", b"x", {"KEYS": "old"}, store_timestamp=1000), at) for at in (0, 102, 204)
    )
    data = encode_frame(spec, 0)
    assert len(old) == 3 * len(data)
    tail = Tail(tmp_path, data[:-5] + old[len(data) - 5 :])
    assert waits(tail.after(0), 0)


def test_a_frame_bigger_than_a_read_settles_too(tmp_path: Path) -> None:
    size = 1 << 21
    data = encode_frame(FrameSpec("T", b"x" * (1 << 20), {"KEYS": "k"}), 0)
    path = segment(tmp_path, 0, data[:-30], size)
    clock = Clock()
    reader = open_reader(tmp_path, clock, segment_size=size)
    for seconds in (0, 0.5, 0.4375):
        clock.now += seconds
        assert waits(reader.poll(), 0)
    patch(path, 0, data)
    assert waits(reader.poll(), 0)
    clock.now += SETTLED
    assert isinstance(reader.poll(), DispatchBatch)
    reader.close()


# --- corruption at the tail ---


def test_garbage_at_the_tail_is_corrupt_only_when_it_stays(tmp_path: Path) -> None:
    tail = Tail(tmp_path, FIRST + b"\7" * 100)
    assert waits(tail.after(0), 0)
    assert tail.rows(SETTLED) == [0]
    for seconds in (0, 2.5, 2.25):
        assert waits(tail.after(seconds), len(FIRST))
    assert not tail.reader.is_settling
    assert tail.after(0.25) == Corrupt(len(FIRST), Reason.BAD_MAGIC.text, tail.path)
    assert tail.after(10) == Corrupt(len(FIRST), Reason.BAD_MAGIC.text, tail.path)


def test_garbage_that_changes_is_still_being_written(tmp_path: Path) -> None:
    tail = Tail(tmp_path, b"\7" * 100)
    for number in range(5):
        patch(tail.path, 20, bytes([number]))
        assert waits(tail.after(4.75), 0)
    assert isinstance(tail.after(5.0), Corrupt)


@pytest.mark.parametrize("reported", [False, True])
@pytest.mark.parametrize("skip_corrupt", [False, True])
def test_it_heals_when_the_bytes_become_valid(tmp_path: Path, reported: bool, skip_corrupt: bool) -> None:
    data = encode_frame(SPECS["keyed"], 0)
    torn = bytearray(data)
    torn[100:110] = bytes(10)
    tail = Tail(tmp_path, bytes(torn), skip_corrupt=skip_corrupt)
    assert waits(tail.after(0), 0)
    if reported:
        # Nothing stands behind it that could be skipped to.
        assert isinstance(tail.after(5), Corrupt)
    patch(tail.path, 0, data)
    assert waits(tail.after(0), 0)
    assert tail.rows(SETTLED) == [0]


def test_skip_at_the_tail_goes_to_the_next_frame_that_proves_itself(tmp_path: Path) -> None:
    second = bytearray(encode_frame(SPECS["keyed"], len(FIRST)))
    second[-3] ^= 1
    second[4] ^= 1
    at = len(FIRST) + len(second)
    third = encode_frame(SPECS["no body"], at)
    tail = Tail(tmp_path, FIRST + second + third, skip_corrupt=True)
    assert waits(tail.after(0), 0)
    assert tail.rows(SETTLED) == [0]
    assert waits(tail.after(0), len(FIRST))
    assert tail.after(5) == Skipped(len(FIRST), at, Reason.BAD_MAGIC.text)
    assert tail.reader.counters.corrupt_bytes == len(second)
    assert waits(tail.after(0), at)
    assert tail.rows(SETTLED) == [at]


def test_a_body_that_its_crc_denies_with_frames_behind_it(tmp_path: Path) -> None:
    data = bytearray(encode_frame(SPECS["keyed"], 0))
    data[90] ^= 1
    at = len(data)
    tail = Tail(tmp_path, bytes(data) + encode_frame(SPECS["no body"], at))
    assert waits(tail.after(0), 0)
    assert tail.after(5) == Corrupt(0, Reason.BODY_CRC.text, tail.path)
    data[90] ^= 1
    patch(tail.path, 0, bytes(data))
    assert tail.rows() == [0]


def test_a_log_that_is_cut_while_it_is_read_has_not_been_written(tmp_path: Path) -> None:
    """Frames that were seen are gone again: zeros are never corrupt where the log may go on."""
    data = FIRST
    for _ in range(3):
        data += encode_frame(FrameSpec("T", b"first"), len(data))
    tail = Tail(tmp_path, data, rows_max=1)
    assert tail.rows() == [0]
    patch(tail.path, len(FIRST), bytes(len(data)))
    for seconds in (0, 4, 4, 100):
        assert waits(tail.after(seconds), len(FIRST))
    patch(tail.path, 0, data)
    assert tail.rows() == [len(FIRST)]
    assert drain(tail.reader).offsets == [2 * len(FIRST), 3 * len(FIRST)]


@pytest.mark.parametrize("behind", ["zeros", "a blank record"])
@pytest.mark.parametrize("gap", [200, 40_000])
def test_frames_behind_what_looks_like_the_end_are_not_the_end(tmp_path: Path, gap: int, behind: str) -> None:
    left = SEGMENT_SIZE - len(FIRST)
    tail = Tail(tmp_path, FIRST + (blank_record(left) if behind == "a blank record" else b""))
    at = len(FIRST) + gap
    patch(tail.path, at, encode_frame(FrameSpec("T", b"behind"), at))
    assert waits(tail.after(0), 0)
    assert tail.rows(SETTLED) == [0]
    assert waits(tail.after(0), len(FIRST))
    reason = Reason.UNFINISHED if behind == "zeros" else Reason.BLANK_BEFORE_FRAMES
    assert tail.after(60) == Corrupt(len(FIRST), reason.text, tail.path)


@pytest.mark.parametrize("has_room", [False, True])
def test_a_blank_record_that_hides_frames_of_a_closed_segment(tmp_path: Path, *, has_room: bool) -> None:
    """Stale frames may stand behind a broker's own: but only where the next message had no room."""
    left = 4000
    frame = encode_frame(FrameSpec("T", bytes(SEGMENT_SIZE - left - 91 - 1)), 0)
    tail = Tail(tmp_path, frame + blank_record(left))
    at = len(frame) + 100
    patch(tail.path, at, encode_frame(FrameSpec("T", b"behind"), at))
    segment(tmp_path, SEGMENT_SIZE, encode_frame(FrameSpec("T", bytes(100 if has_room else left)), SEGMENT_SIZE))
    assert tail.rows() == [0]
    if has_room:
        assert tail.after(60) == Corrupt(len(frame), Reason.BLANK_BEFORE_FRAMES.text, tail.path)
    else:
        assert waits(tail.after(0), SEGMENT_SIZE)
        assert tail.rows(SETTLED) == [SEGMENT_SIZE]
