"""Answers requests: from the index, from the routes that lead here, or with what a name server or the broker says.

Messages are sent as frames (spec rocketmq-store 9.3-9.5, 9.8), figures as the table of texts in which a broker shows
its own (``mqadmin brokerStatus``).
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from indexd import __version__
from indexd.commitlog.decoder import parse_java_number
from indexd.commitlog.format import FRAME_SIZE_MIN
from indexd.config import Config
from indexd.consumequeue.format import is_topic_name, queue_id_of
from indexd.errors import IndexdError, MissingOk, UsageError
from indexd.query import Data, KeyQuery, NotFound, QueryIndex, query_time
from indexd.query import broker_message as broker
from indexd.query.source import topics_of
from indexd.serve.daemon_status import DaemonStatus
from indexd.serve.queries import EMPTY_COVERED, EMPTY_UNCOVERED, FOUND, NotAnsweredError, Queries, TooLongError
from indexd.serve.remoting.access import Credentials
from indexd.serve.remoting.command import VERSION, RemotingCommand, RequestCode, ResponseCode
from indexd.serve.remoting.key_queries import KeyQueries
from indexd.serve.remoting.routes import (
    BrokerPlace,
    lead_cluster,
    lead_route,
    make_cluster,
    make_route,
    own_place,
    read_json,
    wants_standard,
    write_json,
)
from indexd.serve.remoting.upstream import IN_A_CIRCLE, Client, Forwarder, Patience, UpstreamError

Handler = Callable[[Queries, RemotingCommand], Awaitable[RemotingCommand]]
#: Whom PULL_MESSAGE is answered: tools that look at single messages, none that consumes.
TOOLS_GROUP = "TOOLS_CONSUMER"

_CONSUME_ELSEWHERE = "indexd answers queries: consume from the broker itself"
_NO_UPSTREAM = "indexd answers queries, and has no upstream_namesrv to pass others to"
_NO_BROKERS = "a broker registers with its name servers themselves, not through indexd"
_ROUTE_HINT = "give node_id, the broker's brokerName, or broker_address"
_SHOWN_MAX = 80
# What an answer has beside its body.
_HEADER_MAX = 4096
# Bytes of routes that are kept.
_ROUTES_MAX = 8 << 20
# A name server takes the connection of these for the broker's: it would be ours.
_REGISTRATIONS = frozenset({103, 904})
_INDEX_TYPES = ("K", "U", "T")
_PULL_CODES = {
    "FOUND": ResponseCode.SUCCESS,
    "NO_MATCHED_MESSAGE": ResponseCode.PULL_RETRY_IMMEDIATELY,
    "MESSAGE_WAS_REMOVING": ResponseCode.PULL_RETRY_IMMEDIATELY,
    "OFFSET_OVERFLOW_ONE": ResponseCode.PULL_NOT_FOUND,
    "OFFSET_OVERFLOW_BADLY": ResponseCode.PULL_OFFSET_MOVED,
    "OFFSET_TOO_SMALL": ResponseCode.PULL_OFFSET_MOVED,
}
# Figures of the log and of the index's work that a broker has under the same names.
_SAME = ("commitLogMinOffset", "commitLogMaxOffset", "dispatchBehindBytes")
# No message is put here or taken from here, nothing waits, and tools divide these texts without a look.
_NOT_HERE = {
    **dict.fromkeys(("putTps", "getTransferredTps", "getTransferedTps"), "0.0 0.0 0.0"),
    **dict.fromkeys(("timerEnqueueTps", "timerDequeueTps"), "0.0"),
    **dict.fromkeys(("pageCacheLockTimeMills", "timerReadBehind", "timerOffsetBehind", "timerCongestNum"), "0"),
    **{
        f"{pool}ThreadPoolQueue{what}": "0"
        for pool in ("send", "pull", "ack", "query")
        for what in ("Size", "HeadWaitTimeMills")
    },
}


def text(command: RemotingCommand, name: str) -> str:
    """A field that has to be there; UsageError."""
    value = command.ext_fields.get(name)
    if value is None:
        raise UsageError(f"ext field {name} is missing", hint="")
    return value


def whole(command: RemotingCommand, name: str, bits: int = 64) -> int:
    """A field that has to be a whole number of so many bits, as Java reads one; UsageError."""
    value = text(command, name)
    number = parse_java_number(value, bits)
    if number is None:
        raise UsageError(f"ext field {name} is no whole number of {bits} bits: {value!r:.{_SHOWN_MAX}}", hint="")
    return number


async def answer_from_index(handler: Handler, queries: Queries, command: RemotingCommand) -> RemotingCommand:
    """What ``handler`` answers; what a query raises is told in a remark.

    SYSTEM_BUSY where asking again may help, else SYSTEM_ERROR.
    """
    try:
        return await handler(queries, command)
    except NotAnsweredError as error:
        code = ResponseCode.SYSTEM_ERROR if isinstance(error, TooLongError) else ResponseCode.SYSTEM_BUSY
        return command.answer(code, str(error))
    except IndexdError as error:
        return command.answer(ResponseCode.SYSTEM_ERROR, error.line())


# --- messages, offsets and times --------------------------------------------------------------------------------


async def query_message(queries: Queries, command: RemotingCommand) -> RemotingCommand:
    """QUERY_MESSAGE (12): the broker's own answer, or the exact one where the configuration says so."""
    topic, key, index_type = text(command, "topic"), text(command, "key"), command.ext_fields.get("indexType")
    max_num, times = whole(command, "maxNum", 32), (whole(command, "beginTimestamp"), whole(command, "endTimestamp"))
    if command.ext_fields.get("_UNIQUE_KEY_QUERY") == "true":  # as many as the broker says, whatever was sent
        max_num, index_type = queries.config.query.default_query_max_num, "U"
    elif max_num < 0:
        raise UsageError(f"maxNum has to be at least 0, not {max_num}", hint="")
    asked = KeyQuery(topic, key, max_num, *times, index_type if index_type in _INDEX_TYPES else None)
    ask = broker.query_message_exact if queries.config.remoting.remoting_mode == "exact" else broker.query_message
    size_max = size_max_of(queries)
    found = await queries.query(
        lambda data: ask(data.index, asked, size_max), lambda found: _result(bool(found.frames), found.is_covered)
    )
    code = ResponseCode.SUCCESS if found.frames else ResponseCode.QUERY_NOT_FOUND
    timestamp, phy_offset = map(str, found.last_update)
    last_update = {"indexLastUpdateTimestamp": timestamp, "indexLastUpdatePhyoffset": phy_offset}
    return command.answer(code, found.remark, last_update, b"".join(found.frames))


