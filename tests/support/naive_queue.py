"""The slow truth about ConsumeQueues (spec rocketmq-store 5.1, 5.2, 5.5, 5.8), with nothing of the daemon in it."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any, NamedTuple

BLANK = (0, 2147483647, 0)


class NaiveMessage(NamedTuple):
    """What putMessagePositionInfo is told of a message."""

    topic: str
    queue_id: int
    queue_offset: int
    phy_offset: int
    size: int
    tags_code: int
    sys_flag: int = 0

    @classmethod
    def of(cls, message: Any) -> NaiveMessage:
        """What is told of a message of ``naive_log``."""
        place = message.topic, message.queue_id, message.cq_offset, message.phy_offset, message.size
        return cls(*place, message.tags_code, message.sys_flag)


@dataclass
class NaiveConsumeQueue:
    """One queue; ``units`` from unit ``first`` on, the begin of its oldest file."""

    file_units: int
    begin: int = 0
    first: int = 0
    minimum: int = 0
    units: list[tuple[int, int, int]] = field(default_factory=list)
    max_phy_offset: int = -1
    moved_from: int = -1

    @property
    def end(self) -> int:
        return self.first + len(self.units)

    def put(self, message: NaiveMessage) -> str:
        """Spec 5.2; what has become of the message: unit, repeat or gap (which is a unit, too)."""
        if message.phy_offset + message.size <= self.max_phy_offset:
            return "repeat"
        expect = message.queue_offset
        if not self.units:
            self.begin = expect
            self.first = expect - expect % self.file_units
            if expect != 0:
                self.minimum = expect
                self.units = [BLANK] * (expect % self.file_units)
        kind = "unit"
        if expect != self.end and self.moved_from < 0:
            self.moved_from = message.phy_offset
        if expect != 0:
            # RocketMQ makes the next file even for a repeat, if the last one is full; here an empty file is none.
            if expect < self.end:
                return "repeat"
            if expect != self.end:
                kind = "gap"
        self.max_phy_offset = message.phy_offset + message.size
        self.units.append((message.phy_offset, message.size, message.tags_code))
        return kind

    def delete_expired(self, min_phy_offset: int) -> int:
        """Spec 5.8, then 5.5; the number of files that went."""
        count = 0
        while len(self.units) > self.file_units and self.units[self.file_units - 1][0] < min_phy_offset:
            del self.units[: self.file_units]
            self.first += self.file_units
            count += 1
        if self.minimum < self.end:
            if self.units[-1][0] < min_phy_offset:
                self.minimum = self.end
            else:
                at = max(self.minimum, self.first)
                while self.units[at - self.first][0] < min_phy_offset:
                    at += 1
                self.minimum = at
        return count

    def files(self) -> dict[str, bytes]:
        """The files by name, zeros behind the last unit."""
        files = {}
        for at in range(0, len(self.units), self.file_units):
            data = b"".join(struct.pack(">qiq", *unit) for unit in self.units[at : at + self.file_units])
            files[f"{(self.first + at) * 20:020d}"] = data.ljust(20 * self.file_units, b"\0")
        return files


class NaiveConsumeQueueStore:
    """All queues, at most ``queues_max``, in order of first appearance."""

    def __init__(self, file_units: int, queues_max: int = 1 << 30) -> None:
        self.file_units, self.queues_max = file_units, queues_max
        self.queues: dict[tuple[str, int], NaiveConsumeQueue] = {}
        self.kinds: dict[str, int] = {}

    def put(self, message: NaiveMessage) -> None:
        """Spec 5.2: only transaction types none and commit; an inner batch belongs to a BatchConsumeQueue."""
        kind = self._kind(message)
        self.kinds[kind] = self.kinds.get(kind, 0) + 1

    def delete_expired(self, min_phy_offset: int) -> int:
        """Of every queue; the number of files that went."""
        return sum(queue.delete_expired(min_phy_offset) for queue in self.queues.values())

    def marks(self) -> list[tuple[str, int, int, int, int, int, int, int]]:
        """As QueueMark: topic, queue id, first unit of the oldest file, first that counts, next unit, ..."""
        return [
            (*name, queue.first, queue.minimum, queue.end, queue.max_phy_offset, queue.begin, queue.moved_from)
            for name, queue in self.queues.items()
        ]

    def tree(self) -> dict[str, bytes]:
        """Every file by its path."""
        return {
            f"{topic}/{queue_id}/{name}": data
            for (topic, queue_id), queue in self.queues.items()
            for name, data in queue.files().items()
        }

    def _kind(self, message: NaiveMessage) -> str:
        if message.sys_flag & 0xC in (0x4, 0xC):
            return "transaction"
        if message.sys_flag & 0x80:
            return "batch"
        if message.topic in ("", ".", "..") or "/" in message.topic or "\0" in message.topic:
            return "nameless"
        name = (message.topic, message.queue_id)
        if name not in self.queues:
            if len(self.queues) >= self.queues_max or not 0 <= message.queue_offset < 1 << 57:
                return "left out"
            self.queues[name] = NaiveConsumeQueue(self.file_units)
        return self.queues[name].put(message)
