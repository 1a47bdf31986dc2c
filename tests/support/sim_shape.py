"""The sizes of a simulated world."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from indexd.config import Config, load


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a world; small, so that files roll and messages straddle them."""

    segment_size: int = 16 << 10
    hash_slot_num: int = 300
    index_num: int = 100
    flavour: str = "5.4"
    rewrites: bool = False
    #: Entries that are read or written at once.
    window: int = 1000
    recheck_size: int = 64 << 20
    #: Frames are noted this far apart, in bytes: segments are a ten-thousandth of a broker's, and so is this.
    note_every: int = 1 << 10
    #: Units of a ConsumeQueue file, and bytes of log between two entries of a sparse index.
    queue_units: int = 10
    sparse_interval: int = 1000
    #: As in a container, where each daemon is process 1.
    same_pid: bool = False

    @classmethod
    def draw(cls, rand: random.Random, *, rewrites: bool = False) -> Shape:
        """Any of them: slots and entries of less than a page and of several, files that roll at every few messages."""
        return cls(
            rand.choice([16, 32, 64]) << 10,
            rand.choice([1, 50, 500, 1500]),
            rand.choice([20, 60, 250, 400]),
            rand.choice(["5.4", "5.4", "4.7", "4.0", "3.x"]),
            rewrites,
            rand.choice([7, 50, 1000]),
            64 << 20 if rewrites else rand.choice([0, 8 << 10, 64 << 20]),
            queue_units=rand.choice([1, 3, 10, 300]),
            sparse_interval=rand.choice([0, 300, 1000, 4096]),
        )

    def config(self, store: Path, data: Path) -> Config:
        """What its daemon is given."""
        flags = {
            "store": store, "data": data, "segment_size": self.segment_size, "read_bytes": 64 << 10,
            "hash_slot_num": self.hash_slot_num, "index_num": self.index_num,
            "flavour": self.flavour, "settle_ms": 1, "corrupt_after_ms": 100,
            "consume_queue_file_size": 20 * self.queue_units, "sparse_interval": self.sparse_interval,
            "unclean_starts_max": 0, "recheck_bytes": self.recheck_size,
        }  # fmt: skip
        return load({key: str(value) for key, value in flags.items()}, None, {})
