"""Asking: handlers of the remoting outlet over a test's store, without a connection; both ways of a key query; frames.

>>> with Asking(store) as to:
...     (await to.key(key='order-7')).body

>>> async with both(store) as way:
...     way.together(request('order-7') + request('order-8'))

>>> judge = Judge(index)
>>> judge.ask(by_key('order-7')).frames
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

from indexd.errors import IndexdError
from indexd.query import TIME_MAX, KeyQuery
from indexd.query.broker_message import query_message
from indexd.serve.daemon_status import DaemonStatus
from indexd.serve.queries import Queries
from indexd.serve.remoting import processor
from indexd.serve.remoting.command import Form, RemotingCommand, decode_command, encode_command
from indexd.serve.remoting.key_queries import IndexTables, KeyQueries, load_key_queries
from indexd.storage.disk import WouldWaitError
from support.data_directory import T0, built, config_of, spec
from support.queue_store import QueueStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

    from indexd.query import Data, QueryIndex
    from indexd.query.broker_message import FoundFrames
    from support.data_directory import Store


SUCCESS, ERROR, BUSY, NOT_SERVED, NOT_FOUND = 0, 1, 2, 14, 22
ALL_TIME = {"beginTimestamp": "0", "endTimestamp": str(TIME_MAX)}
BY_KEY = {"topic": "T", "key": "k", "maxNum": "32", "_UNIQUE_KEY_QUERY": "false"} | ALL_TIME
PULL = {"consumerGroup": "TOOLS_CONSUMER", "topic": "T", "queueId": "0", "queueOffset": "0", "maxMsgNums": "32"}


class Asking:
    """Handlers over a store, for a ``with`` block; ``row`` is what a running daemon adds to its board."""

    def __init__(self, store: Store, row: dict[str, Any] | None = None, **keys: Any) -> None:
        self.config = config_of(store.data, **keys)
        self.board = DaemonStatus(self.config)
        self.board.running(lambda: row or {})
        self.queries = Queries(self.config, self.board, 2)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.queries.stop()
        assert self.queries.close() == 0

    async def ask(self, code: int, form: Form = Form.JSON, **fields: str) -> RemotingCommand:
        command = RemotingCommand(code, 77, ext_fields=fields, form=form)
        answer = await processor.answer_from_index(processor._ALONE[code], self.queries, command)
        assert (answer.opaque, answer.form, answer.is_response) == (77, form, True)
        return answer

    async def key(self, **fields: str) -> RemotingCommand:
        return await self.ask(12, Form.JSON, **BY_KEY | fields)


def six_messages(root: Path) -> QueueStore:
    """Queue 0 of T has offsets 0 to 5, one a second; k is the key of the last two, u0 to u3 the others' unique keys."""
    store = QueueStore(root)
    store.append(*[spec(T0 + 1000 * number, UNIQ_KEY=f"u{number}") for number in range(4)])
    built(store, *[spec(T0 + 1000 * number, KEYS="k", TAGS="Tag") for number in range(4, 6)])
    return store


def frame_of(store: Store, number: int) -> bytes:
    """The frame of one of the store's messages."""
    return raw(store.root / "commitlog", store.segment, store.messages()[number].phy_offset)


ANY_SIZE = 1 << 24


def raw(directory: Path, segment_size: int, phy_offset: int) -> bytes:
    """As a broker takes a frame: the bytes that its first field counts."""
    with (directory / f"{phy_offset - phy_offset % segment_size:020d}").open("rb") as file:
        file.seek(phy_offset % segment_size)
        size = file.read(4)
        return size + file.read(int.from_bytes(size, "big") - 4)


def frames_at(store: Store, offsets: Sequence[int]) -> tuple[bytes, ...]:
    return tuple(raw(store.root / "commitlog", store.segment, offset) for offset in offsets)


def damage(store: Store, phy_offset: int, at: int = 89) -> None:
    """Turn a byte of a frame, by default one of its body."""
    path = store.root / "commitlog" / f"{phy_offset - phy_offset % store.segment:020d}"
    data = bytearray(path.read_bytes())
    data[phy_offset % store.segment + at] ^= 0xFF
    path.write_bytes(data)


