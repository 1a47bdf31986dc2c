"""Each single key that the audit takes for not findable: it counts them by holes, and here they are by message."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from indexd.audit import Audit, audit_task, join, plan_audit, task
from indexd.compare import index
from indexd.config import Config
from indexd.index.format import IndexLayout
from indexd.storage.disk import Disk
from support.auditing import config_for
from support.rocketmq_rewrite import History, Keys


def config_of(history: History, store: Path | None = None, **keys: Any) -> Config:
    """What the audit of a store is told."""
    layout = IndexLayout(history.slots, history.entries)
    return config_for(store or history.store, layout, history.segment, **keys)


def flags_of(history: History, store: Path) -> list[object]:
    """The same for a command line."""
    words = ["--hash-slot-num", history.slots, "--index-num", history.entries, "--segment-size", history.segment]
    return ["--store", store, "--data", store.with_name("unused"), *words]


def audited(config: Config, size: int | None = None) -> tuple[Audit, Keys]:
    """The audit of a store that no broker writes to, and each key that it takes for not findable."""
    lost: Keys = Counter()

    def compared(keys: index.Keys, *args: Any) -> index.Match:
        match = index.compare_files(keys, *args)
        offsets, hashes = keys.phy_offset[keys.row], keys.key_hash
        lost.update(zip(offsets[match.is_lost].tolist(), hashes[match.is_lost].tolist(), strict=True))
        return match

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task, "compare_files", compared)
        plan = plan_audit(Disk(), config, size=size)
        found = join(plan, [audit_task(one, Disk(), config) for one in plan.tasks])
    assert found.missing_keys == lost.total() == sum(hole.keys for hole in found.holes)
    return found, lost
