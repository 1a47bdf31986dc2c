"""What was tried, what was survived, and what the checks counted; printed for people or as one JSON object."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

#: Figure -> what it is called; all are said, though they are 0.
FIGURES = {
    "rounds": "rounds",
    "freshStarts": "data directories begun",
    "messages": "messages written",
    "verifications": "verifications, deep, without a finding",
    "entriesChecked": "entries checked by queries for keys of all kinds",
    "filedEntriesChecked": "entries checked in the files, all of them after each round",
    "unitsChecked": "units of queues checked in the files, all of them after each round",
    "entriesLost": "entries and units lost",
    "entriesInvented": "entries and units invented",
    "rebuildsCompared": "rebuilds, the same byte for byte",
    "rebuildsLeftOut": "rebuilds not compared, the log's begin had expired",
    "starts": "daemon starts",
    "recoveries": "recoveries",
    "rollBacks": "roll-backs: recoveries that took entries back",
    "disturbances": "disturbances noticed by a running daemon",
    "degraded": "stages that had to wait",
    "outOfSpace": "starts and recoveries ended by a full disk",
    "rssAnonMax": "anonymous memory of the daemon, most",
    "descriptorsMax": "open descriptors of the daemon, most",
}
_GREATEST = {"rssAnonMax", "descriptorsMax"}
_MIB = 1 << 20


@dataclass(slots=True)
class Tally:
    """``left_out``: faults that cannot be tried here, and why. ``tried`` counts, ``survived`` after a round held."""

    seed: int
    left_out: dict[str, str] = field(default_factory=dict)
    tried: Counter[str] = field(default_factory=Counter)
    survived: Counter[str] = field(default_factory=Counter)
    figures: Counter[str] = field(default_factory=Counter)
    failure: str | None = None

    def add(self, name: str, count: int = 1) -> None:
        """Count, or for what has a most, keep the greatest."""
        assert name in FIGURES
        self.figures[name] = max(self.figures[name], count) if name in _GREATEST else self.figures[name] + count

    def round_held(self) -> None:
        """All that was tried so far is survived."""
        self.figures["rounds"] += 1
        self.survived = self.tried.copy()

    def to_json(self, seconds: float) -> str:
        """One object."""
        row: dict[str, Any] = {"seed": self.seed, "seconds": round(seconds, 1)}
        row["faults"] = {
            name: {"tried": self.tried[name], "survived": self.survived[name]} for name in sorted(self.tried)
        }
        row["leftOut"] = self.left_out
        row |= {name: self.figures[name] for name in FIGURES}
        return json.dumps(row | {"failure": self.failure})

    def to_text(self, seconds: float, words: dict[str, str]) -> str:
        """Two tables; ``words`` are those of the faults."""
        lines = [f"seed {self.seed}, {seconds:.0f} s", f"{'fault':<66}{'tried':>8}{'survived':>10}"]
        for name, text in words.items():
            if name in self.left_out:
                lines.append(f"  {text:<64}  left out: {self.left_out[name]}")
            else:
                lines.append(f"  {text:<64}{self.tried[name]:>8,}{self.survived[name]:>10,}")
        lines.append(f"  {'all':<64}{self.tried.total():>8,}{self.survived.total():>10,}")
        for name, text in FIGURES.items():
            count = self.figures[name]
            shown = f"{count / _MIB:,.0f} MiB" if name == "rssAnonMax" else f"{count:,}"
            lines.append(f"{text:<66}{shown:>18}")
        lines.append(f"FAILED: {self.failure}" if self.failure else "everything held")
        return "\n".join(lines)
