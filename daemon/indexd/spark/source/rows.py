"""Reads the messages of a split as Arrow record batches, some MiB of log each.

Which message stands where comes from the reader's own DispatchBatch, and with it every column it has. Only when others
are asked for are the frames looked at once more, and only the rows that are kept: kernels find where their parts stand,
and copy them.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
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
from indexd.storage.remote import disk_for

Bytes = NDArray[np.uint8]
Int64s = NDArray[np.int64]

#: Columns whose arrays a batch already has.
OF_BATCH = {
    "phyOffset": "phy_offset",
    "size": "size",
    "queueId": "queue_id",
    "queueOffset": "queue_offset",
    "storeTimestamp": "store_timestamp",
    "sysFlag": "sys_flag",
    "tagsCode": "tags_code",
}
_TRANSACTION_TYPES = texts(["none", "prepared", "commit", "rollback"])
_PAIR_TYPE = pa.struct([PROPERTIES_TYPE.key_field, PROPERTIES_TYPE.item_field])
# More names of properties than bits of a number that may be added up.
_NAMES_MAX = 48
# A byte as two hexadecimal digits.
_HEX = np.frombuffer(bytes(range(256)).hex().upper().encode(), dtype=np.uint16)


@dataclass(frozen=True, slots=True)
class RowFilter:
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
        keep: RowFilter | None = None,
    ) -> None:
        self.schema = arrow_schema(columns)
        # Rows need the columns of a queue whatever is built, and key hashes the less, the fewer a flavour has.
        outputs = config.outputs.model_copy(update={"consume_queue": True})
        index = config.index.model_copy(update={"flavour": "3.x"})
        self.split_reader = SplitReader(disk, config.model_copy(update={"outputs": outputs, "index": index}), split)
        self.skipped_bytes = 0
        self._keep = keep or RowFilter()
        self._looks_at_frames = not {*OF_BATCH, "topic", "transactionType"}.issuperset(columns)
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
        def column(name: str) -> Any:
            return getattr(batch.columns, name)[kept]

        wanted = self.schema.names
        arrays = {name: numbers(column(field)) for name, field in OF_BATCH.items() if name in wanted}
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


def read_rows(config: Config, columns: Sequence[str], keep: RowFilter, split: Split) -> Iterator[pa.RecordBatch]:
    """All rows of a split. DisturbedError if it has not been read to its end: the rows may be others by now."""
    reader = RowReader(disk_for(config), config, split, columns, keep)
    yield from reader
    if (end := reader.split_reader.next_offset) != split.end:
        raise DisturbedError(
            f"the log has changed since it was split: messages from {split.begin} on"
            f" were to end at {split.end}, and end at {end}",
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
        made: dict[str, Callable[[], pa.Array]] = {
            "bornTimestamp": partial(self._numbers, self._born - 8, ">i8"),
            "reconsumeTimes": partial(self._numbers, self._stored_ends, ">i4"),
            "preparedTransactionOffset": partial(self._numbers, self._stored_ends + 4, ">i8"),
            "bornHost": partial(self._hosts, self._born, self._born_ends),
            "storeHost": partial(self._hosts, self._stored, self._stored_ends),
            "msgId": self._message_ids,
            "body": partial(_parts, self._data, self._bodies, self._body_ends),
            "uniqKey": partial(self._property, "UNIQ_KEY"),
            "tags": partial(self._property, "TAGS"),
            "keys": self._keys,
            "properties": self._all_properties,
        }
        return made[name]()

    def _numbers(self, places: Int64s, kind: str) -> pa.Array:
        # A view of the number that begins there, of every byte: nothing is copied but what is asked for.
        count = len(self._data) - np.dtype(kind).itemsize + 1
        at_each_byte = np.ndarray((max(count, 0),), kind, self._data, strides=(1,))
        return numbers(at_each_byte[places].astype(kind[1:]))

    def _hosts(self, starts: Int64s, ends: Int64s, show: Callable[[bytes], str] | None = None) -> pa.Array:
        hosts = _parts(self._data, starts, ends).dictionary_encode()
        return texts([*map(show or host_text, hosts.dictionary.to_pylist())]).take(hosts.indices)

    def _message_ids(self) -> pa.Array:
        first = self._hosts(self._stored, self._stored_ends, lambda host: host.hex().upper())
        buffers = (
            np.arange(0, 16 * len(first) + 1, 16, dtype=np.int32),
            _HEX[self._offsets.astype(">i8").view(np.uint8)],
        )
        digits = pa.Array.from_buffers(pa.string(), len(first), [None, *map(pa.py_buffer, buffers)])
        return pc.binary_join_element_wise(first, digits, "")

    @cached_property
    def _pairs(self) -> tuple[NDArray[np.int64], Int64s, pa.Array, pa.Array]:
        # The properties that count: where those of each row begin; of each its row, name and value.
        room = int((self._ends - self._properties).sum()) // 4 + len(self._ends)
        places, starts = np.empty((3, room), dtype=np.int64), np.empty(len(self._ends) + 1, dtype=np.int64)
        kernel.locate_pairs(self._data, self._properties, self._ends, places, starts)
        begins, middles, ends = places[:, : starts[-1]]
        names, values = _texts(self._data, begins, middles), _texts(self._data, middles + 1, ends)
        return starts, np.repeat(np.arange(len(self._ends)), np.diff(starts)), names, values

    def _property(self, name: str) -> pa.Array:
        # The last value of that name in each row, null without one.
        _, rows, names, values = self._pairs
        found = np.flatnonzero(pc.equal(names, name).to_numpy(zero_copy_only=False))
        last = np.full(len(self._ends), -1)
        last[rows[found]] = found
        validity = pa.py_buffer(np.packbits(last >= 0, bitorder="little"))
        return values.take(pa.Array.from_buffers(pa.int64(), len(last), [validity, pa.py_buffer(last)]))

    def _keys(self) -> pa.Array:
        pieces = pc.split_pattern(self._property("KEYS").fill_null(""), " ")
        kept = pc.greater(pc.binary_length(pieces.flatten()), 0)
        rows = pc.list_parent_indices(pieces).filter(kept).to_numpy()
        starts = np.searchsorted(rows, np.arange(len(self._ends) + 1))
        return _nested(KEYS_TYPE, starts, pieces.flatten().filter(kept))

    def _all_properties(self) -> pa.Array:
        starts, rows, names, values = self._pairs
        encoded = names.dictionary_encode()
        codes = encoded.indices.to_numpy()
        if _has_repeats(codes.astype(np.int64), starts, len(encoded.dictionary)):
            # Of two of one name the last value, in the place of the first.
            pairs = rows << 32 | codes
            firsts = np.unique(pairs, return_index=True)[1]
            lasts = len(pairs) - 1 - np.unique(pairs[::-1], return_index=True)[1]
            order = np.argsort(firsts)
            starts = np.searchsorted(firsts[order], starts)
            names, values = names.take(numbers(firsts[order])), values.take(numbers(lasts[order]))
        pairs = pa.Array.from_buffers(_PAIR_TYPE, len(names), [None], children=[names, values])
        return _nested(PROPERTIES_TYPE, starts, pairs)


def _has_repeats(codes: Int64s, starts: Int64s, names: int) -> bool:
    # Whether a row may have a name twice: a bit for each name, and their sum is more than all of them together. Rows
    # have less than 2^14 properties, so no sum leaves 64 bits.
    if names > _NAMES_MAX or not len(codes):
        return names > _NAMES_MAX
    bits, begins = np.int64(1) << codes, starts[:-1][np.diff(starts) > 0]
    return bool((np.add.reduceat(bits, begins) != np.bitwise_or.reduceat(bits, begins)).any())


def _parts(data: Bytes, starts: Int64s, ends: Int64s) -> pa.Array:
    # What stands between each start and end, copied.
    offsets = np.zeros(len(starts) + 1, dtype=np.int32)
    np.cumsum(ends - starts, dtype=np.int32, out=offsets[1:])
    # Arrow's own memory, which it uses again; fresh pages of the kernel's would have to be zeroed first.
    found = pa.allocate_buffer(int(offsets[-1]) + kernel.SLACK)
    kernel.gather(data, starts, ends, np.frombuffer(found, dtype=np.uint8))
    buffers = [None, pa.py_buffer(offsets), found.slice(0, int(offsets[-1]))]
    return pa.Array.from_buffers(pa.binary(), len(starts), buffers)


def _texts(data: Bytes, starts: Int64s, ends: Int64s) -> pa.Array:
    found = _parts(data, starts, ends)
    try:
        return found.cast(pa.string())
    except pa.ArrowInvalid:  # one of them is no UTF-8
        return texts([decode_utf8(one) for one in found.to_pylist()])


def _nested(kind: pa.DataType, begins: NDArray[Any], inner: pa.Array) -> pa.Array:
    offsets = pa.py_buffer(begins.astype(np.int32))
    return pa.Array.from_buffers(kind, len(begins) - 1, [None, offsets], children=[inner])


def host_text(host: bytes) -> str:
    """``address:port`` of a host as stored, 8 or 20 bytes; IPv6 in brackets."""
    address, port = ipaddress.ip_address(host[:-4]), int.from_bytes(host[-4:], "big", signed=True)
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"
