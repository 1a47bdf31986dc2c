"""Reads the messages of a split as Arrow record batches, some MiB of log each.

Which message stands where comes from the reader's own DispatchBatch, and with it every column it has. Only when others
are asked for are the frames looked at once more, and only the rows that are kept: kernels find and copy the plain rows,
and ``commitlog.decoder`` makes the slow ones (properties that are no UTF-8, a name twice, very many of them).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from indexd.commitlog.batcher import DispatchBatch, TopicTable
from indexd.commitlog.decoder import DecoderOptions, Message, decode_frame, decode_utf8
from indexd.commitlog.reader import Skipped
from indexd.config import Config
from indexd.errors import DisturbedError, IndexdError
from indexd.spark.source import rows_kernel as kernel
from indexd.spark.source.columns import DEFAULT_COLUMNS, KEYS_TYPE, PROPERTIES_TYPE, arrow_schema, numbers, texts
from indexd.spark.splits import Split, SplitReader
from indexd.storage.disk import Disk

Bytes = NDArray[np.uint8]
Int64s = NDArray[np.int64]

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
# Columns that ``locate`` finds: as numbers, or the place of their bytes.
_NUMBERS = {
    "bornTimestamp": (kernel.BORN_TIMESTAMP, np.int64),
    "reconsumeTimes": (kernel.RECONSUME_TIMES, np.int32),
    "preparedTransactionOffset": (kernel.PREPARED_OFFSET, np.int64),
}
_HOSTS = {"bornHost": kernel.BORN_HOST, "storeHost": kernel.STORE_HOST, "msgId": kernel.STORE_HOST}
_TEXTS = {"uniqKey": kernel.UNIQ_KEY, "tags": kernel.TAGS}
_VALUES: dict[str, Callable[[Message], object]] = {
    "uniqKey": lambda message: message.uniq_key,
    "tags": lambda message: message.tags,
    "keys": lambda message: message.keys,
    "properties": lambda message: list(message.properties.items()),
}
_PAIR_TYPE = pa.struct([PROPERTIES_TYPE.key_field, PROPERTIES_TYPE.item_field])
# A byte as two hexadecimal digits.
_HEX = np.frombuffer(bytes(range(256)).hex().upper().encode(), dtype=np.uint16)


@dataclass(frozen=True, slots=True)
class Keep:
    """Which messages are kept: of these topics, stored in ``[start_time, end_time)`` ms; None sets no bound."""

    topics: frozenset[str] | None = None
    start_time: int | None = None
    end_time: int | None = None


class RowReader:
    """Iterates over the rows of a split, as record batches of ``schema``. Raises what ``split_reader`` does, which says
    behind the iteration where it ended. ``skipped_bytes`` of log were passed over.
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
        # Rows need the columns of a queue whatever is built, and key hashes the less, the fewer a flavour has.
        outputs = config.outputs.model_copy(update={"consume_queue": True})
        index = config.index.model_copy(update={"flavour": "3.x"})
        self.split_reader = SplitReader(disk, config.model_copy(update={"outputs": outputs, "index": index}), split)
        self.skipped_bytes = 0
        self._keep = keep or Keep()
        looked_at = frozenset(columns) - _WITHOUT_FRAMES
        self._locator = Locator(looked_at) if looked_at else None
        #: The table of topics that was met last, its names, and which of them are kept.
        self._table: TopicTable | None = None
        self._topics = texts([])
        self._kept_topics = np.zeros(0, dtype=np.bool_)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for batch in self.split_reader:
            if isinstance(batch, Skipped):
                self.skipped_bytes += batch.end - batch.begin
                continue
            if not batch.rows:
                continue
            if batch.topics is not self._table or len(batch.topics) != len(self._topics):
                self._know_topics(batch.topics)
            kept = self._kept(batch)
            if kept is None or len(kept):
                yield self._record_batch(batch, kept)

    def _know_topics(self, table: TopicTable) -> None:
        names = [decode_utf8(table.raw_name(topic)) for topic in range(len(table))]
        self._table, self._topics = table, texts(names)
        wanted = self._keep.topics
        self._kept_topics = np.array([wanted is None or name in wanted for name in names], dtype=np.bool_)

    def _kept(self, batch: DispatchBatch) -> Int64s | None:
        # Which rows are kept; None: all.
        keep, times = self._keep, batch.columns.store_timestamp[: batch.rows]
        mask = self._kept_topics[batch.columns.topic_id[: batch.rows]]
        if keep.start_time is not None:
            mask &= times >= keep.start_time
        if keep.end_time is not None:
            mask &= times < keep.end_time
        return None if mask.all() else np.flatnonzero(mask)

    def _record_batch(self, batch: DispatchBatch, kept: Int64s | None) -> pa.RecordBatch:
        def column(name: str) -> NDArray[Any]:
            whole: NDArray[Any] = getattr(batch.columns, name)[: batch.rows]
            return whole if kept is None else whole[kept]

        def array(name: str) -> pa.Array:
            if name in _OF_BATCH:
                return numbers(column(_OF_BATCH[name]))
            if name == "topic":
                return self._topics.take(numbers(column("topic_id")))
            if name == "transactionType":
                return _TRANSACTION_TYPES.take(numbers((column("sys_flag") >> 2) & 3))
            assert self._locator is not None
            return self._locator.column(name)

        if self._locator is not None:
            frames = self.split_reader.frames(batch)
            self._locator.locate(
                frames, batch.begin_offset, column("phy_offset"), column("size"), column("store_timestamp")
            )
        return pa.RecordBatch.from_arrays([array(name) for name in self.schema.names], schema=self.schema)


