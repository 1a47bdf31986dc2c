"""KeyQueries: the compiled answer to queries by key that arrive together, without another thread.

It answers from open index files and segments in the page cache; whatever else is asked goes to ``processor``'s plain
handlers. It needs the compiler, which the plain code does without.
"""

from __future__ import annotations

import ctypes
import os
import struct
import time
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from indexd.errors import IndexdError
from indexd.query import QueryIndex
from indexd.query.source import OPEN_FILES_MAX, IndexSnapshot, OpenIndexFile
from indexd.serve.queries import FOUND, Queries
from indexd.serve.remoting import key_queries_kernel as kernel
from indexd.serve.remoting.command import (
    HEADER_MAX,
    LENGTH_SIZE,
    RemotingCommand,
    RequestCode,
    ResponseCode,
    encode_command,
    last_update_fields,
)
from indexd.storage.disk import WouldWaitError

#: Requests of one call, which has bounds besides on what it reads and walks.
TOGETHER_MAX = 128
# Frames of one answer, and bytes of all answers of a call.
_FRAMES_MAX = 512
_BYTES_MAX = 256 << 10
_SEGMENTS_MAX = 1 << 16
# The first bytes of the frames that are tried, behind their lengths: all clients write them so.
_BEGIN = f'{{"code":{RequestCode.QUERY_MESSAGE:d},'.encode()
_BEGIN_AT = 8
_HEADS = struct.Struct(">ii")  # sizes of the frame and of its header
Array = npt.NDArray[Any]


class Answered(NamedTuple):
    """Key queries that found something: how many, how many bytes of what came, and the answers."""

    requests: int
    size: int
    answers: bytes


class IndexTables:
    """The open files of one index, for the kernel; made anew when other files are opened or closed."""

    def __init__(self, index: QueryIndex) -> None:
        self._index = index
        self._look: IndexSnapshot | None = None
        self._files_opened = self._segments_opened = -1
        self._files: Array = np.zeros(0, dtype=np.int64)
        self._headers: Array = self._files
        self._segments: Array = self._files
        self._sizes = np.ones(5, dtype=np.int64)
        self._places = np.zeros(_FRAMES_MAX, dtype=np.int64)
        self.buffer = np.zeros(kernel.SCRATCH + _BYTES_MAX, dtype=np.uint8)

    def prepare(self) -> tuple[Array, ...] | None:
        """The tables as of now, as ``answer_together`` takes them; None if files are too many, or cannot be opened."""
        index = self._index
        look = index.look()
        if len(look.files) > OPEN_FILES_MAX:  # the last one would close the first
            return None
        index.log.check()
        try:
            if look is not self._look or index.files_opened != self._files_opened:
                self._list_index_files(look)
            if index.log.files_opened != self._segments_opened:
                self._list_segments()
        except (IndexdError, WouldWaitError, OverflowError):  # the last: a segment beyond the offset of any entry
            return None
        return self._files, self._headers, self._segments, self._sizes, self._places, self.buffer

    def _list_index_files(self, look: IndexSnapshot) -> None:
        index, self._look = self._index, None
        opened = list(index.newest_first(look))
        self._files = np.array([found.reader.file.fileno() for found in opened], dtype=np.int64)
        self._headers = np.array(list(map(_header, opened)), dtype=np.int64).reshape(-1, 5)
        self._sizes[kernel.SLOTS], self._sizes[kernel.ENTRIES] = look.layout.hash_slot_num, look.layout.index_num
        self._look, self._files_opened = look, index.files_opened

    def _list_segments(self) -> None:
        log = self._index.log
        segments, size = log.segments, log.segment_size
        first = segments[0].base if segments else 0
        count = (segments[-1].base - first) // size + 1 if segments else 0
        descriptors = np.full(count if count <= _SEGMENTS_MAX else 0, -1, dtype=np.int64)
        for base, descriptor in log.open_files():
            number = (base - first) // size
            if 0 <= number < len(descriptors):
                descriptors[number] = descriptor
        self._sizes[[kernel.FIRST_BASE, kernel.SEGMENT, kernel.FRAME_MAX]] = first, size, log.options.frame_size_max
        self._segments, self._segments_opened = descriptors, log.files_opened


