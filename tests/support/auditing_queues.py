"""Stores with ConsumeQueues of their own to be audited, and what damages them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from indexd.audit import audit_task, join, plan_audit
from indexd.audit.queues import QueuesAudit, join_queues, why_not
from indexd.config import Config
from indexd.consumequeue.format import UNIT, UNIT_SIZE, Unit
from indexd.consumequeue.store import ConsumeQueueStore
from indexd.index.format import IndexLayout
from indexd.storage.disk import Disk
from support.auditing import config_for, index_log
from support.naive import NaiveMessage, naive_frames
from support.queues import batches_of
from support.small_log import QUEUE_FILE_SIZE, SEGMENT_SIZE, write_log

COUNT = 2000
_LAYOUT = IndexLayout(50, 700)


def config_of(store: Path) -> Config:
    """What ``indexd audit`` is told of such a store."""
    return config_for(store, _LAYOUT, SEGMENT_SIZE, consume_queue_file_size=QUEUE_FILE_SIZE)


def make_store(root: Path) -> Config:
    """A sound one of several index files; no queue lacks a message."""
    write_log(root / "store", COUNT)
    config = config_of(root / "store")
    build_queues(config)
    index_log(config)
    return config


def copy_of(made: Config, root: Path) -> Config:
    """The same store elsewhere."""
    shutil.copytree(store_of(made), root / "store")
    return config_of(root / "store")


def build_queues(config: Config) -> None:
    """All that the log comes to, into STORE/consumequeue."""
    root = store_of(config)
    queues = ConsumeQueueStore(Disk(), root / "consumequeue", config.store.consume_queue_file_size, 1000)
    for batch in batches_of(root / "commitlog", config.store.segment_size):
        queues.build(batch)
    queues.publish()
    queues.close()


def store_of(config: Config) -> Path:
    assert config.store.store is not None
    return config.store.store


def audit_queues(config: Config, cuts: Sequence[int] = (), *, backwards: bool = False) -> QueuesAudit:
    """What ``--queues`` finds; ``cuts`` are where messages begin."""
    if (reason := why_not(Disk(), config)) is not None:
        return QueuesAudit(reason)
    plan = plan_audit(Disk(), config, cuts=cuts)
    plan.tasks = [replace(task, queues=True) for task in plan.tasks]
    tasks = plan.tasks[::-1] if backwards else plan.tasks
    parts = [audit_task(task, Disk(), config) for task in tasks]
    parts = parts[::-1] if backwards else parts
    found = join(plan, parts)
    seen = [part.queues for part in parts if part.queues is not None]
    return join_queues(Disk(), config, found, seen, is_live=plan.is_live)


def messages_of(config: Config) -> list[NaiveMessage]:
    """Every message of the log."""
    return list(naive_frames(store_of(config) / "commitlog", config.store.segment_size))


def entering(config: Config) -> list[NaiveMessage]:
    """Those that have a unit."""
    return [message for message in messages_of(config) if message.sys_flag & 0xC in (0, 8)]


class Queue:
    """The files of one queue, to be damaged; it has more units than a file holds."""

    def __init__(self, config: Config, topic: str = "OrderPaid", queue_id: int = 1) -> None:
        self.name = f"consumequeue/{topic}/{queue_id}"
        self.folder = store_of(config) / self.name
        self._config, self._key = config, (topic, queue_id)
        assert self.get(62).is_valid

    @property
    def messages(self) -> list[NaiveMessage]:
        return [message for message in entering(self._config) if (message.topic, message.queue_id) == self._key]

    def path(self, offset: int) -> Path:
        return self.folder / f"{offset * UNIT_SIZE // QUEUE_FILE_SIZE * QUEUE_FILE_SIZE:020d}"

    def get(self, offset: int) -> Unit:
        position = offset * UNIT_SIZE % QUEUE_FILE_SIZE
        return Unit(*UNIT.unpack(self.path(offset).read_bytes()[position : position + UNIT_SIZE]))

    def put(self, offset: int, unit: bytes) -> None:
        with self.path(offset).open("r+b") as file:
            file.seek(offset * UNIT_SIZE % QUEUE_FILE_SIZE)
            file.write(unit)

    def change(self, offset: int, **fields: int) -> None:
        self.put(offset, UNIT.pack(*self.get(offset)._replace(**fields)))

    def swap(self, one: int, other: int) -> None:
        units = self.get(one), self.get(other)
        self.put(one, UNIT.pack(*units[1]))
        self.put(other, UNIT.pack(*units[0]))
