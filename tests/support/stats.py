"""Logs for the statistics' tests, read as splits are, and counted once more by plain Python."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

from indexd.commitlog.decoder import DecoderOptions, Message, decode_frame
from indexd.commitlog.writer import CommitLogWriter
from indexd.config import Config, load
from indexd.index.format import FLAVOURS, Flavour
from indexd.spark.splits import Split, plan_splits
from indexd.spark.stats.content import Content, Selection, merge
from indexd.spark.stats.work import count_split
from indexd.storage.disk import Disk
from support.strategies import Sample

BASE_TIME = 1_700_000_000_000
SEGMENT_SIZE = 64 << 10
_HOUR = 3_600_000


@dataclass(frozen=True)
class Log:
    """A store of one's own making: its configuration, and each message's offset, size and bytes."""

    config: Config
    offsets: list[int]
    sizes: list[int]
    frames: list[bytes]

    @property
    def flavour(self) -> Flavour:
        return FLAVOURS[self.config.index.flavour]

    def messages(self) -> list[Message]:
        """All of them, decoded in plain Python."""
        options = DecoderOptions(self.config.store.delay_levels_ms)
        found = []
        for offset, frame in zip(self.offsets, self.frames, strict=True):
            message = decode_frame(frame, 0, offset, offset + len(frame), options)
            assert isinstance(message, Message)
            found.append(message)
        return found

    def entries(self) -> list[tuple[Message, str, str]]:
        """(message, index type, key) of each index entry, in order (spec rocketmq-store 4.2, 4.3)."""
        flavour, found = self.flavour, []
        for message in self.messages():
            if message.sys_flag & 0xC in flavour.skipped_types:
                continue
            keys = [message.uniq_key] if flavour.uniq_key and message.uniq_key is not None else []
            found += [(message, "K", key) for key in (*keys, *message.keys)]
            if flavour.tags and message.tags is not None:
                found.append((message, "T", message.tags))
        return found


def written_log(folder: Path, samples: Iterable[Sample], *, flavour: str = "5.4", **keys: Any) -> Log:
    """A log of these messages in ``folder``, as a broker that stops cleanly leaves it; ``keys``: of the config."""
    store = folder / "store"
    with CommitLogWriter(store / "commitlog", SEGMENT_SIZE) as writer:
        offsets = [sample.append(writer) for sample in samples]
    flags = {"store": str(store), "data": str(folder / "data"), "segment_size": str(SEGMENT_SIZE), "flavour": flavour}
    config = load(flags | {key: str(value) for key, value in keys.items()}, None, {"HOME": str(folder)})
    sizes, frames = [], []
    for offset in offsets:
        path = store / "commitlog" / f"{offset - offset % SEGMENT_SIZE:020d}"
        with path.open("rb") as file:
            file.seek(offset % SEGMENT_SIZE)
            size = int.from_bytes(file.read(4), "big")
            file.seek(offset % SEGMENT_SIZE)
            frames.append(file.read(size))
        sizes.append(size)
    return Log(config, offsets, sizes, frames)


def splits_of(log: Log, size: int) -> list[Split]:
    return plan_splits(Disk(), log.config, size=size)


def batches_of(log: Log, selection: Selection, size: int) -> list[Content]:
    """What each split of about ``size`` bytes holds."""
    return [count_split(log.config, selection, split).content for split in splits_of(log, size)]


def content_of(log: Log, selection: Selection, size: int) -> Content:
    return reduce(merge, batches_of(log, selection, size), Content.empty(selection.capacity))


def plain_run(work: Any, items: Any, sizes: Any, what: str) -> list[Any]:
    """Tasks, one after the other and without Spark."""
    return [work(item) for item in items]


@dataclass
class NaiveContent:
    """The counts by plain Python; as Content has them, with texts."""

    cells: dict[tuple[str, int], tuple[int, ...]] = field(default_factory=dict)
    sums: tuple[int, ...] = ()
    keys: Counter[tuple[str, str]] = field(default_factory=Counter)
    uniq_keys: Counter[tuple[str, str]] = field(default_factory=Counter)
    tags: Counter[tuple[str, str]] = field(default_factory=Counter)
    steps: int = 0
    silences: int = 0
    ends: tuple[int, int] = (0, 0)


def naive_content(log: Log, silence: int = 60_000) -> NaiveContent:
    """Count every message, decoded by ``decoder.decode_frame``."""
    found, messages = NaiveContent(), log.messages()
    entries = Counter(message.phy_offset for message, _, _ in log.entries())
    for message in messages:
        hour = message.store_timestamp // _HOUR
        cell = (message.topic, hour if -(1 << 31) < hour < 1 << 31 else -(1 << 63))
        keyless = not message.keys
        values = (
            1,
            message.size,
            len(message.body),
            len(message.keys),
            int(keyless),
            int(keyless and message.uniq_key is None),
            int(message.tags is not None),
            entries[message.phy_offset],
        )
        found.cells[cell] = tuple(a + b for a, b in zip(found.cells.get(cell, (0,) * 8), values, strict=True))
        found.keys.update((message.topic, key) for key in message.keys)
        found.uniq_keys.update([(message.topic, message.uniq_key)] if message.uniq_key is not None else [])
        found.tags.update([(message.topic, message.tags)] if message.tags is not None else [])
    types = Counter(message.sys_flag & 0xC for message in messages)
    compressed = sum(message.sys_flag & 1 for message in messages)
    found.sums = (len(messages), sum(entries.values()), compressed, *(types[kind] for kind in (0, 4, 8, 12)))
    times = [message.store_timestamp for message in messages]
    found.steps = sum(b < a for a, b in itertools.pairwise(times))
    found.silences = sum(b - a > silence for a, b in itertools.pairwise(times))
    found.ends = (times[0], times[-1]) if times else (0, 0)
    return found
