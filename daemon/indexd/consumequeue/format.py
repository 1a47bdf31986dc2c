"""The bytes of a ConsumeQueue (spec rocketmq-store 5.1), and the names of its files and folders.

::

    DATA/consumequeue/TOPIC/QUEUE/FILE      FILE: the queue's byte offset of its first unit, 20 digits
    unit q at byte 20 * q of the queue:
    +0   i64 phyOffset     where the message stands in the log
    +8   i32 size          its total size, more than 0
    +12  i64 tagsCode      hash of its tag, 0 without; of a delayed message the time it is delivered, ms
    behind the last unit: zeros

A queue that starts at q > 0 has blank units (0, 2147483647, 0) from the start of its first file to q. Files have one
size, a whole number of units, and lie on disk only where they were written. Written by ConsumeQueueStore with pwrite,
in order; read by queries and recovery. After a crash any page behind the durable units may hold anything.

What only a broker writes beside its ConsumeQueues, batchconsumequeue/TOPIC/QUEUE/FILE with a unit for each message that
holds a batch (spec rocketmq-store 5.9), is neither read nor built.

A unit's tags code of -2147483649 and below is an address in the broker's ConsumeQueueExt.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from indexd.storage.disk import Disk

UNIT_SIZE = 20
UNIT = struct.Struct(">qiq")
BLANK_UNIT = UNIT.pack(0, 2147483647, 0)
#: A tags code of this and below is an address in the broker's ConsumeQueueExt, never written by indexd.
EXT_ADDRESS_MAX = -2147483649
#: sysFlag of a message that holds a batch: its topic's queues are BatchConsumeQueues, which are not built.
FLAG_INNER_BATCH = 0x80
#: The last unit that a file's name and 64 bits can place, with room for a whole file behind it.
OFFSET_MAX = (1 << 62) // UNIT_SIZE


class Unit(NamedTuple):
    """One unit; offsets and sizes in bytes."""

    phy_offset: int
    size: int
    tags_code: int

    @property
    def is_valid(self) -> bool:
        """RocketMQ's own test, which blank units pass."""
        return self.phy_offset >= 0 and self.size > 0

    @property
    def is_blank(self) -> bool:
        """It stands for no message."""
        return self.phy_offset == 0 and self.size == 2147483647


class QueueMark(NamedTuple):
    """What holds of one queue: units ``[min_offset, max_offset)``, and where its newest message ends in the log.

    ``min_offset``: the first unit whose message may still be in the log; units before it are blank or have expired.
    ``first_offset``: the first unit of the oldest file. ``max_phy_offset`` is -1 in a queue without messages.
    ``begin_offset``: the unit with which the queue once began; what lies between it and ``first_offset`` has expired,
    so that a queue may have no units left (``first_offset == max_offset``) and still go on where it was.
    ``moved_from``: the physical offset of the first message that has no unit or stands at another one than its queue
    offset, as RocketMQ builds it behind damage; -1 for none.
    """

    topic: str
    queue_id: int
    first_offset: int
    min_offset: int
    max_offset: int
    max_phy_offset: int
    begin_offset: int = 0
    moved_from: int = -1


class QueuesMark(NamedTuple):
    """What holds of all queues, in order of first appearance, and the size of their files. JSON::

        {"fileSize": 6000000, "queuesMax": null or 1000, "queues": [[topic and seven numbers]]}

    ``limit``: so many queues there were when further ones were left out; None if none was.
    """

    file_size: int
    queues: tuple[QueueMark, ...] = ()
    limit: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The object of the drawing above."""
        return {"fileSize": self.file_size, "queuesMax": self.limit, "queues": [list(mark) for mark in self.queues]}

    @classmethod
    def from_json(cls, row: Any) -> QueuesMark:
        """The opposite; ValueError, TypeError or KeyError for what ``to_json`` does not make."""
        size, limit = int(row["fileSize"]), row.get("queuesMax")
        if not 0 < size < 1 << 31 or size % UNIT_SIZE:
            raise ValueError(f"queue files of {size} bytes are none, or hold no whole number of units")
        marks = tuple(QueueMark(str(topic), *(int(number) for number in numbers)) for topic, *numbers in row["queues"])
        if not all(is_topic_name(mark.topic) and all(abs(number) < 1 << 63 for number in mark[1:]) for mark in marks):
            raise ValueError("a queue of no possible topic, or a number of more than 64 bits")
        return cls(size, marks, None if limit is None else int(limit))


def file_name(offset: int) -> str:
    """The name of the file whose first byte is byte ``offset`` of the queue."""
    return f"{offset:020d}"


def file_offset(name: str) -> int | None:
    """The opposite; None if that is no file of a queue."""
    return int(name) if len(name) == 20 and name.isascii() and name.isdecimal() else None


def queue_directory(root: Path, topic: str, queue_id: int) -> Path:
    """Where the files of a queue lie below the folder ``consumequeue``."""
    return root / topic / str(queue_id)


def queue_id_of(name: str) -> int | None:
    """The queue id that a queue's folder is named after; None if that is no queue's folder."""
    digits = name.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal()) or len(digits) > 10 or str(int(name)) != name:
        return None
    return int(name)


def is_topic_name(topic: str) -> bool:
    """Whether a folder may have that name: whatever a log says, nothing is written elsewhere."""
    return (
        topic not in ("", ".", "..")
        and "/" not in topic
        and "\0" not in topic
        and not any("\ud800" <= c <= "\udfff" for c in topic)
        and len(topic.encode("utf-8")) <= 255
    )


BATCH_FOLDER = "batchconsumequeue"


def queue_folders(disk: Disk, root: Path) -> dict[Path, dict[int, int]]:
    """By the folder of each queue that lies below ``root``, the bytes of its files by what their names say.

    Folders and files that could not be ours are left out.
    """
    folders: dict[Path, dict[int, int]] = {}
    for topic in disk.list_dirs(root) if disk.exists(root) else []:
        for name in disk.list_dirs(root / topic) if is_topic_name(topic) else []:
            if queue_id_of(name) is not None:
                rows = ((file_offset(file), size) for file, size in disk.list_dir(root / topic / name))
                folders[root / topic / name] = {begin: size for begin, size in rows if begin is not None}
    return folders


def unnamed_files(
    root: Path, file_size: int, marks: Sequence[QueueMark], folders: dict[Path, dict[int, int]]
) -> Iterator[Path]:
    """The files of ``folders`` that belong to no queue of ``marks``, or not to the units it has."""
    named = {queue_directory(root, mark.topic, mark.queue_id): mark for mark in marks}
    for folder, sizes in folders.items():
        mark = named.get(folder)
        begin, end = (mark.first_offset * UNIT_SIZE, mark.max_offset * UNIT_SIZE) if mark is not None else (0, 0)
        yield from (folder / file_name(at) for at in sorted(sizes) if not begin <= at < end or at % file_size)
