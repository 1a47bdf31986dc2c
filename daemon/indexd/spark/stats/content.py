"""Counts the messages of one split of the log inside a Spark task, as rows that Spark adds up over all splits.

A count row says how often something of one ``kind`` was seen (``COUNT_TYPES``): a measure by topic and time, a body
size, a flag, or a text (a key, a unique key, tags, a producer's host) with the offset of the first message that has it.
A task adds up what fits into some 50 MB and hands it on; every sum over all splits is exact.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from indexd.config import Config
from indexd.index.format import FLAVOURS, Flavour
from indexd.spark.source.rows import RowReader
from indexd.spark.splits import Split
from indexd.storage.remote import disk_for

HOUR = 3_600_000
#: What a bin of store times may be long, in ms; each divides the next.
STEPS = (1000, 5000, 15_000, 30_000, 60_000, 300_000, 900_000, HOUR, 3 * HOUR, 6 * HOUR, 12 * HOUR, 24 * HOUR)
#: So many bins at most are worth telling apart.
BINS_MAX = 120
#: The bin of times that no clock shows.
NO_TIME = -(1 << 63)
#: So many steps of the clock, and so many silences, are kept: the largest.
EVENTS_MAX = 100

KEYS, UNIQ_KEY, TAGS, HOST = TEXTS = ("KEYS", "UNIQ_KEY", "TAGS", "host")
#: What is counted by topic and time.
MEASURES = ("messages", "bytes", "bodyBytes", "keys", "withoutKeys", "withoutAnyKey", "tagged", "entries")
SIZE, SIZE_BYTES, FLAG, SPLIT = "size", "sizeBytes", "flag", "split"
#: Rows that agree in these count the same thing.
COUNTED = ("kind", "topic", "text", "at")
COUNT_TYPES = "kind string, topic string, text string, at long, amount long, first long"

_COLUMNS = ("phyOffset", "topic", "storeTimestamp", "bornHost", "sysFlag", "size", "keys", "uniqKey", "tags", "body")
_DEFAULTS: dict[str, Any] = {
    "topic": pa.scalar(""),
    "text": pa.scalar(""),
    "at": pa.scalar(0, pa.int64()),
    "amount": pa.scalar(1, pa.int64()),
    "first": pa.scalar(0, pa.int64()),
}
_WAITING_MAX = 1 << 18
_PORT = r"^\[?(.*?)\]?:-?[0-9]+$"
Event = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Selection:
    """Which messages count: ``topics``, all if empty, and store times in ms, both ends included.

    ``silence``: so many ms without a message are one.
    """

    topics: tuple[str, ...] = ()
    begin: int = -(1 << 63)
    end: int = (1 << 63) - 1
    silence: int = 60_000


def step_for(span: int) -> int:
    """The shortest bin by which ``span`` ms are few bins; beyond the list days, doubled."""
    step = next((step for step in STEPS if span // step < BINS_MAX), STEPS[-1])
    while span // step >= BINS_MAX:
        step *= 2
    return step


def bucket_begins(values: NDArray[Any]) -> NDArray[np.int64]:
    """The least value of each value's bucket: 0 to 7 have one each, above there are four to a power of two."""
    whole = values.astype(np.int64)
    shift = np.maximum(np.frexp(whole.astype(np.float64))[1] - 3, 0)
    begins: NDArray[np.int64] = whole >> shift << shift
    return begins


def bucket_end(begin: int) -> int:
    """The greatest value of the bucket that begins there."""
    return begin + (1 << max(begin.bit_length() - 3, 0)) - 1


def largest(events: Iterable[Event]) -> list[Event]:
    """The largest of these (offset, time before, time after); of equals the first in the log."""
    return heapq.nsmallest(EVENTS_MAX, events, key=lambda event: (-abs(event[2] - event[1]), event[0]))


def count_split(config: Config, selection: Selection, split: Split) -> Iterator[pa.RecordBatch]:
    """The count rows of one split; the last one, of kind SPLIT, says in JSON what was seen of it as a whole."""
    reader, flavour = RowReader(disk_for(config), config, split, _COLUMNS), FLAVOURS[config.index.flavour]
    # times: first, last, least, greatest store time and the first offset, once there is a message.
    seen: dict[str, Any] = {"times": None, "entries": 0, "steps": 0, "silences": 0}
    seen |= {"largestSteps": [], "largestSilences": []}
    tables: list[pa.Table] = []
    for batch in reader:
        # Index entries are counted of all messages.
        measures, times = _measures(batch, flavour), batch["storeTimestamp"].to_numpy()
        seen["entries"] += int(measures["entries"].sum())
        wanted = (times >= selection.begin) & (times <= selection.end)
        if selection.topics:
            wanted &= pc.is_in(batch["topic"], pa.array(selection.topics)).to_numpy(zero_copy_only=False)
        if not wanted.all():
            batch, times = batch.filter(pa.array(wanted)), times[wanted]  # noqa: PLW2901 - the rest does not count
            measures = {name: values[wanted] for name, values in measures.items()}
        if len(times):
            _tick(seen, times, batch["phyOffset"].to_numpy(), selection.silence)
            tables += [*_text_rows(batch), *_figure_rows(batch, times, measures)]
        if sum(table.num_rows for table in tables) > _WAITING_MAX:
            yield from _added_up(tables, seen)
            tables = []
    if tables:
        yield from _added_up(tables, seen)
    read = reader.split_reader
    unreadable_at = read.unreadable.offset if read.unreadable else None
    ended = {"next": read.next_offset, "unreadable": unreadable_at, "skipped": reader.skipped_bytes}
    yield from _rows(SPLIT, 1, text=[json.dumps(seen | ended)], at=[split.begin]).to_batches()


