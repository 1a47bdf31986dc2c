"""MessageLookup: the message at a physical offset, for queries. No compiler, no numpy, few open files."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from indexd.commitlog.decoder import Decoded, DecoderOptions, Framed, check_frame, decode_frame
from indexd.commitlog.format import HEAD_SIZE, NotYetWritten
from indexd.commitlog.log_end import end_within, is_zero
from indexd.commitlog.segments import Segment, SegmentList, list_segments
from indexd.errors import DiskError
from indexd.storage.disk import Disk, DiskFile

_OPEN_FILES_MAX = 16
# One read brings most messages whole; a longer one takes a second.
_FIRST_READ = 4096
# Zeros are looked through so far before the rest of a segment is taken to be written from the front.
_ZEROS_SIZE = 64 << 10
# Of all lookups, so that no two states of any two of them are taken for the same.
_STATES = count()


class MessageLookup:
    """Reads single frames of a log; close it after use."""

    def __init__(self, disk: Disk, directories: tuple[Path, ...], segment_size: int, options: DecoderOptions) -> None:
        self._disk = disk
        self._options = options
        self._files: OrderedDict[Path, DiskFile] = OrderedDict()
        #: Another number whenever other files are open.
        self.files_opened = next(_STATES)
        self._segment_size = segment_size
        self.log: SegmentList = list_segments(disk, directories, segment_size)
        # All are of one size, and begin at a multiple of it.
        self._segments = {segment.base: segment for segment in self.log.segments}

    def at(self, phy_offset: int) -> Decoded | None:
        """What stands at ``phy_offset``; None when its segment has expired or is not there yet."""
        opened = self._file_at(phy_offset)
        if opened is None:
            return None
        file, segment = opened
        position = phy_offset - segment.base
        size = min(_FIRST_READ, segment.size - position)
        found = self._decode(file, size, position, segment.end, phy_offset)
        if isinstance(found, NotYetWritten) and found.needed > size >= HEAD_SIZE:
            found = self._decode(file, found.needed, position, segment.end, phy_offset)
        return found

    def frame(self, phy_offset: int, size_max: int) -> Framed | None:
        """The same as bytes, its CRCs checked; NotYetWritten, ``needed`` set, for one of more than ``size_max`` bytes.

        Such a frame is not read.
        """
        opened = self._file_at(phy_offset)
        if opened is None:
            return None
        file, segment = opened
        position = phy_offset - segment.base
        data = file.pread(min(_FIRST_READ, segment.size - position), position)
        found = check_frame(data, phy_offset, segment.end, self._options)
        if isinstance(found, NotYetWritten) and len(data) < found.needed <= size_max:
            found = check_frame(file.pread(found.needed, position), phy_offset, segment.end, self._options)
        if isinstance(found, bytes) and len(found) > size_max:
            return NotYetWritten(phy_offset, len(found))
        return found

    def written_end(self, phy_offset: int) -> int:
        """The physical offset behind the last byte of its segment that is not zero; itself if none is from there on."""
        opened = self._file_at(phy_offset)
        if opened is None:
            return phy_offset
        file, segment = opened
        data = file.pread(min(_ZEROS_SIZE, segment.end - phy_offset), phy_offset - segment.base)
        known = phy_offset if is_zero(data) else phy_offset + len(data.rstrip(b"\0"))
        return max(end_within(file, segment, known), phy_offset)

    def _file_at(self, phy_offset: int) -> tuple[DiskFile, Segment] | None:
        segment = self._segments.get(phy_offset - phy_offset % self._segment_size)
        if segment is None:
            return None
        try:
            return self._open(segment.path), segment
        except DiskError as error:
            if not error.is_missing:
                raise
            return None

    def _decode(self, file: DiskFile, size: int, position: int, segment_end: int, phy_offset: int) -> Decoded:
        return decode_frame(file.pread(size, position), 0, phy_offset, segment_end, self._options)

    def _open(self, path: Path) -> DiskFile:
        if path in self._files:
            self._files.move_to_end(path)
            return self._files[path]
        self.files_opened = next(_STATES)
        if len(self._files) >= _OPEN_FILES_MAX:
            self._files.popitem(last=False)[1].close()
        file = self._files[path] = self._disk.open_read(path)
        return file

    def open_files(self) -> Iterator[tuple[int, int]]:
        """(first physical offset, descriptor) of each file that is open now."""
        for segment in self.log.segments:
            file = self._files.get(segment.path)
            if file is not None:
                yield segment.base, file.fileno()

    def close(self) -> None:
        """Close every file."""
        self.files_opened = next(_STATES)
        for file in self._files.values():
            file.close()
        self._files.clear()