def check_end(split: Split, next_offset: int) -> None:
    """DisturbedError unless a split has been read to its end: the rows may be others than the log's by now."""
    if next_offset != split.end:
        raise DisturbedError(
            f"the log has changed since it was split: messages from {split.begin} on"
            f" were to end at {split.end}, and end at {next_offset}",
            "read it again; a log that is cut or expires while it is read gives no rows",
        )


class Locator:
    """Looks into the frames of one batch after the other, for these columns; ``column`` is of the last one.

    Owns what the kernels fill. Arrays of columns own what they show: everything is copied.
    """

    def __init__(self, columns: frozenset[str]) -> None:
        self._want_texts = bool(columns & {*_TEXTS, "keys"})
        self._want_properties = "properties" in columns
        self._rows = np.zeros((kernel.FIELDS, 1), dtype=np.int64)
        self._pairs = np.zeros((4, kernel.ROOM), dtype=np.int64)
        self._keys = np.zeros((2, kernel.ROOM), dtype=np.int64)
        self._starts = np.zeros((2, 2), dtype=np.int32)
        self._slow: list[Message] | None = None

    def locate(self, frames: Bytes, base: int, offsets: Int64s, sizes: NDArray[np.int32], times: Int64s) -> Locator:
        """Find what stands at these physical offsets of ``frames``, whose byte 0 is at ``base``; itself.

        DisturbedError if there are others by now than those that were decoded.
        """
        self._frames, self._base, self._offsets, self._sizes = frames, base, offsets, sizes
        self._count, self._slow = len(offsets), None
        if self._count > self._rows.shape[1]:
            self._rows = np.zeros((kernel.FIELDS, self._count), dtype=np.int64)
            self._starts = np.zeros((2, self._count + 1), dtype=np.int32)
        self._rows[kernel.IS_SLOW] = 0
        outcome, row = kernel.locate(frames, np.uint64(base), offsets, sizes, times, self._rows)
        if outcome == kernel.CHANGED:
            where = offsets[int(row)]
            raise DisturbedError(f"the log was written anew at {where} while it was read", "read it again")
        if self._want_texts or self._want_properties:
            self._locate_texts()
        return self

    def column(self, name: str) -> pa.Array:
        """The column of that name, which the locator was made for, in the type that the schema says."""
        if name in _NUMBERS:
            field, kind = _NUMBERS[name]
            return numbers(self._field(field).astype(kind))
        if name in _HOSTS:
            start, end = self._field(_HOSTS[name]), self._field(_HOSTS[name] + 1)
            hosts = self._texts(start, end, pa.binary()).dictionary_encode()
            known = hosts.dictionary.to_pylist()
            if name != "msgId":
                return texts([host_text(host) for host in known]).take(hosts.indices)
            found = texts([host.hex().upper() for host in known]).take(hosts.indices)
            return pc.binary_join_element_wise(found, self._offsets_in_hex(), "")
        if name == "body":
            return self._texts(self._field(kernel.BODY), self._field(kernel.BODY + 1), pa.binary())
        if name in _TEXTS:
            start, end = self._field(_TEXTS[name]), self._field(_TEXTS[name] + 1)
            found = self._texts(start, end, pa.string(), np.packbits(end > start, bitorder="little"))
        elif name == "keys":
            start, end = self._used(self._keys, 1)
            found = self._nested(KEYS_TYPE, 1, self._texts(start, end, pa.string()))
        else:
            begins, ends, values, value_ends = self._used(self._pairs, 0)
            children = [self._texts(begins, ends, pa.string()), self._texts(values, value_ends, pa.string())]
            pairs = pa.Array.from_buffers(_PAIR_TYPE, len(begins), [None], children=children)
            found = self._nested(PROPERTIES_TYPE, 0, pairs)
        return self._with_slow(found, _VALUES[name])

    def _locate_texts(self) -> None:
        count = np.uint64(self._count)
        while True:
            outcome, pairs, _ = kernel.locate_texts(
                self._frames, count, self._want_texts, self._want_properties,
                self._rows, self._pairs, self._keys, self._starts,
            )  # fmt: skip
            if outcome == kernel.LOCATED:
                break
            # Again, all of it: a few times in the life of a task.
            if int(pairs) + kernel.ROOM > self._pairs.shape[1]:
                self._pairs = np.zeros((4, max(2 * self._pairs.shape[1], 8 * self._count)), dtype=np.int64)
            else:
                self._keys = np.zeros((2, max(2 * self._keys.shape[1], 2 * self._count)), dtype=np.int64)
        slow = self._field(kernel.IS_SLOW)
        odd = np.flatnonzero(slow == kernel.NOT_ASCII)
        if len(odd):
            start, end = self._field(kernel.PROPERTIES)[odd], self._field(kernel.PROPERTIES + 1)[odd]
            slow[odd] = 0
            try:
                self._texts(start, end, pa.binary()).cast(pa.string())
            except pa.ArrowInvalid:  # one of them is no UTF-8: the plain decoder sees which
                slow[odd] = 1

    def _field(self, number: int) -> Int64s:
        return self._rows[number, : self._count]

    def _used(self, places: NDArray[np.int64], which: int) -> NDArray[np.int64]:
        return places[:, : int(self._starts[which, self._count])]

    def _offsets_in_hex(self) -> pa.Array:
        digits = _HEX[self._offsets.astype(">i8").view(np.uint8)]
        ends = np.arange(0, 16 * self._count + 1, 16, dtype=np.int32)
        return pa.Array.from_buffers(pa.string(), self._count, [None, pa.py_buffer(ends), pa.py_buffer(digits)])

    def _texts(
        self, starts: Int64s, ends: Int64s, kind: pa.DataType, validity: NDArray[np.uint8] | None = None
    ) -> pa.Array:
        # What stands between each start and end.
        offsets = np.zeros(len(starts) + 1, dtype=np.int32)
        np.cumsum(ends - starts, dtype=np.int32, out=offsets[1:])
        # Arrow's own memory, which it uses again; fresh pages of the kernel's would have to be zeroed first.
        data = pa.allocate_buffer(int(offsets[-1]) + kernel.SLACK)
        size = int(kernel.gather(self._frames, starts, ends, np.frombuffer(data, dtype=np.uint8)))
        buffers = [None if validity is None else pa.py_buffer(validity), pa.py_buffer(offsets), data.slice(0, size)]
        return pa.Array.from_buffers(kind, len(starts), buffers)

    def _nested(self, kind: pa.DataType, which: int, inner: pa.Array) -> pa.Array:
        starts = pa.py_buffer(self._starts[which, : self._count + 1].copy())
        return pa.Array.from_buffers(kind, self._count, [None, starts], children=[inner])

    def _with_slow(self, plain: pa.Array, value: Callable[[Message], object]) -> pa.Array:
        # The slow rows' values, by the plain decoder, in the places of what the kernel has put there.
        rows = np.flatnonzero(self._field(kernel.IS_SLOW))
        if not len(rows):
            return plain
        if self._slow is None:
            self._slow = [self._decode(int(row)) for row in rows]
        values = pa.array([value(message) for message in self._slow], type=plain.type)
        order = np.arange(len(plain))
        order[rows] = len(plain) + np.arange(len(values))
        return pa.concat_arrays([plain, values]).take(pa.array(order))

    def _decode(self, row: int) -> Message:
        offset, size = int(self._offsets[row]), int(self._sizes[row])
        data = self._frames[offset - self._base : offset - self._base + size].tobytes()
        options = DecoderOptions(frame_size_max=size, check_crc=False)
        found = decode_frame(data, 0, offset, offset + size, options)
        if not isinstance(found, Message):
            raise IndexdError(f"the decoder refuses the message at {offset} that its kernel took: {found}")
        return found


def host_text(host: bytes) -> str:
    """``address:port`` of a host as stored, 8 or 20 bytes; IPv6 in brackets."""
    address, port = ipaddress.ip_address(host[:-4]), int.from_bytes(host[-4:], "big", signed=True)
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"