FRAME_MAX = 1 << 20
FIELDS = {"topic": "T", "key": "k", "maxNum": "32", "_UNIQUE_KEY_QUERY": "false"} | ALL_TIME
COMPILED = "compiled"


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

    def __init__(self, to: Asking, store: Store) -> None:
        self.to, self.store = to, store
        self.compiled = KeyQueries(to.queries, processor.size_max_of(to.queries))

    def together(self, data: bytes, frame_max: int = FRAME_MAX) -> tuple[int, bytes]:
        """How many of the requests are answered, and with what: the same as the plain way's answers to them."""
        for path in self.store.root.rglob("*"):  # where memory is short, the page cache may have lost it
            if path.is_file():
                path.read_bytes()
        found = self.compiled.answer(data, frame_max)
        if found is None:
            return 0, b""
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
        opened = self.to.queries._idle[-1]

        async def query(question: Callable[[Data], Any], _: object) -> Any:
            opened.data.set_check(lambda: None)
            opened.data.index.look_seconds = 600.0  # of the same look
            try:
                return question(opened.data)
            finally:
                opened.data.index.look_seconds = 0.0

        at_once: Any = SimpleNamespace(config=self.to.config, query=query)
        try:
            processor.query_message(at_once, command).send(None)
        except StopIteration as done:
            return encode_command(done.value)
        raise AssertionError("it waited")


@asynccontextmanager
async def both(store: Store, **keys: Any) -> AsyncIterator[Both]:
    load_key_queries()  # it may have to compile for long: not while an index is open
    with Asking(store, **keys) as to:
        to.queries._compiled_of, to.queries.look_seconds = IndexTables, 600.0
        await to.key(maxNum="64")  # which opens all segments
        yield Both(to, store)


class Judge:
    """One index asked both ways; counts which of them answered where something was found."""

    def __init__(self, index: QueryIndex) -> None:
        assert load_key_queries() is IndexTables
        self.index, self.tables = index, IndexTables(index)
        self.answered: Counter[str] = Counter()

    def ask(self, request: KeyQuery, size_max: int = ANY_SIZE) -> FoundFrames | str:
        """What the plain way answers or complains of; what the compiled one answers is the same."""
        wanted = outcome(lambda: query_message(self.index, request, size_max))
        found = self.compiled(request, size_max)
        if found is not None:
            assert not isinstance(wanted, str)
            assert found == (tuple(map(str, wanted.last_update)), b"".join(wanted.frames), wanted.remark)
        self.answered["left" if found is None else COMPILED] += isinstance(wanted, str) or bool(wanted.frames)
        return wanted

    def compiled(self, asked: KeyQuery, size_max: int = ANY_SIZE) -> tuple[tuple[str, ...], bytes, str | None] | None:
        """The last update, body and remark."""
        fields = {
            "topic": asked.topic,
            "key": asked.key,
            "maxNum": str(asked.max_num),
            "_UNIQUE_KEY_QUERY": "false",
            "beginTimestamp": str(asked.begin),
            "endTimestamp": str(asked.end),
        }
        if asked.index_type is not None:
            fields["indexType"] = asked.index_type

        def ask_compiled(call: Callable[[IndexTables], Any]) -> Any:
            with suppress(IndexdError, WouldWaitError, OverflowError):
                return call(self.tables)

        queries: Any = SimpleNamespace(config=self.index.config, ask_compiled=ask_compiled, count=lambda *_: None)
        found = KeyQueries(queries, size_max).answer(framed(written(header(fields))), FRAME_MAX)
        if found is None:
            return None
        answer = decode_command(found.answers[4:])
        return tuple(answer.ext_fields.values()), answer.body, answer.remark


def outcome(call: Callable[[], FoundFrames]) -> FoundFrames | str:
    """The answer, or the line of the error."""
    try:
        return call()
    except IndexdError as error:
        return error.line()


def by_key(key: str = "k", max_num: int = 64, begin: int = 0, end: int = TIME_MAX) -> KeyQuery:
    """A query of topic T."""
    return KeyQuery("T", key, max_num, begin, end, "K")


def frames(found: FoundFrames | str) -> int:
    """How many an answer has."""
    assert not isinstance(found, str), found
    return len(found.frames)
