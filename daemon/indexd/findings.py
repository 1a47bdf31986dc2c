"""Findings: what the check of an output has to say; ``indexd verify`` only puts them together.

A file that is wrong all over must cost neither memory nor patience, so only the first ones are kept; all are counted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

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


class Findings:
    """Of one file, or of several put together with ``merge``: the first 1000 a file, and how many of each kind."""

    def __init__(self) -> None:
        self.kept: list[Finding] = []
        self.counts: Counter[str] = Counter()

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
