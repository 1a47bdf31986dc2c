"""Arrow arrays around numpy's memory: without ``pyarrow.array``, which loads pandas to ask whether it was given that.

A second less for each worker that starts, and twenty megabytes of its memory.

The columns of a message as Spark, Parquet and every other reader of Arrow see them: the schema, and its version.

======================== ========================= ==================================================================
phyOffset                int64                     physical offset: where the frame begins in the log
size                     int32                     bytes of the whole frame
topic                    string
queueId, queueOffset     int32, int64              an inner batch's queue offset is its INNER_BASE
storeTimestamp           int64                     ms since the epoch, as stored: no clock is corrected, no zone applied
bornTimestamp            int64                     the same, by the producer's clock
bornHost, storeHost      string                    ``address:port``; IPv6 as ``[address]:port``
sysFlag                  int32                     all bits (spec rocketmq-store 2.2)
transactionType          string                    bits 2 and 3 of it: ``none``, ``prepared``, ``commit``, ``rollback``
reconsumeTimes           int32
preparedTransactionOffset int64
keys                     list of string            KEYS, split as it is indexed: repeats are kept, empty pieces are not
uniqKey                  string or null            UNIQ_KEY
tags                     string or null            TAGS, whole
tagsCode                 int64                     what a ConsumeQueue holds: TAGS' hash, or when to deliver
properties               map of string to string   all of them, KEYS, UNIQ_KEY and TAGS too (spec rocketmq-store 2.4)
msgId                    string                    the offset message id: hex of store host, port and phyOffset
body                     binary                    as stored, compressed or not; only where it is asked for
======================== ========================= ==================================================================

RocketMQ calls two things msgId. Here it is the one that every stored frame has and no two of a log share, which
``viewMessage`` and ``indexd query message`` take. What clients print as msgId is ``coalesce(uniqKey, msgId)``.

Names and types of a version stay; a column that is added comes last and makes no new version.

The messages of a split as Arrow record batches, some MiB of log each: what the data source, exports and counts read.

Which message stands where comes from the reader's own DispatchBatch, and with it every column it has. Only when others
are asked for are the frames looked at once more, and only the rows that are kept.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from indexd.commitlog.batcher import DispatchBatch, TopicTable
from indexd.commitlog.decoder import decode_utf8
from indexd.commitlog.reader import Skipped
from indexd.config import Config
from indexd.errors import DisturbedError, UsageError
from indexd.spark.source.batch import Located, Locator
from indexd.spark.splits import Split, SplitReader
from indexd.storage.disk import Disk


def numbers(values: NDArray[Any]) -> pa.Array:
    """The array of these numbers, not copied: who makes it gives its memory away."""
    values = np.ascontiguousarray(values)
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


def texts(values: Sequence[str]) -> pa.Array:
    """The array of these texts."""
    encoded = [value.encode() for value in values]
    offsets = np.fromiter(accumulate(map(len, encoded), initial=0), dtype=np.int32, count=len(encoded) + 1)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.string(), len(encoded), buffers)


SCHEMA_VERSION = 1
#: The key of the schema's metadata that says the version.
VERSION_KEY = b"indexd.schema.version"

# The names of the inner fields are those that Spark gives them.
KEYS_TYPE = pa.list_(pa.field("element", pa.string(), nullable=False))
PROPERTIES_TYPE = pa.map_(pa.field("key", pa.string(), nullable=False), pa.field("value", pa.string(), nullable=False))

SCHEMA = pa.schema(
    [
        pa.field("phyOffset", pa.int64(), nullable=False),
        pa.field("size", pa.int32(), nullable=False),
        pa.field("topic", pa.string(), nullable=False),
        pa.field("queueId", pa.int32(), nullable=False),
        pa.field("queueOffset", pa.int64(), nullable=False),
        pa.field("storeTimestamp", pa.int64(), nullable=False),
        pa.field("bornTimestamp", pa.int64(), nullable=False),
        pa.field("bornHost", pa.string(), nullable=False),
        pa.field("storeHost", pa.string(), nullable=False),
        pa.field("sysFlag", pa.int32(), nullable=False),
        pa.field("transactionType", pa.string(), nullable=False),
        pa.field("reconsumeTimes", pa.int32(), nullable=False),
        pa.field("preparedTransactionOffset", pa.int64(), nullable=False),
        pa.field("keys", KEYS_TYPE, nullable=False),
        pa.field("uniqKey", pa.string(), nullable=True),
        pa.field("tags", pa.string(), nullable=True),
        pa.field("tagsCode", pa.int64(), nullable=False),
        pa.field("properties", PROPERTIES_TYPE, nullable=False),
        pa.field("msgId", pa.string(), nullable=False),
        pa.field("body", pa.binary(), nullable=False),
    ],
    metadata={VERSION_KEY: str(SCHEMA_VERSION).encode()},
)
ALL_COLUMNS: tuple[str, ...] = tuple(SCHEMA.names)
#: What is read when nothing is said: bodies are most of a log.
DEFAULT_COLUMNS: tuple[str, ...] = tuple(name for name in ALL_COLUMNS if name != "body")


def arrow_schema(columns: Sequence[str] = DEFAULT_COLUMNS) -> pa.Schema:
    """The Arrow schema of these columns, in this order, the version in its metadata."""
    return pa.schema([SCHEMA.field(name) for name in columns], metadata=SCHEMA.metadata)


def parse_columns(text: str | None) -> tuple[str, ...]:
    """Names between commas, in any case; ``*`` is all of them, body too; None all but body. UsageError otherwise."""
    if text is None:
        return DEFAULT_COLUMNS
    known = {name.lower(): name for name in ALL_COLUMNS}
    found: list[str] = []
    for word in text.split(","):
        name = word.strip()
        if name == "*":
            names: Sequence[str] = ALL_COLUMNS
        elif name.lower() in known:
            names = (known[name.lower()],)
        else:
            near = difflib.get_close_matches(name[:64].lower(), list(known), n=1)
            hint = f"did you mean {known[near[0]]}?" if near else f"there are {', '.join(ALL_COLUMNS)}"
            raise UsageError(f"there is no column {name[:64]!r}", hint)
        twice = [name for name in names if name in found]
        if twice:
            raise UsageError(f"the column {twice[0]} is given twice", "name each column once")
        found += names
    return tuple(found)


# Columns whose arrays a batch already has.
_OF_BATCH = {
    "phyOffset": "phy_offset",
    "size": "size",
    "queueId": "queue_id",
    "queueOffset": "queue_offset",
    "storeTimestamp": "store_timestamp",
    "sysFlag": "sys_flag",
    "tagsCode": "tags_code",
}
_WITHOUT_FRAMES = frozenset({*_OF_BATCH, "topic", "transactionType"})
_TRANSACTION_TYPES = texts(["none", "prepared", "commit", "rollback"])


@dataclass(frozen=True, slots=True)
class Keep:
    """Which messages are kept: of these topics, stored in ``[start_time, end_time)`` ms; None sets no bound."""

    topics: frozenset[str] | None = None
    start_time: int | None = None
    end_time: int | None = None

    @property
    def is_all(self) -> bool:
        """Nothing is left out."""
        return self.topics is None and self.start_time is None and self.end_time is None


class RowReader:
    """Iterates over the rows of a split, as record batches of ``schema``. Raises what SplitReader does.

    Behind the iteration ``next_offset`` and ``ends_log`` say where it ended, as SplitReader's do, and ``last_message``
    the physical offset and the size of the last message that was read, kept or not; None if there was none.
    """

    def __init__(
        self,
        disk: Disk,
        config: Config,
        split: Split,
        columns: Sequence[str] = DEFAULT_COLUMNS,
        keep: Keep | None = None,
    ) -> None:
        self.schema = arrow_schema(columns)
        self.last_message: tuple[int, int] | None = None
        self._columns = tuple(columns)
        self._keep = keep or Keep()
        self._reader = SplitReader(disk, _without_hashes(config), split)
        self._topics = _Topics(self._keep.topics)
        looked_at = set(columns) - _WITHOUT_FRAMES
        self._locator = Locator(frozenset(looked_at)) if looked_at else None

    def __repr__(self) -> str:
        return f"RowReader({self._reader.split}, columns={','.join(self._columns)})"

    @property
    def next_offset(self) -> int:
        """Where the reader stands."""
        return self._reader.next_offset

    @property
    def ends_log(self) -> bool:
        """The log ended inside the split."""
        return self._reader.ends_log

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for batch in self._reader:
            if isinstance(batch, Skipped) or not batch.rows:
                continue
            self.last_message = int(batch.columns.phy_offset[batch.rows - 1]), int(batch.columns.size[batch.rows - 1])
            rows = self._kept(batch)
            if rows is None or len(rows):
                yield self._record_batch(batch, rows)

    def _kept(self, batch: DispatchBatch) -> NDArray[np.int64] | None:
        # Which rows are kept; None: all.
        keep, mask = self._keep, np.ones(batch.rows, dtype=np.bool_)
        if keep.is_all:
            return None
        times = batch.columns.store_timestamp[: batch.rows]
        if keep.start_time is not None:
            mask &= times >= keep.start_time
        if keep.end_time is not None:
            mask &= times < keep.end_time
        if keep.topics is not None:
            mask &= self._topics.of(batch.topics).is_kept[batch.columns.topic_id[: batch.rows]]
        return None if mask.all() else np.flatnonzero(mask)

    def _record_batch(self, batch: DispatchBatch, rows: NDArray[np.int64] | None) -> pa.RecordBatch:
        def column(name: str) -> NDArray[Any]:
            whole: NDArray[Any] = getattr(batch.columns, name)[: batch.rows]
            return whole if rows is None else whole[rows]

        found: dict[str, pa.Array] = {}
        located: Located | None = None
        if self._locator is not None:
            offsets, sizes, times = column("phy_offset"), column("size"), column("store_timestamp")
            frames = self._reader.frames(batch)
            located = self._locator.locate(frames, batch.begin_offset, offsets, sizes, times)
        for name in self._columns:
            if name in _OF_BATCH:
                found[name] = numbers(column(_OF_BATCH[name]))
            elif name == "topic":
                found[name] = self._topics.of(batch.topics).names.take(numbers(column("topic_id")))
            elif name == "transactionType":
                found[name] = _TRANSACTION_TYPES.take(numbers((column("sys_flag") >> 2) & 3))
            else:
                assert located is not None
                found[name] = located.column(name)
        return pa.RecordBatch.from_arrays(list(found.values()), schema=self.schema)


def record_batches(
    disk: Disk, config: Config, split: Split, columns: Sequence[str] = DEFAULT_COLUMNS, keep: Keep | None = None
) -> Iterator[pa.RecordBatch]:
    """The rows of a split; behind them, DisturbedError if it did not end where it was planned to, or with the log."""
    reader = RowReader(disk, config, split, columns, keep)
    yield from reader
    if not reader.ends_log:
        check_end(split, reader.next_offset)


def check_end(split: Split, next_offset: int) -> None:
    """DisturbedError unless a split has been read to its end: the rows may be others than the log's by now."""
    if next_offset != split.end:
        raise DisturbedError(
            f"the log has changed since it was split: messages from {split.begin} on"
            f" were to end at {split.end}, and end at {next_offset}",
            "read it again; a log that is cut or expires while it is read gives no rows",
        )


