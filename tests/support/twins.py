"""The same bytes through the kernel and through the plain decoder, in one shape, so that a test can compare them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from indexd.commitlog.batcher import DispatchBatch, TopicTable, make_columns, make_rules, trimmed
from indexd.commitlog.decoder import DecoderOptions, Message, decode_frame, decode_utf8
from indexd.commitlog.format import EndOfFile, NotYetWritten, Outcome, Reason
from indexd.commitlog.kernel import decode_frames
from indexd.index.file import IndexFile
from indexd.index.format import FLAVOURS, Flavour, index_key_hash
from indexd.index.kernel import BUFFER_FULL
from support.naive import NaiveMessage, key_hash, naive_check, split_keys
from support.strategies import Sample

# RocketMQ's 18 levels, ms.
DELAYS = tuple(
    1000 * s for s in (1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
)
FRAME_SIZE_MAX = 1 << 22
_U64 = np.uint64


@dataclass(frozen=True, slots=True)
class DispatchRequest:
    """One message as RocketMQ's DispatchRequest shows it, but with key hashes where Java has the key strings."""

    topic: str
    queue_id: int
    commit_log_offset: int
    msg_size: int
    tags_code: int
    store_timestamp: int
    consume_queue_offset: int
    batch_size: int
    sys_flag: int
    key_hashes: tuple[int, ...]


def request_at(batch: DispatchBatch, row: int) -> DispatchRequest:
    """One row of a batch."""
    columns = batch.columns
    first, last = (int(position) for position in columns.key_start[row : row + 2])
    return DispatchRequest(
        topic=decode_utf8(batch.topics.raw_name(int(columns.topic_id[row]))),
        queue_id=int(columns.queue_id[row]),
        commit_log_offset=int(columns.phy_offset[row]),
        msg_size=int(columns.size[row]),
        tags_code=int(columns.tags_code[row]),
        store_timestamp=int(columns.store_timestamp[row]),
        consume_queue_offset=int(columns.queue_offset[row]),
        batch_size=int(columns.batch_size[row]),
        sys_flag=int(columns.sys_flag[row]),
        key_hashes=tuple(int(value) for value in columns.key_hash[first:last]),
    )


@dataclass(frozen=True)
class Stretch:
    """``data[start:limit]`` is what may be read; byte 0 of ``data`` is at physical offset ``base``."""

    data: bytes
    start: int
    limit: int
    base: int
    segment_end: int

    @classmethod
    def of(cls, data: bytes, phy_offset: int = 0, segment_end: int = 1 << 50) -> Stretch:
        """Just these bytes, at ``phy_offset``."""
        return cls(data, 0, len(data), phy_offset, segment_end)

    def within(self, before: bytes, after: bytes) -> Stretch:
        """The same bytes between others that must not matter; ``before`` may not be longer than ``base``."""
        inner = self.data[self.start : self.limit]
        start = len(before)
        base = self.base + self.start - start
        return Stretch(before + inner + after, start, start + len(inner), base, self.segment_end)


@dataclass(frozen=True)
class Decoding:
    """Every message, then what ended the stretch, where, and the total size that a frame begun there claims."""

    requests: tuple[DispatchRequest, ...]
    outcome: Outcome
    reason: str
    position: int
    needed: int


def _decoded(
    stretch: Stretch, flavour: str, rows_max: Sequence[int], *, check_crc: bool
) -> Iterator[tuple[DispatchBatch, int, int, int]]:
    # Each batch with the outcome, the reason and the total size that ``decode_frames`` ends with.
    table = TopicTable(1 << 13, 1 << 21)
    kind, buffer = FLAVOURS[flavour], np.frombuffer(stretch.data, dtype=np.uint8)
    rules = make_rules(
        DELAYS,
        check_crc=check_crc,
        want_uniq_key=kind.uniq_key,
        want_tags=kind.tags,
        frame_size_max=FRAME_SIZE_MAX,
    )
    limits = _U64(stretch.limit), _U64(stretch.base), _U64(stretch.segment_end)
    position, made = stretch.start, 0
    while True:
        columns = make_columns(rows_max[made % len(rows_max)], 0)
        outcome, reason, at, total, rows, keys = decode_frames(
            buffer, _U64(position), *limits, rules, columns, table.arrays
        )
        begin, end = stretch.base + position, stretch.base + int(at)
        yield (
            DispatchBatch(trimmed(columns, int(rows), int(keys)), int(rows), begin, end, table),
            outcome,
            reason,
            total,
        )
        if outcome != Outcome.BATCH_FULL:
            return
        assert rows, "no room for one message, or more topics than a table of the tests tells apart"
        made += 1
        position = int(at)


def by_kernel(stretch: Stretch, flavour: str = "5.4", *, check_crc: bool = True, rows_max: int = 64) -> Decoding:
    """Through ``decode_frames``, with fresh columns whenever the batch is full."""
    found = list(_decoded(stretch, flavour, [rows_max], check_crc=check_crc))
    requests = [request_at(batch, row) for batch, *_ in found for row in range(batch.rows)]
    batch, outcome, reason, total = found[-1]
    text = Reason(reason).text if outcome == Outcome.CORRUPT else ""
    needed = int(total) if outcome == Outcome.NOT_YET_WRITTEN else 0
    return Decoding(tuple(requests), Outcome(outcome), text, batch.end_offset, needed)


