"""The daemon beside a real broker with a real client: what was sent is found, and the store is never written to.

RocketMQ's own tools ask the daemon instead of the broker, and the broker finds what ``indexd repair`` has mended. The
tests go on from each other's end, as they stand in the file: a broker takes its time to start and to stop.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.daemon import COMMAND, Daemon, assert_same_index, compile_kernels, environment, index_files, indexd_here
from support.missing import need
from support.naive import naive_frames
from support.rocketmq import OLD_CLIENT, REAL, Broker, arguments, figures_of, run
from support.rocketmq_tools import PULL_STATUS, Said, Tools, address_of, ask, assert_same_answers, questions
from support.same_index import assert_same_tree

pytestmark = REAL

MESSAGES, SAMPLE = 200, 4
KINDS = ("normal", "batch", "transaction", "delay")
FOUND_WITHIN = 30  # seconds: a delayed message comes after one, a transaction ends when the broker gets to it
ALL = 10_000
LATEST = str(2**63 - 1)
ALL_TIME = f"0\t{LATEST}"
SEGMENT_SIZE, QUEUE_FILE_SIZE = 1 << 20, 6000
VERSIONS = (None, OLD_CLIENT)
TOPIC = "TopicTest"
#: Topics that the broker makes itself.
RETRY = "%RETRY%test-consumer"
TRANSACTIONS = ("RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC")


@dataclass
class Side:
    """A broker's store, the daemon's data directory and what the client has sent so far."""

    home: Path
    store: Path
    conf: Path
    data: Path
    sent: list[dict[str, Any]] = field(default_factory=list)
    #: What mqadmin said of the broker.
    said: list[Said] = field(default_factory=list)

    def daemon(self, address: str) -> Daemon:
        return Daemon(self.store, self.data, "--broker-conf", self.conf, "--remoting", address)

    def tools(self, namesrv: str) -> Tools:
        return Tools(self.home / "tools", namesrv)

    def send(self, broker: Broker, seed: int) -> list[dict[str, Any]]:
        """Let the client send; the rows that it wrote."""
        out = self.home / f"sent-{seed}.jsonl"
        words = arguments(namesrv=broker.namesrv, count=MESSAGES, seed=seed, out=out)
        run("Client", "send", *words, home=self.home / "client")
        rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
        self.sent += rows
        return rows

    def ask(self, questions: list[tuple[str, str, str]]) -> list[list[int]]:
        """Physical offsets for each (topic, key, index type), asked in one batch."""
        batch = self.home / "questions"
        batch.write_text("".join(f"{topic}\t{key}\t{ALL}\t{ALL_TIME}\t{kind}\n" for topic, key, kind in questions))
        answers = self.command("query-key", "--batch", batch).splitlines()
        rows = [json.loads(line) for line in answers]
        assert [(row["topic"], row["key"]) for row in rows] == [(topic, key) for topic, key, _ in questions]
        assert not any(row["truncated"] for row in rows)
        return [row["phyOffsets"] for row in rows]

    def queue(self, topic: str, queue_id: int) -> dict[str, Any]:
        """The first messages of a queue, and its ends."""
        words = ("query-offset", "--json", "-t", topic, "-i", queue_id, "-o", 0)
        return figures_of(self.command(*words))

    def command(self, *words: object) -> str:
        done = indexd_here(*words, "--data", self.data)
        assert done.returncode == 0, done.stderr
        return str(done.stdout)

    def wait_until_found(self, rows: list[dict[str, Any]]) -> None:
        """Return once the unique key of each committed message is found under its topic."""
        wanted = [(row["topic"], row["msgId"], "U") for row in rows if row["committed"]]
        deadline = time.monotonic() + FOUND_WITHIN
        while missing := [asked for asked, found in zip(wanted, self.ask(wanted), strict=True) if not found]:
            assert time.monotonic() < deadline, f"{len(missing)} of {len(wanted)} are not found: {missing[:5]}"
            time.sleep(0.2)


@pytest.fixture(scope="module")
def side(tmp_path_factory: pytest.TempPathFactory) -> Side:
    compile_kernels()
    home = tmp_path_factory.mktemp("broker")
    return Side(home, home / "first" / "store", home / "first" / "broker.conf", home / "data")


@dataclass
class First:
    """The first broker, whose own index is on, the daemon beside it, and what was sent to the broker."""

    broker: Broker
    daemon: Daemon
    rows: list[dict[str, Any]]


@pytest.fixture(scope="module")
def first(side: Side) -> Iterator[First]:
    with Broker(side.home / "first") as broker, side.daemon("127.0.0.1:0") as daemon:
        yield First(broker, daemon, side.send(broker, 1))


def test_what_a_client_sent_is_found(side: Side, first: First) -> None:
    broker, daemon, rows = first.broker, first.daemon, first.rows
    assert (broker.store / "abort").exists()
    listening = [c.laddr for c in psutil.Process(broker.pid).net_connections("tcp") if c.status == "LISTEN"]
    assert {broker.port, broker.port - 2} <= {address.port for address in listening}
    assert {row["committed"] for row in rows if row["kind"] == "transaction"} == {True, False}
    side.wait_until_found(rows)
    check_what_a_consumer_sends_back(side, broker)
    check_every_key(side, rows)
    check_every_unique_key(side, rows)
    check_every_offset_id(side, rows)
    check_that_no_key_of_a_rolled_back_message_is_found(side, rows)
    check_that_nothing_is_open_for_writing(daemon.pid, side.store)
    check_what_the_broker_answers_about_its_queues(side, broker)


def check_what_a_consumer_sends_back(side: Side, broker: Broker) -> None:
    """It waits as a delayed message and is delivered to the topic of the group."""
    words = arguments(namesrv=broker.namesrv, broker="test", topic="TopicTest")
    count = figures_of(run("Client", "retry", *words, home=side.home / "client"))["rows"]
    assert count > 0
    deadline = time.monotonic() + FOUND_WITHIN
    while side.queue(RETRY, 0)["maxOffset"] < count:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert "problems" not in side.queue(RETRY, 0)


def check_what_the_broker_answers_about_its_queues(side: Side, broker: Broker) -> None:
    """By offset and by time, over the network; but for queues that the broker itself is just writing to."""
    frames = naive_frames(side.store / "commitlog", SEGMENT_SIZE)
    still = [one for one in frames if one.topic not in TRANSACTIONS]
    asked = questions(still, 200, 1)
    words = arguments(namesrv=broker.namesrv, broker="test")
    home = side.home / "client"
    rows = ask(
        asked, side.home, lambda lines, out: run("Client", "ask", *words, f"in={lines}", f"out={out}", home=home)
    )
    assert_same_answers(side.data, asked, rows, QUEUE_FILE_SIZE, PULL_STATUS)


def check_every_key(side: Side, rows: list[dict[str, Any]], once: tuple[str, ...] = KINDS) -> None:
    """Each committed message of the kinds ``once`` is there once; one of another kind may be there again."""
    committed = [row for row in rows if row["committed"]]
    unique = side.ask([(row["topic"], row["msgId"], "U") for row in committed])
    offsets = {row["msgId"]: found for row, found in zip(committed, unique, strict=True)}
    assert all(len(offsets[row["msgId"]]) == 1 for row in committed if row["kind"] in once)
    pairs = [(row, key) for row in committed for key in row["keys"].split(" ")]
    assert len(pairs) > MESSAGES
    for (row, key), found in zip(pairs, side.ask([(row["topic"], key, "K") for row, key in pairs]), strict=True):
        assert set(offsets[row["msgId"]]) <= set(found), (row, key)
        if not key.startswith("user-"):  # the one key that messages share
            assert found == offsets[row["msgId"]], (row, key)
    for row, found in zip(committed, side.ask([(row["topic"], row["tags"], "T") for row in committed]), strict=True):
        assert set(offsets[row["msgId"]]) <= set(found), row


def check_every_unique_key(side: Side, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        if row["committed"]:
            words = ("query-unique-key", "--json", "-t", row["topic"], "-i", row["msgId"])
            assert len(json.loads(side.command(*words))["phyOffsets"]) == 1


def check_every_offset_id(side: Side, rows: list[dict[str, Any]]) -> None:
    # The id says where the send put the message: a delayed one waits under another topic.
    first_topic = {"delay": "SCHEDULE_TOPIC_XXXX"}
    assert {row["kind"] for row in rows} == set(KINDS)
    for row in rows:
        if row["kind"] == "transaction":  # its send does not say
            assert "offsetMsgId" not in row
            continue
        found = json.loads(side.command("message", "--json", "-i", row["offsetMsgId"]))
        assert found["offsetMsgId"] == row["offsetMsgId"]
        assert found["uniqKey"] == row["msgId"]
        assert found["topic"] == first_topic.get(row["kind"], row["topic"])
        assert " ".join(found["keys"]) == row["keys"]


def check_that_no_key_of_a_rolled_back_message_is_found(side: Side, rows: list[dict[str, Any]]) -> None:
    rolled_back = [row for row in rows if not row["committed"]]
    assert rolled_back
    own_keys = [(row["topic"], row["keys"].split(" ")[0], "K") for row in rolled_back]
    assert not any(side.ask(own_keys))
    assert not any(side.ask([(row["topic"], row["msgId"], "U") for row in rolled_back]))
    # Its half is a message like any other.
    halves = side.ask([("RMQ_SYS_TRANS_HALF_TOPIC", row["msgId"], "U") for row in rolled_back])
    assert all(len(found) == 1 for found in halves)


# --- RocketMQ's own tools, asked of the daemon ---


def commands(rows: list[dict[str, Any]], address: str) -> list[list[str]]:
    """For mqadmin: a message of each kind in each way; a key that many have, a tag, and what is not there."""
    first = {row["kind"]: row for row in reversed(rows) if row["committed"]}
    assert set(first) == set(KINDS)
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
        ["topicList"],
    ]


QUERIES = -5  # those before stand for themselves


def figures(said: Said) -> dict[str, str]:
    """The table of brokerStatus."""
    return dict(re.findall(r"^(\S+) *: (.*)$", said.said, re.MULTILINE))


def check_what_mqadmin_says(side: Side, first: First, ours: list[Said], address: str) -> None:
    for asked, our, their in zip(commands(first.rows, address)[:QUERIES], ours, side.said, strict=False):
        assert our == their, asked
    route, nobody, status, clusters, topics = ours[QUERIES:]
    expected = side.said[QUERIES].said.replace(first.broker.address, address)
    # Nobody may send to the daemon: its topics can be read only.
    assert route.said == re.sub(r'"perm":\d', '"perm":4', expected)
    assert "CODE: 17 " in nobody.said
    table, theirs = figures(status), figures(side.said[-3])
    for name in ("commitLogMinOffset", "commitLogMaxOffset"):
        assert table[name] == theirs[name], name
    assert table["dispatchBehindBytes"] == "0"
    assert [name for name in table if name.startswith("indexd")]
    assert re.search(rf"^TestCluster +test +0 +{re.escape(address)} +\S", clusters.said, re.MULTILINE), clusters.said
    frames = naive_frames(side.store / "commitlog", SEGMENT_SIZE)
    assert sorted(topics.said.split()) == sorted({frame.topic for frame in frames}), topics


@pytest.mark.parametrize("version", VERSIONS)
def test_a_client_finds_all_that_was_sent(side: Side, first: First, version: str | None) -> None:
    first.daemon.wait_caught_up()
    check_found(replace(side.tools(address_of(first.daemon)), version=version), first.rows)


def check_found(tools: Tools, rows: list[dict[str, Any]]) -> None:
    asked = rows[::SAMPLE]
    assert {row["kind"] for row in asked} == set(KINDS)
    found = tools.check(asked, by_offset_id=True)
    assert found["missed"] == 0, found
    assert found["asked"] > 2 * len(asked)


def test_mqadmin_says_what_it_says_of_the_broker(side: Side, first: First) -> None:
    address = address_of(first.daemon)
    side.said = side.tools(first.broker.namesrv).admin(commands(first.rows, first.broker.address))
    found = [said for said in side.said[:QUERIES] if "Exception" not in said.said]
    assert len(found) == len(side.said[:QUERIES]) - 4, side.said  # those that ask for nothing
    first.daemon.wait_caught_up()
    check_what_mqadmin_says(side, first, side.tools(address).admin(commands(first.rows, address)), address)


def test_the_same_with_the_broker_stopped(side: Side, first: First) -> None:
    first.broker.stop()
    assert not (side.store / "abort").exists()
    assert not psutil.pid_exists(first.broker.pid)
    first.daemon.wait_caught_up()
    assert first.daemon.terminate() == 0
    assert not [row for row in first.daemon.events() if row["level"] in ("warning", "error")]
    # The broker's own index was on as well, and both have stopped.
    assert_same_index(side.data, side.store)
    assert len(index_files(side.data)) > 0
    topics = {path.name for path in (side.data / "consumequeue").iterdir()}
    assert {"TopicTest", "OrderPaid", "SCHEDULE_TOPIC_XXXX", RETRY, *TRANSACTIONS} <= topics
    # An id that says where a message is says it with the broker's address: the daemon takes its place.
    address = first.broker.address
    with side.daemon(address) as beside:
        assert address_of(beside) == address
        beside.wait_caught_up()
        check_what_mqadmin_says(side, first, side.tools(address).admin(commands(first.rows, address)), address)
        check_found(replace(side.tools(address), version=OLD_CLIENT), first.rows)
        assert beside.terminate() == 0
        assert not [row for row in beside.events() if row["level"] == "error"]


def test_a_broker_that_is_killed_and_started_again(side: Side) -> None:
    with Daemon(side.store, side.data, "--broker-conf", side.conf) as daemon:
        with Broker(side.home / "second", store=side.store) as broker:
            before = side.send(broker, 2)
            side.wait_until_found(before)
            broker.kill()
        assert (side.store / "abort").exists()
        with Broker(side.home / "third", store=side.store) as broker:
            after = side.send(broker, 3)
            side.wait_until_found(after)
        daemon.wait_caught_up()
        # What was delayed or committed shortly before a kill is delivered again: the broker has not yet noted it.
        check_every_key(side, side.sent, once=("normal", "batch"))
        check_every_offset_id(side, before + after)
        assert daemon.terminate() == 0
    # Its index lacks what was indexed shortly before the kill; its queues do not.
    assert_same_tree(side.data / "consumequeue", side.store / "consumequeue")
    assert not [row for row in daemon.events() if row["level"] in ("warning", "error")]


# --- nothing is ever written into the store ---


def content(root: Path) -> dict[str, tuple[int, int, int, str]]:
    """Mode, times of change and digest of everything there; without the time of reading."""
    found = {}
    for path in [root, *sorted(root.rglob("*"))]:
        status = path.stat()
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "directory"
        found[str(path.relative_to(root))] = (status.st_mode, status.st_mtime_ns, status.st_ctime_ns, digest)
    return found


def check_that_nothing_is_open_for_writing(pid: int, store: Path) -> None:
    ours = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        # The daemon works: a file may be closed between the list and the look at it.
        with contextlib.suppress(FileNotFoundError):
            if entry.readlink().is_relative_to(store):
                flags = re.search(r"flags:\s*([0-7]+)", Path(f"/proc/{pid}/fdinfo/{entry.name}").read_text())
                assert flags is not None
                assert int(flags[1], 8) & os.O_ACCMODE == os.O_RDONLY
                ours += 1
    assert ours
    # Nor is anything of it mapped in a way that could reach the file.
    maps = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if str(store) in line]
    assert not [line for line in maps if "w" in line[1] and "s" in line[1]]


@pytest.fixture
def read_only(side: Side) -> Iterator[Path]:
    """The stopped broker's store, with every permission to write taken away."""
    paths = [side.store, *side.store.rglob("*")]
    modes = {path: path.stat().st_mode for path in paths}
    for path in paths:
        path.chmod(modes[path] & ~0o222)
    yield side.store
    for path in paths:
        path.chmod(modes[path])


