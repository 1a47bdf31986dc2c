"""Routes and clusters (RocketMQ's TopicRouteData, ClusterInfo): read, written, and made to lead to this port.

A name server writes fastjson's style, in which keys that are numbers stand without quotes (``{0:"10.0.0.1:10911"}``),
or standard JSON for those that cannot read it (spec rocketmq-store 9.6). Both are read here, and each client gets the
one that it wants.

Directory: routes of topics and the cluster (GET_ROUTEINFO_BY_TOPIC, GET_BROKER_CLUSTER_INFO), leading to this port.

With a name server behind us its answers count, made to lead here. One that is gone, or was started anew and has heard
of no broker yet, must not make clients forget what they had: what it said last is said again. Only what it never spoke
of is answered from the data directory, for reading.
"""

from __future__ import annotations

import json
import re
import socket
import time
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

from indexd.config import Config
from indexd.consumequeue.format import QueueMark, is_topic_name, queue_id_of
from indexd.errors import DiskError
from indexd.query import Data
from indexd.serve.queries import Queries
from indexd.serve.remoting.command import V4_9_4, RemotingCommand, ResponseCode
from indexd.serve.remoting.connection import Client
from indexd.serve.remoting.forward import Forwarder
from indexd.serve.remoting.link import UpstreamError
from indexd.serve.remoting.processor import handler, text
from indexd.serve.remoting.upstream import PATIENCE_SECONDS, SparingLog

MASTER = "0"
#: Read only: a producer that has such a route alone does not send.
PERM_READ = 4
#: The largest text that is read: parsing holds up all that this port answers. A route has some hundred bytes a broker.
JSON_MAX = 8 << 20
# In the old style, which is gone through piece by piece.
_OLD_STYLE_MAX = 1 << 20
# A string, ended or not, is one match and is never begun again from a quote within: each character is looked at once.
_NUMBER_KEY = re.compile(r'"(?:[^"\\]++|\\.)*+"?|([{,][ \t\r\n]*+)(-?[0-9]++)(?=[ \t\r\n]*+:)', re.DOTALL)
# Maps from numbers: the members whose keys fastjson leaves without quotes.
_BY_NUMBER = frozenset({"brokerAddrs", "currIdMap"})

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Place:
    """Where the broker whose log this is stands: RocketMQ's brokerName, its cluster, its address in routes.

    ``broker_id``: 0 unless it is a slave. ``address``: None if nobody knows. ``others``: the addresses of its slaves.
    ``is_registered``: the name server knows of it now.
    """

    name: str
    cluster: str
    address: str | None = None
    broker_id: str = MASTER
    others: frozenset[str] = frozenset()
    is_registered: bool = False


def own_place(config: Config) -> Place:
    """What the configuration alone says."""
    node = config.node
    return Place(node.node_id or socket.gethostname(), _cluster_of(config), node.broker_address)


def _cluster_of(config: Config) -> str:
    return config.node.cluster or "DefaultCluster"


# --- JSON in both styles ----------------------------------------------------------------------------------------


def wants_standard(command: RemotingCommand) -> bool:
    """Whether the body of an answer to this request has to be standard JSON."""
    only = command.ext_fields.get("acceptStandardJsonOnly", "")
    return command.version >= V4_9_4 or only.lower() == "true"


class TooLargeError(ValueError):
    """More JSON than is read here; str(): how much."""


def read_json(body: bytes) -> Json:
    """An object in either style; ValueError if it is none, TooLargeError if it is not even looked at."""
    if len(body) > JSON_MAX:
        raise TooLargeError(f"it has {len(body)} bytes, and {JSON_MAX} at most are read")
    try:
        text = body.decode()
        try:
            value = json.loads(text)
        except ValueError:
            if len(body) > _OLD_STYLE_MAX:
                raise
            value = json.loads(_NUMBER_KEY.sub(_quoted, text))
    except RecursionError:
        raise ValueError("nested too deep") from None
    if type(value) is not dict:
        raise ValueError("no JSON object")
    return value


