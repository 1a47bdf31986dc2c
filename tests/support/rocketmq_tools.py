"""RocketMQ's own tools, pointed at any name server: its client, of two versions, and mqadmin.

::

    tools = Tools(tmp_path / "tools", broker.namesrv)
    rows = tools.send(100)
    assert replace(tools, version=OLD_CLIENT).check(rows)["missed"] == 0
    tools.admin([["queryMsgByKey", "-t", "TopicTest", "-k", "order-s1-0"]])[0].said
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from indexd.query import open_data
from indexd.query.by_queue_and_time import Boundary
from support.daemon import Daemon
from support.naive import NaiveMessage
from support.queues import tree
from support.rocketmq import arguments, figures_of, run

Row = dict[str, Any]
#: Java's switch for TLS, which trusts whatever certificate it is shown.
TLS = ("-Dtls.enable=true",)
_NUMBERS = itertools.count()
#: Its logging tells about itself when a command is the first.
_CHATTER = ("|-INFO in ", "|-WARN in ")


@dataclass(frozen=True)
class Said:
    """What a command of mqadmin said, on both streams, and the ``body`` that it put into a file."""

    said: str
    body: str | None


@dataclass(frozen=True)
class Tools:
    """Each call is a JVM; RocketMQError when it ends badly. ``version``: OLD_CLIENT, else the newest."""

    home: Path
    namesrv: str
    version: str | None = None
    flags: tuple[str, ...] = ()
    keys: tuple[str, str] | None = None  # access key and secret key

    def send(self, count: int, seed: int = 1) -> list[Row]:
        """Messages of all kinds: what the client noted of each, and what it is to be found by."""
        out = self._file("sent")
        self._run("Client", "send", count=count, seed=seed, out=out)
        return _rows(out)

    def check(self, rows: Sequence[Row], *, by_offset_id: bool = False) -> Row:
        """Ask for each committed message by each key and id: how many were asked and missed, and the first of these."""
        place = self._file("asked")
        place.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
        return figures_of(self._run("Finder", "check", in_=place, by_offset_id=by_offset_id))

    def consume(self, topics: Sequence[str], count: int, seconds: int = 60) -> Row:
        """Be pushed messages; ``msgIds`` of all, and how many came ``again`` because the first failed."""
        return figures_of(self._run("Consumer", "run", topics=list(topics), count=count, seconds=seconds))

    def leave_open(self, topic: str, count: int) -> list[Row]:
        """Transactions that are committed when the broker asks the client for them."""
        said = self._run("Undecided", "run", topic=topic, count=count)
        rows: list[Row] = json.loads(said)
        return rows

    def admin(self, commands: Sequence[Sequence[str]]) -> list[Said]:
        """What mqadmin says to each, one after the other, of this name server."""
        place, out = self._file("commands"), self._file("said")
        place.write_text("".join(f"{json.dumps([*words, '-n', self.namesrv])}\n" for words in commands), "utf-8")
        self._java("Admin", "run", arguments(in_=place, out=out))
        return [Said(_without_chatter(row["said"]), row.get("body")) for row in _rows(out)]

    def _run(self, main: str, mode: str, **options: object) -> str:
        return self._java(main, mode, arguments(namesrv=self.namesrv, **options))

    def _java(self, main: str, mode: str, words: list[str]) -> str:
        if self.keys is not None:
            words = [*words, f"access-key={self.keys[0]}", f"secret-key={self.keys[1]}"]
        return run(main, mode, *words, timeout=120, home=self.home, flags=self.flags, version=self.version)

    def _file(self, name: str) -> Path:
        self.home.mkdir(parents=True, exist_ok=True)
        return self.home / f"{name}-{next(_NUMBERS)}"


def address_of(daemon: Daemon) -> str:
    """Where a daemon answers them, as soon as it does."""

    def said() -> str | None:
        return next((str(row["remoting"]) for row in daemon.events("listening") if "remoting" in row), None)

    return daemon.wait_for(said, "to listen")


def _rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]


def _without_chatter(said: str) -> str:
    lines = [line.rstrip() for line in said.split("\n") if not any(word in line for word in _CHATTER)]
    return "\n".join(line for line in lines if line)


#: So few small messages that RocketMQ never cuts an answer short because of their size.
_MAX_NUM = 8
_BOUNDARIES: tuple[Boundary, ...] = ("lower", "upper")
#: What a client is told for each GetMessageStatus.
PULL_STATUS = {
    "FOUND": "FOUND",
    "NO_MESSAGE_IN_QUEUE": "NO_NEW_MSG",
    "OFFSET_OVERFLOW_ONE": "NO_NEW_MSG",
    "OFFSET_OVERFLOW_BADLY": "OFFSET_ILLEGAL",
    "OFFSET_TOO_SMALL": "OFFSET_ILLEGAL",
}


@dataclass(frozen=True)
class Question:
    """By offset (``value``, ``max_num``), or by time (``value`` in ms, ``boundary``)."""

    topic: str
    queue_id: int
    value: int
    max_num: int = 0
    boundary: Boundary | None = None

    @property
    def line(self) -> str:
        """As ``Questions.java`` reads it."""
        kind, last = ("offset", self.max_num) if self.boundary is None else ("time", self.boundary)
        return f"{kind}\t{self.topic}\t{self.queue_id}\t{self.value}\t{last}\n"


def questions(messages: Iterable[NaiveMessage], count: int, seed: int) -> list[Question]:
    """About queues of these messages: each queue's ends and what lies beyond, and ``count`` of each kind by chance."""
    rand = random.Random(seed)
    entered = [one for one in messages if one.sys_flag & 0xC in (0x0, 0x8)]
    ends: dict[tuple[str, int], int] = {}
    for one in entered:
        ends[one.topic, one.queue_id] = one.cq_offset + 1
    asked = [
        Question(*queue, value, _MAX_NUM)
        for queue, end in ends.items()
        for value in (0, 1, end - 1, end, end + 1, end + 1000)
    ]
    for one in rand.choices(entered, k=count):
        asked.append(Question(one.topic, one.queue_id, one.cq_offset, rand.randint(1, _MAX_NUM)))
        time = one.store_timestamp + rand.choice([-1, 0, 0, 0, 1, 50, -50])
        asked += [Question(one.topic, one.queue_id, time, boundary=boundary) for boundary in _BOUNDARIES]
    asked += [
        Question(*queue, time, boundary=boundary) for queue in ends for time in (1, 2**62) for boundary in _BOUNDARIES
    ]
    return asked


