"""Measures the chains of an index that is not built: how long RocketMQ's walk along a slot of each file would be.

Entry ``n`` of the log stands in file ``n // (index_num - 1)``, whatever the splits are (spec rocketmq-store 3.2). A
first pass counts the entries of each split; from that follows which splits hold a file's. A task counts one file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from indexd.commitlog.reader import Skipped
from indexd.config import Config
from indexd.errors import DisturbedError
from indexd.index.format import FLAVOURS, SLOT_SIZE
from indexd.spark.splits import Split, SplitReader
from indexd.spark.stats.content import bucket_begins, bucket_end
from indexd.storage.remote import disk_for

#: RocketMQ's own ratio, 20,000,000 entries on 5,000,000 slots.
ENTRIES_PER_SLOT = 4
RIGHT, TOO_FEW, TOO_MANY, NOTHING = "right", "too few", "more than needed", "nothing to index"

# From here on a smaller number of slots would do as well, and be noticed.
_FAR_TOO_MANY = 20
# A chain of more than so many times the average has another reason than the number of slots.
_LONG_FACTOR, _LONG_MIN = 50, 1000

Row = dict[str, Any]


def count_file(config: Config, splits: Sequence[Split], before: Sequence[int], number: int) -> Row:
    """The chains of file ``number``: what the report says of it, and in ``chains`` its slots by their length.

    ``before``: the entries before each split, and of all splits. Raises DisturbedError when the log does not hold
    these entries any more.
    """
    capacity, hash_slot_num = config.index.index_num - 1, config.index.hash_slot_num
    begin, end = number * capacity, min((number + 1) * capacity, before[-1])
    skipped = FLAVOURS[config.index.flavour].skipped_types
    counts, times = np.zeros(hash_slot_num, dtype=np.uint32), list[int]()
    counted = 0
    for split, at, behind in zip(splits, before[:-1], before[1:], strict=True):
        for batch in SplitReader(disk_for(config), config, split) if max(at, begin) < min(behind, end) else ():
            if isinstance(batch, Skipped):
                continue
            columns = batch.columns
            rows = np.repeat(np.arange(batch.rows), np.diff(columns.key_start[: batch.rows + 1]))
            indexed = np.flatnonzero(~np.isin(columns.sys_flag[: batch.rows] & 0xC, skipped)[rows])
            inside = indexed[max(begin - at, 0) : max(end - at, 0)]
            at += len(indexed)  # noqa: PLW2901 - the number of the next batch's first entry
            np.add.at(counts, columns.key_hash[inside] % np.uint32(hash_slot_num), np.uint32(1))
            times = [*times[:1], *columns.store_timestamp[rows[inside[[0, -1]]]].tolist()] if len(inside) else times
            counted += len(inside)
    if counted != end - begin:
        raise DisturbedError("the log was rewritten while it was read", "run it again")
    lengths, slots = (values.astype(np.int64) for values in np.unique(counts, return_counts=True))
    return {
        "file": number,
        "entries": counted,
        "usedSlots": int(slots[lengths > 0].sum()),
        "longestChain": int(lengths[-1]),
        "meanChain": int((lengths**2 * slots).sum()) / counted,
        "begin": times[0],
        "end": times[-1],
        "chains": np.stack([bucket_begins(lengths), slots, lengths * slots], axis=1).tolist(),
    }


def judge_index(files: Sequence[Row], hash_slot_num: int, index_num: int) -> Row:
    """What the report says of the index: its files, their chains, the longest one, and whether the slots are right.

    Takes ``chains`` out of the files.
    """
    sums: dict[int, list[int]] = {}
    for begin, slots, entries in (row for file in files for row in file.pop("chains")):
        row = sums.setdefault(begin, [0, 0])
        row[0], row[1] = row[0] + slots, row[1] + entries
    chains = [
        {"from": begin, "to": bucket_end(begin), "slots": slots, "entries": entries}
        for begin, (slots, entries) in sorted(sums.items())
    ]
    longest = max(files, key=lambda file: file["longestChain"], default={"longestChain": 0, "file": None})
    return {
        "hashSlotNum": hash_slot_num,
        "indexNum": index_num,
        "files": list(files),
        "chains": chains,
        "longestChain": {"entries": longest["longestChain"], "file": longest["file"]},
        "verdict": judge_slots(files, chains, hash_slot_num, index_num),
    }


def judge_slots(files: Sequence[Row], chains: Sequence[Row], hash_slot_num: int, index_num: int) -> Row:
    """Is the number of hash slots right for this log? In numbers and in words.

    ``meanChain``: entries that a walk to the end of an entry's chain reads, on average.
    """
    entries = sum(file["entries"] for file in files)
    if not entries:
        words = ["No message has a key: there is no chain at all."]
        return {"answer": NOTHING, "recommendedSlots": hash_slot_num, "meanChain": 0.0, "words": words}
    fullest = max(file["entries"] for file in files)
    recommended = nice(fullest / ENTRIES_PER_SLOT)
    answer, advice = RIGHT, f"{ENTRIES_PER_SLOT} are what RocketMQ is laid out for."
    if recommended > hash_slot_num:
        answer, advice = TOO_FEW, f"Take {recommended:,}."
    elif hash_slot_num > _FAR_TOO_MANY * recommended:
        size = hash_slot_num * SLOT_SIZE / 1e6
        answer = TOO_MANY
        advice = f"{recommended:,} would do for what the log holds now. They cost {size:,.3g} MB a file and no time."
    load = fullest / hash_slot_num
    filled = "a full file" if fullest == index_num - 1 else "the fullest file so far"
    words = [f"{hash_slot_num:,} slots are {answer}: {filled} has {fullest:,} entries, {load:.2g} a slot. {advice}"]
    longest = max(file["longestChain"] for file in files)
    if longest >= max(_LONG_MIN, _LONG_FACTOR * load):
        words.append(
            f"The longest chain, of {longest:,} entries, comes from one key, or keys of one hash: no number of slots "
            "makes it shorter. The hot keys say which."
        )
    walk = sum(file["meanChain"] * file["entries"] for file in files) / entries
    used = [row for row in chains if row["from"]]
    half, most = (quantile(used, "slots", share) for share in (0.5, 0.99))
    words.append(
        f"Half of the slots in use have chains of at most {half:,}, 99 % of at most {most:,} entries; the longest has "
        f"{longest:,}. An entry stands in a chain of {walk:,.0f} on average."
    )
    return {"answer": answer, "recommendedSlots": recommended, "meanChain": walk, "words": words}


def quantile(buckets: Sequence[Row], column: str, share: float) -> int:
    """The end of the bucket in which ``share`` of what the column counts is reached; 0 where it counts nothing."""
    total, reached = sum(row[column] for row in buckets), 0
    for row in buckets:
        reached += row[column]
        if reached and reached >= share * total:
            return int(row["to"])
    return 0


def nice(slots: float) -> int:
    """The next of 1, 2 and 5 times a power of ten, at least 1000."""
    steps = (step * int(10**power) for power in range(3, 40) for step in (1, 2, 5))
    return next(step for step in steps if step >= slots)
