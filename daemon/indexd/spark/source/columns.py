"""The columns of a message as Spark, Parquet and every other reader of Arrow see them: the schema, and its version.

======================== ========================= ==================================================================
phyOffset                int64                     physical offset: where the frame begins in the log
size                     int32                     bytes of the whole frame
topic                    string
queueId, queueOffset     int32, int64              an inner batch's queue offset is its INNER_BASE
storeTimestamp           int64                     ms since the epoch, as stored: no clock is corrected, no zone applied
bornTimestamp            int64                     the same, by the producer's clock
bornHost, storeHost      string                    ``address:port``; IPv6 as ``[address]:port``
sysFlag                  int32                     all bits (spec rocketmq-store 2.2)
transactionType          string                    bits 2 and 3 of it: ``none``, ``prepared``, ``commit``, ``rollback``
reconsumeTimes           int32
preparedTransactionOffset int64
keys                     list of string            KEYS, split as it is indexed: repeats are kept, empty pieces are not
uniqKey                  string or null            UNIQ_KEY
tags                     string or null            TAGS, whole
tagsCode                 int64                     what a ConsumeQueue holds: TAGS' hash, or when to deliver
properties               map of string to string   all of them, KEYS, UNIQ_KEY and TAGS too (spec rocketmq-store 2.4)
msgId                    string                    the offset message id: hex of store host, port and phyOffset
body                     binary                    as stored, compressed or not; only where it is asked for
======================== ========================= ==================================================================

RocketMQ calls two things msgId. Here it is the one that every stored frame has and no two of a log share, which
``viewMessage`` and ``indexd query message`` take. What clients print as msgId is ``coalesce(uniqKey, msgId)``.

Names and types of a version stay; a column that is added comes last and makes no new version.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from indexd.config.units import nearest
from indexd.errors import UsageError

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

SCHEMA_VERSION = 1
#: The key of the schema's metadata that says the version.
VERSION_KEY = b"indexd.schema.version"

# The names of the inner fields are those that Spark gives them.
KEYS_TYPE = pa.list_(pa.field("element", pa.string(), nullable=False))
PROPERTIES_TYPE = pa.map_(pa.field("key", pa.string(), nullable=False), pa.field("value", pa.string(), nullable=False))

SCHEMA = pa.schema(
    [
        pa.field("phyOffset", pa.int64(), nullable=False),
        pa.field("size", pa.int32(), nullable=False),
        pa.field("topic", pa.string(), nullable=False),
        pa.field("queueId", pa.int32(), nullable=False),
        pa.field("queueOffset", pa.int64(), nullable=False),
        pa.field("storeTimestamp", pa.int64(), nullable=False),
        pa.field("bornTimestamp", pa.int64(), nullable=False),
        pa.field("bornHost", pa.string(), nullable=False),
        pa.field("storeHost", pa.string(), nullable=False),
        pa.field("sysFlag", pa.int32(), nullable=False),
        pa.field("transactionType", pa.string(), nullable=False),
        pa.field("reconsumeTimes", pa.int32(), nullable=False),
        pa.field("preparedTransactionOffset", pa.int64(), nullable=False),
        pa.field("keys", KEYS_TYPE, nullable=False),
        pa.field("uniqKey", pa.string(), nullable=True),
        pa.field("tags", pa.string(), nullable=True),
        pa.field("tagsCode", pa.int64(), nullable=False),
        pa.field("properties", PROPERTIES_TYPE, nullable=False),
        pa.field("msgId", pa.string(), nullable=False),
        pa.field("body", pa.binary(), nullable=False),
    ],
    metadata={VERSION_KEY: str(SCHEMA_VERSION).encode()},
)
ALL_COLUMNS: tuple[str, ...] = tuple(SCHEMA.names)
#: What is read when nothing is said: bodies are most of a log.
DEFAULT_COLUMNS: tuple[str, ...] = tuple(name for name in ALL_COLUMNS if name != "body")


def arrow_schema(columns: Sequence[str] = DEFAULT_COLUMNS) -> pa.Schema:
    """The Arrow schema of these columns, in this order, the version in its metadata."""
    return pa.schema([SCHEMA.field(name) for name in columns], metadata=SCHEMA.metadata)


def spark_schema(columns: Sequence[str]) -> StructType:
    """The schema of these columns as Spark has it; the same as the batches', nullability included."""
    from pyspark.sql.pandas.types import from_arrow_schema  # noqa: PLC0415 - optional where a log is only read

    return from_arrow_schema(arrow_schema(columns))


def parse_columns(text: str | None) -> tuple[str, ...]:
    """Names between commas, in any case; ``*`` is all of them, body too; None all but body. UsageError otherwise."""
    if text is None:
        return DEFAULT_COLUMNS
    known = {name.lower(): name for name in ALL_COLUMNS}
    found: list[str] = []
    for word in text.split(","):
        name = word.strip()
        if name == "*":
            names: Sequence[str] = ALL_COLUMNS
        elif name.lower() in known:
            names = (known[name.lower()],)
        else:
            hint = nearest(name, ALL_COLUMNS, f"there are {', '.join(ALL_COLUMNS)}")
            raise UsageError(f"there is no column {name[:64]!r}", hint)
        twice = [name for name in names if name in found]
        if twice:
            raise UsageError(f"the column {twice[0]} is given twice", "name each column once")
        found += names
    return tuple(found)


def numbers(values: NDArray[Any]) -> pa.Array:
    """The array of these numbers, not copied: who makes it gives its memory away.

    Without ``pyarrow.array``, which loads pandas to ask whether it was given that: a second of each worker's start.
    """
    values = np.ascontiguousarray(values)
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


def texts(values: Sequence[str]) -> pa.Array:
    """The array of these texts."""
    encoded = [value.encode() for value in values]
    offsets = np.fromiter(accumulate(map(len, encoded), initial=0), dtype=np.int32, count=len(encoded) + 1)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.string(), len(encoded), buffers)
