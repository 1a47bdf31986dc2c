"""The bytes of a Kafka segment's .log as far as its indexes stand on them: the heads of record batches.

Magic 2, since Kafka 0.11; big-endian, 61 bytes and the records (never looked into: they may be compressed)::

     0 baseOffset         int64   offset of the first record, kept when compaction removes records
     8 batchLength        int32   bytes behind this field: the whole batch is 12 more
    12 partitionLeaderEpoch int32
    16 magic              int8    2
    17 crc                uint32  CRC-32C of everything from attributes to the end; not of the fields before
    21 attributes         int16   compression, timestamp type (bit 3: append time), transactional, control
    23 lastOffsetDelta    int32   last offset = baseOffset + this, kept when compaction removes records
    27 baseTimestamp      int64
    35 maxTimestamp       int64   the largest timestamp of a record, or the append time; ms, -1 if there is none
    43 producerId int64, 51 producerEpoch int16, 53 baseSequence int32
    57 recordsCount       int32   0 where compaction removed them all

Magic 0 and 1, before: one record, or a compressed set of records in a wrapper that looks like one::

     0 offset             int64   of a wrapper: the last one in it
     8 size               int32   bytes behind this field: the whole record is 12 more
    12 crc                uint32  CRC-32 of everything from magic to the end
    16 magic              int8    0 or 1
    17 attributes         int8
    18 timestamp          int64   magic 1 only; of a wrapper: the largest in it. The key and the value follow

Kafka writes it: the leader's and the followers' append, the cleaner, recovery's cut. A crash leaves half a batch at the
end or, where logs are preallocated, zeros. A segment is at most 2 GiB, its positions are 32 bits.
"""

from __future__ import annotations

from enum import IntEnum

MAGIC_V2 = 2
NO_TIMESTAMP = -1
# A batch is so many bytes longer than its length field says.
LOG_OVERHEAD = 12
# Kafka reads no head where so few bytes are left.
HEAD_SIZE_UP_TO_MAGIC = 17
HEAD_SIZE_V2 = 61
RECORD_OVERHEAD_V0 = 14
# A log is opened by Kafka only up to here: its positions are int32.
LOG_SIZE_MAX = (1 << 31) - 1
LOG_SUFFIX = ".log"


class Outcome(IntEnum):
    """How a walk along a log ended, and what is behind the last batch."""

    END = 0  # nothing
    HALF = 1  # the beginning of a batch, or too little for one
    CORRUPT = 2  # no batch, and nothing that says where the next one begins
    ZEROS = 3  # zeros to the end of the file: preallocated, or lost with the page cache


class Fault(IntEnum):
    """What is wrong with a batch whose length leads to the next one all the same."""

    NONE = 0
    CRC = 1
    MAGIC = 2
    SIZE = 3  # too short for a batch of its magic