def ask(asked: list[Question], home: Path, program: Callable[[Path, Path], object]) -> list[dict[str, Any]]:
    """What a program of ``tests/real/java`` answers; it is given the files to read and to write."""
    lines, out = home / "questions", home / "answers"
    lines.write_text("".join(question.line for question in asked), "utf-8")
    program(lines, out)
    rows = [json.loads(line) for line in out.read_text("utf-8").split("\n") if line]
    assert len(rows) == len(asked)
    return rows


def assert_same_answers(
    data: Path,
    asked: list[Question],
    rows: list[dict[str, Any]],
    queue_file_size: int,
    statuses: dict[str, str] | None = None,
) -> None:
    """``data`` answers as RocketMQ did, whose answers do not go on in the next file of a queue.

    ``statuses``: what its words were turned into on the way.
    """
    met = set()
    with open_data(data) as opened:
        for question, row in zip(asked, rows, strict=True):
            queue = (question.topic, question.queue_id)
            if question.boundary is not None:
                by_time = opened.at_time(*queue, question.value, question.boundary)
                assert by_time.queue_offset == row["queueOffset"], question
                continue
            found = opened.by_queue(*queue, question.value, max_num=question.max_num)
            met.add(found.status)
            status = statuses[found.status] if statuses is not None else found.status
            ends = (status, found.min_offset, found.max_offset)
            assert ends == (row["status"], row["minOffset"], row["maxOffset"]), question
            if found.status == "FOUND":
                left = (queue_file_size // 20) - question.value % (queue_file_size // 20)
                assert [hit.unit.phy_offset for hit in found.hits[:left]] == row["phyOffsets"], question
                assert question.value + len(found.hits[:left]) == row["nextOffset"], question
                assert not found.problems
    assert {"FOUND", "OFFSET_OVERFLOW_ONE", "OFFSET_OVERFLOW_BADLY"} <= met


def assert_units_of_store(data: Path, store: Path) -> None:
    """Every unit of ``data`` stands in the store at the same place.

    What a store that was cut holds behind them is left over: it moves its positions and leaves the bytes.
    """
    ours, theirs = tree(data / "consumequeue"), tree(store / "consumequeue")
    for name, units in ours.items():
        # A unit's size is never 0, so that at most a part of the last one is zeros.
        size = -(-len(units.rstrip(b"\0")) // 20) * 20
        assert theirs[name][:size] == units[:size], name
