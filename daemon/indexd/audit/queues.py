"""Holds a broker's ConsumeQueues against the log: each message says itself at which unit of which queue it stands.

A task compares the units of its messages, and writes down which ranges of each queue these are. What stands outside of
all ranges is looked at when the parts are put together: units of expired messages, and what the log does not account
for. Messages of BatchConsumeQueues and LMQs, and of topics that no folder can be named after, are not compared.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from indexd.audit.plan import index_folder
from indexd.audit.result import QUEUES_FOLDER, Audit, QueueSeen, QueuesSeen
from indexd.commitlog.batcher import DispatchBatch
from indexd.commitlog.decoder import decode_utf8
from indexd.commitlog.segments import list_segments
from indexd.config import Config
from indexd.consumequeue.check import UNIT_TYPE
from indexd.consumequeue.format import (
    BATCH_FOLDER,
    EXT_ADDRESS_MAX,
    FLAG_INNER_BATCH,
    UNIT_SIZE,
    file_name,
    is_topic_name,
    queue_folders,
)
from indexd.errors import DiskError, MissingOk, UnsafeStoreError
from indexd.findings import Finding, Findings
from indexd.pages.wording import show_name
from indexd.storage.disk import Disk
from indexd.storage.page_cache import ReadPages

LMQ_PREFIX = "%LMQ%"
#: Of each queue and kind so many differences are kept in words.
KEPT_MAX = 5
# Messages of a block: some 40 MiB.
_ROWS_MAX = 1 << 20
_UNITS_PER_READ = 1 << 16
_TRANSACTION, _COMMIT = 0xC, 0x8
_LOW_32 = 0xFFFFFFFF
_BLANK_SIZE = 2147483647
#: Where in the unit is wrong what; by the message's offset, size, place and tags code, and those of the unit.
_KINDS = {
    "unit-missing": (0, "missing; it is due for the message at {0}"),
    "unit-other": (0, "points to {4}, but is due for the message at {0}"),
    "unit-size": (8, "size {5}, but the message at {0} has {1} bytes"),
    "unit-tags-code": (12, "tags code {6}, but for the message at {0} it is {3}"),
}
# A file that every RocksDB database has.
_ROCKSDB_FILE = "CURRENT"
_WORST_SAID = 3
_TOPIC_LONGEST = 60

Units = NDArray[np.void]
Columns = tuple[NDArray[np.int64], ...]


class QueueMatcher:
    """Takes the messages of a stretch in the order of the log; ``wait`` is called with the bytes that are read next."""

    def __init__(self, disk: Disk, config: Config, wait: Callable[[int], None]) -> None:
        store = index_folder(config).parent
        self._disk, self._store, self._wait = disk, config.store, wait
        self._drops_cache = config.limits.drop_cache
        self._root, self._file_size = store / QUEUES_FOLDER, config.store.consume_queue_file_size
        self._batch_topics = _batch_topics(disk, store)
        self._blocks: defaultdict[str, list[Columns]] = defaultdict(list)
        self._rows = 0
        self._seen = QueuesSeen()

    def take(self, batch: DispatchBatch) -> None:
        """The next messages."""
        columns, seen, flags = batch.columns, self._seen, batch.columns.sys_flag
        enters = np.isin(flags & _TRANSACTION, (0, _COMMIT))
        is_batch = flags & FLAG_INNER_BATCH != 0
        seen.skipped_messages += int((enters & is_batch).sum())
        keys = columns.topic_id.astype(np.int64) << 32 | (columns.queue_id.astype(np.int64) & _LOW_32)
        order = np.argsort(keys, kind="stable")
        order = order[(enters & ~is_batch)[order]]
        values = (columns.phy_offset, columns.size, columns.queue_offset, columns.tags_code)
        for rows in np.split(order, np.flatnonzero(np.diff(keys[order])) + 1) if len(order) else ():
            key = int(keys[rows[0]])
            topic = decode_utf8(batch.topics.raw_name(key >> 32))
            if topic in self._batch_topics or topic.startswith(LMQ_PREFIX) or not is_topic_name(topic):
                seen.skipped_messages += len(rows)
                continue
            queue_id = (key & _LOW_32) - ((key & 0x80000000) << 1)
            self._blocks[f"{topic}/{queue_id}"].append(tuple(column[rows].astype(np.int64) for column in values))
            self._rows += len(rows)
        if self._rows >= _ROWS_MAX:
            self._compare()

    def finish(self) -> QueuesSeen:
        """Compare what is left; all that was found."""
        self._compare()
        return self._seen

    def _compare(self) -> None:
        for name, blocks in self._blocks.items():
            columns = [np.concatenate(parts) for parts in zip(*blocks, strict=True)]
            order = np.argsort(columns[2], kind="stable")
            offsets = columns[2][order]
            for rows in np.split(order, np.flatnonzero(np.diff(offsets) > 1) + 1):
                self._compare_run(name, tuple(column[rows] for column in columns))
        self._blocks.clear()
        self._rows = 0

    def _compare_run(self, name: str, columns: Columns) -> None:
        # Messages whose queue offsets follow one another.
        phy_offsets, sizes, places, tags_codes = columns
        queue, begin, end = _queue(self._seen.queues, name), int(places[0]), int(places[-1]) + 1
        units = self._read(self._root / name, begin, end)[places - begin]
        is_there = _is_written(units)
        is_same = is_there & (units["phy_offset"] == phy_offsets)
        is_ext = is_same & (units["tags_code"] <= EXT_ADDRESS_MAX)
        self._seen.messages += len(places)
        queue.ranges = _merged([*queue.ranges, (begin, end)])
        missing = ~is_there
        if missing.any():
            # What has expired since it was read may have gone from its queue, too.
            log = list_segments(self._disk, self._store.commit_log_directories, self._store.segment_size)
            missing &= phy_offsets >= (log.min_offset or 0)
        there, size, tags = (units[key].astype(np.int64) for key in ("phy_offset", "size", "tags_code"))
        masks = {
            "unit-missing": missing,
            "unit-other": is_there & ~is_same,
            "unit-size": is_same & (size != sizes),
            "unit-tags-code": is_same & ~is_ext & (tags != tags_codes),
        }
        for what, wrong in masks.items():
            at, text = _KINDS[what]
            kept = np.flatnonzero(wrong)[: max(KEPT_MAX - queue.findings.counts[what], 0)]
            queue.findings.count(what, int(wrong.sum()) - len(kept))
            for row in zip(*(column[kept].tolist() for column in (*columns, there, size, tags)), strict=True):
                queue.note(self._file_size, row[2], at, what, text.format(*row))

    def _read(self, folder: Path, begin: int, end: int) -> Units:
        # Units [begin, end) of a queue; zeros where there are none.
        size = self._file_size
        data = np.zeros((end - begin) * UNIT_SIZE, dtype=np.uint8)
        self._wait(len(data))
        for base in range(begin * UNIT_SIZE // size * size, end * UNIT_SIZE, size):
            low, high = max(begin * UNIT_SIZE, base), min(end * UNIT_SIZE, base + size)
            with MissingOk(), self._disk.open_read(folder / file_name(base)) as file:
                pages = ReadPages(file, file.size()) if self._drops_cache else None
                file.pread_into(data[low - begin * UNIT_SIZE : high - begin * UNIT_SIZE].data, low - base)
                if pages is not None:
                    pages.give_back(high - base, is_last=True)
        return data.view(UNIT_TYPE)


def first_of_each(findings: Iterable[Finding], most: int, *, by_file: bool) -> list[Finding]:
    """So many of each kind, or of each kind and file, in the order of their places."""
    rooms, found = Counter[tuple[str, str]](), []
    for one in sorted(findings, key=lambda one: (one.file, one.position, one.what, one.text)):
        kind = (one.file if by_file else "", one.what)
        rooms[kind] += 1
        if rooms[kind] <= most:
            found.append(one)
    return found


def _is_written(units: Units) -> NDArray[np.bool_]:
    phy_offset, size = units["phy_offset"], units["size"]
    blank = (phy_offset == 0) & ((size == _BLANK_SIZE) | ((size == 0) & (units["tags_code"] == 0)))
    return np.asarray(~blank)


def _merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def _batch_topics(disk: Disk, store: Path) -> frozenset[str]:
    folder = store / BATCH_FOLDER
    return frozenset(disk.list_dirs(folder) if disk.exists(folder) else ())


def why_not(disk: Disk, config: Config) -> str | None:
    """Why the ConsumeQueues cannot be compared, if so.

    UnsafeStoreError where every file has one other size.
    """
    store, wanted = index_folder(config).parent, config.store.consume_queue_file_size
    if config.broker.store_type.lower() == "defaultrocksdb" or disk.exists(store / QUEUES_FOLDER / _ROCKSDB_FILE):
        return "the broker keeps them in RocksDB (storeType=defaultRocksDB)"
    # One that was cut short has some size of its own; a broker that is told otherwise makes all of them alike.
    found = {size for sizes in queue_folders(disk, store / QUEUES_FOLDER).values() for size in sizes.values() if size}
    size = next(iter(found), wanted)
    if len(found) == 1 and size != wanted and size % UNIT_SIZE == 0:
        raise UnsafeStoreError(
            f"every file of the ConsumeQueues has {size} bytes, and consume_queue_file_size is {wanted}",
            f"give --consume-queue-file-size {size}, or the broker's own file with --broker-conf",
        )
    return None


@dataclass(slots=True)
class QueuesAudit:
    """What all stretches came to. ``found`` are the queues with differences, the worst one first.

    ``deleted``: messages of topics that the broker does not know any more, by topic; nothing is wrong with those.
    ``expired_units`` point before the log, ``left_out_units`` to where it could not be read. ``why_not`` says why
    nothing was compared at all.
    """

    why_not: str | None = None
    queues: int = 0
    messages: int = 0
    skipped_messages: int = 0
    skipped_queues: int = 0
    expired_units: int = 0
    left_out_units: int = 0
    found: tuple[QueueSeen, ...] = ()
    deleted: dict[str, int] = field(default_factory=dict)

    @property
    def is_sound(self) -> bool:
        """Every message that was compared is in its queue, and nothing else is."""
        return not self.found

    @property
    def counts(self) -> dict[str, int]:
        """Differences by kind, of all queues."""
        return dict(sorted(sum((queue.findings.counts for queue in self.found), Counter[str]()).items()))

    def rows(self) -> list[dict[str, Any]]:
        """Lines of ``--json``: one a queue with differences, and the summary."""
        summary = {
            "kind": "queues",
            "compared": self.why_not is None,
            "reason": self.why_not,
            "queues": self.queues,
            "messages": self.messages,
            "expiredUnits": self.expired_units,
            "leftOutUnits": self.left_out_units,
            "skippedMessages": self.skipped_messages,
            "skippedQueues": self.skipped_queues,
            "deletedTopics": self.deleted,
            "queuesWithDifferences": len(self.found),
            "differences": sum(self.counts.values()),
            "counts": self.counts,
            "sound": self.is_sound,
        }
        return [*(queue.to_json() for queue in self.found), summary]

    def lines(self) -> list[str]:
        """For people: what they came to, the worst queues, and what was left out."""
        if self.why_not is not None:
            return [f"ConsumeQueues: not compared: {self.why_not}"]
        said = f"each of {self.messages:,} messages is in its queue, and nothing else is; {self.queues:,} queues"
        if not self.is_sound:
            kinds = ", ".join(f"{count:,} {what}" for what, count in self.counts.items())
            said = f"{len(self.found):,} of {self.queues:,} queues differ from the log: {kinds}"
        worst = [
            f"  {QUEUES_FOLDER}/{show_name(queue.topic, _TOPIC_LONGEST)}/{queue.queue_id}: {len(queue.findings):,}, "
            f"first {queue.findings.kept[0].text}"
            for queue in self.found[:_WORST_SAID]
        ]
        left_out = (
            (self.skipped_messages, "messages of BatchConsumeQueues, LMQs and topics without a folder"),
            (self.skipped_queues, "LMQs"),
            (self.left_out_units, "units that point to where the log could not be read"),
        )
        words = "; ".join(f"{count:,} {what}" for count, what in left_out if count)
        deleted = f"{sum(self.deleted.values()):,} messages of {len(self.deleted):,} topics"
        more = (
            (words, f"  not compared: {words}"),
            (self.deleted, f"  {deleted} that have been deleted have no queue any more"),
        )
        return [f"ConsumeQueues: {said}", *worst, *(line for holds, line in more if holds)]


def join_queues(disk: Disk, config: Config, audit: Audit, parts: Sequence[QueuesSeen], *, is_live: bool) -> QueuesAudit:
    """Put together what the ranges of ``audit`` came to, and look at units that no message of the log has.

    A broker that ``is_live`` goes on behind the end of the log. Raises DiskError.
    """
    store, file_size = index_folder(config).parent, config.store.consume_queue_file_size
    messages, skipped = sum(part.messages for part in parts), sum(part.skipped_messages for part in parts)
    found, queues = QueuesAudit(messages=messages, skipped_messages=skipped), dict[str, QueueSeen]()
    for name, later in ((name, queue) for part in parts for name, queue in part.queues.items()):
        queue = _queue(queues, name)
        queue.findings.merge(later.findings)
        queue.ranges = _merged([*queue.ranges, *later.ranges])
    folders, batch_topics = queue_folders(disk, store / QUEUES_FOLDER), _batch_topics(disk, store)
    for folder, sizes in folders.items():
        if folder.parent.name.startswith(LMQ_PREFIX) or folder.parent.name in batch_topics:
            found.skipped_queues += 1
            continue
        queue = _queue(queues, f"{folder.parent.name}/{folder.name}")
        for base, size in sorted(sizes.items()):
            if size != file_size and (size or base != max(sizes)):  # the broker removes one that it had no time to fill
                text = f"its file has {size} bytes, not {file_size}"
                queue.note(file_size, base // UNIT_SIZE, 0, "queue-file-size", text)
            for place, units in _units_outside(disk, folder / file_name(base), base, size, queue.ranges):
                _judge_rest(file_size, queue, place, units, found, audit, is_live=is_live)
    known = _known_topics(disk, store / "config" / "topics.json")
    for name, queue in queues.items():
        if store / QUEUES_FOLDER / name in folders or not len(queue.findings):
            continue
        count, queue.findings = len(queue.findings), Findings()
        if known is not None and queue.topic not in known:
            found.deleted[queue.topic] = found.deleted.get(queue.topic, 0) + count
        else:
            text = "the queue is not there, and the log has messages of it"
            queue.findings.add(f"{QUEUES_FOLDER}/{name}", 0, "queue-missing", text)
            queue.findings.count("queue-missing", count - 1)
    found.queues = len(queues) - len(found.deleted)
    for queue in queues.values():
        queue.findings.kept = first_of_each(queue.findings.kept, KEPT_MAX, by_file=False)
    worst = sorted(queues.values(), key=lambda queue: (-len(queue.findings), queue.topic, queue.queue_id))
    found.found = tuple(queue for queue in worst if len(queue.findings))
    return found


def _queue(queues: dict[str, QueueSeen], name: str) -> QueueSeen:
    topic, _, queue_id = name.rpartition("/")
    return queues.setdefault(name, QueueSeen(topic, int(queue_id)))


def _known_topics(disk: Disk, path: Path) -> frozenset[str] | None:
    try:
        return frozenset(json.loads(disk.read(path))["topicConfigTable"])
    except (DiskError, ValueError, KeyError, TypeError):
        return None  # a copy may come without, and what a broker is writing may be half there


def _units_outside(
    disk: Disk, path: Path, base: int, size: int, ranges: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, Units]]:
    # Units of a file that lie in none of the ranges, and the place of the first of them.
    first, end = -(-base // UNIT_SIZE), (base + size) // UNIT_SIZE
    inside = [(max(low, first), min(high, end)) for low, high in ranges if low < end and high > first]
    bounds = [first, *(bound for pair in inside for bound in pair), end]
    with MissingOk(), disk.open_read(path) as file:
        for begin, behind in zip(bounds[::2], bounds[1::2], strict=True):
            place = begin
            # Most of the last file was never written, and reads as zeros without a look at the disk.
            while (place := max(place, (base + file.next_data(place * UNIT_SIZE - base)) // UNIT_SIZE)) < behind:
                data = file.pread(min(behind - place, _UNITS_PER_READ) * UNIT_SIZE, place * UNIT_SIZE - base)
                yield place, np.frombuffer(data, UNIT_TYPE, len(data) // UNIT_SIZE)
                place += max(len(data) // UNIT_SIZE, 1)


def _judge_rest(
    file_size: int, queue: QueueSeen, place: int, units: Units, found: QueuesAudit, audit: Audit, *, is_live: bool
) -> None:
    # Units that no message of the log has.
    rows = np.flatnonzero(_is_written(units))
    there = units["phy_offset"][rows].astype(np.int64)
    is_expired, in_gap = (there >= 0) & (there < audit.log_begin_now), np.zeros(len(there), dtype=np.bool_)
    for gap in audit.gaps:
        in_gap |= (there >= gap.begin) & (there < gap.end)
    found.expired_units += int(is_expired.sum())
    found.left_out_units += int((in_gap & ~is_expired).sum())
    wrong = np.flatnonzero(~is_expired & ~in_gap & ~((there >= audit.log_end) & is_live))
    for row in wrong[:KEPT_MAX].tolist():
        text = f"points to {there[row]}, where the log has no message of this place"
        queue.note(file_size, int(rows[row]) + place, 0, "unit-without-message", text)
    queue.findings.count("unit-without-message", max(len(wrong) - KEPT_MAX, 0))
