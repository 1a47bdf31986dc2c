"""The whole of it: plan, count the splits, count candidates again, measure the chains, try the queries, find the names.

The driver holds one merged result and what is left of a few splits; of the log it reads single messages, for the names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from indexd.config import Config
from indexd.errors import DisturbedError
from indexd.index.format import IndexLayout
from indexd.spark.splits import Split, check_chain, plan_splits
from indexd.spark.stats.chains import FileChains, plan_groups, sample_mask
from indexd.spark.stats.content import Content, Selection, merge
from indexd.spark.stats.names import Names, Text
from indexd.spark.stats.queries import KEPT_MAX, Judgement, judge_queries
from indexd.spark.stats.tally import Sample, Tally
from indexd.spark.stats.verdict import Verdict, judge_layout
from indexd.spark.stats.work import count_files, count_known_split, count_split, layout_of
from indexd.storage.disk import Disk

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Results of so many tasks are on the driver at a time: some hundred MB at most.
_TASKS_AT_ONCE = 128
_CAPACITY_ALL = 1 << 19
_CAPACITY_MIN = 1 << 14
_CAPACITY_MAX = 1 << 17
# So many candidates of a kind are counted again, at least: rare repeats are found by it, too.
_CANDIDATES = 4096

Item = TypeVar("Item")
Result = TypeVar("Result")
#: ``run(work, items, sizes, what)``: the results of ``work`` on each item, in order.
Run = Callable[[Callable[[Any], Any], Sequence[Any], Sequence[int], str], list[Any]]


@dataclass(frozen=True, slots=True)
class Named:
    """A text with its count; ``count`` is exact, or at most ``Hot.error`` too low. ``None``: its message is gone."""

    text: Text | None
    count: int
    phy_offset: int


@dataclass(frozen=True, slots=True)
class Hot:
    """The most frequent texts of a kind, most frequent first, of ``distinct`` (None: not known) in all.

    With ``is_exact`` the counts are. Every text that occurs more than ``complete_above`` times is among them, unless
    they are more than were asked for. ``repeated`` texts are known to occur more than once; there may be more.
    """

    named: tuple[Named, ...]
    distinct: int | None
    is_exact: bool
    complete_above: int
    repeated: int


@dataclass(frozen=True, slots=True)
class Index:
    """What an index of ``layout`` over the whole log would be like; ``longest`` is an example of the longest chain."""

    layout: IndexLayout
    files: tuple[FileChains, ...]
    judgement: Judgement
    verdict: Verdict
    longest: Text | None


@dataclass(frozen=True, slots=True)
class Statistics:
    """Everything that is reported. ``begin`` to ``end``: the bytes of log that were read."""

    store: str
    begin: int
    end: int
    unreadable_at: int | None
    selection: Selection
    flavour: str
    content: Content
    keys: Hot
    uniq_keys: Hot
    tags: Hot
    hosts: Hot
    #: Unique keys that occur more than once, of the sample.
    twice: tuple[Named, ...]
    index: Index | None


def collect(
    run: Run,
    disk: Disk,
    config: Config,
    selection: Selection,
    *,
    slots: int = 2,
    split_size: int | None = None,
    top: int = 20,
    quick: bool = False,
) -> Statistics:
    """Count the log of ``config.store``. ``quick``: one pass, without chains and queries, and hot keys as they come.

    Raises what reading a log raises, and DisturbedError when it changes meanwhile.
    """
    config = _with_queue_columns(config)
    splits = plan_splits(disk, config, size=split_size, slots=slots)
    capacity = _CAPACITY_ALL // max(len(splits), 1)
    capacity = 1 << int(math.log2(min(max(capacity, _CAPACITY_MIN), _CAPACITY_MAX)))
    selection = replace(selection, capacity=capacity)
    content, next_offsets, unreadable_at = _count(run, config, selection, splits)
    if check_chain(splits, next_offsets):
        raise DisturbedError("the log was rewritten or cut while it was read", "run it again")
    tallies = {name: getattr(content, name) for name in ("keys", "uniq_keys", "tags", "hosts")}
    found = {name: (tally, tally.is_exact, 0) for name, tally in tallies.items()}
    if not quick:
        found = _recount(run, config, selection, splits, tallies, top)
    names = Names(disk, config)
    try:
        hot = {name: _name(names, *part, top) for name, part in found.items()}
        twice = _name_twice(names, content.uniq_sample, top)
        index = None if quick else _index(run, config, splits, content, names)
    finally:
        names.close()
    return Statistics(
        store=str(config.store.store or config.store.commit_log_directories[0]),
        begin=splits[0].begin if splits else 0,
        end=next_offsets[-1] if splits else 0,
        unreadable_at=unreadable_at,
        selection=selection,
        flavour=config.index.flavour,
        content=content,
        twice=twice,
        index=index,
        **hot,
    )


def spark_run(spark: SparkSession, progress: Callable[[str], Callable[[int, int], None] | None]) -> Run:
    """``Run`` on a Spark session; ``progress`` gives the callback for a stage of that name."""
    from indexd.spark.tasks import run_tasks  # noqa: PLC0415 - pyspark is loaded only where it is used

    def run(work: Callable[[Any], Any], items: Sequence[Any], sizes: Sequence[int], what: str) -> list[Any]:
        return run_tasks(spark, work, items, sizes=sizes, progress=progress(what))

    return run


def _with_queue_columns(config: Config) -> Config:
    # The reader fills topics and sizes only for those who ask for them.
    return config.model_copy(update={"outputs": config.outputs.model_copy(update={"consume_queue": True})})


def _count(
    run: Run, config: Config, selection: Selection, splits: Sequence[Split]
) -> tuple[Content, list[int], int | None]:
    content = Content.empty(selection.capacity)
    next_offsets: list[int] = []
    unreadable_at = None
    for part in _parts(splits):
        sizes = [split.size for split in part]
        results = run(partial(count_split, config, selection), part, sizes, "count")
        content = reduce(merge, (result.content for result in results), content)
        next_offsets += [result.next_offset for result in results]
        unreadable_at = results[-1].unreadable_at
    return content, next_offsets, unreadable_at


def _parts(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    return (items[first : first + _TASKS_AT_ONCE] for first in range(0, len(items), _TASKS_AT_ONCE))


def _recount(
    run: Run, config: Config, selection: Selection, splits: Sequence[Split], tallies: dict[str, Tally], top: int
) -> dict[str, tuple[Tally, bool, int]]:
    """The tallies with exact counts: of their candidates where they are not exact already; (tally, exact, bound).

    What is no candidate occurs at most ``bound`` times.
    """
    candidates: dict[str, list[int]] = {}
    for name, tally in tallies.items():
        if not tally.is_exact:
            candidates[name] = sorted(tally.top(max(_CANDIDATES, 2 * top)), key=lambda index: int(tally.prints[index]))
    known = np.unique(np.concatenate([np.empty(0, np.uint64), *(tallies[n].prints[i] for n, i in candidates.items())]))
    counts = np.zeros(len(known), dtype=np.int64)
    for part in _parts(splits) if len(known) else ():
        sizes = [split.size for split in part]
        counts += sum(run(partial(count_known_split, config, selection, known), part, sizes, "hot keys"))
    found = {}
    for name, tally in tallies.items():
        if name not in candidates:
            found[name] = (tally, True, 0)
            continue
        mine = np.array(candidates[name], dtype=np.int64)
        others = np.delete(tally.counts, mine)
        bound = int(others.max(initial=0)) + tally.error
        exact = counts[np.searchsorted(known, tally.prints[mine])]
        found[name] = (replace(tally, prints=tally.prints[mine], counts=exact, firsts=tally.firsts[mine]), True, bound)
    return found


def _name(names: Names, tally: Tally, is_exact: bool, bound: int, top: int) -> Hot:
    distinct = len(tally.prints) if tally.error == 0 else None
    repeated = int((tally.counts > 1).sum())
    named = _named(names, tally, tally.top(top))
    return Hot(named, distinct, is_exact, bound if is_exact else tally.error, repeated)


def _name_twice(names: Names, sample: Sample, top: int) -> tuple[Named, ...]:
    order = np.lexsort((sample.firsts, -sample.counts))
    return _named(names, sample, [int(index) for index in order[:top] if sample.counts[index] > 1])


def _named(names: Names, counted: Tally | Sample, indexes: Sequence[int]) -> tuple[Named, ...]:
    found = []
    for index in indexes:
        phy_offset = int(counted.firsts[index])
        text = names.at(phy_offset).get(int(counted.prints[index]))
        found.append(Named(text, int(counted.counts[index]), phy_offset))
    return tuple(found)


def _index(run: Run, config: Config, splits: Sequence[Split], content: Content, names: Names) -> Index:
    layout = layout_of(config)
    groups = plan_groups(content.entries_of, layout)
    mask = sample_mask(content.sum("entries"), KEPT_MAX)
    files: list[FileChains] = []
    for part in _parts(groups):
        sizes = [_size(splits[group.first_split : group.last_split + 1]) for group in part]
        for result in run(partial(count_files, config, splits, mask), part, sizes, "chains"):
            files += result
    judgement = judge_queries(files, layout.hash_slot_num, mask, config.query.max_msgs_num_batch)
    longest = max(files, key=lambda file: file.longest, default=None)
    example = names.example(longest.example_phy, longest.example_hash) if longest else None
    return Index(layout, tuple(files), judgement, judge_layout(files, layout, mask), example)


def _size(splits: Sequence[Split]) -> int:
    return sum(split.size for split in splits)


def total_lengths(files: Sequence[FileChains]) -> NDArray[np.int64]:
    """Slots and entries by bucket of chain length, of all files."""
    return sum((file.lengths for file in files), np.zeros((2, 0 if not files else files[0].lengths.shape[1]), np.int64))
