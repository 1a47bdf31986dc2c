"""KeyQueries: queries by key that came together, answered by one compiled call out of what is in memory."""

from __future__ import annotations

import time

import numpy as np

from indexd.query import Data
from indexd.serve.in_memory import InMemory, Tables, load_in_memory
from indexd.serve.in_memory_kernel import SCRATCH
from indexd.serve.queries import FOUND, Queries
from indexd.serve.remoting import key_queries_kernel as kernel
from indexd.serve.remoting.command import (
    HEADER_MAX,
    LENGTH_SIZE,
    RemotingCommand,
    RequestCode,
    ResponseCode,
    encode_command,
)
from indexd.serve.remoting.hall import Answered
from indexd.serve.remoting.messages import last_update_fields, size_max_of
from indexd.serve.remoting.upstream import SparingLog
from indexd.storage.disk import WouldWaitError

#: Requests of one call, which has bounds besides on what it reads and walks.
TOGETHER_MAX = 128
# How the frames begin that are worth a look, behind their lengths: so all clients write it.
_BEGIN = f'{{"code":{RequestCode.QUERY_MESSAGE:d},'.encode()
_BEGIN_AT = 8
_CODES = RequestCode.QUERY_MESSAGE, ResponseCode.SUCCESS


class KeyQueries:
    """For one outlet, of requests that bear no signature and want the broker's own answer."""

    def __init__(self, queries: Queries, log: SparingLog) -> None:
        self._queries, self._log = queries, log
        config = queries.config.query
        self._limits = np.zeros(5, dtype=np.int64)
        self._limits[kernel.TOGETHER] = TOGETHER_MAX
        self._limits[kernel.BODY] = size_max_of(queries)
        self._limits[kernel.MOST] = config.max_msgs_num_batch
        self._limits[kernel.MOST_UNIQUE] = min(config.default_query_max_num, config.max_msgs_num_batch)
        self._pieces = kernel.pack(*_header_pieces())
        self._request = np.zeros(kernel.REQUEST_SHAPE, dtype=np.int64)
        self._said = np.zeros(2, dtype=np.int64)

    def __repr__(self) -> str:
        return f"KeyQueries({self._queries})"

    def answer(self, data: bytes, frame_max: int) -> Answered | None:
        """See ``client.Processor.process_together``."""
        if not data.startswith(_BEGIN, _BEGIN_AT):
            return None
        self._limits[kernel.FRAME] = min(frame_max, LENGTH_SIZE + HEADER_MAX)
        began = time.perf_counter()
        try:
            found = self._queries.ask_at_once(lambda opened: self._answer(opened, data))
        except WouldWaitError:
            return None
        except Exception as error:  # noqa: BLE001 - whatever it is, the plain way may still answer
            self._log.warning("remoting_failed", code=int(RequestCode.QUERY_MESSAGE), problem=repr(error))
            return None
        self._queries.count(FOUND, began, found.requests)
        return found

    def _answer(self, opened: Data, data: bytes) -> Answered:
        index = opened.index
        look, memory = index.look(), index.memory
        tables = memory.tables(look) if isinstance(memory, InMemory) else None
        if tables is None:
            raise WouldWaitError
        rest = self._request, *self._pieces, self._said
        count = kernel.answer_together(np.frombuffer(data, dtype=np.uint8), self._limits, *tables, *rest)
        if not count:
            raise WouldWaitError
        taken, end = self._said.tolist()
        return Answered(*_CODES, count, taken, tables.buffer[SCRATCH:end].tobytes())


def load_key_queries() -> type[InMemory] | None:
    """``load_in_memory``, and the kernel of this module."""
    memory = load_in_memory()
    if memory is not None:
        numbers, data = np.ones(5, dtype=np.int64), np.frombuffer(b"\0", dtype=np.uint8)
        request = np.zeros(kernel.REQUEST_SHAPE, dtype=np.int64)
        kernel.answer_together(data, numbers, *Tables.of_nothing(), request, *kernel.pack(""), numbers)
    return memory


def _header_pieces() -> list[str]:
    # As it is written elsewhere, cut where its numbers are.
    marks = 1111111111, 2222222222, 1333333333
    request = RemotingCommand(RequestCode.QUERY_MESSAGE, marks[2])
    answer = encode_command(request.answer(ResponseCode.SUCCESS, None, last_update_fields(*marks[:2])))
    pieces, rest = [], answer[_BEGIN_AT:].decode("ascii")
    for mark in marks:
        piece, _, rest = rest.partition(str(mark))
        pieces.append(piece)
    return [*pieces, rest]