def test_a_store_that_cannot_be_written_to_is_as_good(side: Side, read_only: Path, tmp_path: Path) -> None:
    before = content(read_only)
    with Daemon(read_only, tmp_path / "data", "--broker-conf", side.conf) as daemon:
        daemon.wait_caught_up()
        check_that_nothing_is_open_for_writing(daemon.pid, read_only)
        assert daemon.terminate() == 0
    assert content(read_only) == before
    commands: list[tuple[object, ...]] = [
        ("--recover", "--data", tmp_path / "data", "--broker-conf", side.conf),
        ("rebuild", "--out", tmp_path / "out", "--data", tmp_path / "unused", "--broker-conf", side.conf),
        ("query-key", "-t", "TopicTest", "-k", "user-1", "--data", tmp_path / "data"),
        ("message", "-o", "0", "--data", tmp_path / "data"),
        ("inspect", read_only),
    ]
    for number, words in enumerate(commands):
        calls = traced([COMMAND, *words], tmp_path / f"calls-{number}", read_only)
        assert calls
        assert not [call for call in calls if not READS.search(call)]
    assert content(read_only) == before
    assert_same_index(tmp_path / "data", tmp_path / "out")


#: System calls that take a path and change nothing there.
READS = re.compile(
    r"\b(?:stat|lstat|statx|newfstatat|access|faccessat2?|readlink|readlinkat|statfs|getxattr|lgetxattr)\("
    r"|\bopen(?:at)?\([^)]*\bO_RDONLY(?!\S*O_CREAT)(?!\S*O_TRUNC)"
)


