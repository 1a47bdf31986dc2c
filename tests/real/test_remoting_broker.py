"""RocketMQ's own tools ask the daemon instead of the broker: they find the same, and say the same."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from support.daemon import Daemon, compile_kernels
from support.naive import naive_frames
from support.rocketmq import REAL, Broker, mqadmin
from support.rocketmq_jvm import OLD_CLIENT
from support.rocketmq_tools import Row, Said, Tools, address_of

pytestmark = REAL

MESSAGES = 150
KINDS = {"normal", "batch", "transaction", "delay"}
VERSIONS = (None, OLD_CLIENT)
TOPIC = "TopicTest"


@dataclass
class Side:
    """A broker whose own index is on, a daemon beside it, and what was sent."""

    home: Path
    broker: Broker
    daemon: Daemon
    rows: list[Row] = field(default_factory=list)
    #: What mqadmin said of the broker.
    said: list[Said] = field(default_factory=list)

    def tools(self, namesrv: str) -> Tools:
        return Tools(self.home / "tools", namesrv)


@pytest.fixture(scope="module")
def side(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Side]:
    """Tests go on from each other's end, as they stand in the file: a broker takes its time to start and to stop."""
    compile_kernels()
    home = tmp_path_factory.mktemp("remoting")
    with Broker(home / "broker") as broker:
        side = Side(home, broker, daemon(home, broker, "127.0.0.1:0"))
        side.rows = side.tools(broker.namesrv).send(MESSAGES)
        with side.daemon:
            yield side


def daemon(home: Path, broker: Broker, address: str) -> Daemon:
    conf = ("--broker-conf", home / "broker" / "broker.conf")
    return Daemon(broker.store, home / "data", *conf, "--remoting", address)


def commands(rows: list[Row], address: str) -> list[list[str]]:
    """For mqadmin: a message of each kind in each way; a key that many have, a tag, and what is not there."""
    first = {row["kind"]: row for row in reversed(rows) if row["committed"]}
    assert set(first) == KINDS
    asked = []
    for row in first.values():
        topic = ("-t", row["topic"])
        asked.append(["queryMsgByKey", *topic, "-k", row["keys"].split(" ")[0]])
        asked.append(["queryMsgByUniqueKey", *topic, "-i", row["msgId"]])
        if "offsetMsgId" in row:  # the send of a transaction does not say
            asked.append(["queryMsgById", *topic, "-i", row["offsetMsgId"]])
    shared = next(row for row in rows if row["topic"] == TOPIC and "user-" in row["keys"])
    nowhere = first["normal"]["offsetMsgId"][:-16] + f"{1 << 40:016X}"
    return [
        *asked,
        ["queryMsgByKey", "-t", TOPIC, "-k", shared["keys"].split(" ")[1]],
        ["queryMsgByKey", "-t", TOPIC, "-k", "TagB", "-p", "T"],
        ["queryMsgByUniqueKey", "-t", TOPIC, "-i", shared["msgId"], "-s", "0", "-e", str(2**63 - 1)],
        ["queryMsgByKey", "-t", TOPIC, "-k", "absent"],
        ["queryMsgByKey", "-t", TOPIC, "-k", shared["keys"].split(" ")[0], "-b", "0", "-e", "1000"],
        ["queryMsgByUniqueKey", "-t", TOPIC, "-i", "absent"],
        ["queryMsgById", "-t", TOPIC, "-i", nowhere],
        ["queryMsgByOffset", "-t", TOPIC, "-b", "test", "-i", "0", "-o", "1"],
        ["topicRoute", "-t", TOPIC],
        ["topicRoute", "-t", "Nobody"],
        ["brokerStatus", "-b", address],
        ["clusterList"],
    ]


QUERIES = -4  # those before stand for themselves


def figures(said: Said) -> dict[str, str]:
    """The table of brokerStatus."""
    return dict(re.findall(r"^(\S+) *: (.*)$", said.said, re.MULTILINE))


def check_what_mqadmin_says(side: Side, ours: list[Said], address: str) -> None:
    for asked, our, their in zip(commands(side.rows, address)[:QUERIES], ours, side.said, strict=False):
        assert our == their, asked
    route, nobody, status, clusters = ours[QUERIES:]
    expected = side.said[QUERIES].said.replace(side.broker.address, address)
    # Nobody may send to the daemon: its topics can be read only.
    assert route.said == re.sub(r'"perm":\d', '"perm":4', expected)
    assert "CODE: 17 " in nobody.said
    table, theirs = figures(status), figures(side.said[-2])
    for name in ("commitLogMinOffset", "commitLogMaxOffset"):
        assert table[name] == theirs[name], name
    assert table["dispatchBehindBytes"] == "0"
    assert [name for name in table if name.startswith("indexd")]
    assert re.search(rf"^TestCluster +test +0 +{re.escape(address)} +\S", clusters.said, re.MULTILINE), clusters.said


@pytest.mark.parametrize("version", VERSIONS)
def test_a_client_finds_all_that_was_sent(side: Side, version: str | None) -> None:
    assert {row["kind"] for row in side.rows} == KINDS
    side.daemon.wait_caught_up()
    tools = replace(side.tools(address_of(side.daemon)), version=version)
    found = tools.check(side.rows, by_offset_id=True)
    assert found["missed"] == 0, found
    assert found["asked"] > 2 * MESSAGES


def test_mqadmin_says_what_it_says_of_the_broker(side: Side) -> None:
    address = address_of(side.daemon)
    side.said = side.tools(side.broker.namesrv).admin(commands(side.rows, side.broker.address))
    found = [said for said in side.said[:QUERIES] if "Exception" not in said.said]
    assert len(found) == len(side.said[:QUERIES]) - 4, side.said  # those that ask for nothing
    side.daemon.wait_caught_up()
    check_what_mqadmin_says(side, side.tools(address).admin(commands(side.rows, address)), address)


def test_mqadmin_lists_the_topics_of_the_index(side: Side) -> None:
    side.daemon.wait_caught_up()
    said = mqadmin(address_of(side.daemon), "topicList", home=side.home / "topics")
    # Log lines of its own come first.
    topics = sorted(said.rpartition("safe fallback point")[2].split())
    assert topics == sorted({frame.topic for frame in naive_frames(side.broker.store / "commitlog", 1 << 20)}), said


def test_the_same_with_the_broker_stopped(side: Side) -> None:
    side.daemon.wait_caught_up()
    assert side.daemon.terminate() == 0
    side.broker.stop()
    # An id that says where a message is says it with the broker's address: the daemon takes its place.
    address = side.broker.address
    with contextlib.ExitStack() as stack:
        beside = stack.enter_context(daemon(side.home, side.broker, address))
        assert address_of(beside) == address
        beside.wait_caught_up()
        check_what_mqadmin_says(side, side.tools(address).admin(commands(side.rows, address)), address)
        for version in VERSIONS:
            found = replace(side.tools(address), version=version).check(side.rows, by_offset_id=True)
            assert found["missed"] == 0, found
        assert beside.terminate() == 0
        assert not [row for row in beside.events() if row["level"] == "error"]
