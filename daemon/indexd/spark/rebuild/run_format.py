"""The bytes of a run, what stage one of a rebuild makes of a split, and the Run that says what it came to.

::

    "indexdR1"                  8 bytes
    chunk, some 131072 rows     column after column, little-endian, one row a message, in log order:
        u32 phyOffset           relative to the split's begin
        i32 size                only where ConsumeQueues or sparse indexes are built
        i64 storeTimestamp
        u16 keyCount            index entries of the message; none where the flavour leaves it out
        u32 keyHash             one an entry
        UNIT_ROW                the rows once more for the ConsumeQueues, sorted by bucket, those of one in log
                                order; of prepared and rolled back messages there is none
        u32 bucket start        BUCKETS + 1: the row with which each bucket begins
        u32 crc                 BUCKETS: of the rows of each bucket
    chunk table                 a CHUNK a chunk, with the CRC-32 of each column
    topics                      u32 count, count x u32 length, the names
    queues                      a QUEUE_ROW a queue that begins here, in the order of their first rows
    facts                       JSON: the rest of a Run
    trailer                     TRAILER: where these are, their CRC-32, "indexdR1"

Written by one task, from front to back, under a name that no other attempt has; read by tasks of stage two. The CRC-32
of the trailer is the run's: it covers the others, and they cover every byte. A crash can leave files without a trailer,
or with pages that never came: the CRCs tell.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from indexd.commitlog.decoder import decode_utf8
from indexd.commitlog.evidence import Evidence
from indexd.commitlog.format import Corrupt
from indexd.commitlog.reader import Skipped
from indexd.commitlog.tail import AT_FIRST, NEVER, Stand
from indexd.errors import CorruptDataError
from indexd.spark.rebuild.runs_kernel import BUCKET_SHIFT, BUCKETS, HASH_FACTOR
from indexd.spark.splits import Split

MAGIC = b"indexdR1"
#: What a row is in the log's order, by column.
LOG_COLUMNS = (("phy_offset", "<u4"), ("size", "<i4"), ("store_timestamp", "<i8"), ("key_count", "<u2"))
UNIT_ROW = np.dtype(
    [
        ("phy_offset", "<u4"),
        ("size", "<i4"),
        ("queue_offset", "<i8"),
        ("tags_code", "<i8"),
        ("queue_id", "<i4"),
        ("topic_id", "<i4"),
        ("sys_flag", "u1"),
    ]
)
#: ``position``: where its first column begins; ``end``: where the reader's last batch in it ends; ``sizes``, ``keys``,
#: ``units``: how long these columns are; ``table_crc``: of bucket starts and CRCs.
CHUNK = np.dtype(
    [
        ("position", "<i8"),
        ("end", "<i8"),
        ("rows", "<i4"),
        ("sizes", "<i4"),
        ("keys", "<i4"),
        ("units", "<i4"),
        ("crcs", "<u4", (len(LOG_COLUMNS) + 1,)),
        ("table_crc", "<u4"),
    ]
)
QUEUE_ROW = np.dtype([("topic_id", "<i4"), ("queue_id", "<i4"), ("phy_offset", "<u4")])
#: Position of the chunk table, size in bytes of table, topics, queues and facts, CRC-32 of each.
TRAILER = struct.Struct("<Q4I4I8s")


class QueueSeen(NamedTuple):
    """A queue and where its first message in a run stands; a message that could begin a queue."""

    topic: bytes
    queue_id: int
    phy_offset: int


@dataclass(frozen=True, slots=True)
class Run:
    """What stage one says of a split; ``path``: the file that holds its messages, ``size`` and ``crc`` of that file.

    ``buckets``: how many rows stand before each queue bucket, BUCKETS + 1 numbers. ``queue_rows``: see QUEUE_ROW.
    """

    split: Split
    path: Path
    #: What it was built from and how, as the driver calls it: a run is taken over only by a rebuild of the same.
    identity: str = ""
    #: Where the reader stands: the split's end, unless the log ends before.
    next_offset: int = 0
    #: Where the last batch or gap ends; -1 if there was none. One process would say so of the log's end.
    phy_offset: int = -1
    #: Where the last batch ends; -1 if there was none.
    batch_end: int = -1
    messages: int = 0
    entries: int = 0
    #: The last message has an entry.
    ends_with_entry: bool = False
    #: Of the last message, ms; 0 if there is none.
    store_timestamp: int = 0
    #: Where the first message begins, None without one; of the last, ms; what all of them by themselves come to.
    first_offset: int | None = None
    last_timestamp: int = NEVER
    stand: Stand = AT_FIRST
    ends_log: bool = False
    skipped: tuple[Skipped, ...] = ()
    unreadable: Corrupt | None = None
    evidence: tuple[Evidence, ...] = ()
    topics: tuple[bytes, ...] = ()
    buckets: tuple[int, ...] = (0,) * (BUCKETS + 1)
    queue_rows: bytes = b""
    size: int = 0
    crc: int = 0

    @property
    def queues(self) -> Iterator[QueueSeen]:
        """The queues that a message of the run could begin, in the order of those messages."""
        for topic_id, queue_id, phy in np.frombuffer(self.queue_rows, dtype=QUEUE_ROW).tolist():
            yield QueueSeen(self.topics[topic_id], queue_id, self.split.begin + phy)

    @property
    def is_last(self) -> bool:
        """The log ends in this split: nothing behind it counts."""
        return self.ends_log or self.unreadable is not None

    def slim(self) -> Run:
        """Without what only the driver needs: what is sent to every task of stage two."""
        return replace(self, evidence=(), topics=(), buckets=(), queue_rows=b"", skipped=())

    def facts(self) -> bytes:
        """JSON of what the file does not hold elsewhere."""
        unreadable = self.unreadable
        row = {
            "split": list(astuple(self.split)),
            "identity": self.identity,
            "nextOffset": self.next_offset,
            "phyOffset": self.phy_offset,
            "batchEnd": self.batch_end,
            "messages": self.messages,
            "entries": self.entries,
            "endsWithEntry": self.ends_with_entry,
            "storeTimestamp": self.store_timestamp,
            "firstOffset": self.first_offset,
            "lastTimestamp": self.last_timestamp,
            "stand": list(self.stand),
            "endsLog": self.ends_log,
            "skipped": [list(astuple(gap)) for gap in self.skipped],
            "unreadable": unreadable and [unreadable.offset, unreadable.reason, str(unreadable.path or "")],
            "evidence": [list(astuple(point)) for point in self.evidence],
            "buckets": list(self.buckets),
        }
        return json.dumps(row).encode()

    @classmethod
    def from_facts(cls, data: bytes, path: Path) -> Run:
        """The opposite of ``facts``; CorruptDataError for what it does not make."""
        try:
            row: Any = json.loads(data)
            bad = row["unreadable"]
            return cls(
                split=Split(*row["split"]),
                path=path,
                identity=row["identity"],
                next_offset=row["nextOffset"],
                phy_offset=row["phyOffset"],
                batch_end=row["batchEnd"],
                messages=row["messages"],
                entries=row["entries"],
                ends_with_entry=row["endsWithEntry"],
                store_timestamp=row["storeTimestamp"],
                first_offset=row["firstOffset"],
                last_timestamp=row["lastTimestamp"],
                stand=Stand(*row["stand"]),
                ends_log=row["endsLog"],
                skipped=tuple(Skipped(*gap) for gap in row["skipped"]),
                unreadable=bad and Corrupt(bad[0], bad[1], Path(bad[2]) if bad[2] else None),
                evidence=tuple(Evidence(*point) for point in row["evidence"]),
                buckets=tuple(row["buckets"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptDataError(f"{path} is no run: {error!r}") from error


def bucket_of(topic: bytes, queue_id: int) -> int:
    """The bucket of a queue; names that a Java reader takes for one are one."""
    key = topic_hash(topic) << 32 | (queue_id & 0xFFFFFFFF)
    return (key * HASH_FACTOR & (1 << 64) - 1) >> BUCKET_SHIFT


def topic_hash(topic: bytes) -> int:
    """32 bits of a topic's name as Java reads it."""
    return zlib.crc32(decode_utf8(topic).encode("utf-8", "surrogatepass"))


def pack_topics(topics: tuple[bytes, ...]) -> bytes:
    """As the drawing says."""
    return struct.pack(f"<I{len(topics)}I", len(topics), *map(len, topics)) + b"".join(topics)


def unpack_topics(data: bytes) -> tuple[bytes, ...]:
    """The opposite, of bytes whose CRC held."""
    (count,) = struct.unpack_from("<I", data)
    names, at = [], 4 + 4 * count
    for size in struct.unpack_from(f"<{count}I", data, 4):
        names.append(data[at : at + size])
        at += size
    return tuple(names)
