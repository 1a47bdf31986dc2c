"""The statistics of a log as one object, ``Report``, and how Spark makes it from the count rows of all splits.

The object is what ``indexd stats --json`` prints and what terminal and page show. Times are ms since 1970, sizes bytes.
Rows inside it are plain dicts with the JSON's keys. Texts are as the log has them, hostile ones too: whoever shows them
escapes them.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import pyarrow as pa
from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own name for it

from indexd.config import Config
from indexd.errors import DisturbedError
from indexd.spark.session import slots
from indexd.spark.splits import Split, check_chain, plan_splits
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
from indexd.spark.stats.index import (
    chain_buckets,
    count_file,
    judge_slots,
    longest_chain,
    quantile,
)
from indexd.spark.tasks import run_job, run_tasks, task_frame
from indexd.storage.remote import disk_for

#: Of the JSON: a field that changes its meaning or goes counts it up, a new one does not.
VERSION = 2
#: Of a log up to this size every text is counted exactly at once; of a larger one a sample and the most frequent.
EXACT_BYTES = 256 << 20
#: So many candidates of a kind are counted again, at least: rare repeats are found by it, too.
CANDIDATES = 4096
#: More rows of topics and times than this are told apart by topic alone.
FIGURES_MAX = 1 << 18

# RocketMQ returns no more than 64 messages to a query for a key.
_OCCURRENCES = ((1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 64), (65, 1024), (1025, None))
_TRANSACTIONS = {0x0: "normal", 0x4: "prepared", 0x8: "committed", 0xC: "rolled_back"}
Row = dict[str, Any]
Rows = Sequence[Row]
#: Given the name of a stage, where to tell how far it is.
Progress = Callable[[str], Callable[[int, int], None] | None]
Result = TypeVar("Result")


class Report(BaseModel):
    """What the log holds from ``begin_offset`` to ``end_offset``; ``index`` is None of a quick run."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)

    kind: str = "stats"
    version: int = VERSION
    store: str
    flavour: str
    begin_offset: int
    end_offset: int
    skipped_bytes: int
    unreadable_at: int | None
    selection: Row
    first_store_timestamp: int | None
    last_store_timestamp: int | None
    messages: int
    bytes: int
    body_bytes: int
    keys: int
    without_keys: int
    without_any_key: int
    tagged: int
    entries: int
    compressed: int
    transactions: dict[str, int]
    topics: list[Row]
    hours: list[Row]
    bins: Row
    keys_seen: Row
    uniq_keys_seen: Row
    hot_keys: Row
    hot_uniq_keys: Row
    tags: Row
    hosts: Row
    body_sizes: Row
    clock: Row
    index: Row | None


