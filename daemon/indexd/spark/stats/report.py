"""The statistics of a log as one object, ``Report``: splits are counted by tasks, and Spark adds the counts up.

A count row says how often something of one ``kind`` was seen (``COUNT_TYPES``): a measure by topic and time, a body
size, a flag, or a text (a key, a unique key, tags, a producer's host) with the offset of the first message that has it.
A task adds up what fits into some 50 MB and hands it on; every sum over all splits is exact.

The object, a dict, is what ``indexd stats --json`` prints and what terminal and page show. Times are ms since 1970,
sizes bytes. Texts are as the log has them, hostile ones too: whoever shows them escapes them.
"""

from __future__ import annotations

import heapq
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it

from indexd.config import Config
from indexd.errors import DisturbedError
from indexd.index.format import FLAVOURS, SLOT_SIZE, Flavour
from indexd.spark.session import slots
from indexd.spark.source.rows import RowReader
from indexd.spark.splits import Split, plan_splits
from indexd.spark.tasks import run_job, task_frame
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
    seen: dict[str, Any] = {
        "times": None, "entries": 0, "steps": 0, "silences": 0, "largestSteps": [], "largestSilences": []
    }  # fmt: skip
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
    yield from _count_rows(SPLIT, 1, text=[json.dumps(seen | ended)], at=[split.begin]).to_batches()


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


def _count_rows(kind: str, size: int, **columns: Any) -> pa.Table:
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
    found = [
        _count_rows(KEYS, len(parents), topic=topics.take(parents), text=keys.flatten(), first=offsets.take(parents))
    ]
    for kind, column in ((UNIQ_KEY, "uniqKey"), (TAGS, "tags")):
        having = batch.filter(pc.is_valid(batch[column]))
        texts = {"topic": having["topic"], "text": having[column], "first": having["phyOffset"]}
        found.append(_count_rows(kind, len(having), **texts))
    hosts = _summed(
        _count_rows(HOST, len(batch), text=batch["bornHost"], first=offsets), COUNTED, ("amount",), ("first",)
    )
    return [*found, hosts.set_column(2, "text", pc.replace_substring_regex(hosts["text"], _PORT, r"\1"))]


