"""The end of a log that another process is writing: a frame is taken once it can no longer change, and not before.

A scene is what a segment holds, and steps in turn: bytes that a broker writes somewhere, (position, bytes), or a later
look of the reader, (seconds since the last one, what it comes to).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from indexd.commitlog.batcher import DispatchBatch
from indexd.commitlog.format import Corrupt, NotYetWritten, Reason
from indexd.commitlog.reader import LogReader, Skipped
from support.commitlog_writer import FrameSpec, blank_record, encode_frame
from support.reading import SEGMENT_SIZE, Clock, open_reader, patch, segment

SPECS = {
    "keyed": FrameSpec("TopicA", b"hello, world", {"KEYS": "a b", "TAGS": "TagA"}, store_timestamp=1_700_000_000_000),
    "no body": FrameSpec("TopicA", b"", {"KEYS": "a b", "UNIQ_KEY": "u"}, store_timestamp=1_700_000_000_000),
    "IPv6, long": FrameSpec("L" + "x" * 199, b"x" * 300, {"KEYS": "k"}, born_host=("2001:db8::1", 1)),
    "no properties": FrameSpec("TopicA", b"hello"),
}
# A little more than the settle time, and exact in binary.
SETTLED = 0.0625
FIRST = encode_frame(FrameSpec("T", b"first"), 0)
END = len(FIRST)
Step = tuple[float, object]


def came_to(found: object) -> object:
    """Where nothing is written yet, the offsets of messages, where and why it is corrupt, or what was skipped."""
    if isinstance(found, NotYetWritten):
        return found.offset
    if isinstance(found, Corrupt):
        return found.offset, found.reason
    return found.columns.phy_offset[: found.rows].tolist() if isinstance(found, DispatchBatch) else found


def play(directory: Path, data: bytes, steps: list[Step], **options: Any) -> LogReader:
    """One scene; bytes behind the first segment are a whole new one."""
    size, clock = options.get("segment_size", SEGMENT_SIZE), Clock()
    path = segment(directory, 0, data, size)
    reader = open_reader(directory, clock, **options)
    for number, (when, what) in enumerate(steps):
        if isinstance(what, bytes) and when >= size:
            segment(directory, size, what, size)
        elif isinstance(what, bytes):
            patch(path, int(when), what)
        else:
            clock.now += when
            assert came_to(reader.poll()) == what, (number, when, what)
    return reader


@pytest.mark.parametrize("prop_crc", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_a_torn_newest_frame_is_not_returned_wherever_it_is_torn(name: str, prop_crc: bool, tmp_path: Path) -> None:
    """The rest is still zero: neither at once nor while it stays so, for longer than any writer takes."""
    data = encode_frame(SPECS[name], END, prop_crc=prop_crc)
    for size in range(0, len(data.rstrip(b"\0")), 1 if len(data) < 250 else 7):
        first: list[Step] = [(0, [0])] if size >= 36 else [(0, 0), (SETTLED, [0])]
        waits: list[Step] = [(0, END), (0.5, END), (0.4375, END)]
        whole: list[Step] = [(END, data), (0, END), (SETTLED / 2, END), (SETTLED, [END])]
        play(tmp_path, FIRST + data[:size], first + waits + whole)


@pytest.mark.parametrize("name", SPECS)
def test_bytes_that_come_in_any_order_are_not_returned_before_the_last(name: str, tmp_path: Path) -> None:
    """From the end to the front, as no writer does it."""
    data = encode_frame(SPECS[name], 0)
    for missing in (number for number in range(4, len(data), 7) if any(data[:number])):
        steps: list[Step] = [(0, 0), (0.5, 0), (0.4375, 0), (0, data), (0, 0), (SETTLED, [0])]
        play(tmp_path, bytes(missing) + data[missing:], steps)


def over(data: bytes, at: int, more: bytes) -> bytes:
    """``data`` with ``more`` written at ``at``."""
    return data[:at].ljust(at, b"\0") + more + data[at + len(more) :]


BARE, KEYED = encode_frame(SPECS["no body"], 0), encode_frame(SPECS["keyed"], 0)
TORN = over(KEYED, 100, bytes(10))
SECOND = encode_frame(SPECS["keyed"], END)
THIRD_AT = END + len(SECOND)
THIRD = encode_frame(SPECS["no body"], THIRD_AT)
BLANK = blank_record(SEGMENT_SIZE - END)
# Frames of before, at other offsets than the new ones end.
OLD = encode_frame(FrameSpec("T", b"of before the crash"), END + 10)[10:]
NEWER = encode_frame(FrameSpec("T", b"newer, and longer"), END)
STALE = b"".join(encode_frame(FrameSpec("T", b"x", {"KEYS": "old"}, store_timestamp=1000), at) for at in (0, 102, 204))
FRESH = encode_frame(FrameSpec("T", b"x", {"KEYS": "new"}, store_timestamp=2000), 0)
EQUAL = b"".join(encode_frame(FrameSpec("T", b"first"), number * END) for number in range(4))
LARGE = encode_frame(FrameSpec("T", b"x" * (1 << 20), {"KEYS": "k"}), 0)
LEFT = 4000
ALMOST = encode_frame(FrameSpec("T", bytes(SEGMENT_SIZE - LEFT - 91 - 1)), 0)
HIDING = over(ALMOST + blank_record(LEFT), len(ALMOST) + 100, encode_frame(FrameSpec("T", b"h"), len(ALMOST) + 100))
BAD = (END, Reason.BAD_MAGIC.text)
TAKEN: list[Step] = [(0, 0), (SETTLED, [0]), (0, END)]
#: What the segment holds, the steps, options of the reader, and how many frames had to settle, if it matters.
SCENES: dict[str, tuple[bytes, list[Step], dict[str, Any], int | None]] = {
    "each change starts the settle time again": (BARE, [
        (0, 0), (len(BARE) - 2, b"v"), (SETTLED, 0), (SETTLED / 2, 0), (len(BARE) - 2, b"w"), (SETTLED / 2, 0),
        (SETTLED, [0]),
    ], {}, 1),
    "a frame with a NUL in its text waits longer": (
        encode_frame(FrameSpec("T", b"\0\0\0", {"KEYS": "a\0b"}), 0),
        [(0, 0), (SETTLED, 0), (0.875, 0), (SETTLED, [0])], {}, 1,
    ),
    "a later head frees the frames before it at once": (FIRST, [
        (0, 0), (END, SECOND), (0, [0]), (0, END), (THIRD_AT, THIRD[:60]), (0, END), (THIRD_AT, THIRD[:76]), (0, [END]),
        (0, THIRD_AT),
    ], {}, 0),
    # A blank record has no time, so an older and longer log may have left it there: it is no end of the segment before
    # the next one is in use, and the frame before it settles. One of zeros is made ahead.
    **{
        f"{name} behind a frame free nothing{', nor a segment made ahead' * len(ahead)}": (
            FIRST + behind, [*ahead, *TAKEN, (1, END), (END, NEWER), (0, END), (SETTLED, [END])], {}, 2
        )
        for name, behind in (("zeros", b""), ("a blank record", BLANK), ("old frames", OLD))
        for ahead in ([], [(SEGMENT_SIZE, b"")])
    },
    "a next segment in use frees the last frame at once": (FIRST + BLANK, [
        (SEGMENT_SIZE, encode_frame(FrameSpec("T"), SEGMENT_SIZE)), (0, [0]), (0, SEGMENT_SIZE),
        (SETTLED, [SEGMENT_SIZE]),
    ], {}, 1),
    # Messages of one size: after the broker lost its end and writes over it, old heads stand where new frames end.
    "what a truncation left behind frees nothing": (FRESH[:-5] + STALE[len(FRESH) - 5 :], [(0, 0)], {}, 0),
    "a frame bigger than a read settles too": (
        LARGE[:-30], [(0, 0), (0.5, 0), (0.4375, 0), (0, LARGE), (0, 0), (SETTLED, [0])], {"segment_size": 1 << 21}, 1
    ),
    "garbage is corrupt only when it stays": (
        FIRST + b"\7" * 100, [*TAKEN, (2.5, END), (2.25, END), (0.25, BAD), (10, BAD)], {}, 1
    ),
    "garbage that changes is still being written": (b"\7" * 100, [
        *(step for number in range(5) for step in ((20, bytes([number])), (4.75, 0))),
        (5.0, (0, Reason.BAD_MAGIC.text)),
    ], {}, 0),
    # Nothing stands behind it that could be skipped to.
    **{
        f"it heals when the bytes become valid, {policy}, reported {len(reported)}": (
            TORN, [(0, 0), *reported, (0, KEYED), (0, 0), (SETTLED, [0])], policy, 1
        )
        for policy in ({}, {"skip_corrupt": True})
        for reported in ([], [(5, (0, Reason.LENGTHS_DISAGREE.text))])
    },
    "skip goes to the next frame that proves itself": (
        FIRST + over(over(SECOND, 4, b"\1"), len(SECOND) - 3, b"\1") + THIRD,
        [*TAKEN, (5, Skipped(END, THIRD_AT, Reason.BAD_MAGIC.text)), (0, THIRD_AT), (SETTLED, [THIRD_AT])],
        {"skip_corrupt": True}, 2,
    ),
    "a body that its CRC denies, with frames behind it": (
        over(KEYED, 90, b"\1") + encode_frame(SPECS["no body"], len(KEYED)),
        [(0, 0), (5, (0, Reason.BODY_CRC.text)), (0, KEYED), (0, [0])], {}, 0,
    ),
    # Frames that were seen are gone again: zeros are never corrupt where the log may go on.
    "a log that is cut while it is read has not been written": (EQUAL, [
        (0, [0]), (END, bytes(len(EQUAL))), (0, END), (4, END), (4, END), (100, END), (0, EQUAL), (0, [END]),
        (0, [2 * END]), (0, 3 * END), (SETTLED, [3 * END]),
    ], {"rows_max": 1}, 1),
    **{
        f"frames {gap} bytes behind {name} are not the end": (
            over(FIRST + behind, END + gap, encode_frame(FrameSpec("T", b"behind"), END + gap)),
            [*TAKEN, (60, (END, reason.text))], {}, 1,
        )
        for name, behind, reason in (
            ("zeros", b"", Reason.UNFINISHED), ("a blank record", BLANK, Reason.BLANK_BEFORE_FRAMES)
        )
        for gap in (200, 40_000)
    },
    # Stale frames may stand behind a broker's own blank record: but only where the next message had no room.
    "a blank record that hides frames of a closed segment": (HIDING, [
        (SEGMENT_SIZE, encode_frame(FrameSpec("T", bytes(100)), SEGMENT_SIZE)), (0, [0]),
        (60, (len(ALMOST), Reason.BLANK_BEFORE_FRAMES.text)),
    ], {}, 0),
    "a blank record where the next message had no room": (HIDING, [
        (SEGMENT_SIZE, encode_frame(FrameSpec("T", bytes(LEFT)), SEGMENT_SIZE)), (0, [0]), (0, SEGMENT_SIZE),
        (SETTLED, [SEGMENT_SIZE]),
    ], {}, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", SCENES)
def test_the_end_of_a_log(tmp_path: Path, name: str) -> None:
    data, steps, options, settled = SCENES[name]
    reader = play(tmp_path, data, steps, **options)
    assert reader.counters.settled == settled
    if not isinstance(steps[-1][1], int):  # else it may wait for a frame to settle
        assert not reader.settling_size
