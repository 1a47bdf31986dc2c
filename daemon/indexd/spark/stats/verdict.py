"""Is the number of hash slots right for this store? Arithmetic on what was counted, and its words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from indexd.index.format import SLOT_SIZE, IndexLayout
from indexd.spark.stats.buckets import bounds_of
from indexd.spark.stats.chains import FileChains

#: RocketMQ's own ratio, 20,000,000 entries on 5,000,000 slots.
ENTRIES_PER_SLOT = 4
# From here on a smaller number would do as well, and be noticed.
_FAR_TOO_MANY = 20
# A chain of more than so many times the average has another reason than the number of slots.
_LONG_FACTOR = 50
_LONG_MIN = 1000
# A spread up to this is taken for even.
_CROWDED = 1.5
# Below these numbers of hashes, and of pairs that chance would put together, a spread says nothing.
_HASHES_MIN = 1000
_SHARED_MIN = 100
RIGHT, TOO_FEW, TOO_MANY, NOTHING = "right", "too few", "more than needed", "nothing to index"


@dataclass(frozen=True, slots=True)
class Verdict:
    """``recommended`` slots; ``walk``: entries that a walk to the end of an entry's chain reads, on average.

    ``strangers``: how many of them have another hash, in the sample. ``spread``: how many other hashes share a hash's
    slot, over what evenly spread ones would; 1 is even, and 2 twice as bad.
    """

    answer: str
    recommended: int
    walk: float
    strangers: float | None
    spread: float | None
    words: tuple[str, ...]


def judge_layout(files: Sequence[FileChains], layout: IndexLayout, mask: int) -> Verdict:
    """The verdict on ``layout.hash_slot_num`` for these files; ``mask`` is that of their kept entries."""
    entries = sum(file.entries for file in files)
    if not entries:
        return Verdict(
            NOTHING, layout.hash_slot_num, 0.0, None, None, ("No message has a key: there is no chain at all.",)
        )
    fullest = max(file.entries for file in files)
    walk = sum(file.squares for file in files) / entries
    strangers, spread = _in_slots(files, layout.hash_slot_num, mask)
    crowd = spread if spread is not None and spread > _CROWDED else 1.0
    recommended = nice(fullest * crowd / ENTRIES_PER_SLOT)
    if recommended > layout.hash_slot_num:
        answer = TOO_FEW
    else:
        answer = TOO_MANY if layout.hash_slot_num > _FAR_TOO_MANY * recommended else RIGHT
    words = (*_words(answer, recommended, fullest, layout), *_walk_words(files, layout, walk, spread))
    return Verdict(answer, recommended, walk, strangers, spread, words)


def nice(slots: float) -> int:
    """The next of 1, 2 and 5 times a power of ten, at least 1000."""
    power = 1000
    while True:
        for factor in (1, 2, 5):
            if factor * power >= slots:
                return factor * power
        power *= 10


def _in_slots(files: Sequence[FileChains], hash_slot_num: int, mask: int) -> tuple[float | None, float | None]:
    """(strangers, spread) over the kept entries of all files; None where there are too few."""
    strangers = kept = hashes_kept = 0
    shared = expected = 0.0
    for file in files:
        hashes, counts = np.unique(file.kept.key_hash, return_counts=True)
        slots = hashes.astype(np.int64) % hash_slot_num
        own = ~np.isin(slots, np.array(file.overlong, dtype=np.int64))
        slots, counts = slots[own], counts[own]
        _, where, together = np.unique(slots, return_inverse=True, return_counts=True)
        lengths = np.zeros(len(together), dtype=np.int64)
        np.add.at(lengths, where, counts)
        strangers += int((counts * (lengths[where] - counts)).sum())
        kept += int(counts.sum())
        shared += float((together * (together - 1)).sum())
        # Of n even hashes in s slots, n / s share one's slot; the sample has its share of the slots.
        expected += len(slots) * len(slots) * (mask + 1) / hash_slot_num
        hashes_kept += len(slots)
    spread = shared / expected if hashes_kept >= _HASHES_MIN and expected >= _SHARED_MIN else None
    return (strangers / kept if kept else None), spread


def _words(answer: str, recommended: int, fullest: int, layout: IndexLayout) -> tuple[str, ...]:
    slots, load = f"{layout.hash_slot_num:,} slots", fullest / layout.hash_slot_num
    filled = "a full file" if fullest == layout.index_num - 1 else "the fullest file so far"
    ratio = f"{filled} has {fullest:,} entries, {load:.2g} a slot"
    if answer == TOO_FEW:
        return (f"{slots} are too few: {ratio}. Take {recommended:,}.",)
    if answer == RIGHT:
        return (f"{slots} are right: {ratio}. {ENTRIES_PER_SLOT} are what RocketMQ is laid out for.",)
    size = layout.hash_slot_num * SLOT_SIZE / 1e6
    return (
        f"{slots} are more than needed: {ratio}, {recommended:,} would do for what the log holds now. They cost "
        f"{size:,.3g} MB a file and no time.",
    )


def _walk_words(files: Sequence[FileChains], layout: IndexLayout, walk: float, spread: float | None) -> tuple[str, ...]:
    longest = max(file.longest for file in files)
    words = []
    if spread is not None and spread > _CROWDED:
        words.append(f"The hashes of these keys crowd together: {spread:.1f} times as many share a slot as by chance.")
    load = max(file.entries for file in files) / layout.hash_slot_num
    if longest >= max(_LONG_MIN, _LONG_FACTOR * load):
        words.append(
            f"The longest chain, of {longest:,} entries, comes from one key, or keys of one hash: no number of slots "
            "makes it shorter."
        )
    lengths = np.sum([file.lengths[0, 1:] for file in files], axis=0)
    half, most = (
        bounds_of(1 + int(np.searchsorted(np.cumsum(lengths), share * lengths.sum())))[1] for share in (0.5, 0.99)
    )
    words.append(
        f"Half of the slots in use have chains of at most {half:,}, 99 % of at most {most:,} entries; the longest has "
        f"{longest:,}. An entry stands in a chain of {walk:,.0f} on average."
    )
    return tuple(words)
