"""KeyQueries: the compiled answer to queries by key that arrive together, without another thread.

It answers from open index files and segments in the page cache; whatever else is asked goes to ``processor``'s plain
handlers. It needs the compiler, which the plain code does without.
"""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from indexd.errors import IndexdError
from indexd.query import QueryIndex
from indexd.query.source import OPEN_FILES_MAX, Look, OpenIndexFile
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
Array = npt.NDArray[np.generic]


class Answered(NamedTuple):
    """Key queries that found something: how many, how many bytes of what came, and the answers."""

    requests: int
    size: int
    answers: bytes


class Tables(NamedTuple):
    """Arrays as ``key_queries_kernel.answer_together`` takes them."""

    files: Array
    headers: Array
    segments: Array
    sizes: Array
    places: Array
    buffer: Array
    work: Array

    @classmethod
    def of(cls, files: int = 0, segments: int = 0, frames: int = 0, size: int = 0) -> Tables:
        """Empty ones for so many index files, segments and frames, and ``size`` bytes of answers."""
        return cls(
            np.zeros(files, dtype=np.int64),
            np.zeros((files, 5), dtype=np.int64),
            np.full(segments, -1, dtype=np.int64),
            np.ones(5, dtype=np.int64),
            np.zeros(frames, dtype=np.int64),
            np.zeros(kernel.SCRATCH + size, dtype=np.uint8),
            np.zeros(4, dtype=np.uint64),
        )


class IndexTables:
    """The open files of one index, for the kernel; made anew when other files are opened or closed."""

    def __init__(self, index: QueryIndex) -> None:
        self._index = index
        self._look: Look | None = None
        self._files_opened = self._segments_opened = -1
        self._tables = Tables.of(frames=_FRAMES_MAX, size=_BYTES_MAX)

    def prepare(self) -> Tables | None:
        """The tables as of now; None if there are too many files, or one cannot be opened now."""
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
        return self._tables

    def _list_index_files(self, look: Look) -> None:
        index, sizes = self._index, self._tables.sizes
        self._look = None
        opened = list(index.newest_first(look))
        self._tables = self._tables._replace(
            files=np.array([found.reader.file.fileno() for found in opened], dtype=np.int64),
            headers=np.array(list(map(_header, opened)), dtype=np.int64).reshape(-1, 5),
        )
        sizes[kernel.SLOTS], sizes[kernel.ENTRIES] = look.layout.hash_slot_num, look.layout.index_num
        self._look, self._files_opened = look, index.files_opened

    def _list_segments(self) -> None:
        log, sizes = self._index.log, self._tables.sizes
        segments, size = log.segments, log.segment_size
        first = segments[0].base if segments else 0
        count = (segments[-1].base - first) // size + 1 if segments else 0
        descriptors = np.full(count if count <= _SEGMENTS_MAX else 0, -1, dtype=np.int64)
        for base, descriptor in log.open_files():
            number = (base - first) // size
            if 0 <= number < len(descriptors):
                descriptors[number] = descriptor
        sizes[kernel.FIRST_BASE], sizes[kernel.SEGMENT], sizes[kernel.FRAME_MAX] = (
            first,
            size,
            log.options.frame_size_max,
        )
        self._tables = self._tables._replace(segments=descriptors)
        self._segments_opened = log.files_opened


def _header(found: OpenIndexFile) -> tuple[int, int, int, int, bool]:
    if found.mark is None or not found.mark.full:
        return 0, 0, 0, 1, False  # it grows: the kernel reads it each time
    header = found.mark.header
    return header.begin_timestamp, header.end_timestamp, header.end_phy_offset, header.index_count, True


class KeyQueries:
    """One for an outlet whose requests are not signed and want the broker's own answer, of ``size_max`` bytes."""

    def __init__(self, queries: Queries, log: Any, size_max: int) -> None:
        self._queries, self._log = queries, log
        config = queries.config.query
        self._limits = np.zeros(5, dtype=np.int64)
        self._limits[kernel.TOGETHER] = TOGETHER_MAX
        self._limits[kernel.BODY] = size_max
        self._limits[kernel.MOST] = config.max_msgs_num_batch
        self._limits[kernel.MOST_UNIQUE] = min(config.default_query_max_num, config.max_msgs_num_batch)
        self._pieces = kernel.pack(*_header_pieces())
        self._request = np.zeros(kernel.REQUEST_SHAPE, dtype=np.int64)
        self._said = np.zeros(2, dtype=np.int64)

    def answer(self, data: bytes, frame_max: int) -> Answered | None:
        """The answers to as many requests at the begin of ``data`` as one call can answer; None: to none."""
        if not data.startswith(_BEGIN, _BEGIN_AT):
            return None
        self._limits[kernel.FRAME] = min(frame_max, LENGTH_SIZE + HEADER_MAX)
        began = time.perf_counter()
        try:
            found = self._queries.ask_compiled(lambda compiled: self._answer(compiled, data))
        except WouldWaitError:
            return None
        except Exception as error:  # noqa: BLE001 - whatever it is, the plain code may still answer
            self._log.warning("remoting_failed", code=int(RequestCode.QUERY_MESSAGE), problem=repr(error))
            return None
        self._queries.count(FOUND, began, found.requests)
        return found

    def _answer(self, compiled: IndexTables, data: bytes) -> Answered:
        tables = compiled.prepare()
        if tables is None:
            raise WouldWaitError
        rest = self._request, *self._pieces, self._said
        count = kernel.answer_together(np.frombuffer(data, dtype=np.uint8), self._limits, *tables, *rest)
        if not count:
            raise WouldWaitError
        taken, end = self._said.tolist()
        return Answered(count, taken, tables.buffer[kernel.SCRATCH : end].tobytes())


def load_key_queries() -> type[IndexTables] | None:
    """IndexTables, the kernel compiled: seconds, once a machine. None without a compiler or without RWF_NOWAIT."""
    is_compiling = not numba.config.DISABLE_JIT  # type: ignore[attr-defined]  # set by the environment
    if not is_compiling or not hasattr(os, "RWF_NOWAIT") or not hasattr(ctypes.CDLL(None), "preadv2"):
        return None
    numbers, data = np.ones(5, dtype=np.int64), np.frombuffer(b"\0", dtype=np.uint8)
    request = np.zeros(kernel.REQUEST_SHAPE, dtype=np.int64)
    kernel.answer_together(data, numbers, *Tables.of(), request, *kernel.pack(""), numbers)
    return IndexTables


def _header_pieces() -> list[str]:
    # An answer's header as encode_command writes it, cut where its three numbers stand.
    marks = 1111111111, 2222222222, 1333333333
    request = RemotingCommand(RequestCode.QUERY_MESSAGE, marks[2])
    answer = encode_command(request.answer(ResponseCode.SUCCESS, None, last_update_fields(*marks[:2])))
    pieces, rest = [], answer[_BEGIN_AT:].decode("ascii")
    for mark in marks:
        piece, _, rest = rest.partition(str(mark))
        pieces.append(piece)
    return [*pieces, rest]
