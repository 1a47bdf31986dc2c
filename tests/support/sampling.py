"""Samples of a store drawn, its log read with them, and the answers asked: the steps of an audit one by one."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from indexd.audit import AuditPlan, Part, audit_task, plan_audit
from indexd.audit.samples.answers import Answers, Share
from indexd.audit.samples.asking import ask
from indexd.audit.samples.draw import Sample, draw
from indexd.commitlog.writer import CommitLogWriter, FrameSpec
from indexd.config import Config
from indexd.index.format import IndexLayout
from indexd.storage.disk import Disk
from support.auditing import config_for, index_log
from support.naive import NaiveIndexFile, NaiveIndexService, naive_frames
from support.small_log import SEGMENT_SIZE

LAYOUT = IndexLayout(500, 2000)
T0 = 1_700_000_000_000


def planned(config: Config, count: int, cuts: Sequence[int] = ()) -> tuple[AuditPlan, tuple[Sample, ...]]:
    """The plan of an audit whose tasks look for ``count`` samples."""
    plan = plan_audit(Disk(), config, cuts=cuts)
    samples = draw(Disk(), config, plan, count)
    hashes = tuple(sorted({sample.key_hash for sample in samples}))
    plan.tasks = [replace(task, samples=hashes) for task in plan.tasks]
    return plan, samples


def sampled(config: Config, count: int, cuts: Sequence[int] = ()) -> tuple[tuple[Sample, ...], list[Part]]:
    """The samples, and what the tasks came to."""
    plan, samples = planned(config, count, cuts)
    return samples, [audit_task(task, Disk(), config) for task in plan.tasks]


def asked(config: Config, count: int = 200, cuts: Sequence[int] = ()) -> Answers:
    """All of it."""
    plan, samples = planned(config, count, cuts)
    parts = [audit_task(task, Disk(), config) for task in plan.tasks]
    return ask(Disk(), config, plan, samples, parts)


def naive_service(config: Config, flavour: str, max_msgs_num_batch: int = 64) -> NaiveIndexService:
    """The store's own files as a broker has loaded them."""
    assert config.store.store is not None
    layout = config.index
    service = NaiveIndexService(layout.hash_slot_num, layout.index_num, flavour, max_msgs_num_batch)
    for path in sorted((config.store.store / "index").iterdir()):
        data = path.read_bytes()
        file = NaiveIndexFile.from_bytes(data, layout.hash_slot_num, layout.index_num)
        # With the entry behind the last one too: RocketMQ reads it where a slot names it.
        file.entries = list(struct.iter_unpack(">iqii", data[40 + 4 * layout.hash_slot_num :]))
        service.files.append(file)
    return service


def rows_of_log(config: Config) -> list[dict[str, Any]]:
    """What ``exact_oracle`` takes."""
    assert config.store.store is not None
    return [
        {
            "topic": frame.topic,
            "phyOffset": frame.phy_offset,
            "storeTimestamp": frame.store_timestamp,
            "sysFlag": frame.sys_flag,
            "keys": frame.keys,
            "uniqKey": frame.uniq_key,
            "tags": frame.tags,
        }
        for frame in naive_frames(config.store.store / "commitlog", config.store.segment_size)
    ]


def copy_of(config: Config, tmp_path: Path) -> tuple[Path, Config]:
    """The store once more, with LAYOUT, to be damaged."""
    store = Path(shutil.copytree(config.store.store or "", tmp_path / "store"))
    return store, config_for(store, LAYOUT, SEGMENT_SIZE)


def store_of(tmp_path: Path, messages: Iterable[tuple[int, str]], layout: IndexLayout = LAYOUT) -> Config:
    """Messages of topic T: ms behind T0, and KEYS; indexed."""
    with CommitLogWriter(tmp_path / "store" / "commitlog", SEGMENT_SIZE) as writer:
        for after, keys in messages:
            writer.append(FrameSpec(topic="T", body=b"x", properties={"KEYS": keys}, store_timestamp=T0 + after))
    config = config_for(tmp_path / "store", layout, SEGMENT_SIZE)
    index_log(config)
    return config


def shares_of(answers: Answers) -> dict[str, Share]:
    """By width."""
    return {share.width: share for share in answers.shares}
