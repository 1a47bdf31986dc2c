"""InMemory: the broker's answer to a query by key, when all that it takes is in memory and sound; some microseconds.

What ``QueryIndex.memory`` may be. It needs the compiler, which queries of the command line do without.
"""

from __future__ import annotations

import ctypes
import os
from itertools import pairwise
from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from indexd.errors import IndexdError
from indexd.query import QueryIndex
from indexd.query.answer import LastUpdate
from indexd.query.source import OPEN_FILES_MAX, Look, OpenIndexFile
from indexd.serve import in_memory_kernel as kernel
from indexd.storage.disk import WouldWaitError

# Frames of one answer, and their bytes: more are left to others.
_FRAMES_MAX = 512
_BYTES_MAX = 256 << 10
_SEGMENTS_MAX = 1 << 16
_OFFSET_END = 1 << 63
Array = npt.NDArray[np.generic]
_NO_DESCRIPTORS = np.zeros(0, dtype=np.int64)


class Tables(NamedTuple):
    """Arrays as ``in_memory_kernel.answer`` has them."""

    files: Array
    headers: Array
    segments: Array
    sizes: Array
    places: Array
    buffer: Array
    work: Array

    @classmethod
    def of_nothing(cls) -> Tables:
        """What a kernel is compiled with."""
        nothing = np.zeros(0, dtype=np.int64)
        headers, sizes = np.zeros((0, 5), dtype=np.int64), np.ones(5, dtype=np.int64)
        buffer, work = np.zeros(kernel.SCRATCH, dtype=np.uint8), np.zeros(4, dtype=np.uint64)
        return cls(nothing, headers, nothing, sizes, nothing, buffer, work)


class InMemory:
    """For one index and the thread that uses it. What is open is looked up anew when the index or its log changes."""

    def __init__(self, index: QueryIndex) -> None:
        self._index = index
        self._look: Look | None = None
        self._files_opened = self._segments_opened = -1
        self._files = self._segments = _NO_DESCRIPTORS
        self._headers = np.zeros((0, 5), dtype=np.int64)
        self._sizes = np.zeros(5, dtype=np.int64)
        self._places = np.zeros(_FRAMES_MAX, dtype=np.int64)
        self._buffer = np.zeros(kernel.SCRATCH + _BYTES_MAX, dtype=np.uint8)
        self._work = np.zeros(4, dtype=np.uint64)

    def __repr__(self) -> str:
        return f"InMemory({self._index})"

    def find(
        self, look: Look, key_hash: int, max_num: int, begin: int, end: int, size_max: int
    ) -> tuple[tuple[bytes, ...], LastUpdate] | None:
        """The frames, ascending, of at most ``size_max`` bytes; None: whoever can wait, and judge, has to look."""
        tables = self.tables(look)
        if tables is None:
            return None
        files, headers, segments, sizes, places, buffer, work = tables
        found = kernel.answer(
            files, headers, segments, sizes, key_hash, max_num, begin, end, size_max, places, buffer, work
        )
        if found == kernel.LEFT:
            return None
        if not found:
            return (), LastUpdate()
        last_update = LastUpdate(int(headers[0][kernel.END_TIME]), int(headers[0][kernel.END_PHY]))
        begin = kernel.SCRATCH
        if found == 1:
            return (buffer[begin : places[0]].tobytes(),), last_update
        ends = [begin, *places[:found].tolist()]
        return tuple([buffer[one:other].tobytes() for one, other in pairwise(ends)]), last_update

    def tables(self, look: Look) -> Tables | None:
        """What a kernel is given, as of now; None where there is too much of it, or it has to be waited for."""
        index = self._index
        if len(look.files) > OPEN_FILES_MAX:  # by the last one the first would be closed again
            return None
        index.log.check()
        if look is not self._look or index.files_opened != self._files_opened:
            try:
                self._note_files(look)
            except (IndexdError, WouldWaitError):  # of a file, perhaps, that need not be asked
                return None
        if index.log.files_opened != self._segments_opened:
            self._note_segments()
        return Tables(self._files, self._headers, self._segments, self._sizes, self._places, self._buffer, self._work)

    def _note_files(self, look: Look) -> None:
        # Newest first; it opens those that are not open, and looks at their sizes.
        index = self._index
        self._look = None
        opened = list(index.newest_first(look))
        rows = [(0, 0, 0, 1, 0) if header is None else (*header, 1) for header in map(_final_header, opened)]
        self._files = np.array([found.reader.file.fileno() for found in opened], dtype=np.int64)
        self._headers = np.array(rows, dtype=np.int64).reshape(len(rows), 5)
        self._sizes[kernel.SLOTS], self._sizes[kernel.ENTRIES] = look.layout.hash_slot_num, look.layout.index_num
        self._look, self._files_opened = look, index.files_opened

    def _note_segments(self) -> None:
        log = self._index.log
        segments, size = log.segments, log.segment_size
        if segments and segments[-1].end > _OFFSET_END:  # no offset of an entry is that large
            segments = ()
        first = segments[0].base if segments else 0
        count = (segments[-1].base - first) // size + 1 if segments else 0
        self._segments = np.full(count if count <= _SEGMENTS_MAX else 0, -1, dtype=np.int64)
        for base, descriptor in log.open_files():
            number = (base - first) // size
            if 0 <= number < len(self._segments):
                self._segments[number] = descriptor
        self._sizes[kernel.FIRST_BASE], self._sizes[kernel.SEGMENT] = first, size
        self._sizes[kernel.FRAME_MAX] = log.frame_size_max
        self._segments_opened = log.files_opened


def _final_header(found: OpenIndexFile) -> tuple[int, int, int, int] | None:
    # Of a file that grows it has to be read each time.
    if found.mark is None or not found.mark.full:
        return None
    header = found.mark.header
    return header.begin_timestamp, header.end_timestamp, header.end_phy_offset, header.index_count


def load_in_memory() -> type[InMemory] | None:
    """The class, its kernel compiled: seconds, once a machine. None without a compiler, or reads that do not wait."""
    is_compiling = not numba.config.DISABLE_JIT  # type: ignore[attr-defined]  # set by the environment
    if not is_compiling or not hasattr(os, "RWF_NOWAIT") or not hasattr(ctypes.CDLL(None), "preadv2"):
        return None
    files, headers, segments, sizes, places, buffer, work = Tables.of_nothing()
    kernel.answer(files, headers, segments, sizes, 0, 0, 0, 0, 0, places, buffer, work)
    return InMemory
