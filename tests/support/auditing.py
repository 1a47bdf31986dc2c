"""Stores with an index of their own to be audited, what damages them, and audits that are interrupted."""

from __future__ import annotations

import itertools
import random
import shutil
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from indexd.audit import (
    Audit,
    AuditOptions,
    AuditPlan,
    AuditReport,
    AuditTask,
    TaskResult,
    audit_task,
    join,
    plan_audit,
    run_audit,
)
from indexd.audit.page import lines
from indexd.audit.queues import QueuesAudit, join_queues, why_not
from indexd.commitlog.reader import LogReader
from indexd.config import Config, load
from indexd.consumequeue.store import ConsumeQueueStore
from indexd.index.file import IndexService
from indexd.index.format import FLAVOURS, IndexLayout
from indexd.recovery.open import decode_rules, reader_options
from indexd.recovery.recover import WholeLog, once
from indexd.storage.disk import Disk
from support.goldens import Golden
from support.naive import NaiveIndexFile, NaiveMessage, key_hash, naive_frames, split_keys
from support.queues import batches_of
from support.small_log import QUEUE_FILE_SIZE, SEGMENT_SIZE, write_log


def config_for(store: Path, layout: IndexLayout, segment_size: int, **keys: Any) -> Config:
    """The configuration of ``indexd audit --store`` with these sizes; ``flavour`` is found out unless given."""
    flags = {
        "store": str(store),
        "data": str(store.with_name("unused")),
        "hash_slot_num": str(layout.hash_slot_num),
        "index_num": str(layout.index_num),
        "segment_size": str(segment_size),
        "settle_ms": "1",
        "corrupt_after_ms": "2",
    }
    return load(flags | {key: str(value) for key, value in keys.items()}, None, {})


def config_of_golden(golden: Golden, **keys: Any) -> Config:
    """The same of a store that RocketMQ made."""
    layout = IndexLayout(golden.hash_slot_num, golden.index_num)
    return config_for(golden.root, layout, golden.segment_size, **keys)


def files_of(config: Config, folder: str = "index") -> list[Path]:
    """The files of a folder of the store, oldest name first."""
    path = store_of(config) / folder
    return sorted(path.iterdir()) if path.exists() else []


def copied(config: Config, store: Path) -> Config:
    """The same store elsewhere."""
    shutil.copytree(config.store.store or "", store)
    return config.model_copy(update={"store": config.store.model_copy(update={"store": store})})


def index_log(config: Config, flavour: str = "5.4", *, begin: int = 0, name: int = 20260101000000000) -> None:
    """Build STORE/index over the log from ``begin`` on with IndexService, behind the files that are there."""
    folder = store_of(config) / "index"
    folder.mkdir(exist_ok=True)
    layout = IndexLayout(config.index.hash_slot_num, config.index.index_num)
    kind = FLAVOURS[flavour]
    rules = decode_rules(config)._replace(want_uniq_key=kind.uniq_key, want_tags=kind.tags)
    reader = LogReader(Disk(), config.store.commit_log_directories, rules, once(reader_options(config)))
    reader.refresh()
    reader.position = max(begin, reader.log.min_offset or 0)
    service = IndexService(Disk(), folder, layout, kind, names=map(str, itertools.count(name + 1)))
    try:
        for item in WholeLog(reader):
            service.build(item)  # type: ignore[arg-type]  # nothing is skipped
        service.flush()
    finally:
        service.close()
        reader.close()


def audit(config: Config, *, cuts: Sequence[int] = (), size: int | None = None) -> Audit:
    """``indexd audit`` in this process."""
    return audit_plan(plan_audit(Disk(), config, cuts=cuts, size=size), config)


def audit_plan(plan: AuditPlan, config: Config, order: Iterable[int] | None = None) -> Audit:
    """The tasks in another order, as Spark may run them."""
    parts = {number: audit_task(plan.tasks[number], Disk(), config) for number in order or range(len(plan.tasks))}
    return join(plan, [parts[number] for number in range(len(plan.tasks))])


def words_of(report: AuditReport) -> list[str]:
    """What a terminal shows."""
    return list(lines(report))


def key_texts(message: NaiveMessage, flavour: str) -> list[str]:
    """What is hashed for each key of a message, in order; rollback messages have none (flavours from 4.0 on)."""
    if message.sys_flag & 0xC == 0xC:
        return []
    texts = [f"{message.topic}#{message.uniq_key}"] if message.uniq_key is not None else []
    texts += [f"{message.topic}#{piece}" for piece in split_keys(message.keys)]
    if flavour == "5.4" and message.tags:
        texts.append(f"{message.topic}#T#{message.tags}")
    return texts


