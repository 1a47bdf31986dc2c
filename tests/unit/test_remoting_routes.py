"""Routes and clusters in both styles of JSON, made to lead here; which of a name server's brokers is ours."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexd.config import load
from indexd.serve.remoting.processor import Directory
from indexd.serve.remoting.routes import BrokerPlace, find_place, lead_cluster, lead_route, read_json, write_json
from support.data_directory import config_of
from support.remoting import CLUSTER, Brokers, broker_data
from support.serving import Log

_NAME = "broker-a"


#: As the name server of 5.4.0 writes it: for clients before 4.9.4, and for others.
_ROUTE_OLD = (
    '{"brokerDatas":[{"brokerAddrs":{0:"1.2.3.4:10911",1:"x:1"},"brokerName":"bé","cluster":"c",'
    '"enableActingMaster":false}],"filterServerTable":{},"queueDatas":[{"brokerName":"bé","perm":6,'
    '"readQueueNums":4,"topicSysFlag":0,"writeQueueNums":4}]}'
)


_ROUTE_STANDARD = _ROUTE_OLD.replace("{0:", '{"0":').replace(",1:", ',"1":')


_TEXTS = st.text(st.sampled_from('ab{},:"\\0123 é\n-'), max_size=12)


_ADDRESSES = st.dictionaries(st.integers(-5, 99).map(str), _TEXTS, max_size=4)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | _TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner, max_size=3),
    max_leaves=8,
)


# --- JSON -------------------------------------------------------------------------------------------------------


def test_both_styles_are_read_and_written_as_rocketmq_does() -> None:
    value = json.loads(_ROUTE_STANDARD)
    assert read_json(_ROUTE_OLD.encode()) == read_json(_ROUTE_STANDARD.encode()) == value
    assert write_json(value, is_standard=False) == _ROUTE_OLD.encode()
    assert json.loads(write_json(value, is_standard=True)) == value
    assert b'"brokerAddrs":{"0":"1.2.3.4:10911"' in write_json(value, is_standard=True)


@given(st.dictionaries(_TEXTS, _VALUES, max_size=4), _ADDRESSES)
def test_what_is_written_in_either_style_is_read(members: dict[str, Any], addresses: dict[str, str]) -> None:
    value = members | {"brokerAddrs": addresses, "brokerAddrTable": {"1": {"brokerAddrs": addresses}}}
    assert json.loads(write_json(value, is_standard=True)) == value
    old = write_json(value, is_standard=False)
    assert read_json(old) == value
    assert b'"brokerAddrTable":{"1":' in old  # a broker that is named 1


@given(st.binary(max_size=60) | _TEXTS.map(str.encode))
def test_other_bytes_are_refused_or_an_object(body: bytes) -> None:
    try:
        value = read_json(body)
    except ValueError:
        return
    assert type(value) is dict


@pytest.mark.parametrize("body", [b'{"a":' * 50_000, b"[" * 100_000, b"", b"[]", b"null", b"{0:1", b"\xff{}", b"{0:}"])
def test_bodies_that_are_none(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_json(body)


@pytest.mark.parametrize(
    "body",
    [
        b'{"' + b'\\"' * 45_000,
        b'{"a":' + b'"' * 1_000_000,
        b'{"' * 500_000,
        b"{" + b" " * 1_000_000,
        b"{" + b"1" * 1_000_000,
        b"{" + b"1:" * 500_000,
        b'"' * (16 << 20),
        b'{"a":"' + b"\\" * (16 << 20),
    ],
    ids=lambda body: f"{bytes(body[:8])!r}-{len(body)}",
)
def test_hostile_texts_are_refused_in_a_moment(body: bytes) -> None:
    began = time.process_time()
    with pytest.raises(ValueError, match=r"."):
        read_json(body)
    assert time.process_time() - began < 2


def test_text_that_looks_like_a_key_stays() -> None:
    assert read_json(b'{"a":"{1:2,\\"3:4", 5 :{-6:"[7:8"}}') == {"a": '{1:2,"3:4', "5": {"-6": "[7:8"}}


# --- where our broker is ----------------------------------------------------------------------------------------


def _cluster(brokers: Brokers) -> dict[str, Any]:
    table = {name: broker_data(name, addresses) for name, addresses in brokers.items()}
    return {"brokerAddrTable": table, "clusterAddrTable": {CLUSTER: sorted(brokers)}}


@pytest.mark.parametrize(
    ("brokers", "settings", "known", "wanted"),
    [
        ({"a": {0: "x:1"}, "b": {0: "y:1"}}, {"node_id": "b"}, None, ("b", "y:1", "0")),
        ({"a": {0: "x:1"}, "b": {0: "y:1", 1: "s:1"}}, {"broker_address": "s:1"}, None, ("b", "s:1", "1")),
        ({"a": {0: "x:1"}}, {"node_id": "a", "broker_address": "127.0.0.1:1"}, None, ("a", "127.0.0.1:1", "0")),
        ({"a": {0: "x:1"}}, {}, None, ("a", "x:1", "0")),
        ({"a": {0: "x:1"}}, {"node_id": "b"}, None, None),
        ({"a": {0: "x:1"}, "b": {0: "y:1"}}, {}, None, None),
        ({"a": {0: "x:1"}}, {}, "b", None),
        ({"a": {0: "x:1"}, "b": {0: "y:1"}}, {}, "b", ("b", "y:1", "0")),
        ({"a": {1: "x:1"}}, {"node_id": "a"}, None, ("a", None, "0")),
        ({}, {"node_id": "a"}, None, None),
    ],
)
def test_which_broker_is_ours(
    brokers: Brokers, settings: dict[str, str], known: str | None, wanted: tuple[str, str | None, str] | None
) -> None:
    config = load({"store": "/nowhere", "data": "/nowhere/data"} | settings, None, {})
    place = find_place(_cluster(brokers), config, None if known is None else BrokerPlace(known, CLUSTER))
    assert (None if place is None else (place.name, place.address, place.broker_id)) == wanted
    if place is not None:
        assert place.is_registered
        cluster = _cluster(brokers)
        lead_cluster(cluster, place, "ours:9")
        addresses = cluster["brokerAddrTable"][place.name]["brokerAddrs"]
        assert addresses == {
            str(number): "ours:9" if str(number) == place.broker_id else address
            for number, address in brokers[place.name].items()
        }


@pytest.mark.parametrize("cluster", [{}, {"cluster": None}, {"cluster": ""}, {"cluster": 7}])
@pytest.mark.parametrize(("settings", "name"), [({}, "DefaultCluster"), ({"cluster": "ours"}, "ours")])
def test_a_broker_without_a_cluster_is_in_ours(settings: dict[str, str], name: str, cluster: dict[str, Any]) -> None:
    config = load({"store": "/nowhere", "data": "/nowhere/data", "node_id": "a"} | settings, None, {})
    broker = {"brokerName": "a", "brokerAddrs": {"0": "x:1"}, **cluster}
    found = find_place({"brokerAddrTable": {"a": broker}}, config, None)
    assert found == BrokerPlace("a", name, "x:1", is_registered=True)


@given(_VALUES)
def test_a_route_of_any_shape_is_refused_or_led(value: Any) -> None:
    route = {"brokerDatas": value}
    try:
        lead_route(route, BrokerPlace(_NAME, CLUSTER), "ours:9")
    except ValueError:
        return
    assert type(route["brokerDatas"]) is list


async def test_routes_that_are_kept_are_bounded(tmp_path: Path) -> None:
    queries: Any = SimpleNamespace()
    directory = Directory(config_of(tmp_path / "data"), queries, None, Log(), routes_max=2000)
    for number, size in [*((number, 300) for number in range(20)), (19, 100), (20, 300)]:
        directory._keep(f"Topic{number}", bytes(size))
        assert list(directory._kept)[-1] == f"Topic{number}"
    assert list(directory._kept) == [f"Topic{number}" for number in range(14, 21)]
