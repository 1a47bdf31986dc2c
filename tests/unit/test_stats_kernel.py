"""The statistics' kernels: bytes that changed since they were decoded, fingerprints, and the counting table."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexd.commitlog.batcher import DispatchBatch
from indexd.commitlog.writer import FrameSpec
from indexd.errors import DisturbedError
from indexd.index.format import IndexLayout
from indexd.spark.splits import SplitReader
from indexd.spark.stats.chains import ChainCounter
from indexd.spark.stats.content import ContentCounter, Selection
from indexd.spark.stats.parts_kernel import BUCKETS, OF_KEY, OF_TAGS, bucket_of, fingerprint
from indexd.spark.stats.table_kernel import refill
from indexd.spark.stats.tally import Counting, table_rows
from indexd.storage.disk import Disk
from support.stats import BASE_TIME, Log, naive_content, splits_of, written_log
from support.strategies import Sample

_0 = np.uint64(0)


def one_batch(log: Log) -> tuple[DispatchBatch, np.ndarray]:
    reader = SplitReader(Disk(), log.config, splits_of(log, 1 << 20)[0])
    batch = next(found for found in reader if isinstance(found, DispatchBatch))
    return batch, reader.frames(batch).copy()


def small_log(folder: Path) -> Log:
    samples = [
        Sample(
            FrameSpec(
                "T" * (200 if number == 3 else 1),
                body=b"body" * number,
                properties={"KEYS": f"a b{number}", "UNIQ_KEY": f"u{number}", "TAGS": "t"},
                store_timestamp=BASE_TIME + number,
                born_host=("::1", 1) if number == 2 else ("10.0.0.1", 1),
                store_host=("::1", 1) if number == 4 else ("10.0.0.1", 1),
            )
        )
        for number in range(6)
    ]
    return written_log(folder, samples, hash_slot_num=7, index_num=100)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Log:
    return small_log(tmp_path_factory.mktemp("log"))


def chain_counter(log: Log) -> ChainCounter:
    return ChainCounter(IndexLayout(7, 100), log.flavour, 0, 0)


def test_a_batch_is_counted(log: Log) -> None:
    counter, chains, entries = ContentCounter(Selection(capacity=64), log.flavour.skip_mask), chain_counter(log), 0
    reader = SplitReader(Disk(), log.config, splits_of(log, 1 << 20)[0])
    for batch in reader:
        assert isinstance(batch, DispatchBatch)
        frames = reader.frames(batch)
        counter.add(batch, frames)
        entries += chains.add(batch, frames, 0, -1, 1000)
    content, naive = counter.content(), naive_content(log)
    assert {(topic.decode(), hour): values for (topic, hour), values in content.cells.items()} == naive.cells
    assert entries == 24
    chains.end_file()
    assert [file.entries for file in chains.files] == [24]


@settings(max_examples=150)
@given(st.data())
def test_bytes_that_changed_meanwhile_are_never_read_past(log: Log, data: st.DataObject) -> None:
    batch, frames = one_batch(log)
    for _ in range(data.draw(st.integers(1, 4))):
        row = data.draw(st.integers(0, batch.rows - 1))
        start = int(batch.columns.phy_offset[row]) - batch.begin_offset
        place = start + data.draw(st.one_of(st.integers(0, 100), st.integers(0, int(batch.columns.size[row]) - 1)))
        frames[min(place, len(frames) - 1)] = data.draw(st.integers(0, 255))
    counter = ContentCounter(Selection(capacity=64), log.flavour.skip_mask)
    chains = chain_counter(log)
    for count in (lambda: counter.add(batch, frames), lambda: chains.add(batch, frames, 0, -1, 1000)):
        with contextlib.suppress(DisturbedError):
            count()


@pytest.mark.parametrize("left", [0, 1, 50, 90, 91])
def test_a_buffer_that_ends_early_is_no_frame(log: Log, left: int) -> None:
    batch, frames = one_batch(log)
    with pytest.raises(DisturbedError):
        ContentCounter(Selection(capacity=64), 0).add(batch, frames[:left].copy())


def printed(text: bytes, seed: np.uint64 = OF_KEY) -> int:
    data = np.frombuffer(bytearray(text), dtype=np.uint8)
    return int(fingerprint(data, _0, np.uint64(len(text)), seed))


@given(st.sets(st.binary(max_size=40), max_size=50))
def test_fingerprints_tell_texts_and_kinds_apart(texts: set[bytes]) -> None:
    prints = {printed(text, seed) for text in texts for seed in (OF_KEY, OF_TAGS)}
    assert len(prints) == 2 * len(texts)
    assert 0 not in prints


def test_fingerprints_tell_padding_apart() -> None:
    texts = [b"a" * size + b"\0" * zeros for size in range(18) for zeros in range(18)]
    assert len({printed(text) for text in texts}) == len(set(texts))


def test_a_fingerprints_low_bits_are_even() -> None:
    low = Counter(printed(f"order-{number}".encode()) & 7 for number in range(4000))
    assert all(400 < count < 600 for count in low.values())


def test_buckets_are_in_order_and_leave_nothing_out() -> None:
    buckets = [int(bucket_of(np.uint64(value))) for value in range(5000)]
    assert buckets == sorted(buckets)
    assert set(buckets) == set(range(max(buckets) + 1))
    assert int(bucket_of(np.uint64(2**32 - 1))) == BUCKETS - 1


def test_a_full_table_is_thinned_out_and_its_sample_is_the_same_in_any_order() -> None:
    prints = np.array(sorted({printed(f"{number}".encode()) for number in range(1000)}), dtype=np.uint64)
    counts, firsts = np.arange(1, 1001, dtype=np.int64), np.zeros(1000, dtype=np.int64)
    counting = Counting(100, is_sample=True)
    refill(counting.table.rows, counting.table.used, table_rows(prints, counts, firsts))
    counting.thin_out()
    sample = counting.sample()
    assert 0 < len(sample.prints) <= 100
    assert np.array_equal(sample.prints, prints[prints & np.uint64(sample.scale - 1) == 0])
    tally = Counting(100, is_sample=False)
    refill(tally.table.rows, tally.table.used, table_rows(prints, counts, firsts))
    tally.thin_out()
    kept = tally.tally(100)
    assert kept.error > 0
    true = dict(zip(prints.tolist(), counts.tolist(), strict=True))
    for value, count in zip(kept.prints.tolist(), kept.counts.tolist(), strict=True):
        assert true[value] - kept.error <= count <= true[value]
    assert {value for value, count in true.items() if count > kept.error} <= set(kept.prints.tolist())
