"""Run files: what is written comes back, in any part, and no byte of it that has changed is believed."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from indexd.commitlog.batcher import DispatchBatch
from indexd.commitlog.evidence import Evidence
from indexd.commitlog.format import Corrupt
from indexd.commitlog.reader import Skipped
from indexd.config import Config
from indexd.errors import CorruptDataError
from indexd.index.format import FLAVOURS
from indexd.spark.rebuild import runs
from indexd.spark.rebuild.runs import BUCKETS, Run, RunReader, RunWriter, bucket_of, read_run
from indexd.spark.splits import Split, SplitReader, plan_splits
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
    with RunWriter(DISK, path, split, skip_mask=FLAVOURS[flavour].skip_mask, **keys) as writer:
        for found in reader:
            writer.put(found)
        return writer.close(reader, identity="i", evidence=[Evidence(1, 2, 3, 4, 5)])


def entries_of(batches: list[DispatchBatch], skip_mask: int) -> list[tuple[int, int, int]]:
    """(physical offset, store timestamp, key hash) of every entry."""
    return [
        (request.commit_log_offset, request.store_timestamp, key_hash)
        for batch in batches
        for request in map(batch.request, range(batch.rows))
        if not skip_mask >> (request.sys_flag & 0xC) & 1
        for key_hash in request.key_hashes
    ]


def read_entries(run: Run, first: int, last: int) -> list[tuple[int, int, int]]:
    found = []
    with RunReader(DISK, run.slim()) as reader:
        for batch, first_row, first_key in reader.index_batches(first, last):
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
    with RunReader(DISK, run) as reader:
        for number in range(0, run.entries, 371):
            assert reader.entry(number) == wanted[number][:2]


def rows_of(batch: DispatchBatch, names: list[str]) -> list[tuple[Any, ...]]:
    columns = [getattr(batch.columns, name)[: batch.rows].tolist() for name in names]
    return list(zip(*columns, strict=True))


def test_all_messages_come_back_in_log_order(config: Config, tmp_path: Path) -> None:
    names = ["phy_offset", "size", "store_timestamp"]
    run, batches = run_of(config, tmp_path / "run"), batches_of(config)
    with RunReader(DISK, run.slim()) as reader:
        found = list(reader.sparse_batches())
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
    with RunReader(DISK, run.slim()) as reader:
        for bucket in range(BUCKETS):
            for batch in reader.queue_batches(bucket):
                topics = [batch.topics.raw_name(int(one)) for one in batch.columns.topic_id]
                flags_of = batch.columns.sys_flag.tolist()
                rows = zip(rows_of(batch, names), topics, flags_of, strict=True)
                found.setdefault(bucket, []).extend((*values, topic, flags) for values, topic, flags in rows)
    assert found == wanted
    assert [second - one for one, second in pairwise(run.buckets)] == [len(wanted.get(b, ())) for b in range(BUCKETS)]
    assert {(seen.topic, seen.queue_id): seen.phy_offset for seen in run.queues} == first
    assert [seen.phy_offset for seen in run.queues] == sorted(first.values())


def test_names_that_java_reads_as_one_are_in_one_bucket() -> None:
    assert bucket_of(b"T\xff", 3) == bucket_of(b"T\xfe", 3) == bucket_of("T\N{REPLACEMENT CHARACTER}".encode(), 3)
    numbers = {bucket_of(b"T", queue_id) for queue_id in range(-50, 2000)}
    assert numbers == set(range(BUCKETS))


def test_more_queues_than_the_table_was_made_for(tmp_path: Path) -> None:
    write_odd(tmp_path / "store", odd_messages(3000, 4000), SEGMENT_SIZE)
    config = config_for(tmp_path / "store", tmp_path / "data", segment_size=SEGMENT_SIZE)
    run = run_of(config, tmp_path / "run")
    seen = [(one.topic, one.queue_id) for one in run.queues]
    assert len(seen) == len(set(seen)) > 1000


def test_a_run_can_be_read_off_its_file(config: Config, tmp_path: Path) -> None:
    run = run_of(config, tmp_path / "run")
    assert read_run(DISK, tmp_path / "run") == run
    assert run.size == (tmp_path / "run").stat().st_size
    assert read_run(DISK, tmp_path / "nothing") is None
    odd = Run(
        Split(5, 9),
        tmp_path / "x",
        skipped=(Skipped(5, 6, "why", True),),
        unreadable=Corrupt(6, "zeros", tmp_path),
        ends_log=True,
        store_timestamp=-5,
        topics=(b"\xff\x00", b""),
        queue_rows=bytes(range(256)),
    )
    assert runs._RUN.validate_json(runs._RUN.dump_json(odd)) == odd


def is_damaged(run: Run) -> bool:
    try:
        with RunReader(DISK, run) as reader:
            reader.check()
    except CorruptDataError:
        return True
    return False


def test_no_byte_that_has_changed_is_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "ROWS_PER_CHUNK", 3)
    write_odd(tmp_path / "store", odd_messages(7, 3), SEGMENT_SIZE)
    config = config_for(tmp_path / "store", tmp_path / "data", segment_size=SEGMENT_SIZE)
    run, path = run_of(config, tmp_path / "run"), tmp_path / "run"
    whole = path.read_bytes()
    for position in range(8, run.size, 3):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        assert read_run(DISK, path) is None or is_damaged(run), position
    path.write_bytes(whole)
    assert not is_damaged(run)
    for size in range(0, run.size, 7):
        os.truncate(path, size)
        assert read_run(DISK, path) is None
        with pytest.raises(CorruptDataError), RunReader(DISK, run):
            pass
        path.write_bytes(whole)


def test_without_the_columns_of_queues(config: Config, tmp_path: Path) -> None:
    outputs = config.outputs.model_copy(update={"consume_queue": False, "sparse": False})
    alone = run_of(config.model_copy(update={"outputs": outputs}), tmp_path / "alone", with_units=False)
    run = run_of(config, tmp_path / "run")
    assert read_entries(alone, 0, alone.entries) == read_entries(run, 0, run.entries)
    assert alone.size < run.size / 2
    assert not list(alone.queues)
    sparse_alone = run_of(config, tmp_path / "sparse", with_units=False)
    with RunReader(DISK, sparse_alone) as reader, RunReader(DISK, run) as other:
        for batch, theirs in zip(reader.sparse_batches(), other.sparse_batches(), strict=True):
            assert np.array_equal(batch.columns.size, theirs.columns.size)
