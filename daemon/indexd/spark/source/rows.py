"""Reads the messages of a split as Arrow record batches, some MiB of log each.

Which message stands where comes from the reader's own DispatchBatch, and with it every column it has. Only when others
are asked for are the frames looked at once more, and only the rows that are kept: numpy finds where their parts stand,
and Arrow copies them.
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

from indexd.commitlog import format as frame
from indexd.commitlog.batcher import DispatchBatch, TopicTable
from indexd.commitlog.decoder import decode_utf8
from indexd.commitlog.reader import Skipped
from indexd.config import Config
from indexd.errors import DisturbedError
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
            if len(kept):
                yield self._record_batch(batch, kept)

    def _know_topics(self, table: TopicTable) -> None:
        names = [decode_utf8(table.raw_name(topic)) for topic in range(len(table))]
        self._table, self._topics = table, texts(names)
        wanted = self._keep.topics
        self._kept_topics = np.array([wanted is None or name in wanted for name in names], dtype=np.bool_)

    def _kept(self, batch: DispatchBatch) -> Int64s:
        keep, times = self._keep, batch.columns.store_timestamp[: batch.rows]
        mask = self._kept_topics[batch.columns.topic_id[: batch.rows]]
        if keep.start_time is not None:
            mask &= times >= keep.start_time
        if keep.end_time is not None:
            mask &= times < keep.end_time
        return np.flatnonzero(mask)

    def _record_batch(self, batch: DispatchBatch, kept: Int64s) -> pa.RecordBatch:
        def column(name: str) -> NDArray[Any]:
            values: NDArray[Any] = getattr(batch.columns, name)[kept]
            return values

        arrays = {name: numbers(column(field)) for name, field in _OF_BATCH.items() if name in self.schema.names}
        arrays["topic"] = self._topics.take(numbers(column("topic_id")))
        arrays["transactionType"] = _TRANSACTION_TYPES.take(numbers((column("sys_flag") >> 2) & 3))
        if self._looks_at_frames:
            data = self.split_reader.frames(batch)
            places = column("phy_offset"), column("size"), column("store_timestamp")
            frames = Frames(data, batch.begin_offset, *places)
            arrays |= {name: frames.column(name) for name in self.schema.names if name not in arrays}
        return pa.RecordBatch.from_arrays([arrays[name] for name in self.schema.names], schema=self.schema)


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
        try:
            is_same = self._locate(begins) == begins + sizes
            is_same &= (self._ints[begins] == sizes) & (self._longs[begins + 28] == offsets)
            is_same &= (self._longs[self._born_ends] == times) & (self._ends <= len(data))
        except IndexError:  # a length that leads out of the data
            is_same = np.zeros(1, dtype=np.bool_)
        if not is_same.all():
            where = offsets[int(is_same.argmin())]
            raise DisturbedError(f"the log was written anew at or behind {where} while it was read", "read it again")

    def _locate(self, begins: Int64s) -> Int64s:
        # Where the parts of the messages begin and end; the ends of the messages, which are no message's if its magic
        # is unknown.
        self._longs, self._ints, shorts = (_at_each_byte(self._data, kind) for kind in (">i8", ">i4", ">i2"))
        flags, magics = self._ints[begins + 36], self._ints[begins + 4].view(">u4")
        self._born = begins + 48
        self._born_ends = self._born + np.where(flags & frame.FLAG_BORN_HOST_V6, 20, 8)
        self._stored = self._born_ends + 8
        self._stored_ends = self._stored + np.where(flags & frame.FLAG_STORE_HOST_V6, 20, 8)
        self._bodies = self._stored_ends + 16
        self._body_ends = self._bodies + np.maximum(self._ints[self._bodies - 4], 0)
        is_v1 = magics == frame.MAGIC_V1
        topic_sizes = np.where(is_v1, self._data[self._body_ends], shorts[self._body_ends])
        self._properties = self._body_ends + np.where(is_v1, 1, 2) + np.maximum(topic_sizes, 0) + 2
        self._ends: Int64s = self._properties + np.maximum(shorts[self._properties - 2], 0)
        return np.where(is_v1 | (magics == frame.MAGIC_V2), self._ends, -1)

    def column(self, name: str) -> pa.Array:
        """The column of that name, in the type that the schema says."""
        match name:
            case "bornTimestamp":
                return numbers(self._longs[self._born - 8].astype(np.int64))
            case "reconsumeTimes":
                return numbers(self._ints[self._stored_ends].astype(np.int32))
            case "preparedTransactionOffset":
                return numbers(self._longs[self._stored_ends + 4].astype(np.int64))
            case "bornHost":
                return self._hosts(self._born, self._born_ends)
            case "storeHost":
                return self._hosts(self._stored, self._stored_ends)
            case "msgId":
                return self._message_ids()
            case "body":
                return _parts(self._data, self._bodies, self._body_ends, pa.binary())
            case "uniqKey":
                return self._property("UNIQ_KEY")
            case "tags":
                return self._property("TAGS")
            case "keys":
                return self._keys()
        return self._all_properties()

    def _hosts(self, starts: Int64s, ends: Int64s) -> pa.Array:
        hosts = _parts(self._data, starts, ends, pa.binary()).dictionary_encode()
        return texts([host_text(host) for host in hosts.dictionary.to_pylist()]).take(hosts.indices)

    def _message_ids(self) -> pa.Array:
        hosts = _parts(self._data, self._stored, self._stored_ends, pa.binary()).dictionary_encode()
        first = texts([host.hex().upper() for host in hosts.dictionary.to_pylist()]).take(hosts.indices)
        digits = _HEX[self._offsets.astype(">i8").view(np.uint8)].view(np.uint8)
        ends = np.arange(16, len(digits) + 1, 16)
        return pc.binary_join_element_wise(first, _parts(digits, ends - 16, ends, pa.string()), "")

    @cached_property
    def _pairs(self) -> tuple[Int64s, pa.Array, pa.Array]:
        # Where those of each row begin, names and values of the properties that count (spec rocketmq-store 2.4).
        found = _parts(self._data, self._properties, self._ends, pa.binary())
        try:
            found = found.cast(pa.string())
        except pa.ArrowInvalid:  # one of them is no UTF-8
            found = texts([decode_utf8(data) for data in found.to_pylist()])
        # A separator behind each row: then no pair goes on in the next one.
        _, row_begins, joined = pc.binary_join_element_wise(found, "", "\x02").buffers()
        row_ends = np.frombuffer(row_begins, dtype=np.int32)[1 : len(found) + 1] - 1
        data = np.frombuffer(joined, dtype=np.uint8)[: row_ends[-1] + 1]
        marks = np.flatnonzero((data == 1) | (data == 2))
        last = np.flatnonzero(data[marks] == 2)
        first = np.concatenate(([0], last[:-1] + 1))
        ends, name_ends = marks[last], marks[first]
        begins = np.concatenate(([0], ends[:-1] + 1))
        counts = (begins < name_ends) & (name_ends + 1 < ends)
        row_starts = np.append(0, np.cumsum(counts)[np.searchsorted(ends, row_ends)])
        names = _parts(data, begins[counts], name_ends[counts], pa.string())
        return row_starts, names, _parts(data, name_ends[counts] + 1, ends[counts], pa.string())

    def _property(self, name: str) -> pa.Array:
        # Its last value in each row, null without one.
        row_starts, names, values = self._pairs
        pairs = np.flatnonzero(pc.equal(names, name).to_numpy(zero_copy_only=False))
        found = np.full(len(self._offsets), -1, dtype=np.int64)
        found[np.searchsorted(row_starts, pairs, side="right") - 1] = pairs
        validity = pa.py_buffer(np.packbits(found >= 0, bitorder="little"))
        return values.take(pa.Array.from_buffers(pa.int64(), len(found), [validity, pa.py_buffer(found)]))

    def _keys(self) -> pa.Array:
        pieces = pc.split_pattern(self._property("KEYS").fill_null(""), " ")
        kept = pc.not_equal(pieces.values, "")
        begins = np.append(0, np.cumsum(kept.to_numpy(zero_copy_only=False)))[pieces.offsets.to_numpy()]
        return _nested(KEYS_TYPE, begins, pieces.values.filter(kept))

    def _all_properties(self) -> pa.Array:
        row_starts, names, values = self._pairs
        codes, counts = names.dictionary_encode().indices.to_numpy(), np.diff(row_starts)
        # A bit for each name: where no two are of one bit, their sum is what they have together.
        bits, used = np.int64(1) << (codes & 31), row_starts[:-1][counts > 0]
        if len(used) and (np.add.reduceat(bits, used) != np.bitwise_or.reduceat(bits, used)).any():
            # Of two of one name the last value, in the place of the first.
            pairs = np.repeat(np.arange(len(counts)), counts) << 32 | codes
            _, firsts = np.unique(pairs, return_index=True)
            _, lasts = np.unique(pairs[::-1], return_index=True)
            order = np.argsort(firsts)
            row_starts = np.searchsorted(firsts[order], row_starts)
            names, values = names.take(numbers(firsts[order])), values.take(numbers(len(pairs) - 1 - lasts[order]))
        found = pa.Array.from_buffers(_PAIR_TYPE, len(names), [None], children=[names, values])
        return _nested(PROPERTIES_TYPE, row_starts, found)


def _at_each_byte(data: Bytes, kind: str) -> NDArray[Any]:
    # The number of that type that begins there, of every byte; nothing is copied.
    return np.ndarray((max(len(data) - np.dtype(kind).itemsize + 1, 0),), kind, data, strides=(1,))


def _parts(data: Bytes, starts: Int64s, ends: Int64s, kind: pa.DataType) -> pa.Array:
    # What stands between each start and end, which rise: every second stretch of the data.
    bounds = np.concatenate(([0], np.stack((starts, ends), axis=1).ravel())).astype(np.int32)
    stretches = pa.Array.from_buffers(kind, 2 * len(starts), [None, pa.py_buffer(bounds), pa.py_buffer(data)])
    return stretches.take(numbers(np.arange(1, 2 * len(starts), 2)))


def _nested(kind: pa.DataType, begins: NDArray[Any], inner: pa.Array) -> pa.Array:
    return pa.Array.from_buffers(kind, len(begins) - 1, [None, pa.py_buffer(begins.astype(np.int32))], children=[inner])


def host_text(host: bytes) -> str:
    """``address:port`` of a host as stored, 8 or 20 bytes; IPv6 in brackets."""
    address, port = ipaddress.ip_address(host[:-4]), int.from_bytes(host[-4:], "big", signed=True)
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"
