"""The columns for which frames are looked at: kernels find and copy the plain rows, the plain decoder makes the rest.

A slow row (properties that are no UTF-8, a name twice, very many of them) is decoded by ``commitlog.decoder``, and so
is what that says by definition.

The messages of a split as Arrow record batches, some MiB of log each: what the data source, exports and counts read.

Which message stands where comes from the reader's own DispatchBatch, and with it every column it has. Only when others
are asked for are the frames looked at once more, and only the rows that are kept.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from indexd.commitlog.batcher import DispatchBatch, TopicTable
from indexd.commitlog.decoder import DecoderOptions, Message, decode_frame, decode_utf8
from indexd.commitlog.reader import Skipped
from indexd.config import Config
from indexd.errors import DisturbedError, IndexdError
from indexd.spark.source.columns import DEFAULT_COLUMNS, KEYS_TYPE, PROPERTIES_TYPE, arrow_schema, numbers, texts
from indexd.spark.source.rows_kernel import CHANGED, LOCATED, ROOM, Spans, gather, locate, locate_texts, offset_ids
from indexd.spark.splits import Split, SplitReader
from indexd.storage.disk import Disk

_HOSTS = frozenset({"bornHost", "storeHost", "msgId"})
_TEXTS = frozenset({"keys", "uniqKey", "tags"})
# Hosts met, before they are forgotten: producers come and go, each with a port of its own.
_HOSTS_MAX = 1 << 13
_ID_SIZE_MAX = 56
# What ``gather`` may write too much.
_SLACK = 8
_PAIR_TYPE = pa.struct([PROPERTIES_TYPE.key_field, PROPERTIES_TYPE.item_field])
_IDS_AND_OFFSETS = ("pair_start", "key_start")
_PAIR_ARRAYS = ("name", "name_end", "value", "value_end")
_KEY_ARRAYS = ("key", "key_end")
# What ``locate`` fills.
_OF_ROWS = (
    "born_timestamp", "reconsume_times", "prepared_offset", "born_host", "store_host", "body", "body_end", "properties",
    "properties_end",
)  # fmt: skip

Bytes = NDArray[np.uint8]
Int64s = NDArray[np.int64]
Positions = NDArray[np.uint32]


def host_text(host: bytes) -> str:
    """``address:port`` of a host as stored, 8 or 20 bytes; IPv6 in brackets."""
    address, port = ipaddress.ip_address(host[:-4]), int.from_bytes(host[-4:], "big", signed=True)
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


class Locator:
    """Looks into the frames of one batch after the other, for these columns; owns what the kernels fill."""

    def __init__(self, columns: frozenset[str]) -> None:
        self._want_hosts = bool(columns & _HOSTS)
        self._want_texts = bool(columns & _TEXTS)
        self._want_properties = "properties" in columns
        self._hosts = TopicTable()
        self._host_texts: list[str] = []
        self._host_names = texts([])
        self._spans = _make_spans(1, ROOM, ROOM)

    def locate(self, frames: Bytes, base: int, offsets: Int64s, sizes: NDArray[np.int32], times: Int64s) -> Located:
        """What stands at these physical offsets of ``frames``, whose byte 0 is at ``base``; good until the next call.

        DisturbedError if there are others by now than those that were decoded.
        """
        rows = len(offsets)
        if rows > len(self._spans.is_slow):
            self._spans = _make_spans(rows, len(self._spans.name), len(self._spans.key))
        self._locate_rows(frames, base, offsets, sizes, times)
        pairs = keys = 0
        if self._want_texts or self._want_properties:
            pairs, keys = self._locate_texts(frames, rows)
        used = _cut(self._spans, rows, pairs, keys)
        return Located(frames, base, offsets, sizes, used, self._hosts, self._host_names)

    def _locate_rows(self, frames: Bytes, base: int, offsets: Int64s, sizes: NDArray[np.int32], times: Int64s) -> None:
        if len(self._hosts) > _HOSTS_MAX:
            self._hosts, self._host_texts = TopicTable(), []
        while True:
            outcome, row = locate(
                frames, np.uint64(base), offsets, sizes, times, self._want_hosts, self._spans, self._hosts.arrays
            )
            if outcome == LOCATED:
                break
            if outcome == CHANGED:
                where = offsets[int(row)]
                raise DisturbedError(f"the log was written anew at {where} while it was read", "read it again")
            self._hosts = self._hosts.grown()
        known = len(self._host_texts)
        if len(self._hosts) > known:
            self._host_texts += [host_text(self._hosts.raw_name(host)) for host in range(known, len(self._hosts))]
            self._host_names = texts(self._host_texts)

    def _locate_texts(self, frames: Bytes, rows: int) -> tuple[int, int]:
        while True:
            outcome, pairs, keys = locate_texts(
                frames, np.uint64(rows), self._want_texts, self._want_properties, self._spans
            )
            if outcome == LOCATED:
                return int(pairs), int(keys)
            # Again, all of it: a few times in the life of a task.
            room, pairs_max, keys_max = len(self._spans.is_slow), len(self._spans.name), len(self._spans.key)
            if int(pairs) + ROOM > pairs_max:
                pairs_max = max(2 * pairs_max, 8 * room)
            else:
                keys_max = max(2 * keys_max, 2 * room)
            old = self._spans
            self._spans = _make_spans(room, pairs_max, keys_max)
            for name in _OF_ROWS:
                getattr(self._spans, name)[:] = getattr(old, name)


class Located:
    """One batch of rows, a column at a time. Everything is copied: the arrays own what they show."""

    def __init__(
        self,
        frames: Bytes,
        base: int,
        offsets: Int64s,
        sizes: NDArray[np.int32],
        spans: Spans,
        hosts: TopicTable,
        host_names: pa.StringArray,
    ) -> None:
        self._frames = frames
        self._base = base
        self._offsets = offsets
        self._sizes = sizes
        self._spans = spans
        self._hosts = hosts
        self._host_names = host_names
        self._slow_rows = np.flatnonzero(spans.is_slow)
        self._slow_messages: list[Message] | None = None

    def column(self, name: str) -> pa.Array:
        """The column of that name, which the locator was made for, in the type that the schema says."""
        spans = self._spans
        match name:
            case "bornTimestamp":
                return numbers(spans.born_timestamp.copy())
            case "reconsumeTimes":
                return numbers(spans.reconsume_times.copy())
            case "preparedTransactionOffset":
                return numbers(spans.prepared_offset.copy())
            case "bornHost":
                return self._host_names.take(numbers(spans.born_host))
            case "storeHost":
                return self._host_names.take(numbers(spans.store_host))
            case "msgId":
                return self._msg_ids()
            case "body":
                return self._texts(spans.body, spans.body_end, pa.binary())
            case "uniqKey":
                found = self._texts(spans.uniq_key, spans.uniq_key_end, pa.string(), is_nullable=True)
                return self._with_slow(found, lambda message: message.uniq_key)
            case "tags":
                found = self._texts(spans.tags, spans.tags_end, pa.string(), is_nullable=True)
                return self._with_slow(found, lambda message: message.tags)
            case "keys":
                pieces = self._texts(spans.key, spans.key_end, pa.string())
                return self._with_slow(_nested(KEYS_TYPE, spans.key_start, pieces), lambda message: message.keys)
            case "properties":
                return self._with_slow(self._properties(), lambda message: list(message.properties.items()))
        raise IndexdError(f"there is no column {name}")

    def _msg_ids(self) -> pa.Array:
        rows = len(self._offsets)
        offsets, data = np.empty(rows + 1, dtype=np.int32), _allocate(rows * _ID_SIZE_MAX)
        size = int(offset_ids(self._hosts.arrays, self._spans.store_host, self._offsets, offsets, _view(data)))
        return pa.Array.from_buffers(pa.string(), rows, [None, pa.py_buffer(offsets), data.slice(0, size)])

    def _properties(self) -> pa.Array:
        spans = self._spans
        names = self._texts(spans.name, spans.name_end, pa.string())
        values = self._texts(spans.value, spans.value_end, pa.string())
        pairs = pa.Array.from_buffers(_PAIR_TYPE, len(names), [None], children=[names, values])
        return _nested(PROPERTIES_TYPE, spans.pair_start, pairs)

    def _texts(self, starts: Positions, ends: Positions, kind: pa.DataType, *, is_nullable: bool = False) -> pa.Array:
        # What stands between each start and end; if nullable, null where nothing does.
        count = len(starts)
        offsets = np.zeros(count + 1, dtype=np.int32)
        np.cumsum(ends - starts, dtype=np.int32, out=offsets[1:])
        data = _allocate(int(offsets[-1]) + _SLACK)
        size = int(gather(self._frames, starts, ends, _view(data)))
        validity = None
        if is_nullable:
            validity = pa.py_buffer(np.packbits(ends > starts, bitorder="little"))
        return pa.Array.from_buffers(kind, count, [validity, pa.py_buffer(offsets), data.slice(0, size)])

    def _with_slow(self, plain: pa.Array, value: Callable[[Message], object]) -> pa.Array:
        # The slow rows' values, by the plain decoder, in the places of what the kernel left empty.
        if not len(self._slow_rows):
            return plain
        if self._slow_messages is None:
            self._slow_messages = [self._decode(int(row)) for row in self._slow_rows]
        values = pa.array([value(message) for message in self._slow_messages], type=plain.type)
        order = np.arange(len(plain))
        order[self._slow_rows] = len(plain) + np.arange(len(values))
        return pa.concat_arrays([plain, values]).take(pa.array(order))

    def _decode(self, row: int) -> Message:
        offset, size = int(self._offsets[row]), int(self._sizes[row])
        data = self._frames[offset - self._base : offset - self._base + size].tobytes()
        options = DecoderOptions(frame_size_max=size, check_crc=False)
        found = decode_frame(data, 0, offset, offset + size, options)
        if not isinstance(found, Message):
            raise IndexdError(f"the decoder refuses the message at {offset} that its kernel took: {found}")
        return found


def _nested(kind: pa.DataType, starts: NDArray[np.int32], inner: pa.Array) -> pa.Array:
    return pa.Array.from_buffers(kind, len(starts) - 1, [None, pa.py_buffer(starts.copy())], children=[inner])


def _allocate(size: int) -> pa.Buffer:
    # Arrow's own memory, which it uses again; fresh pages of the kernel's would have to be zeroed first.
    return pa.allocate_buffer(size)


def _view(buffer: pa.Buffer) -> Bytes:
    return np.frombuffer(buffer, dtype=np.uint8)


def _make_spans(rows: int, pairs: int, keys: int) -> Spans:
    def lengths(name: str) -> int:
        if name in _IDS_AND_OFFSETS:
            return rows + 1
        return pairs if name in _PAIR_ARRAYS else keys if name in _KEY_ARRAYS else rows

    return Spans(**{name: np.zeros(lengths(name), dtype=_type_of(name)) for name in Spans._fields})


def _type_of(name: str) -> type[np.generic]:
    if name in ("born_timestamp", "prepared_offset"):
        return np.int64
    if name in ("reconsume_times", "born_host", "store_host", *_IDS_AND_OFFSETS):
        return np.int32
    return np.uint8 if name == "is_slow" else np.uint32


def _cut(spans: Spans, rows: int, pairs: int, keys: int) -> Spans:
    def used(name: str) -> int:
        if name in _IDS_AND_OFFSETS:
            return rows + 1
        return pairs if name in _PAIR_ARRAYS else keys if name in _KEY_ARRAYS else rows

    return Spans(**{name: array[: used(name)] for name, array in spans._asdict().items()})


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
    ``skipped_bytes`` of log were passed over, and at ``unreadable_at`` the log ends in bytes that are no frame.
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
        self.skipped_bytes = 0
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

    @property
    def unreadable_at(self) -> int | None:
        """The physical offset of bytes at the end of the log that are no frame, as after a crash of the broker."""
        unreadable = self._reader.unreadable
        return unreadable.offset if unreadable else None

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for batch in self._reader:
            if isinstance(batch, Skipped):
                self.skipped_bytes += batch.end - batch.begin
                continue
            if not batch.rows:
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
