"""A client that knows the daemon alone sends, is pushed messages and finds them; the broker behind has no index."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from indexd.serve.remoting.command import Form
from support.daemon import Daemon, compile_kernels
from support.mosquitto import Proxy
from support.rocketmq import OLD_CLIENT, REAL, Broker, RocketMQError
from support.rocketmq_tools import TLS, Row, Tools, address_of
from support.serving import make_certificate

pytestmark = REAL

MESSAGES = 40
VERSIONS = (None, OLD_CLIENT)
#: Headers are JSON unless a client is told so.
BINARY = ("-Drocketmq.serialize.type=ROCKETMQ",)
TOPICS = ("TopicTest", "OrderPaid")
KEYS = ("tests", "a-secret=of+theirs")


@dataclass
class Side:
    """A broker without an index; a daemon that stands in front of it, and another that asks who is there."""

    home: Path
    broker: Broker
    open: Daemon
    closed: Daemon
    rows: list[Row] = field(default_factory=list)

    @property
    def tools(self) -> Tools:
        """They know the open daemon alone."""
        return Tools(self.home / "tools", address_of(self.open))

    @property
    def signing(self) -> Tools:
        """They know the other one, and its secret."""
        return Tools(self.home / "tools", address_of(self.closed), flags=TLS, keys=KEYS)


@pytest.fixture(scope="module")
def side(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Side]:
    """Tests go on from each other's end, as they stand in the file: a broker takes its time to start and to stop."""
    compile_kernels()
    home = tmp_path_factory.mktemp("remoting")
    # Undecided transactions are asked for after a second.
    quick: dict[str, object] = {"transactionTimeOut": 1000, "transactionCheckInterval": 1000}
    with Broker(home / "broker", None, messageIndexEnable=False, **quick) as broker:
        words = (
            *("--broker-conf", home / "broker" / "broker.conf", "--run-mode", "offload"),
            *("--remoting", "127.0.0.1:0", "--upstream-namesrv", broker.namesrv),
        )
        (home / "secret").write_text(f"{KEYS[1]}\n")
        (home / "secret").chmod(0o600)
        cert, key = make_certificate(home)
        certificate = ("--remoting-tls-cert", cert, "--remoting-tls-key", key)
        keys = ("--remoting-access-key", KEYS[0], "--remoting-secret-key-file", home / "secret")
        front = Daemon(broker.store, home / "open", *words)
        behind = Daemon(broker.store, home / "closed", *words, *certificate, *keys)
        with front, behind:
            yield Side(home, broker, front, behind)


def check(side: Side, tools: Tools, rows: list[Row], daemon: Daemon) -> None:
    side.rows += rows
    daemon.wait_caught_up()
    found = tools.check(rows, by_offset_id=True)
    assert found["missed"] == 0, found
    assert found["asked"] > len(rows)


@pytest.mark.parametrize("is_signed", [False, True])
@pytest.mark.parametrize("version", VERSIONS)
def test_a_client_sends_and_finds(side: Side, version: str | None, is_signed: bool) -> None:
    daemon, tools = (side.closed, side.signing) if is_signed else (side.open, side.tools)
    tools = replace(tools, version=version)
    check(side, tools, tools.send(12 if is_signed else MESSAGES, seed=1 + 2 * is_signed + bool(version)), daemon)
    assert not list((side.broker.store / "index").glob("2*"))


def test_a_client_whose_headers_are_binary(side: Side) -> None:
    host, _, port = address_of(side.open).partition(":")
    with Proxy(int(port)) as network:
        # It asks for routes there, and the rest where they lead to.
        tools = replace(side.tools, namesrv=f"{host}:{network.port}", flags=BINARY)
        check(side, tools, tools.send(12, seed=5), side.open)
    assert {begin[4] for begin in network.begins if begin} == {Form.ROCKETMQ}


def test_the_broker_asks_a_client_behind_the_daemon(side: Side) -> None:
    check(side, side.tools, side.tools.leave_open(TOPICS[0], 3), side.open)


def test_a_consumer_is_pushed_all_of_it(side: Side) -> None:
    sent = {row["msgId"] for row in side.rows if row["committed"]}
    had = side.tools.consume(TOPICS, len(sent))
    assert set(had["msgIds"]) >= sent
    # It failed at the first ones, which the broker keeps for a second.
    assert had["again"] > 0


def test_mqadmin_works_as_at_the_broker(side: Side) -> None:
    ours, theirs = address_of(side.open), side.broker.address
    row = next(row for row in side.rows if row["kind"] == "normal")
    asked = [
        ["topicStatus", "-t", TOPICS[0]],
        ["queryMsgByOffset", "-t", TOPICS[0], "-b", "test", "-i", "0", "-o", "1"],
        ["consumerProgress", "-g", "test-push"],
        ["queryMsgById", "-t", row["topic"], "-i", row["offsetMsgId"]],
        *(["topicRoute", "-t", topic] for topic in (*TOPICS, "Nobody", "MadeThrough")),
    ]
    made = ["updateTopic", "-c", "TestCluster", "-t", "MadeThrough", "-r", "2", "-w", "2"]
    said = side.tools.admin([made, ["brokerStatus", "-b", ours], ["clusterList"], *asked])
    assert f"create topic to {ours} success" in said[0].said, said[0]
    # The broker's own figures, and beside them the index's.
    assert "putMessageTimesTotal" in said[1].said
    assert "indexdPhyOffset" in said[1].said
    assert ours in said[2].said
    assert "V5_4_0" in said[2].said
    direct = Tools(side.home / "tools", side.broker.namesrv).admin(asked)
    for words, our, their in zip(asked, said[3:], direct, strict=True):
        # The rates of the last seconds, and where a route leads to, are not the same.
        pair = [re.sub(r"TPS: .*", "TPS", one.said) for one in (our, their)]
        assert our.body == their.body, words
        assert pair[0] == (pair[1].replace(theirs, ours) if words[0] == "topicRoute" else pair[1]), words


def test_a_client_that_does_not_know_the_secret(side: Side) -> None:
    row = next(row for row in side.rows if row["kind"] == "normal")
    asked = [
        ["topicRoute", "-t", row["topic"]],
        ["queryMsgByKey", "-t", row["topic"], "-k", row["keys"].split(" ")[0]],
    ]
    stranger = (KEYS[0], "another-secret")
    for keys in (None, stranger):
        refused, missed = replace(side.signing, keys=keys).admin(asked)
        assert "CODE: 16 " in refused.said, refused
        assert row["msgId"] not in missed.said
    with pytest.raises(RocketMQError):
        replace(side.signing, keys=stranger).send(1, seed=9)


def test_with_the_broker_stopped_all_is_found_and_nothing_sent(side: Side) -> None:
    for daemon in (side.open, side.closed):
        daemon.wait_caught_up()
    side.broker.stop()
    for tools in (side.tools, replace(side.signing, version=OLD_CLIENT)):
        found = tools.check(side.rows[::3])
        assert found["missed"] == 0, found
    with pytest.raises(RocketMQError, match="does not answer"):
        side.tools.send(1, seed=9)
    for daemon in (side.open, side.closed):
        assert daemon.terminate() == 0
        assert not [row for row in daemon.events() if row["level"] == "error"]
