"""What each era of RocketMQ puts into its index files (spec rocketmq-store 4.3, 4.8).

3.x indexes KEYS alone and leaves prepared and rollback messages out; 4.0 added UNIQ_KEY and takes prepared ones; 4.7.1
counts a slot once instead of at every put; 5.4 adds an entry for the tag.
"""

from __future__ import annotations

from dataclasses import dataclass

from indexd.commitlog.format import TRANSACTION_PREPARED, TRANSACTION_ROLLBACK


@dataclass(frozen=True, slots=True)
class Flavour:
    """One compatibility level; ``skipped_types`` are transaction values of the sysFlag that get no entries."""

    name: str
    uniq_key: bool
    tags: bool
    counts_every_put: bool
    skipped_types: tuple[int, ...]

    @property
    def skip_mask(self) -> int:
        """Bit t is set when the transaction value t (0, 4, 8 or 12) is skipped."""
        return sum(1 << value for value in self.skipped_types)


FLAVOURS = {
    flavour.name: flavour
    for flavour in (
        Flavour("3.x", False, False, True, (TRANSACTION_PREPARED, TRANSACTION_ROLLBACK)),
        Flavour("4.0", True, False, True, (TRANSACTION_ROLLBACK,)),
        Flavour("4.7", True, False, False, (TRANSACTION_ROLLBACK,)),
        Flavour("5.4", True, True, False, (TRANSACTION_ROLLBACK,)),
    )
}
