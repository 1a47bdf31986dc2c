"""The broker's own query on its own files: IndexService.queryOffset (spec rocketmq-store 3.6, 3.7, 4.5), to the letter.

What a chain holds is read once, when it is first needed, and serves every range that is asked; so all answers for a key
are of one moment. A broker may be writing and expiring all the while: a file that is gone is an empty one.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from indexd.audit.ground import list_index
from indexd.audit.plan import AuditPlan
from indexd.errors import CorruptDataError, DiskError
from indexd.index.format import IndexHeader, IndexLayout
from indexd.index.reader import IndexFileReader
from indexd.storage.disk import Disk

TIME_MAX = (1 << 63) - 1
# A chain longer than this is a very hot key's; the broker itself takes long for it.
_STEPS_MAX = 1 << 16
_OPEN_FILES_MAX = 64


class TooLongError(Exception):
    """A chain is longer than is worth walking; never leaves the audit."""


class BrokerQuery:
    """Queries for one key hash; what is read of the files is read once."""

    def __init__(self, files: BrokerFiles, key_hash: int) -> None:
        self._files, self._key_hash = files, key_hash
        self._headers = files.headers()
        self._chains: dict[str, _Chain] = {}

    def query(self, begin: int, end: int, max_num: int | None) -> list[int]:
        """IndexService.queryOffset; without ``max_num`` as if it had no limit."""
        found: list[int] = []
        for name, header in self._headers.items():
            if _is_time_matched(header, begin, end):
                for key_hash, phy_offset, timestamp in self._chain(name):
                    if max_num is not None and len(found) >= max_num:
                        break
                    if key_hash == self._key_hash and begin <= timestamp <= end:
                        found.append(phy_offset)
                    if timestamp < begin:
                        break
            if header.begin_timestamp < begin or (max_num is not None and len(found) >= max_num):
                break
        return found

    def reach(self, wanted: set[int], begin: int, end: int) -> tuple[set[int], set[int]]:
        """Those of ``wanted`` that any query finds, and those of them whose file and entry are in the range."""
        findable, timely = set[int](), set[int]()
        for name, header in self._headers.items() if wanted else ():
            if not self._files.may_hold(name, wanted):
                continue
            is_matched = _is_time_matched(header, begin, end)
            for key_hash, phy_offset, timestamp in self._chain(name):
                if key_hash == self._key_hash and phy_offset in wanted:
                    findable.add(phy_offset)
                    if is_matched and begin <= timestamp <= end:
                        timely.add(phy_offset)
        return findable, timely

    def _chain(self, name: str) -> Iterator[tuple[int, int, int]]:
        if name not in self._chains:
            self._chains[name] = _Chain(self._files, name, self._key_hash)
        return iter(self._chains[name])


def _is_time_matched(header: IndexHeader, begin: int, end: int) -> bool:
    first, last = header.begin_timestamp, header.end_timestamp
    return (begin < first and end > last) or first <= begin <= last or first <= end <= last


@dataclass(slots=True)
class _Chain:
    """A slot's entries as a walk without bounds meets them: (key hash, physical offset, store time as it is told)."""

    files: BrokerFiles
    name: str
    key_hash: int
    _next: int = 0
    _header: IndexHeader = field(default_factory=IndexHeader)
    _met: list[tuple[int, int, int]] = field(default_factory=list)
    _numbers: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        file = self.files.open(self.name)
        if file is None:
            return
        number = file.slot(file.layout.slot_of(self.key_hash))
        self._header = file.header()
        self._go(number, 0)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        at = 0
        while at < len(self._met) or self._read():
            yield self._met[at]
            at += 1

    def _read(self) -> bool:
        file = self.files.open(self.name) if self._next else None
        if file is None:
            return False
        if len(self._met) >= _STEPS_MAX:
            raise TooLongError
        try:
            entry = file.entry(self._next)
        except (CorruptDataError, struct.error):
            return False  # Java's walk ends there in an exception that it logs
        if entry.time_diff < 0:
            return False
        # A Java long wraps.
        timestamp = (self._header.begin_timestamp + entry.time_diff * 1000 + (1 << 63)) % (1 << 64) - (1 << 63)
        self._met.append((entry.key_hash, entry.phy_offset, timestamp))
        self._go(entry.prev_index, self._next)
        return True

    def _go(self, number: int, here: int) -> None:
        # Java goes round a loop for ever; here it ends.
        count = self._header.index_count
        is_next = 0 < number <= count and count > 1 and number != here and number not in self._numbers
        self._next = number if is_next else 0
        self._numbers.add(self._next)


class BrokerFiles:
    """The broker's files of the right size, newest first, few of them open at a time; one that expires is empty."""

    def __init__(self, disk: Disk, plan: AuditPlan, layout: IndexLayout) -> None:
        self._disk, self._folder, self._layout = disk, plan.folder, layout
        self._known = {file.name: file for file in plan.files}
        self._open: OrderedDict[str, IndexFileReader] = OrderedDict()
        self._final: dict[str, IndexHeader] = {}
        self._names = [name for name, size in list_index(disk, plan.folder).items() if size == layout.file_size][::-1]

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].file.close()

    def headers(self) -> dict[str, IndexHeader]:
        """By name, newest first; those of files that are not full are read anew."""
        found = ((name, self._final.get(name) or self._header(name)) for name in self._names)
        return {name: header for name, header in found if header is not None}

    def _header(self, name: str) -> IndexHeader | None:
        file = self.open(name)
        header = file.header() if file is not None else None
        if header is not None and header.index_count >= self._layout.index_num:
            self._final[name] = header
        return header

    def may_hold(self, name: str, phy_offsets: set[int]) -> bool:
        """Whether entries of the file may point to one of these; a growing file's to any."""
        file = self._known.get(name)
        if file is None or not file.is_full:
            return True
        return any(file.begin <= phy_offset <= file.end for phy_offset in phy_offsets)

    def open(self, name: str) -> IndexFileReader | None:
        """None for a file that is gone, or is no longer of its size."""
        if name in self._open:
            self._open.move_to_end(name)
            return self._open[name]
        try:
            file = self._disk.open_read(self._folder / name)
        except DiskError as error:
            if not error.is_missing:
                raise
            return None
        try:
            reader = IndexFileReader(file, self._layout)
        except CorruptDataError:
            file.close()
            return None
        while len(self._open) >= _OPEN_FILES_MAX:
            self._open.popitem(last=False)[1].file.close()
        self._open[name] = reader
        return reader
