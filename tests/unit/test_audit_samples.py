"""Keys drawn from all over a log, and the messages with their hashes that are met while it is read."""

from __future__ import annotations

import random
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path

import pytest

from indexd.audit import plan_audit
from indexd.audit.samples.draw import Sample, draw
from indexd.audit.samples.kernel import ROWS_MAX
from indexd.commitlog.writer import CommitLogWriter, FrameSpec
from indexd.config import Config
from indexd.index.format import IndexLayout
from indexd.storage.disk import Disk
from support.auditing import config_for, config_of_golden, key_texts
from support.goldens import GOLDENS, unpack
from support.naive import key_hash, naive_frames
from support.sampling import sampled
from support.small_log import SEGMENT_SIZE, messages, write_log

LAYOUT = IndexLayout(500, 2000)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Several segments, no index; not to be changed."""
    store = tmp_path_factory.mktemp("small") / "store"
    write_log(store, 4000)
    return config_for(store, LAYOUT, SEGMENT_SIZE)


def drawn_from(config: Config, count: int) -> tuple[Sample, ...]:
    return draw(Disk(), config, plan_audit(Disk(), config), count)


def text_of(sample: Sample) -> str:
    return f"{sample.topic}#T#{sample.key}" if sample.index_type == "T" else f"{sample.topic}#{sample.key}"


def texts_by_offset(config: Config, flavour: str = "5.4") -> dict[int, list[str]]:
    assert config.store.store is not None
    frames = naive_frames(config.store.store / "commitlog", config.store.segment_size)
    return {frame.phy_offset: key_texts(frame, flavour) for frame in frames}


@pytest.mark.parametrize("name", GOLDENS)
def test_every_sample_is_a_key_of_its_message(tmp_path: Path, name: str) -> None:
    golden = unpack(name, tmp_path)
    config = config_of_golden(golden)
    samples, texts = drawn_from(config, 200), texts_by_offset(config, golden.flavour)
    times = {row["phyOffset"]: row["storeTimestamp"] for row in golden.messages()}
    assert len(samples) > 150
    assert samples == drawn_from(config, 200)
    for sample in samples:
        assert text_of(sample) in texts[sample.phy_offset]
        assert sample.key_hash == key_hash(text_of(sample))
        assert sample.store_timestamp == times[sample.phy_offset]


def test_samples_are_spread_over_the_log_and_over_the_kinds_of_keys(small: Config) -> None:
    samples = drawn_from(small, 200)
    assert len(samples) == len({text_of(sample) for sample in samples}) == 200
    offsets = sorted({sample.phy_offset for sample in samples})
    end = max(texts_by_offset(small))
    assert max(after - before for before, after in pairwise([0, *offsets, end])) < 6 * end / 200
    kinds = Counter("tag" if s.index_type else "unique" if s.key.startswith("00000001") else "key" for s in samples)
    assert min(kinds.values()) >= 16
    assert set(kinds) == {"tag", "unique", "key"}


@pytest.mark.parametrize(("flavour", "has_unique"), [("3.x", False), ("4.7", True)])
def test_only_what_the_flavour_indexes_is_drawn(tmp_path: Path, flavour: str, has_unique: bool) -> None:
    write_log(tmp_path / "store", 600)
    config = config_for(tmp_path / "store", LAYOUT, SEGMENT_SIZE, flavour=flavour)
    samples = drawn_from(config, 100)
    assert all(sample.index_type is None for sample in samples)
    assert any(sample.key.startswith("00000001") for sample in samples) == has_unique
    flags = {spec.store_timestamp: spec.sys_flag for spec in islice(messages(1), 600)}
    met = {flags[sample.store_timestamp] for sample in samples}
    assert met == ({0, 8} if flavour == "3.x" else {0, 4, 8})


def test_of_a_short_log_every_key_is_drawn_once(tmp_path: Path) -> None:
    write_log(tmp_path / "store", 12)
    config = config_for(tmp_path / "store", LAYOUT, SEGMENT_SIZE)
    wanted = {text for texts in texts_by_offset(config).values() for text in texts}
    assert {text_of(sample) for sample in drawn_from(config, 200)} == wanted
    assert len(drawn_from(config, 7)) == 7


def test_neither_a_log_nor_keys(tmp_path: Path) -> None:
    (tmp_path / "none" / "commitlog").mkdir(parents=True)
    assert drawn_from(config_for(tmp_path / "none", LAYOUT, SEGMENT_SIZE), 200) == ()
    with CommitLogWriter(tmp_path / "bare" / "commitlog", SEGMENT_SIZE) as writer:
        for _ in range(20):
            writer.append(FrameSpec(topic="T", body=b"x", store_timestamp=1))
    assert drawn_from(config_for(tmp_path / "bare", LAYOUT, SEGMENT_SIZE), 200) == ()


def test_expired_and_unreadable_log_is_passed_over(tmp_path: Path) -> None:
    store = tmp_path / "store"
    write_log(store, 4000)
    segments = sorted((store / "commitlog").iterdir())
    segments[0].unlink()
    segments[1].write_bytes(random.Random(1).randbytes(SEGMENT_SIZE))
    samples = drawn_from(config_for(store, LAYOUT, SEGMENT_SIZE), 200)
    assert len(samples) > 100
    assert min(sample.phy_offset for sample in samples) == 2 * SEGMENT_SIZE


def test_what_looks_like_a_message_inside_a_body_is_no_sample(tmp_path: Path) -> None:
    frame = Path(tmp_path / "one" / "commitlog")
    with CommitLogWriter(frame, SEGMENT_SIZE) as writer:
        writer.append(FrameSpec(topic="T", body=b"x", properties={"KEYS": "inner"}, store_timestamp=1))
    data = next(frame.iterdir()).read_bytes().rstrip(b"\0")
    with CommitLogWriter(tmp_path / "store" / "commitlog", SEGMENT_SIZE) as writer:
        for _ in range(8):
            writer.append(FrameSpec(topic="T", body=data * 200, properties={"KEYS": "outer"}, store_timestamp=1))
    # Its own offset is not where it stands.
    assert {s.key for s in drawn_from(config_for(tmp_path / "store", LAYOUT, SEGMENT_SIZE), 200)} == {"outer"}


@pytest.mark.parametrize("cuts", [0, 1, 7])
def test_all_messages_with_a_drawn_hash_are_written_down_however_the_log_is_cut(small: Config, cuts: int) -> None:
    texts = texts_by_offset(small)
    offsets = random.Random(cuts).sample(sorted(texts), cuts)
    samples, parts = sampled(small, 60, cuts=offsets)
    assert len(parts) > cuts
    wanted = {(key_hash(text), offset) for offset, some in texts.items() for text in some}
    hashes = {sample.key_hash for sample in samples}
    rows = [row for part in parts for row in part.sampled]
    counts = Counter(row[0] for row in rows)
    for hashed in hashes:
        true = sorted(offset for one, offset in wanted if one == hashed)
        found = sorted(offset for one, offset, _ in rows if one == hashed)
        if len(true) <= ROWS_MAX:
            assert found == true
        else:
            assert counts[hashed] > ROWS_MAX
    assert set(counts) == hashes
    times = {s.phy_offset: s.store_timestamp for s in samples}
    assert all(times.get(offset, time) == time for _, offset, time in rows)


def test_a_hot_key_takes_little_room(tmp_path: Path) -> None:
    with CommitLogWriter(tmp_path / "store" / "commitlog", SEGMENT_SIZE) as writer:
        for number in range(3000):
            properties = {"KEYS": f"hot hot k{number % 900}"}
            writer.append(FrameSpec(topic="T", body=b"x", properties=properties, store_timestamp=1000 + number))
    _, parts = sampled(config_for(tmp_path / "store", LAYOUT, SEGMENT_SIZE), 200)
    for part in parts:
        assert max(Counter(row[0] for row in part.sampled).values()) <= ROWS_MAX + 1
    counts = Counter(row[0] for part in parts for row in part.sampled)
    assert counts[key_hash("T#hot")] > ROWS_MAX
    assert sum(counts.values()) - counts[key_hash("T#hot")] > 200
