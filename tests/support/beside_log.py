"""Logs for ConsumeQueues and sparse indexes, and what a log comes to in both by the slow truth.

``write`` writes one and goes on with one, its queue offsets as a broker counts them; ``assert_beside`` holds a data
directory against the log, and knows nothing of the daemon. Odd logs have queues of any kind: odd names, gaps, repeats,
late starts, transactions, batches, delayed messages; of damaged ones whole segments are unreadable.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import groupby, islice
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from indexd.commitlog.reader import LogReader, Skipped
from indexd.recovery.open import decode_rules, reader_options
from indexd.recovery.recover import WholeLog
from indexd.storage.disk import Disk
from support.commitlog_writer import CommitLogWriter, FrameSpec
from support.naive import NaiveConsumeQueueStore, NaiveMessage, QueueMessage, naive_frames
from support.queues import expected_files, tree
from support.rows import config_of
from support.small_log import BASE_TIME, messages

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


#: Two that read as one name, some that no folder can have, and one of many bytes.
TOPICS = (
    b"T", b"%RETRY%g", "订单".encode(), b"T\xff", b"T\xfe", b".", b"..", b"a/b", b"a\0b", b"", b"...", b"x" * 200,
    "中".encode() * 90, b"SCHEDULE_TOPIC_XXXX",
)  # fmt: skip
_FLAGS = (0x0, 0x0, 0x0, 0x0, 0x4, 0x8, 0xC, 0x80, 0x88)
#: How far a queue offset is from the one that comes next; the last ones no file's name can say.
_STEPS = (0, 0, 0, 0, 1, 7, -1, -5, 300, 1 << 59, -(1 << 40))


@dataclass(frozen=True, slots=True)
class OddMessage:
    """``step``: see _STEPS; ``time`` in ms behind the first of all."""

    topic: bytes
    queue_id: int = 0
    step: int = 0
    sys_flag: int = 0
    time: int = 0
    body_size: int = 0


def write_odd(store: Path, messages: Iterable[OddMessage], segment_size: int) -> list[int]:
    """Write them as the log of ``store``; where each begins, and where the last one ends."""
    nexts: dict[tuple[bytes, int], int] = {}
    offsets = []
    with CommitLogWriter(store / "commitlog", segment_size) as writer:
        for message in messages:
            queue = (message.topic, message.queue_id)
            queue_offset = nexts.get(queue, 0) + message.step
            is_v2 = len(message.topic) > 127
            spec = FrameSpec(
                "v" * 128 if is_v2 else "v",
                bytes(message.body_size),
                {"KEYS": "k", "TAGS": f"Tag{message.time % 3}", "DELAY": "3"},
                queue_id=message.queue_id,
                sys_flag=message.sys_flag,
                store_timestamp=BASE_TIME + message.time,
            )
            writer.queue_offsets[spec.topic, spec.queue_id] = queue_offset
            offsets.append(writer.append(spec, raw_topic=message.topic))
            if message.sys_flag & 0xC in (0x0, 0x8) and abs(message.step) < 1 << 30:
                nexts[queue] = queue_offset + 1
        return [*offsets, writer.max_offset]


def odd_messages(count: int, queues: int, seed: int = 1) -> list[OddMessage]:
    """``count`` by chance, over about so many queues."""
    rand = random.Random(seed)
    names = [(topic, queue_id) for queue_id in (0, 1, -1, 2, 3, *range(4, queues)) for topic in TOPICS][:queues]
    return [
        OddMessage(
            *rand.choice(names),
            step=rand.choice(_STEPS) if rand.randrange(4) == 0 else 0,
            sys_flag=rand.choice(_FLAGS),
            time=40 * number - (60_000 if number > count // 2 else 0),
            body_size=rand.randrange(200),
        )
        for number in range(count)
    ]


def some_messages(max_size: int = 14) -> st.SearchStrategy[list[OddMessage]]:
    """Few messages over few queues."""
    return st.lists(
        st.builds(
            OddMessage,
            topic=st.sampled_from(TOPICS),
            queue_id=st.sampled_from([0, 1, -1]),
            step=st.sampled_from(_STEPS),
            sys_flag=st.sampled_from(_FLAGS),
            time=st.integers(-1000, 1000),
            body_size=st.integers(0, 700),
        ),
        min_size=1,
        max_size=max_size,
    )


DAMAGED_SEGMENT_SIZE = 64 << 10
#: What becomes of segments 2, 4 and 6 of ``damaged_log``.
DAMAGES = [("random",), ("missing",), ("zeros",), ("two zeros",), ("random", "missing", "zeros")]
_COUNT = 1600


def damaged_log(store: Path, damages: tuple[str, ...]) -> int:
    """Write a log of eight segments and more, and damage every second from the third on; where the log ends."""
    with CommitLogWriter(store / "commitlog", DAMAGED_SEGMENT_SIZE) as writer:
        for spec in islice(messages(1), _COUNT):
            writer.append(spec)
    for number, damage in enumerate(damages, 1):
        path = store / "commitlog" / f"{2 * number * DAMAGED_SEGMENT_SIZE:020d}"
        if damage == "two zeros":
            following = store / "commitlog" / f"{(2 * number + 1) * DAMAGED_SEGMENT_SIZE:020d}"
            following.write_bytes(bytes(following.stat().st_size))
        if damage == "missing":
            path.unlink()
        else:
            is_random = damage == "random"
            path.write_bytes(
                random.Random(1).randbytes(DAMAGED_SEGMENT_SIZE) if is_random else bytes(path.stat().st_size)
            )
    return writer.max_offset


def rows_of_whole_log(store: Path) -> list[int]:
    """The physical offsets that one reader finds, as that of a rebuild in one process with ``--on-corrupt skip``."""
    config = config_of(store, DAMAGED_SEGMENT_SIZE, on_corrupt="skip")
    directories = config.store.commit_log_directories
    reader = LogReader(Disk(), directories, decode_rules(config), reader_options(config))
    found: list[int] = []
    for batch in WholeLog(reader):
        if not isinstance(batch, Skipped):
            found += batch.columns.phy_offset[: batch.rows].tolist()
    reader.close()
    return found
