"""Judges the number of hash slots: how full the files of an index of this log would be."""

from __future__ import annotations

from typing import Any

from indexd.index.format import SLOT_SIZE

#: RocketMQ's own ratio, 20,000,000 entries on 5,000,000 slots.
ENTRIES_PER_SLOT = 4
RIGHT, TOO_FEW, TOO_MANY, NOTHING = "right", "too few", "more than needed", "nothing to index"

# From here on a smaller number of slots would do as well, and be noticed.
_FAR_TOO_MANY = 20


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