def naive_files(config: Config) -> dict[str, NaiveIndexFile]:
    """The index files by name; with the entry behind the last one, too: RocketMQ reads it where a slot names it."""
    found = {}
    for path in files_of(config):
        data, layout = path.read_bytes(), config.index
        found[path.name] = NaiveIndexFile.from_bytes(data, layout.hash_slot_num, layout.index_num)
        found[path.name].entries = list(struct.iter_unpack(">iqii", data[40 + 4 * layout.hash_slot_num :]))
    return found


def select(file: NaiveIndexFile, wanted: int) -> list[int]:
    """Spec rocketmq-store 3.7, asked for all time and for any number; Java goes round a loop for ever."""
    found: list[int] = []
    current = file.slots[wanted % len(file.slots)]
    if not 0 < current <= file.index_count or file.index_count <= 1:
        return found
    for _ in range(file.index_count + 1):
        entry = file.entries[current] if current < len(file.entries) else (0, 0, 0, 0)
        hashed, phy_offset, seconds, previous = entry
        if seconds < 0:
            break
        if hashed == wanted:
            found.append(phy_offset)
        if not 0 < previous <= file.index_count or previous == current:
            break
        current = previous
    return found


def lost_keys(config: Config, flavour: str, plan: AuditPlan | None = None) -> Counter[int]:
    """Keys of each message, by its physical offset, that RocketMQ's IndexFile does not find, asked for all time.

    With a plan, entries count for nothing that point where no entry of their file is believed to point.
    """
    believed = {file.name: range(file.begin, file.end + 1) for file in plan.files} if plan is not None else {}
    files, answers, lost = naive_files(config), dict[str, set[int]](), Counter[int]()
    for message in naive_frames(store_of(config) / "commitlog", config.store.segment_size):
        for text in key_texts(message, flavour):
            if text not in answers:
                answers[text] = {
                    offset
                    for name, file in files.items()
                    for offset in select(file, key_hash(text))
                    if plan is None or offset in believed[name]
                }
            if message.phy_offset not in answers[text]:
                lost[message.phy_offset] += 1
    return lost


def restart_of_killed_broker(store: Path) -> None:
    """What an unclean start of RocketMQ throws away of an index that has never been rolled: all of it."""
    shutil.rmtree(store / "index")


LAYOUT = IndexLayout(500, 2000)
#: What a run says of itself alone.
VOLATILE = ("seconds", "bytesRead", "resumedTasks")


def wrong_store(store: Path) -> Config:
    """Several segments and files, with holes and findings of many kinds."""
    write_log(store, 4000)
    config = config_for(store, LAYOUT, SEGMENT_SIZE)
    index_log(config)
    files = sorted((store / "index").iterdir())
    files[2].unlink()
    rand = random.Random(7)
    for path in (files[0], files[4]):
        data = bytearray(path.read_bytes())
        for _ in range(60):
            data[rand.randrange(2040, len(data) // 2)] ^= 1 << rand.randrange(8)
        path.write_bytes(data)
    return config


class Runs:
    """Runs tasks in this process, in any order; ``done`` of them, then it is interrupted."""

    def __init__(self, config: Config, most: int = 1 << 30, seed: int | None = None, size: int | None = None) -> None:
        self.config, self.most, self.seed, self.size = config, most, seed, size
        self.tasks: list[AuditTask] = []

    def __call__(self, tasks: Sequence[AuditTask], ended: Callable[[AuditTask, TaskResult], None]) -> list[TaskResult]:
        self.tasks = list(tasks)
        numbers = list(range(len(tasks)))
        if self.seed is not None:
            random.Random(self.seed).shuffle(numbers)
        parts: dict[int, TaskResult] = {}
        for number in numbers:
            if len(parts) >= self.most:
                raise KeyboardInterrupt
            parts[number] = audit_task(tasks[number], Disk(), self.config)
            ended(tasks[number], parts[number])
        return [parts[number] for number in range(len(tasks))]

    def rows(self, kept: Path | None, samples: int = 0) -> list[dict[str, Any]]:
        options = AuditOptions(samples=samples, kept=kept)
        report = run_audit(self.config, Disk(), options, lambda: plan_audit(Disk(), self.config, size=self.size), self)
        rows = [{key: row[key] for key in row if key not in VOLATILE} for row in report.rows()]
        assert report.resumed_tasks == len(report.plan.tasks) - len(self.tasks)
        return rows


QUEUED = 2000


def config_with_queues(store: Path) -> Config:
    """What ``indexd audit`` is told of such a store."""
    return config_for(store, IndexLayout(50, 700), SEGMENT_SIZE, consume_queue_file_size=QUEUE_FILE_SIZE)


def store_with_queues(root: Path) -> Config:
    """A sound one of several index files; no queue lacks a message."""
    write_log(root / "store", QUEUED)
    config = config_with_queues(root / "store")
    build_queues(config)
    index_log(config)
    return config


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
