"""Lists the segment files of the log, over one or several directories, and tells how far their bytes go.

A broker preallocates the segment behind the one it writes, deletes old ones from the front at any moment, and may
spread them over several directories (spec rocketmq-store 1.2, 1.3).

``log_end`` is for figures alone, never for what is read or believed: the reader knows exactly, but only once it is
there. ``WrittenEnd`` tells whether bytes stand behind zeros, which may hide messages. ``LogLimit`` is a broker that is
asked where its log ends.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from indexd.commitlog.format import BLANK_SIZE
from indexd.errors import MissingOk, MissingStoreError, UnsafeStoreError
from indexd.storage.disk import Disk, DiskFile
from indexd.storage.names import segment_base


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment file: physical offsets ``[base, end)``."""

    base: int
    size: int
    path: Path

    @property
    def end(self) -> int:
        """The physical offset behind the segment."""
        return self.base + self.size


#: It holds no offset at all.
NO_SEGMENT = Segment(0, 0, Path())


class LogLimit:
    """Who can be asked how far the log goes: a broker. Of this one nothing is known, and the bytes alone decide.

    Behind a log that was cut may stand whole frames of the longer one, which prove themselves as any other: who writes
    the log is the only one that knows where it ends. What it has named was written whole before.
    """

    #: Nothing behind ``offset`` is believed; else it is asked about suspects alone, and nobody doubts the rest.
    bounds = False
    #: The physical offset behind the broker's last message, as it was named last; None: it has not answered.
    offset: int | None = None

    def ask(self, position: int, head: bytes = b"") -> int | None:  # noqa: ARG002 - for who answers
        """``offset``, perhaps newer: bytes stand at ``position``, which is not before it. May take a second or two.

        ``head`` is how they begin: while it stays the same, nothing was written there.
        """
        return self.offset

    def ends_at(self, position: int, head: bytes) -> bool:  # noqa: ARG002 - for who answers
        """Whether the broker, asked when ``head`` stood at ``position`` already, named that offset."""
        return False


NOBODY = LogLimit()

_BASE = attrgetter("base")


@dataclass(frozen=True, slots=True)
class SegmentList:
    """The segments in log order."""

    segments: tuple[Segment, ...] = ()

    @property
    def min_offset(self) -> int | None:
        """The first physical offset that is still there; None without segments."""
        return self.segments[0].base if self.segments else None

    def at(self, offset: int) -> Segment | None:
        """The segment that holds ``offset``."""
        number = bisect_right(self.segments, offset, key=_BASE)
        return self.segments[number - 1] if number and offset < self.segments[number - 1].end else None

    def after(self, offset: int) -> tuple[Segment, ...]:
        """The segments that begin at ``offset`` or behind it."""
        return self.segments[bisect_left(self.segments, offset, key=_BASE) :]


def list_segments(disk: Disk, directories: tuple[Path, ...], segment_size: int) -> SegmentList:
    """List the segments; an empty file is one that the broker is about to make and is left out.

    Raises UnsafeStoreError when no directory is there or a file has another size than ``segment_size``: offsets would
    be taken for others. Files whose name is no segment's are not the log's.
    """
    found: dict[int, Segment] = {}
    present = 0
    for directory in directories:
        rows: list[tuple[str, int]] = []
        with MissingOk():
            rows = disk.list_dir(directory)
            present += 1
        for name, size in rows:
            base = segment_base(name)
            if base is None or size == 0:
                continue
            if size != segment_size or base % segment_size:
                what = f"has {size} bytes, but segment_size (mappedFileSizeCommitLog) is {segment_size}"
                if size == segment_size:
                    what = f"begins at {base}, which is no multiple of segment_size {segment_size}"
                raise UnsafeStoreError(
                    f"segment {directory / name} {what}",
                    "give the broker's own --segment-size, or its file with --broker-conf; if that is right, this file "
                    "is cut or foreign: put the whole one there, or take it out of the log",
                )
            # Of two of one name the earlier directory's counts.
            found.setdefault(base, Segment(base, size, directory / name))
    if not present:
        named = ", ".join(str(directory) for directory in directories)
        raise MissingStoreError(
            f"there is no commitlog at {named}",
            "give the broker's storePathRootDir as --store, or its storePathCommitLog as --commit-log-paths",
        )
    return SegmentList(tuple(found[base] for base in sorted(found)))


