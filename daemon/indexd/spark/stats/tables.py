"""The report as Parquet: small tables of one schema version, which pandas, DuckDB and Spark read.

Each file's metadata has ``indexd.stats``, the version. Times are timestamps in UTC (ms), sizes bytes::

    summary             one row: the store, the offsets that were read, and the totals
    topic_hours         by topic and hour: messages, bytes, body bytes, keys, messages without keys, tagged, entries
    keys                the most frequent keys, tags and hosts: kind, topic, text, count, whether the count is exact
    key_occurrences     distinct keys (kind KEYS or UNIQ_KEY) by how often they occur
    body_sizes          messages and bytes by body size, from and to included
    clock_events        the largest steps back and silences: offset, times before and after
    index_files         the files an index would have: entries, used slots, chains
    chains              slots and entries by chain length, from and to included, of all files
    queries             by range of time: queries that were tried, wrong answers and why

Of a quick run the last three are empty.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from indexd.spark.stats.names import HOST, KEYS, TAGS, UNIQ_KEY
from indexd.spark.stats.report import VERSION
from indexd.storage.disk import Disk

Row = dict[str, Any]
_TIME = pa.timestamp("ms", tz="UTC")
_COUNTS = ("messages", "bytes", "bodyBytes", "keys", "withoutKeys", "withoutAnyKey", "tagged", "entries")
_FIELDS: dict[str, list[tuple[str, pa.DataType]]] = {
    "summary": [
        ("store", pa.string()),
        ("flavour", pa.string()),
        ("beginOffset", pa.int64()),
        ("endOffset", pa.int64()),
        ("skippedBytes", pa.int64()),
        ("firstStoreTimestamp", _TIME),
        ("lastStoreTimestamp", _TIME),
        *((name, pa.int64()) for name in _COUNTS),
    ],
    "topic_hours": [("topic", pa.string()), ("hour", _TIME), *((name, pa.int64()) for name in _COUNTS)],
    "keys": [
        ("kind", pa.string()),
        ("topic", pa.string()),
        ("text", pa.string()),
        ("count", pa.int64()),
        ("isExact", pa.bool_()),
        ("phyOffset", pa.int64()),
    ],
    "key_occurrences": [
        ("kind", pa.string()),
        ("from", pa.int64()),
        ("to", pa.int64()),
        ("keys", pa.int64()),
        ("isExact", pa.bool_()),
    ],
    "body_sizes": [(name, pa.int64()) for name in ("from", "to", "messages", "bytes")],
    "clock_events": [
        ("kind", pa.string()),
        ("phyOffset", pa.int64()),
        ("before", _TIME),
        ("after", _TIME),
        ("ms", pa.int64()),
    ],
    "index_files": [
        *((name, pa.int64()) for name in ("file", "entries", "usedSlots", "longestChain")),
        ("meanChain", pa.float64()),
        ("begin", _TIME),
        ("end", _TIME),
    ],
    "chains": [(name, pa.int64()) for name in ("from", "to", "slots", "entries")],
    "queries": [
        ("range", pa.string()),
        ("spanMs", pa.int64()),
        *((name, pa.int64()) for name in ("asked", "wrong", "limit", "missed", "collision", "outside", "repeated")),
        ("wrongShare", pa.float64()),
    ],
}
SCHEMAS = {name: pa.schema(fields, metadata={"indexd.stats": str(VERSION)}) for name, fields in _FIELDS.items()}


def write_tables(report: Row, disk: Disk, folder: Path) -> list[Path]:
    """One Parquet file a table into ``folder``, which is made; files of those names are replaced. Raises DiskError."""
    disk.make_dir(folder)
    written = []
    for name, rows_of in _ROWS.items():
        sink = pa.BufferOutputStream()
        parquet.write_table(pa.Table.from_pylist(rows_of(report), schema=SCHEMAS[name]), sink, compression="zstd")
        written.append(folder / f"{name}.parquet")
        disk.write_atomically(written[-1], sink.getvalue().to_pybytes(), durable=False)
    return written


def _keys(report: Row) -> list[Row]:
    kinds = ((KEYS, "hotKeys"), (UNIQ_KEY, "hotUniqKeys"), (TAGS, "tags"), (HOST, "hosts"))
    return [
        row | {"kind": kind, "isExact": report[field]["isExact"]}
        for kind, field in kinds
        for row in report[field]["top"]
    ]


def _occurrences(report: Row) -> list[Row]:
    kinds = ((KEYS, "keysSeen"), (UNIQ_KEY, "uniqKeysSeen"))
    return [
        row | {"kind": kind, "isExact": report[field]["isExact"]}
        for kind, field in kinds
        for row in report[field]["byOccurrences"]
    ]


def _events(report: Row) -> list[Row]:
    kinds = (("step back", "largestSteps"), ("silence", "largestSilences"))
    return [row | {"kind": kind} for kind, field in kinds for row in report["clock"][field]]


def _of_index(*path: str) -> Callable[[Row], list[Row]]:
    def rows_of(report: Row) -> list[Row]:
        found: Any = report["index"]
        for name in path if found else ():
            found = found[name]
        return found or []

    return rows_of


_ROWS: dict[str, Callable[[Row], list[Row]]] = {
    "summary": lambda report: [report],
    "topic_hours": lambda report: list(report["hours"]),
    "keys": _keys,
    "key_occurrences": _occurrences,
    "body_sizes": lambda report: list(report["bodySizes"]["buckets"]),
    "clock_events": _events,
    "index_files": _of_index("files"),
    "chains": _of_index("chains"),
    "queries": _of_index("queries", "ranges"),
}
