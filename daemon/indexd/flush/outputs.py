"""Outputs: all builders behind one call, and what they have come to.

A batch goes through every builder before the progress moves, so the progress covers what is in all of them.
"""

from __future__ import annotations

from indexd.commitlog.dispatch import DispatchBatch
from indexd.commitlog.reading import Skipped
from indexd.flush.flusher import Progress
from indexd.flush.frontier import Frontier, Uncovered, add_uncovered
from indexd.flush.witness import Witness
from indexd.index.service import IndexService


class Outputs:
    """Applies the log, stretch by stretch, to the builders. One owner, no locks; raises DiskError."""

    def __init__(self, index: IndexService, frontier: Frontier, witness: Witness) -> None:
        self.index = index
        self.witness = witness
        self.begin_offset = frontier.begin_offset
        self.phy_offset = frontier.phy_offset
        self.store_timestamp = frontier.store_timestamp
        self.messages = frontier.messages
        self.uncovered = frontier.uncovered

    def __repr__(self) -> str:
        return f"Outputs([{self.begin_offset}, {self.phy_offset}), messages={self.messages}, {self.index})"

    def apply(self, item: DispatchBatch | Skipped) -> None:
        """Take the next stretch of the log. After a DiskError the same item may be given again."""
        if isinstance(item, Skipped):
            self.uncovered = add_uncovered(self.uncovered, Uncovered(item.begin, item.end, item.reason))
            self.phy_offset = item.end
            return
        if item.end_offset > self.phy_offset:  # else it is built, and only the log could not be looked at
            self.index.build_index(item)
            self.phy_offset = item.end_offset
            self.store_timestamp = item.last_store_timestamp or self.store_timestamp
            self.messages += item.rows
        self.witness.saw(item, self.messages)

    def check_log(self) -> None:
        """DisturbedError if the log no longer says what was built from it, as far as a quick look tells."""
        self.witness.check()

    def remember_log(self) -> None:
        """For the next ``check_log``: what stands now at the end of what is built."""
        self.witness.remember_tail(self.phy_offset)

    def expire(self, min_phy_offset: int) -> list[str]:
        """The log begins at ``min_phy_offset`` now: drop what only points before it; the names of removed files."""
        self.uncovered = tuple(gap for gap in self.uncovered if gap.end > min_phy_offset)
        return self.index.delete_expired_file(min_phy_offset)

    def progress(self) -> Progress:
        """What stands now, for the flusher."""
        return Progress(
            index=self.index.mark(),
            begin_offset=self.begin_offset,
            phy_offset=self.phy_offset,
            store_timestamp=self.store_timestamp,
            messages=self.messages,
            uncovered=self.uncovered,
            evidence=self.witness.points(),
        )

    def flush(self) -> None:
        """Bring the open files into the form a clean stop leaves."""
        self.index.flush()
