"""Findings of an audit: the first hundred of a kind and file in log order, how many there are, what each kind means.

A kind of a file is noted either by the one task that owns the file or message by message. So the first hundred of parts
that follow one another in the log are the first hundred of the whole, however it was cut.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer

from indexd.audit.kernel import NOTED_MAX
from indexd.findings import Finding

_Kind = tuple[str, str]


def _to_rows(found: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    return list(found.items())


def _from_rows(rows: Any) -> Any:
    return {_to_key(key): value for key, value in rows} if isinstance(rows, list) else rows


def _to_key(key: Any) -> Any:
    return tuple(map(_to_key, key)) if isinstance(key, list) else key


#: How a dictionary whose keys are tuples is written as JSON, and read.
AS_ROWS = (PlainSerializer(_to_rows), BeforeValidator(_from_rows))


@dataclass(slots=True)
class Notes:
    """Findings by file and kind; pickles, merges, and never grows beyond ``NOTED_MAX`` a file and kind."""

    counts: Annotated[Counter[_Kind], *AS_ROWS] = field(default_factory=Counter)
    first: Annotated[dict[_Kind, list[Finding]], *AS_ROWS] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.counts.total()

    def add(self, file: str, position: int, what: str, text: str) -> None:
        """One more; ``position`` is a byte of ``file``, a path inside the store."""
        self.keep(file, position, what, text)
        self.count(file, what, 1)

    def keep(self, file: str, position: int, what: str, text: str) -> None:
        """Its words, where there is room; counted elsewhere."""
        kept = self.first.setdefault((file, what), [])
        if len(kept) < NOTED_MAX:
            kept.append(Finding(file, position, what, text))

    def count(self, file: str, what: str, number: int) -> None:
        """So many more of a kind."""
        if number:
            self.counts[file, what] += number

    def merge(self, later: Notes) -> None:
        """Take over what a later part of the log came to."""
        self.counts += later.counts
        for kind, found in later.first.items():
            kept = self.first.setdefault(kind, [])
            kept += found[: NOTED_MAX - len(kept)]

    def findings(self) -> list[Finding]:
        """All that were kept, by file and position."""
        found = [finding for kept in self.first.values() for finding in kept]
        return sorted(found, key=lambda finding: (finding.file, finding.position, finding.what, finding.text))


MEANINGS = {
    "chain-forward": "a chain turns back on itself: older entries behind this place are not found",
    "chain-loop": "an entry names itself as the one before it: the search ends there, older entries are not found",
    "chain-previous": "a chain skips entries or leads into another one: entries are not found",
    "chain-range": "a chain leads out of the file: older entries behind this place are not found",
    "entry-behind-log": "points behind the end of the log: the log was cut since, the broker finds no message there",
    "entry-hash": "stands where another key's entry should stand: that key is not found by it",
    "entry-key-hash": "a negative key hash: no query asks for it",
    "entry-phy-offset": "a negative offset: the broker finds no message there",
    "entry-phy-offset-range": "points outside the part of the log that its file says it covers",
    "entry-time-difference": "carries the wrong time: queries in time ranges miss the message or add it",
    "entry-time-difference-first": "counts from a file that is gone: one was deleted, or these are from elsewhere",
    "entry-twice": "a key has a second entry: queries answer with the message twice",
    "entry-without-key": "names a key that its message does not have: queries for that key get a wrong message",
    "entry-without-message": "points to where no message begins: the broker finds nothing there",
    "file-foreign": "no index file, but it lies in their folder",
    "file-link": "two names for one file: the broker reads it as two, and its messages are found twice",
    "file-order": "the newest name must be the newest file's, or searches in time ranges end too early",
    "file-size": "not of the size that the broker is configured for: what it holds is not found",
    "header-begin-phy-offset": "the header's first offset is not that of the first entry",
    "header-begin-timestamp": "the header's first time is wrong: queries in time ranges miss messages of this file",
    "header-end-phy-offset": "the header's last offset is not the last entry's: a restart may index messages twice",
    "header-end-timestamp": "the header's last time is wrong: queries in time ranges miss messages of this file",
    "header-index-count": "the header counts other entries than are there: the next ones overwrite, or leave a gap",
    "header-used-slot-count": "the header counts other slots than are in use; queries do not look at it",
    "log-missing": "segments are gone from the middle of the log: their messages are lost, whatever names them",
    "log-unreadable": "bytes of the log that are no message: whether keys there are findable cannot be told",
    "slot-behind-last": "a slot names an entry that is not written yet: its chain is not found",
    "slot-old": "a slot names an older entry than its newest: newer ones are not found",
    "slot-other": "a slot names an entry of another slot: its own chain is not found",
    "slot-range": "a slot names no entry of this file: its chain is not found",
    "slot-wiped": "a slot is empty but has entries: none of them is found",
    "slot": "further wrong slots of the file",
}


def meaning_of(what: str) -> str:
    """One line for a person; the identifier itself, in words, for a kind that has none."""
    return MEANINGS.get(what) or what.replace("-", " ")
