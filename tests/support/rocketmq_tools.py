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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.daemon import Daemon
from support.rocketmq_jvm import arguments, figures_of, run

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
