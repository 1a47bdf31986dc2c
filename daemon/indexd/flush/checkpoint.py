"""The checkpoint: RocketMQ's file of 4096 bytes (spec rocketmq-store 6.1).

::

    +0   i64 physicMsgTimestamp     store time, ms, of the newest message that is durably indexed
    +8   i64 logicsMsgTimestamp     the same once the ConsumeQueues hold it, 0 while they are not built that far
    +16  i64 indexMsgTimestamp      end time of the newest FULL index file that is durable, as RocketMQ sets it
    +24  i64 masterFlushedOffset    0: replication is the broker's
    +32  i64 confirmPhyOffset       the physical offset up to which everything is durable
    +40  zeros

Written by the flusher alone, whole, by rename: a crash leaves the old or the new one.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from indexd.errors import CorruptDataError
from indexd.storage.disk import Disk

CHECKPOINT_SIZE = 4096
_FIELDS = struct.Struct(">qqqqq")


@dataclass(frozen=True, slots=True)
class StoreCheckpoint:
    """The five fields; times in ms, offsets in bytes."""

    physic_msg_timestamp: int = 0
    logics_msg_timestamp: int = 0
    index_msg_timestamp: int = 0
    master_flushed_offset: int = 0
    confirm_phy_offset: int = 0

    def pack(self) -> bytes:
        """The 4096 bytes."""
        fields = _FIELDS.pack(
            self.physic_msg_timestamp,
            self.logics_msg_timestamp,
            self.index_msg_timestamp,
            self.master_flushed_offset,
            self.confirm_phy_offset,
        )
        return fields.ljust(CHECKPOINT_SIZE, b"\0")

    @classmethod
    def unpack(cls, data: bytes, path: Path) -> StoreCheckpoint:
        """Read a broker's checkpoint or ours; raises CorruptDataError if it is too short."""
        if len(data) < _FIELDS.size:
            raise CorruptDataError(f"checkpoint {path} has {len(data)} bytes, not {CHECKPOINT_SIZE}")
        return cls(*_FIELDS.unpack_from(data))

    def write(self, disk: Disk, path: Path) -> None:
        """Replace the file durably."""
        disk.write_atomically(path, self.pack())
