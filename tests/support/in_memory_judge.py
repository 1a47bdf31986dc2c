"""Judge: queries by key asked of an index both ways, out of memory by the kernel and plainly.

>>> judge = Judge(index)
>>> judge.ask(by_key("order-7")).frames
>>> judge.answered
Counter({'compiled': 1})
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numba

from indexd.errors import IndexdError
from indexd.query import TIME_MAX
from indexd.query.broker_message import KeyRequest, query_message
from indexd.serve.in_memory import InMemory, load_in_memory
from support.broker_frames import ANY_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable

    from indexd.query import QueryIndex
    from indexd.query.answer import LastUpdate
    from indexd.query.broker_message import FoundFrames
    from indexd.query.source import Look

COMPILED = "compiled"
IS_INTERPRETED = bool(numba.config.DISABLE_JIT)  # type: ignore[attr-defined]  # set by the environment


class Judge:
    """Counts which of them answered where a memory was there."""

    def __init__(self, index: QueryIndex) -> None:
        assert load_in_memory() is (None if IS_INTERPRETED else InMemory)
        self.index, self.memory = index, InMemory(index)
        self.answered: Counter[str] = Counter()

    def ask(self, request: KeyRequest, size_max: int = ANY_SIZE) -> FoundFrames | str:
        """What both ways answer, or complain of."""
        self.index.memory = None
        wanted = outcome(lambda: query_message(self.index, request, size_max))
        self.index.memory = self
        found = outcome(lambda: query_message(self.index, request, size_max))
        assert found == wanted
        return found

    def find(
        self, look: Look, key_hash: int, max_num: int, begin: int, end: int, size_max: int
    ) -> tuple[tuple[bytes, ...], LastUpdate] | None:
        """In the memory's place."""
        found = self.memory.find(look, key_hash, max_num, begin, end, size_max)
        self.answered["left" if found is None else COMPILED] += 1
        return found


def outcome(call: Callable[[], FoundFrames]) -> FoundFrames | str:
    """The answer, or the line of the error."""
    try:
        return call()
    except IndexdError as error:
        return error.line()


def by_key(key: str = "k", max_num: int = 64, begin: int = 0, end: int = TIME_MAX) -> KeyRequest:
    """A query of topic T."""
    return KeyRequest("T", key, max_num, begin, end, False, "K")


def frames(found: FoundFrames | str) -> int:
    """How many an answer has."""
    assert not isinstance(found, str), found
    return len(found.frames)
