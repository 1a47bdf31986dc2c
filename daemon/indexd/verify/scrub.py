"""A scrub: every file that was built is read again while the daemon runs, and the first one that is damaged is said.

An index file that is full is held against the checksums of its entries and slots, the one that grows against that of
the entries that are durable; without checksums (built by a version before, or on Spark) the chains and slots are
followed, and the checksums made. Queues and sealed pairs of sparse indexes go through their own checks, which know
order and bounds, not each byte.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from indexd.errors import MissingOk
from indexd.flush.frontier import Frontier
from indexd.index.entries import read_slots, replay_file
from indexd.index.format import FLAVOURS, HEADER_SIZE, FileMark, IndexHeader
from indexd.output import CheckScope, Condition, Output
from indexd.recovery.recover import Damage, DamagedError
from indexd.storage.disk import Disk, DiskFile
from indexd.storage.names import DataFiles
from indexd.storage.page_cache import ReadPages

_READ_SIZE = 1 << 20


class Scrub:
    """Of ``outputs``, the key index first. ``known`` says the durable frontier at any moment.

    Files go only after a frontier without them is durable.

    ``on_bytes`` is told how much more has been read, and may wait or raise; ``adopt`` gets an index file's mark with
    checksums that nobody knew.
    """

    def __init__(
        self,
        disk: Disk,
        files: DataFiles,
        outputs: Sequence[Output[Any]],
        known: Callable[[], Frontier],
        on_bytes: Callable[[int], None],
        adopt: Callable[[FileMark], None],
    ) -> None:
        self._disk, self._files, self._known = disk, files, known
        self._outputs = outputs[1:]
        self._on_bytes, self._adopt = on_bytes, adopt
        #: Index files whose checksums were made.
        self.adopted = 0

    def run(self) -> int:
        """Once through everything: how many files and queues were read. Raises DamagedError, DiskError."""
        checked = 0
        for listed in self._known().index:
            # As it is known now: it may be full meanwhile, or expired.
            mark = next((mark for mark in self._known().index if mark.name == listed.name), None)
            checked += mark is not None and self._check_index(mark)
        for output in self._outputs:
            for name, _ in output.parts(self._known().outputs[output.name]):
                checked += self._check_part(output, name)
        return checked

    def _check_index(self, mark: FileMark) -> bool:
        path = self._files.index / mark.name
        with MissingOk(), self._disk.open_read(path) as file:
            pages = ReadPages(file, file.size())
            wrong, is_in_entries = self._read_index(file, mark)
            pages.give_back(file.size(), is_last=True)
            if wrong:
                begin = mark.header.begin_phy_offset if is_in_entries else None
                raise DamagedError(f"{path}: {wrong}", Damage(frozenset({mark.name}), begin))
            return True
        return False  # expired, or for the watch to say

    def _read_index(self, file: DiskFile, mark: FileMark) -> tuple[str, bool]:
        # What is wrong, "" for nothing; and whether entries are.
        layout = self._known().layout
        if mark.full and IndexHeader.unpack(file.pread(HEADER_SIZE, 0).ljust(HEADER_SIZE, b"\0")) != mark.header:
            return "its header is not what was written", False
        if mark.full and (mark.entries_crc is None or mark.slots_crc is None):
            return self._read_unknown(file, mark)
        if mark.entries_crc is not None:
            begin, end = layout.entry_position(1), layout.entry_position(mark.header.index_count)
            if self._crc(file, begin, end) != mark.entries_crc:
                return "its entries are not what their checksum says", True
        slots_end = layout.slot_position(layout.hash_slot_num)
        if mark.full and self._crc(file, layout.slot_position(0), slots_end) != mark.slots_crc:
            return "its slots are not what their checksum says", False
        return "", False

    def _read_unknown(self, file: DiskFile, mark: FileMark) -> tuple[str, bool]:
        layout, flavour = self._known().layout, FLAVOURS[self._known().flavour]
        replayed = replay_file(file, mark, layout, flavour, self._on_bytes)
        if replayed.mark.header.entries < mark.header.entries:
            return f"entry {replayed.mark.header.index_count} is not what its chain says", True
        slots = read_slots(file, layout)
        self._on_bytes(slots.nbytes)
        if not np.array_equal(slots, replayed.slots):
            return "its slots are not what its entries say", False
        sums = replayed.mark
        self.adopted += 1
        self._adopt(replace(mark, entries_crc=sums.entries_crc, slots_crc=sums.slots_crc))
        return "", False

    def _crc(self, file: DiskFile, begin: int, end: int) -> int:
        crc, buffer = 0, np.empty(_READ_SIZE, dtype=np.uint8)
        while begin < end:
            size = file.pread_into(buffer[: min(_READ_SIZE, end - begin)].data, begin)
            if size == 0:
                break
            crc, begin = zlib.crc32(buffer[:size].data, crc), begin + size
            self._on_bytes(size)
        return crc

    def _check_part(self, output: Output[Any], name: object) -> int:
        # What is wrong may be no more than that files expired while they were read: looked at again.
        for is_last in (False, True):
            part = dict(output.parts(self._known().outputs[output.name])).get(name)
            if part is None:
                return 0
            found = output.check(part, CheckScope(Condition.GROWING, is_complete=False, on_bytes=self._on_bytes))
            if len(found) and is_last:
                first = found.kept[0]
                raise DamagedError(f"{self._files.data / first.file}: {first.text}", Damage(is_secondary=True))
            if not len(found):
                break
        files: int = output.totals(part)["files"]
        return files