def collect(
    spark: SparkSession, config: Config, selection: Selection, *, top: int = 20, quick: bool = False,
    progress: Progress = lambda _: None,
) -> Report:  # fmt: skip
    """Count the log of ``config.store``. ``quick``: one pass, without chains, and hot keys as they come.

    Raises what reading a log raises, and DisturbedError when it changes meanwhile.
    """
    splits = plan_splits(disk_for(config), config, size=config.spark.split_size or None, slots=slots(spark))
    if selection.level < 0:
        selection = replace(selection, level=(sum(split.size for split in splits) // EXACT_BYTES).bit_length())
    job = _Job(spark, config, selection, splits, progress)
    counted = job.count(None).persist()
    seen = job.ends_of_splits(counted)
    times = [split["times"] for split in seen if split["times"]]
    first, last = min((time[2] for time in times), default=None), max((time[3] for time in times), default=None)
    step = min(step_for((last or 0) - (first or 0)), HOUR)
    contents = _contents(job.figures(counted, step), step)
    lost = {kind: sum(split["lost"][kind] for split in seen) for kind in TEXTS}
    texts = _texts(job.occurrences(counted), job.hot_texts(counted, lost, top, quick), lost, selection.level, quick)
    counted.unpersist()
    everything = Selection()
    return Report(
        store=str(config.store.store or config.store.commit_log_directories[0]),
        flavour=config.index.flavour,
        begin_offset=splits[0].begin if splits else 0,
        end_offset=seen[-1]["next"] if splits else 0,
        skipped_bytes=sum(split["skipped"] for split in seen),
        unreadable_at=seen[-1]["unreadable"] if splits else None,
        selection={
            "topics": list(selection.topics),
            "begin": selection.begin if selection.begin > everything.begin else None,
            "end": selection.end if selection.end < everything.end else None,
        },
        first_store_timestamp=first,
        last_store_timestamp=last,
        clock=_clock(seen, selection.silence),
        index=None if quick else job.index([split["entries"] for split in seen]),
        **contents,
        **texts,
    )


@dataclass(frozen=True)
class _Job:
    """What is asked of Spark: the splits' count rows, added up, and what is found in their sums."""

    spark: SparkSession
    config: Config
    selection: Selection
    splits: Sequence[Split]
    progress: Progress

    def _run(self, action: Callable[[], Result], stage: str | None = None) -> Result:
        sizes = [split.size for split in self.splits]
        return run_job(self.spark, action, sizes=sizes, progress=self.progress(stage) if stage else None)

    def count(self, known: pa.Table | None) -> DataFrame:
        """The count rows of all splits, added up."""
        rows = task_frame(
            self.spark, partial(count_split, self.config, self.selection, known), self.splits, COUNT_TYPES
        )
        return rows.groupBy(*COUNTED, "sampled").agg(F.sum("amount").alias("amount"), F.min("first").alias("first"))

    def ends_of_splits(self, counted: DataFrame) -> list[Row]:
        """What was seen of each split, in log order; DisturbedError if one did not end where the next begins."""
        rows = counted.where(F.col("kind") == SPLIT).orderBy("at").select("text")
        seen = [json.loads(row[0]) for row in self._run(rows.collect, "count")]
        if check_chain(self.splits, [split["next"] for split in seen]):
            raise DisturbedError("the log was rewritten or cut while it was read", "run it again")
        return seen

    def figures(self, counted: DataFrame, step: int) -> list[Row]:
        """kind, topic, at and amount of all that is no text: messages by ``step``, the other measures by the hour."""
        at, kind = F.col("at"), F.col("kind")
        is_measure = kind.isin(*MEASURES)
        length = F.when(kind == "messages", F.lit(step)).otherwise(F.lit(HOUR))
        bins = F.when(is_measure & (at != NO_TIME), at - F.pmod(at, length)).otherwise(at)

        def summed(place: Column) -> DataFrame:
            rows = counted.where(~kind.isin(*TEXTS, SPLIT)).groupBy(kind, "topic", place.alias("at"))
            return rows.agg(F.sum("amount").alias("amount"))

        found = self._run(summed(bins).limit(FIGURES_MAX).toArrow)
        if len(found) == FIGURES_MAX:
            found = self._run(summed(F.when(is_measure, F.lit(NO_TIME)).otherwise(at)).toArrow)
        return rows_of(found)

    def occurrences(self, counted: DataFrame) -> list[Row]:
        """How many texts of each kind, of the sample or not, occur ``amount`` times."""
        rows = counted.where(F.col("kind").isin(*TEXTS)).groupBy("kind", "sampled", "amount")
        return rows_of(self._run(rows.agg(F.count("*").alias("texts")).toArrow))

    def hot_texts(self, counted: DataFrame, lost: dict[str, int], top: int, quick: bool) -> dict[str, tuple[Rows, int]]:
        """The most frequent texts of each kind, and how often another may occur.

        Where some were lost, candidates are counted again; of a quick run, counts may be too low by what was lost.
        """
        recounts = any(lost.values()) and not quick
        limit = max(CANDIDATES, 2 * top) if recounts else top
        order = (F.desc("amount"), "first", "topic", "text")
        tops = [counted.where(F.col("kind") == kind).orderBy(*order).limit(limit) for kind in TEXTS]
        found = self._run(reduce(DataFrame.union, tops).toArrow)
        bounds = dict(lost)
        if recounts:
            for kind in TEXTS:
                amounts = [row["amount"] for row in rows_of(found) if row["kind"] == kind]
                bounds[kind] += amounts[-1] if lost[kind] and len(amounts) == limit else 0
            found = self._run(self.count(found.select(COUNTED[:3])).toArrow, "hot keys")
        rows = sorted(rows_of(found), key=lambda row: (-row["amount"], row["first"], row["topic"], row["text"]))
        return {kind: ([row for row in rows if row["kind"] == kind][:top], bounds[kind]) for kind in TEXTS}

    def index(self, entries: Sequence[int]) -> Row:
        """Chains and verdict of an index over the whole log; ``entries`` of each split."""
        index, before = self.config.index, [0, *accumulate(entries)]
        numbers = range(-(-before[-1] // (index.index_num - 1)))
        size = sum(split.size for split in self.splits) // max(len(numbers), 1)
        files = run_tasks(
            self.spark, partial(count_file, self.config, self.splits, before), numbers, sizes=[size] * len(numbers),
            progress=self.progress("chains"),
        )  # fmt: skip
        return {
            "hashSlotNum": index.hash_slot_num,
            "indexNum": index.index_num,
            "files": [file.row() for file in files],
            "chains": chain_buckets(files),
            "longestChain": longest_chain(files),
            "verdict": judge_slots(files, index.hash_slot_num, index.index_num),
        }


def rows_of(table: pa.Table) -> list[Row]:
    """The rows of an Arrow table."""
    found: list[Row] = table.to_pylist()
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
        "body_sizes": {
            "median": quantile(buckets, "messages", 0.5),
            "p99": quantile(buckets, "messages", 0.99),
            "max": buckets[-1]["to"] if buckets else 0,
            "buckets": buckets,
        },
    }


def _texts(occurrences: Rows, hot: dict[str, tuple[Rows, int]], lost: dict[str, int], level: int, quick: bool) -> Row:
    # How often the texts of each kind occur, and the most frequent ones.
    found = {
        kind: {
            "isExact": not (lost[kind] and quick),
            "completeAbove": bound,
            "distinct": None if lost[kind] else sum(row["texts"] for row in occurrences if row["kind"] == kind),
            "repeatedAtLeast": sum(row["texts"] for row in occurrences if row["kind"] == kind and row["amount"] > 1),
            "top": [
                {"topic": row["topic"], "text": row["text"], "count": row["amount"], "phyOffset": row["first"]}
                for row in rows
                if kind != UNIQ_KEY or row["amount"] > 1
            ],
        }
        for kind, (rows, bound) in hot.items()
    }
    return {
        "keys_seen": _seen(occurrences, KEYS, level if lost[KEYS] else 0),
        "uniq_keys_seen": _seen(occurrences, UNIQ_KEY, level if lost[UNIQ_KEY] else 0),
        "hot_keys": found[KEYS],
        "hot_uniq_keys": found[UNIQ_KEY],
        "tags": found[TAGS],
        "hosts": found[HOST],
    }


def _seen(occurrences: Rows, kind: str, level: int) -> Row:
    # Distinct texts by how often they occur; of a level above 0 estimates, with their relative standard error.
    times = Counter[int]()
    for row in occurrences:
        if row["kind"] == kind and (row["sampled"] or not level):
            times[row["amount"]] += row["texts"]
    return {
        "distinct": times.total() << level,
        "isExact": not level,
        "standardError": round(max(times.total(), 1) ** -0.5, 6) if level else 0.0,
        "repeated": (times.total() - times[1]) << level,
        "byOccurrences": [
            {"from": least, "to": most, "keys": sum(n for t, n in times.items() if least <= t <= (most or t)) << level}
            for least, most in _OCCURRENCES
        ],
    }


def _clock(seen: Rows, silence: int) -> Row:
    # Steps back and silences of all splits, and those between two of them.
    steps, silences = (
        [event for split in seen for event in split[name]] for name in ("largestSteps", "largestSilences")
    )
    counts = {name: sum(split[name] for split in seen) for name in ("steps", "silences")}
    for before, behind in pairwise(split["times"] for split in seen if split["times"]):
        event = (behind[4], before[1], behind[0])
        if behind[0] < before[1]:
            steps.append(event)
            counts["steps"] += 1
        elif behind[0] - before[1] > silence:
            silences.append(event)
            counts["silences"] += 1
    rows = [
        [{"phyOffset": at, "before": old, "after": new, "ms": abs(new - old)} for at, old, new in largest(events)]
        for events in (steps, silences)
    ]
    return {"silenceMs": silence, **counts, "largestSteps": rows[0], "largestSilences": rows[1]}