def write_json(value: Json, *, is_standard: bool) -> bytes:
    """The same in the style that is asked for, with the members in order of their names as the name server has them."""
    if is_standard:
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    return _old_style(value, is_by_number=False).encode("utf-8", "replace")


def _quoted(match: re.Match[str]) -> str:
    start, number = match.groups()
    return match[0] if number is None else f'{start}"{number}"'


def _old_style(value: Any, *, is_by_number: bool) -> str:
    if type(value) is dict:
        members = (
            f"{_key(name, is_by_number)}:{_old_style(member, is_by_number=name in _BY_NUMBER)}"
            for name, member in sorted(value.items())
        )
        return f"{{{','.join(members)}}}"
    if type(value) is list:
        return f"[{','.join(_old_style(member, is_by_number=False) for member in value)}]"
    return json.dumps(value, ensure_ascii=False)


def _key(name: str, is_by_number: bool) -> str:
    is_number = is_by_number and name.removeprefix("-").isdecimal() and name.isascii()
    return name if is_number else json.dumps(name, ensure_ascii=False)


# --- our own ----------------------------------------------------------------------------------------------------


def make_route(place: Place, address: str, queue_nums: int) -> Json:
    """A route that leads to ``address`` alone, for reading."""
    queues = {
        "brokerName": place.name,
        "perm": PERM_READ,
        "readQueueNums": queue_nums,
        "topicSysFlag": 0,
        "writeQueueNums": queue_nums,
    }
    return {"brokerDatas": [make_broker(place, address)], "filterServerTable": {}, "queueDatas": [queues]}


def make_broker(place: Place, address: str) -> Json:
    """A BrokerData."""
    return {
        "brokerAddrs": {place.broker_id: address},
        "brokerName": place.name,
        "cluster": place.cluster,
        "enableActingMaster": False,
    }


def make_cluster(place: Place, address: str) -> Json:
    """A ClusterInfo of this one broker."""
    return {
        "brokerAddrTable": {place.name: make_broker(place, address)},
        "clusterAddrTable": {place.cluster: [place.name]},
    }


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


# --- the name server's, made to lead to us ----------------------------------------------------------------------


def find_place(cluster: Json, config: Config, known: Place | None) -> Place | None:
    """The broker whose log this is, among those of a ClusterInfo; None if none of them is known to be.

    That of broker_address, else that of the name (node_id, brokerName), else ``known``, which was found before, else,
    when no name is given, the only one there is. ValueError if the cluster info is none.
    """
    table, node = cluster.get("brokerAddrTable"), config.node
    if type(table) is not dict or not all(_is_broker(broker) for broker in table.values()):
        raise ValueError("its cluster info has no brokerAddrTable")
    for broker in table.values():
        for broker_id, address in broker["brokerAddrs"].items():
            if address == node.broker_address:
                return _place(broker, broker_id, address, config)
    names = [node.node_id or socket.gethostname()]
    if known is not None:
        names.append(known.name)
    if node.node_id is None and known is None and len(table) == 1:
        names += table
    for name in names:
        if name in table:
            address = node.broker_address or table[name]["brokerAddrs"].get(MASTER)
            return _place(table[name], MASTER, address, config)
    return None


def lead_route(route: Json, place: Place, address: str) -> None:
    """Put ``address`` in the place of the broker's, in a route or a broker's own place in it. ValueError: no route."""
    brokers = route.get("brokerDatas")
    if type(brokers) is not list or not all(_is_broker(broker) for broker in brokers):
        raise ValueError("its route has no brokerDatas")
    is_there = False
    for broker in brokers:
        if broker["brokerName"] == place.name:
            is_there = True
            _lead(broker, place, address)
    if not is_there and not place.is_registered and brokers:
        # It is down, and what it had is still found here. No queues: nobody is to consume or to send for it.
        brokers.append(make_broker(place, address))


