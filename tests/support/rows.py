"""What a row of the data source must be, told from the plain decoder's message alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from indexd.commitlog.decoder import DecoderOptions, Message, decode_frame
from indexd.config import Config, load
from indexd.spark.source.columns import DEFAULT_COLUMNS
from indexd.spark.source.rows import RowFilter, RowReader
from indexd.spark.splits import Split
from indexd.storage.disk import Disk
from support.small_log import SEGMENT_SIZE
from support.twins import DELAYS, FRAME_SIZE_MAX

_TYPES = {0x0: "none", 0x4: "prepared", 0x8: "commit", 0xC: "rollback"}


def config_of(store: Path | str, segment_size: int = SEGMENT_SIZE, **keys: object) -> Config:
    """The configuration for a small log; the newest frame settles at once."""
    given = {name: str(value) for name, value in keys.items()}
    return load({"store": str(store), "segment_size": str(segment_size), "settle_ms": "1", **given}, None, {})


def row_of(message: Message) -> dict[str, Any]:
    """A message as a row with every column, as ``RecordBatch.to_pylist`` gives it but for ``properties``: a dict."""
    return {
        "phyOffset": message.phy_offset,
        "size": message.size,
        "topic": message.topic,
        "queueId": message.queue_id,
        "queueOffset": message.queue_offset,
        "storeTimestamp": message.store_timestamp,
        "bornTimestamp": message.born_timestamp,
        "bornHost": _host(message.born_host),
        "storeHost": _host(message.store_host),
        "sysFlag": message.sys_flag,
        "transactionType": _TYPES[message.sys_flag & 0xC],
        "reconsumeTimes": message.reconsume_times,
        "preparedTransactionOffset": message.prepared_transaction_offset,
        "keys": message.keys,
        "uniqKey": message.uniq_key,
        "tags": message.tags,
        "tagsCode": message.tags_code,
        "properties": message.properties,
        "msgId": message.offset_msg_id,
        "body": message.body,
    }


def messages_of(data: bytes, base: int = 0, segment_end: int | None = None) -> list[Message]:
    """The messages of one segment's bytes, up to the first thing that is none."""
    end = base + len(data) if segment_end is None else segment_end
    messages: list[Message] = []
    position = 0
    while True:
        found = decode_frame(data, position, base + position, end, DecoderOptions(DELAYS, FRAME_SIZE_MAX))
        if not isinstance(found, Message):
            return messages
        messages.append(found)
        position += found.size


def rows_of(data: bytes, base: int = 0, segment_end: int | None = None) -> list[dict[str, Any]]:
    """The same as rows."""
    return [row_of(message) for message in messages_of(data, base, segment_end)]


def logged(store: Path) -> list[Message]:
    """Every message of a store's log, segment after segment."""
    paths = sorted((store / "commitlog").iterdir())
    return [message for path in paths for message in messages_of(path.read_bytes(), int(path.name))]


def rows_of_log(directory: Path) -> list[dict[str, Any]]:
    """The rows of a whole log, segment after segment."""
    return [row_of(message) for message in logged(directory.parent)]


def record_batches(
    disk: Disk, config: Config, split: Split, columns: Sequence[str] = DEFAULT_COLUMNS, keep: RowFilter | None = None
) -> Iterator[pa.RecordBatch]:
    """The rows of a split, which ends where it was planned to, or with the log."""
    reader = RowReader(disk, config, split, columns, keep)
    yield from reader
    assert reader.split_reader.ends_log or reader.split_reader.next_offset == split.end


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """A row as pyarrow or Spark gives it, in the form of :func:`row_of`."""
    found = dict(row)
    if "properties" in found:
        pairs, found["properties"] = found["properties"], dict(found["properties"])
        assert len(pairs) == len(found["properties"]), "a name twice"
    if "body" in found:
        found["body"] = bytes(found["body"])
    return found


def _host(host: tuple[str, int]) -> str:
    address, port = host
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
