"""Where a file that stays meets log that gets new files: at which key of which message, by the log itself.

A message's keys may stand in two files, the first of them at the end of one and the others at the front of the next.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from indexd.audit.evidence import Era
from indexd.audit.ground import BrokerFile, LogProbe
from indexd.audit.plan import AuditPlan
from indexd.audit.stretch import Rows, Stretch
from indexd.commitlog.segments import list_segments
from indexd.config import Config
from indexd.index.check_ground import time_difference
from indexd.index.flavour import FLAVOURS
from indexd.recovery.replay import first_entry_at, read_entries, time_diff_of
from indexd.storage.disk import Disk, DiskFile


@dataclass(frozen=True, slots=True)
class Place:
    """Behind the first ``key`` keys of the message at ``offset``, which is reached from ``aligned``.

    ``doubled`` keys of that message stand on both sides of the place: the file finds them, and yet there is to be an
    entry for each.
    """

    offset: int
    aligned: int
    key: int = 0
    doubled: int = 0

    @property
    def order(self) -> tuple[int, int]:
        """Places in the order of the log."""
        return self.offset, self.key


@dataclass(frozen=True, slots=True)
class _Message:
    key_hashes: tuple[int, ...]
    store_timestamp: int
    end: int


class Edges:
    """Reads single messages and the entries that belong to them. Raises DiskError. Nothing stays open."""

    def __init__(self, disk: Disk, config: Config, plan: AuditPlan, eras: tuple[Era, ...]) -> None:
        self._disk, self._config, self._plan, self._eras = disk, config, plan, eras
        store = config.store
        self._log = list_segments(disk, store.commit_log_directories, store.segment_size)
        self._probe = LogProbe(disk, self._log)
        self._met: dict[int, _Message | None] = {}
        self._behind: dict[str, Place | None] = {}
        self._before: dict[str, Place | None] = {}

    def behind(self, file: BrokerFile) -> Place | None:
        """Behind the last key that ``file`` holds; None when those of its last message are not its first ones."""
        if file.name not in self._behind:
            self._behind[file.name] = self._place_behind(file)
        return self._behind[file.name]

    def before(self, file: BrokerFile) -> Place | None:
        """Before the first key that ``file`` holds; None when those of its first message are not its last ones."""
        if file.name not in self._before:
            self._before[file.name] = self._place_before(file)
        return self._before[file.name]

    def is_message(self, offset: int) -> bool:
        """Whether a message stands there."""
        return self._message(offset) is not None

    def counts_from(self, file: BrokerFile, ends: Collection[int], last: int) -> bool:
        """Whether entry 1 counts from one of the times ``ends``, ms, or that of the message at ``last`` (spec 3.5)."""
        with self._disk.open_read(self._plan.folder / file.name) as opened:
            stored = time_diff_of(read_entries(opened, self._plan.layout, 1, 1)[0])
        message = self._message(last) if stored else None
        times = [*ends, *([message.store_timestamp] if message is not None else [])]
        return stored in {0, *(time_difference(file.header.begin_timestamp, time) for time in times)}

    def _place_behind(self, file: BrokerFile) -> Place | None:
        message = self._message(file.end)
        if message is None:
            # It cannot be read: what is missing of it, if anything, is no key that the log has.
            segment = self._log.at(file.end)
            return Place(file.end + 1, segment.base if segment is not None else file.end + 1)
        held, whole = self._held(file, file.end), message.key_hashes
        first = _only_place(whole, held) if file.begin == file.end else 0
        if first is None or held != whole[first : first + len(held)]:
            return None
        key = first + len(held)
        if key == len(whole):
            return Place(message.end, message.end)
        return Place(file.end, file.end, key, _doubled(whole[key:], whole[:key]))

    def _place_before(self, file: BrokerFile) -> Place | None:
        message = self._message(file.begin)
        if message is None:
            return Place(file.begin, file.begin)
        held, whole = self._held(file, file.begin), message.key_hashes
        if held == whole:
            return Place(file.begin, file.begin)
        key = _only_place(whole, held) if file.begin == file.end else len(whole) - len(held)
        if key is None or key < 0 or held != whole[key : key + len(held)]:
            return None
        return Place(file.begin, file.begin, key, _doubled(whole[:key], whole[key:]))

    def _held(self, file: BrokerFile, offset: int) -> tuple[int, ...]:
        # Key hashes of the entries that point there, in order; the file is in the order of the log.
        layout = self._plan.layout
        with self._disk.open_read(self._plan.folder / file.name) as opened:
            first, behind = (self._first_at(opened, file, one) for one in (offset, offset + 1))
            entries = read_entries(opened, layout, first, behind - first)
        return tuple(entries[:, 0].byteswap().tolist())

    def _first_at(self, opened: DiskFile, file: BrokerFile, offset: int) -> int:
        return first_entry_at(opened, self._plan.layout, 1, file.count, offset)

    def _message(self, offset: int) -> _Message | None:
        if offset not in self._met:
            self._met[offset] = self._read(offset)
        return self._met[offset]

    def _read(self, offset: int) -> _Message | None:
        end = self._probe.frame_end(offset)
        if end is None:
            return None
        flavour = FLAVOURS[[era.flavour for era in self._eras if era.begin <= offset][-1]]
        for item in Stretch(offset, offset + 1, offset, flavour.name).read(self._disk, self._config, 0):
            if isinstance(item, Rows):
                columns, row = item.batch.columns, item.first
                first, last = columns.key_start[row : row + 2]
                skips = flavour.skip_mask >> (int(columns.sys_flag[row]) & 0xC) & 1
                hashes = columns.key_hash[first:last] if not skips else np.empty(0, dtype=np.uint32)
                return _Message(tuple(hashes.tolist()), int(columns.store_timestamp[row]), end)
        return None


def _only_place(whole: tuple[int, ...], held: tuple[int, ...]) -> int | None:
    # Of a message with more keys than a file has room for: where this part of it stands, if that can be told.
    count = len(held)
    found = [first for first in range(len(whole) - count + 1) if whole[first : first + count] == held]
    return found[0] if len(found) == 1 else None


def _doubled(others: tuple[int, ...], held: tuple[int, ...]) -> int:
    return sum(other in held for other in others)
