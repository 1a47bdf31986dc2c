"""Runs: what is written comes back, in any part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from indexd.commitlog.batcher import DispatchBatch
from indexd.config import Config
from indexd.index.format import FLAVOURS
from indexd.spark.rebuild.runs import Run, RunWriter, batches_of, entry_of, index_batches
from indexd.spark.splits import SplitReader, plan_splits
from indexd.storage.disk import Disk
from support.odd_log import odd_messages, write_odd
from support.reopened import config_for

SEGMENT_SIZE = 1 << 20
DISK = Disk()


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A log of one segment whose run has many batches."""
    write_odd(tmp_path / "store", odd_messages(3000, 40), SEGMENT_SIZE)
    return config_for(tmp_path / "store", tmp_path / "data", segment_size=SEGMENT_SIZE, read_bytes=64 << 10)


def reader_batches(config: Config) -> list[DispatchBatch]:
    (split,) = plan_splits(DISK, config, size=SEGMENT_SIZE)
    return [found for found in SplitReader(DISK, config, split) if isinstance(found, DispatchBatch)]


def run_of(config: Config, path: Path, flavour: str = "5.4", **keys: Any) -> Run:
    (split,) = plan_splits(DISK, config, size=SEGMENT_SIZE)
    reader = SplitReader(DISK, config, split)
    path.mkdir()
    writer = RunWriter(path, split, skip_mask=FLAVOURS[flavour].skip_mask, **keys)
    for found in reader:
        writer.put(found)
    return writer.close(reader)


def entries_of(batches: list[DispatchBatch], skip_mask: int) -> list[tuple[int, int, int]]:
    """(physical offset, store timestamp, key hash) of every entry."""
    return [
        (int(columns.phy_offset[row]), int(columns.store_timestamp[row]), int(columns.key_hash[key]))
        for batch in batches
        for columns in [batch.columns]
        for row in range(batch.rows)
        if not skip_mask >> (int(columns.sys_flag[row]) & 0xC) & 1
        for key in range(int(columns.key_start[row]), int(columns.key_start[row + 1]))
    ]


def read_entries(run: Run, first: int, last: int) -> list[tuple[int, int, int]]:
    found = []
    for batch, first_row, first_key in index_batches(run.slim(), first, last):
        row, key, columns = first_row, first_key, batch.columns
        while row < batch.rows:
            for at in range(max(key, int(columns.key_start[row])), int(columns.key_start[row + 1])):
                phy, time = int(columns.phy_offset[row]), int(columns.store_timestamp[row])
                found.append((phy, time, int(columns.key_hash[at])))
            row += 1
    return found[: last - first]


@pytest.mark.parametrize("flavour", ["3.x", "5.4"])
def test_index_entries_come_back_from_any_one_on(config: Config, tmp_path: Path, flavour: str) -> None:
    run = run_of(config, tmp_path / "run", flavour)
    wanted = entries_of(reader_batches(config), FLAVOURS[flavour].skip_mask)
    assert run.entries == len(wanted) > 4000
    for first in (0, 1, 2, 899, 900, 2500, run.entries - 1):
        for last in (first + 1, first + 50, run.entries):
            assert read_entries(run, first, last) == wanted[first:last]
    for number in range(0, run.entries, 371):
        assert entry_of(run, number) == wanted[number][:2]


def rows_of(batch: DispatchBatch, names: list[str]) -> list[tuple[Any, ...]]:
    columns = [getattr(batch.columns, name)[: batch.rows].tolist() for name in names]
    return list(zip(*columns, strict=True))


NAMES = ["phy_offset", "size", "store_timestamp", "queue_offset", "tags_code", "queue_id", "sys_flag"]


def test_all_messages_come_back_in_the_readers_batches(config: Config, tmp_path: Path) -> None:
    run, batches = run_of(config, tmp_path / "run"), reader_batches(config)
    found = list(batches_of(run.slim()))
    assert len(found) > 5
    for ours, theirs in zip(found, batches, strict=True):
        assert (ours.begin_offset, ours.end_offset) == (theirs.begin_offset, theirs.end_offset)
        assert rows_of(ours, NAMES) == rows_of(theirs, NAMES)
        topics = [[one.topics.raw_name(int(id_)) for id_ in one.columns.topic_id[: one.rows]] for one in (ours, theirs)]
        assert topics[0] == topics[1]
    assert found[-1].end_offset == run.batch_end == run.phy_offset == batches[-1].end_offset


def test_without_the_columns_of_queues(config: Config, tmp_path: Path) -> None:
    outputs = config.outputs.model_copy(update={"consume_queue": False, "sparse": False})
    alone = run_of(config.model_copy(update={"outputs": outputs}), tmp_path / "alone")
    run = run_of(config, tmp_path / "run")
    assert read_entries(alone, 0, alone.entries) == read_entries(run, 0, run.entries)