def traced(command: list[Any], log: Path, store: Path) -> list[str]:
    """Run a command; the system calls that name a file of the store."""
    tracer = [need("strace"), "-f", "-qq", "-s", "4096", "-e", "trace=%file", "-o", str(log)]
    done = subprocess.run(
        [*tracer, *map(str, command)], env=environment(), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = log.read_text(errors="replace").splitlines()
    return [line for line in lines if str(store) in line and "execve(" not in line]


# --- what indexd repair has mended, asked of the broker ---


def check_found_by_broker(side: Side, broker: Broker, rows: list[dict[str, Any]]) -> None:
    """A message of each of the kinds whose id says where it is: where mqadmin sees it, and what has its key."""
    asked = list({row["kind"]: row for row in rows if row["kind"] in ("normal", "batch")}.values())
    commands = [["topicRoute", "-t", TOPIC]]  # the first one takes the JVM's time
    for row in asked:
        topic, key = ("-t", row["topic"]), row["keys"].split(" ")[0]
        commands.append(["queryMsgByUniqueKey", *topic, "-i", row["msgId"], "-s", "0", "-e", LATEST])
        commands.append(["queryMsgByKey", *topic, "-k", key, "-b", "0", "-e", LATEST])
    said = [one.said for one in side.tools(broker.namesrv).admin(commands)[1:]]
    for row, by_id, by_key in zip(asked, said[::2], said[1::2], strict=True):
        facts = dict(re.findall(r"^([A-Z][A-Za-z ]+): +(\S+)", by_id, re.MULTILINE))
        assert facts.get("CommitLog Offset") == str(int(row["offsetMsgId"][-16:], 16)), by_id
        assert re.findall(r"^([0-9A-F]{32,56}) +\d", by_key, re.MULTILINE) == [row["msgId"]], by_key


def test_a_broker_finds_what_was_mended(side: Side) -> None:
    def indexd(command: str, *words: str) -> subprocess.CompletedProcess[str]:
        return indexd_here(command, *words, "--broker-conf", side.conf, "--data", side.home / "unused")

    # As after an unclean start; what the broker finds in the end are the keys of this file.
    files = sorted((side.store / "index").iterdir())
    files[-1].unlink()
    assert indexd("audit").returncode == 1
    done = indexd("repair", "--yes")
    assert done.returncode == 0, done.stdout + done.stderr
    with Broker(side.home / "fourth", store=side.store) as broker:
        assert indexd("repair", "--yes").returncode == 3
        check_found_by_broker(side, broker, side.sent[-MESSAGES:])
        more = side.send(broker, 4)
        broker.kill()
    # The start after a kill throws away what the checkpoint does not vouch for: mended before, nothing goes.
    done = indexd("repair", "--yes")
    assert done.returncode == 0, done.stdout + done.stderr
    with Broker(side.home / "fifth", store=side.store) as broker:
        check_found_by_broker(side, broker, more)
    done = indexd("audit", "--json")
    assert done.returncode == 0, done.stdout
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["messages"] == sum(1 for _ in naive_frames(side.store / "commitlog", SEGMENT_SIZE))
