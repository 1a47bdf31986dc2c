"""TopicCounts: of each topic how many messages are indexed, their bytes, and their first and last store time.

It has no files: what it counts stands in the frontier, as durable as the position that it belongs to. Counts cannot go
back: where less is believed than was counted, they are counted anew from the begin of the log.
"""

# ruff: noqa: ARG002, ARG003 - calls of every output, which need less here
from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import numpy as np

from indexd.commitlog.batcher import DispatchBatch
from indexd.config import Config
from indexd.findings import Findings
from indexd.output import CheckScope, Output, OutputMark, OutputRecovery, RecoveryScope, Row
from indexd.storage.disk import Disk

#: {"phyOffset": all before it is counted, "topics": {name: [messages, bytes, first and last store time]}}
Counts = dict[str, Any]


class TopicCounts(Output[Counts]):
    """Counts messages as they come; ``directory`` stays empty."""

    name, label, folder = "topics", "topics", "topics"

    def __init__(self, disk: Disk, directory: Path) -> None:
        super().__init__(disk, directory)
        self._phy_offset = 0
        self._topics: dict[str, list[int]] = {}

    @classmethod
    def of(cls, config: Config, disk: Disk, directory: Path) -> Self:
        """Nothing is counted."""
        return cls(disk, directory)

    @classmethod
    def is_wanted(cls, config: Config) -> bool:
        """With the ConsumeQueues, whose columns name the topic."""
        return config.outputs.consume_queue

    @staticmethod
    def load_kernels() -> None:
        """It has none."""

    def built_with(self, held: Counts) -> tuple[str, int, int]:
        """Nothing about it is set."""
        return "consume_queue", 1, 1

    def load(self, held: Counts) -> None:
        """Go on from what the frontier says."""
        self._phy_offset = int(held["phyOffset"])
        self._topics = {topic: list(counts) for topic, counts in held["topics"].items()}

    def build(self, batch: DispatchBatch) -> None:
        """Count the messages that are not counted yet."""
        columns = batch.columns
        left = slice(int(np.searchsorted(columns.phy_offset[: batch.rows], self._phy_offset)), batch.rows)
        ids, rows = np.unique(columns.topic_id[left], return_inverse=True)
        messages = np.bincount(rows, minlength=len(ids))
        sizes = np.bincount(rows, columns.size[left], minlength=len(ids)).astype(np.int64)
        times = columns.store_timestamp[left]
        for at, topic_id in enumerate(ids.tolist()):
            name = batch.topics.raw_name(topic_id).decode(errors="replace")
            first, last = int(times[rows == at].min()), int(times[rows == at].max())
            counts = self._topics.setdefault(name, [0, 0, first, last])
            counts[:2] = counts[0] + int(messages[at]), counts[1] + int(sizes[at])
            counts[2:] = min(counts[2], first), max(counts[3], last)
        self._phy_offset = max(self._phy_offset, batch.end_offset)

    def publish(self) -> None:
        """Nothing is written."""

    def mark(self) -> OutputMark[Counts]:
        """The counts of now."""
        topics = {topic: list(counts) for topic, counts in self._topics.items()}
        return self._mark({"phyOffset": self._phy_offset, "topics": topics})

    def expire(self, min_phy_offset: int) -> list[str]:
        """No files; what was counted stays counted."""
        return []

    def recover(self, held: Counts | None, scope: RecoveryScope) -> OutputRecovery[Counts]:
        """All of it where it is believed, or nothing."""
        if held is None or int(held["phyOffset"]) > scope.believed or scope.is_forced:
            return OutputRecovery(
                {"phyOffset": 0, "topics": {}}, scope.log_begin if scope.log_begin < scope.phy_offset else None
            )
        begin = int(held["phyOffset"])
        return OutputRecovery(held, begin if begin < scope.phy_offset else None)

    def check(self, held: Counts | None, scope: CheckScope) -> Findings:
        """There are no files to check."""
        return Findings()

    def parts(self, held: Counts) -> list[tuple[str, Counts]]:
        """Nothing to check part by part."""
        return []

    def totals(self, held: Counts) -> Row:
        """An entry a topic."""
        return {"files": 0, "entries": len(held["topics"]), "bytes": 0, "fillRatio": 0.0}

    def figures(self) -> Row:
        """How many topics there are."""
        return {"topics": len(self._topics)}
