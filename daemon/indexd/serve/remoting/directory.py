"""Directory: routes of topics and the cluster (GET_ROUTEINFO_BY_TOPIC, GET_BROKER_CLUSTER_INFO), leading to this port.

With a name server upstream its answers count, rewritten to lead here. One that is gone, or was started anew and has
heard of no broker yet, must not make clients forget what they had: what it said last is said again. Only what it never
spoke of is answered from the data directory, for reading.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import replace

from indexd.config import Config
from indexd.consumequeue.format import QueueMark, is_topic_name, queue_id_of
from indexd.errors import DiskError
from indexd.query import Data
from indexd.serve.queries import Queries
from indexd.serve.remoting.command import RemotingCommand, ResponseCode
from indexd.serve.remoting.context import Client, RateLimitedLog
from indexd.serve.remoting.forward import Forwarder
from indexd.serve.remoting.handlers import handler, text
from indexd.serve.remoting.link import UpstreamError
from indexd.serve.remoting.routes import (
    BrokerPlace,
    Json,
    TooLargeError,
    lead_cluster,
    lead_route,
    make_cluster,
    make_route,
    own_place,
    read_json,
    wants_standard,
    write_json,
)
from indexd.serve.remoting.upstream import PATIENCE_SECONDS

# Bytes of routes that are kept, and how a topic is shown.
_KEPT_MAX = 8 << 20
_SHOWN_MAX = 127
_HINT = "give node_id, the broker's brokerName, or broker_address"


class Directory:
    """One for an outlet. ``forwarder``: None without upstream_namesrv."""

    def __init__(self, config: Config, queries: Queries, forwarder: Forwarder | None, log: RateLimitedLog) -> None:
        self._config, self._queries, self._forwarder, self._log = config, queries, forwarder, log
        self._own = own_place(config)
        self._queue_nums = QueueNums()
        self._kept = _Kept()
        self._cluster: bytes | None = None

    def __repr__(self) -> str:
        return f"Directory({self._place()}, {self._kept})"

    async def route(self, client: Client, command: RemotingCommand) -> RemotingCommand:
        """GET_ROUTEINFO_BY_TOPIC (105): a TopicRouteData, or TOPIC_NOT_EXIST."""
        if self._forwarder is None:
            return await self._own_route(client, command)
        try:
            answer = await self._forwarder.ask_names(command)
        except UpstreamError as error:
            self._log.warning("upstream_failed", code=command.code, problem=str(error))
            return await self._without(client, command)
        topic = command.ext_fields.get("topic", "")
        if answer.code == ResponseCode.SUCCESS:
            await self._forwarder.locator.look(within=PATIENCE_SECONDS)
            led = self._led(client, command, answer)
            if led.code == ResponseCode.SUCCESS:
                self._kept.keep(topic, answer.body)
            return led
        if answer.code == ResponseCode.TOPIC_NOT_EXIST:
            answered, locator = time.monotonic(), self._forwarder.locator
            place = await locator.look(anew=True, within=PATIENCE_SECONDS)
            if place is None or not place.is_registered:
                found = await self._without(client, command)
                return found if found.code == ResponseCode.SUCCESS else answer
            if locator.sure_at >= answered:
                self._kept.forget(topic)  # it knows the broker, and the broker has no such topic
        return answer

    async def cluster(self, client: Client, command: RemotingCommand) -> RemotingCommand:
        """GET_BROKER_CLUSTER_INFO (106): a ClusterInfo."""
        cluster, place = make_cluster(self._place(), self._address(client)), None
        if self._forwarder is not None:
            locator = self._forwarder.locator
            try:
                answer = await self._forwarder.ask_names(command)
                if answer.code != ResponseCode.SUCCESS:
                    return answer
                cluster = read_json(answer.body)
                place, self._cluster = locator.note(cluster), answer.body
            except UpstreamError as error:
                self._log.warning("upstream_failed", code=command.code, problem=str(error))
                if self._cluster is not None:
                    cluster, place = read_json(self._cluster), locator.known
            except ValueError as error:
                return self._unread(command, answer, error)
        if place is not None:
            lead_cluster(cluster, place, self._address(client))
        return command.answer(ResponseCode.SUCCESS, body=write_json(cluster, is_standard=wants_standard(command)))

    def _led(self, client: Client, command: RemotingCommand, answer: RemotingCommand) -> RemotingCommand:
        # A route that cannot be made to lead here goes on as it is: the client works, only its queries pass us by.
        place = None if self._forwarder is None else self._forwarder.locator.known
        try:
            route = read_json(answer.body)
            if place is None:
                raise ValueError("which of its brokers is ours is not known")
            lead_route(route, place, self._address(client))
        except ValueError as error:
            return self._unread(command, answer, error)
        return replace(answer, body=write_json(route, is_standard=wants_standard(command)))

    def _unread(self, command: RemotingCommand, answer: RemotingCommand, error: ValueError) -> RemotingCommand:
        self._log.warning("upstream_unread", code=command.code, problem=str(error), hint=_HINT)
        if isinstance(error, TooLargeError):
            return command.answer(ResponseCode.SYSTEM_ERROR, f"the name server's answer is not passed on: {error}")
        return answer

    async def _without(self, client: Client, command: RemotingCommand) -> RemotingCommand:
        # What the name server said last, else our own.
        body = self._kept.get(command.ext_fields.get("topic", ""))
        if body is None:
            return await self._own_route(client, command)
        return self._led(client, command, command.answer(ResponseCode.SUCCESS, body=body))

    async def _own_route(self, client: Client, command: RemotingCommand) -> RemotingCommand:
        @handler
        async def answer(queries: Queries, command: RemotingCommand) -> RemotingCommand:
            topic = text(command, "topic")
            queue_nums = await queries.ask(lambda data: self._queue_nums.of(data, topic))
            if queue_nums == 0:
                return command.answer(
                    ResponseCode.TOPIC_NOT_EXIST, f"no message of topic {topic[:_SHOWN_MAX]!r} is in the index"
                )
            route: Json = make_route(self._place(), self._address(client), queue_nums)
            return command.answer(ResponseCode.SUCCESS, body=write_json(route, is_standard=wants_standard(command)))

        return await answer(self._queries, command)

    def _place(self) -> BrokerPlace:
        known = None if self._forwarder is None else self._forwarder.locator.known
        return known or self._own

    def _address(self, client: Client) -> str:
        return self._config.remoting.remoting_advertise or client.local


class _Kept:
    # The routes that were answered last, as they came.
    def __init__(self) -> None:
        self._bodies: OrderedDict[str, bytes] = OrderedDict()
        self._size = 0

    def __repr__(self) -> str:
        return f"{len(self._bodies)} routes kept"

    def keep(self, topic: str, body: bytes) -> None:
        self.forget(topic)
        self._bodies[topic] = body
        self._size += len(topic) + len(body)
        while self._size > _KEPT_MAX:
            self.forget(next(iter(self._bodies)))

    def get(self, topic: str) -> bytes | None:
        return self._bodies.get(topic)

    def forget(self, topic: str) -> None:
        body = self._bodies.pop(topic, None)
        if body is not None:
            self._size -= len(topic) + len(body)


class QueueNums:
    """How many queues a topic has in a data directory, by what the frontier says and by folders newer than that."""

    def __init__(self) -> None:
        self._marks: tuple[QueueMark, ...] | None = None
        self._highest: dict[str, int] = {}

    def of(self, data: Data, topic: str) -> int:
        """The highest queue id, and one; 0 for a topic without any. 1 where no ConsumeQueues are built.

        To be called in a thread that may wait for the disk, by several at once if they like.
        """
        frontier = data.index.look().frontier
        if frontier.queues is None:
            return 1
        if not is_topic_name(topic):
            return 0
        if frontier.queues is not self._marks:
            highest: dict[str, int] = {}
            for mark in frontier.queues:
                highest[mark.topic] = max(mark.queue_id, highest.get(mark.topic, -1))
            self._highest, self._marks = highest, frontier.queues
        try:
            folders = data.index.disk.list_dirs(data.index.files.consumequeue / topic)
        except DiskError as error:
            if not error.is_missing:
                raise
            folders = []
        ids = (queue_id_of(name) for name in folders)
        return max((number for number in ids if number is not None), default=self._highest.get(topic, -1)) + 1
