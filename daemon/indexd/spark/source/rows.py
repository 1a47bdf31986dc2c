"""Reads the messages of a split as Arrow record batches, some MiB of log each.

Which message stands where comes from the reader's own DispatchBatch, and with it every column it has. Only when others
are asked for are the frames looked at once more, and only the rows that are kept: kernels find where their parts stand,
and copy them.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from indexd.commitlog.batcher import DispatchBatch, TopicTable
from indexd.commitlog.decoder import decode_utf8
from indexd.commitlog.reader import Skipped
from indexd.config import Config
from indexd.errors import DisturbedError
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
        self._looks_at_frames = not _WITHOUT_FRAMES.issuperset(columns)
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
            if isinstance(kept, slice) or len(kept):
                yield self._record_batch(batch, kept)

    def _know_topics(self, table: TopicTable) -> None:
        names = [decode_utf8(table.raw_name(topic)) for topic in range(len(table))]
        self._table, self._topics = table, texts(names)
        wanted = self._keep.topics
        self._kept_topics = np.array([wanted is None or name in wanted for name in names], dtype=np.bool_)

    def _kept(self, batch: DispatchBatch) -> Int64s | slice:
        # All are a slice: nothing is copied.
        keep, times = self._keep, batch.columns.store_timestamp[: batch.rows]
        mask = self._kept_topics[batch.columns.topic_id[: batch.rows]]
        if keep.start_time is not None:
            mask &= times >= keep.start_time
        if keep.end_time is not None:
            mask &= times < keep.end_time
        return np.flatnonzero(mask) if not mask.all() else np.s_[: batch.rows]

    def _record_batch(self, batch: DispatchBatch, kept: Int64s | slice) -> pa.RecordBatch:
        def column(name: str) -> NDArray[Any]:
            values: NDArray[Any] = getattr(batch.columns, name)[kept]
            return values

        wanted = self.schema.names
        arrays = {name: numbers(column(field)) for name, field in _OF_BATCH.items() if name in wanted}
        if "topic" in wanted:
            arrays["topic"] = self._topics.take(numbers(column("topic_id")))
        if "transactionType" in wanted:
            arrays["transactionType"] = _TRANSACTION_TYPES.take(numbers((column("sys_flag") >> 2) & 3))
        if self._looks_at_frames:
            data = self.split_reader.frames(batch)
            places = column("phy_offset"), column("size"), column("store_timestamp")
            frames = Frames(data, batch.begin_offset, *places)
            arrays |= {name: frames.column(name) for name in wanted if name not in arrays}
        return pa.RecordBatch.from_arrays([arrays[name] for name in wanted], schema=self.schema)


def check_end(split: Split, next_offset: int) -> None:
    """DisturbedError unless a split has been read to its end: the rows may be others than the log's by now."""
    if next_offset != split.end:
        raise DisturbedError(
            f"the log has changed since it was split: messages from {split.begin} on"
            f" were to end at {split.end}, and end at {next_offset}",
            "read it again; a log that is cut or expires while it is read gives no rows",
        )


