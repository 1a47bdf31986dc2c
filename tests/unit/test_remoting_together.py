"""Heaps of requests over one connection, some of which are answered by one compiled call: nobody can tell which."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, BinaryIO

import pytest

from indexd.serve.remoting.command import RemotingCommand, decode_command, encode_command
from indexd.serve.remoting.key_queries import KeyQueries
from support.data_directory import T0
from support.queue_store import QueueStore
from support.remoting import signed
from support.remoting_asking import ALL_TIME, six_messages
from support.remoting_outlet import Outlet
from support.remoting_serving import is_closed

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from indexd.serve.remoting.key_queries import Answered

_QUERY = {"topic": "T", "key": "k", "maxNum": "32"} | ALL_TIME
_KEYS = ("rocketmq", "12345678")


@pytest.fixture
def store(tmp_path: Path) -> QueueStore:
    return six_messages(tmp_path)


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many were answered by each call that answered any."""
    done: list[int] = []
    answer = KeyQueries.answer

    def watched(self: KeyQueries, data: bytes, frame_max: int) -> Answered | None:
        found = answer(self, data, frame_max)
        done.extend([] if found is None else [found.requests])
        return found

    monkeypatch.setattr(KeyQueries, "answer", watched)
    return done


def request(opaque: int, code: int = 12, fields: Mapping[str, str] = _QUERY) -> bytes:
    return encode_command(RemotingCommand(code, opaque, language="JAVA", version=493, ext_fields=dict(fields)))


def read_frame(stream: BinaryIO) -> bytes:
    """One without its length."""
    return stream.read(int.from_bytes(stream.read(4), "big"))


def wait_until_compiled(outlet: Outlet, together: list[int]) -> None:
    """Until requests are answered so."""
    with outlet.connect() as client, client.makefile("rb") as stream:

        def ask() -> bool:
            client.sendall(request(1) + request(2))
            return {decode_command(read_frame(stream)).opaque for _ in range(2)} == {1, 2} and bool(together)

        outlet.wait_for(ask)


def test_each_gets_its_own_answer(store: QueueStore, tmp_path: Path, together: list[int]) -> None:
    at = str(store.messages()[2].phy_offset)
    found, other, *_ = kinds = [
        _QUERY,
        _QUERY | {"key": "u1"},
        _QUERY | {"key": "absent"},
        _QUERY | {"maxNum": "x"},
        _QUERY | {"key": "k\n"},
        _QUERY | {"endTimestamp": str(T0)},
    ]
    asked = [*[(12, fields) for fields in kinds], (33, {"offset": at}), (310, {}), (34, {})]
    rand = random.Random(3)
    with Outlet(tmp_path) as outlet, outlet.connect() as client, client.makefile("rb") as stream:
        wait_until_compiled(outlet, together)
        wanted = []
        for code, fields in asked:
            client.sendall(request(7, code, fields))
            wanted.append(decode_command(read_frame(stream)))
        assert [answer.code for answer in wanted] == [0, 0, 22, 1, 22, 22, 0, 3, 0]
        together.clear()
        time.sleep(0.2)  # the board is told fifty times a second
        before = outlet.row()["requests"]["QUERY_MESSAGE"]["ok"]
        sent = [rand.randrange(len(asked) if number % 100 > 40 else 2) for number in range(1000)]
        answers = {}
        for first in range(0, len(sent), 20):
            numbers = range(first, first + 20)
            data = b"".join(request(number, *asked[sent[number]]) for number in numbers)
            for begin in range(0, len(data), 1777):
                client.sendall(data[begin : begin + 1777])
            for _ in numbers:
                answer = decode_command(read_frame(stream))
                answers[answer.opaque] = answer
        for number, kind in enumerate(sent):
            assert replace(answers[number], opaque=7) == wanted[kind]
        assert sum(together) > 200
        assert max(together) > 1
        ok = sum(asked[kind][1] in (found, other) for kind in sent)
        outlet.wait_for(lambda: outlet.row()["requests"]["QUERY_MESSAGE"]["ok"] == before + ok)


@pytest.mark.parametrize("way", ["signed", "exact"])
def test_not_where_more_is_asked_for(store: QueueStore, tmp_path: Path, together: list[int], way: str) -> None:
    settings: dict[str, Any] = {"remoting_mode": "exact"}
    fields = _QUERY
    if way == "signed":
        (tmp_path / "secret").write_text(_KEYS[1])
        settings = {"remoting_access_key": _KEYS[0], "remoting_secret_key_file": tmp_path / "secret"}
        fields = signed(_QUERY, b"", _KEYS)
    with Outlet(tmp_path, **settings) as outlet, outlet.client() as client:
        for _ in range(30):
            assert client.ask(12, fields).code == 0
        for _ in range(30):
            assert client.ask(12, _QUERY).code == (16 if way == "signed" else 0)
    assert not together


def test_a_frame_that_is_none_behind_those_that_are_answered(
    store: QueueStore, tmp_path: Path, together: list[int]
) -> None:
    with Outlet(tmp_path) as outlet:
        wait_until_compiled(outlet, together)
        with outlet.connect() as client, client.makefile("rb") as stream:
            client.sendall(request(70) + request(71) + b"\xff\xff\xff\xff" + request(72))
            assert [decode_command(read_frame(stream)).opaque for _ in range(2)] == [70, 71]
            assert is_closed(client)
        outlet.wait_for(lambda: outlet.row()["closed"]["bytes"] == 1)
