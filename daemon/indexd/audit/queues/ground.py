"""The ConsumeQueues of a store as they stand at one moment: which queues there are, and where in the log they point.

Every unit is looked at once, front to back: 20 bytes a message. So it is known of each file whether its units rise, and
the tasks find those of a stretch by bisection where they do.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from indexd.audit.queues.kernel import (
    BREAKS,
    EXPIRED,
    FIRST,
    FOUND_COLUMNS,
    HIGHEST,
    KIND_COUNT,
    LAST,
    LOWEST,
    PREVIOUS,
    STATE_SIZE,
    scan_units,
)
from indexd.audit.queues.seen import KEPT_MAX, Difference, QueuesSeen
from indexd.config import Config
from indexd.consumequeue.format import BATCH_FOLDER, UNIT_SIZE, file_name, queue_folders
from indexd.errors import DiskError, UnsafeStoreError
from indexd.storage.disk import Disk
from indexd.storage.page_cache import ReadPages

FOLDER = "consumequeue"
LMQ_PREFIX = "%LMQ%"
_UNITS_PER_READ = 1 << 16
# Of thousands of queues most are short, and what was never written costs memory to read.
_UNITS_FIRST_READ = 1 << 10
# The order of queues_kernel's kinds.
_KINDS = ("unit-phy-offset", "unit-order")
# A file that every RocksDB database has.
_ROCKSDB_FILE = "CURRENT"


@dataclass(frozen=True, slots=True)
class UnitFile:
    """A file whose first unit is unit ``offset`` of its queue; units ``first`` .. ``end`` - 1 stand for messages.

    They point to physical offsets ``lowest`` .. ``highest``, both included, and rise if ``is_ordered``.
    """

    offset: int
    first: int
    end: int
    lowest: int
    highest: int
    is_ordered: bool

    def points_into(self, begin: int, end: int) -> bool:
        """Whether units of it may point into ``[begin, end)``."""
        return self.first < self.end and self.lowest < end and self.highest >= begin


@dataclass(frozen=True, slots=True)
class QueueGround:
    """One queue and those of its files that matter, oldest first; ``end`` is behind the last unit it had."""

    topic: str
    queue_id: int
    files: tuple[UnitFile, ...]
    end: int


@dataclass(frozen=True, slots=True)
class QueuesTask:
    """What a task needs to know of the queues; messages of ``batch_topics`` are not compared."""

    queues: tuple[QueueGround, ...]
    batch_topics: frozenset[str]


@dataclass(slots=True)
class QueuesGround:
    """All queues that are compared; ``seen`` is what is wrong with them whatever the log holds.

    ``why_not`` says why none is. ``topics`` are those that the broker knows, None if it does not say.
    """

    file_size: int
    queues: tuple[QueueGround, ...] = ()
    batch_topics: frozenset[str] = frozenset()
    lmq_queues: int = 0
    topics: frozenset[str] | None = None
    why_not: str | None = None
    seen: QueuesSeen = field(default_factory=QueuesSeen)

    @property
    def units(self) -> int:
        """How many units there are, those of expired messages included."""
        return sum(file.end - file.first for queue in self.queues for file in queue.files)

    def of(self, begin: int, end: int, *, is_tail: bool) -> QueuesTask | None:
        """What the task of ``[begin, end)`` needs; None if nothing is compared.

        At the tail that is each queue's last file, too, in which a broker writes on.
        """
        if self.why_not is not None:
            return None
        queues = []
        for queue in self.queues:
            files = tuple(
                file for file in queue.files if file.points_into(begin, end) or (is_tail and file is queue.files[-1])
            )
            if files:
                queues.append(QueueGround(queue.topic, queue.queue_id, files, queue.end))
        return QueuesTask(tuple(queues), self.batch_topics)


def look_at_queues(disk: Disk, config: Config, log_begin: int) -> QueuesGround:
    """Look once at every unit of STORE/consumequeue. Raises DiskError.

    UnsafeStoreError where something else stands than a folder, or where every file has one other size.
    """
    store, ground = config.store.store, QueuesGround(config.store.consume_queue_file_size)
    assert store is not None
    root = store / FOLDER
    if config.broker.store_type.lower() == "defaultrocksdb" or disk.exists(root / _ROCKSDB_FILE):
        ground.why_not = "the broker keeps them in RocksDB (storeType=defaultRocksDB)"
        return ground
    batches = store / BATCH_FOLDER
    ground.batch_topics = frozenset(disk.list_dirs(batches) if disk.exists(batches) else ())
    ground.topics = _known_topics(disk, store / "config" / "topics.json")
    folders = _folders(disk, root)
    _judge_sizes(folders, ground.file_size)
    queues = []
    for folder, sizes in sorted(folders.items()):
        if folder.parent.name.startswith(LMQ_PREFIX):
            ground.lmq_queues += 1
        elif folder.parent.name not in ground.batch_topics:
            scan = _Scan(disk, folder, ground, log_begin, is_gentle=config.limits.drop_cache)
            queues.append(scan.queue(sizes))
    ground.queues = tuple(queues)
    return ground


def _folders(disk: Disk, root: Path) -> dict[Path, dict[int, int]]:
    try:
        return queue_folders(disk, root)
    except DiskError as error:
        if not error.is_missing or error.path != root or not disk.exists(root):
            raise
        raise UnsafeStoreError(f"{root} is a file, and a broker has a folder there", "move it away") from None


def _judge_sizes(folders: dict[Path, dict[int, int]], wanted: int) -> None:
    # One that was cut short has some size of its own; a broker that is told otherwise makes all of them alike.
    found = {size for sizes in folders.values() for size in sizes.values() if size}
    size = next(iter(found), wanted)
    if len(found) == 1 and size != wanted and size % UNIT_SIZE == 0:
        raise UnsafeStoreError(
            f"every file of the ConsumeQueues has {size} bytes, and consume_queue_file_size is {wanted}",
            f"give --consume-queue-file-size {size}, or the broker's own file with --broker-conf",
        )


def _known_topics(disk: Disk, path: Path) -> frozenset[str] | None:
    try:
        return frozenset(json.loads(disk.read(path))["topicConfigTable"])
    except (DiskError, ValueError, KeyError, TypeError):
        return None  # a copy may come without, and what a broker is writing may be half there


class _Scan:
    # One queue's files, oldest first.

    def __init__(self, disk: Disk, folder: Path, ground: QueuesGround, log_begin: int, *, is_gentle: bool) -> None:
        self._disk, self._folder, self._log_begin, self._is_gentle = disk, folder, log_begin, is_gentle
        self._file_size, self._seen = ground.file_size, ground.seen
        self._name = (folder.parent.name, int(folder.name))
        self._state = np.zeros(STATE_SIZE, dtype=np.int64)
        self._counts = np.zeros(KIND_COUNT, dtype=np.int64)
        self._found = np.empty((KIND_COUNT, KEPT_MAX, FOUND_COLUMNS), dtype=np.int64)

    def queue(self, sizes: dict[int, int]) -> QueueGround:
        files, before, begins = [], None, sorted(sizes)
        for begin in begins:
            size = sizes[begin]
            if not size and begin == begins[-1]:
                continue  # the broker removes one that it had no time to fill
            self._judge(begin, size, before)
            if begin % UNIT_SIZE == 0:
                files.append(self._file(begin, size))
            before = begin + self._file_size
        for kind, what in enumerate(_KINDS):
            rows = self._found[kind, : min(int(self._counts[kind]), KEPT_MAX)].tolist()
            found = [Difference(phy_offset, offset, phy_offset, previous) for offset, phy_offset, previous in rows]
            self._seen.add(self._name, what, int(self._counts[kind]), found)
        return QueueGround(*self._name, tuple(files), files[-1].end if files else 0)

    def _judge(self, begin: int, size: int, before: int | None) -> None:
        wanted = self._file_size
        if size != wanted:
            self._seen.add(self._name, "queue-file-size", 1, [Difference(0, begin, size, wanted)])
        if begin % wanted:
            self._seen.add(self._name, "queue-file-name", 1, [Difference(0, begin, begin, wanted)])
        elif before is not None and begin > before:
            self._seen.add(self._name, "queue-file-gap", 1, [Difference(0, begin, before, begin)])

    def _file(self, begin: int, size: int) -> UnitFile:
        state, offset = self._state, begin // UNIT_SIZE
        state[PREVIOUS + 1 :] = 0
        state[FIRST] = state[LAST] = -1
        try:
            with self._disk.open_read(self._folder / file_name(begin)) as file:
                pages = ReadPages(file, size) if self._is_gentle else None
                position, room = 0, _UNITS_FIRST_READ
                # Most of the last file was never written, and reads as zeros without a look at the disk.
                while (position := file.next_data(position) // UNIT_SIZE * UNIT_SIZE) + UNIT_SIZE <= size:
                    data = file.pread(min(room * UNIT_SIZE, size - position), position)
                    units = np.frombuffer(data, np.uint32, len(data) // UNIT_SIZE * 5).reshape(-1, 5)
                    if not len(units):
                        break
                    first = offset + position // UNIT_SIZE
                    scan_units(units, first, self._log_begin, state, self._counts, self._found)
                    position += len(units) * UNIT_SIZE
                    room = min(2 * room, _UNITS_PER_READ)
                    if pages is not None:
                        pages.give_back(position)
                if pages is not None:
                    pages.give_back(size, is_last=True)
        except DiskError as error:
            if not error.is_missing:
                raise  # else it has expired
        self._seen.expired_units += int(state[EXPIRED])
        first = int(state[FIRST])
        end = int(state[LAST]) + 1 if first >= 0 else offset
        bounds = int(state[LOWEST]), int(state[HIGHEST])
        return UnitFile(offset, max(first, offset), end, *bounds, is_ordered=not state[BREAKS])