# What is looked at a step: of 1 GiB, 18 of them.
_BLOCK_SIZE = 4096
# Zeros are looked through so far at each look.
_ZEROS_SIZE = 64 << 10
# So much is read at a time where all of a segment is looked through.
_PIECE_SIZE = 1 << 20


def log_end(disk: Disk, log: SegmentList, known: int) -> int:
    """The physical offset behind the last byte that is not zero, at least ``known``. Raises DiskError.

    Found by halving: a log is written from the front. A body with 4 KiB of zeros in the newest segment may hide what
    is behind it; and what is left of a longer log that was cut counts as written.
    """
    for segment in reversed(log.segments):
        if segment.end <= known:
            break
        with MissingOk(), disk.open_read(segment.path) as file:
            if known > segment.base or any(file.pread(BLANK_SIZE, 0)):  # else it is made ahead, nothing is in it
                return max(end_within(file, segment, max(known, segment.base)), known)
    return known


def end_within(file: DiskFile, segment: Segment, known: int) -> int:
    """Behind the last byte of a segment that is not zero, found by halving; everything before ``known`` is written."""
    blocks, known_blocks = -(-segment.size // _BLOCK_SIZE), (known - segment.base) // _BLOCK_SIZE
    written = bisect_left(
        range(blocks), True, lo=known_blocks, key=lambda block: is_zero(file.pread(_BLOCK_SIZE, block * _BLOCK_SIZE))
    )
    if written == 0:
        return segment.base
    last = file.pread(_BLOCK_SIZE, (written - 1) * _BLOCK_SIZE).rstrip(b"\0")
    return segment.base + (written - 1) * _BLOCK_SIZE + len(last)


class WrittenEnd:
    """Tells where a segment's bytes end in zeros alone.

    All of them are looked through once, for a crash of the machine may leave zeros before bytes that are written; holes
    of the file cost nothing. From then on they are looked for by halving: a log is written from the front.
    """

    def __init__(self) -> None:
        # Path and inode of the segment that was looked through.
        self._known: tuple[Path, int] | None = None

    def of(self, file: DiskFile, segment: Segment, phy_offset: int) -> int:
        """Behind the last byte from ``phy_offset`` on that is not zero, as far as can be told; itself if none is."""
        position = phy_offset - segment.base
        page_end = position + _BLOCK_SIZE - position % _BLOCK_SIZE
        data = file.pread(min(page_end, segment.size) - position, position)
        if is_zero(data) and file.next_data(page_end) >= segment.size:  # nothing was ever written behind it
            return phy_offset
        known = segment.path, file.stamp().inode
        data = file.pread(min(_ZEROS_SIZE, segment.end - phy_offset), position)
        written = phy_offset if is_zero(data) else phy_offset + len(data.rstrip(b"\0"))
        if written == phy_offset and known != self._known:
            written = first_written(file, segment, phy_offset)
            self._known = known if written == phy_offset else None
        return max(end_within(file, segment, written), written)


def first_written(file: DiskFile, segment: Segment, phy_offset: int) -> int:
    """Behind the first byte from ``phy_offset`` on that is not zero; itself if none is."""
    position = phy_offset - segment.base
    while (position := file.next_data(position)) < segment.size:
        data = file.pread(_PIECE_SIZE, position)
        if not data:
            break
        if not is_zero(data):
            return segment.base + position + len(data) - len(data.lstrip(b"\0")) + 1
        position += len(data)
    return phy_offset


def is_zero(data: bytes) -> bool:
    """Whether no byte is another, some GB a second."""
    return data == bytes(len(data))
