"""What share of the queries for a key in a range of time would RocketMQ answer wrongly?

**The queries.** Four kinds of range are tried: all of time (0 to 2^63-1, as ``mqadmin queryMsgByKey`` asks), and the
hours, minutes and seconds of the clock (UTC). Every key of the sample is asked for once in each range in which at least
one message with it was stored. A key is a topic with one of KEYS, or with UNIQ_KEY, or, where the flavour indexes tags,
with TAGS.

**The answer** is what RocketMQ's ``IndexService.queryOffset`` returns, 64 messages at most (``maxMsgsNumBatch``), from
index files of the layout in question, filled with this log from its first message on: newest file first, its
test of a file's times, whole seconds, the end of a walk at the first entry that is too old, entries of other keys with
the same hash. (An empty file that follows a full last one is left out: it holds nothing.)

**Wrong** is an answer that leaves out a message that has the key and was stored in the range (``limit``: 64 were
returned and there are more; ``missed``: the test of times lost it), or that holds a message that has not
(``collision``: another key with the same hash; ``outside``: stored outside the range by up to a second). The same
message twice (``repeated``) is counted and is not wrong. A client filters other keys out; what was missed stays missed.

**The sample** is deterministic: all entries of the slots whose mixed number ends in so many zero bits that about
``KEPT_MAX`` entries are kept; at 0 bits it is every slot. A slot with more than 2048 entries in one file, or 4096 in
all, is not tried: ``overlong_slots`` counts them. Of the frequent key that makes it so long, no more than 64 messages
are ever returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from indexd.spark.stats.chains import FileChains
from indexd.spark.stats.queries_kernel import TALLY, Entries, judge

#: The kinds of range: a name, and its length in ms.
RANGES = (("all", 0), ("hour", 3_600_000), ("minute", 60_000), ("second", 1000))
KEPT_MAX = 1 << 17
_GROUP_MAX = 4096
_INT_MAX = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Judgement:
    """``tallies``: for each of RANGES the numbers of TALLY. ``mask`` + 1 slots stand for one that was tried."""

    tallies: tuple[tuple[int, ...], ...]
    slots: int
    entries: int
    overlong_slots: int
    mask: int
    #: Keys of the sample, counted in each file apart, and those of them that share their hash with another there.
    keys: int
    colliding_keys: int

    def share(self, kind: str) -> float | None:
        """The share of wrong answers among queries over a kind of range; None if none was tried."""
        row = self.tallies[[name for name, _ in RANGES].index(kind)]
        return row[1] / row[0] if row[0] else None


def judge_queries(files: Sequence[FileChains], hash_slot_num: int, mask: int, max_num: int = 64) -> Judgement:
    """Try the queries on the kept entries of all ``files``, in the order of the files."""
    entries, overlong = _sorted_entries(files, hash_slot_num)
    tallies = np.zeros((len(RANGES), len(TALLY)), dtype=np.int64)
    spans = np.array([span for _, span in RANGES], dtype=np.int64)
    begins = np.array([file.begin for file in files], dtype=np.int64)
    ends = np.array([file.end for file in files], dtype=np.int64)
    if len(entries.file):
        judge(entries, begins, ends, spans, np.int64(max_num), tallies)
    keys, colliding = _collisions(entries)
    return Judgement(
        tuple(tuple(int(value) for value in row) for row in tallies),
        len(entries.group) - 1,
        len(entries.file),
        overlong,
        mask,
        keys,
        colliding,
    )


def _sorted_entries(files: Sequence[FileChains], hash_slot_num: int) -> tuple[Entries, int]:
    columns = [np.concatenate([column[:0], *parts]) for column, parts in _by_column(files)]
    file, number, hashes, prints, phys, times, seen = columns
    slots = hashes.astype(np.int64) % hash_slot_num
    overlong = {slot for one in files for slot in one.overlong}
    values, counts = np.unique(slots, return_counts=True)
    overlong |= {int(slot) for slot in values[counts > _GROUP_MAX]}
    kept = ~np.isin(slots, np.array(sorted(overlong), dtype=np.int64))
    order = np.flatnonzero(kept)
    order = order[np.lexsort((number[order], file[order], slots[order]))]
    bounds = np.flatnonzero(np.diff(slots[order], prepend=-1)) if len(order) else np.empty(0, np.int64)
    group = np.append(bounds, len(order)).astype(np.int64)
    entries = Entries(file[order], hashes[order], prints[order], phys[order], times[order], seen[order], group)
    return entries, len(overlong)


def _by_column(files: Sequence[FileChains]) -> list[tuple[NDArray[Any], list[NDArray[Any]]]]:
    parts: list[list[NDArray[Any]]] = [[] for _ in range(7)]
    previous_end = 0
    for index, file in enumerate(files):
        kept = file.kept
        row: tuple[NDArray[Any], ...] = (
            np.full(len(kept.number), index, dtype=np.int64),
            kept.number,
            kept.key_hash,
            kept.prints,
            kept.phy_offset,
            kept.store_timestamp,
            seen_times(kept.number, kept.store_timestamp, file.begin, previous_end),
        )
        for column, part in zip(parts, row, strict=True):
            column.append(part)
        previous_end = file.end
    kinds = (np.int64, np.int32, np.uint32, np.uint64, np.int64, np.int64, np.int64)
    return [(np.empty(0, dtype=kind), part) for kind, part in zip(kinds, parts, strict=True)]


def seen_times(
    number: NDArray[np.int32], store_timestamp: NDArray[np.int64], begin: int, previous_end: int
) -> NDArray[np.int64]:
    """The time in ms that a reader of the index takes each entry for: whole seconds from the file's begin.

    The first entry's difference is against ``previous_end``, the end of the file before (0: there is none; spec 3.4).
    """
    against = np.where(number == 1, max(previous_end, 0), begin)
    with np.errstate(over="ignore"):
        diff = (store_timestamp.astype(np.uint64) - against.astype(np.uint64)).astype(np.int64)
    seconds = np.where((against <= 0) | (diff <= 0), 0, np.minimum(diff // 1000, _INT_MAX))
    found: NDArray[np.int64] = (begin + seconds * 1000).astype(np.int64)
    return found


def _collisions(entries: Entries) -> tuple[int, int]:
    # Distinct keys of a file, and those whose hash another key of the same file has, too.
    table = np.stack([entries.file.astype(np.uint64), entries.key_hash.astype(np.uint64), entries.prints])
    keys = np.unique(table, axis=1)
    if not keys.shape[1]:
        return 0, 0
    _, counts = np.unique(keys[:2], axis=1, return_counts=True)
    return keys.shape[1], int(counts[counts > 1].sum())