def by_decoder(stretch: Stretch, flavour: str = "5.4", *, check_crc: bool = True) -> Decoding:
    """Through ``decode_frame``, one after the other; key hashes are computed from the strings."""
    options = DecoderOptions(DELAYS, FRAME_SIZE_MAX, check_crc)
    readable, begin = stretch.data[stretch.start : stretch.limit], stretch.base + stretch.start
    requests: list[DispatchRequest] = []
    found = decode_frame(readable, 0, begin, stretch.segment_end, options)
    while isinstance(found, Message):
        requests.append(request_of(found, FLAVOURS[flavour]))
        end = found.phy_offset + found.size
        found = decode_frame(readable, end - begin, end, stretch.segment_end, options)
    outcome = Outcome.END_OF_FILE if isinstance(found, EndOfFile) else Outcome.CORRUPT
    if isinstance(found, NotYetWritten):
        return Decoding(tuple(requests), Outcome.NOT_YET_WRITTEN, "", found.offset, found.needed)
    return Decoding(tuple(requests), outcome, getattr(found, "reason", ""), found.offset, 0)


def by_naive(data: bytes, flavour: str = "5.4") -> tuple[DispatchRequest, ...]:
    """Through the naive check, to the first thing that is no message."""
    return tuple(naive_request(message, FLAVOURS[flavour]) for message in naive_messages(data))


def naive_messages(data: bytes) -> Iterator[NaiveMessage]:
    """The messages of ``data`` as the naive check reads them."""
    _, position, message = naive_check(data, 0)
    while message is not None:
        yield message
        _, size, message = naive_check(data, position)
        position += size


def request_of(message: Message, flavour: Flavour) -> DispatchRequest:
    """A Message as a row of a batch."""
    batched = "INNER_NUM" in message.properties and "INNER_BASE" in message.properties
    batch_size = int(message.properties["INNER_NUM"]) if batched else 1
    return _request(message, message.queue_offset, batch_size, message.keys, flavour)


def naive_request(message: NaiveMessage, flavour: Flavour) -> DispatchRequest:
    """A NaiveMessage as a row of a batch."""
    return _request(message, message.batch_base, message.batch_size, split_keys(message.keys), flavour)


def _request(
    message: Message | NaiveMessage, queue_offset: int, batch_size: int, keys: list[str], flavour: Flavour
) -> DispatchRequest:
    return DispatchRequest(
        message.topic, message.queue_id, message.phy_offset, message.size, message.tags_code, message.store_timestamp,
        queue_offset, batch_size, message.sys_flag,
        hashes(message.topic, message.uniq_key, keys, message.tags, flavour),
    )  # fmt: skip


def hashes(topic: str, uniq_key: str | None, keys: list[str], tags: str | None, flavour: Flavour) -> tuple[int, ...]:
    """The key hashes of a message in the order they are indexed (spec 4.2, 4.3)."""
    texts = [f"{topic}#{key}" for key in keys]
    if flavour.uniq_key and uniq_key is not None:
        texts.insert(0, f"{topic}#{uniq_key}")
    if flavour.tags and tags:
        texts.append(f"{topic}#T#{tags}")
    return tuple(key_hash(text) for text in texts)


def encode(samples: Sequence[Sample], base: int = 0, *, prop_crc: bool = False) -> bytes:
    """The frames of ``samples`` one behind the other, the first at physical offset ``base``."""
    data = b""
    for sample in samples:
        data += sample.encode(base + len(data), prop_crc=prop_crc)
    return data


def batches(data: bytes, flavour: str, rows_max: Sequence[int], base: int = 0) -> list[DispatchBatch]:
    """The messages of ``data`` as batches of at most ``rows_max[0]``, ``rows_max[1]``, ... rows, round and round."""
    found = [batch for batch, *_ in _decoded(Stretch.of(data, base), flavour, rows_max, check_crc=True)]
    assert found[-1].end_offset == base + len(data)
    return [batch for batch in found if batch.rows]


def put_key(file: IndexFile, topic: str, key: str, phy_offset: int, store_timestamp: int, flavour: Flavour) -> int:
    """RocketMQ's putKey on a file that is being built; the kernel's outcome."""
    columns = make_columns(1, 1)
    columns.phy_offset[0], columns.store_timestamp[0], columns.sys_flag[0] = phy_offset, store_timestamp, 0
    columns.key_start[:] = (0, 1)
    columns.key_hash[0] = index_key_hash(topic, key)
    batch = DispatchBatch(columns, 1, phy_offset, phy_offset + 1, TopicTable())
    # Starting inside the row: putKey knows neither the skip rule nor transaction types.
    put, _, _ = file.put_batch(batch, flavour, 0, 0)
    if put == BUFFER_FULL:
        file.write_entries()
        put, _, _ = file.put_batch(batch, flavour, 0, 0)
    return put
