"""Handlers of requests that the index answers: queries, queue offsets and times, and the daemon's own figures.

``handler`` turns what a query raises into an answer; ``text`` and ``whole`` read ext fields as the broker does.
Messages are sent as frames (spec rocketmq-store 9.3-9.5, 9.8), figures as the table of texts in which a broker shows
its own (``mqadmin brokerStatus``).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from functools import wraps
from typing import Any

from indexd import __version__
from indexd.commitlog.decoder import parse_java_number
from indexd.commitlog.format import FRAME_SIZE_MIN
from indexd.errors import IndexdError
from indexd.query import Data, NotFound, query_time
from indexd.query import broker_message as broker
from indexd.query.broker_message import FoundFrames, KeyRequest, earliest_time, queue_bounds
from indexd.serve.board import Board
from indexd.serve.queries import EMPTY_COVERED, EMPTY_UNCOVERED, FOUND, NotAnsweredError, Queries, TooLongError
from indexd.serve.remoting.command import VERSION, RemotingCommand, ResponseCode, last_update_fields

Handler = Callable[[Queries, RemotingCommand], Awaitable[RemotingCommand]]
_SHOWN_MAX = 80


class FieldError(Exception):
    """An ext field is missing or of no use; str(): which, and why."""


def handler(answer: Handler) -> Handler:
    """``answer``, but that it raises nothing that a query raises: the client is told in a remark.

    SYSTEM_BUSY where asking again may help, else SYSTEM_ERROR.
    """

    @wraps(answer)
    async def answer_all(queries: Queries, command: RemotingCommand) -> RemotingCommand:
        try:
            return await answer(queries, command)
        except FieldError as error:
            return command.answer(ResponseCode.SYSTEM_ERROR, str(error))
        except TooLongError as error:
            return command.answer(ResponseCode.SYSTEM_ERROR, str(error))
        except NotAnsweredError as error:
            return command.answer(ResponseCode.SYSTEM_BUSY, str(error))
        except IndexdError as error:
            return command.answer(ResponseCode.SYSTEM_ERROR, error.line())

    return answer_all


def text(command: RemotingCommand, name: str) -> str:
    """A field that has to be there; FieldError."""
    value = command.ext_fields.get(name)
    if value is None:
        raise FieldError(f"ext field {name} is missing")
    return value


def whole(command: RemotingCommand, name: str, bits: int = 64, default: int | None = None) -> int:
    """A field that has to be a whole number of so many bits, as Java reads one; FieldError.

    ``default``: for a field that need not be there.
    """
    value = command.ext_fields.get(name)
    if value is None and default is not None:
        return default
    number = parse_java_number(text(command, name) if value is None else value, bits)
    if number is None:
        raise FieldError(f"ext field {name} is no whole number of {bits} bits: {value!r:.{_SHOWN_MAX}}")
    return number


#: Whom PULL_MESSAGE is answered: tools that look at single messages, none that consumes.
TOOLS_GROUP = "TOOLS_CONSUMER"
_CONSUME_ELSEWHERE = "indexd answers queries: consume from the broker itself"
# What an answer has beside its body.
_HEADER_MAX = 4096
_INDEX_TYPES = ("K", "U", "T")
_PULL_CODES = {
    "FOUND": ResponseCode.SUCCESS,
    "NO_MATCHED_MESSAGE": ResponseCode.PULL_RETRY_IMMEDIATELY,
    "MESSAGE_WAS_REMOVING": ResponseCode.PULL_RETRY_IMMEDIATELY,
    "OFFSET_OVERFLOW_ONE": ResponseCode.PULL_NOT_FOUND,
    "OFFSET_OVERFLOW_BADLY": ResponseCode.PULL_OFFSET_MOVED,
    "OFFSET_TOO_SMALL": ResponseCode.PULL_OFFSET_MOVED,
}


@handler
async def query_message(queries: Queries, command: RemotingCommand) -> RemotingCommand:
    """QUERY_MESSAGE (12): the broker's own answer, or the exact one where the configuration says so."""
    request = KeyRequest(
        text(command, "topic"),
        text(command, "key"),
        whole(command, "maxNum", 32),
        whole(command, "beginTimestamp"),
        whole(command, "endTimestamp"),
        is_unique=command.ext_fields.get("_UNIQUE_KEY_QUERY") == "true",
        index_type=_index_type(command),
    )
    ask = broker.query_message_exact if queries.config.remoting.remoting_mode == "exact" else broker.query_message
    size_max = size_max_of(queries)

    def question(data: Data) -> tuple[FoundFrames, bytes]:
        found = ask(data.index, request, size_max)
        return found, b"".join(found.frames)  # put together here: the event loop has others to serve

    found, body = await queries.query(question, lambda asked: _result(asked[0]))
    code = ResponseCode.SUCCESS if found.frames else ResponseCode.QUERY_NOT_FOUND
    return command.answer(code, found.remark, last_update_fields(*found.last_update), body)


