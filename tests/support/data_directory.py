"""A data directory as indexd leaves it after a clean stop, made by the naive writer alone, for tests of readers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from indexd.config import Config, load
from indexd.flush.frontier import Frontier, write_frontier
from indexd.index.format import FileMark, IndexHeader, IndexLayout
from indexd.storage.disk import Disk
from indexd.storage.names import DataFiles
from support.naive import NaiveIndexService

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from support.naive import NaiveMessage


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
    frontier = replace(frontier, index=tuple(marks))
    write_frontier(Disk(), files.frontier, frontier, "0.1.0")
    return frontier


def make_data(
    data: Path, store: Path, messages: list[NaiveMessage], layout: IndexLayout, flavour: str, segment_size: int
) -> tuple[Frontier, NaiveIndexService]:
    """A data directory that covers ``messages``, the whole log of ``store``."""
    service = build_index(messages, layout, flavour)
    frontier = Frontier(str(store), segment_size, flavour, layout, messages=len(messages))
    if messages:
        last = messages[-1]
        begin = messages[0].phy_offset // segment_size * segment_size
        end = last.phy_offset + last.size
        frontier = replace(frontier, begin_offset=begin, phy_offset=end, store_timestamp=last.store_timestamp)
    return write_data(data, frontier, service), service


def config_of(data: Path, **keys: Any) -> Config:
    """The configuration of a command that was given ``--data`` and ``keys`` alone."""
    return load({"data": str(data)} | {key: str(value) for key, value in keys.items()}, None, {})
