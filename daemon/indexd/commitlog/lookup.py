"""MessageLookup: the message at a physical offset, for queries. No compiler, no numpy, few open files."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

from indexd.commitlog.decoder import Decoded, DecoderOptions, decode_frame
from indexd.commitlog.format import HEAD_SIZE, NotYetWritten
from indexd.commitlog.segments import SegmentList, list_segments
from indexd.errors import DiskError
from indexd.storage.disk import Disk, DiskFile

_OPEN_FILES_MAX = 16
# One read brings most messages whole; a longer one takes a second.
_FIRST_READ = 4096


class MessageLookup:
    """Reads single frames of a log; close it after use."""

    def __init__(self, disk: Disk, directories: tuple[Path, ...], segment_size: int, options: DecoderOptions) -> None:
        self._disk = disk
        self._options = options
        self._files: OrderedDict[Path, DiskFile] = OrderedDict()
        self.log: SegmentList = list_segments(disk, directories, segment_size)

    def at(self, phy_offset: int) -> Decoded | None:
        """What stands at ``phy_offset``; None when its segment has expired or is not there yet."""
        segment = self.log.at(phy_offset)
        if segment is None:
            return None
        try:
            file = self._open(segment.path)
        except DiskError as error:
            if not error.is_missing:
                raise
            return None
        position = phy_offset - segment.base
        size = min(_FIRST_READ, segment.size - position)
        found = self._decode(file, size, position, segment.end, phy_offset)
        if isinstance(found, NotYetWritten) and found.needed > size >= HEAD_SIZE:
            found = self._decode(file, found.needed, position, segment.end, phy_offset)
        return found

    def _decode(self, file: DiskFile, size: int, position: int, segment_end: int, phy_offset: int) -> Decoded:
        return decode_frame(file.pread(size, position), 0, phy_offset, segment_end, self._options)

    def _open(self, path: Path) -> DiskFile:
        if path in self._files:
            self._files.move_to_end(path)
            return self._files[path]
        if len(self._files) >= _OPEN_FILES_MAX:
            self._files.popitem(last=False)[1].close()
        file = self._files[path] = self._disk.open_read(path)
        return file

    def close(self) -> None:
        """Close every file."""
        for file in self._files.values():
            file.close()
        self._files.clear()
