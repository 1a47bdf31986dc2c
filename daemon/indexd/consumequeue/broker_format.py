"""The bytes of what only a broker writes beside its ConsumeQueues (spec rocketmq-store 5.1 and 5.9): read, never built.

::

    STORE/batchconsumequeue/TOPIC/QUEUE/FILE    BatchConsumeQueue: a unit for each message that holds a batch
    +0   i64 phyOffset     +8   i32 size          +12  i64 tagsCode     +20  i64 storeTime, ms
    +28  i64 baseOffset    the queue offset of the batch's first message
    +36  i16 batchSize     +38  i32 -1, the compacted offset            +42  i32 0

    STORE/consumequeue_ext/TOPIC/QUEUE/FILE     ConsumeQueueExt: what a unit's tags code of -2147483649 and below names
    +0   i16 size          20 and the bytes of the bitmap; -1 ends a file, 0 was never written
    +2   i64 tagsCode      +10  i64 storeTime, ms +18  i16 bitmapSize   +20  bitmap
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from indexd.consumequeue.format import EXT_ADDRESS_MAX

BATCH_FOLDER = "batchconsumequeue"
EXT_FOLDER = "consumequeue_ext"

BATCH_UNIT = struct.Struct(">qiqqqhii")
BATCH_UNIT_SIZE = 46
#: The last two fields of a unit that was written.
BATCH_UNIT_END = struct.pack(">ii", -1, 0)
EXT_HEAD = struct.Struct(">hqqh")
EXT_HEAD_SIZE = 20
EXT_END = -1
_INT64_MIN = -(1 << 63)


class BatchUnit(NamedTuple):
    """One unit of a BatchConsumeQueue; offsets and sizes in bytes, but for ``base_offset``, a queue offset."""

    phy_offset: int
    size: int
    tags_code: int
    store_timestamp: int
    base_offset: int
    batch_size: int
    compacted_offset: int
    reserved: int

    @property
    def is_valid(self) -> bool:
        """RocketMQ's own test at recovery."""
        return self.phy_offset >= 0 and self.size > 0 and self.base_offset >= 0 and self.batch_size > 0


def ext_address(tags_code: int) -> int | None:
    """The byte of a ConsumeQueueExt that a tags code stands for; None for a hash or a time."""
    return tags_code - _INT64_MIN if tags_code <= EXT_ADDRESS_MAX else None


assert (BATCH_UNIT.size, EXT_HEAD.size) == (BATCH_UNIT_SIZE, EXT_HEAD_SIZE)
