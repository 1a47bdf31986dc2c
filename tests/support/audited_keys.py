"""Each single key that the audit takes for not findable: it counts them by holes, and here they are by message."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from indexd.audit import Audit, audit_task, join, match, plan_audit
from indexd.audit.kernel import FINDABLE, count_missing
from indexd.config import Config
from indexd.index.format import IndexLayout
from indexd.storage.disk import Disk
from support.auditing import config_for
from support.rocketmq_rewrite import History, Keys

_count_missing = count_missing


def config_of(history: History, store: Path | None = None, **keys: Any) -> Config:
    """What the audit of a store is told."""
    layout = IndexLayout(history.slots, history.entries)
    return config_for(store or history.store, layout, history.segment, **keys)


def flags_of(history: History, store: Path) -> list[object]:
    """The same for a command line."""
    words = ["--hash-slot-num", history.slots, "--index-num", history.entries, "--segment-size", history.segment]
    return ["--store", store, "--data", store.with_name("unused"), *words]


@dataclass
class Lost:
    """Collects them where the audit counts them."""

    keys: Keys = field(default_factory=Counter)

    def count_missing(
        self, columns: Any, row: int, rows: int, skip_mask: int, taken: Any, missing: Any, totals: Any
    ) -> None:
        """In place of the kernel, which does the work."""
        _count_missing(columns, row, rows, skip_mask, taken, missing, totals)
        for at in np.flatnonzero(missing[row:rows] > 0) + row:
            keys = slice(int(columns.key_start[at]), int(columns.key_start[at + 1]))
            hashes = columns.key_hash[keys]
            found = set(hashes[taken[keys] == FINDABLE].tolist())
            lost = [value for value in hashes.tolist() if value not in found]
            assert len(lost) == missing[at]
            self.keys.update((int(columns.phy_offset[at]), value) for value in lost)


def audited(config: Config, size: int | None = None) -> tuple[Audit, Keys]:
    """The audit of a store that no broker writes to, and each key that it takes for not findable."""
    lost = Lost()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(match, "count_missing", lost.count_missing)
        plan = plan_audit(Disk(), config, size=size)
        found = join(plan, [audit_task(task, Disk(), config) for task in plan.tasks])
    assert found.missing_keys == lost.keys.total() == sum(hole.keys for hole in found.holes)
    return found, lost.keys
