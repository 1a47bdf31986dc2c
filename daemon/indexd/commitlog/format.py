"""The commitlog frame: its bytes, its constants, and what reading one can come to (spec rocketmq-store 2).

Written by the broker, through a mapping or a channel, one frame behind the other; read by everyone::

    +0   i32 total size          +40      i64 born timestamp, ms
    +4   i32 magic               +48      born host, 4 or 16 bytes, and i32 port         (bh = 8 or 20)
    +8   i32 body CRC            +48+bh   i64 store timestamp, ms
    +12  i32 queue id            +56+bh   store host and port                            (sh = 8 or 20)
    +16  i32 flag                  ..     i32 reconsume times, i64 prepared transaction offset
    +20  i64 queue offset          ..     i32 body length, body
    +28  i64 physical offset       ..     i8 (v1) or i16 (v2) topic length, topic
    +36  i32 sysFlag               ..     i16 properties length, properties

A segment ends in a blank record: i32 bytes left, to the end of the segment, always; i32 blank magic. Behind the last
frame lie zeros (preallocated, not yet written) or, after a crash of the broker, whatever was there before. A crash can
leave any part of the last frames unwritten.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

MAGIC_V1 = 0xDAA320A7
MAGIC_V2 = 0xDAA320AB
MAGIC_BLANK = 0xCBD43194
MAGIC_DLEDGER = 1

BLANK_SIZE = 8
# The fields up to the physical offset: what can be believed or refused before anything else is read.
HEAD_SIZE = 36
# A frame up to its store timestamp, however long its hosts.
STAMPED_SIZE = 76
# A v1 frame with IPv4 hosts and no body, topic or properties.
FRAME_SIZE_MIN = 91
# The property that carries the property CRC: "__CRC32#", U+0001, ten digits, U+0002.
PROPERTY_CRC_SIZE = 20
PROPERTY_CRC_NAME = b"__CRC32#"

FLAG_TRANSACTION_MASK = 0xC
TRANSACTION_PREPARED = 0x4
TRANSACTION_ROLLBACK = 0xC
FLAG_BORN_HOST_V6 = 0x10
FLAG_STORE_HOST_V6 = 0x20

DELAY_TOPIC = "SCHEDULE_TOPIC_XXXX"


class Outcome(IntEnum):
    """What stands at a position of the log, as far as the bytes at hand tell."""

    MESSAGE = 0
    #: A blank record: the rest of this segment holds nothing.
    END_OF_FILE = 1
    #: Zeros, or fewer bytes than the frame says it has: come again.
    NOT_YET_WRITTEN = 2
    #: Bytes that are neither; ``Reason`` says which rule they break.
    CORRUPT = 3
    #: The batch has no room for another message (the kernel's own outcome, never an answer about the log).
    BATCH_FULL = 4


class Reason(IntEnum):
    """Which rule the bytes at a corrupt position break."""

    NONE = 0
    BAD_MAGIC = 1
    BAD_TOTAL_SIZE = 2
    WRONG_PHYSICAL_OFFSET = 3
    LENGTHS_DISAGREE = 4
    BODY_CRC = 5
    PROPERTY_CRC = 6
    DELAY_LEVEL = 7
    INNER_BATCH = 8
    ZEROS_BEFORE_END = 9
    DLEDGER = 10
    CUT_OFF = 11
    BAD_BLANK = 12
    UNFINISHED = 13
    BLANK_BEFORE_FRAMES = 14

    @property
    def text(self) -> str:
        """The rule in words."""
        return _TEXTS[self]


_TEXTS = {
    Reason.NONE: "nothing wrong",
    Reason.BAD_MAGIC: "neither a message's nor a blank record's magic",
    Reason.BAD_TOTAL_SIZE: "a total size that no frame can have here",
    Reason.WRONG_PHYSICAL_OFFSET: "a frame that was written for another physical offset",
    Reason.LENGTHS_DISAGREE: "lengths that do not add up to the total size",
    Reason.BODY_CRC: "a body that its CRC denies",
    Reason.PROPERTY_CRC: "a frame that its property CRC denies",
    Reason.DELAY_LEVEL: "a DELAY property that is no number",
    Reason.INNER_BATCH: "INNER_NUM or INNER_BASE that is no number",
    Reason.ZEROS_BEFORE_END: "zeros before the end of a segment that is closed",
    Reason.DLEDGER: "a DLedger entry",
    Reason.CUT_OFF: "a frame that is cut off by the end of its segment",
    Reason.BAD_BLANK: "a blank record that does not end where its segment does",
    Reason.UNFINISHED: "zeros or half a frame, and frames behind that",
    Reason.BLANK_BEFORE_FRAMES: "a blank record, and frames behind it",
}


@dataclass(frozen=True, slots=True)
class EndOfFile:
    """A blank record at ``offset``: the segment holds nothing more."""

    offset: int


@dataclass(frozen=True, slots=True)
class NotYetWritten:
    """The log ends at ``offset`` for now; ``needed`` is the total size that a frame begun there claims, or 0."""

    offset: int
    needed: int = 0


@dataclass(frozen=True, slots=True)
class Corrupt:
    """The bytes at ``offset`` are no frame."""

    offset: int
    reason: str
    path: Path | None = None