def _header(found: OpenIndexFile) -> tuple[int, int, int, int, bool]:
    if found.mark is None or not found.mark.full:
        return 0, 0, 0, 1, False  # it grows: the kernel reads it each time
    header = found.mark.header
    return header.begin_timestamp, header.end_timestamp, header.end_phy_offset, header.index_count, True


class KeyQueries:
    """One for an outlet whose requests are not signed and want the broker's own answer, of ``size_max`` bytes."""

    def __init__(self, queries: Queries, size_max: int) -> None:
        self._queries = queries
        config = queries.config.query
        self._limits = np.zeros(4, dtype=np.int64)
        self._limits[kernel.BODY] = size_max
        self._limits[kernel.MOST] = config.max_msgs_num_batch
        self._limits[kernel.MOST_UNIQUE] = min(config.default_query_max_num, config.max_msgs_num_batch)
        self._rest = _work(TOGETHER_MAX)

    def answer(self, data: bytes, frame_max: int) -> Answered | None:
        """The answers to as many requests at the begin of ``data`` as one call can answer; None: to none."""
        if not data.startswith(_BEGIN, _BEGIN_AT):
            return None
        self._limits[kernel.FRAME] = min(frame_max, LENGTH_SIZE + HEADER_MAX)
        began = time.perf_counter()
        try:
            found = self._queries.ask_compiled(lambda compiled: self._answer(compiled, data))
        except (WouldWaitError, IndexdError):  # the plain way waits, or says what is wrong
            return None
        self._queries.count(FOUND, began, found.requests)
        return found

    def _answer(self, compiled: IndexTables, data: bytes) -> Answered:
        tables = compiled.prepare()
        if tables is None:
            raise WouldWaitError
        given: tuple[Any, ...] = np.frombuffer(data, dtype=np.uint8), self._limits, *tables, *self._rest
        count, taken = kernel.answer_together(*given)
        if not count:
            raise WouldWaitError
        answers: list[bytes | memoryview] = []
        for opaque, timestamp, phy_offset, begin, end in self._rest[-1][:count].tolist():
            header = _HEADER % (timestamp, phy_offset, opaque)
            answers += [_HEADS.pack(LENGTH_SIZE + len(header) + end - begin, len(header)), header]
            answers.append(compiled.buffer.data[begin:end])
        return Answered(count, taken, b"".join(answers))


def load_key_queries() -> type[IndexTables] | None:
    """IndexTables, the kernel compiled: seconds, once a machine. None without a compiler or without RWF_NOWAIT."""
    is_compiling = not numba.config.DISABLE_JIT  # type: ignore[attr-defined]  # set by the environment
    if not is_compiling or not hasattr(os, "RWF_NOWAIT") or not hasattr(ctypes.CDLL(None), "preadv2"):
        return None
    numbers, data = np.ones(5, dtype=np.int64), np.frombuffer(b"\0", dtype=np.uint8)
    tables = numbers, numbers.reshape(1, 5), numbers, numbers, numbers, np.zeros(1, dtype=np.uint8)
    kernel.answer_together(data, numbers, *tables, *_work(0))
    return IndexTables


def _work(requests: int) -> tuple[Array, Array, Array]:
    # What the kernel needs for so many requests, beside the tables.
    request, rows = np.zeros(kernel.REQUEST_SHAPE, dtype=np.int64), np.zeros((requests, 5), dtype=np.int64)
    return np.zeros(4, dtype=np.uint64), request, rows


def _header_pattern() -> bytes:
    # An answer's header as encode_command writes it, for its three numbers.
    marks = 1111111111, 2222222222, 1333333333
    request = RemotingCommand(RequestCode.QUERY_MESSAGE, marks[2])
    pattern = encode_command(request.answer(ResponseCode.SUCCESS, None, last_update_fields(*marks[:2])))[_BEGIN_AT:]
    for mark in marks:
        pattern = pattern.replace(b"%d" % mark, b"%d")
    return pattern


_HEADER = _header_pattern()