def _figure_rows(
    batch: pa.RecordBatch, times: NDArray[np.int64], measures: dict[str, NDArray[np.int64]]
) -> list[pa.Table]:
    # Measures by topic and second, bodies by size, and the flags that are counted.
    at = np.where(np.abs(times // HOUR) < 1 << 31, times // STEPS[0] * STEPS[0], NO_TIME)
    cells = _summed(pa.table({"topic": batch["topic"], "at": at, **measures}), ("topic", "at"), MEASURES)
    found = [
        _count_rows(name, len(cells), topic=cells["topic"], at=cells["at"], amount=cells[name]) for name in MEASURES
    ]
    ones, bodies = measures["messages"], measures["bodyBytes"]
    sizes = _summed(
        pa.table({"at": bucket_begins(bodies), SIZE: ones, SIZE_BYTES: bodies}), ("at",), (SIZE, SIZE_BYTES)
    )
    found += [_count_rows(kind, len(sizes), at=sizes["at"], amount=sizes[kind]) for kind in (SIZE, SIZE_BYTES)]
    flags = _summed(pa.table({"at": batch["sysFlag"].to_numpy() & np.int64(0xD), "n": ones}), ("at",), ("n",))
    return [*found, _count_rows(FLAG, len(flags), at=flags["at"], amount=flags["n"])]


# --- the report

#: Of the JSON: a field that changes its meaning or goes counts it up, a new one does not.
VERSION = 4
FIGURES_MAX = 1 << 18

# RocketMQ returns no more than 64 messages to a query for a key.
_OCCURRENCES = ((1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 64), (65, 1024), (1025, None))
_TRANSACTIONS = {0x0: "normal", 0x4: "prepared", 0x8: "committed", 0xC: "rolled_back"}
#: RocketMQ's own ratio, 20,000,000 entries on 5,000,000 slots.
ENTRIES_PER_SLOT = 4
RIGHT, TOO_FEW, TOO_MANY, NOTHING = "right", "too few", "more than needed", "nothing to index"

# From here on a smaller number of slots would do as well, and be noticed.
_FAR_TOO_MANY = 20
Row = dict[str, Any]
#: What the log holds from ``beginOffset`` to ``endOffset``.
Report = Row


def collect(
    spark: SparkSession,
    config: Config,
    selection: Selection,
    *,
    top: int = 20,
    figures_max: int = FIGURES_MAX,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Count the log of ``config.store``; ``progress`` is told bytes of log.

    More rows of topics and times than ``figures_max`` are told apart by topic alone.

    Raises what reading a log raises, and DisturbedError when it changes meanwhile.
    """
    splits = plan_splits(disk_for(config), config, size=config.spark.split_size or None, slots=slots(spark))
    rows = task_frame(spark, partial(count_split, config, selection), splits, COUNT_TYPES)
    counted = rows.groupBy(*COUNTED).agg(F.sum("amount").alias("amount"), F.min("first").alias("first")).persist()
    ends = counted.where(F.col("kind") == SPLIT).orderBy("at").select("text")
    found = run_job(spark, ends.collect, sizes=[split.size for split in splits], progress=progress)
    seen = [json.loads(row[0]) for row in found]
    # The last one may end anywhere.
    if any(split.end != one["next"] for split, one in zip(splits[:-1], seen[:-1], strict=True)):
        raise DisturbedError("the log was rewritten or cut while it was read", "run it again")
    times = [split["times"] for split in seen if split["times"]]
    first, last = min((time[2] for time in times), default=None), max((time[3] for time in times), default=None)
    step = min(step_for((last or 0) - (first or 0)), HOUR)
    contents = _contents(_figures(spark, counted, step, figures_max), step) | _texts(spark, counted, top)
    counted.unpersist()
    entries, everything = sum(split["entries"] for split in seen), Selection()
    return {
        "kind": "stats",
        "version": VERSION,
        "store": str(config.store.store or config.store.commit_log_directories[0]),
        "flavour": config.index.flavour,
        "beginOffset": splits[0].begin if splits else 0,
        "endOffset": seen[-1]["next"] if splits else 0,
        "skippedBytes": sum(split["skipped"] for split in seen),
        "unreadableAt": seen[-1]["unreadable"] if splits else None,
        "selection": {
            "topics": list(selection.topics),
            "begin": selection.begin if selection.begin > everything.begin else None,
            "end": selection.end if selection.end < everything.end else None,
        },
        "firstStoreTimestamp": first,
        "lastStoreTimestamp": last,
        **contents,
        "clock": _clock(seen, selection.silence),
        "index": judge_index(entries, config.index.hash_slot_num, config.index.index_num),
    }


def _collected(spark: SparkSession, frame: DataFrame) -> list[Row]:
    rows: list[Row] = run_job(spark, frame.toArrow).to_pylist()
    return rows


def _figures(spark: SparkSession, counted: DataFrame, step: int, figures_max: int) -> list[Row]:
    """kind, topic, at and amount of all that is no text: messages by ``step``, the other measures by the hour."""
    at, kind = F.col("at"), F.col("kind")
    is_measure = kind.isin(*MEASURES)
    length = F.when(kind == "messages", F.lit(step)).otherwise(F.lit(HOUR))

    def summed(place: Column) -> DataFrame:
        rows = counted.where(~kind.isin(*TEXTS, SPLIT)).groupBy(kind, "topic", place.alias("at"))
        return rows.agg(F.sum("amount").alias("amount")).limit(figures_max)

    found = _collected(spark, summed(F.when(is_measure & (at != NO_TIME), at - F.pmod(at, length)).otherwise(at)))
    if len(found) == figures_max:
        found = _collected(spark, summed(F.when(is_measure, F.lit(NO_TIME)).otherwise(at)))
    return found


def _contents(figures: Sequence[Row], step: int) -> Row:
    # Totals, topics, hours and bins of time, body sizes, and what the flags say.
    hours: dict[tuple[int, str], Counter[str]] = defaultdict(Counter)
    topics: dict[str, Counter[str]] = defaultdict(Counter)
    sizes: dict[int, Counter[str]] = defaultdict(Counter)
    for row in figures:
        kind, topic, at, amount = row.values()
        if kind in MEASURES:
            hours[at if at == NO_TIME else at // HOUR * HOUR, topic][kind] += amount
            topics[topic][kind] += amount
        elif kind != FLAG:
            sizes[at][kind] += amount
    flags = {row["at"]: row["amount"] for row in figures if row["kind"] == FLAG}
    buckets = [
        {"from": begin, "to": bucket_end(begin), "messages": found[SIZE], "bytes": found[SIZE_BYTES]}
        for begin, found in sorted(sizes.items())
    ]
    bins = sorted((row["at"], row["topic"], row["amount"]) for row in figures if row["kind"] == "messages")
    return {
        **{name: sum(found[name] for found in topics.values()) for name in MEASURES},
        "compressed": sum(amount for flag, amount in flags.items() if flag & 1),
        "transactions": {
            name: sum(amount for flag, amount in flags.items() if flag & 0xC == kind)
            for kind, name in _TRANSACTIONS.items()
        },
        "topics": [
            {"topic": topic} | {name: found[name] for name in MEASURES}
            for topic, found in sorted(topics.items(), key=lambda item: (-item[1]["messages"], item[0]))
        ],
        "hours": [
            {"topic": topic, "hour": hour if hour != NO_TIME else None} | {name: found[name] for name in MEASURES}
            for (hour, topic), found in sorted(hours.items())
        ],
        "bins": {
            "stepMs": step,
            "rows": [{"topic": topic, "begin": at, "messages": n} for at, topic, n in bins if at != NO_TIME],
        },
        "bodySizes": {
            "median": quantile(buckets, 0.5),
            "p99": quantile(buckets, 0.99),
            "max": buckets[-1]["to"] if buckets else 0,
            "buckets": buckets,
        },
    }


def _texts(spark: SparkSession, counted: DataFrame, top: int) -> Row:
    # How often the texts of each kind occur, and the most frequent ones.
    kind = F.col("kind")
    by_amount = counted.where(kind.isin(*TEXTS)).groupBy("kind", "amount").agg(F.count("*").alias("texts"))
    times = {name: Counter[int]() for name in TEXTS}
    for row in _collected(spark, by_amount):
        times[row["kind"]][row["amount"]] = row["texts"]
    order = (F.desc("amount"), "first", "topic", "text")
    least = {KEYS: 1, UNIQ_KEY: 2, TAGS: 1, HOST: 1}
    tops = [
        counted.where((kind == name) & (F.col("amount") >= few)).orderBy(*order).limit(top)
        for name, few in least.items()
    ]
    rows = _collected(spark, reduce(DataFrame.union, tops))
    rows.sort(key=lambda row: (-row["amount"], row["first"], row["topic"], row["text"]))
    hot = {
        name: {
            "isExact": True,
            "completeAbove": 0,
            "distinct": times[name].total(),
            "repeatedAtLeast": times[name].total() - times[name][1],
            "top": [
                {"topic": row["topic"], "text": row["text"], "count": row["amount"], "phyOffset": row["first"]}
                for row in rows
                if row["kind"] == name
            ],
        }
        for name in TEXTS
    }
    return {
        "keysSeen": _seen(times[KEYS]),
        "uniqKeysSeen": _seen(times[UNIQ_KEY]),
        "hotKeys": hot[KEYS],
        "hotUniqKeys": hot[UNIQ_KEY],
        "tags": hot[TAGS],
        "hosts": hot[HOST],
    }


def quantile(buckets: Sequence[Row], share: float) -> int:
    """The end of the bucket in which ``share`` of the messages is reached; 0 without any."""
    reached = list(accumulate(row["messages"] for row in buckets))
    return next((row["to"] for row, sum_ in zip(buckets, reached, strict=True) if sum_ >= share * reached[-1]), 0)


def _seen(times: Counter[int]) -> Row:
    # Distinct texts by how often they occur.
    return {
        "distinct": times.total(),
        "isExact": True,
        "standardError": 0.0,
        "repeated": times.total() - times[1],
        "byOccurrences": [
            {"from": least, "to": most, "keys": sum(n for t, n in times.items() if least <= t <= (most or t))}
            for least, most in _OCCURRENCES
        ],
    }


def _clock(seen: Sequence[Row], silence: int) -> Row:
    # Steps back and silences of all splits, and those between two of them.
    events = {name: [tuple(event) for split in seen for event in split[name]] for name in _EVENTS.values()}
    counts = {name: sum(split[name] for split in seen) for name in _EVENTS}
    for before, behind in pairwise(split["times"] for split in seen if split["times"]):
        name = "steps" if behind[0] < before[1] else "silences"
        if name == "steps" or behind[0] - before[1] > silence:
            events[_EVENTS[name]].append((behind[4], before[1], behind[0]))
            counts[name] += 1
    rows = {
        name: [{"phyOffset": at, "before": old, "after": new, "ms": abs(new - old)} for at, old, new in largest(found)]
        for name, found in events.items()
    }
    return {"silenceMs": silence, **counts, **rows}


_EVENTS = {"steps": "largestSteps", "silences": "largestSilences"}


def judge_index(entries: int, hash_slot_num: int, index_num: int) -> dict[str, Any]:
    """What the report says of an index of so many entries: its files, and whether the slots are right for them."""
    fullest = min(entries, index_num - 1)
    recommended = nice(fullest / ENTRIES_PER_SLOT)
    answer, advice = RIGHT, f"{ENTRIES_PER_SLOT} are what RocketMQ is laid out for."
    if not entries:
        answer = NOTHING
    elif recommended > hash_slot_num:
        answer, advice = TOO_FEW, f"Take {recommended:,}."
    elif hash_slot_num > _FAR_TOO_MANY * recommended:
        size = hash_slot_num * SLOT_SIZE / 1e6
        answer = TOO_MANY
        advice = f"{recommended:,} would do for what the log holds now. They cost {size:,.3g} MB a file and no time."
    filled = "a full file" if fullest == index_num - 1 else "the fullest file so far"
    load = fullest / hash_slot_num
    words = f"{hash_slot_num:,} slots are {answer}: {filled} has {fullest:,} entries, {load:.2g} a slot. {advice}"
    return {
        "hashSlotNum": hash_slot_num,
        "indexNum": index_num,
        "entries": entries,
        "files": -(-entries // (index_num - 1)),
        "verdict": {
            "answer": answer,
            "recommendedSlots": recommended if entries else hash_slot_num,
            "words": [words if entries else "No message has a key: there is nothing to index."],
        },
    }


def nice(slots: float) -> int:
    """The next of 1, 2 and 5 times a power of ten, at least 1000."""
    steps = (step * int(10**power) for power in range(3, 40) for step in (1, 2, 5))
    return next(step for step in steps if step >= slots)