async def view_message_by_id(queries: Queries, command: RemotingCommand) -> RemotingCommand:
    """VIEW_MESSAGE_BY_ID (33): one frame, or a remark that names the offset."""
    phy_offset, size_max = whole(command, "offset"), size_max_of(queries)
    found = await queries.query(
        lambda data: broker.view_message(data.index, phy_offset, size_max),
        lambda found: _result(not isinstance(found, NotFound), True),  # it is the log itself that is asked
    )
    if isinstance(found, NotFound):
        return command.answer(ResponseCode.SYSTEM_ERROR, found.reason)
    return command.answer(ResponseCode.SUCCESS, body=found)


async def pull_message(queries: Queries, command: RemotingCommand) -> RemotingCommand:
    """PULL_MESSAGE (11) of a tool that looks a message up by its queue offset. Nothing is ever waited for."""
    if command.ext_fields.get("consumerGroup") != TOOLS_GROUP:
        return command.answer(ResponseCode.SERVICE_NOT_AVAILABLE, _CONSUME_ELSEWHERE)
    topic, queue_id = text(command, "topic"), whole(command, "queueId", 32)
    queue_offset, max_num = whole(command, "queueOffset"), whole(command, "maxMsgNums", 32)
    size_max = size_max_of(queries)
    found = await queries.query(
        lambda data: broker.pull_message(data.index, topic, queue_id, queue_offset, max_num, size_max),
        lambda answer: _result(bool(answer.frames), answer.is_covered),
    )
    header = {
        "suggestWhichBrokerId": "0",
        "nextBeginOffset": str(found.next_begin_offset),
        "minOffset": str(found.min_offset),
        "maxOffset": str(found.max_offset),
    }
    # Without a status that is known there is no queue, or nothing in it.
    nothing = ResponseCode.PULL_NOT_FOUND if queue_offset == 0 else ResponseCode.PULL_OFFSET_MOVED
    return command.answer(_PULL_CODES.get(found.status, nothing), found.status, header, b"".join(found.frames))


