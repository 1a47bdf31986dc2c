"""Statistics of the log's content, held against plain counting of decoded messages."""

from __future__ import annotations

from collections import Counter
from functools import reduce
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexd.commitlog.writer import FrameSpec
from indexd.spark.stats.clock import Event
from indexd.spark.stats.content import Content, Selection, merge
from indexd.spark.stats.content_kernel import CELL
from indexd.spark.stats.names import HOST, KEYS, TAGS, UNIQ_KEY, texts_of
from support.stats import BASE_TIME, batches_of, content_of, naive_content, written_log
from support.strategies import Sample, logs


def cells_by_topic(content: Content) -> dict[tuple[str, int], tuple[int, ...]]:
    return {(topic.decode(), hour): values for (topic, hour), values in content.cells.items()}


@settings(max_examples=15)
@given(logs(malformed=False), st.integers(1, 4000), st.sampled_from(["5.4", "4.7", "3.x"]))
def test_it_counts_what_the_decoder_sees(samples: list[Sample], split_size: int, flavour: str) -> None:
    with TemporaryDirectory() as folder:
        log = written_log(Path(folder), samples, flavour=flavour)
        found = content_of(log, Selection(capacity=1024), split_size)
        naive = naive_content(log)
    assert cells_by_topic(found) == naive.cells
    assert found.sums == naive.sums
    assert found.clock.steps == naive.steps
    assert found.clock.silences == naive.silences
    assert (found.clock.first, found.clock.last) == naive.ends
    assert int(found.bodies[0].sum()) == len(samples)
    assert int(found.bodies[1].sum()) == sum(len(sample.spec.body) for sample in samples)
    for tally, counts in ((found.keys, naive.keys), (found.uniq_keys, naive.uniq_keys), (found.tags, naive.tags)):
        assert tally.is_exact
        assert Counter(tally.counts.tolist()) == Counter(counts.values())
    assert found.key_sample.distinct == len(naive.keys)
    assert found.hosts.counts.sum() == len(samples)


@settings(max_examples=15)
@given(logs(malformed=False), st.lists(st.integers(1, 5000), min_size=2, max_size=4))
def test_it_does_not_matter_how_the_log_is_split(samples: list[Sample], sizes: list[int]) -> None:
    with TemporaryDirectory() as folder:
        log = written_log(Path(folder), samples)
        one, *others = [content_of(log, Selection(capacity=16, silence=500), size) for size in sizes]
    for other in others:
        assert (one.bins, one.step) == (other.bins, other.step)
        assert one.cells == other.cells
        assert one.sums == other.sums
        assert one.clock == other.clock
        assert np.array_equal(one.bodies, other.bodies)
        for name in ("key_sample", "uniq_sample"):
            mine, theirs = getattr(one, name), getattr(other, name)
            assert mine.level == theirs.level
            assert np.array_equal(mine.prints, theirs.prints)
            assert np.array_equal(mine.counts, theirs.counts)
            assert np.array_equal(mine.firsts, theirs.firsts)


@settings(max_examples=10)
@given(logs(malformed=False, max_size=12), st.integers(1, 3000))
def test_merging_is_associative(samples: list[Sample], size: int) -> None:
    with TemporaryDirectory() as folder:
        log = written_log(Path(folder), samples)
        parts = batches_of(log, Selection(capacity=1024), size)
    left = reduce(merge, parts, Content.empty(1024))
    right = reduce(lambda behind, one: merge(one, behind), reversed(parts), Content.empty(1024))
    assert (left.bins, left.step) == (right.bins, right.step)
    assert left.cells == right.cells
    assert left.clock == right.clock
    assert left.entries_of == right.entries_of
    assert np.array_equal(left.keys.prints, right.keys.prints)
    assert np.array_equal(left.keys.counts, right.keys.counts)


def specs(count: int) -> list[Sample]:
    return [
        Sample(
            FrameSpec(
                "T" if number % 3 else "Other",
                body=b"b" * number,
                properties={"KEYS": f"k{number % 7} always", "UNIQ_KEY": f"u{number}", "TAGS": "t"},
                store_timestamp=BASE_TIME + 1000 * number,
                born_host=("10.0.0.1" if number % 2 else "2001:db8::1", 1000 + number),
            )
        )
        for number in range(count)
    ]


def test_topics_and_times_are_selected(tmp_path: Path) -> None:
    log = written_log(tmp_path, specs(60))
    chosen = content_of(log, Selection(("T",), BASE_TIME + 10_000, BASE_TIME + 19_000), 1000)
    wanted = [number for number in range(10, 20) if number % 3]
    assert {topic for topic, _ in chosen.cells} == {b"T"}
    assert chosen.total("messages") == len(wanted)
    assert chosen.total("body_bytes") == sum(wanted)
    # The index has all topics and times in it, whatever is looked at.
    assert chosen.sum("rows") == 60
    assert chosen.sum("entries") == 60 * 4


def test_texts_are_found_again_by_their_fingerprints(tmp_path: Path) -> None:
    log = written_log(tmp_path, specs(20))
    found = content_of(log, Selection(), 500)
    texts = {value: text for frame in log.frames for value, text in texts_of(frame)}
    hot = texts[int(found.keys.prints[found.keys.top(1)[0]])]
    assert (hot.kind, hot.text) == (KEYS, "always")
    kinds = Counter(text.kind for text in texts.values())
    assert kinds == {KEYS: 2 * 8 - 0, UNIQ_KEY: 20, TAGS: 2, HOST: 2}
    assert {text.text for text in texts.values() if text.kind == HOST} == {"10.0.0.1", "2001:db8::1"}


@pytest.mark.parametrize("split_size", [1, 200, 100_000])
def test_steps_and_silences_are_found_wherever_a_split_lies(tmp_path: Path, split_size: int) -> None:
    times = [0, 10, 5, 5, 70_006, 70_006, -50, 60_000]
    samples = [Sample(FrameSpec("T", store_timestamp=BASE_TIME + time)) for time in times]
    log = written_log(tmp_path, samples)
    clock = content_of(log, Selection(silence=60_000), split_size).clock
    assert (clock.steps, clock.silences) == (2, 2)
    size = log.sizes[0]
    assert clock.largest_steps == (
        Event(6 * size, BASE_TIME + 70_006, BASE_TIME - 50),
        Event(2 * size, BASE_TIME + 10, BASE_TIME + 5),
    )
    assert [event.size for event in clock.largest_silences] == [70_001, 60_050]


def test_more_keys_than_fit_are_estimated_and_hot_ones_kept(tmp_path: Path) -> None:
    samples = [
        Sample(FrameSpec("T", properties={"KEYS": " ".join(f"{number}-{i}" for i in range(40)) + " hot"}))
        for number in range(400)
    ]
    log = written_log(tmp_path, samples)
    found = content_of(log, Selection(capacity=512), 50_000)
    assert not found.key_sample.is_exact
    assert abs(found.key_sample.distinct / 16_001 - 1) < 5 * found.key_sample.spread
    assert set(found.key_sample.counts.tolist()) <= {1, 400}
    top = found.keys.top(1)[0]
    assert found.keys.error > 0
    assert 400 - found.keys.error <= found.keys.counts[top] <= 400


def test_columns_are_named_once() -> None:
    assert len(set(CELL)) == len(CELL)
