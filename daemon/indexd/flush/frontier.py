"""Frontier, checkpoint and abort flag: what is durable, written down. Recovery believes the frontier and nothing else.

A JSON object, replaced whole by rename after everything it names has been synced::

    {"format": 1, "version": "0.1.0", "store": "/data/store",
     "commitLogPaths": ["/data/store/commitlog"], "segmentSize": 1073741824,
     "flavour": "5.4", "hashSlotNum": 5000000, "indexNum": 20000000,
     "beginOffset": 0, "phyOffset": 81234, "storeTimestamp": 1700000000000, "messages": 1000,
     "newestTimestamp": 1700000000000, "uncovered": [[4096, 8192, "expired"]], "staleHead": null or "00ff...",
     "index": [{"name": "20260101000000000", "full": true, "mtimeNs": 1, "header": [six numbers as in the file]}],
     "consumeQueue": null or {"fileSize": 6000000, "queuesMax": null or 1000, "queues": [[topic and seven numbers]]},
     "sparse": null or {"interval": 4096, ...},
     "refillOffset": null or 4096,
     "evidence": [[phyOffset, size, storeTimestamp, crc, messages before it]],
     "crc32": of the object without this key}

Every message of ``[beginOffset, phyOffset)`` is in the outputs, but for the ranges of ``uncovered``. The messages of an
UNPROVEN or DOUBTED one are there, and only nobody knows whether they are the log's; those of an UNPROVEN one are older
than ``newestTimestamp``, which is 2^63-1 behind a frame that could not be read. ``staleHead``: how the bytes at
``phyOffset`` began when the broker, asked about them, named that offset as its log's end; while they begin so, nothing
there and behind is a message of the log. While the outputs besides the key index are filled after it, they lack some of
``[refillOffset, phyOffset)``. ``evidence`` says what stood in the log then. An index file has ``crc`` as well, the
CRC-32 of its entries and of its slots, each null while it is not known; ``scrubbedAt`` is null or when the last whole
scrub began, ms. Written by the pipeline, read by recovery and by queries.

The checkpoint: RocketMQ's file of 4096 bytes (spec rocketmq-store 6.1).

::

    +0   i64 physicMsgTimestamp     store time, ms, of the newest message that is durably indexed
    +8   i64 logicsMsgTimestamp     the same once the ConsumeQueues hold it, 0 while they are not built that far
    +16  i64 indexMsgTimestamp      end time of the newest FULL index file that is durable, as RocketMQ sets it
    +24  i64 masterFlushedOffset    0: replication is the broker's
    +32  i64 confirmPhyOffset       the physical offset up to which everything is durable
    +40  zeros

Written by the pipeline alone, whole, by rename: a crash leaves the old or the new one.

The abort flag: there while the daemon runs, gone after a clean stop (spec rocketmq-store 6.2).

It holds the pid in ASCII without a newline, as RocketMQ's does since 5.0.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

from indexd.commitlog.lookup import Evidence
from indexd.consumequeue.format import QueueMark, QueuesMark
from indexd.errors import CorruptDataError, UnsafeStoreError
from indexd.index.format import FileMark, IndexLayout, files_from_json, files_to_json
from indexd.sparse.format import SparseMark
from indexd.storage.disk import Disk

FORMAT = 1
#: Why messages that are in the outputs may have been removed from the log.
UNPROVEN = "older than a message before them: the clock went back, or they were removed; no broker has answered yet"
#: The same of messages behind one that stood there and cannot be read any more.
DOUBTED = "behind bytes that are no frame any more: damaged, or the log was cut there; no broker has answered yet"
# More ranges than this are merged into one, the two nearest first: the file must not grow without a bound.
UNCOVERED_MAX = 1000


@dataclass(frozen=True, slots=True)
class Uncovered:
    """Log bytes ``[begin, end)`` whose messages are in no output, and why; or of which nobody knows whether they are.

    Of the latter, ``is_unproven``, the messages are in the outputs, and may have been removed from the log.
    """

    begin: int
    end: int
    reason: str

    @property
    def is_unproven(self) -> bool:
        """See the class."""
        return self.reason in (UNPROVEN, DOUBTED)


#: What each output's part of the frontier is made of: to JSON, and from it.
CODECS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "index": (files_to_json, files_from_json),
    "consumeQueue": (QueuesMark.to_json, QueuesMark.from_json),
    "sparse": (SparseMark.to_json, SparseMark.from_json),
}


@dataclass(frozen=True, slots=True)
class Frontier:
    """See the module; offsets in bytes, times in ms. ``outputs``: what is durable of each, by its name."""

    store: str
    commit_log_paths: tuple[str, ...]
    segment_size: int
    flavour: str
    layout: IndexLayout
    begin_offset: int = 0
    phy_offset: int = 0
    store_timestamp: int = 0
    messages: int = 0
    uncovered: tuple[Uncovered, ...] = ()
    outputs: Mapping[str, Any] = field(default_factory=lambda: {"index": ()})
    refill_offset: int | None = None
    #: When the last scrub that went through everything began, ms.
    scrubbed_at: int | None = None
    evidence: tuple[Evidence, ...] = ()
    #: None: as ``store_timestamp``.
    newest_timestamp: int | None = None
    #: What no message of the log is, at ``phy_offset``; None: nothing is known of what stands there.
    stale_head: bytes | None = None

    def with_outputs(self, **outputs: Any) -> Frontier:
        """The same with these parts changed; None for one that is not built."""
        parts = {**self.outputs, **outputs}
        return replace(self, outputs={name: part for name, part in parts.items() if part is not None})

    @property
    def index(self) -> tuple[FileMark, ...]:
        """The index files, oldest first."""
        return tuple(self.outputs.get("index", ()))

    @property
    def queues(self) -> tuple[QueueMark, ...] | None:
        """The ConsumeQueues; None where they are not built."""
        return None if self.queues_mark is None else self.queues_mark.queues

    @property
    def queues_mark(self) -> QueuesMark | None:
        """The ConsumeQueues with the size of their files; None where they are not built."""
        return self.outputs.get("consumeQueue")

    @property
    def sparse(self) -> SparseMark | None:
        """The sparse indexes; None where they are not built."""
        return self.outputs.get("sparse")

    @property
    def left_out(self) -> tuple[Uncovered, ...]:
        """The ranges of ``uncovered`` whose messages are in no output."""
        return tuple(gap for gap in self.uncovered if not gap.is_unproven)

    @property
    def unproven_from(self) -> int | None:
        """Where messages begin that may have been removed from the log; None without any."""
        return next((gap.begin for gap in self.uncovered if gap.is_unproven), None)

    @property
    def filled_offset(self) -> int:
        """All outputs hold every message before this physical offset."""
        return self.phy_offset if self.refill_offset is None else self.refill_offset

    def to_json(self, version: str) -> dict[str, Any]:
        """The object of the module's drawing."""
        parts = {
            name: None if self.outputs.get(name) is None else encode(self.outputs[name])
            for name, (encode, _) in CODECS.items()
        }
        return {
            "format": FORMAT,
            "version": version,
            "store": self.store,
            "commitLogPaths": list(self.commit_log_paths),
            "segmentSize": self.segment_size,
            "flavour": self.flavour,
            "hashSlotNum": self.layout.hash_slot_num,
            "indexNum": self.layout.index_num,
            "beginOffset": self.begin_offset,
            "phyOffset": self.phy_offset,
            "storeTimestamp": self.store_timestamp,
            "messages": self.messages,
            "newestTimestamp": self.newest_timestamp,
            "staleHead": None if self.stale_head is None else self.stale_head.hex(),
            "uncovered": [[gap.begin, gap.end, gap.reason] for gap in self.uncovered],
            **parts,
            "refillOffset": self.refill_offset,
            "scrubbedAt": self.scrubbed_at,
            "evidence": [list(astuple(point)) for point in self.evidence],
        }

    @classmethod
    def from_json(cls, data: Any, path: Path) -> Frontier:
        """The opposite; CorruptDataError for what ``to_json`` does not make, UnsafeStoreError for a newer format."""
        try:
            if data["format"] > FORMAT:
                raise UnsafeStoreError(
                    f"{path} is of format {data['format']}, written by indexd {data['version']}, not {FORMAT}",
                    "run that version or a newer one, or use a fresh --data",
                )
            return cls(
                store=str(data["store"]),
                commit_log_paths=tuple(str(path) for path in data["commitLogPaths"]),
                segment_size=int(data["segmentSize"]),
                flavour=str(data["flavour"]),
                layout=IndexLayout(int(data["hashSlotNum"]), int(data["indexNum"])),
                begin_offset=int(data["beginOffset"]),
                phy_offset=int(data["phyOffset"]),
                store_timestamp=int(data["storeTimestamp"]),
                messages=int(data["messages"]),
                newest_timestamp=_optional(data.get("newestTimestamp")),
                stale_head=None if data.get("staleHead") is None else bytes.fromhex(data["staleHead"]),
                uncovered=tuple(Uncovered(int(b), int(e), str(why)) for b, e, why in data["uncovered"]),
                outputs={
                    name: decode(data[name])
                    for name, (_, decode) in CODECS.items()
                    if name == "index" or data.get(name)
                },
                refill_offset=_optional(data.get("refillOffset")),
                evidence=tuple(Evidence(*(int(v) for v in row)) for row in data.get("evidence", ())),
                scrubbed_at=_optional(data.get("scrubbedAt")),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CorruptDataError(f"{path} is no frontier: {error!r}") from error


def read_frontier(disk: Disk, path: Path) -> Frontier | None:
    """The frontier of a data directory, or None if it has none yet."""
    if not disk.exists(path):
        return None
    try:
        data = json.loads(disk.read(path))
    except (ValueError, RecursionError) as error:
        raise CorruptDataError(f"{path} is not JSON: {error}") from error
    if isinstance(data, dict) and data.pop("crc32", None) not in (None, _checksum(data)):
        raise CorruptDataError(f"{path} is damaged: its checksum does not hold")
    return Frontier.from_json(data, path)


def write_frontier(disk: Disk, path: Path, frontier: Frontier, version: str) -> None:
    """Replace the file durably; what it names must have been synced before."""
    row = frontier.to_json(version)
    disk.write_atomically(path, json.dumps(row | {"crc32": _checksum(row)}).encode() + b"\n")


def _checksum(row: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(row).encode())


def _optional(value: Any) -> int | None:
    return None if value is None else int(value)


def add_uncovered(gaps: tuple[Uncovered, ...], gap: Uncovered) -> tuple[Uncovered, ...]:
    """``gaps`` and ``gap``, merged where they touch, at most UNCOVERED_MAX."""
    if gap.begin >= gap.end:
        return gaps
    if gaps and gaps[-1].end >= gap.begin and gaps[-1].reason == gap.reason:
        return (*gaps[:-1], Uncovered(gaps[-1].begin, max(gaps[-1].end, gap.end), gap.reason))
    merged = (*gaps, gap)
    if len(merged) > UNCOVERED_MAX:
        first, second, *rest = merged
        merged = (Uncovered(first.begin, second.end, "several ranges"), *rest)
    return merged


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

    @classmethod
    def of(cls, frontier: Frontier) -> StoreCheckpoint:
        """What belongs to a frontier."""
        full = [mark for mark in frontier.index if mark.full]
        has_queues = frontier.queues is not None and frontier.filled_offset == frontier.phy_offset
        return cls(
            physic_msg_timestamp=frontier.store_timestamp,
            logics_msg_timestamp=frontier.store_timestamp if has_queues else 0,
            index_msg_timestamp=full[-1].header.end_timestamp if full else 0,
            confirm_phy_offset=frontier.phy_offset,
        )

    def pack(self) -> bytes:
        """The 4096 bytes."""
        return _FIELDS.pack(*astuple(self)).ljust(CHECKPOINT_SIZE, b"\0")

    @classmethod
    def unpack(cls, data: bytes, path: Path) -> StoreCheckpoint:
        """Read a broker's checkpoint or ours; raises CorruptDataError if it is too short."""
        if len(data) < _FIELDS.size:
            raise CorruptDataError(f"checkpoint {path} has {len(data)} bytes, not {CHECKPOINT_SIZE}")
        return cls(*_FIELDS.unpack_from(data))


def write_abort(disk: Disk, path: Path) -> None:
    """From here on a stop is unclean until ``remove_abort``."""
    disk.write_atomically(path, str(os.getpid()).encode("ascii"))


def remove_abort(disk: Disk, path: Path) -> None:
    """Everything is durable: the stop is clean."""
    disk.unlink(path)
    disk.sync_dir(path.parent)
