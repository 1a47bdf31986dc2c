"""Messages by key, by physical offset and by queue offset, as frames (spec rocketmq-store 9.3-9.5, 9.8)."""

from __future__ import annotations

from indexd.commitlog.format import FRAME_SIZE_MIN
from indexd.query import Data, NotFound
from indexd.query import broker_message as broker
from indexd.query.broker_message import FoundFrames, KeyRequest
from indexd.serve.queries import EMPTY_COVERED, EMPTY_UNCOVERED, FOUND, Queries
from indexd.serve.remoting.asked import Asking, QueryHandler, handler, text, whole
from indexd.serve.remoting.codes import ResponseCode
from indexd.serve.remoting.command import RemotingCommand

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


@QueryHandler
def query_message(queries: Queries, command: RemotingCommand) -> Asking[tuple[FoundFrames, bytes]]:
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

    def answer(asked: tuple[FoundFrames, bytes]) -> RemotingCommand:
        found, body = asked
        header = last_update_fields(*found.last_update)
        code = ResponseCode.SUCCESS if found.frames else ResponseCode.QUERY_NOT_FOUND
        return command.answer(code, found.remark, header, body)

    return Asking(question, lambda asked: _result(asked[0]), answer)


@QueryHandler
def view_message_by_id(queries: Queries, command: RemotingCommand) -> Asking[bytes | NotFound]:
    """VIEW_MESSAGE_BY_ID (33): one frame, or a remark that names the offset."""
    phy_offset, size_max = whole(command, "offset"), size_max_of(queries)

    def answer(found: bytes | NotFound) -> RemotingCommand:
        if isinstance(found, NotFound):
            return command.answer(ResponseCode.SYSTEM_ERROR, found.reason)
        return command.answer(ResponseCode.SUCCESS, body=found)

    return Asking(
        lambda data: broker.view_message(data.index, phy_offset, size_max),
        lambda found: EMPTY_COVERED if isinstance(found, NotFound) else FOUND,  # it is the log itself that is asked
        answer,
    )


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


def last_update_fields(timestamp: int, phy_offset: int) -> dict[str, str]:
    """What an answer to a query by key says of the newest index file, beside its messages."""
    return {"indexLastUpdateTimestamp": str(timestamp), "indexLastUpdatePhyoffset": str(phy_offset)}


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
