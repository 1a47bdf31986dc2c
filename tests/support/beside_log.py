"""Logs for ConsumeQueues and sparse indexes, and what a log comes to in both by the slow truth.

``write`` writes one and goes on with one, its queue offsets as a broker counts them; ``assert_beside`` holds a data
directory against the log, and knows nothing of the daemon's.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from support.commitlog_writer import CommitLogWriter, FrameSpec
from support.naive import NaiveMessage, naive_frames
from support.naive_queue import NaiveConsumeQueueStore
from support.naive_queue import NaiveMessage as QueueMessage
from support.queues import tree
from support.small_log import BASE_TIME
from support.sparse_log import expected_files

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

#: The default of ``sparse_interval``.
INTERVAL = 4096
_QUEUED = (0x0, 0x8)


def flags(segment_size: int, queue_file_size: int, *more: object) -> tuple[str, ...]:
    """The sizes of a log and of its queue files, index files that are small, and ``more``."""
    return (
        *("--segment-size", str(segment_size)),
        *("--consume-queue-file-size", str(queue_file_size)),
        *("--hash-slot-num", "500"),
        *(() if "--index-num" in more else ("--index-num", "4000")),
        *map(str, more),
    )


def spec(
    number: int, topic: str = "TopicTest", queue_id: int = 0, *, time: int | None = None, body: int = 30
) -> FrameSpec:
    """Message ``number``: one key, one tag, stored 40 ms after the one before unless told."""
    return FrameSpec(
        topic=topic,
        body=bytes([number % 251]) * body,
        properties={"KEYS": f"order-{number}", "TAGS": f"Tag{number % 5}", "UNIQ_KEY": f"{number:032X}"},
        queue_id=queue_id,
        born_timestamp=BASE_TIME,
        store_timestamp=BASE_TIME + 40 * number if time is None else time,
    )


def over_queues(count: int, queues: int, seed: int = 1, *, first: int = 0) -> list[FrameSpec]:
    """``count`` messages over so many queues of two topics, by chance; now and then one that enters no queue."""
    rand, specs = random.Random(seed), []
    for number in range(first, first + count):
        queue = rand.randrange(queues)
        made = spec(number, f"Topic{queue % 2}", queue // 2, body=rand.randrange(200))
        specs.append(made if rand.randrange(9) else prepared(made))
    return specs


def prepared(made: FrameSpec) -> FrameSpec:
    """The same message as the half of a transaction, which enters no queue."""
    return replace(made, sys_flag=0x4)


def write(
    store: Path,
    specs: Iterable[FrameSpec],
    segment_size: int,
    *,
    at: int | None = None,
    offsets: dict[tuple[str, int], int] | None = None,
) -> int:
    """Append to the log, or begin it; the offset behind the last message.

    ``at``: cut the log there first as a broker that recovers does, later segments going and stale frames staying in its
    own. Queue offsets go on behind the messages that are left, but for the queues in ``offsets``.
    """
    known = frames(store, segment_size) if (store / "commitlog").exists() else []
    if at is not None:
        known = [message for message in known if message.phy_offset < at]
        for path in (store / "commitlog").iterdir():
            if int(path.name) > at:
                path.unlink()
    end = known[-1].phy_offset + known[-1].size if known else 0
    with CommitLogWriter(store / "commitlog", segment_size, start_offset=end if at is None else at) as writer:
        for message in known:
            if message.sys_flag & 0xC in _QUEUED:
                writer.queue_offsets[message.topic, message.queue_id] = message.cq_offset + 1
        writer.queue_offsets.update(offsets or {})
        for one in specs:
            writer.append(one)
        return writer.max_offset


def frames(store: Path, segment_size: int) -> list[NaiveMessage]:
    """All messages of the log."""
    return list(naive_frames(store / "commitlog", segment_size))


def queues_of(messages: Iterable[NaiveMessage], queue_file_size: int) -> NaiveConsumeQueueStore:
    """The ConsumeQueues that these messages make."""
    queues = NaiveConsumeQueueStore(queue_file_size // 20)
    put(queues, messages)
    return queues


def put(queues: NaiveConsumeQueueStore, messages: Iterable[NaiveMessage]) -> None:
    """Add what these messages make."""
    for one in messages:
        queues.put(
            QueueMessage(one.topic, one.queue_id, one.cq_offset, one.phy_offset, one.size, one.tags_code, one.sys_flag)
        )


def assert_queues(data: Path, queues: NaiveConsumeQueueStore) -> None:
    """Every queue file is there as the truth has it, and no other."""
    found, wanted = tree(data / "consumequeue"), queues.tree()
    assert sorted(found) == sorted(wanted)
    different = [name for name in wanted if found[name] != wanted[name]]
    assert not different, different[:9]


def assert_sparse(data: Path, messages: Iterable[NaiveMessage], segment_size: int, interval: int = INTERVAL) -> None:
    """Every pair holds the entries that the plain rule gives, all but the last one trimmed, and no other is there."""
    rows = [(one.phy_offset, one.size, one.store_timestamp) for one in messages]
    wanted, found = expected_files(rows, interval, segment_size), tree(data / "sparse")
    assert sorted(found) == sorted(wanted)
    last = f"{rows[-1][0] // segment_size * segment_size:020d}"
    for name, entries in wanted.items():
        is_growing = name.startswith(last)
        assert found[name][: len(entries)] == entries, name
        assert not any(found[name][len(entries) :]), name
        assert is_growing or len(found[name]) == len(entries), name


def assert_beside(data: Path, store: Path, segment_size: int, queue_file_size: int, interval: int = INTERVAL) -> None:
    """Both are what the log, as it is now, comes to."""
    messages = frames(store, segment_size)
    assert_queues(data, queues_of(messages, queue_file_size))
    assert_sparse(data, messages, segment_size, interval)


def segments_of(messages: Iterable[NaiveMessage], segment_size: int) -> list[list[NaiveMessage]]:
    """The messages segment by segment."""
    return [list(part) for _, part in groupby(messages, key=lambda one: one.phy_offset // segment_size)]
