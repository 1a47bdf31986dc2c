"""RemotingProcessor: passes each request to what answers it: the index, the directory of routes, or upstream."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from indexd.config import Config
from indexd.query.source import topics_of
from indexd.serve.board import Board
from indexd.serve.queries import Queries
from indexd.serve.remoting.access import Access
from indexd.serve.remoting.command import RemotingCommand, RequestCode, ResponseCode
from indexd.serve.remoting.context import Answered, Client, RateLimitedLog
from indexd.serve.remoting.directory import Directory
from indexd.serve.remoting.forward import REGISTRATIONS, Forwarder
from indexd.serve.remoting.handlers import (
    get_broker_runtime_info,
    get_earliest_msg_storetime,
    get_max_offset,
    get_min_offset,
    handler,
    indexd_figures,
    pull_message,
    query_message,
    search_offset_by_timestamp,
    size_max_of,
    table_body,
    view_message_by_id,
)
from indexd.serve.remoting.key_queries import KeyQueries
from indexd.serve.remoting.link import UpstreamError
from indexd.serve.remoting.routes import read_json

_NO_UPSTREAM = "indexd answers queries, and has no upstream_namesrv to pass others to"
_IN_A_CIRCLE = "upstream_namesrv of this indexd leads back to it by way of another"
_NO_BROKERS = "a broker registers with its name servers themselves, not through indexd"

Answer = Callable[[Queries, RemotingCommand], Awaitable[RemotingCommand]]


async def _succeed(_: Queries, command: RemotingCommand) -> RemotingCommand:
    return command.answer(ResponseCode.SUCCESS)


async def _no_groups(_: Queries, command: RemotingCommand) -> RemotingCommand:
    return command.answer(ResponseCode.SUCCESS, body=json.dumps({"groupList": []}).encode())


@handler
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
_OURS: dict[int, Answer] = {
    RequestCode.QUERY_MESSAGE: query_message,
    RequestCode.VIEW_MESSAGE_BY_ID: view_message_by_id,
}
#: What it answers where no broker does.
_INSTEAD: dict[int, Answer] = {
    RequestCode.PULL_MESSAGE: pull_message,
    RequestCode.GET_BROKER_RUNTIME_INFO: get_broker_runtime_info,
    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: search_offset_by_timestamp,
    RequestCode.GET_MAX_OFFSET: get_max_offset,
    RequestCode.GET_MIN_OFFSET: get_min_offset,
    RequestCode.GET_EARLIEST_MSG_STORETIME: get_earliest_msg_storetime,
    RequestCode.HEART_BEAT: _succeed,
    RequestCode.UNREGISTER_CLIENT: _succeed,
    RequestCode.QUERY_TOPIC_CONSUME_BY_WHO: _no_groups,
}
#: What it answers where no name server does.
_ALONE: dict[int, Answer] = _INSTEAD | {RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: _topic_list}
# A pull may be held by the broker for long: it gets the time that it asks for.
_HELD = frozenset({RequestCode.PULL_MESSAGE})


class RemotingProcessor:
    """One for an outlet; a ``context.Processor``. UsageError if the certificates for upstream cannot be used."""

    def __init__(self, config: Config, board: Board, log: Any, access: Access, queries: Queries) -> None:
        self._access, self._board, self._queries = access, board, queries
        self._log = RateLimitedLog(log)
        has_upstream = bool(config.remoting.upstream_namesrv)
        self._forwarder = Forwarder(config, self._log, access.credentials, board.boot_id) if has_upstream else None
        is_plain = access.credentials is None and config.remoting.remoting_mode != "exact"
        self._key_queries = KeyQueries(queries, self._log, size_max_of(queries)) if is_plain else None
        self._directory = Directory(config, queries, self._forwarder, self._log)

    def __repr__(self) -> str:
        return f"RemotingProcessor({self._directory}, {self._forwarder})"

    def process_together(self, data: bytes, frame_max: int) -> Answered | None:
        """See ``context.Processor``."""
        return None if self._key_queries is None else self._key_queries.answer(data, frame_max)

    async def process(self, client: Client, command: RemotingCommand) -> RemotingCommand | None:
        """See ``context.Processor``."""
        forwarder = self._forwarder
        if forwarder is not None:
            if forwarder.is_ourselves(client):
                return None
            if command.is_response:
                forwarder.respond(client, command)
        if command.is_response:
            return None
        refusal = self._access.refusal(command)
        if refusal is not None:
            return command.answer(ResponseCode.NO_PERMISSION, refusal)
        if forwarder is not None and forwarder.has_been_here(command):
            return command.answer(ResponseCode.SERVICE_NOT_AVAILABLE, _IN_A_CIRCLE)
        try:
            return await self._answer(client, command)
        except Exception as error:  # noqa: BLE001 - one request of one client, whatever it is
            self._log.warning("remoting_failed", peer=client.peer, code=command.code, problem=repr(error))
            return command.answer(ResponseCode.SYSTEM_ERROR, f"a defect of indexd: {type(error).__name__}")

    async def close(self) -> None:
        """Close the connections to name servers and broker."""
        if self._forwarder is not None:
            await self._forwarder.close()

    def row(self) -> dict[str, Any] | None:
        """What the board may show of the way upstream; None where there is none."""
        return None if self._forwarder is None else self._forwarder.row()

    async def _answer(self, client: Client, command: RemotingCommand) -> RemotingCommand | None:
        code = command.code
        ours = _OURS.get(code)
        if ours is not None:
            return await ours(self._queries, command)
        if code == RequestCode.GET_ROUTEINFO_BY_TOPIC:
            return await self._directory.route(client, command)
        if code == RequestCode.GET_BROKER_CLUSTER_INFO:
            return await self._directory.cluster(client, command)
        if self._forwarder is None:
            return await self._answer_alone(command)
        if code in REGISTRATIONS:
            return command.answer(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, _NO_BROKERS)
        instead = _INSTEAD.get(code)
        if instead is None:
            return await self._forwarder.forward(client, command)
        return await self._answer_instead(self._forwarder, client, command, instead)

    async def _answer_alone(self, command: RemotingCommand) -> RemotingCommand:
        answer = _ALONE.get(command.code)
        return _refuse(command) if answer is None else await answer(self._queries, command)

    async def _answer_instead(
        self, forwarder: Forwarder, client: Client, command: RemotingCommand, instead: Answer
    ) -> RemotingCommand | None:
        # The broker's answer, and ours when it gives none.
        try:
            answer = await forwarder.ask_broker(client, command, is_short=command.code not in _HELD)
        except UpstreamError as error:
            self._log.warning("upstream_failed", code=command.code, problem=str(error))
            found = await instead(self._queries, command)
            if found.code == ResponseCode.SERVICE_NOT_AVAILABLE:  # a pull of who consumes
                found.remark = str(error)
            return found
        is_runtime = command.code == RequestCode.GET_BROKER_RUNTIME_INFO
        if is_runtime and answer is not None and answer.code == ResponseCode.SUCCESS:
            return self._with_our_figures(answer)
        return answer

    def _with_our_figures(self, answer: RemotingCommand) -> RemotingCommand:
        # The broker's table, with what indexd says of itself beside it.
        try:
            table = read_json(answer.body)["table"]
            body = table_body(table | indexd_figures(self._board))
        except (ValueError, KeyError, TypeError):
            return answer
        return replace(answer, body=body)
