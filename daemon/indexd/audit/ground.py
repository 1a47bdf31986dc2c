"""The index folder of a store as it stands at one moment: which files there are, and where in the log they point.

The header is read before anything else of a file, and only what it counts is ever judged: a broker may be writing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

from indexd.audit.notes import Notes
from indexd.commitlog.format import HEAD_SIZE, MAGIC_V1, MAGIC_V2
from indexd.commitlog.segments import SegmentList
from indexd.errors import DiskError, UnsafeStoreError
from indexd.index.entries import phy_offset_of, read_entries
from indexd.index.format import HEADER_SIZE, SLOT_SIZE, IndexHeader, IndexLayout, unpack_slot
from indexd.storage.disk import Disk, DiskFile, Stamp
from indexd.storage.names import INDEX_DIGITS

# What Java's Long.parseLong takes: a broker opens a file of such a name as an index file, and makes it one in size.
_JAVA_LONG = re.compile(r"[+-]?\d{1,19}")
_SAMPLES = 64
_ENTRIES_PER_READ = 1 << 20
_NO_FOLDER_HINT = "move it away; if indexing is meant to be off, no folder is needed"


@dataclass(frozen=True, slots=True)
class BrokerFile:
    """An index file of the broker. ``header`` as in memory, ``count`` what it may be believed to hold, as a number.

    Entries 1 .. ``count`` - 1 point to physical offsets ``begin`` .. ``end``, both included; those that do not are no
    entries that a broker wrote there. An empty file has ``begin`` 0 and ``end`` -1. ``is_readable`` is False for a
    file of another size: the broker reads such a one as what it is not.
    """

    name: str
    header: IndexHeader
    count: int
    begin: int
    end: int
    is_full: bool
    is_readable: bool = True

    @property
    def path(self) -> str:
        """What findings call it: its path inside the store."""
        return f"index/{self.name}"

    @property
    def entries(self) -> int:
        """How many entries it may be believed to hold."""
        return self.count - 1

    def points_into(self, begin: int, end: int) -> bool:
        """Whether entries of it may point into ``[begin, end)``."""
        return self.is_readable and self.begin < end and self.end >= begin


class LogProbe:
    """Looks at single places of the log: whether a frame begins there, and where it ends."""

    def __init__(self, disk: Disk, log: SegmentList) -> None:
        self._disk, self._log = disk, log

    def frame_end(self, phy_offset: int) -> int | None:
        """Where the frame at ``phy_offset`` ends; None when none stands there that says so itself."""
        segment = self._log.at(phy_offset)
        if segment is None:
            return None
        try:
            with self._disk.open_read(segment.path) as file:
                head = file.pread(HEAD_SIZE, phy_offset - segment.base)
        except DiskError as error:
            if not error.is_missing:
                raise
            return None
        total, magic = int.from_bytes(head[:4], "big"), int.from_bytes(head[4:8], "big")
        said = int.from_bytes(head[28:HEAD_SIZE], "big")
        if magic not in (MAGIC_V1, MAGIC_V2) or said != phy_offset or phy_offset + total > segment.end:
            return None
        return phy_offset + total


def list_index(disk: Disk, folder: Path, notes: Notes | None = None) -> dict[str, int]:
    """Names and sizes of the index files, in the broker's order; whatever else is there into ``notes``.

    UnsafeStoreError where something else stands than a folder.
    """
    try:
        stamps = disk.stamps(folder)
        folders = disk.list_dirs(folder)
    except DiskError as error:
        if not error.is_missing:
            raise
        if disk.exists(folder):
            raise UnsafeStoreError(f"{folder} is a file, and a broker has a folder there", _NO_FOLDER_HINT) from None
        return {}
    sizes = {name: stamp.size for name, stamp in stamps.items()}
    if notes is not None:
        _note_links(stamps, notes)
        for name in [*(name for name in sizes if not is_index_file(name)), *folders]:
            notes.add(f"index/{name}", 0, "file-foreign", _foreign(name, is_folder=name in folders))
    return {name: size for name, size in sorted(sizes.items()) if is_index_file(name)}


def _note_links(stamps: dict[str, Stamp], notes: Notes) -> None:
    # Which of both is the link cannot be told of a hard one, and to a broker it is the same.
    first: dict[Stamp, str] = {}
    for name, stamp in stamps.items():
        if stamp.inode and is_index_file(name):
            other = first.setdefault(stamp, name)
            if other != name:
                notes.add(
                    f"index/{name}", 0, "file-link", f"the same file as index/{other}: one is a link to the other"
                )


def is_index_file(name: str) -> bool:
    """17 digits, in whatever script the broker's locale writes them (spec rocketmq-store 1.2)."""
    return len(name) == INDEX_DIGITS and name.isdecimal()


def _foreign(name: str, *, is_folder: bool) -> str:
    if not _JAVA_LONG.fullmatch(name):
        return "no index file; a broker logs an error and leaves it alone"
    if is_folder:
        return "a folder whose name is a number: a broker that meets it fails to load its index"
    return "no index file, but its name is a number: a broker opens it as one and gives it the size of one"


