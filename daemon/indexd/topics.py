# ruff: noqa: ARG002, ARG003 - an output without files needs few of them
"""TopicCounts: how many messages of each topic the log holds, in the frontier alone: an output without files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from indexd.commitlog.batcher import DispatchBatch
from indexd.commitlog.decoder import decode_utf8
from indexd.config import Config
from indexd.findings import Findings
from indexd.output import CheckScope, LogBounds, Output, OutputMark, OutputRecovery, RecoveryScope, Row
from indexd.storage.disk import Disk

#: ``phyOffset``, and by topic how many messages stand before it.
TopicsMark = dict[str, Any]


class TopicCounts(Output[TopicsMark]):
    """Counts; what it has counted cannot be taken back, so a log that was cut is counted anew."""

    name, label, folder = "topics", "topics", "topics"

    def __init__(self, disk: Disk, directory: Path) -> None:
        super().__init__(disk, directory)
        self._end, self._counts = 0, dict[str, int]()

    @classmethod
    def of(cls, config: Config, disk: Disk, directory: Path) -> TopicCounts:
        """An empty one."""
        return cls(disk, directory)

    @staticmethod
    def load_kernels() -> None:
        """None are needed."""
        return

    @property
    def empty(self) -> TopicsMark:
        """Nothing counted."""
        return {"phyOffset": 0, "counts": {}}

    def built_with(self, held: TopicsMark) -> tuple[str, int, int]:
        """No setting changes it."""
        return "topics", 0, 0

    def load(self, held: TopicsMark) -> None:
        """Go on from there."""
        self._end, self._counts = held["phyOffset"], dict(held["counts"])

    def build(self, batch: DispatchBatch) -> None:
        """Count what was not counted yet."""
        columns = batch.columns
        new = columns.topic_id[: batch.rows][columns.phy_offset[: batch.rows] >= self._end]
        for topic_id, count in zip(*np.unique(new, return_counts=True), strict=True):
            topic = decode_utf8(batch.topics.raw_name(int(topic_id)))
            self._counts[topic] = self._counts.get(topic, 0) + int(count)
        self._end = max(self._end, batch.end_offset)

    def publish(self) -> None:
        """There is nothing to write."""
        return

    def mark(self) -> OutputMark[TopicsMark]:
        """As the frontier has it."""
        return self._mark({"phyOffset": self._end, "counts": dict(self._counts)})

    def expire(self, min_phy_offset: int) -> list[str]:
        """Messages that have expired stay counted."""
        return []

    def close(self) -> None:
        """Nothing is open."""
        return

    def recover(self, held: TopicsMark | None, scope: RecoveryScope) -> OutputRecovery[TopicsMark]:
        """What was counted, or everything anew."""
        if held is None or held["phyOffset"] > scope.believed or scope.is_forced:
            held = {"phyOffset": scope.log_begin, "counts": {}}
        return OutputRecovery(held, held["phyOffset"] if held["phyOffset"] < scope.phy_offset else None)

    def check(self, held: TopicsMark, scope: CheckScope) -> Findings:
        """There are no files."""
        return Findings()

    def check_mark(self, held: TopicsMark, bounds: LogBounds) -> list[str]:
        """It cannot be ahead of the log."""
        return [] if held["phyOffset"] <= bounds.phy_offset + bounds.slack else ["topics are ahead of the log"]

    def parts(self, held: TopicsMark) -> list[tuple[str, TopicsMark]]:
        """All in one."""
        return [("topics", held)]

    def totals(self, held: TopicsMark) -> Row:
        """Messages, and no files."""
        return {"files": 0, "entries": sum(held["counts"].values()), "bytes": 0, "fillRatio": None}

    def figures(self) -> Row:
        """None of its own."""
        return {}
