"""A broker's log for a mutant, every frame of it remembered by its bytes, and the ways in which it can be damaged.

Which frames are intact is told by their bytes alone: those that still stand where they were written, unchanged.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from indexd.index.format import IndexLayout
from support.commitlog_writer import FrameSpec
from support.naive import NaiveMessage, naive_check
from support.reading import patch
from support.sim_checks import UnsyncedWriter
from support.small_log import BASE_TIME, messages

#: What is said of bytes that were overwritten, the file's size and name the same: only a whole reading sees them all.
IN_PLACE = "in place: "


def damage_data(data: Path, layout: IndexLayout, rand: random.Random) -> str:
    """Damage it; what was done, in words, which begin with ``IN_PLACE`` where sizes and names stay."""
    files = sorted(path for path in data.rglob("*") if path.is_file() and path.name != "lock")
    group = rand.choice(["index", "index", "consumequeue", "sparse", "records"])
    records = [path for path in files if path.parent == data]
    own = records if group == "records" else [path for path in files if (data / group) in path.parents]
    path = rand.choice(own or files)
    name = path.relative_to(data)
    kind = rand.choice(["bit"] * 6 + ["remove", "cut", "grow", "zero", "copy", "swap", "strange"])
    if kind == "bit":
        return _flip(path, data, layout, rand)
    if kind == "remove":
        path.unlink()
    elif kind == "cut":
        with path.open("r+b") as file:
            file.truncate(rand.randrange(max(path.stat().st_size, 1)))
    elif kind == "grow":
        with path.open("ab") as file:
            file.write(bytes(rand.choice([1, 20, 4096])))
    elif kind == "zero":
        path.write_bytes(bytes(path.stat().st_size))
        return f"{IN_PLACE}{name} all zeros"
    elif kind == "copy":  # another of the same kind, made later
        number = "".join(c for c in path.name if c.isdigit())
        other = path.with_name(path.name.replace(number, f"{int(number) + 1:0{len(number)}d}") if number else "more")
        shutil.copyfile(path, other)
        return f"a copy of {name} as {other.name}"
    elif kind == "swap":
        other = rand.choice([one for one in own if one.suffix == path.suffix] or [path])
        ours, theirs = path.read_bytes(), other.read_bytes()
        path.write_bytes(theirs)
        other.write_bytes(ours)
        is_in_place = len(ours) == len(theirs)
        return f"{IN_PLACE if is_in_place else ''}{name} and {other.relative_to(data)} the other way round"
    else:
        path.with_name(rand.choice(["strange", "1", path.name + ".tmp"])).write_bytes(rand.randbytes(40))
        return f"a strange file beside {name}"
    return f"{kind} of {name}"


def _flip(path: Path, data: Path, layout: IndexLayout, rand: random.Random) -> str:
    content = path.read_bytes()
    begin, end = 0, len(content.rstrip(b"\0"))
    where = ""
    if data / "index" in path.parents:
        entries = layout.entry_position(0)
        where = rand.choice(["header", "slot", "entry"])
        begin, end = {"header": (0, 40), "slot": (40, entries), "entry": (entries, end)}[where]
        if where == "slot":
            used = [at for at in range(40, entries, 4) if any(content[at : at + 4])]
            begin = rand.choice(used or [40])
            end = begin + 4
    at = rand.randrange(begin, max(end, begin + 1))
    if at >= len(content):
        return f"{IN_PLACE}nothing"
    bit = rand.randrange(8)
    patch(path, at, bytes([content[at] ^ 1 << bit]))
    return f"{IN_PLACE}bit {bit} of byte {at}{' (' + where + ')' if where else ''} of {path.relative_to(data)}"


_MILLIS_PER_MESSAGE = 400
#: Where the fields of a frame's head stand whose value may be any, and how they are packed (spec 2.1).
_FIELDS = {
    "total size": (0, ">i"), "magic": (4, ">i"), "body CRC": (8, ">i"), "queue id": (12, ">i"),
    "queue offset": (20, ">q"), "physical offset": (28, ">q"), "sysFlag": (36, ">i"), "store time": (56, ">q"),
    "body length": (84, ">i"),
}  # fmt: skip
_MAGICS = (0, -626843481, -626843477, -875286124)


@dataclass(frozen=True, slots=True)
class Written:
    """One frame: what was asked for, what it says, and its bytes."""

    spec: FrameSpec
    message: NaiveMessage
    data: bytes


class MutantLog:
    """``frames`` is the log as its broker knows it; ``removed`` were cut off again, and newer ones written since."""

    def __init__(self, directory: Path, segment_size: int, rand: random.Random) -> None:
        self.directory, self.segment_size, self.rand = directory, segment_size, rand
        self.frames: list[Written] = []
        self.removed: list[NaiveMessage] = []
        self._prop_crc = rand.random() < 0.3
        self._number = 0
        self._specs = messages(rand.getrandbits(31))
        self._writer = UnsyncedWriter(directory, segment_size, prop_crc=self._prop_crc)

    def append(self, count: int) -> None:
        """Write so many messages, each younger than the one before."""
        for _ in range(count):
            self._write(next(self._specs))

    def intact(self) -> list[NaiveMessage]:
        """The messages whose bytes stand where they were written, in the order of the log."""
        found: list[NaiveMessage] = []
        held: tuple[int, bytes] = (-1, b"")
        for frame in self.frames:
            base = frame.message.phy_offset // self.segment_size * self.segment_size
            if held[0] != base:
                path = self._path(base)
                held = base, path.read_bytes() if path.exists() else b""
            at = frame.message.phy_offset - base
            if held[1][at : at + len(frame.data)] == frame.data:
                found.append(frame.message)
        return found

    def damage(self) -> str:
        """Damage it in one random way; what was done, in words."""
        kinds = [self._flip, self._field, self._field, self._zeros, self._junk, self._blank, self._swap,
                 self._clock_back, self._cut, self._segment, self._tail]  # fmt: skip
        kind: Callable[[], str] = self.rand.choice(kinds)
        return kind()

    def close(self) -> None:
        """The broker has died."""
        self._writer.close(clean=False)

    def _write(self, spec: FrameSpec) -> None:
        spec = replace(spec, store_timestamp=BASE_TIME + _MILLIS_PER_MESSAGE * self._number)
        self._number += 1
        at = self._writer.append(spec)
        size = self._writer.max_offset - at
        data = os.pread(self._writer._fd, size, at % self.segment_size)  # its name may be gone
        _, _, message = naive_check(data)
        assert message is not None
        self.frames.append(Written(spec, message, data))

    def _path(self, base: int) -> Path:
        return self.directory / f"{base:020d}"

    def _patch(self, offset: int, data: bytes) -> None:
        # Never over the end of its segment, nor into one that is gone.
        path = self._path(offset // self.segment_size * self.segment_size)
        room = path.stat().st_size - offset % self.segment_size if path.exists() else 0
        if room > 0:
            patch(path, offset % self.segment_size, data[:room])

    def _any(self) -> tuple[int, Written]:
        # The newest segment is where it is hardest to tell.
        newest = self.frames[-1].message.phy_offset // self.segment_size * self.segment_size
        first = next(n for n, frame in enumerate(self.frames) if frame.message.phy_offset >= newest)
        begin = first if self.rand.random() < 0.6 else 0
        number = self.rand.randrange(begin, len(self.frames))
        return number, self.frames[number]

    def _flip(self) -> str:
        number, frame = self._any()
        at = frame.message.phy_offset + self.rand.randrange(len(frame.data))
        bit = self.rand.randrange(8)
        self._patch(at, bytes([frame.data[at - frame.message.phy_offset] ^ 1 << bit]))
        return f"bit {bit} of byte {at - frame.message.phy_offset} of frame {number} at {frame.message.phy_offset}"

    def _field(self) -> str:
        number, frame = self._any()
        name = self.rand.choice(list(_FIELDS))
        at, form = _FIELDS[name]
        (old,) = struct.unpack_from(form, frame.data, at)
        bits = 8 * struct.calcsize(form)
        top = (1 << (bits - 1)) - 1
        hour = 3_600_000
        values = [0, -1, 1, top, -top - 1, old + 1, old - 1, old ^ 1 << self.rand.randrange(bits - 1), old + hour]
        value = self.rand.choice([*values, old - hour, *(_MAGICS if name == "magic" else ())])
        value = max(min(value, top), -top - 1)
        self._patch(frame.message.phy_offset + at, struct.pack(form, value))
        return f"{name} {value} instead of {old} in frame {number} at {frame.message.phy_offset}"

    def _zeros(self) -> str:
        number, frame = self._any()
        at = frame.message.phy_offset + self.rand.choice([0, self.rand.randrange(len(frame.data))])
        size = self.rand.choice([4, 8, len(frame.data), 1000, 5000, 70_000])
        self._patch(at, bytes(size))
        return f"{size} zeros at {at}, in frame {number}"

    def _junk(self) -> str:
        number, frame = self._any()
        size = self.rand.choice([1, 8, len(frame.data), 3000])
        self._patch(frame.message.phy_offset, self.rand.randbytes(size))
        return f"{size} random bytes at {frame.message.phy_offset}, over frame {number}"

    def _blank(self) -> str:
        """A blank record in the place of a frame, or that at the end of a segment with another length."""
        ends = [n for n in range(1, len(self.frames)) if self.frames[n].message.phy_offset % self.segment_size == 0]
        if ends and self.rand.random() < 0.3:
            before = self.frames[self.rand.choice(ends) - 1].message
            at = before.phy_offset + before.size
        else:
            at = self._any()[1].message.phy_offset
        left = self.segment_size - at % self.segment_size
        length = self.rand.choice([0, -1, 8, 16, 91, left - 1, left - 8, left, left + 1, 1 << 30])
        self._patch(at, struct.pack(">ii", length, _MAGICS[3]))
        return f"a blank record of {length} with {left} left at {at}"

    def _swap(self) -> str:
        number, frame = self._any()
        other = self.frames[max(number - 1, 0)]
        if self.rand.random() < 0.5:
            self._patch(frame.message.phy_offset, other.data)
            return f"frame {max(number - 1, 0)} once more over frame {number} at {frame.message.phy_offset}"
        self._patch(other.message.phy_offset, frame.data + other.data)
        return f"frames {number - 1} and {number} the other way round"

    def _clock_back(self) -> str:
        """From one frame on for some, or all, the store times are earlier: the clock was set back, no frame is bad."""
        number, _ = self._any()
        back = self.rand.choice([1, 1000, 3_600_000])
        last = self.rand.choice([len(self.frames), number + self.rand.randrange(1, 20)])
        if self._prop_crc:  # it covers the time
            return "nothing"
        for n, frame in enumerate(self.frames[number:last], number):
            if self.frames[n].message.phy_offset not in {m.phy_offset for m in self.intact_of(frame)}:
                continue
            time = frame.message.store_timestamp - back
            data = frame.data[:56] + struct.pack(">q", time) + frame.data[64:]
            self._patch(frame.message.phy_offset, data)
            _, _, message = naive_check(data)
            assert message is not None
            self.frames[n] = Written(frame.spec, message, data)
        return f"the clock {back} ms back in frames {number} to {last}"

    def intact_of(self, frame: Written) -> list[NaiveMessage]:
        """That frame, if it still stands there."""
        kept, self.frames = self.frames, [frame]
        try:
            return self.intact()
        finally:
            self.frames = kept

    def _cut(self) -> str:
        """The broker lost the end of its log and has written on; whole frames of the longer one stand behind."""
        number, frame = self._any()
        offset = frame.message.phy_offset
        self.close()
        for path in self.directory.iterdir():
            if int(path.name) > offset:
                path.unlink()
        removed, self.frames = self.frames[number:], self.frames[:number]
        self.removed += [one.message for one in removed]
        queues = self._writer.queue_offsets
        self._writer = UnsyncedWriter(self.directory, self.segment_size, start_offset=offset, prop_crc=self._prop_crc)
        kept: dict[tuple[str, int], int] = {}
        for one in self.frames:
            if one.message.sys_flag & 0xC in (0x4, 0xC):  # it is in no queue
                continue
            kept[one.message.topic, one.message.queue_id] = one.message.cq_offset + 1
        self._writer.queue_offsets = {queue: kept.get(queue, 0) for queue in queues}
        if self.rand.random() < 0.6:
            self._write(replace(frame.spec, body=self.rand.randbytes(len(frame.spec.body))))
            return f"cut at frame {number} of {number + len(removed)}, {offset}, and one as long written there"
        self.append(self.rand.randrange(1, 20))
        return f"cut at frame {number} of {number + len(removed)}, {offset}, and {len(self.frames) - number} written"

    def _segment(self) -> str:
        """A whole segment is gone, empty, cut short, or zero."""
        base = self._any()[1].message.phy_offset // self.segment_size * self.segment_size
        path = self._path(base)
        how = self.rand.choice(["unlink", "truncate", "zero", "half"])
        if not path.exists():
            return "nothing"
        if how == "unlink":
            path.unlink()
        elif how == "zero":
            path.write_bytes(bytes(self.segment_size))
        else:
            data = path.read_bytes()
            path.write_bytes(data[: 0 if how == "truncate" else self.rand.randrange(1, max(len(data), 1) + 1)])
        return f"segment {base}: {how}"

    def _tail(self) -> str:
        """The last frame is torn: it ends in zeros."""
        frame = self.frames[-1]
        at = frame.message.phy_offset + self.rand.randrange(len(frame.data))
        self._patch(at, bytes(len(frame.data)))
        return f"the last frame, at {frame.message.phy_offset}, is torn at {at}"
