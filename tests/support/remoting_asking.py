"""Asking: handlers of the remoting outlet over a test's store, without a connection.

>>> with asking(store) as to:
...     (await to.key(key="order-7")).body
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from indexd.query import TIME_MAX
from indexd.serve.daemon_status import DaemonStatus
from indexd.serve.queries import Queries
from indexd.serve.remoting import processor
from indexd.serve.remoting.command import Form, RemotingCommand
from support.broker_frames import raw
from support.data_directory import T0, config_of, spec
from support.queue_store import QueueStore
from support.serving import Log

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.data_directory import Store

SUCCESS, ERROR, BUSY, NOT_SERVED, NOT_FOUND = 0, 1, 2, 14, 22
ALL_TIME = {"beginTimestamp": "0", "endTimestamp": str(TIME_MAX)}
BY_KEY = {"topic": "T", "key": "k", "maxNum": "32", "_UNIQUE_KEY_QUERY": "false"} | ALL_TIME
PULL = {"consumerGroup": "TOOLS_CONSUMER", "topic": "T", "queueId": "0", "queueOffset": "0", "maxMsgNums": "32"}


class Asking:
    """Handlers over a store; ``row`` is what a running daemon adds to its board."""

    def __init__(self, store: Store, row: dict[str, Any] | None = None, **keys: Any) -> None:
        self.config = config_of(store.data, **keys)
        self.board, self.log = DaemonStatus(self.config), Log()
        self.board.running(lambda: row or {})
        self.queries = Queries(self.config, self.board, 2)

    async def ask(self, code: int, form: Form = Form.JSON, **fields: str) -> RemotingCommand:
        command = RemotingCommand(code, 77, ext_fields=fields, form=form)
        handler = (processor._OURS | processor._ALONE)[code]
        answer = await processor.answer_from_index(handler, self.queries, command)
        assert (answer.opaque, answer.form, answer.is_response) == (77, form, True)
        return answer

    async def key(self, **fields: str) -> RemotingCommand:
        return await self.ask(12, Form.JSON, **BY_KEY | fields)


@contextmanager
def asking(store: Store, row: dict[str, Any] | None = None, **keys: Any) -> Iterator[Asking]:
    opened = Asking(store, row, **keys)
    try:
        yield opened
    finally:
        opened.queries.stop()
        assert opened.queries.close() == 0


def six_messages(root: Path) -> QueueStore:
    """Queue 0 of T has offsets 0 to 5, one a second; k is the key of the last two, u0 to u3 the others' unique keys."""
    store = QueueStore(root)
    store.append(*[spec(T0 + 1000 * number, UNIQ_KEY=f"u{number}") for number in range(4)])
    store.append(*[spec(T0 + 1000 * number, KEYS="k", TAGS="Tag") for number in range(4, 6)])
    store.build()
    return store


def frame_of(store: Store, number: int) -> bytes:
    """The frame of one of the store's messages."""
    return raw(store.root / "commitlog", store.segment, store.messages()[number].phy_offset)
