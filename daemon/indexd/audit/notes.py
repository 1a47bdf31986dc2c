"""Notes: what does not hold, the first hundred of a kind and file in log order, and how many there are in all.

A kind of a file is noted either by the one task that owns the file or message by message. So the first hundred of parts
that follow one another in the log are the first hundred of the whole, however it was cut.
"""

from __future__ import annotations

from collections import Counter

from indexd.audit.kernel import NOTED_MAX
from indexd.findings import Finding

_Kind = tuple[str, str]


class Notes:
    """Findings by file and kind; pickles, merges, and never grows beyond ``NOTED_MAX`` a file and kind."""

    def __init__(self) -> None:
        self.counts: Counter[_Kind] = Counter()
        self._kept: dict[_Kind, list[Finding]] = {}

    def __len__(self) -> int:
        return self.counts.total()

    def __repr__(self) -> str:
        return f"Notes({dict(self.counts)})"

    def add(self, file: str, position: int, what: str, text: str) -> None:
        """One more; ``position`` is a byte of ``file``, a path inside the store."""
        self.keep(file, position, what, text)
        self.count(file, what, 1)

    def keep(self, file: str, position: int, what: str, text: str) -> None:
        """Its words, where there is room; counted elsewhere."""
        kept = self._kept.setdefault((file, what), [])
        if len(kept) < NOTED_MAX:
            kept.append(Finding(file, position, what, text))

    def count(self, file: str, what: str, number: int) -> None:
        """So many more of a kind."""
        if number:
            self.counts[file, what] += number

    def merge(self, later: Notes) -> None:
        """Take over what a later part of the log came to."""
        self.counts += later.counts
        for kind, found in later._kept.items():
            kept = self._kept.setdefault(kind, [])
            kept += found[: NOTED_MAX - len(kept)]

    def kept(self) -> list[Finding]:
        """Those whose words were kept, in the order in which they were met."""
        return [finding for kept in self._kept.values() for finding in kept]

    def findings(self) -> list[Finding]:
        """All that were kept, by file and position."""
        return sorted(self.kept(), key=lambda finding: (finding.file, finding.position, finding.what, finding.text))
