"""Runs: what stage one of a rebuild makes of a split, written by one task and read by those of stage two.

A run is a directory with three files:

    log       Arrow IPC: a batch of the reader's a batch, what index files and sparse indexes are built from, and of
              each row the key hashes of its index entries: none for messages that the flavour leaves out
    queues    the same batches with what ConsumeQueues are built from, if they are: sorted by the group of the queue
    topics    pickled: the tables of topics that the batches name

A task reads the part that it needs, a batch at a time, from a memory map: so memory does not grow with the log.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from indexd.commitlog.batcher import DispatchBatch, TopicTable
from indexd.commitlog.decoder import decode_utf8
from indexd.commitlog.format import Corrupt
from indexd.commitlog.kernel import Columns
from indexd.commitlog.lookup import Evidence
from indexd.commitlog.reader import Skipped
from indexd.commitlog.tail import AT_FIRST, NEVER, Stand, stand_of
from indexd.spark.source.columns import numbers
from indexd.spark.splits import Split, SplitReader

_TYPES = {
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
_LOG = "phy_offset", "size", "store_timestamp", "sys_flag"
_QUEUES = "phy_offset", "size", "sys_flag", "queue_offset", "queue_id", "topic_id", "tags_code"
#: A queue is of one of so many groups, by a hash of its topic and id.
GROUPS = 64
_HASH_FACTOR, _HASH_SHIFT = np.uint64(0x9E3779B97F4A7C15), np.uint64(64 - 6)


@dataclass(frozen=True, slots=True)
class Run:
    """What stage one says of a split; ``path``: the directory that holds its messages.

    ``chunks``: of each batch, where it ends, its index entries, and the number of its table of topics.
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
    chunks: tuple[tuple[int, int, int], ...] = ()

    def slim(self) -> Run:
        """Without what only the driver needs: what is sent to every task of stage two."""
        return replace(self, evidence=(), skipped=())


class RunWriter:
    """Writes a run into the directory ``path``, which is there and empty. Raises OSError; one owner, no locks.

    ``skip_mask``: transaction types that get no index entries (Flavour).
    """

    def __init__(self, path: Path, split: Split, *, skip_mask: int = 0) -> None:
        self._run = Run(split, path)
        self._skip_mask = skip_mask
        self._files: dict[str, pa.ipc.RecordBatchFileWriter] = {}
        self._chunks: list[tuple[int, int, int]] = []
        self._skipped: list[Skipped] = []
        self._tables: list[TopicTable] = []

    def put(self, item: DispatchBatch | Skipped) -> None:
        """Take the next stretch of the split."""
        if isinstance(item, Skipped):
            self._skipped.append(item)
            self._run = replace(self._run, phy_offset=item.end)
            return
        if not item.rows:
            return
        rows, columns, run = item.rows, item.columns, self._run
        counts, hashes = self._keys_of(item)
        found = stand_of(columns.store_timestamp[:rows], columns.phy_offset[:rows])
        self._run = replace(
            run,
            first_offset=item.begin_offset if run.first_offset is None else run.first_offset,
            last_timestamp=item.last_store_timestamp,
            stand=run.stand.after(item.begin_offset, found),
            phy_offset=item.end_offset,
            batch_end=item.end_offset,
            messages=run.messages + rows,
            entries=run.entries + len(hashes),
            ends_with_entry=bool(counts[-1]),
            store_timestamp=item.last_store_timestamp or run.store_timestamp,
        )
        starts = numbers(np.append(0, np.cumsum(counts)).astype(np.int32))
        used = {name: one[:rows] for name, one in columns._asdict().items() if len(one) >= rows}
        # The size is read where an output other than the key index asks for it.
        arrays = {name: numbers(used[name]) for name in _LOG if name in used}
        self._write("log", arrays | {"key_hash": pa.ListArray.from_arrays(starts, numbers(hashes))})
        if "queue_id" in used:
            used["group"] = _groups_of(item)
            order = np.argsort(used["group"], kind="stable")
            self._write("queues", {name: numbers(used[name][order]) for name in ("group", *_QUEUES)})
        if item.topics not in self._tables:
            self._tables.append(item.topics)
        self._chunks.append((item.end_offset, len(hashes), self._tables.index(item.topics)))

    def close(self, reader: SplitReader, evidence: Sequence[Evidence] = ()) -> Run:
        """Say what the split came to. ``reader`` has been read to its end."""
        for file in self._files.values():
            file.close()
        (self._run.path / "topics").write_bytes(pickle.dumps(self._tables))
        return replace(
            self._run,
            next_offset=reader.next_offset,
            ends_log=reader.ends_log,
            unreadable=reader.unreadable,
            skipped=tuple(self._skipped),
            evidence=tuple(evidence),
            chunks=tuple(self._chunks),
        )

    def _write(self, name: str, arrays: dict[str, pa.Array]) -> None:
        batch = pa.RecordBatch.from_arrays(list(arrays.values()), list(arrays))
        if name not in self._files:
            self._files[name] = pa.ipc.new_file(str(self._run.path / name), batch.schema)
        self._files[name].write_batch(batch)

    def _keys_of(self, batch: DispatchBatch) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        # How many of each row, and their hashes: none of messages that the flavour leaves out.
        columns, rows = batch.columns, batch.rows
        counts, hashes = np.diff(columns.key_start[: rows + 1]), columns.key_hash[: batch.keys]
        is_skipped = (self._skip_mask >> (columns.sys_flag[:rows] & 0xC) & 1).astype(np.bool_)
        return np.where(is_skipped, 0, counts), hashes[~np.repeat(is_skipped, counts)]


