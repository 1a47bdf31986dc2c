"""Chains and queries of an index that is not built, held against a plain one that is."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexd.commitlog.writer import FrameSpec
from indexd.errors import DisturbedError
from indexd.index.format import IndexLayout
from indexd.spark.stats.chains import FileChains, plan_groups, sample_mask
from indexd.spark.stats.content import Selection
from indexd.spark.stats.parts_kernel import BUCKETS, bucket_of
from indexd.spark.stats.queries import RANGES, judge_queries
from indexd.spark.stats.queries_kernel import TALLY
from indexd.spark.stats.work import count_files
from support.naive import NaiveIndexFile, NaiveIndexService, naive_check
from support.stats import BASE_TIME, Log, batches_of, splits_of, written_log
from support.strategies import Sample, logs


def chains_of(log: Log, split_size: int, mask: int = 0) -> list[FileChains]:
    """The files, counted group by group as tasks do it."""
    config = log.config
    splits = splits_of(log, split_size)
    entries = [content.sum("entries") for content in batches_of(log, Selection(capacity=64), split_size)]
    groups = plan_groups(entries, IndexLayout(config.index.hash_slot_num, config.index.index_num))
    return [file for group in groups for file in count_files(config, splits, mask, group)]


def naive_files(log: Log) -> list[NaiveIndexFile]:
    """RocketMQ's files of that log, but for an empty one at the end."""
    return [file for file in naive_service(log).files if file.index_count > 1]


def naive_service(log: Log) -> NaiveIndexService:
    index = log.config.index
    service = NaiveIndexService(index.hash_slot_num, index.index_num, index.flavour)
    for frame in log.frames:
        message = naive_check(frame)[2]
        assert message is not None
        service.build_index(message)
    service.files = [file for file in service.files if file.index_count > 1]
    return service


def lengths_of(file: NaiveIndexFile) -> Counter[int]:
    """Slots by the length of their chains."""
    slots = Counter(entry[0] % len(file.slots) for entry in file.entries[1 : file.index_count])
    return Counter(slots.values()) + Counter({0: len(file.slots) - len(slots)})


@settings(max_examples=20)
@given(
    logs(malformed=False),
    st.integers(1, 9),
    st.integers(2, 40),
    st.sampled_from(["5.4", "4.0", "3.x"]),
    st.sampled_from([1, 300, 2000, 10_000]),
)
def test_chains_are_those_of_the_index(
    samples: list[Sample], slots: int, entries: int, flavour: str, split_size: int
) -> None:
    with TemporaryDirectory() as folder:
        log = written_log(Path(folder), samples, flavour=flavour, hash_slot_num=slots, index_num=entries)
        found = chains_of(log, split_size)
    wanted = naive_files(log)
    assert [file.number for file in found] == list(range(len(wanted)))
    for file, naive in zip(found, wanted, strict=True):
        assert file.entries == naive.index_count - 1
        assert (file.begin, file.end) == (naive.begin_timestamp, naive.end_timestamp)
        lengths = lengths_of(naive)
        assert file.longest == max(lengths)
        assert file.squares == sum(length**2 * count for length, count in lengths.items())
        by_bucket = np.zeros((2, BUCKETS), dtype=np.int64)
        for length, count in lengths.items():
            by_bucket[:, int(bucket_of(np.uint64(length)))] += (count, length * count)
        assert np.array_equal(file.lengths, by_bucket)
        example = [entry for entry in naive.entries if entry[:2] == (file.example_hash, file.example_phy)]
        assert example
        assert file.example_hash % slots == file.longest_slot
        hashes = [entry[0] for entry in naive.entries[1 : naive.index_count]]
        assert file.kept.key_hash.tolist() == hashes
        assert file.kept.number.tolist() == list(range(1, naive.index_count))


def naive_tallies(log: Log) -> dict[str, list[int]]:
    """The queries that ``queries`` defines, asked of the plain index."""
    service, entries = naive_service(log), log.entries()
    # Its answers name entries instead of messages: which key an entry was made for then shows.
    numbers = itertools.count()
    for file in service.files:
        file.entries[1:] = [(entry[0], next(numbers), *entry[2:]) for entry in file.entries[1:]]
    found = {}
    for name, span in RANGES:
        asked = dict.fromkeys(TALLY, 0)
        queries = set()
        for message, kind, key in entries:
            begin = message.store_timestamp // span * span if span else 0
            end = begin + span - 1 if span else 2**63 - 1
            if begin <= message.store_timestamp:
                queries.add((message.topic, key, kind, begin, end))
        for topic, key, kind, begin, end in queries:
            mine = {n for n, (m, *what) in enumerate(entries) if (m.topic, *what) == (topic, kind, key)}
            right = {n for n in mine if begin <= entries[n][0].store_timestamp <= end}
            answer = service.query_offset(topic, key, 64, begin, end, kind)[0]
            messages = [{entries[n][0].phy_offset for n in numbers} for numbers in (right, right & set(answer))]
            missed = messages[0] - messages[1]
            strangers, outside = bool(set(answer) - mine), bool((set(answer) & mine) - right)
            asked["asked"] += 1
            asked["wrong"] += bool(missed or strangers or outside)
            asked["limit"] += bool(missed) and len(answer) >= 64
            asked["missed"] += bool(missed) and len(answer) < 64
            asked["collision"] += strangers
            asked["outside"] += outside
        found[name] = [asked[what] for what in TALLY[:-1]]
    return found


