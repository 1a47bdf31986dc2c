"""Runs: what stage one of a rebuild makes of a split, written by one task and read by those of stage two.

A run is a directory with two Arrow IPC files and the names of its topics:

    log       a batch a chunk of some 131072 messages in log order: LOG, with the key hashes of its index entries, none
              for messages that the flavour leaves out
    units     the same messages once more for the ConsumeQueues: UNITS, sorted by bucket, those of one in log order;
              of prepared and rolled back messages there is none
    topics    JSON: the names, a character a byte

A task reads the part that it needs, a chunk at a time, from memory maps: so memory does not grow with the log.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from indexd.commitlog.batcher import DispatchBatch, TopicTable
from indexd.commitlog.decoder import decode_utf8
from indexd.commitlog.evidence import Evidence
from indexd.commitlog.format import Corrupt
from indexd.commitlog.kernel import Columns
from indexd.commitlog.reader import Skipped
from indexd.commitlog.tail import AT_FIRST, NEVER, Stand, stand_of
from indexd.consumequeue.format import FLAG_INNER_BATCH, OFFSET_MAX
from indexd.spark.source.columns import numbers
from indexd.spark.splits import Split, SplitReader

LOG = pa.schema(
    {"phy_offset": pa.int64(), "size": pa.int32(), "store_timestamp": pa.int64(), "key_hash": pa.list_(pa.uint32())}
)
UNITS = pa.schema(
    {
        "bucket": pa.uint8(),
        "phy_offset": pa.int64(),
        "size": pa.int32(),
        "queue_offset": pa.int64(),
        "tags_code": pa.int64(),
        "queue_id": pa.int32(),
        "topic_id": pa.int32(),
        "sys_flag": pa.int32(),
    }
)
# Rows that are collected before they are written, and keys: some 10 MiB.
ROWS_PER_CHUNK = 1 << 17
_KEYS_PER_CHUNK = 4 * ROWS_PER_CHUNK
#: A bucket is a number below this that a queue's name and id hash into.
BUCKETS = 32
_HASH_FACTOR = 0x9E3779B97F4A7C15
_HASH_SHIFT = 64 - 5
_TRANSACTION, _PREPARED, _ROLLBACK = 0xC, 0x4, 0xC
_COLUMNS = {
    "phy_offset": np.int64,
    "size": np.int32,
    "store_timestamp": np.int64,
    "queue_offset": np.int64,
    "batch_size": np.int32,
    "queue_id": np.int32,
    "topic_id": np.int32,
    "tags_code": np.int64,
    "sys_flag": np.int32,
    "key_start": np.int64,
    "key_hash": np.uint32,
}


class QueueSeen(NamedTuple):
    """A queue and where its first message in a run stands; a message that could begin a queue."""

    topic: bytes
    queue_id: int
    phy_offset: int


@dataclass(frozen=True, slots=True)
class Run:
    """What stage one says of a split; ``path``: the directory that holds its messages.

    ``chunks``: of each, where the reader's last batch in it ends, and its index entries. ``units`` of each bucket.
    """

    split: Split
    path: Path
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
    chunks: tuple[tuple[int, int], ...] = ()
    units: tuple[int, ...] = field(default=(0,) * BUCKETS)
    #: The queues that a message of the run could begin, in the order of those messages.
    queues: tuple[QueueSeen, ...] = ()

    def slim(self) -> Run:
        """Without what only the driver needs: what is sent to every task of stage two."""
        return replace(self, evidence=(), units=(), queues=(), skipped=())


def bucket_of(topic: bytes, queue_id: int) -> int:
    """The bucket of a queue; names that a Java reader takes for one are one."""
    name = zlib.crc32(decode_utf8(topic).encode("utf-8", "surrogatepass"))
    return ((name << 32 | (queue_id & 0xFFFFFFFF)) * _HASH_FACTOR & (1 << 64) - 1) >> _HASH_SHIFT


class RunWriter:
    """Writes a run into the directory ``path``, which is there and empty. Raises OSError; one owner, no locks.

    ``skip_mask``: transaction types that get no index entries (Flavour). ``with_units``: for ConsumeQueues, too.
    """

    def __init__(self, path: Path, split: Split, *, skip_mask: int = 0, with_units: bool = True) -> None:
        self._run = Run(split, path)
        self._skip_mask = skip_mask
        self._log = pa.ipc.new_file(str(path / "log"), LOG)
        self._units = pa.ipc.new_file(str(path / "units"), UNITS) if with_units else None
        self._batches: list[DispatchBatch] = []
        self._rows = self._keys = 0
        self._chunks: list[tuple[int, int]] = []
        self._skipped: list[Skipped] = []
        self._topic_ids: dict[bytes, int] = {}
        # Of the reader's present table of topics: its ids -> ours.
        self._table: TopicTable | None = None
        self._ours: NDArray[np.int32] = np.zeros(0, dtype=np.int32)
        # Of (topic id, queue id) as one number: its bucket; and those that a message was seen to begin, in order.
        self._bucket_of: dict[int, int] = {}
        self._begun: dict[int, QueueSeen] = {}
        self._counts = np.zeros(BUCKETS, dtype=np.int64)

    def put(self, item: DispatchBatch | Skipped) -> None:
        """Take the next stretch of the split."""
        if isinstance(item, Skipped):
            self._skipped.append(item)
            self._run = replace(self._run, phy_offset=item.end)
            return
        if not item.rows:
            return
        rows, columns, first = item.rows, item.columns, self._run.first_offset
        found = stand_of(columns.store_timestamp[:rows], columns.phy_offset[:rows])
        self._run = replace(
            self._run,
            first_offset=item.begin_offset if first is None else first,
            last_timestamp=item.last_store_timestamp,
            stand=self._run.stand.after(item.begin_offset, found),
            phy_offset=item.end_offset,
            batch_end=item.end_offset,
            messages=self._run.messages + item.rows,
            store_timestamp=item.last_store_timestamp or self._run.store_timestamp,
        )
        self._batches.append(item)
        self._rows += item.rows
        self._keys += item.keys
        if self._rows >= ROWS_PER_CHUNK or self._keys >= _KEYS_PER_CHUNK:
            self._write_chunk()

    def close(self, reader: SplitReader, evidence: Sequence[Evidence] = ()) -> Run:
        """Write what is left, and say what the split came to. ``reader`` has been read to its end."""
        self._write_chunk()
        self._log.close()
        if self._units is not None:
            self._units.close()
        (self._run.path / "topics").write_text(json.dumps([topic.decode("latin-1") for topic in self._topic_ids]))
        return replace(
            self._run,
            next_offset=reader.next_offset,
            entries=sum(entries for _, entries in self._chunks),
            ends_log=reader.ends_log,
            unreadable=reader.unreadable,
            skipped=tuple(self._skipped),
            evidence=tuple(evidence),
            chunks=tuple(self._chunks),
            units=tuple(self._counts.tolist()),
            queues=tuple(self._begun.values()),
        )

    def _write_chunk(self) -> None:
        if not self._batches:
            return
        phy_offsets, times, sizes = (self._joined(name) for name in ("phy_offset", "store_timestamp", "size"))
        # Sizes are read where ConsumeQueues or sparse indexes are built.
        has_sizes = len(sizes) == len(phy_offsets)
        sizes = sizes if has_sizes else np.zeros(len(phy_offsets), dtype=np.int32)
        counts, hashes = self._keys_of_rows()
        starts = np.zeros(len(counts) + 1, dtype=np.int32)
        np.cumsum(counts, out=starts[1:])
        keys = pa.ListArray.from_arrays(numbers(starts), numbers(hashes))
        columns = [numbers(phy_offsets), numbers(sizes), numbers(times), keys]
        self._log.write_batch(pa.RecordBatch.from_arrays(columns, schema=LOG))
        if self._units is not None and has_sizes:
            self._units.write_batch(self._units_of({"phy_offset": phy_offsets, "size": sizes}))
        self._chunks.append((self._batches[-1].end_offset, len(hashes)))
        self._run = replace(self._run, ends_with_entry=bool(counts[-1]))
        self._batches.clear()
        self._rows = self._keys = 0

    def _joined(self, name: str) -> NDArray[Any]:
        return np.concatenate([getattr(batch.columns, name)[: batch.rows] for batch in self._batches])

    def _keys_of_rows(self) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        # Messages that the flavour leaves out have no keys here.
        counts = np.concatenate([np.diff(batch.columns.key_start[: batch.rows + 1]) for batch in self._batches])
        hashes = np.concatenate([batch.columns.key_hash[: batch.keys] for batch in self._batches])
        is_skipped = (self._skip_mask >> (self._joined("sys_flag") & 0xC) & 1).astype(np.bool_)
        if is_skipped.any():
            hashes = hashes[~np.repeat(is_skipped, counts)]
            counts[is_skipped] = 0
        return counts, hashes

    def _own_topic_ids(self, batch: DispatchBatch) -> NDArray[np.int32]:
        if batch.topics is not self._table:
            self._table, self._ours = batch.topics, np.zeros(0, dtype=np.int32)
        theirs = batch.columns.topic_id[: batch.rows]
        new = [batch.topics.raw_name(at) for at in range(len(self._ours), int(theirs.max(initial=-1)) + 1)]
        if new:
            added = [self._topic_ids.setdefault(name, len(self._topic_ids)) for name in new]
            self._ours = np.array([*self._ours.tolist(), *added], dtype=np.int32)
        return self._ours[theirs]

    def _units_of(self, columns: dict[str, NDArray[Any]]) -> pa.RecordBatch:
        # The rows sorted by bucket, those of one in log order; notes the new queues.
        columns |= {name: self._joined(name) for name in ("queue_offset", "tags_code", "queue_id", "sys_flag")}
        columns["topic_id"] = np.concatenate([self._own_topic_ids(batch) for batch in self._batches])
        flags, offsets = columns["sys_flag"], columns["queue_offset"]
        names = columns["topic_id"].astype(np.int64) << 32 | columns["queue_id"].view(np.uint32)
        encoded, topics = numbers(names).dictionary_encode(), list(self._topic_ids)
        codes, queues = encoded.indices.to_numpy(), encoded.dictionary.to_numpy().tolist()
        enters = (flags & _TRANSACTION != _PREPARED) & (flags & _TRANSACTION != _ROLLBACK)
        begins = np.flatnonzero(enters & (flags & FLAG_INNER_BATCH == 0) & (offsets >= 0) & (offsets <= OFFSET_MAX))
        first = np.full(len(queues), len(flags), dtype=np.int64)
        first[codes[begins[::-1]]] = begins[::-1]  # of several the last one stays, which is the first row
        for code in np.argsort(first).tolist():
            queue, row = queues[code], int(first[code])
            if row < len(flags) and queue not in self._begun:
                phy_offset, queue_id = int(columns["phy_offset"][row]), int(columns["queue_id"][row])
                self._begun[queue] = QueueSeen(topics[queue >> 32], queue_id, phy_offset)
            if queue not in self._bucket_of:
                self._bucket_of[queue] = bucket_of(topics[queue >> 32], queue)
        buckets = np.array([self._bucket_of[queue] for queue in queues], dtype=np.uint8)[codes]
        buckets[~enters] = BUCKETS
        columns["bucket"] = buckets
        counts = np.bincount(buckets, minlength=BUCKETS + 1)[:BUCKETS]
        self._counts += counts
        order = np.argsort(buckets, kind="stable")[: int(counts.sum())]
        kept = [numbers(columns[one.name][order].astype(one.type.to_pandas_dtype(), copy=False)) for one in UNITS]
        return pa.RecordBatch.from_arrays(kept, schema=UNITS)


def index_batches(run: Run, first: int, last: int) -> Iterator[tuple[DispatchBatch, int, int]]:
    """The messages of the index entries ``[first, last)`` of the run, and where to begin: (batch, row, key).

    ``row`` and ``key`` are put_batch's. A batch may go on behind ``last``, and have messages without entries.
    """
    begin = 0
    for number, (_, entries) in enumerate(run.chunks):
        if begin < last and begin + entries > first:
            (batch,) = log_batches(run, number)
            key = max(first - begin, 0)
            row = int(np.searchsorted(batch.columns.key_start, key, side="right")) - 1
            yield batch, row, key
        begin += entries


def entry_of(run: Run, number: int) -> tuple[int, int]:
    """(physical offset, store timestamp) of the message of an index entry of the run."""
    batch, row, _ = next(index_batches(run, number, number + 1))
    return int(batch.columns.phy_offset[row]), int(batch.columns.store_timestamp[row])


def log_batches(run: Run, chunk: int | None = None) -> Iterator[DispatchBatch]:
    """All messages in log order, or those of one chunk, with the columns that index files and sparse indexes need.

    Batches end where those of the reader did.
    """
    file = pa.ipc.open_file(pa.memory_map(str(run.path / "log")))
    for number in range(len(run.chunks)) if chunk is None else (chunk,):
        batch = file.get_batch(number)
        keys = batch["key_hash"]
        columns = {name: batch[name].to_numpy() for name in ("phy_offset", "size", "store_timestamp")}
        columns |= {"key_start": keys.offsets.to_numpy(), "key_hash": keys.values.to_numpy()}
        columns["sys_flag"] = np.zeros(len(batch), dtype=np.int32)
        yield _batch(columns, run.chunks[number][0], TopicTable(1, 1))


def queue_batches(run: Run, bucket: int) -> Iterator[DispatchBatch]:
    """The messages of one bucket in log order, with the columns that ConsumeQueues are built from."""
    file = pa.ipc.open_file(pa.memory_map(str(run.path / "units")))
    topics = _topic_table([name.encode("latin-1") for name in json.loads((run.path / "topics").read_text())])
    for number in range(file.num_record_batches):
        batch = file.get_batch(number)
        begin, end = np.searchsorted(batch["bucket"].to_numpy(), [bucket, bucket + 1]).tolist()
        if begin < end:
            columns = {name: batch[name].to_numpy()[begin:end] for name in UNITS.names[1:]}
            yield _batch(columns, int(columns["phy_offset"][-1]) + int(columns["size"][-1]), topics)


def _batch(columns: dict[str, NDArray[Any]], end: int, topics: TopicTable) -> DispatchBatch:
    # Columns that a builder does not ask for are empty; the others are copied out of the map.
    filled = {name: np.array(columns.get(name, ()), dtype=kind) for name, kind in _COLUMNS.items()}
    return DispatchBatch(Columns(**filled), len(filled["phy_offset"]), int(filled["phy_offset"][0]), end, topics)


def _topic_table(topics: Sequence[bytes]) -> TopicTable:
    # Names by id; nobody looks an id up by name.
    table = TopicTable(max(len(topics), 1), max(sum(map(len, topics)), 1))
    table.arrays.start[1 : len(topics) + 1] = np.cumsum([len(name) for name in topics])
    table.arrays.data[: table.arrays.start[len(topics)]] = np.frombuffer(b"".join(topics), dtype=np.uint8)
    table.arrays.known[0] = len(topics)
    return table
