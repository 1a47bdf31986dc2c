"""A broker's log for a mutant, every frame of it remembered by its bytes, and the ways in which it can be damaged.

Which frames are intact is told by their bytes alone: those that still stand where they were written, unchanged.
"""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from support.commitlog_writer import FrameSpec
from support.naive import NaiveMessage, naive_check
from support.reading import patch
from support.sim_checks import SimLog

#: Where the fields of a frame's head stand whose value may be any, and how they are packed (spec 2.1).
_FIELDS = {
    "total size": (0, ">i"), "magic": (4, ">i"), "body CRC": (8, ">i"), "queue id": (12, ">i"),
    "queue offset": (20, ">q"), "physical offset": (28, ">q"), "sysFlag": (36, ">i"), "store time": (56, ">q"),
    "body length": (84, ">i"),
}  # fmt: skip
_MAGICS = (0, -626843481, -626843477, -875286124)


class Written(NamedTuple):
    """One frame: what was asked for, what it says, and its bytes."""

    spec: FrameSpec
    message: NaiveMessage
    data: bytes


class MutantLog(SimLog):
    """``frames`` is the log as its broker knows it; ``removed`` were cut off again, and newer ones written since."""

    def __init__(self, directory: Path, segment_size: int, rand: random.Random) -> None:
        super().__init__(directory, segment_size, rand.getrandbits(31), rewrites=True, prop_crc=rand.random() < 0.3)
        self.rand = rand
        self.frames: list[Written] = []
        self.removed: list[NaiveMessage] = []

    def append(self, count: int) -> None:
        """Write so many messages, each younger than the one before."""
        for _ in range(count):
            self._write(next(self._specs))

    def intact(self) -> list[NaiveMessage]:
        """The messages whose bytes stand where they were written, in the order of the log."""
        log = {int(path.name): path.read_bytes() for path in self.directory.iterdir()}
        found = []
        for _, message, data in self.frames:
            at = message.phy_offset % self.segment_size
            if log.get(message.phy_offset - at, b"")[at : at + len(data)] == data:
                found.append(message)
        return found

    def damage(self) -> str:
        """Damage it in one random way; what was done, in words."""
        patches = [self._bit, self._field, self._field, self._zeros, self._junk, self._blank, self._swap]
        kind: Callable[[], Any] = self.rand.choice([*patches, self._cut, self._segment])
        if kind not in patches:
            return str(kind())
        offset, data, words = kind()
        # Never over the end of its segment, nor into one that is gone.
        at = offset % self.segment_size
        path = self._path(offset - at)
        room = path.stat().st_size - at if path.exists() else 0
        if room > 0:
            patch(path, at, data[:room])
        return f"{words} at {offset}"

    def _write(self, spec: FrameSpec) -> None:
        at = self._writer.append(spec)
        data = os.pread(self._writer._fd, self._writer.max_offset - at, at % self.segment_size)  # its name may be gone
        _, _, message = naive_check(data)
        assert message is not None
        self.frames.append(Written(spec, message, data))

    def _path(self, base: int) -> Path:
        return self.directory / f"{base:020d}"

    def _any(self) -> tuple[int, Written, int]:
        # A frame's number, the frame and where it stands. The newest segment is where it is hardest to tell.
        newest = self.frames[-1].message.phy_offset // self.segment_size * self.segment_size
        first = next(n for n, frame in enumerate(self.frames) if frame.message.phy_offset >= newest)
        number = self.rand.randrange(first if self.rand.random() < 0.6 else 0, len(self.frames))
        return number, self.frames[number], self.frames[number].message.phy_offset

    # What is written, and where.

    def _bit(self) -> tuple[int, bytes, str]:
        number, frame, begin = self._any()
        at, bit = self.rand.randrange(len(frame.data)), self.rand.randrange(8)
        return begin + at, bytes([frame.data[at] ^ 1 << bit]), f"bit {bit} of byte {at} of frame {number}"

    def _field(self) -> tuple[int, bytes, str]:
        number, frame, begin = self._any()
        name = self.rand.choice(list(_FIELDS))
        at, form = _FIELDS[name]
        (old,) = struct.unpack_from(form, frame.data, at)
        bits = 8 * struct.calcsize(form)
        top, hour = (1 << (bits - 1)) - 1, 3_600_000
        values = [0, -1, 1, top, -top - 1, old + 1, old - 1, old ^ 1 << self.rand.randrange(bits - 1), old + hour]
        value = self.rand.choice([*values, old - hour, *(_MAGICS if name == "magic" else ())])
        value = max(min(value, top), -top - 1)
        return begin + at, struct.pack(form, value), f"{name} {value} instead of {old} in frame {number}"

    def _zeros(self) -> tuple[int, bytes, str]:
        """Zeros over some of a frame, or all and more; half the time the last frame, which is torn then."""
        frame = self.rand.choice([self._any()[1], self.frames[-1]])
        at = frame.message.phy_offset + self.rand.choice([0, self.rand.randrange(len(frame.data))])
        return at, bytes(self.rand.choice([4, 8, len(frame.data), 1000, 5000, 70_000])), "zeros"

    def _junk(self) -> tuple[int, bytes, str]:
        number, frame, begin = self._any()
        size = self.rand.choice([1, 8, len(frame.data), 3000])
        return begin, self.rand.randbytes(size), f"{size} random bytes over frame {number}"

    def _blank(self) -> tuple[int, bytes, str]:
        """A blank record in the place of a frame, or that at the end of a segment with another length."""
        ends = [n for n in range(1, len(self.frames)) if self.frames[n].message.phy_offset % self.segment_size == 0]
        at = self._any()[2]
        if ends and self.rand.random() < 0.3:
            before = self.frames[self.rand.choice(ends) - 1].message
            at = before.phy_offset + before.size
        left = self.segment_size - at % self.segment_size
        length = self.rand.choice([0, -1, 8, 16, 91, left - 1, left - 8, left, left + 1, 1 << 30])
        return at, struct.pack(">ii", length, _MAGICS[3]), f"a blank record of {length} with {left} left"

    def _swap(self) -> tuple[int, bytes, str]:
        number, frame, begin = self._any()
        other = self.frames[max(number - 1, 0)]
        if self.rand.random() < 0.5:
            return begin, other.data, f"frame {max(number - 1, 0)} once more over frame {number}"
        return other.message.phy_offset, frame.data + other.data, f"frame {number} and the one before it exchanged"

    def _cut(self) -> str:
        """The broker lost the end of its log and has written on; whole frames of the longer one stand behind."""
        number, frame, offset = self._any()
        queues = dict.fromkeys(self._writer.queue_offsets, 0)
        self.cut(offset)
        removed, self.frames = self.frames[number:], self.frames[:number]
        self.removed += [one.message for one in removed]
        kept = [one.message for one in self.frames if queue_of(one.message) is not None]
        self._writer.queue_offsets = queues | {(one.topic, one.queue_id): one.cq_offset + 1 for one in kept}
        if self.rand.random() < 0.6:
            now, body = next(self._specs).store_timestamp, self.rand.randbytes(len(frame.spec.body))
            self._write(replace(frame.spec, store_timestamp=now, body=body))
        else:
            self.append(self.rand.randrange(1, 20))
        written = len(self.frames) - number
        return f"cut at frame {number} of {number + len(removed)}, {offset}, and {written} written"

    def _segment(self) -> str:
        """A whole segment is gone, empty, cut short, or zero."""
        offset = self._any()[2]
        path = self._path(offset - offset % self.segment_size)
        data = path.read_bytes() if path.exists() else b""
        how, half = self.rand.choice(["unlink", "truncate", "zero", "half"]), self.rand.randrange(len(data) + 1)
        if how == "unlink":
            path.unlink(missing_ok=True)
        else:
            path.write_bytes({"truncate": b"", "zero": bytes(self.segment_size), "half": data[:half]}[how])
        return f"segment {path.name}: {how}"


def queue_of(message: NaiveMessage) -> tuple[str, int] | None:
    """The queue that it stands in, None if in none."""
    return (message.topic, message.queue_id) if message.sys_flag & 0xC in (0x0, 0x8) else None