def lead_cluster(cluster: Json, place: Place, address: str) -> None:
    """The same in a ClusterInfo that ``find_place`` took; a broker that is down stands there with our address."""
    table = cluster["brokerAddrTable"]
    if place.name in table:
        _lead(table[place.name], place, address)
        return
    table[place.name] = make_broker(place, address)
    clusters = cluster.setdefault("clusterAddrTable", {})
    if type(clusters) is dict and type(names := clusters.setdefault(place.cluster, [])) is list:
        names.append(place.name)


def _lead(broker: Json, place: Place, address: str) -> None:
    # A slave that stands in for its master (enableActingMaster) is no place of ours.
    addresses = broker["brokerAddrs"]
    if place.broker_id in addresses and addresses[place.broker_id] not in place.others:
        addresses[place.broker_id] = address


def _place(broker: Json, broker_id: str, address: str | None, config: Config) -> Place:
    others = frozenset(other for number, other in broker["brokerAddrs"].items() if number != broker_id)
    cluster = broker.get("cluster")
    name = cluster if type(cluster) is str and cluster else _cluster_of(config)
    return Place(broker["brokerName"], name, address, broker_id, others, is_registered=True)


def _is_broker(broker: Any) -> bool:
    return (
        type(broker) is dict
        and type(broker.get("brokerName")) is str
        and type(addresses := broker.get("brokerAddrs")) is dict
        and all(type(address) is str for address in addresses.values())
    )


# Bytes of routes that are kept, and how a topic is shown.
_KEPT_MAX = 8 << 20
_SHOWN_MAX = 127
_HINT = "give node_id, the broker's brokerName, or broker_address"


class Directory:
    """One for an outlet. ``forwarder``: None without upstream_namesrv."""

    def __init__(self, config: Config, queries: Queries, forwarder: Forwarder | None, log: SparingLog) -> None:
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
            await self._forwarder.whereabouts.look(within=PATIENCE_SECONDS)
            led = self._led(client, command, answer)
            if led.code == ResponseCode.SUCCESS:
                self._kept.keep(topic, answer.body)
            return led
        if answer.code == ResponseCode.TOPIC_NOT_EXIST:
            answered, whereabouts = time.monotonic(), self._forwarder.whereabouts
            place = await whereabouts.look(anew=True, within=PATIENCE_SECONDS)
            if place is None or not place.is_registered:
                found = await self._without(client, command)
                return found if found.code == ResponseCode.SUCCESS else answer
            if whereabouts.sure_at >= answered:
                self._kept.forget(topic)  # it knows the broker, and the broker has no such topic
        return answer

    async def cluster(self, client: Client, command: RemotingCommand) -> RemotingCommand:
        """GET_BROKER_CLUSTER_INFO (106): a ClusterInfo."""
        cluster, place = make_cluster(self._place(), self._address(client)), None
        if self._forwarder is not None:
            whereabouts = self._forwarder.whereabouts
            try:
                answer = await self._forwarder.ask_names(command)
                if answer.code != ResponseCode.SUCCESS:
                    return answer
                cluster = read_json(answer.body)
                place, self._cluster = whereabouts.note(cluster), answer.body
            except UpstreamError as error:
                self._log.warning("upstream_failed", code=command.code, problem=str(error))
                if self._cluster is not None:
                    cluster, place = read_json(self._cluster), whereabouts.known
            except ValueError as error:
                return self._unread(command, answer, error)
        if place is not None:
            lead_cluster(cluster, place, self._address(client))
        return command.answer(ResponseCode.SUCCESS, body=write_json(cluster, is_standard=wants_standard(command)))

    def _led(self, client: Client, command: RemotingCommand, answer: RemotingCommand) -> RemotingCommand:
        # A route that cannot be made to lead here goes on as it is: the client works, only its queries pass us by.
        place = None if self._forwarder is None else self._forwarder.whereabouts.known
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

    def _place(self) -> Place:
        known = None if self._forwarder is None else self._forwarder.whereabouts.known
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