def _groups_of(batch: DispatchBatch) -> NDArray[np.uint8]:
    # Of each row. Two names in the log may be one: bytes that are no UTF-8 read as replacement characters.
    topics, which = np.unique(batch.columns.topic_id[: batch.rows], return_inverse=True)
    names = [zlib.crc32(decode_utf8(batch.topics.raw_name(topic)).encode()) for topic in topics.tolist()]
    queues = np.array(names, dtype=np.uint64)[which] << np.uint64(32)
    queues |= batch.columns.queue_id[: batch.rows].view(np.uint32)
    return (queues * _HASH_FACTOR >> _HASH_SHIFT).astype(np.uint8)


def batches_of(run: Run, chunk: int | None = None, groups: range | None = None) -> Iterator[DispatchBatch]:
    """All messages in log order, or those of one chunk, in the reader's batches.

    They have the columns that index files and sparse indexes are built from; or, of queues of these groups, theirs.
    """
    tables = pickle.loads((run.path / "topics").read_bytes())
    if not run.chunks:
        return
    file = pa.ipc.open_file(pa.memory_map(str(run.path / ("log" if groups is None else "queues"))))
    for number in range(len(run.chunks)) if chunk is None else (chunk,):
        batch = file.get_batch(number)
        if groups is not None:
            first, last = np.searchsorted(batch["group"].to_numpy(), [groups.start, groups.stop]).tolist()
            part = batch.slice(first, last - first)
            batch = part.take(numbers(np.argsort(part["phy_offset"].to_numpy())))
        columns: dict[str, Any] = dict(zip(batch.schema.names, batch.columns, strict=True))
        if "key_hash" in columns:
            keys = columns["key_hash"]
            columns |= {"key_start": keys.offsets, "key_hash": keys.values}
        # They are copied out of the map.
        filled = {name: np.array(columns.get(name, ()), dtype=kind) for name, kind in _TYPES.items()}
        end, _, table = run.chunks[number]
        if len(batch):
            yield DispatchBatch(Columns(**filled), len(batch), int(filled["phy_offset"][0]), end, tables[table])


def index_batches(run: Run, first: int, last: int) -> Iterator[tuple[DispatchBatch, int, int]]:
    """The messages of the index entries ``[first, last)`` of the run, and where to begin: (batch, row, key).

    ``row`` and ``key`` are put_batch's. A batch may go on behind ``last``, and have messages without entries.
    """
    begin = 0
    for number, (_, entries, _) in enumerate(run.chunks):
        if begin < last and begin + entries > first:
            (batch,) = batches_of(run, number)
            key = max(first - begin, 0)
            row = int(np.searchsorted(batch.columns.key_start, key, side="right")) - 1
            yield batch, row, key
        begin += entries


def entry_of(run: Run, number: int) -> tuple[int, int]:
    """(physical offset, store timestamp) of the message of an index entry of the run."""
    batch, row, _ = next(index_batches(run, number, number + 1))
    return int(batch.columns.phy_offset[row]), int(batch.columns.store_timestamp[row])
