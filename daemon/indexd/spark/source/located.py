"""The columns for which frames are looked at: kernels find and copy the plain rows, the plain decoder makes the rest.

A slow row (properties that are no UTF-8, a name twice, very many of them) is decoded by ``commitlog.decoder``, and so
is what that says by definition.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from indexd.commitlog.decoder import DecoderOptions, Message, decode_frame
from indexd.commitlog.dispatch import TopicTable
from indexd.errors import DisturbedError, IndexdError
from indexd.spark.source.arrays import numbers, texts
from indexd.spark.source.columns import KEYS_TYPE, PROPERTIES_TYPE
from indexd.spark.source.rows_kernel import CHANGED, LOCATED, Spans, gather, locate, offset_ids
from indexd.spark.source.texts_kernel import ROOM, locate_texts

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
