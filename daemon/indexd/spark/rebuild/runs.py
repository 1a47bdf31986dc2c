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
import uuid
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from indexd.commitlog.batcher import AT_FIRST, NEVER, DispatchBatch, TailState, TopicTable, tail_state
from indexd.commitlog.decoder import decode_utf8
from indexd.commitlog.format import Corrupt
from indexd.commitlog.kernel import Columns
from indexd.commitlog.lookup import Evidence
from indexd.commitlog.reader import Skipped
from indexd.commitlog.segments import list_segments
from indexd.config import Config
from indexd.errors import CorruptDataError, DiskError
from indexd.flush.pipeline import LogChangeDetector
from indexd.index.format import FLAVOURS
from indexd.spark.source.columns import numbers
from indexd.spark.splits import Split, SplitReader
from indexd.storage.disk import Disk
from indexd.storage.remote import disk_for

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


@dataclass(slots=True)
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
    messages: int = 0
    entries: int = 0
    #: The last message has an entry.
    ends_with_entry: bool = False
    #: Of the last message, ms; 0 if there is none.
    store_timestamp: int = 0
    #: Where the first message begins, None without one; of the last, ms; what all of them by themselves come to.
    first_offset: int | None = None
    last_timestamp: int = NEVER
    stand: TailState = AT_FIRST
    ends_log: bool = False
    skipped: list[Skipped] = field(default_factory=list)
    unreadable: Corrupt | None = None
    evidence: tuple[Evidence, ...] = ()
    chunks: list[tuple[int, int, int]] = field(default_factory=list)


def write_run(config: Config, directory: Path, split: Split) -> Run | CorruptDataError:
    """The run of a split, written below ``directory`` under a name that no other attempt has.

    A split that is corrupt is an error only if the log does not turn out to end before it: so that is returned. Raises
    what else reading the log does, and DiskError.
    """
    disk, store, tables = disk_for(config), config.store, list[TopicTable]()
    run = Run(split, directory / f"{split.begin:020d}-{split.end:020d}.{uuid.uuid4().hex[:12]}")
    Disk().make_dir(run.path, durable=False)
    detector = LogChangeDetector(disk, lambda: list_segments(disk, store.commit_log_directories, store.segment_size))
    reader, files = SplitReader(disk, config, split), dict[str, pa.ipc.RecordBatchFileWriter]()
    try:
        for item in reader:
            if isinstance(item, Skipped):
                run.skipped.append(item)
                run.phy_offset = item.end
            elif item.rows:
                if item.topics not in tables:
                    tables.append(item.topics)
                for name, columns in _columns_of(run, item, config, tables.index(item.topics)).items():
                    batch = pa.RecordBatch.from_arrays(list(columns.values()), list(columns))
                    if name not in files:
                        files[name] = pa.ipc.new_file(str(run.path / name), batch.schema)
                    files[name].write_batch(batch)
                detector.saw(item, run.messages)
        for file in files.values():
            file.close()
        (run.path / "topics").write_bytes(pickle.dumps(tables))
    except CorruptDataError as error:
        return error
    except OSError as error:  # of Arrow's own writing
        raise DiskError("write", run.path, error) from error
    run.next_offset, run.ends_log, run.unreadable = reader.next_offset, reader.ends_log, reader.unreadable
    run.evidence = detector.points()
    return run


def _columns_of(run: Run, batch: DispatchBatch, config: Config, table: int) -> dict[str, dict[str, pa.Array]]:
    # Of each file, what a batch of messages adds to it; counts the batch in the run.
    rows, columns = batch.rows, batch.columns
    counts, hashes = np.diff(columns.key_start[: rows + 1]), columns.key_hash[: batch.keys]
    # Messages that the flavour leaves out have no entries.
    is_skipped = (FLAVOURS[config.index.flavour].skip_mask >> (columns.sys_flag[:rows] & 0xC) & 1).astype(np.bool_)
    counts, hashes = np.where(is_skipped, 0, counts), hashes[~np.repeat(is_skipped, counts)]
    if run.first_offset is None:
        run.first_offset = batch.begin_offset
    found = tail_state(columns.store_timestamp[:rows], columns.phy_offset[:rows])
    run.stand = run.stand.after(batch.begin_offset, found)
    run.last_timestamp = batch.last_store_timestamp
    run.store_timestamp = batch.last_store_timestamp or run.store_timestamp
    run.phy_offset = batch.end_offset
    run.messages += rows
    run.entries += len(hashes)
    run.ends_with_entry = bool(counts[-1])
    run.chunks.append((batch.end_offset, len(hashes), table))
    starts = numbers(np.append(0, np.cumsum(counts)).astype(np.int32))
    used = {name: one[:rows] for name, one in columns._asdict().items() if len(one) >= rows}
    # The size is read where an output other than the key index asks for it.
    log = {name: numbers(used[name]) for name in _LOG if name in used}
    files = {"log": log | {"key_hash": pa.ListArray.from_arrays(starts, numbers(hashes))}}
    if "queue_id" in used:
        used["group"] = _groups_of(batch)
        order = np.argsort(used["group"], kind="stable")
        files["queues"] = {name: numbers(used[name][order]) for name in ("group", *_QUEUES)}
    return files


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
