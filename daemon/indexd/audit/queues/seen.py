"""What one stretch of the log came to beside the ConsumeQueues: small, pickled, put together by ``queues``.

Differences are counted by queue and kind, and the first few of each are kept, in log order. Of many queues with
differences those whose names come first keep theirs: so the parts of a log come to the same, however it was cut.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Annotated

from indexd.audit.notes import AS_ROWS

#: Of each queue and kind so many differences are kept, and of so many queues.
KEPT_MAX = 5
QUEUES_MAX = 1000
_PRUNE_AT = 2 * QUEUES_MAX

#: By topic and queue id.
QueueName = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Difference:
    """``offset``: the unit's place in its queue, or where it should be; of a file its first byte there.

    ``value`` stands there, ``wanted`` should; ``phy_offset`` is the message's, or where the unit points.
    """

    phy_offset: int
    offset: int
    value: int = 0
    wanted: int = 0


@dataclass(slots=True)
class QueuesSeen:
    """``messages`` were held against ``units``; ``expired_units`` point before the log, ``left_out_units`` into gaps.

    ``ext_units`` have the address of an extension for a tags code, which is not compared. Messages of
    ``batch_messages``, ``lmq_messages`` and ``nameless_messages`` belong to queues that are not compared: those of a
    BatchConsumeQueue, of an LMQ, and of a topic that no folder can be named after.
    """

    messages: int = 0
    units: int = 0
    expired_units: int = 0
    left_out_units: int = 0
    ext_units: int = 0
    batch_messages: int = 0
    lmq_messages: int = 0
    nameless_messages: int = 0
    counts: Annotated[Counter[tuple[QueueName, str]], *AS_ROWS] = field(default_factory=Counter)
    kept: Annotated[dict[QueueName, dict[str, list[Difference]]], *AS_ROWS] = field(default_factory=dict)

    def add(self, name: QueueName, what: str, number: int, first: list[Difference]) -> None:
        """``number`` more of a kind, behind all that were added before; ``first`` are those that stand out front."""
        if not number:
            return
        self.counts[name, what] += number
        kept = self.kept.setdefault(name, {}).setdefault(what, [])
        kept += first[: KEPT_MAX - len(kept)]
        if len(self.kept) > _PRUNE_AT:
            self._prune()

    def merge(self, later: QueuesSeen) -> None:
        """Take over what a later part of the log came to."""
        for name in _TOTALS:
            setattr(self, name, getattr(self, name) + getattr(later, name))
        self.counts += later.counts
        for queue, kinds in later.kept.items():
            mine = self.kept.setdefault(queue, {})
            for what, found in kinds.items():
                kept = mine.setdefault(what, [])
                kept += found[: KEPT_MAX - len(kept)]
        self._prune()

    def _prune(self) -> None:
        if len(self.kept) > QUEUES_MAX:
            self.kept = {name: self.kept[name] for name in sorted(self.kept)[:QUEUES_MAX]}


_TOTALS = (
    *("messages", "units", "expired_units", "left_out_units", "ext_units"),
    *("batch_messages", "lmq_messages", "nameless_messages"),
)

#: What each difference is called, the byte of the unit that is wrong, and what is said of it.
KINDS = {
    "queue-missing": (0, "the message at {phy_offset} belongs to a queue that is not there"),
    "unit-missing": (0, "unit {offset}: missing; it is due for the message at {phy_offset}"),
    "unit-without-message": (0, "unit {offset}: no message begins at {phy_offset}, where it points"),
    "unit-of-another-queue": (0, "unit {offset}: the message at {phy_offset} belongs to another queue, or to none"),
    "unit-twice": (0, "unit {offset}: the message at {phy_offset} once more"),
    "unit-behind-log": (0, "unit {offset}: points to {phy_offset}, behind the end of the log"),
    "unit-phy-offset": (0, "unit {offset}: the phy offset {phy_offset} is negative"),
    "unit-order": (0, "unit {offset}: the phy offset {phy_offset} lies before that of the unit before it, {wanted}"),
    "unit-place": (0, "unit {offset}: stands for the message at {phy_offset}, which has queue offset {wanted}"),
    "unit-size": (8, "unit {offset}: size {value}, but the message at {phy_offset} has {wanted} bytes"),
    "unit-tags-code": (12, "unit {offset}: tags code {value}, but for the message at {phy_offset} it is {wanted}"),
    "queue-file-size": (0, "{value} bytes, not {wanted}: the broker does not start with it"),
    "queue-file-name": (0, "its name is no byte at which a file of {wanted} bytes can begin"),
    "queue-file-gap": (0, "the file before it ends at byte {value} of the queue"),
}
