"""Where the log ends now, or a stretch of so many bytes does: an offset at which a message ends and one may begin.

Found by the daemon's own reader, so the newest frame counts by the same rules. Closed segments are not read: the next
one begins where they end.

A DataFrame of the log: splits planned once, each read by a task.

A DataFrame is a snapshot: it ends where the log ended when it was planned, however often it is evaluated. A log that
was cut, written anew or has expired since is an error, and never other rows.

The columns for which frames are looked at: kernels find and copy the plain rows, the plain decoder makes the rest.

A slow row (properties that are no UTF-8, a name twice, very many of them) is decoded by ``commitlog.decoder``, and so
is what that says by definition.
"""

from __future__ import annotations

import ipaddress
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from indexd.commitlog.batcher import DispatchBatch, TopicTable
from indexd.commitlog.decoder import DecoderOptions, Message, decode_frame
from indexd.commitlog.evidence import FrameReader
from indexd.commitlog.format import BLANK_SIZE, Corrupt, NotYetWritten
from indexd.commitlog.reader import LogReader
from indexd.commitlog.segments import Segment, SegmentList
from indexd.config import Config
from indexd.errors import DiskError, DisturbedError, IndexdError, UsageError
from indexd.recovery.compare import once
from indexd.recovery.open import decode_rules, reader_options
from indexd.spark.source.options import SourceOptions, explained, parse_options, time_range
from indexd.spark.source.rows import (
    ALL_COLUMNS,
    KEYS_TYPE,
    PROPERTIES_TYPE,
    Keep,
    RowReader,
    arrow_schema,
    check_end,
    numbers,
    texts,
)
from indexd.spark.source.rows_kernel import CHANGED, LOCATED, ROOM, Spans, gather, locate, locate_texts, offset_ids
from indexd.spark.splits import Split, plan_splits
from indexd.spark.tasks import quiet_gc
from indexd.storage.disk import Disk
from indexd.storage.remote import disk_for

_PAUSE = 0.002
# So many newest messages one after the other, none of which stayed the newest: what is there by now is enough.
_NEWEST_MAX = 3


@dataclass(frozen=True, slots=True)
class End:
    """``offset``: where a message ends; ``message``: where the last one before it begins, None if none was met.

    ``corrupt``: the unreadable bytes that stand there, behind which the log goes on.
    """

    offset: int
    message: int | None = None
    corrupt: Corrupt | None = None


class LogEnd:
    """Looks from any known offset; keeps nothing open between two looks. Raises what reading the log does."""

    def __init__(self, disk: Disk, config: Config) -> None:
        self._disk = disk
        # Neither key hashes nor the columns of a queue are needed to see where messages end.
        outputs = config.outputs.model_copy(update={"consume_queue": False, "sparse": False})
        index = config.index.model_copy(update={"flavour": "3.x"})
        rules = decode_rules(config.model_copy(update={"outputs": outputs, "index": index}))
        options = replace(once(reader_options(config)), check_tail=False)
        self._reader = LogReader(disk, config.store.commit_log_directories, rules, options)

    def __repr__(self) -> str:
        return f"LogEnd({self._reader})"

    @property
    def log(self) -> SegmentList:
        """The segments as they were listed last."""
        return self._reader.log

    def refresh(self) -> None:
        """List the segments again."""
        self._reader.refresh()

    def evidence(self, message: int) -> int | None:
        """The CRC-32 of the frame at ``message`` as it is now (its first 64 KiB); None if none stands there."""
        with FrameReader(self._disk, self.log) as frames:
            found = frames.evidence(message)
        return None if found is None else found.crc

    def store_timestamp(self, message: int) -> int | None:
        """Of the frame at ``message``, ms; None if none stands there."""
        with FrameReader(self._disk, self.log) as frames:
            found = frames.evidence(message)
        return None if found is None else found.store_timestamp

    def is_closed(self, segment: Segment) -> bool:
        """Whether a later segment holds anything: then nothing more is written into this one."""
        return any(self.is_in_use(later) for later in self.log.segments if later.base >= segment.end)

    def from_here(self, begin: int, end: int | None = None) -> End:
        """The last end of a message from ``begin``, where a message or a segment begins, up to ``end``.

        ``end`` None: the end of the log. A first message that is longer than that is taken all the same. Waits for the
        newest message to settle.
        """
        reader = self._reader
        reader.refresh()
        reader.position = self._last_segment(begin, end)
        message: int | None = None
        patience = _Patience(reader)
        try:
            while end is None or reader.position < end:
                found = reader.poll()
                if isinstance(found, Corrupt):
                    follows = found.path is None or reader.frames_follow()
                    return End(found.offset, message, found if follows else None)
                if isinstance(found, NotYetWritten):
                    if not (reader.is_undecided and patience.lasts()):
                        break
                    time.sleep(_PAUSE)
                elif isinstance(found, DispatchBatch):
                    rows = found.rows if end is None else _rows_until(found, end, is_first=found.begin_offset == begin)
                    if rows:
                        message = int(found.columns.phy_offset[rows - 1])
                    if rows < found.rows:
                        return End(int(found.columns.phy_offset[rows]), message)
            return End(reader.position, message)
        finally:
            reader.close()

    def _last_segment(self, begin: int, end: int | None) -> int:
        # Where to begin to look: at the last segment before ``end`` that is in use, if none is missing in between.
        following: list[Segment] = []
        last_end: int | None = None
        for segment in self.log.segments:
            if segment.base <= begin < segment.end:
                last_end = segment.end
            elif segment.base == last_end and (end is None or segment.base <= end):
                following.append(segment)
                last_end = segment.end
        return next((segment.base for segment in reversed(following) if self.is_in_use(segment)), begin)

    def is_in_use(self, segment: Segment) -> bool:
        """Whether the segment holds anything: a broker makes one ahead."""
        try:
            with self._disk.open_read(segment.path) as file:
                return any(file.pread(BLANK_SIZE, 0))
        except DiskError as error:
            if not error.is_missing:
                raise
            return False  # expired just now, or not made yet


