"""A log that was cut and written on from there: the index is rolled back to where the two agree, entry by entry."""

from __future__ import annotations

import random
import shutil
from contextlib import closing
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

import pytest

from indexd.errors import DisturbedError, UnsafeStoreError
from indexd.flush.frontier import read_frontier
from indexd.query import open_data as open_query
from indexd.recovery import recover as recover_module
from indexd.recovery.open import open_data
from indexd.storage.disk import Disk
from support.commitlog_writer import CommitLogWriter
from support.daemon import assert_same_index, index_files
from support.naive import naive_frames
from support.reading import patch
from support.reopened import Reopened, config_for, cut_at, reopen, undisturbed, write_on
from support.small_log import SEGMENT_SIZE, messages, write_log

if TYPE_CHECKING:
    from pathlib import Path

    from indexd.compare.log import Agreed
    from indexd.config import Config

SEED = 5


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A store of three segments, and its data directory after a clean stop."""
    config = config_for(tmp_path / "store", tmp_path / "data")
    write_log(tmp_path / "store", 2500, seed=SEED)
    reopen(config)
    return config


def offsets(config: Config) -> list[int]:
    assert config.store.store is not None
    return [message.phy_offset for message in naive_frames(config.store.store / "commitlog", SEGMENT_SIZE)]


def check(config: Config, tmp_path: Path, *, unclean: bool = False) -> Reopened:
    """A start finds the difference, and what it makes is what an undisturbed build makes; the next finds nothing."""
    came_to = reopen(config, unclean=unclean)
    number = len(list(tmp_path.glob("whole*")))
    whole = undisturbed(config, tmp_path / f"whole{number}")
    assert_same_index(config.store.data, whole)
    ours, theirs = (read_frontier(Disk(), root / "frontier") for root in (config.store.data, whole))
    assert ours is not None
    assert theirs is not None
    assert [mark.header for mark in ours.index] == [mark.header for mark in theirs.index]
    assert (ours.phy_offset, ours.messages, ours.store_timestamp) == (
        theirs.phy_offset,
        theirs.messages,
        theirs.store_timestamp,
    )
    again = reopen(config, unclean=unclean)
    assert again.recovered.dropped_entries == 0
    assert again.resumed_at == came_to.phy_offset
    assert_same_index(config.store.data, whole)
    return came_to


@pytest.mark.parametrize(
    ("where", "written", "unclean"),
    [
        (where, written, (row + column) % 2 == 0)  # stopped or killed before, in turn
        for row, where in enumerate(("second frame", "middle", "segment", "last"))
        for column, written in enumerate((1, 40, 3000))
    ],
)
def test_cut_and_continued(config: Config, tmp_path: Path, where: str, written: int, unclean: bool) -> None:
    known = offsets(config)
    cut = {
        "second frame": known[1],
        "middle": known[len(known) // 2],
        "segment": next(b for a, b in pairwise(known) if a // SEGMENT_SIZE != b // SEGMENT_SIZE),
        "last": known[-1],
    }[where]
    with cut_at(tmp_path / "store", cut) as writer:
        write_on(writer, written, seed=99)
    came_to = check(config, tmp_path, unclean=unclean)
    assert came_to.resumed_at == cut
    assert came_to.resumed_messages == known.index(cut)


@pytest.mark.parametrize("seed", [20260716, 4284601641])
def test_cut_anywhere(tmp_path: Path, seed: int) -> None:
    rand = random.Random(seed)
    config = config_for(tmp_path / "store", tmp_path / "data")
    write_log(tmp_path / "store", 1500, seed=seed & 0xFFFF)
    reopen(config)
    for turn in range(8):
        cut = rand.choice(offsets(config)[1:])
        with cut_at(tmp_path / "store", cut) as writer:
            write_on(writer, rand.choice([400, 2000]), seed=turn + 1, later_ms=(turn + 1) * 3_600_000)
        check(config, tmp_path, unclean=rand.random() < 0.5)


def test_what_lies_before_the_recheck_is_found_by_its_evidence(tmp_path: Path) -> None:
    """A short stretch between two points, far behind the end: not yet; but as soon as it reaches a point."""
    config = config_for(tmp_path / "store", tmp_path / "data", recheck_bytes=0)
    write_log(tmp_path / "store", 3000, seed=SEED)
    reopen(config)
    known = offsets(config)
    cut = known[-350]
    assert cut // SEGMENT_SIZE == known[-1] // SEGMENT_SIZE
    with cut_at(tmp_path / "store", cut) as writer:
        write_on(writer, 5, seed=8)
        assert reopen(config).recovered.dropped_entries == 0
        write_on(writer, 1500, seed=9)
    assert check(config, tmp_path).resumed_at == cut


def test_cut_in_the_middle_of_a_frame_and_not_continued(config: Config, tmp_path: Path) -> None:
    """What a power cut leaves before the broker has started again: zeros from somewhere on."""
    known = offsets(config)
    cut = known[-300] + 30
    for path in sorted((tmp_path / "store" / "commitlog").iterdir()):
        base = int(path.name)
        data = path.read_bytes()
        path.write_bytes(data[: max(cut - base, 0)].ljust(SEGMENT_SIZE, b"\0"))
    came_to = check(config, tmp_path)
    assert came_to.resumed_at == known[-300]


def test_frames_of_equal_size_so_that_stale_ones_go_on_where_new_ones_end(tmp_path: Path) -> None:
    config = config_for(tmp_path / "store", tmp_path / "data")
    from support.commitlog_writer import FrameSpec

    def same_size(number: int, time: int) -> FrameSpec:
        return FrameSpec("T", b"x" * 50, {"KEYS": f"k{number:05d}"}, store_timestamp=time + number)

    with CommitLogWriter(tmp_path / "store" / "commitlog", SEGMENT_SIZE) as writer:
        for number in range(1000):
            writer.append(same_size(number, 1_700_000_000_000))
    reopen(config)
    known = offsets(config)
    with cut_at(tmp_path / "store", known[400]) as writer:
        for number in range(3):
            writer.append(same_size(90_000 + number, 1_700_000_100_000))
    came_to = check(config, tmp_path)
    assert came_to.resumed_at == known[400]


def test_segments_that_expired_while_nobody_looked(config: Config, tmp_path: Path) -> None:
    known = offsets(config)
    (tmp_path / "store" / "commitlog" / f"{0:020d}").unlink()
    came_to = reopen(config)
    assert came_to.resumed_at == came_to.phy_offset
    assert came_to.phy_offset > known[-1]
    assert came_to.recovered.dropped_entries == 0


def test_all_that_was_indexed_expired_while_nobody_looked(config: Config, tmp_path: Path) -> None:
    store = tmp_path / "store" / "commitlog"
    begin = 10 * SEGMENT_SIZE
    shutil.rmtree(store)
    write_log(tmp_path / "store", 500, seed=8, start_offset=begin)
    came_to = reopen(config)
    assert came_to.messages == 2500 + 500
    assert came_to.phy_offset > begin
    assert came_to.recovered.dropped_entries == 0


@pytest.mark.parametrize("forced", [False, True])
def test_another_store_is_refused(config: Config, tmp_path: Path, forced: bool) -> None:
    shutil.rmtree(tmp_path / "store" / "commitlog")
    write_log(tmp_path / "store", 2500, seed=77)
    before = [path.read_bytes() for path in index_files(config.store.data)]
    with pytest.raises(UnsafeStoreError, match="is not the store that"):
        reopen(config, forced=forced)
    assert [path.read_bytes() for path in index_files(config.store.data)] == before


def test_an_emptied_store_is_refused(config: Config, tmp_path: Path) -> None:
    for path in (tmp_path / "store" / "commitlog").iterdir():
        path.unlink()
    with pytest.raises(UnsafeStoreError, match="its commitlog is empty"):
        reopen(config)


def test_a_log_that_is_shorter_is_followed(config: Config, tmp_path: Path) -> None:
    """A backup of the same store, from before: its messages are the same, but not all are there."""
    shutil.rmtree(tmp_path / "store" / "commitlog")
    with CommitLogWriter(tmp_path / "store" / "commitlog", SEGMENT_SIZE) as writer:
        for spec in islice(messages(SEED), 700):
            writer.append(spec)
    came_to = check(config, tmp_path)
    assert came_to.resumed_messages == 700


@pytest.mark.parametrize("back", [0, 1])
def test_what_is_written_while_a_start_compares_is_noticed_at_the_first_look(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, back: int
) -> None:
    compare = recover_module.compare_with_log
    known = offsets(config)
    cut = [offset for offset in known if offset // SEGMENT_SIZE == known[-1] // SEGMENT_SIZE - back][-40]
    with cut_at(tmp_path / "store", cut) as writer:

        def compare_and_write(*args: Any) -> Agreed:
            agreed = compare(*args)
            write_on(writer, 3, seed=33)
            return agreed

        monkeypatch.setattr(recover_module, "compare_with_log", compare_and_write)
        # Where the sparse indexes have to be filled from there, already the opening finds it.
        with (
            pytest.raises(DisturbedError),
            closing(open_data(config, Disk(), lambda *_: None, unclean=True).pipeline) as pipeline,
        ):
            pipeline.detector.check()
        monkeypatch.undo()
    check(config, tmp_path, unclean=True)


@pytest.mark.parametrize("damage", [bytes(4), b"\xff" * 4], ids=["zeros", "junk"])
@pytest.mark.parametrize("forced", [False, True])
def test_a_cut_behind_damage_and_before_what_was_noted_is_found(
    config: Config, tmp_path: Path, damage: bytes, forced: bool
) -> None:
    """What was noted behind the damage is left of the longer log: the cut lies between."""
    known = offsets(config)
    inside = [offset for offset in known if offset // SEGMENT_SIZE == known[-1] // SEGMENT_SIZE]
    patch(tmp_path / "store" / "commitlog" / f"{inside[0]:020d}", inside[10] - inside[0] + 4, damage)
    with cut_at(tmp_path / "store", inside[15]) as writer:
        write_on(writer, 1, seed=99)
    assert reopen(config, unclean=True, forced=forced).resumed_at == inside[15]


def test_queues_are_filled_again_over_what_cannot_be_read(config: Config, tmp_path: Path) -> None:
    known = offsets(config)
    config = config_for(tmp_path / "store", tmp_path / "data", on_corrupt="skip")
    path = tmp_path / "store" / "commitlog" / f"{known[-1] // SEGMENT_SIZE * SEGMENT_SIZE:020d}"
    patch(path, known[-30] % SEGMENT_SIZE, bytes(known[-28] - known[-30]))
    shutil.rmtree(config.store.data / "consumequeue")
    for _ in range(2):
        came_to = reopen(config, unclean=True)
        assert came_to.recovered.dropped_entries == 0
        frontier = read_frontier(Disk(), config.store.data / "frontier")
        assert frontier is not None
        assert any(gap.begin <= known[-30] and known[-28] <= gap.end for gap in frontier.uncovered)
    with open_query(config.store.data) as data:
        assert not data.coverage().complete
        frames = naive_frames(tmp_path / "store" / "commitlog", SEGMENT_SIZE)
        last = [frame for frame in frames if frame.sys_flag & 0xC in (0x0, 0x8)][-1]
        hits = data.by_queue(last.topic, last.queue_id, last.cq_offset).hits
        assert [hit.unit.phy_offset for hit in hits][:1] == [last.phy_offset]
