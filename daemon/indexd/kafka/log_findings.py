"""What does not hold in a log itself: faults of batches, offsets that do not go on, and how it ends."""

from __future__ import annotations

import numpy as np

from indexd.findings import Findings
from indexd.kafka.format import LOG_SIZE_MAX, Fault, Outcome
from indexd.kafka.records import Batches, LogWalk
from indexd.sparse.format import INT32_MAX

_FAULT_WHAT = {
    Fault.CRC: ("batch_crc", "the checksum of the batch does not hold"),
    Fault.MAGIC: ("batch_magic", "the batch has an unknown magic"),
    Fault.SIZE: ("batch_size", "the batch is shorter than its own head"),
}


class LogFindings:
    """``put`` each stretch of batches of one segment, then ``end``; ``label`` is what to call the log."""

    def __init__(self, base: int, label: str, findings: Findings) -> None:
        self.last_offset = base - 1
        self._base = base
        self._label = label
        self._findings = findings

    def put(self, batches: Batches) -> None:
        """The next batches."""
        for row in np.flatnonzero(batches.fault != Fault.NONE):
            what, text = _FAULT_WHAT[Fault(int(batches.fault[row]))]
            self._findings.add(self._label, int(batches.position[row]), what, text)
        relative = batches.last_offset - self._base
        is_foreign = (batches.base_offset < self._base) | (relative < 0) | (relative > INT32_MAX)
        before = np.concatenate(([self.last_offset], batches.last_offset[:-1]))
        falls = (batches.base_offset <= before) | (batches.last_offset < batches.base_offset)
        for row in np.flatnonzero(is_foreign | falls):
            first, last = int(batches.base_offset[row]), int(batches.last_offset[row])
            if is_foreign[row]:
                what, text = "offset_foreign", f"cannot be of a segment with base {self._base}"
            else:
                what, text = "offset_not_rising", f"do not follow {int(before[row])}"
            position = int(batches.position[row])
            self._findings.add(self._label, position, what, f"the offsets {first} to {last} of the batch {text}")
        self.last_offset = int(batches.last_offset[-1])

    def end(self, walk: LogWalk, *, zeros_are_wrong: bool) -> None:
        """How the walk ended."""
        left = walk.log_size - walk.end
        if walk.outcome == Outcome.CORRUPT and walk.fault != Fault.NONE:
            what, text = _FAULT_WHAT[walk.fault]
            self._add(walk, what, f"{text}, and its length leads to no other: {left} bytes cannot be read")
        elif walk.outcome == Outcome.CORRUPT:
            self._add(walk, "log_corrupt", f"no batch begins here: {left} bytes cannot be read")
        elif walk.outcome == Outcome.HALF:
            self._add(walk, "log_half_batch", f"the last {left} bytes are no whole batch")
        elif walk.outcome == Outcome.ZEROS and zeros_are_wrong:
            self._add(walk, "log_zeros", f"the log ends in {left} zero bytes")
        if walk.log_size > LOG_SIZE_MAX:
            text = f"the log has {walk.log_size} bytes, more than the 2 GiB that positions of 32 bits reach"
            self._findings.add(self._label, LOG_SIZE_MAX, "log_too_long", text)

    def _add(self, walk: LogWalk, what: str, text: str) -> None:
        self._findings.add(self._label, walk.end, what, text)
