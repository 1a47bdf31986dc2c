"""Audits that are interrupted, and a store in which much is wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from indexd.audit import AuditOptions, AuditTask, Part, audit_task, plan_audit, run_audit
from indexd.config import Config
from indexd.index.format import IndexLayout
from indexd.storage.disk import Disk
from support.auditing import config_for, index_log
from support.small_log import SEGMENT_SIZE, write_log

LAYOUT = IndexLayout(500, 2000)
#: What a run says of itself alone.
VOLATILE = ("seconds", "bytesRead", "resumedTasks", "manner")


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

    def __call__(self, tasks: Sequence[AuditTask], ended: Callable[[AuditTask, Part], None]) -> list[Part]:
        self.tasks = list(tasks)
        numbers = list(range(len(tasks)))
        if self.seed is not None:
            random.Random(self.seed).shuffle(numbers)
        parts: dict[int, Part] = {}
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
