"""Our OffsetIndex and TimeIndex behind the commands of kafka-index-check's ``script``, which drives Kafka's own.

``Ours(directory).do("append 5 100")`` answers as ``KafkaIndexCheck script`` would, where a raised error is the simple
name of Kafka's exception for it. The two places in which ours are meant to differ are not smoothed over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from indexd.errors import (
    CorruptDataError,
    IndexdError,
    IndexFullError,
    OffsetOverflowError,
    OutOfOrderError,
    UsageError,
)
from indexd.sparse.format import is_in_range
from indexd.sparse.sparse_index import OffsetIndex, TimeIndex
from indexd.storage.disk import Disk

Index = OffsetIndex | TimeIndex

#: What each of Kafka's exceptions is here.
ERRORS: dict[str, tuple[type[IndexdError], ...]] = {
    "IllegalArgumentException": (IndexFullError, UsageError),
    "InvalidOffsetException": (OutOfOrderError,),
    "IllegalStateException": (OutOfOrderError,),
    "IndexOffsetOverflowException": (OffsetOverflowError,),
    "CorruptIndexException": (CorruptDataError,),
    "BufferOverflowException": (IndexFullError,),
}


@dataclass(frozen=True)
class Answer:
    """What a command came to: a value or an error, the index's state behind it, and the file's bytes on disk."""

    result: Any
    state: dict[str, Any] | None
    length: int | None


def state_of(index: Index) -> dict[str, Any]:
    """The fields that Kafka's classes show, but for the mapping's position: it is the size in bytes."""
    state: dict[str, Any] = {
        "entries": index.entries,
        "maxEntries": index.max_entries,
        "length": index.length,
        "sizeInBytes": index.size_in_bytes,
        "isFull": index.is_full,
    }
    if isinstance(index, TimeIndex):
        state["lastEntry"] = list(index.last_entry)
    else:
        state["lastOffset"] = index.last_entry.offset
    return state


def same_error(error: object, theirs: str) -> bool:
    """Whether ``error`` is what stands for Kafka's exception of that name, with or without its package."""
    return isinstance(error, ERRORS[theirs.rpartition(".")[2]])


def open_index(kind: str, path: Path, base: int, max_index_size: int, *, writable: bool = True) -> Index:
    """An index of ``kind`` offset or time, opened as Kafka does."""
    index_class = TimeIndex if kind == "time" else OffsetIndex
    return index_class.open(Disk(), path, base, max_index_size, writable=writable)


def _emptied(index: Index) -> Index:
    index.entries = 0
    return index


class Ours:
    """One index at a time, in ``directory``, driven by command lines."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path: Path | None = None
        self._size = -1
        self.index: Index | None = None

    def do(self, line: str) -> Answer:
        """The answer to one command."""
        name, *words = line.split()
        try:
            result = self._open(words) if name == "open" else self._call(name, words)
        except IndexdError as error:
            result = error
        state = None if self.index is None else state_of(self.index)
        exists = self._path is not None and self._path.exists()
        return Answer(result, state, self._path.stat().st_size if exists and self._path else None)

    def close(self) -> None:
        """Let go of the file as it is."""
        if self.index is not None:
            self.index.close()
            self.index = None

    def _open(self, words: list[str]) -> object:
        self.close()
        kind, name, base, size, *mode = words
        self._path, self._size = self._directory / name, int(size)
        self.index = open_index(kind, self._path, int(base), self._size, writable=mode != ["ro"])
        return "ok"

    def _call(self, name: str, words: list[str]) -> object:
        index = self.index
        assert index is not None
        numbers = [int(word) for word in words if word.lstrip("-").isdigit()]
        if isinstance(index, OffsetIndex) and name == "append":
            index.append(numbers[0], numbers[1])
            return "ok"
        if isinstance(index, TimeIndex) and name == "maybeAppend":
            index.maybe_append(numbers[0], numbers[1], skip_full_check=words[-1] == "skip")
            return "ok"
        answers: dict[str, Callable[[], object]] = {
            "lookup": lambda: index.lookup(numbers[0]),
            "entry": lambda: index.entry(numbers[0]),
            "resize": lambda: index.resize(numbers[0]),
            "canAppend": lambda: is_in_range(index.base, numbers[0]),
            "entries": lambda: list(index),
            "hex": lambda: index.path.read_bytes().hex(),
        }
        if name in answers:
            return answers[name]()
        self._act(index, name, words)
        return "ok"

    def _act(self, index: Index, name: str, words: list[str]) -> None:
        actions: dict[str, Callable[[], object]] = {
            "truncateTo": lambda: index.truncate_to(int(words[0])),
            "truncate": lambda: _emptied(index),
            "trim": index.trim_to_valid_size,
            "reset": lambda: _emptied(index).resize(self._size),
            "flush": lambda: None,
            "sanity": index.sanity_check,
            "state": lambda: None,
        }
        if name in actions:
            actions[name]()
        elif name == "rename":
            self._path = self._directory / words[0]
            index.path.rename(self._path)
            index.path = self._path
        elif name in ("unmap", "close"):
            self.index = None
            with index:
                if name == "close":  # as up to Kafka 4.3
                    index.trim_to_valid_size()
        else:
            raise AssertionError(f"no such command: {name}")