@handler
async def view_message_by_id(queries: Queries, command: RemotingCommand) -> RemotingCommand:
    """VIEW_MESSAGE_BY_ID (33): one frame, or a remark that names the offset."""
    phy_offset, size_max = whole(command, "offset"), size_max_of(queries)
    found = await queries.query(
        lambda data: broker.view_message(data.index, phy_offset, size_max),
        lambda found: EMPTY_COVERED if isinstance(found, NotFound) else FOUND,  # it is the log itself that is asked
    )
    if isinstance(found, NotFound):
        return command.answer(ResponseCode.SYSTEM_ERROR, found.reason)
    return command.answer(ResponseCode.SUCCESS, body=found)


@handler
async def pull_message(queries: Queries, command: RemotingCommand) -> RemotingCommand:
    """PULL_MESSAGE (11) of a tool that looks a message up by its queue offset. Nothing is ever waited for."""
    if command.ext_fields.get("consumerGroup") != TOOLS_GROUP:
        return command.answer(ResponseCode.SERVICE_NOT_AVAILABLE, _CONSUME_ELSEWHERE)
    topic, queue_id = text(command, "topic"), whole(command, "queueId", 32)
    queue_offset, max_num = whole(command, "queueOffset"), whole(command, "maxMsgNums", 32)
    size_max = size_max_of(queries)
    found = await queries.query(
        lambda data: broker.pull_message(data.index, topic, queue_id, queue_offset, max_num, size_max),
        lambda answer: FOUND if answer.frames else EMPTY_COVERED if answer.is_covered else EMPTY_UNCOVERED,
    )
    header = {
        "suggestWhichBrokerId": "0",
        "nextBeginOffset": str(found.next_begin_offset),
        "minOffset": str(found.min_offset),
        "maxOffset": str(found.max_offset),
    }
    code = _PULL_CODES.get(found.status)
    if code is None:  # there is no queue, or nothing in it
        code = ResponseCode.PULL_NOT_FOUND if queue_offset == 0 else ResponseCode.PULL_OFFSET_MOVED
    return command.answer(code, found.status, header, b"".join(found.frames))


def _index_type(command: RemotingCommand) -> str | None:
    given = command.ext_fields.get("indexType")
    return given if given in _INDEX_TYPES else None


def size_max_of(queries: Queries) -> int:
    """Bytes of messages in one answer."""
    return max(queries.config.remoting.remoting_frame_max - _HEADER_MAX, FRAME_SIZE_MIN)


def _result(found: FoundFrames) -> str:
    if found.frames:
        return FOUND
    return EMPTY_COVERED if found.is_covered else EMPTY_UNCOVERED


@handler
async def search_offset_by_timestamp(queries: Queries, command: RemotingCommand) -> RemotingCommand:
    """SEARCH_OFFSET_BY_TIMESTAMP (29): as the broker's search finds it; 0 in a queue that there is not."""
    topic, queue_id = _queue(command)
    timestamp = whole(command, "timestamp")
    is_upper = command.ext_fields.get("boundaryType", "").lower() == "upper"  # any other word is lower to the broker
    found = await queries.ask(
        lambda data: query_time(data.index, topic, queue_id, timestamp, "upper" if is_upper else "lower")
    )
    return _answer(command, "offset", found.queue_offset or 0)


@handler
async def get_max_offset(queries: Queries, command: RemotingCommand) -> RemotingCommand:
    """GET_MAX_OFFSET (30): behind the last message; 0 in a queue that there is not."""
    topic, queue_id = _queue(command)
    _, largest = await queries.ask(lambda data: queue_bounds(data.index, topic, queue_id))
    return _answer(command, "offset", largest)


@handler
async def get_min_offset(queries: Queries, command: RemotingCommand) -> RemotingCommand:
    """GET_MIN_OFFSET (31): the first message that is still in the log; 0 in a queue that there is not."""
    topic, queue_id = _queue(command)
    least, _ = await queries.ask(lambda data: queue_bounds(data.index, topic, queue_id))
    return _answer(command, "offset", least)


@handler
async def get_earliest_msg_storetime(queries: Queries, command: RemotingCommand) -> RemotingCommand:
    """GET_EARLIEST_MSG_STORETIME (32): of the first message that is still in the log, in ms; -1 where there is none."""
    topic, queue_id = _queue(command)
    return _answer(command, "timestamp", await queries.ask(lambda data: earliest_time(data.index, topic, queue_id)))


def _queue(command: RemotingCommand) -> tuple[str, int]:
    return text(command, "topic"), whole(command, "queueId", 32)


def _answer(command: RemotingCommand, name: str, number: int) -> RemotingCommand:
    return command.answer(ResponseCode.SUCCESS, ext_fields={name: str(number)})


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