class _Patience:
    """Waits for each newest message to settle, but not for ever behind a writer that always puts another one there."""

    def __init__(self, reader: LogReader) -> None:
        self._reader = reader
        self._settled = reader.counters.settled
        self._offset = -1
        self._offsets = 0

    def lasts(self) -> bool:
        """Whether to wait once more at the reader's position."""
        settled = self._reader.counters.settled
        if settled != self._settled:
            self._settled, self._offsets = settled, 0
        if self._reader.position != self._offset:
            self._offset = self._reader.position
            self._offsets += 1
        return self._offsets <= _NEWEST_MAX


def _rows_until(batch: DispatchBatch, end: int, *, is_first: bool) -> int:
    # How many messages of the batch end at ``end`` or before; one at least of the first.
    if batch.end_offset <= end:
        return batch.rows
    begins = batch.columns.phy_offset[: batch.rows]
    rows = int(np.searchsorted(begins, end, side="right")) - 1
    return max(rows, 1) if is_first else max(rows, 0)


class CommitLogReader(DataSourceReader):
    """Pickled to the workers as it is: options and a schema, nothing open."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self._options = parse_options(options, is_stream=False)
        self._task = RowTask(self._options, schema)

    def partitions(self) -> Sequence[InputPartition]:
        """One a split, planned by the driver."""
        with explained():
            return [InputPartition(split) for split in plan(disk_for(self._options.config), self._options)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a split; of none at all where Spark makes a partition of an empty list."""
        return self._task.read(partition.value)


class RowTask:
    """Reads splits in a worker, in the schema that was asked for: that of the options, or the user's own."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._config = options.config
        self._keep = Keep(options.topics, options.start_time, options.end_time)
        self._columns = _columns_of(schema)
        wanted = to_arrow_schema(schema, timezone="UTC")
        own = arrow_schema(self._columns)
        self._cast_to = None if wanted.equals(own) else wanted
        if self._cast_to is not None:
            _check_types(own, wanted)

    def read(self, split: Split | None) -> Iterator[pa.RecordBatch]:
        """Its rows, all of them or an error. Raises what RowReader does, and DisturbedError."""
        if split is None:
            return
        with explained():
            reader = RowReader(disk_for(self._config), self._config, split, self._columns, self._keep)
            for batch in reader:
                yield batch if self._cast_to is None else _cast(batch, self._cast_to)
                quiet_gc()  # behind the first batch: by now the kernels are loaded, too
            check_end(split, reader.next_offset)


def plan(disk: Disk, options: SourceOptions) -> list[Split]:
    """The splits of what the options ask for; the last one ends where the log does now."""
    config, log_end = options.config, LogEnd(disk, options.config)
    begin, end = time_range(disk, options, log_end)
    if options.start_offset is not None:
        begin = max(options.start_offset, begin or 0)
    if options.end_offset is not None:
        end = options.end_offset if end is None else min(options.end_offset, end)
    if begin is not None and end is not None and begin >= end:
        return []
    splits = plan_splits(disk, config, size=options.split_size, slots=machine_slots(), begin=begin, end=end)
    return until_end(splits, log_end) if splits else []


def until_end(splits: list[Split], log_end: LogEnd) -> list[Split]:
    """The same splits, the last one without what the log does not hold yet."""
    last = splits[-1]
    log_end.refresh()
    segment = log_end.log.at(last.begin)
    if segment is None or last.end < segment.end or log_end.is_closed(segment):
        return splits
    found = log_end.from_here(last.begin, last.end)
    if found.corrupt is not None:
        return splits  # the task that meets it says so, or passes over it
    return [*splits[:-1], replace(last, end=found.offset)] if found.offset > last.begin else splits[:-1]


def machine_slots() -> int:
    """How many tasks at once to plan for: right for local masters; elsewhere splitSize says it better."""
    return len(os.sched_getaffinity(0))


def _columns_of(schema: StructType) -> tuple[str, ...]:
    known = {name.lower(): name for name in ALL_COLUMNS}
    for name in schema.names:
        if name.lower() not in known:
            raise UsageError(f"there is no column {name[:64]!r}", f"there are {', '.join(ALL_COLUMNS)}")
    return tuple(known[name.lower()] for name in schema.names)


def _check_types(own: pa.Schema, wanted: pa.Schema) -> None:
    # A schema of the user's own may choose columns and allow nulls, and nothing else.
    for mine, theirs in zip(own, wanted, strict=True):
        if _nullable(mine.type) != _nullable(theirs.type):
            raise UsageError(
                f"the column {mine.name} is {mine.type}, not {theirs.type}",
                "choose columns with the option columns, and cast them afterwards",
            )


def _nullable(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_list(kind):
        return pa.list_(kind.value_type)
    if pa.types.is_map(kind):
        return pa.map_(kind.key_type, kind.item_type)
    return kind


def _cast(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    columns = [column.cast(field.type) for column, field in zip(batch.columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


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
