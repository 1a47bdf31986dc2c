"""The file of kept parts: JSON lines that are only ever added, each durable before the next, and one owner.

::

    {"sum": "0a1b2c3d", "line": {...}}     crc32 of the bytes of the inner object, 8 hex digits

Whoever is killed leaves a last line that is cut off or does not hold: it counts for nothing. Any other line that does
not hold says that the file was damaged, and a file that does not begin like this is another's and left as it is.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from indexd.errors import BusyError, DiskError, UsageError
from indexd.storage.disk import Disk, DiskFile
from indexd.storage.lock import try_exclusive

#: A longer line is neither written nor believed.
LINE_SIZE_MAX = 64 << 20
_FILE_SIZE_MAX = 4 << 30
_BEGIN = b'{"sum": "'
_HEAD_SIZE = len(b'{"sum": "00000000", "line": ')
_READ_SIZE = 4 << 20
_HINT = "give another FILE to --resume, or remove it"


class LineFile:
    """Open, locked, and read to the end of its last whole line. Close it after use.

    Raises UsageError for a file that is damaged, another's or not to be written, BusyError while another has it.
    """

    def __init__(self, disk: Disk, path: Path) -> None:
        self._disk = disk
        self.path = path.resolve()
        if self.path.exists() and not self.path.is_file():
            raise UsageError(f"{path} is no plain file", _HINT)
        self._file = self._open()

    def __repr__(self) -> str:
        return f"LineFile({self.path})"

    def read(self) -> Iterator[tuple[int, int, Any]]:
        """Position, bytes and inner object of each line; what a kill has left behind the last one is cut off."""
        position = 0
        for at, raw, is_last in self._raw_lines():
            found = _unpack(raw)
            if found is not None:
                yield at, len(raw), found
            elif at == 0 and not (raw.startswith(_BEGIN) or _BEGIN.startswith(raw)):
                raise UsageError(f"{self.path} does not hold what an audit keeps", _HINT)
            elif not is_last:
                raise UsageError(f"{self.path} is damaged at byte {at}", _HINT)
            else:
                break
            position = at + len(raw)
        if position < self._file.size():
            self._file.truncate(position)

    def again(self, position: int, size: int) -> Any:
        """The inner object of a line that ``read`` has met there."""
        found = _unpack(self._file.pread(size, position))
        if found is None:
            raise UsageError(f"{self.path} was changed by another", _HINT)
        return found

    def append(self, line: Any) -> bool:
        """Add one line, durably; False for one that is too long."""
        raw = _pack(line)
        if len(raw) > LINE_SIZE_MAX:
            return False
        self._file.pwrite(raw, self._file.size())
        self._file.fsync()
        return True

    def keep_only(self, lines: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Leave out all others (positions and bytes), durably; where these stand now."""
        temporary = self._disk.temporary_for(self.path)
        fresh = self._disk.open_write(temporary, create=True)
        try:
            # Locked before it has the name, so that nobody can come in between.
            try_exclusive(fresh.fileno())
            moved, end = [], 0
            for position, size in lines:
                fresh.pwrite(self._file.pread(size, position), end)
                moved.append((end, size))
                end += size
            fresh.fsync()
            self._disk.rename(temporary, self.path)
        except BaseException:
            fresh.close()
            with suppress(DiskError):
                self._disk.unlink(temporary)
            raise
        self._disk.sync_dir(self.path.parent)
        self._file.close()
        self._file = fresh
        return moved

    def close(self) -> None:
        """Let go of it; the file stays."""
        self._file.close()

    def _open(self) -> DiskFile:
        try:
            while True:
                file = self._open_or_create()
                if not try_exclusive(file.fileno()):
                    file.close()
                    raise BusyError(
                        f"{self.path} is in use by another audit", "wait for its end, or give another FILE to --resume"
                    )
                # The one who had it may have given its name to another file.
                if self._disk.exists(self.path) and self._disk.stamp(self.path).inode == file.stamp().inode:
                    break
                file.close()
        except DiskError as error:
            raise UsageError(str(error), _HINT) from error
        if file.size() > _FILE_SIZE_MAX:
            file.close()
            raise UsageError(f"{self.path} does not hold what an audit keeps: it is too large", _HINT)
        return file

    def _open_or_create(self) -> DiskFile:
        is_new = not self._disk.exists(self.path)
        file = self._disk.open_write(self.path, create=is_new)
        if is_new:
            self._disk.sync_dir(self.path.parent)
        return file

    def _raw_lines(self) -> Iterator[tuple[int, bytes, bool]]:
        # Position, bytes with the newline, and whether nothing stands behind it.
        size, position, pending = self._file.size(), 0, b""
        while position + len(pending) < size:
            chunk = self._file.pread(_READ_SIZE, position + len(pending))
            if not chunk:
                break
            *whole, pending = (pending + chunk).split(b"\n")
            for line in whole:
                end = position + len(line) + 1
                yield position, line + b"\n", end == size
                position = end
            if len(pending) > LINE_SIZE_MAX:
                break
        if pending:
            yield position, pending, position + len(pending) == size


def _pack(line: Any) -> bytes:
    inner = json.dumps(line, separators=(",", ":"), allow_nan=False).encode()
    return b'%b%08x", "line": %b}\n' % (_BEGIN, zlib.crc32(inner), inner)


def _unpack(raw: bytes) -> Any | None:
    # None for what is no such line, or does not hold.
    inner = raw[_HEAD_SIZE:-2]
    if not raw.endswith(b"}\n") or raw[:_HEAD_SIZE] != b'%b%08x", "line": ' % (_BEGIN, zlib.crc32(inner)):
        return None
    try:
        return json.loads(inner)
    except (ValueError, RecursionError):
        return None
