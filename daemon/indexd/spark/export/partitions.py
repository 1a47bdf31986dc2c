"""Partitions of an export: ``topic=NAME/day=YYYY-MM-DD`` directories as Hive names them, and which rows go into which.

A value is percent-escaped as Spark, DuckDB and pyarrow undo it: every ASCII character but letters, digits and ``_.-``
is, so that no topic can name another directory; other scripts stay as they are. The empty topic, and a store time
that no calendar of four digits has, become Hive's name for none, which readers show as null.
"""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from indexd.errors import UsageError

#: Partition -> the column that it is made of.
SOURCES = {"topic": "topic", "day": "storeTimestamp"}
#: Hive's name for none.
NONE = "__HIVE_DEFAULT_PARTITION__"
# A file system's longest name, bytes.
_NAME_MAX = 255
_ESCAPED = re.compile(r"[^A-Za-z0-9_.\-\u0080-\U0010FFFF]")
_DAY_MS = 86_400_000
# Days since 1970 of 0001-01-01 and 9999-12-31.
_DAY_MIN, _DAY_MAX = -719_162, 2_932_896


def topic_directory(topic: str) -> str:
    """``topic=...``; UsageError for one that is too long for a directory's name."""
    value = _ESCAPED.sub(lambda found: f"%{ord(found[0]):02X}", topic) or NONE
    if topic == NONE:
        value = "%5F" + value[1:]
    name = f"topic={value}"
    if len(name.encode()) > _NAME_MAX:
        raise UsageError(
            f"the topic {topic[:60]}... of {len(topic.encode())} bytes is too long for a directory's name",
            "leave topic out of --partition-by, or give other --topics",
        )
    return name


def day_directory(day: int) -> str:
    """``day=YYYY-MM-DD`` in UTC, of days since 1970."""
    return f"day={np.datetime64(day, 'D') if _DAY_MIN <= day <= _DAY_MAX else NONE}"


class Partitioner:
    """Splits tables by ``by``, some of SOURCES in the order of the directories; none: one partition without a name."""

    def __init__(self, by: tuple[str, ...]) -> None:
        self._by = by
        self._topics: dict[str, str] = {}

    def split(self, table: pa.Table) -> list[tuple[str, pa.Table]]:
        """(directory, its rows in their order); the tables are slices of one."""
        if not self._by or not table.num_rows:
            return [("", table)] if table.num_rows else []
        code = np.zeros(table.num_rows, dtype=np.int64)
        names = [""]
        for by in self._by:
            codes, below = self._codes(by, table)
            kept, code = np.unique(code * len(below) + codes, return_inverse=True)
            names = [f"{names[number // len(below)]}{below[number % len(below)]}/" for number in kept]
        if len(names) == 1:
            return [(names[0], table)]
        order = np.argsort(code, kind="stable")
        ends = np.cumsum(np.bincount(code, minlength=len(names)))
        rows = table.take(pa.array(order))
        return [
            (name, rows.slice(int(end) - int(count), int(count)))
            for name, end, count in zip(names, ends, np.diff(ends, prepend=0), strict=True)
        ]

    def _codes(self, by: str, table: pa.Table) -> tuple[NDArray[np.int64], list[str]]:
        # Of each row a number, and the directory that each number stands for.
        column = table[SOURCES[by]].combine_chunks()
        if by == "day":
            days, codes = np.unique(column.to_numpy() // _DAY_MS, return_inverse=True)
            return codes, [day_directory(int(day)) for day in days]
        encoded = column.dictionary_encode()
        topics = encoded.dictionary.to_pylist()
        for topic in topics:
            if topic not in self._topics:
                self._topics[topic] = topic_directory(topic)
        return encoded.indices.to_numpy().astype(np.int64), [self._topics[topic] for topic in topics]
