"""What a scrub has found damaged, for the recovery that mends it in place."""

from __future__ import annotations

from dataclasses import dataclass

from indexd.errors import DisturbedError
from indexd.flush.frontier import Frontier


@dataclass(frozen=True, slots=True)
class Damage:
    """``files``: names of index files to be replayed; from ``recheck_from`` on, entries are compared with the log.

    ``is_beside``: queues or sparse indexes, which are filled again from the log's begin.
    """

    files: frozenset[str] = frozenset()
    recheck_from: int | None = None
    is_beside: bool = False

    def recheck_size(self, frontier: Frontier) -> int:
        """So much of the log before the frontier's end has to be compared."""
        return 0 if self.recheck_from is None else max(frontier.phy_offset - self.recheck_from, 0)


NO_DAMAGE = Damage()


class DamagedError(DisturbedError):
    """A file is not as it was written, whoever did that."""

    def __init__(self, text: str, damage: Damage) -> None:
        super().__init__(text)
        self.damage = damage
