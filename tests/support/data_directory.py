"""Stores, and the data directories that indexd leaves beside them at a clean stop, made by the naive writer."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from indexd.config import Config, load
from indexd.consumequeue.format import QueuesMark
from indexd.flush.frontier import Frontier, write_frontier
from indexd.index.format import FileMark, IndexHeader, IndexLayout
from indexd.query import Answer, KeyQuery, QueryIndex, open_index, query_exact
from indexd.storage.disk import Disk
from indexd.storage.lock import DirectoryLock
from indexd.storage.names import DataFiles
from support.commitlog_writer import CommitLogWriter, FrameSpec
from support.naive import NaiveIndexService, naive_frames

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from support.goldens import Golden
    from support.naive import NaiveMessage


SEGMENT = 4096
LAYOUT = IndexLayout(7, 10)
T0 = 1_700_000_000_000


def build_index(messages: Iterable[NaiveMessage], layout: IndexLayout, flavour: str) -> NaiveIndexService:
    """The naive service after ``messages``; its queries are uncapped."""
    service = NaiveIndexService(layout.hash_slot_num, layout.index_num, flavour, max_msgs_num_batch=1 << 60)
    for message in messages:
        service.build_index(message)
    return service


def write_data(data: Path, frontier: Frontier, service: NaiveIndexService) -> Frontier:
    """Write the index files and ``frontier`` with their marks into ``data``; the frontier as written."""
    files = DataFiles(data)
    files.index.mkdir(parents=True, exist_ok=True)
    marks = []
    for number, file in enumerate(service.files):
        name, content = f"{20260101000000000 + number}", file.to_bytes()
        (files.index / name).write_bytes(content)
        marks.append(FileMark(name, IndexHeader.unpack(content), file.is_write_full()))
    frontier = frontier.with_outputs(index=tuple(marks))
    write_frontier(Disk(), files.frontier, frontier, "0.1.0")
    return frontier


def make_data(
    data: Path, store: Path, messages: list[NaiveMessage], layout: IndexLayout, flavour: str, segment_size: int
) -> tuple[Frontier, NaiveIndexService]:
    """A data directory that covers ``messages``, the whole log of ``store``."""
    service = build_index(messages, layout, flavour)
    frontier = Frontier(str(store), (str(store / "commitlog"),), segment_size, flavour, layout, messages=len(messages))
    if messages:
        last = messages[-1]
        begin = messages[0].phy_offset // segment_size * segment_size
        end = last.phy_offset + last.size
        frontier = replace(frontier, begin_offset=begin, phy_offset=end, store_timestamp=last.store_timestamp)
    return write_data(data, frontier, service), service


def make_golden_data(data: Path, golden: Golden) -> tuple[Frontier, NaiveIndexService]:
    """A data directory that covers a golden's log."""
    messages = list(naive_frames(golden.root / "commitlog", golden.segment_size))
    layout = IndexLayout(golden.hash_slot_num, golden.index_num)
    return make_data(data, golden.root, messages, layout, golden.flavour, golden.segment_size)


def config_of(data: Path, **keys: Any) -> Config:
    """The configuration of a command that was given ``--data`` and ``keys`` alone."""
    return load({"data": str(data)} | {key: str(value) for key, value in keys.items()}, None, {})


def spec(time: int = T0, topic: str = "T", size: int = 0, **properties: str) -> FrameSpec:
    """A message with ``size`` body bytes; key k unless properties are given."""
    return FrameSpec(topic, bytes(size), properties or {"KEYS": "k"}, store_timestamp=time)


def changed(frontier: Frontier, **changes: Any) -> Frontier:
    """``replace`` that also takes index, queues, queue_file_size, queues_limit and sparse; None for not built."""
    parts: dict[str, Any] = {name: changes.pop(name) for name in ("index", "sparse") if name in changes}
    if changes.keys() & {"queues", "queue_file_size", "queues_limit"}:
        queues, mark = changes.pop("queues", frontier.queues), frontier.queues_mark or QueuesMark(0)
        size, limit = changes.pop("queue_file_size", mark.file_size), changes.pop("queues_limit", mark.limit)
        parts["consumeQueue"] = None if queues is None else QueuesMark(size, queues, limit)
    return replace(frontier.with_outputs(**parts), **changes)


AnyStore = TypeVar("AnyStore", bound="Store")


class Store:
    """A store and its data directory in ``root``; ``build`` covers what has been appended."""

    def __init__(self, root: Path, layout: IndexLayout = LAYOUT, flavour: str = "5.4", segment: int = SEGMENT) -> None:
        self.root, self.data, self.layout = root / "store", root / "data", layout
        self.flavour, self.segment = flavour, segment
        self.writer = CommitLogWriter(self.root / "commitlog", segment)

    def append(self, *specs: FrameSpec) -> list[int]:
        return [self.writer.append(one) for one in specs]

    def messages(self) -> list[NaiveMessage]:
        return list(naive_frames(self.root / "commitlog", self.segment))

    def build(self) -> NaiveIndexService:
        self.frontier, service = make_data(
            self.data, self.root, self.messages(), self.layout, self.flavour, self.segment
        )
        return service

    def change_frontier(self, **changes: Any) -> None:
        self.frontier = changed(self.frontier, **changes)
        write_frontier(Disk(), self.data / "frontier", self.frontier, "0")

    @contextmanager
    def index(self, **keys: Any) -> Iterator[QueryIndex]:
        index = open_index(Disk(), config_of(self.data, **keys))
        try:
            yield index
        finally:
            index.close()

    @contextmanager
    def running(self) -> Iterator[None]:
        """This process is the daemon that keeps the directory."""
        self.data.mkdir(exist_ok=True)
        lock = DirectoryLock(self.data / "lock")
        lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def ask(self, key: str = "k", *, topic: str = "T", **query: Any) -> Answer:
        with self.index() as index:
            return query_exact(index, KeyQuery(topic, key, **query))

    def exact(self, key: str = "k", *, topic: str = "T", **query: Any) -> list[int]:
        return [hit.phy_offset for hit in self.ask(key, topic=topic, **query)]

    def why(self, key: str = "k", **query: Any) -> str | None:
        return self.ask(key, **query).why


def built(store: AnyStore, *specs: FrameSpec) -> tuple[AnyStore, list[int]]:
    """A store with these messages, and a data directory that covers all; where they stand."""
    offsets = store.append(*specs)
    store.build()
    return store, offsets