def size_max_of(queries: Queries) -> int:
    """Bytes of messages in one answer."""
    return max(queries.config.remoting.remoting_frame_max - _HEADER_MAX, FRAME_SIZE_MIN)


def _result(has_found: bool, is_covered: bool) -> str:
    return FOUND if has_found else EMPTY_COVERED if is_covered else EMPTY_UNCOVERED


def _offset_by_time(index: QueryIndex, command: RemotingCommand, topic: str, queue_id: int) -> int:
    is_upper = command.ext_fields.get("boundaryType", "").lower() == "upper"
    found = query_time(index, topic, queue_id, whole(command, "timestamp"), "upper" if is_upper else "lower")
    return found.queue_offset or 0


#: Questions about the messages of a queue that are still in the log: the answer's field, and who answers.
_OF_A_QUEUE: dict[int, tuple[str, Callable[[QueryIndex, RemotingCommand, str, int], int]]] = {
    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: ("offset", _offset_by_time),
    RequestCode.GET_MAX_OFFSET: ("offset", lambda index, _, *queue: broker.queue_bounds(index, *queue)[1]),
    RequestCode.GET_MIN_OFFSET: ("offset", lambda index, _, *queue: broker.queue_bounds(index, *queue)[0]),
    RequestCode.GET_EARLIEST_MSG_STORETIME: ("timestamp", lambda index, _, *queue: broker.earliest_time(index, *queue)),
}


async def answer_of_a_queue(queries: Queries, command: RemotingCommand) -> RemotingCommand:
    """A number of a queue, by the request's code: 0 for an offset of a queue that there is not, -1 for a time."""
    name, question = _OF_A_QUEUE[command.code]
    topic, queue_id = text(command, "topic"), whole(command, "queueId", 32)
    number = await queries.ask(lambda data: question(data.index, command, topic, queue_id))
    return command.answer(ResponseCode.SUCCESS, ext_fields={name: str(number)})


# --- figures, and what clients need to be content ---------------------------------------------------------------


async def get_broker_runtime_info(queries: Queries, command: RemotingCommand) -> RemotingCommand:
    """GET_BROKER_RUNTIME_INFO (28), answered in every phase."""
    row = queries.board.row()
    table = {
        "brokerActive": "true",
        "brokerVersion": str(VERSION),
        "brokerVersionDesc": f"indexd {__version__}",
        "bootTimestamp": str(row["startedAt"]),
        **_NOT_HERE,
        **{name: str(row[name]) for name in _SAME if isinstance(row.get(name), int)},
        **indexd_figures(queries.board),
    }
    return command.answer(ResponseCode.SUCCESS, body=json.dumps({"table": table}).encode())


def indexd_figures(board: DaemonStatus) -> dict[str, str]:
    """Every figure of the board that is one value, as ``indexdPhase``; those of a group as ``indexdQueriesFound``.

    To be shown beside a broker's own, none of which begins so.
    """
    return dict(_flat("indexd", board.row()))


