"""KeyQueries: the compiled answer to queries by key that arrive together, without another thread.

It answers from open index files and segments in the page cache; whatever else is asked goes to ``processor``'s plain
handlers. It needs the compiler, which the plain code does without.
"""

from __future__ import annotations

import struct
import time
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from indexd.query import QueryIndex
from indexd.query.source import OPEN_FILES_MAX, IndexSnapshot, OpenIndexFile
from indexd.serve.queries import FOUND, Queries
from indexd.serve.remoting import key_queries_kernel as kernel
from indexd.serve.remoting.command import (
    HEADER_MAX,
    LENGTH_SIZE,
    OUR_LANGUAGE,
    VERSION,
    RequestCode,
    ResponseCode,
)
from indexd.storage.disk import WouldWaitError

#: Requests of one call, which has bounds besides on what it reads and walks.
TOGETHER_MAX = 128
# Frames of one answer, and bytes of all answers of a call.
_FRAMES_MAX = 512
_BYTES_MAX = 256 << 10
# The first bytes of the frames that are tried, behind their lengths: all clients write them so.
_BEGIN = f'{{"code":{RequestCode.QUERY_MESSAGE:d},'.encode()
_BEGIN_AT = 8
_HEADS = struct.Struct(">ii")  # sizes of the frame and of its header
# The header of an answer, as encode_command writes it, for its three numbers.
_HEADER = (
    f'{{"code":{ResponseCode.SUCCESS:d},"extFields":{{"indexLastUpdateTimestamp":"%d","indexLastUpdatePhyoffset":"%d"}},'
    f'"flag":1,"language":"{OUR_LANGUAGE}","opaque":%d,"serializeTypeCurrentRPC":"JSON","version":{VERSION}}}'
).encode()
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
        self._opened = -1, -1
        self._files: Array = np.zeros(0, dtype=np.int64)
        self._headers = self._segments = self._files.reshape(0, 1)
        self._sizes = self._files
        self._buffer = np.zeros(kernel.SCRATCH + _BYTES_MAX, dtype=np.uint8)
        self._work = _work(TOGETHER_MAX)

    def prepare(self) -> None:
        """List the files that are open as of now; WouldWaitError if they are more than stay open.

        OverflowError for a segment beyond the offset of any entry.
        """
        index = self._index
        look = index.look()
        if len(look.files) > OPEN_FILES_MAX:  # the last one would close the first
            raise WouldWaitError
        if look is not self._look or self._opened != (index.files_opened, index.log.files_opened):
            self._list(look)

    def answer(self, data: bytes, frame_max: int, limits: Array) -> Answered | None:
        """See ``KeyQueries.answer``."""
        self.prepare()
        asked = np.frombuffer(data, dtype=np.uint8), min(frame_max, LENGTH_SIZE + HEADER_MAX), limits
        tables = self._files, self._headers, self._segments, self._sizes
        count, taken = kernel.answer_together(*asked, *tables, self._buffer, *self._work)
        if not count:
            return None
        answers: list[bytes | memoryview] = []
        for opaque, timestamp, phy_offset, begin, end in self._work[-1][:count].tolist():
            header = _HEADER % (timestamp, phy_offset, opaque)
            answers += [_HEADS.pack(LENGTH_SIZE + len(header) + end - begin, len(header)), header]
            answers.append(self._buffer.data[begin:end])
        return Answered(count, taken, b"".join(answers))

    def _list(self, look: IndexSnapshot) -> None:
        index, log, layout, self._look = self._index, self._index.log, look.layout, None
        files = list(index.newest_first(look))
        self._files = np.array([found.reader.file.fileno() for found in files], dtype=np.int64)
        self._headers = np.array(list(map(_header, files)), dtype=np.int64).reshape(-1, 5)
        self._segments = np.array(list(log.open_files()), dtype=np.int64).reshape(-1, 2)
        sizes = log.segment_size, layout.hash_slot_num, layout.index_num, log.options.frame_size_max
        self._sizes = np.array(sizes, dtype=np.int64)
        self._look, self._opened = look, (index.files_opened, log.files_opened)


def _header(found: OpenIndexFile) -> tuple[int, int, int, int, bool]:
    if found.mark is None or not found.mark.full:
        return 0, 0, 0, 1, False  # it grows: the kernel reads it each time
    header = found.mark.header
    return header.begin_timestamp, header.end_timestamp, header.end_phy_offset, header.index_count, True


class KeyQueries:
    """One for an outlet whose requests are not signed and want the broker's own answer, of ``size_max`` bytes."""

    def __init__(self, queries: Queries, size_max: int) -> None:
        self._queries, config = queries, queries.config.query
        most = config.max_msgs_num_batch
        self._limits = np.array([size_max, most, min(config.default_query_max_num, most)], dtype=np.int64)

    def answer(self, data: bytes, frame_max: int) -> Answered | None:
        """The answers to as many requests at the begin of ``data`` as one call can answer; None: to none."""
        if not data.startswith(_BEGIN, _BEGIN_AT):
            return None
        began = time.perf_counter()
        found = self._queries.ask_compiled(lambda compiled: compiled.answer(data, frame_max, self._limits))
        if found is not None:
            self._queries.count(FOUND, began, found.requests)
        return found


def load_key_queries() -> type[IndexTables] | None:
    """IndexTables, the kernel compiled: seconds, once a machine. None without a compiler."""
    if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]  # set by the environment
        return None
    numbers, data = np.ones(5, dtype=np.int64), np.frombuffer(b"\0", dtype=np.uint8)
    tables = numbers, numbers.reshape(1, 5), numbers.reshape(1, 5), numbers, np.zeros(1, dtype=np.uint8)
    kernel.answer_together(data, 1, numbers, *tables, *_work(0))
    return IndexTables


def _work(requests: int) -> tuple[Array, Array, Array, Array]:
    # What the kernel needs for so many requests, beside the tables.
    request, rows = np.zeros(kernel.REQUEST_SHAPE, dtype=np.int64), np.zeros((requests, 5), dtype=np.int64)
    return np.zeros(_FRAMES_MAX, dtype=np.int64), np.zeros(3, dtype=np.uint64), request, rows
