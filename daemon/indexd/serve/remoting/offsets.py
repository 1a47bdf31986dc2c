"""Queue offsets by store time, the least and the largest, and the earliest store time (spec 5.5, 5.7)."""

from __future__ import annotations

from indexd.query import query_time
from indexd.query.broker_message import earliest_time, queue_bounds
from indexd.serve.queries import Queries
from indexd.serve.remoting.asked import handler, text, whole
from indexd.serve.remoting.codes import ResponseCode
from indexd.serve.remoting.command import RemotingCommand


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