class Frames:
    """The messages at these physical offsets of ``data``, whose byte 0 is at ``base``, column by column.

    They were decoded before, from bytes that were read before: DisturbedError if there are others by now, so that no
    length leads out of ``data``. A column owns what it shows: everything is copied.
    """

    def __init__(self, data: Bytes, base: int, offsets: Int64s, sizes: NDArray[np.int32], times: Int64s) -> None:
        self._data, self._offsets, begins = data, offsets, offsets - base
        places = np.empty((5, len(offsets)), dtype=np.int64)
        row = kernel.locate(data, np.uint64(base), offsets, sizes, times, places)
        if row < len(offsets):
            raise DisturbedError(f"the log was written anew at {offsets[row]} while it was read", "read it again")
        self._born, self._ends = begins + 48, begins + sizes
        self._born_ends, self._stored_ends, self._bodies, self._body_ends, self._properties = places
        self._stored = self._born_ends + 8

    def column(self, name: str) -> pa.Array:
        """The column of that name, in the type that the schema says."""
        match name:
            case "bornTimestamp":
                return self._numbers(self._born - 8, ">i8")
            case "reconsumeTimes":
                return self._numbers(self._stored_ends, ">i4")
            case "preparedTransactionOffset":
                return self._numbers(self._stored_ends + 4, ">i8")
            case "bornHost":
                return self._hosts(self._born, self._born_ends)
            case "storeHost":
                return self._hosts(self._stored, self._stored_ends)
            case "msgId":
                return self._message_ids()
            case "body":
                return _parts(self._data, self._bodies, self._body_ends, pa.binary())
            case "uniqKey":
                return self._property(b"UNIQ_KEY")
            case "tags":
                return self._property(b"TAGS")
            case "keys":
                return self._keys()
        return self._all_properties()

    def _numbers(self, places: Int64s, kind: str) -> pa.Array:
        # A view of the number that begins there, of every byte: nothing is copied but what is asked for.
        count = len(self._data) - np.dtype(kind).itemsize + 1
        at_each_byte = np.ndarray((max(count, 0),), kind, self._data, strides=(1,))
        return numbers(at_each_byte[places].astype(kind[1:]))

    def _hosts(self, starts: Int64s, ends: Int64s) -> pa.Array:
        hosts = _parts(self._data, starts, ends, pa.binary()).dictionary_encode()
        return texts([host_text(host) for host in hosts.dictionary.to_pylist()]).take(hosts.indices)

    def _message_ids(self) -> pa.Array:
        hosts = _parts(self._data, self._stored, self._stored_ends, pa.binary()).dictionary_encode()
        first = texts([host.hex().upper() for host in hosts.dictionary.to_pylist()]).take(hosts.indices)
        buffers = (
            np.arange(0, 16 * len(first) + 1, 16, dtype=np.int32),
            _HEX[self._offsets.astype(">i8").view(np.uint8)],
        )
        digits = pa.Array.from_buffers(pa.string(), len(first), [None, *map(pa.py_buffer, buffers)])
        return pc.binary_join_element_wise(first, digits, "")

    @cached_property
    def _pairs(self) -> tuple[NDArray[np.int32], Int64s, bool]:
        # Where those of each row begin, where each of the properties that count stands, and whether a row has a name
        # twice.
        room = int((self._ends - self._properties).sum()) // 4 + len(self._ends)
        pairs, row_starts = np.empty((4, room), dtype=np.int64), np.empty(len(self._ends) + 1, dtype=np.int32)
        repeats = kernel.locate_pairs(self._data, self._properties, self._ends, pairs, row_starts)
        return row_starts, pairs, repeats

    def _last(self, name: bytes) -> Int64s:
        # Where the last value of that name begins and ends in each row; none is empty, so the same means none.
        row_starts, pairs, _ = self._pairs
        places = np.zeros((2, len(self._ends)), dtype=np.int64)
        kernel.locate_last(self._data, np.frombuffer(name, dtype=np.uint8), pairs, row_starts, places)
        return places

    def _property(self, name: bytes) -> pa.Array:
        starts, ends = self._last(name)
        validity = pa.py_buffer(np.packbits(starts < ends, bitorder="little"))
        buffers = _texts(self._data, starts, ends).buffers()
        return pa.Array.from_buffers(pa.string(), len(starts), [validity, *buffers[1:]])

    def _keys(self) -> pa.Array:
        starts, ends = self._last(b"KEYS")
        places = np.empty((2, int((ends - starts).sum()) // 2 + len(starts)), dtype=np.int64)
        row_starts = np.empty(len(starts) + 1, dtype=np.int32)
        kernel.locate_pieces(self._data, starts, ends, places, row_starts)
        return _nested(KEYS_TYPE, row_starts, _texts(self._data, *places[:, : row_starts[-1]]))

    def _all_properties(self) -> pa.Array:
        row_starts, found, repeats = self._pairs
        places = found[:, : row_starts[-1]]
        names, values = _texts(self._data, *places[:2]), _texts(self._data, *places[2:])
        if repeats:
            # Of two of one name the last value, in the place of the first.
            codes, rows = names.dictionary_encode().indices.to_numpy(), np.arange(len(row_starts) - 1)
            pairs = np.repeat(rows, np.diff(row_starts)) << 32 | codes
            _, firsts = np.unique(pairs, return_index=True)
            _, lasts = np.unique(pairs[::-1], return_index=True)
            order = np.argsort(firsts)
            row_starts = np.searchsorted(firsts[order], row_starts).astype(np.int32)
            names, values = names.take(numbers(firsts[order])), values.take(numbers(len(pairs) - 1 - lasts[order]))
        return _nested(
            PROPERTIES_TYPE,
            row_starts,
            pa.Array.from_buffers(_PAIR_TYPE, len(names), [None], children=[names, values]),
        )


def _parts(data: Bytes, starts: Int64s, ends: Int64s, kind: pa.DataType) -> pa.Array:
    # What stands between each start and end.
    offsets = np.zeros(len(starts) + 1, dtype=np.int32)
    np.cumsum(ends - starts, dtype=np.int32, out=offsets[1:])
    # Arrow's own memory, which it uses again; fresh pages of the kernel's would have to be zeroed first.
    found = pa.allocate_buffer(int(offsets[-1]) + kernel.SLACK)
    kernel.gather(data, starts, ends, np.frombuffer(found, dtype=np.uint8))
    return pa.Array.from_buffers(kind, len(starts), [None, pa.py_buffer(offsets), found.slice(0, int(offsets[-1]))])


def _texts(data: Bytes, starts: Int64s, ends: Int64s) -> pa.Array:
    found = _parts(data, starts, ends, pa.binary())
    try:
        return found.cast(pa.string())
    except pa.ArrowInvalid:  # one of them is no UTF-8
        return texts([decode_utf8(one) for one in found.to_pylist()])


def _nested(kind: pa.DataType, begins: NDArray[np.int32], inner: pa.Array) -> pa.Array:
    return pa.Array.from_buffers(kind, len(begins) - 1, [None, pa.py_buffer(begins)], children=[inner])


def host_text(host: bytes) -> str:
    """``address:port`` of a host as stored, 8 or 20 bytes; IPv6 in brackets."""
    address, port = ipaddress.ip_address(host[:-4]), int.from_bytes(host[-4:], "big", signed=True)
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"
