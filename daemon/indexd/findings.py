"""What is wrong: what the check of an output has found, and what of a daemon's figures needs an operator.

A file that is wrong all over must cost neither memory nor patience, so only the first ones are kept; all are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

KEPT_MAX = 1000
# Of these, so many places are left for kinds that come late: the one wrong header behind a thousand wrong entries.
RESERVED = 300
_KEPT_OF_A_LATE_KIND = 10


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that does not hold. ``file`` is a path inside the data directory, ``position`` a byte of it.

    ``what`` is a stable identifier for programs, ``text`` one line for people.
    """

    file: str
    position: int
    what: str
    text: str


@dataclass(slots=True, repr=False)
class Findings:
    """Of one file, or of several put together with ``merge``: the first 1000 a file, and how many of each kind."""

    kept: list[Finding] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def __len__(self) -> int:
        return self.counts.total()

    def __repr__(self) -> str:
        return f"Findings({dict(self.counts)})"

    @property
    def has_room(self) -> bool:
        """Whether one more would be kept, of whatever kind."""
        return len(self.kept) < KEPT_MAX - RESERVED

    def add(self, file: str, position: int, what: str, text: str) -> None:
        """One more; beyond the first 1000 it is only counted."""
        self.counts[what] += 1
        if self.has_room or (self.counts[what] <= _KEPT_OF_A_LATE_KIND and len(self.kept) < KEPT_MAX):
            self.kept.append(Finding(file, position, what, text))

    def count(self, what: str, number: int) -> None:
        """So many more that nobody has looked at one by one."""
        if number:
            self.counts[what] += number

    def merge(self, other: Findings) -> None:
        """Take over what another file has come to, all that was kept of it."""
        self.kept += other.kept
        self.counts += other.counts


def findings_of(row: Mapping[str, Any]) -> list[str]:
    """What in a daemon's status row needs an operator, one line each; the one place that decides it."""
    found = [f"{stage} waits: {text}" for stage, text in (row.get("problems") or {}).items()]
    found += [f"{stage} has not moved for {seconds:.0f} s" for stage, seconds in (row.get("stalled") or {}).items()]
    if corrupt := row.get("corrupt"):
        found.append(f"the reader stands at bytes that are no frame, at {corrupt['offset']}: {corrupt['reason']}")
    first = int(row.get("commitLogMinOffset") or 0)
    if gaps := [gap for gap in row.get("uncovered") or () if int(gap[1]) > first]:
        size = sum(int(gap[1]) - max(int(gap[0]), first) for gap in gaps)
        reasons = ", ".join(sorted({str(gap[2]) for gap in gaps}))
        found.append(f"{size} bytes of the log are not covered: {reasons}")
    broker = row.get("broker") or {}
    found.extend(str(text) for text in broker.get("unsafe") or ())
    # In mode shadow a broker may be stopped whenever its operator likes; in mode offload the two belong together.
    if broker.get("alive") is False and row.get("mode") == "offload":
        found.append(": ".join(filter(None, ("the broker is not running", broker.get("why")))))
    return found
