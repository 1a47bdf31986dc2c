"""Chains of an index that is not built: how long RocketMQ's walk along a slot of each index file would be.

Entry ``n`` of the log stands in file ``n // (index_num - 1)``, whatever the splits are (spec rocketmq-store 3.2). A
first pass counts the entries of each split; from that follows which splits hold a file's. A task counts one file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from indexd.commitlog.batcher import DispatchBatch
from indexd.commitlog.decoder import DecoderOptions, Message, decode_frame
from indexd.commitlog.reader import Skipped
from indexd.config import Config
from indexd.errors import DisturbedError
from indexd.index.format import FLAVOURS, SLOT_SIZE
from indexd.spark.splits import Split, SplitReader
from indexd.spark.stats.content import KEYS, TAGS, UNIQ_KEY, bucket_begins, bucket_end
from indexd.storage.remote import disk_for

#: RocketMQ's own ratio, 20,000,000 entries on 5,000,000 slots.
ENTRIES_PER_SLOT = 4
RIGHT, TOO_FEW, TOO_MANY, NOTHING = "right", "too few", "more than needed", "nothing to index"

# From here on a smaller number of slots would do as well, and be noticed.
_FAR_TOO_MANY = 20
# A chain of more than so many times the average has another reason than the number of slots.
_LONG_FACTOR, _LONG_MIN = 50, 1000


@dataclass(frozen=True, slots=True, eq=False)
class FileChains:
    """One index file. ``slots[i]`` slots have chains of ``lengths[i]`` entries; ``begin``, ``end``: store times.

    ``example``: kind, topic and text of an entry of the longest chain.
    """

    number: int
    entries: int
    lengths: NDArray[np.int64]
    slots: NDArray[np.int64]
    example: tuple[str, str, str]
    begin: int
    end: int

    @property
    def longest(self) -> int:
        """The entries of the longest chain."""
        return int(self.lengths[-1])

    @property
    def squares(self) -> int:
        """The sum over all entries of the length of the chain that each stands in."""
        return int((self.lengths**2 * self.slots).sum())

    def row(self) -> dict[str, Any]:
        """The file as the report has it."""
        return {
            "file": self.number,
            "entries": self.entries,
            "usedSlots": int(self.slots[self.lengths > 0].sum()),
            "longestChain": self.longest,
            "meanChain": self.squares / self.entries,
            "begin": self.begin,
            "end": self.end,
        }


class _Entries(NamedTuple):
    # The index entries of a batch: hash, row of the message, and which of its entries each is.
    reader: SplitReader
    batch: DispatchBatch
    key_hash: NDArray[np.uint32]
    row: NDArray[np.int64]
    place: NDArray[np.int64]


def count_file(config: Config, splits: Sequence[Split], before: Sequence[int], number: int) -> FileChains:
    """Count the chains of file ``number``. ``before``: the entries before each split, and of all splits.

    Raises DisturbedError when the log does not hold these entries any more.
    """
    capacity, hash_slot_num = config.index.index_num - 1, config.index.hash_slot_num
    begin, end = number * capacity, min((number + 1) * capacity, before[-1])
    counts = np.zeros(hash_slot_num, dtype=np.uint32)
    counted, first, last, longest, example = 0, 0, 0, 0, ("", "", "")
    for found in _entries(config, splits, before, begin, end):
        slots = found.key_hash % np.uint32(hash_slot_num)
        np.add.at(counts, slots, np.uint32(1))
        lengths = counts[slots]
        most = int(lengths.argmax())
        if lengths[most] > longest:
            longest, example = int(lengths[most]), _text(config, found, most)
        times = found.batch.columns.store_timestamp[found.row]
        first, last = first if counted else int(times[0]), int(times[-1])
        counted += len(slots)
    if counted != end - begin:
        raise DisturbedError("the log was rewritten while it was read", "run it again")
    values, slots_of = np.unique(counts, return_counts=True)
    return FileChains(number, counted, values.astype(np.int64), slots_of, example, first, last)


def _entries(
    config: Config, splits: Sequence[Split], before: Sequence[int], begin: int, end: int
) -> Iterator[_Entries]:
    # The index entries [begin, end) of the log, batch by batch.
    skipped = FLAVOURS[config.index.flavour].skipped_types
    # Sizes are filled only for those who ask for them.
    outputs = config.outputs.model_copy(update={"consume_queue": True})
    config = config.model_copy(update={"outputs": outputs})
    for split, at, behind in zip(splits, before[:-1], before[1:], strict=True):
        if not max(at, begin) < min(behind, end):
            continue
        reader = SplitReader(disk_for(config), config, split)
        for batch in reader:
            if isinstance(batch, Skipped):
                continue
            columns, starts = batch.columns, batch.columns.key_start[: batch.rows + 1]
            row = np.repeat(np.arange(batch.rows), np.diff(starts))
            indexed = np.flatnonzero(~np.isin(columns.sys_flag[: batch.rows] & 0xC, skipped)[row])
            inside = indexed[max(begin - at, 0) : max(end - at, 0)]
            at += len(indexed)  # noqa: PLW2901 - the number of the next batch's first entry
            if len(inside):
                yield _Entries(reader, batch, columns.key_hash[inside], row[inside], inside - starts[row[inside]])


def _text(config: Config, found: _Entries, entry: int) -> tuple[str, str, str]:
    # Kind, topic and text of what an entry was made for.
    columns, row, flavour = found.batch.columns, int(found.row[entry]), FLAVOURS[config.index.flavour]
    offset, size = int(columns.phy_offset[row]), int(columns.size[row])
    begin = offset - found.batch.begin_offset
    data = found.reader.frames(found.batch)[begin : begin + size].tobytes()
    message = decode_frame(data, 0, offset, offset + size, DecoderOptions(frame_size_max=size, check_crc=False))
    if not isinstance(message, Message):
        raise DisturbedError(f"the log at {offset} was rewritten while it was read", "run it again")
    texts = [(UNIQ_KEY, message.uniq_key)] if flavour.uniq_key and message.uniq_key is not None else []
    texts += [*((KEYS, key) for key in message.keys), (TAGS, message.tags or "")]
    kind, text = texts[found.place[entry]]
    return kind, message.topic, text


def judge_slots(files: Sequence[FileChains], hash_slot_num: int, index_num: int) -> dict[str, Any]:
    """Is the number of hash slots right for this log? In numbers and in words.

    ``meanChain``: entries that a walk to the end of an entry's chain reads, on average.
    """
    entries = sum(file.entries for file in files)
    if not entries:
        words = ["No message has a key: there is no chain at all."]
        return {"answer": NOTHING, "recommendedSlots": hash_slot_num, "meanChain": 0.0, "words": words}
    fullest = max(file.entries for file in files)
    recommended = nice(fullest / ENTRIES_PER_SLOT)
    size = hash_slot_num * SLOT_SIZE / 1e6
    answer, advice = RIGHT, f"{ENTRIES_PER_SLOT} are what RocketMQ is laid out for."
    if recommended > hash_slot_num:
        answer, advice = TOO_FEW, f"Take {recommended:,}."
    elif hash_slot_num > _FAR_TOO_MANY * recommended:
        answer = TOO_MANY
        advice = f"{recommended:,} would do for what the log holds now. They cost {size:,.3g} MB a file and no time."
    load = fullest / hash_slot_num
    filled = "a full file" if fullest == index_num - 1 else "the fullest file so far"
    words = [f"{hash_slot_num:,} slots are {answer}: {filled} has {fullest:,} entries, {load:.2g} a slot. {advice}"]
    longest = max(file.longest for file in files)
    if longest >= max(_LONG_MIN, _LONG_FACTOR * load):
        words.append(
            f"The longest chain, of {longest:,} entries, comes from one key, or keys of one hash: no number of slots "
            "makes it shorter."
        )
    walk = sum(file.squares for file in files) / entries
    used = [row for row in chain_buckets(files) if row["from"]]
    half, most = (quantile(used, "slots", share) for share in (0.5, 0.99))
    words.append(
        f"Half of the slots in use have chains of at most {half:,}, 99 % of at most {most:,} entries; the longest has "
        f"{longest:,}. An entry stands in a chain of {walk:,.0f} on average."
    )
    return {"answer": answer, "recommendedSlots": recommended, "meanChain": walk, "words": words}


def chain_buckets(files: Sequence[FileChains]) -> list[dict[str, int]]:
    """Slots and entries of all files by length of their chain, in buckets from ``from`` to ``to``, both included."""
    sums: dict[int, list[int]] = {}
    for file in files:
        for begin, length, slots in zip(bucket_begins(file.lengths), file.lengths, file.slots, strict=True):
            row = sums.setdefault(int(begin), [0, 0])
            row[0] += int(slots)
            row[1] += int(length * slots)
    return [
        {"from": begin, "to": bucket_end(begin), "slots": slots, "entries": entries}
        for begin, (slots, entries) in sorted(sums.items())
    ]


def longest_chain(files: Sequence[FileChains]) -> dict[str, Any]:
    """How long the longest chain of all files is, where, and a text that stands in it."""
    if not files:
        return {"entries": 0, "file": None, "kind": None, "topic": None, "text": None}
    longest = max(files, key=lambda file: file.longest)
    kind, topic, text = longest.example
    return {"entries": longest.longest, "file": longest.number, "kind": kind, "topic": topic, "text": text}


def quantile(buckets: Sequence[dict[str, int]], column: str, share: float) -> int:
    """The end of the bucket in which ``share`` of what the column counts is reached; 0 where it counts nothing."""
    total, reached = sum(row[column] for row in buckets), 0
    for row in buckets:
        reached += row[column]
        if reached and reached >= share * total:
            return row["to"]
    return 0


def nice(slots: float) -> int:
    """The next of 1, 2 and 5 times a power of ten, at least 1000."""
    steps = (step * int(10**power) for power in range(3, 40) for step in (1, 2, 5))
    return next(step for step in steps if step >= slots)
