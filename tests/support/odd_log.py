"""Logs whose queues are anything: odd names, gaps, repeats, late starts, transactions, batches, delayed messages.

And logs of which whole segments are unreadable, with what a reader that passes over them finds.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from indexd.commitlog.reader import LogReader, Skipped
from indexd.recovery.open import decode_rules, reader_options
from indexd.recovery.recover import WholeLog
from indexd.storage.disk import Disk
from support.commitlog_writer import CommitLogWriter, FrameSpec
from support.rows import config_of
from support.small_log import BASE_TIME, messages

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

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
