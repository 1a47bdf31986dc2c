"""What a task does: read a split with the daemon's own reader, and hand its batches to what counts them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from indexd.commitlog.batcher import DispatchBatch
from indexd.config import Config
from indexd.errors import DisturbedError
from indexd.index.format import FLAVOURS, Flavour, IndexLayout
from indexd.spark.splits import Split, SplitReader
from indexd.spark.stats.buckets import HOUR
from indexd.spark.stats.chains import FileChains, Group, Pair, count_group
from indexd.spark.stats.content import Content, ContentCounter, Selection, wanted_topics
from indexd.spark.stats.content_kernel import NO_FRAME, Wanted
from indexd.spark.stats.known_kernel import count_known
from indexd.spark.stats.table_kernel import COLUMNS, COUNT, PRINT, refill
from indexd.spark.stats.tally import table_rows
from indexd.storage.remote import disk_for


@dataclass(frozen=True, slots=True)
class SplitCount:
    """What a split holds, and where reading it ended; ``unreadable_at``: the log's last bytes are no frame."""

    content: Content
    next_offset: int
    unreadable_at: int | None


def layout_of(config: Config) -> IndexLayout:
    """The layout that is asked about: RocketMQ's own unless the configuration says otherwise."""
    return IndexLayout(config.index.hash_slot_num, config.index.index_num)


def flavour_of(config: Config) -> Flavour:
    """What the broker indexes of a message."""
    return FLAVOURS[config.index.flavour]


def count_split(config: Config, selection: Selection, split: Split) -> SplitCount:
    """Count the messages of one split."""
    reader = SplitReader(disk_for(config), config, split)
    counter = ContentCounter(selection, flavour_of(config).skip_mask)
    for found in reader:
        if not isinstance(found, DispatchBatch):
            counter.skip(found.end - found.begin)
        elif found.rows:
            counter.add(found, reader.frames(found))
    reader.close()
    unreadable = reader.unreadable
    return SplitCount(counter.content(), reader.next_offset, unreadable.offset if unreadable else None)


def count_known_split(
    config: Config, selection: Selection, known: NDArray[np.uint64], split: Split
) -> NDArray[np.int64]:
    """How often each of the fingerprints ``known``, rising, occurs in one split."""
    nothing = np.zeros(len(known), dtype=np.int64)
    rows = np.zeros((1 << (2 * len(known) + 2).bit_length(), COLUMNS), dtype=np.uint64)
    refill(rows, np.zeros(1, dtype=np.int64), table_rows(known, nothing, nothing))
    for batch, frames in _pairs(config, split):
        wanted = Wanted(
            wanted_topics(batch.topics, selection),
            np.int64(selection.begin),
            np.int64(selection.end),
            np.int64(selection.silence),
            np.int64(0),
            step=np.int64(HOUR),
            fold_bins=False,
        )
        status, row = count_known(frames, np.uint64(batch.begin_offset), batch.columns, batch.rows, wanted, rows)
        if status == NO_FRAME:
            raise DisturbedError(f"the log at {batch.columns.phy_offset[row]} was rewritten while it was read")
    counted = rows[np.flatnonzero(rows[:, PRINT])]
    counts: NDArray[np.int64] = counted[np.argsort(counted[:, PRINT]), COUNT].astype(np.int64)
    return counts


def count_files(config: Config, splits: Sequence[Split], mask: int, group: Group) -> list[FileChains]:
    """The chains of the index files of one group."""
    own = splits[group.first_split : group.last_split + 1]
    pairs = (pair for split in own for pair in _pairs(config, split))
    files = count_group(pairs, group, layout_of(config), flavour_of(config), mask)
    if sum(file.entries for file in files) != group.end - group.begin:
        raise DisturbedError("the log was rewritten while it was read")
    return files


def _pairs(config: Config, split: Split) -> Iterator[Pair]:
    reader = SplitReader(disk_for(config), config, split)
    try:
        for found in reader:
            if isinstance(found, DispatchBatch) and found.rows:
                yield found, reader.frames(found)
    finally:
        reader.close()
