"""What the tests of exports share: the rows that a log holds by the plain decoder, and what a target holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from indexd.commitlog.decoder import DecoderOptions, Message, decode_frame
from indexd.commitlog.format import EndOfFile, NotYetWritten
from indexd.config import Config, load
from support.small_log import SEGMENT_SIZE

_TRANSACTIONS = ("none", "prepared", "commit", "rollback")


def config_of(store: Path | str, data: Path, segment_size: int = SEGMENT_SIZE) -> Config:
    """Of a store with such segments."""
    flags = {"store": str(store), "data": str(data), "segment_size": str(segment_size)}
    return load(flags, None, {"HOME": "/home/op"})


def logged(store: Path, segment_size: int = SEGMENT_SIZE) -> list[Message]:
    """Every message of the log, by the plain decoder."""
    found = []
    options = DecoderOptions(load({}, None, {"HOME": "/home/op"}).store.delay_levels_ms)
    for path in sorted((store / "commitlog").iterdir()):
        base, data, at = int(path.name), path.read_bytes(), 0
        while at < len(data):
            message = decode_frame(data, at, base + at, base + segment_size, options)
            if isinstance(message, EndOfFile | NotYetWritten):
                break
            assert isinstance(message, Message), message
            found.append(message)
            at += message.size
    return found


def row_of(message: Message) -> dict[str, Any]:
    """The message as an export has it, its body too."""
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
        "transactionType": _TRANSACTIONS[message.sys_flag >> 2 & 3],
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


def _host(host: tuple[str, int]) -> str:
    address, port = host
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def files_of(target: Path) -> list[str]:
    """Everything below it, by name."""
    return sorted(path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file())


def parquet_of(target: Path) -> list[Path]:
    """The files that readers see, in the log's order within a partition."""
    return sorted(path for path in target.rglob("*.parquet"))


def rows_of(target: Path) -> list[dict[str, Any]]:
    """All rows of an export without partitions, in the order of the files' names, maps as dicts."""
    rows = [row for path in parquet_of(target) for row in pq.ParquetFile(path).read().to_pylist()]
    return [row | {"properties": dict(row["properties"])} if "properties" in row else row for row in rows]
