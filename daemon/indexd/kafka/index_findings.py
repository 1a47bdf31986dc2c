"""What does not hold in an index file, from the verdicts of its slots and from its length."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from indexd.findings import KEPT_MAX, Findings
from indexd.kafka.judge import WRONG, Verdict
from indexd.kafka.slots import Slots
from indexd.sparse.format import TIME_ENTRY_SIZE

_OFFSET_WHAT = {
    Verdict.OUT_OF_RANGE: ("offset_out_of_range", "the offset or the position is negative"),
    Verdict.NOT_AT_A_BATCH: ("position_not_at_batch", "no batch begins at the position"),
    Verdict.BEHIND_THE_LOG: ("position_behind_log", "the position is behind the log's last batch"),
    Verdict.MISMATCH: ("offset_mismatch", "the batch at the position does not end with the offset"),
    Verdict.NOT_RISING: ("offset_not_rising", "it is not behind the entry before it"),
}
_TIME_WHAT = {
    Verdict.OUT_OF_RANGE: ("time_out_of_range", "the timestamp or the offset is negative"),
    Verdict.BEHIND_THE_LOG: ("time_offset_behind_log", "the log has no such offset"),
    Verdict.NOT_LAST_OF_BATCH: ("time_offset_not_last", "no batch ends with the offset"),
    Verdict.MISMATCH: ("time_mismatch", "the batch that ends with the offset has another timestamp"),
    Verdict.NOT_FIRST: ("time_not_first", "a batch before the offset has this timestamp or a larger one"),
    Verdict.NOT_RISING: ("time_not_rising", "it is not behind the entry before it"),
}


def offset_slot_findings(label: str, slots: Slots, verdicts: NDArray[np.int64], base: int, found: Findings) -> None:
    """The wrong slots of an OffsetIndex."""

    def text(slot: int) -> str:
        return f"entry {slot} (offset {base + int(slots.first[slot])}, position {slots.second[slot]})"

    _slot_findings(label, slots, verdicts, _OFFSET_WHAT, text, found)


def time_slot_findings(label: str, slots: Slots, verdicts: NDArray[np.int64], base: int, found: Findings) -> None:
    """The wrong slots of a TimeIndex."""

    def text(slot: int) -> str:
        return f"entry {slot} (timestamp {slots.first[slot]}, offset {base + int(slots.second[slot])})"

    _slot_findings(label, slots, verdicts, _TIME_WHAT, text, found)


def _slot_findings(
    label: str,
    slots: Slots,
    verdicts: NDArray[np.int64],
    words: dict[Verdict, tuple[str, str]],
    name: Callable[[int], str],
    found: Findings,
) -> None:
    wrong = np.flatnonzero(verdicts >= WRONG)
    for slot in wrong[:KEPT_MAX].tolist():
        what, text = words[Verdict(int(verdicts[slot]))]
        found.add(label, slot * slots.entry_size, what, f"{name(slot)}: {text}")
    for value, count in zip(*np.unique(verdicts[wrong[KEPT_MAX:]], return_counts=True), strict=True):
        found.count(words[Verdict(int(value))][0], int(count))


def tail_findings(label: str, slots: Slots, found: Findings) -> None:
    """What follows the entries of an index that nobody appends to any more."""
    if slots.zeros:
        position = slots.live * slots.entry_size
        text = f"{slots.zeros} unused entries of zeros behind {slots.live} real ones, and Kafka counts them in"
        if slots.entry_size != TIME_ENTRY_SIZE:
            text += ": its lookups scan from the segment's begin"
        found.add(label, position, "zero_tail", text)


def length_findings(label: str, slots: Slots, found: Findings) -> None:
    """A length that no index has, growing or not."""
    if slots.ragged:
        position = (slots.live + slots.zeros) * slots.entry_size
        text = f"the file ends in {slots.ragged} bytes that are no entry: it has to be a multiple of {slots.entry_size}"
        found.add(label, position, "ragged_length", text)