class _TopicNames:
    """Topic ids of one table to names, as text, and to whether they are kept."""

    def __init__(self, table: TopicTable, kept: frozenset[str] | None) -> None:
        self.table = table
        self._kept = kept
        self._texts: list[str] = []
        self.names = texts([])
        self.is_kept = np.zeros(0, dtype=np.bool_)

    def refresh(self) -> None:
        """Take in the topics that the table has met since."""
        known = len(self._texts)
        if len(self.table) == known:
            return
        self._texts += [decode_utf8(self.table.raw_name(topic)) for topic in range(known, len(self.table))]
        self.names = texts(self._texts)
        if self._kept is not None:
            self.is_kept = np.array([text in self._kept for text in self._texts], dtype=np.bool_)


class _Topics:
    """The names of the tables that batches come with: a reader has two, and a larger one for each that is full."""

    def __init__(self, kept: frozenset[str] | None) -> None:
        self._kept = kept
        self._known: list[_TopicNames] = []

    def of(self, table: TopicTable) -> _TopicNames:
        """The names of a table."""
        found = next((names for names in self._known if names.table is table), None)
        if found is None:
            found = _TopicNames(table, self._kept)
            self._known = [found, *self._known[:1]]
        found.refresh()
        return found


def _without_hashes(config: Config) -> Config:
    # Rows need the columns of a queue whatever is built, and key hashes the less, the fewer a flavour has.
    outputs = config.outputs.model_copy(update={"consume_queue": True})
    index = config.index.model_copy(update={"flavour": "3.x"})
    return config.model_copy(update={"outputs": outputs, "index": index})