def _measures(batch: pa.RecordBatch, flavour: Flavour) -> dict[str, NDArray[np.int64]]:
    keys = pc.list_value_length(batch["keys"]).to_numpy().astype(np.int64)
    uniq, tagged = (
        pc.is_valid(batch[name]).to_numpy(zero_copy_only=False).astype(np.int64) for name in ("uniqKey", "tags")
    )
    entries = keys + uniq * flavour.uniq_key + tagged * flavour.tags
    entries[np.isin(batch["sysFlag"].to_numpy() & 0xC, flavour.skipped_types)] = 0
    without = (keys == 0).astype(np.int64)
    size, body = batch["size"].to_numpy(), pc.binary_length(batch["body"]).to_numpy()
    columns = (np.ones(len(keys)), size, body, keys, without, without * (1 - uniq), tagged, entries)
    return {name: values.astype(np.int64) for name, values in zip(MEASURES, columns, strict=True)}


def _tick(seen: dict[str, Any], times: NDArray[np.int64], phy_offsets: NDArray[np.int64], silence: int) -> None:
    # The clock from one message to the next: steps back and silences.
    first = int(times[0])
    known = seen["times"] or [first, first, first, first, int(phy_offsets[0])]
    before = np.concatenate([[known[1]], times[:-1]])
    is_back = times < before
    # Unsigned: two times may be further apart than int64 holds.
    is_silent = ~is_back & (times.view(np.uint64) - before.view(np.uint64) > silence)
    for count, events, mask in (("steps", "largestSteps", is_back), ("silences", "largestSilences", is_silent)):
        found = zip(phy_offsets[mask].tolist(), before[mask].tolist(), times[mask].tolist(), strict=True)
        seen[count] += int(mask.sum())
        seen[events] = largest([*seen[events], *found])
    least, greatest = min(known[2], int(times.min())), max(known[3], int(times.max()))
    seen["times"] = [known[0], int(times[-1]), least, greatest, known[4]]


def _added_up(tables: Sequence[pa.Table], seen: dict[str, Any]) -> list[pa.RecordBatch]:
    rows, step = pa.concat_tables(tables), min(step_for(seen["times"][3] - seen["times"][2]), HOUR)
    at = rows["at"].to_numpy()
    is_time = pc.is_in(rows["kind"], pa.array(MEASURES)).to_numpy() & (at != NO_TIME)
    rows = rows.set_column(3, "at", pa.array(np.where(is_time, at // step * step, at)))
    batches: list[pa.RecordBatch] = _summed(rows, COUNTED, ("amount",), ("first",)).to_batches()
    return batches


def _rows(kind: str, size: int, **columns: Any) -> pa.Table:
    # Count rows of one kind; columns that are not given are empty, and an amount 1.
    given = {name: columns.get(name, pa.repeat(default, size)) for name, default in _DEFAULTS.items()}
    return pa.table({"kind": pa.repeat(kind, size), **given})


def _summed(table: pa.Table, keys: Sequence[str], sums: Sequence[str], least: Sequence[str] = ()) -> pa.Table:
    wanted = [*((name, "sum") for name in sums), *((name, "min") for name in least)]
    found = table.group_by(list(keys), use_threads=False).aggregate(wanted)
    names = [*keys, *(f"{name}_{what}" for name, what in wanted)]
    return found.select(names).rename_columns([*keys, *sums, *least])


def _text_rows(batch: pa.RecordBatch) -> list[pa.Table]:
    topics, offsets, keys = batch["topic"], batch["phyOffset"], batch["keys"]
    parents = pc.list_parent_indices(keys)
    found = [_rows(KEYS, len(parents), topic=topics.take(parents), text=keys.flatten(), first=offsets.take(parents))]
    for kind, column in ((UNIQ_KEY, "uniqKey"), (TAGS, "tags")):
        having = batch.filter(pc.is_valid(batch[column]))
        texts = {"topic": having["topic"], "text": having[column], "first": having["phyOffset"]}
        found.append(_rows(kind, len(having), **texts))
    hosts = _summed(_rows(HOST, len(batch), text=batch["bornHost"], first=offsets), COUNTED, ("amount",), ("first",))
    return [*found, hosts.set_column(2, "text", pc.replace_substring_regex(hosts["text"], _PORT, r"\1"))]


def _figure_rows(
    batch: pa.RecordBatch, times: NDArray[np.int64], measures: dict[str, NDArray[np.int64]]
) -> list[pa.Table]:
    # Measures by topic and second, bodies by size, and the flags that are counted.
    at = np.where(np.abs(times // HOUR) < 1 << 31, times // STEPS[0] * STEPS[0], NO_TIME)
    cells = _summed(pa.table({"topic": batch["topic"], "at": at, **measures}), ("topic", "at"), MEASURES)
    found = [_rows(name, len(cells), topic=cells["topic"], at=cells["at"], amount=cells[name]) for name in MEASURES]
    ones, bodies = measures["messages"], measures["bodyBytes"]
    sizes = _summed(
        pa.table({"at": bucket_begins(bodies), SIZE: ones, SIZE_BYTES: bodies}), ("at",), (SIZE, SIZE_BYTES)
    )
    found += [_rows(kind, len(sizes), at=sizes["at"], amount=sizes[kind]) for kind in (SIZE, SIZE_BYTES)]
    flags = _summed(pa.table({"at": batch["sysFlag"].to_numpy() & np.int64(0xD), "n": ones}), ("at",), ("n",))
    return [*found, _rows(FLAG, len(flags), at=flags["at"], amount=flags["n"])]
