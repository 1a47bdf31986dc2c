"""What a ConsumeQueueStore has come to: for the flusher, and in numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from indexd.consumequeue.format import QueueMark


@dataclass(frozen=True, slots=True)
class QueuesProgress:
    """All queues at one moment, in order of first appearance, and what a flusher has to sync for ``marks`` to hold.

    First the files, then the directories. ``expired`` can be removed as soon as a frontier with these marks is durable.
    ``serial`` tells ``synced`` apart what was written after this moment.
    """

    marks: tuple[QueueMark, ...] = ()
    unsynced_files: tuple[Path, ...] = ()
    unsynced_directories: tuple[Path, ...] = ()
    expired: tuple[Path, ...] = ()
    serial: int = 0
    #: So many queues there were when further ones were left out; None if none was.
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class QueueCounters:
    """Plain numbers that only grow. ``messages`` that were given, and what they came to, one of these each.

    ``units`` were written, ``gaps`` of them behind a queue offset that never came. The others got none: ``repeats``
    were there already, ``batch_messages`` belong to a BatchConsumeQueue, ``nameless`` to a topic that no folder can be
    named after, ``left_out`` to a queue beyond ``queues_max``. What is no message yet, or was rolled back, is in none.
    """

    messages: int = 0
    units: int = 0
    repeats: int = 0
    gaps: int = 0
    batch_messages: int = 0
    nameless: int = 0
    left_out: int = 0
    expired_files: int = 0

    @property
    def without_unit(self) -> int:
        """Messages that enter a queue at the broker and have no unit here."""
        return self.batch_messages + self.nameless + self.left_out