@settings(max_examples=25)
@given(logs(malformed=False), st.integers(1, 9), st.integers(2, 60), st.sampled_from([1, 700, 10_000]))
def test_answers_are_judged_as_a_plain_index_gives_them(
    samples: list[Sample], slots: int, entries: int, split_size: int
) -> None:
    samples = [sample for sample in samples if abs(sample.spec.store_timestamp) < 2**50]
    with TemporaryDirectory() as folder:
        log = written_log(Path(folder), samples, hash_slot_num=slots, index_num=entries)
        judgement = judge_queries(chains_of(log, split_size), slots, 0)
    found = {name: list(row[:-1]) for (name, _), row in zip(RANGES, judgement.tallies, strict=True)}
    assert found == naive_tallies(log)


def keyed(keys: str, time: int) -> Sample:
    return Sample(FrameSpec("T", properties={"KEYS": keys}, store_timestamp=BASE_TIME + time))


def row_of(judgement_tallies: tuple[tuple[int, ...], ...], kind: str) -> dict[str, int]:
    number = [name for name, _ in RANGES].index(kind)
    return dict(zip(TALLY, judgement_tallies[number], strict=True))


def test_more_than_64_messages_are_a_wrong_answer(tmp_path: Path) -> None:
    log = written_log(tmp_path, [keyed("k", number) for number in range(65)], hash_slot_num=5, index_num=1000)
    judgement = judge_queries(chains_of(log, 500), 5, 0)
    assert row_of(judgement.tallies, "all") == dict.fromkeys(TALLY, 0) | {"asked": 1, "wrong": 1, "limit": 1}
    assert judgement.share("all") == 1.0


def test_a_second_is_missed_where_the_files_begin_in_the_middle_of_one(tmp_path: Path) -> None:
    log = written_log(tmp_path, [keyed("a", 500), keyed("b", 1400)], hash_slot_num=500, index_num=1000)
    judgement = judge_queries(chains_of(log, 500), 500, 0)
    # b was stored at 1.4 s and is taken for 0.5 s: its own second does not hold it.
    assert row_of(judgement.tallies, "second") == dict.fromkeys(TALLY, 0) | {"asked": 2, "wrong": 1, "missed": 1}


def test_keys_of_one_hash_are_told_apart(tmp_path: Path) -> None:
    log = written_log(tmp_path, [keyed("Aa", 0), keyed("BB", 1), keyed("Aa Aa", 2)], hash_slot_num=7, index_num=100)
    judgement = judge_queries(chains_of(log, 500), 7, 0)
    row = row_of(judgement.tallies, "all")
    assert (row["asked"], row["wrong"], row["collision"], row["repeated"]) == (2, 2, 2, 1)
    assert (judgement.keys, judgement.colliding_keys) == (2, 2)


def test_a_sample_of_slots_holds_all_of_its_slots_and_nothing_else(tmp_path: Path) -> None:
    log = written_log(tmp_path, [keyed(f"k{number}", number) for number in range(300)], hash_slot_num=64, index_num=99)
    whole = chains_of(log, 3000)
    sampled = chains_of(log, 3000, mask=7)
    slots = {int(value) % 64 for file in sampled for value in file.kept.key_hash}
    assert 0 < len(slots) < 32
    for all_of, some in zip(whole, sampled, strict=True):
        chosen = np.isin(all_of.kept.key_hash.astype(np.int64) % 64, sorted(slots))
        assert np.array_equal(all_of.kept.prints[chosen], some.kept.prints)
        assert np.array_equal(all_of.lengths, some.lengths)


def test_a_slot_with_too_many_entries_is_left_out_and_said_to_be(tmp_path: Path) -> None:
    keys = " ".join(["hot"] * 100)
    log = written_log(tmp_path, [keyed(keys, number) for number in range(30)], hash_slot_num=3, index_num=10_000)
    files = chains_of(log, 5000)
    judgement = judge_queries(files, 3, 0)
    assert len(files[0].kept.number) == 2048
    assert (judgement.overlong_slots, judgement.slots, judgement.entries) == (1, 0, 0)
    assert judgement.share("all") is None


@given(st.lists(st.integers(0, 30), max_size=12), st.integers(2, 20))
def test_groups_hold_every_entry_once_in_whole_files(entries: list[int], index_num: int) -> None:
    groups = plan_groups(entries, IndexLayout(5, index_num))
    at = 0
    for group in groups:
        assert group.begin == at
        assert group.begin % (index_num - 1) == 0
        assert group.before == sum(entries[: group.first_split])
        assert group.before <= group.begin < group.before + entries[group.first_split]
        assert sum(entries[: group.last_split]) < group.end <= sum(entries[: group.last_split + 1])
        at = group.end
    assert at == sum(entries)
    assert all(group.end % (index_num - 1) == 0 for group in groups[:-1])


def test_a_sample_is_as_large_as_it_may_be() -> None:
    assert sample_mask(100, 100) == 0
    assert sample_mask(101, 100) == 1
    assert sample_mask(2_000_000_000, 1 << 17) == (1 << 14) - 1


@pytest.mark.parametrize("value", [0, 1, 3, 4, 5, 7, 8, 63, 64, 1000, 2**31, 2**32 - 1])
def test_buckets_grow_by_a_quarter(value: int) -> None:
    from indexd.spark.stats.buckets import bounds_of

    first, last = bounds_of(int(bucket_of(np.uint64(value))))
    assert first <= value <= last
    assert last - first <= first / 4
    if value:
        assert int(bucket_of(np.uint64(value - 1))) <= int(bucket_of(np.uint64(value)))


def test_a_log_that_holds_less_than_was_counted_was_rewritten(tmp_path: Path) -> None:
    log = written_log(tmp_path, [keyed("k", number) for number in range(9)])
    layout = IndexLayout(log.config.index.hash_slot_num, log.config.index.index_num)
    splits = splits_of(log, 100_000)
    with pytest.raises(DisturbedError, match="rewritten"):
        count_files(log.config, splits, 0, plan_groups([10], layout)[0])
