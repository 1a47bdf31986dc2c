"""Both: queries by key that came together, answered both ways, by one compiled call and plainly.

>>> async with both(store) as way:
...     way.together(request("order-7") + request("order-8"))
"""

from __future__ import annotations

import json
import struct
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from indexd.serve.in_memory import InMemory
from indexd.serve.remoting.command import decode_command, encode_command
from indexd.serve.remoting.key_queries import KeyQueries
from indexd.serve.remoting.messages import query_message
from indexd.serve.remoting.upstream import SparingLog
from support.remoting_asking import ALL_TIME, Asking, asking

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from indexd.query import Data
    from indexd.query.source import Memory
    from support.data_directory import Store

FRAME_MAX = 1 << 20
FIELDS = {"topic": "T", "key": "k", "maxNum": "32", "_UNIQUE_KEY_QUERY": "false"} | ALL_TIME


def header(fields: Any = None, /, **members: Any) -> dict[str, Any]:
    """As a client writes it; a member that is None is left out."""
    first = {"code": 12, "extFields": FIELDS if fields is None else fields, "flag": 0, "language": "JAVA"}
    found = first | {"opaque": 77, "serializeTypeCurrentRPC": "JSON", "version": 493} | members
    return {name: value for name, value in found.items() if value is not None}


def framed(text: str | bytes, body: bytes = b"", form: int = 0) -> bytes:
    """A header of that text in a frame."""
    data = text.encode() if isinstance(text, str) else text
    return struct.pack(">ii", 4 + len(data) + len(body), form << 24 | len(data)) + data + body


def written(members: object) -> str:
    """Without blanks."""
    return json.dumps(members, separators=(",", ":"))


def request(key: str = "k", opaque: int = 77, **fields: str) -> bytes:
    """A frame as a client sends it."""
    return framed(written(header(FIELDS | {"key": key} | fields, opaque=opaque)))


class Both:
    """The compiled way, and the plain one."""

    def __init__(self, to: Asking) -> None:
        self.to, self.compiled = to, KeyQueries(to.queries, SparingLog(to.log))

    def together(self, data: bytes, frame_max: int = FRAME_MAX) -> tuple[int, bytes]:
        """How many of the requests are answered, and with what: the same as the plain way's answers to them."""
        found = self.compiled.answer(data, frame_max)
        if found is None:
            return 0, b""
        assert (found.request_code, found.response_code) == (12, 0)
        rest, answers = data[: found.size], []
        while rest:
            size = 4 + int.from_bytes(rest[:4], "big")
            answers.append(self.plainly(rest[4:size]))
            rest = rest[size:]
        assert len(answers) == found.requests
        assert b"".join(answers) == found.answers
        return found.requests, found.answers

    def plainly(self, frame: bytes) -> bytes:
        command = decode_command(frame)
        assert (command.code, command.flag) == (12, 0)
        memory = self.to.queries.ask_at_once(lambda data: _exchange(data, None))
        answer = query_message.at_once(self.to.queries, command)
        self.to.queries.ask_at_once(lambda data: _exchange(data, memory))
        assert answer is not None
        return encode_command(answer)


def _exchange(data: Data, memory: Memory | None) -> Memory | None:
    # The index's own for another.
    found, data.index.memory = data.index.memory, memory
    return found


@asynccontextmanager
async def both(store: Store, **keys: Any) -> AsyncIterator[Both]:
    def remember(data: Data) -> None:
        data.index.memory = InMemory(data.index)

    with asking(store, **keys) as to:
        await to.key(maxNum="64")  # which opens all segments
        await to.queries.ask(remember)
        yield Both(to)
