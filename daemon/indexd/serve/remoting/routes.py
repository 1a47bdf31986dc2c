"""Reads and writes routes and clusters (RocketMQ's TopicRouteData, ClusterInfo), and makes them lead to this port.

A name server writes fastjson's style, in which keys that are numbers stand without quotes (``{0:"10.0.0.1:10911"}``),
or standard JSON for those that cannot read it (spec rocketmq-store 9.6). Both are read here, and each client gets the
one that it wants.
"""

from __future__ import annotations

import json
import re
import socket
from dataclasses import dataclass
from typing import Any

from indexd.config import Config
from indexd.serve.remoting.command import V4_9_4, RemotingCommand

MASTER = "0"
#: Read only: a producer that has such a route alone does not send.
PERM_READ = 4
#: The largest text that is read: parsing holds up all that this port answers. A route has some hundred bytes a broker.
JSON_MAX = 2 << 20
# A string, ended or not, is one match and is never begun again from a quote within: each character is looked at once.
_NUMBER_KEY = re.compile(r'"(?:[^"\\]++|\\.)*+"?|([{,][ \t\r\n]*+)(-?[0-9]++)(?=[ \t\r\n]*+:)', re.DOTALL)
# Maps from numbers: the members whose keys fastjson leaves without quotes.
_BY_NUMBER = re.compile(r'"(?:brokerAddrs|currIdMap)":\{[^{}]*\}')
_NUMBER = re.compile(r'(?<=[{,])"(-?[0-9]+)":')

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class BrokerPlace:
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


def own_place(config: Config) -> BrokerPlace:
    """What the configuration alone says."""
    node = config.node
    return BrokerPlace(node.node_id or socket.gethostname(), node.cluster or "DefaultCluster", node.broker_address)


# --- JSON in both styles ----------------------------------------------------------------------------------------


def wants_standard(command: RemotingCommand) -> bool:
    """Whether the body of an answer to this request has to be standard JSON."""
    return command.version >= V4_9_4 or command.ext_fields.get("acceptStandardJsonOnly", "").lower() == "true"


def read_json(body: bytes) -> Json:
    """An object in either style; ValueError if it is none, or too large to be looked at."""
    if len(body) > JSON_MAX:
        raise ValueError(f"it has {len(body)} bytes, and {JSON_MAX} at most are read")
    try:
        text = body.decode()
        try:
            value = json.loads(text)
        except ValueError:
            value = json.loads(_NUMBER_KEY.sub(lambda found: f'{found[1]}"{found[2]}"' if found[2] else found[0], text))
    except RecursionError:
        raise ValueError("nested too deep") from None
    if type(value) is not dict:
        raise ValueError("no JSON object")
    return value


def write_json(value: Json, *, is_standard: bool) -> bytes:
    """The same in the style that is asked for, with the members in order of their names as the name server has them."""
    if is_standard:
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return _BY_NUMBER.sub(lambda found: _NUMBER.sub(r"\1:", found[0]), text).encode("utf-8", "replace")


# --- our own ----------------------------------------------------------------------------------------------------


def make_route(place: BrokerPlace, address: str, queue_nums: int) -> Json:
    """A route that leads to ``address`` alone, for reading."""
    queues = {
        "brokerName": place.name,
        "perm": PERM_READ,
        "readQueueNums": queue_nums,
        "topicSysFlag": 0,
        "writeQueueNums": queue_nums,
    }
    return {"brokerDatas": [make_broker(place, address)], "filterServerTable": {}, "queueDatas": [queues]}


def make_broker(place: BrokerPlace, address: str) -> Json:
    """A BrokerData."""
    return {
        "brokerAddrs": {place.broker_id: address},
        "brokerName": place.name,
        "cluster": place.cluster,
        "enableActingMaster": False,
    }


def make_cluster(place: BrokerPlace, address: str) -> Json:
    """A ClusterInfo of this one broker."""
    return {
        "brokerAddrTable": {place.name: make_broker(place, address)},
        "clusterAddrTable": {place.cluster: [place.name]},
    }


# --- the name server's, made to lead to us ----------------------------------------------------------------------


def find_place(cluster: Json, config: Config, known: BrokerPlace | None) -> BrokerPlace | None:
    """The broker whose log this is, among those of a ClusterInfo; None if none of them is known to be.

    That of broker_address, else that of the name (node_id, brokerName), else ``known``, which was found before, else,
    when no name is given, the only one there is. ValueError if the cluster info is none.
    """
    table, node = _brokers_of(cluster), config.node
    for broker in table.values():
        for broker_id, address in broker["brokerAddrs"].items():
            if address == node.broker_address:
                return _place(broker, broker_id, address, config)
    names = [own_place(config).name]
    if known is not None:
        names.append(known.name)
    elif node.node_id is None and len(table) == 1:
        names += table
    for name in names:
        if name in table:
            address = node.broker_address or table[name]["brokerAddrs"].get(MASTER)
            return _place(table[name], MASTER, address, config)
    return None


def lead_route(route: Json, place: BrokerPlace, address: str) -> None:
    """Put ``address`` in the place of the broker's, in a route or a broker's own place in it. ValueError: no route."""
    brokers = route.get("brokerDatas")
    if type(brokers) is not list or not all(_is_broker(broker) for broker in brokers):
        raise ValueError("its route has no brokerDatas")
    ours = [broker for broker in brokers if broker["brokerName"] == place.name]
    for broker in ours:
        _lead(broker, place, address)
    if brokers and not ours and not place.is_registered:
        # It is down, and what it had is still found here. No queues: nobody is to consume or to send for it.
        brokers.append(make_broker(place, address))


def lead_cluster(cluster: Json, place: BrokerPlace, address: str) -> None:
    """The same in a ClusterInfo; a broker that is down stands there with our address. ValueError: no ClusterInfo."""
    table = _brokers_of(cluster)
    if place.name in table:
        _lead(table[place.name], place, address)
        return
    table[place.name] = make_broker(place, address)
    clusters = cluster.setdefault("clusterAddrTable", {})
    if type(clusters) is dict and type(names := clusters.setdefault(place.cluster, [])) is list:
        names.append(place.name)


def _brokers_of(cluster: Json) -> Json:
    # By name.
    table = cluster.get("brokerAddrTable")
    if type(table) is not dict or not all(_is_broker(broker) for broker in table.values()):
        raise ValueError("its cluster info has no brokerAddrTable")
    return table


def _lead(broker: Json, place: BrokerPlace, address: str) -> None:
    # A slave that stands in for its master (enableActingMaster) is no place of ours.
    addresses = broker["brokerAddrs"]
    if place.broker_id in addresses and addresses[place.broker_id] not in place.others:
        addresses[place.broker_id] = address


def _place(broker: Json, broker_id: str, address: str | None, config: Config) -> BrokerPlace:
    others = frozenset(other for number, other in broker["brokerAddrs"].items() if number != broker_id)
    cluster = broker.get("cluster")
    name = cluster if type(cluster) is str and cluster else own_place(config).cluster
    return BrokerPlace(broker["brokerName"], name, address, broker_id, others, is_registered=True)


def _is_broker(broker: Any) -> bool:
    return (
        type(broker) is dict
        and type(broker.get("brokerName")) is str
        and type(addresses := broker.get("brokerAddrs")) is dict
        and all(type(address) is str for address in addresses.values())
    )
