"""The statistics of a log as one object, ``Report``, and how Spark makes it from the count rows of all splits.

The object, a dict, is what ``indexd stats --json`` prints and what terminal and page show. Times are ms since 1970,
sizes bytes. Texts are as the log has them, hostile ones too: whoever shows them escapes them.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial, reduce
from itertools import accumulate, pairwise
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it

from indexd.config import Config
from indexd.errors import DisturbedError
from indexd.index.format import SLOT_SIZE
from indexd.spark.session import slots
from indexd.spark.splits import check_chain, plan_splits
from indexd.spark.stats.content import (
    COUNT_TYPES,
    COUNTED,
    FLAG,
    HOST,
    HOUR,
    KEYS,
    MEASURES,
    NO_TIME,
    SIZE,
    SIZE_BYTES,
    SPLIT,
    TAGS,
    TEXTS,
    UNIQ_KEY,
    Selection,
    bucket_end,
    count_split,
    largest,
    step_for,
)
from indexd.spark.tasks import run_job, task_frame
from indexd.storage.remote import disk_for

#: Of the JSON: a field that changes its meaning or goes counts it up, a new one does not.
VERSION = 4
#: More rows of topics and times than this are told apart by topic alone.
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
Rows = Sequence[Row]
Progress = Callable[[int, int], None]


def collect(
    spark: SparkSession, config: Config, selection: Selection, *, top: int = 20, progress: Progress | None = None
) -> Report:
    """Count the log of ``config.store``; ``progress`` is told bytes of log.

    Raises what reading a log raises, and DisturbedError when it changes meanwhile.
    """
    splits = plan_splits(disk_for(config), config, size=config.spark.split_size or None, slots=slots(spark))
    rows = task_frame(spark, partial(count_split, config, selection), splits, COUNT_TYPES)
    counted = rows.groupBy(*COUNTED).agg(F.sum("amount").alias("amount"), F.min("first").alias("first")).persist()
    ends = counted.where(F.col("kind") == SPLIT).orderBy("at").select("text")
    found = run_job(spark, ends.collect, sizes=[split.size for split in splits], progress=progress)
    seen = [json.loads(row[0]) for row in found]
    if check_chain(splits, [split["next"] for split in seen]):
        raise DisturbedError("the log was rewritten or cut while it was read", "run it again")
    times = [split["times"] for split in seen if split["times"]]
    first, last = min((time[2] for time in times), default=None), max((time[3] for time in times), default=None)
    step = min(step_for((last or 0) - (first or 0)), HOUR)
    contents = _contents(_figures(spark, counted, step), step) | _texts(spark, counted, top)
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


def _rows(spark: SparkSession, frame: DataFrame) -> list[Row]:
    table: pa.Table = run_job(spark, frame.toArrow)
    rows: list[Row] = table.to_pylist()
    return rows


def _figures(spark: SparkSession, counted: DataFrame, step: int) -> list[Row]:
    """kind, topic, at and amount of all that is no text: messages by ``step``, the other measures by the hour."""
    at, kind = F.col("at"), F.col("kind")
    is_measure = kind.isin(*MEASURES)
    length = F.when(kind == "messages", F.lit(step)).otherwise(F.lit(HOUR))

    def summed(place: Column) -> DataFrame:
        rows = counted.where(~kind.isin(*TEXTS, SPLIT)).groupBy(kind, "topic", place.alias("at"))
        return rows.agg(F.sum("amount").alias("amount")).limit(FIGURES_MAX)

    found = _rows(spark, summed(F.when(is_measure & (at != NO_TIME), at - F.pmod(at, length)).otherwise(at)))
    if len(found) == FIGURES_MAX:
        found = _rows(spark, summed(F.when(is_measure, F.lit(NO_TIME)).otherwise(at)))
    return found


def _contents(figures: Rows, step: int) -> Row:
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
    for row in _rows(spark, by_amount):
        times[row["kind"]][row["amount"]] = row["texts"]
    order = (F.desc("amount"), "first", "topic", "text")
    least = {KEYS: 1, UNIQ_KEY: 2, TAGS: 1, HOST: 1}
    tops = [
        counted.where((kind == name) & (F.col("amount") >= few)).orderBy(*order).limit(top)
        for name, few in least.items()
    ]
    rows = _rows(spark, reduce(DataFrame.union, tops))
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


def quantile(buckets: Rows, share: float) -> int:
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


def _clock(seen: Rows, silence: int) -> Row:
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