def look_at(
    disk: Disk,
    folder: Path,
    sizes: dict[str, int],
    layout: IndexLayout,
    probe: LogProbe,
    *,
    is_layout_given: bool = False,
) -> list[BrokerFile]:
    """Each file's header, and what it may hold; one that expires meanwhile is left out.

    UnsafeStoreError when none of them has the size of ``layout``: it is not the broker's, or, if somebody has said that
    it is, those files look as if they were of another one.
    """
    found = []
    for name in sizes:
        try:
            with disk.open_read(folder / name) as file:
                found.append(_look(file, name, layout, probe))
        except DiskError as error:
            if not error.is_missing:
                raise
    if found and not any(file.is_readable for file in found):
        cut = [size for size in sizes.values() if HEADER_SIZE < size < layout.file_size]
        if not is_layout_given or max(sizes.values()) > layout.file_size or len(set(cut)) < len(cut):
            raise _no_such_size(folder, found[-1].name, sizes, layout, is_given=is_layout_given)
    return found


def _no_such_size(
    folder: Path, name: str, sizes: dict[str, int], layout: IndexLayout, *, is_given: bool
) -> UnsafeStoreError:
    text = (
        f"no index file in {folder} has the {layout.file_size} bytes that {layout.hash_slot_num} slots and "
        f"{layout.index_num} entries make; {name} has {sizes[name]}"
    )
    hint = "give --hash-slot-num and --index-num as the broker has them, or its own file with --broker-conf"
    if is_given:
        hint = "so these are not the broker's numbers; if they are, move the files of other sizes away"
    return UnsafeStoreError(text, hint)


def _look(file: DiskFile, name: str, layout: IndexLayout, probe: LogProbe) -> BrokerFile:
    head = file.pread(HEADER_SIZE, 0).ljust(HEADER_SIZE, b"\0")
    header = IndexHeader.unpack(head)
    count = min(header.index_count, layout.index_num)
    if file.size() != layout.file_size:
        return BrokerFile(name, header, count, 0, -1, is_full=False, is_readable=False)
    count = _named(file, layout, _written(file, layout, count))
    begin, end = _points_to(file, layout, header, count, probe) if count > 1 else (0, -1)
    return BrokerFile(name, header, count, begin, end, is_full=count >= layout.index_num)


def _written(file: DiskFile, layout: IndexLayout, count: int) -> int:
    # A header may count entries that were never written: those are zeros, to the end of what it counts.
    if count <= 2 or read_entries(file, layout, count - 1, 1).any():
        return count
    while count > 2:
        first = max(count - _ENTRIES_PER_READ, 1)
        written = np.flatnonzero(read_entries(file, layout, first, count - first).any(axis=1))
        if len(written):
            return first + int(written[-1]) + 1
        count = max(first, 2)
    return count


def _named(file: DiskFile, layout: IndexLayout, count: int) -> int:
    # Of a put that a crash cut short the slot may name the entry and the header not count it. A query finds it then.
    if count >= layout.index_num:
        return count
    entry = read_entries(file, layout, count, 1)
    if not entry.any():
        return count
    key_hash = int(entry.byteswap().view(np.int32)[0, 0])
    slot = layout.slot_position(layout.slot_of(key_hash)) if key_hash >= 0 else 0
    return count + 1 if slot and unpack_slot(file.pread(SLOT_SIZE, slot)) == count else count


def _points_to(
    file: DiskFile, layout: IndexLayout, header: IndexHeader, count: int, probe: LogProbe
) -> tuple[int, int]:
    # The smallest and the largest offset that entries may be believed. One wrong entry must not stretch that.
    numbers = sorted({*(int(number) for number in np.linspace(1, count - 1, _SAMPLES)), *range(1, min(4, count))})
    offsets = [phy_offset_of(read_entries(file, layout, number, 1)[0]) for number in numbers]
    begin = _believed(offsets[0], header.begin_phy_offset, probe, median(offsets[:3]), is_begin=True)
    end = _believed(offsets[-1], header.end_phy_offset, probe, median(offsets[-3:]), is_begin=False)
    if begin <= end and sum(not begin <= offset <= end for offset in offsets) <= len(offsets) // _SAMPLES + 1:
        return begin, end
    return _whole_range(file, layout, count)


def _believed(entry: int, header: int, probe: LogProbe, beside: float, *, is_begin: bool) -> int:
    # The first or last entry's offset, or what the header says of it: that one which a frame stands at, if they differ.
    if entry == header:
        return entry
    fits = [offset for offset in (entry, header) if offset == beside or (offset <= beside) == is_begin]
    fits = [offset for offset in fits if offset >= 0]
    for offset in fits:
        if probe.frame_end(offset) is not None:
            return offset
    return fits[0] if fits else entry


def _whole_range(file: DiskFile, layout: IndexLayout, count: int) -> tuple[int, int]:
    # Entries that are not in the order of the log: all of them have to be asked.
    low, high, number = (1 << 63) - 1, -1, 1
    while number < count:
        entries = read_entries(file, layout, number, min(count - number, _ENTRIES_PER_READ))
        offsets = phy_offsets(entries)
        offsets = offsets[offsets >= 0]
        if len(offsets):
            low, high = min(low, int(offsets.min())), max(high, int(offsets.max()))
        number += max(len(entries), 1)
    return (low, high) if high >= 0 else (0, -1)


def phy_offsets(entries: NDArray[np.uint32]) -> NDArray[np.int64]:
    """The physical offsets of rows of ``read_entries``, int64."""
    halves = entries[:, 1:3].byteswap().astype(np.int64)
    return halves[:, 0].astype(np.int32).astype(np.int64) << 32 | halves[:, 1]
