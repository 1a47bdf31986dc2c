"""Runs: what is written comes back, in any part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from indexd.commitlog.batcher import DispatchBatch
from indexd.config import Config
from indexd.index.format import FLAVOURS
from indexd.spark.rebuild import runs
from indexd.spark.rebuild.runs import (
    BUCKETS,
    Run,
    RunWriter,
    bucket_of,
    entry_of,
    index_batches,
    log_batches,
    queue_batches,
)
from indexd.spark.splits import SplitReader, plan_splits
from indexd.storage.disk import Disk
from support.odd_log import odd_messages, write_odd
from support.reopened import config_for

SEGMENT_SIZE = 1 << 20
DISK = Disk()


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A log of one segment whose run has many chunks."""
    monkeypatch.setattr(runs, "ROWS_PER_CHUNK", 300)
    write_odd(tmp_path / "store", odd_messages(3000, 40), SEGMENT_SIZE)
    return config_for(tmp_path / "store", tmp_path / "data", segment_size=SEGMENT_SIZE, read_bytes=64 << 10)


def batches_of(config: Config) -> list[DispatchBatch]:
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
    wanted = entries_of(batches_of(config), FLAVOURS[flavour].skip_mask)
    assert run.entries == len(wanted) > 4000
    for first in (0, 1, 2, 899, 900, 2500, run.entries - 1):
        for last in (first + 1, first + 50, run.entries):
            assert read_entries(run, first, last) == wanted[first:last]
    for number in range(0, run.entries, 371):
        assert entry_of(run, number) == wanted[number][:2]


def rows_of(batch: DispatchBatch, names: list[str]) -> list[tuple[Any, ...]]:
    columns = [getattr(batch.columns, name)[: batch.rows].tolist() for name in names]
    return list(zip(*columns, strict=True))


def test_all_messages_come_back_in_log_order(config: Config, tmp_path: Path) -> None:
    names = ["phy_offset", "size", "store_timestamp"]
    run, batches = run_of(config, tmp_path / "run"), batches_of(config)
    found = list(log_batches(run.slim()))
    assert len(found) > 5
    assert [row for batch in found for row in rows_of(batch, names)] == [
        row for batch in batches for row in rows_of(batch, names)
    ]
    assert {batch.end_offset for batch in found} <= {batch.end_offset for batch in batches}
    assert found[-1].end_offset == run.batch_end == run.phy_offset == batches[-1].end_offset


def test_each_bucket_holds_its_queues_in_log_order(config: Config, tmp_path: Path) -> None:
    names = ["phy_offset", "size", "queue_offset", "tags_code", "queue_id"]
    run = run_of(config, tmp_path / "run")
    wanted: dict[int, list[Any]] = {}
    first: dict[tuple[bytes, int], int] = {}
    for batch in batches_of(config):
        for row, values in enumerate(rows_of(batch, names)):
            flags, topic_id = int(batch.columns.sys_flag[row]), int(batch.columns.topic_id[row])
            topic, queue_id = batch.topics.raw_name(topic_id), values[-1]
            if flags & 0xC in (0x4, 0xC):
                continue
            wanted.setdefault(bucket_of(topic, queue_id), []).append((*values, topic, flags & 0xFF))
            if not flags & 0x80 and 0 <= values[2] <= (1 << 62) // 20:
                first.setdefault((topic, queue_id), values[0])
    found: dict[int, list[Any]] = {}
    for bucket in range(BUCKETS):
        for batch in queue_batches(run.slim(), bucket):
            topics = [batch.topics.raw_name(int(one)) for one in batch.columns.topic_id]
            flags_of = (batch.columns.sys_flag & 0xFF).tolist()
            rows = zip(rows_of(batch, names), topics, flags_of, strict=True)
            found.setdefault(bucket, []).extend((*values, topic, flags) for values, topic, flags in rows)
    assert found == wanted
    assert list(run.units) == [len(wanted.get(bucket, ())) for bucket in range(BUCKETS)]
    assert {(seen.topic, seen.queue_id): seen.phy_offset for seen in run.queues} == first
    assert [seen.phy_offset for seen in run.queues] == sorted(first.values())


def test_names_that_java_reads_as_one_are_in_one_bucket() -> None:
    assert bucket_of(b"T\xff", 3) == bucket_of(b"T\xfe", 3) == bucket_of("T\N{REPLACEMENT CHARACTER}".encode(), 3)
    numbers = {bucket_of(b"T", queue_id) for queue_id in range(-50, 2000)}
    assert numbers == set(range(BUCKETS))


def test_without_the_columns_of_queues(config: Config, tmp_path: Path) -> None:
    outputs = config.outputs.model_copy(update={"consume_queue": False, "sparse": False})
    alone = run_of(config.model_copy(update={"outputs": outputs}), tmp_path / "alone", with_units=False)
    run = run_of(config, tmp_path / "run")
    assert read_entries(alone, 0, alone.entries) == read_entries(run, 0, run.entries)
    assert not alone.queues
    assert not (alone.path / "units").exists()
    sparse_alone = run_of(config, tmp_path / "sparse", with_units=False)
    for batch, theirs in zip(log_batches(sparse_alone), log_batches(run), strict=True):
        assert np.array_equal(batch.columns.size, theirs.columns.size)
