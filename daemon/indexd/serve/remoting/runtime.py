"""The index's own figures, as the table of texts in which a broker shows its (``mqadmin brokerStatus``)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from indexd import __version__
from indexd.errors import IndexdError
from indexd.query import Data
from indexd.serve.board import Board
from indexd.serve.queries import NotAnsweredError, Queries
from indexd.serve.remoting.codes import VERSION, ResponseCode
from indexd.serve.remoting.command import RemotingCommand

_PREFIX = "indexd"
# What the log's own figures may take; a table without them is better than none.
_LOG_SECONDS = 0.5
# Figures of the log and of the index's work that a broker has under the same names.
_SAME = ("commitLogMinOffset", "commitLogMaxOffset", "dispatchBehindBytes")
# No message is put here or taken from here, and tools divide these texts without a look.
_NO_RATES = dict.fromkeys(("putTps", "getTransferredTps", "getTransferedTps"), "0.0 0.0 0.0") | dict.fromkeys(
    ("timerEnqueueTps", "timerDequeueTps"), "0.0"
)
# A broker's queues of requests to send and to be given messages: there are none here, so nothing waits in them.
_NO_QUEUES = dict.fromkeys(
    (
        "sendThreadPoolQueueSize", "sendThreadPoolQueueHeadWaitTimeMills",
        "pullThreadPoolQueueSize", "pullThreadPoolQueueHeadWaitTimeMills",
        "ackThreadPoolQueueSize", "ackThreadPoolQueueHeadWaitTimeMills",
        "queryThreadPoolQueueSize", "queryThreadPoolQueueHeadWaitTimeMills",
        "pageCacheLockTimeMills", "timerReadBehind", "timerOffsetBehind", "timerCongestNum",
    ),
    "0",
)  # fmt: skip


async def get_broker_runtime_info(queries: Queries, command: RemotingCommand) -> RemotingCommand:
    """GET_BROKER_RUNTIME_INFO (28), answered in every phase."""
    table = runtime_table(queries.board)
    # What can be known without the log is told all the same.
    with suppress(NotAnsweredError, IndexdError, TimeoutError):
        async with asyncio.timeout(_LOG_SECONDS):
            table |= await queries.ask(_of_the_log)
    return command.answer(ResponseCode.SUCCESS, body=table_body(table))


def table_body(table: Mapping[str, str]) -> bytes:
    """The body that carries a table."""
    return json.dumps({"table": dict(table)}).encode()


def runtime_table(board: Board) -> dict[str, str]:
    """What a broker's table has and is known here, and ``indexd_figures``."""
    row = board.row()
    same = {name: str(row[name]) for name in _SAME if isinstance(row.get(name), int)}
    head = {
        "brokerActive": "true",
        "brokerVersion": str(VERSION),
        "brokerVersionDesc": f"indexd {__version__}",
        "bootTimestamp": str(row["startedAt"]),
    }
    return head | _NO_RATES | _NO_QUEUES | same | _figures(row)


def indexd_figures(board: Board) -> dict[str, str]:
    """Every figure of the board that is one value, as ``indexdPhase``; those of a group as ``indexdQueriesFound``.

    To be shown beside a broker's own, none of which begins so.
    """
    return _figures(board.row())


def _of_the_log(data: Data) -> dict[str, str]:
    log = data.index.log
    log.begin_query()
    earliest = log.store_timestamp(log.segments[0].base, 1) if log.segments else -1
    return {} if earliest < 0 else {"earliestMessageTimeStamp": str(earliest)}


def _figures(row: Mapping[str, Any]) -> dict[str, str]:
    return dict(_flat(_PREFIX, row))


def _flat(prefix: str, row: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in row.items():
        full = prefix + "".join(part[:1].upper() + part[1:] for part in name.split("_"))
        if isinstance(value, Mapping):
            yield from _flat(full, value)
        elif isinstance(value, bool):
            yield full, "true" if value else "false"
        elif isinstance(value, str | int | float):
            yield full, str(value)
