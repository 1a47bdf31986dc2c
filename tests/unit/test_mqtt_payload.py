"""Topics and JSON of what is published over MQTT."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiomqtt import Topic
from hypothesis import given
from hypothesis import strategies as st

from indexd.serve.board import Event
from indexd.serve.mqtt.link import Topics, condition, event_payload, state_payload, topic_level

ABOUT = {"bootId": "b-1", "cluster": "c", "nodeId": "n/1"}


@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("broker-a", "broker-a"),
        ("集群 1", "集群 1"),
        ("a/b", "a_b"),
        ("+", "_"),
        ("#", "_"),
        ("a\x00b\nc\ud800d\uffffe", "a_b_c_d_e"),
        ("", "_"),
        ("集" * 100, "集" * 66),
    ],
)
def test_a_name_becomes_one_level(name: str, level: str) -> None:
    assert topic_level(name) == level


@given(st.text(st.characters()), st.text(st.characters()), st.text(st.characters()))
def test_whatever_the_names_are_the_topics_are_topics(cluster: str, node_id: str, kind: str) -> None:
    topics = Topics("a/b", cluster, node_id)
    for topic, pattern in ((topics.status, "a/b/+/+/status"), (topics.event(kind), "a/b/+/+/event/+")):
        assert Topic(topic).matches(pattern)
        assert "\x00" not in topic
        assert len(topic.encode()) < 1000
    assert len(topics.client_id.encode()) < 500
    assert topic_level(topic_level(cluster)) == topic_level(cluster)


def test_offsets_are_strings_and_everything_else_is_what_it_was() -> None:
    row: dict[str, Any] = {
        "phyOffset": 2**63 - 1,
        "durableOffset": 0,
        "messages": 2**40,
        "caughtUp": True,
        "http": None,
        "uncovered": [[1, 2**62, "expired"]],
        "corrupt": {"offset": 7, "reason": "magic"},
        "outputs": [{"output": "cq", "phyOffset": 5, "files": 3, "fillRatio": None}],
        "broker": {"maxOffset": None, "pid": 12, "unsafe": ["x"]},
        "data": "/da\udcffta",
    }
    assert json.loads(state_payload(row)) == {
        **row,
        "phyOffset": "9223372036854775807",
        "durableOffset": "0",
        "uncovered": [["1", str(2**62), "expired"]],
        "corrupt": {"offset": "7", "reason": "magic"},
        "outputs": [{"output": "cq", "phyOffset": "5", "files": 3, "fillRatio": None}],
    }
    assert state_payload(row).isascii()


def test_an_event_says_which_it_is_and_of_whom() -> None:
    event = Event(7, 1_700_000_000_000, "hole", "skipped", {"begin": 1, "end": 5, "bytes": 4, "reason": "expired"})
    assert json.loads(event_payload(event, ABOUT)) == {
        "seq": 7,
        **ABOUT,
        "at": 1_700_000_000_000,
        "kind": "hole",
        "event": "skipped",
        "fields": {"begin": "1", "end": "5", "bytes": 4, "reason": "expired"},
    }


@pytest.mark.parametrize(
    "change",
    [
        {"phase": "stopping"},
        {"problems": {"build": "no space"}},
        {"corrupt": {"offset": 1}},
        {"broker": {"alive": False, "checkedAt": 1}},
        {"broker": {"alive": True, "unsafe": ["it writes there too"]}},
    ],
)
def test_what_is_worth_a_state_at_once(change: dict[str, Any]) -> None:
    row = {"phase": "running", "problems": {}, "corrupt": None, "broker": {"alive": True, "checkedAt": 1}}
    assert condition(row | change) != condition(row)
    # Figures that always move are not.
    assert condition(row | {"messages": 5, "broker": {"alive": True, "checkedAt": 2}}) == condition(row)


def test_a_row_without_them_has_a_condition_too() -> None:
    assert condition({}) == condition({"phase": None})