def _flat(prefix: str, row: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in row.items():
        full = prefix + "".join(part[:1].upper() + part[1:] for part in name.split("_"))
        if isinstance(value, Mapping):
            yield from _flat(full, value)
        elif isinstance(value, str | int | float):
            yield full, str(value).lower() if isinstance(value, bool) else str(value)


async def _succeed(_: Queries, command: RemotingCommand) -> RemotingCommand:
    return command.answer(ResponseCode.SUCCESS)


async def _no_groups(_: Queries, command: RemotingCommand) -> RemotingCommand:
    return command.answer(ResponseCode.SUCCESS, body=b'{"groupList": []}')


async def _topic_list(queries: Queries, command: RemotingCommand) -> RemotingCommand:
    # A refusal would be a stack trace in mqadmin topicList, and the topics are known.
    topics = await queries.ask(lambda data: topics_of(data.index))
    if topics is None:
        return _refuse(command)
    return command.answer(ResponseCode.SUCCESS, body=json.dumps({"topicList": topics}).encode())


def _refuse(command: RemotingCommand) -> RemotingCommand:
    remark = f"request code {command.code} is none of those that indexd answers: {_NO_UPSTREAM}"
    return command.answer(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark)


#: What the index answers, whoever stands behind it.
_OURS: dict[int, Handler] = {
    RequestCode.QUERY_MESSAGE: query_message,
    RequestCode.VIEW_MESSAGE_BY_ID: view_message_by_id,
}
#: What it answers where no broker does.
_INSTEAD: dict[int, Handler] = {
    RequestCode.PULL_MESSAGE: pull_message,
    RequestCode.GET_BROKER_RUNTIME_INFO: get_broker_runtime_info,
    **dict.fromkeys(_OF_A_QUEUE, answer_of_a_queue),
    RequestCode.HEART_BEAT: _succeed,
    RequestCode.UNREGISTER_CLIENT: _succeed,
    RequestCode.QUERY_TOPIC_CONSUME_BY_WHO: _no_groups,
}
#: What it answers where no name server does.
_ALONE: dict[int, Handler] = _OURS | _INSTEAD | {RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: _topic_list}


class RemotingProcessor:
    """One for an outlet. UsageError if the certificates for upstream cannot be used."""

    def __init__(
        self,
        config: Config,
        board: DaemonStatus,
        log: Any,
        credentials: Credentials | None,
        queries: Queries,
        patience: Patience,
    ) -> None:
        self._credentials, self._board, self._log, self._queries = credentials, board, log, queries
        has_upstream = bool(config.remoting.upstream_namesrv)
        #: None without upstream_namesrv.
        self.forwarder = Forwarder(config, log, credentials, board.boot_id, patience) if has_upstream else None
        is_plain = credentials is None and config.remoting.remoting_mode != "exact"
        #: None where requests are signed, or exact answers wanted.
        self.key_queries = KeyQueries(queries, size_max_of(queries)) if is_plain else None
        self._directory = Directory(config, queries, self.forwarder, log)

    async def process(self, client: Client, command: RemotingCommand) -> RemotingCommand | None:
        """The answer, or None: a one-way request, a client's response. Cancelled when the client goes.

        Requests of one connection begin in their order and may end in any.
        """
        forwarder, code = self.forwarder, command.code
        if command.is_response:
            if forwarder is not None:
                forwarder.respond(client, command)
            return None
        refusal = None if self._credentials is None else self._credentials.refusal(command)
        if refusal is not None:
            return command.answer(ResponseCode.NO_PERMISSION, refusal)
        if forwarder is not None and forwarder.has_been_here(command):
            return command.answer(ResponseCode.SERVICE_NOT_AVAILABLE, IN_A_CIRCLE)
        if code in (RequestCode.GET_ROUTEINFO_BY_TOPIC, RequestCode.GET_BROKER_CLUSTER_INFO):
            return await self._directory.answer(client, command)
        if forwarder is None or code in _OURS:
            handler = _ALONE.get(code)
            return _refuse(command) if handler is None else await answer_from_index(handler, self._queries, command)
        if code in _REGISTRATIONS:
            return command.answer(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, _NO_BROKERS)
        handler = _INSTEAD.get(code)
        try:
            # A pull may be held by the broker for long.
            is_short = handler is not None and code != RequestCode.PULL_MESSAGE
            answer = await forwarder.ask(client, command, is_short=is_short)
        except UpstreamError as error:
            if handler is None:
                return forwarder.not_answered(client, command, str(error))
            self._log.warning("upstream_failed", code=code, problem=str(error))
            answer = await answer_from_index(handler, self._queries, command)
            if answer.code == ResponseCode.SERVICE_NOT_AVAILABLE:  # a pull of who consumes
                answer.remark = str(error)
            return answer
        if code == RequestCode.GET_BROKER_RUNTIME_INFO and answer is not None:
            with suppress(ValueError, KeyError, TypeError):  # it is no table
                table = read_json(answer.body)["table"] | indexd_figures(self._board)
                answer.body = json.dumps({"table": table}).encode()
        return answer


class Directory:
    """Routes of topics and the cluster (GET_ROUTEINFO_BY_TOPIC, GET_BROKER_CLUSTER_INFO), leading to this port.

    With a name server upstream its answers count, rewritten to lead here. One that is gone, or was started anew and has
    heard of no broker yet, must not make clients forget what they had: what it said last is said again. Only what it
    never spoke of is answered from the data directory, for reading. ``forwarder``: None without upstream_namesrv.
    """

    def __init__(
        self, config: Config, queries: Queries, forwarder: Forwarder | None, log: Any, routes_max: int = _ROUTES_MAX
    ) -> None:
        self._config, self._queries, self._forwarder, self._log = config, queries, forwarder, log
        self._routes_max = routes_max
        # What was answered last, as it came, by topic; the cluster, of which no topic is asked, by "".
        self._kept: dict[str, bytes] = {}

    async def answer(self, client: Client, command: RemotingCommand) -> RemotingCommand:
        """A TopicRouteData, or TOPIC_NOT_EXIST; or a ClusterInfo."""
        address = self._config.remoting.remoting_advertise or client.local
        if self._forwarder is None:
            return await self._own_answer(None, address, command)
        names, short = self._forwarder.names, self._forwarder.patience.short
        try:
            answer = await self._forwarder.ask(client, command, is_short=True)
        except UpstreamError as error:
            self._log.warning("upstream_failed", code=command.code, problem=str(error))
            return await self._last_answer(names.broker, address, command)
        assert answer is not None  # a name server answers one-way requests, too
        is_unknown = answer.code == ResponseCode.TOPIC_NOT_EXIST
        place = await names.look(anew=is_unknown, within=short)
        if answer.code == ResponseCode.SUCCESS:
            led = self._led(answer.body, place, address, command)
            if led is not None:
                self._keep(command.ext_fields.get("topic", ""), answer.body)
                answer.body = led
        elif is_unknown and place is not None and place.is_registered:
            # It knows the broker, and the broker has no such topic.
            self._kept.pop(command.ext_fields.get("topic", ""), None)
        elif is_unknown:
            found = await self._last_answer(place, address, command)
            return found if found.code == ResponseCode.SUCCESS else answer
        return answer

    def _led(self, body: bytes, place: BrokerPlace | None, address: str, command: RemotingCommand) -> bytes | None:
        # None for one that cannot be made to lead here: it goes on as it is, and only queries pass us by.
        try:
            found = read_json(body)
            if place is None:
                raise ValueError("which of its brokers is ours is not known")
            if command.code == RequestCode.GET_BROKER_CLUSTER_INFO:
                lead_cluster(found, place, address)
            else:
                lead_route(found, place, address)
        except ValueError as error:
            self._log.warning("upstream_unread", code=command.code, problem=str(error), hint=_ROUTE_HINT)
            return None
        return write_json(found, is_standard=wants_standard(command))

    async def _last_answer(self, place: BrokerPlace | None, address: str, command: RemotingCommand) -> RemotingCommand:
        body = self._kept.get(command.ext_fields.get("topic", ""))
        led = None if body is None else self._led(body, place, address, command)
        if led is not None:
            return command.answer(ResponseCode.SUCCESS, body=led)
        return await self._own_answer(place, address, command)

    async def _own_answer(self, known: BrokerPlace | None, address: str, command: RemotingCommand) -> RemotingCommand:
        place = known or own_place(self._config)

        async def answer(queries: Queries, command: RemotingCommand) -> RemotingCommand:
            found = make_cluster(place, address)
            if command.code == RequestCode.GET_ROUTEINFO_BY_TOPIC:
                topic = text(command, "topic")
                count = await queries.ask(lambda data: queue_nums(data, topic))
                if count == 0:
                    remark = f"no message of topic {topic!r:.{_SHOWN_MAX}} is in the index"
                    return command.answer(ResponseCode.TOPIC_NOT_EXIST, remark)
                found = make_route(place, address, count)
            return command.answer(ResponseCode.SUCCESS, body=write_json(found, is_standard=wants_standard(command)))

        return await answer_from_index(answer, self._queries, command)

    def _keep(self, name: str, body: bytes) -> None:
        # In the place of what was kept. The oldest go where it is too much.
        self._kept.pop(name, None)
        self._kept[name] = body
        while sum(map(len, (*self._kept, *self._kept.values()))) > self._routes_max:
            del self._kept[next(iter(self._kept))]


def queue_nums(data: Data, topic: str) -> int:
    """How many queues a topic has in a data directory: the highest queue id, and one; 0 for a topic without any.

    1 where no ConsumeQueues are built.
    """
    if data.index.look().frontier.queues is None:
        return 1
    if not is_topic_name(topic):
        return 0
    folders: list[str] = []
    with MissingOk():
        folders = data.index.disk.list_dirs(data.index.files.consumequeue / topic)
    ids = (queue_id_of(name) for name in folders)
    return max((number for number in ids if number is not None), default=-1) + 1
