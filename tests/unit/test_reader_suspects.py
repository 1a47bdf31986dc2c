"""Messages older than one before them: the clock went back, or a longer log, which was cut there, has left them."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexd.commitlog.batcher import DispatchBatch
from indexd.commitlog.format import Corrupt, NotYetWritten
from indexd.commitlog.reader import LogReader, Skipped
from indexd.commitlog.segments import NOBODY
from indexd.errors import CorruptDataError, DisturbedError
from indexd.recovery.recover import WholeLog
from support.commitlog_writer import CommitLogWriter, FrameSpec
from support.fake_broker import Named
from support.reading import SEGMENT_SIZE, Clock, open_reader, patch
from support.small_log import messages
from support.twins import request_at

BIG = 1 << 20


def write(directory: Path, times: list[int], *, start: int = 0, size: int = SEGMENT_SIZE) -> list[int]:
    """Messages of one size, stored at these times; where they stand."""
    with CommitLogWriter(directory, size, start_offset=start) as writer:
        return [writer.append(FrameSpec("T", b"x" * 50, {"KEYS": f"k{at:09d}"}, store_timestamp=at)) for at in times]


class Read:
    """What a reader returns, the clock being moved whenever something has to settle."""

    def __init__(self, directory: Path, named: Named | None = None, **options: object) -> None:
        self.clock = Clock()
        self.reader = open_reader(directory, self.clock, **options)
        self.reader.log_limit = named or NOBODY
        self.offsets: list[int] = []
        self.unproven_from: int | None = None
        self.waits = 0
        self.end: object = None

    def on(self) -> Read:
        looks = 0
        while looks < 2:
            self.end = self.reader.poll()
            if isinstance(self.end, DispatchBatch):
                self.offsets += self.end.columns.phy_offset[: self.end.rows].tolist()
                self.unproven_from = self.end.unproven_from
                looks = 0
            elif isinstance(self.end, NotYetWritten):
                self.waits += self.reader.is_undecided
                self.clock.now += 0.0625
                looks += 1
            else:
                break
        return self


def cut(directory: Path, *, newer: int = 1) -> tuple[list[int], int]:
    """200 messages, cut at the 106th, and ``newer`` ones written; all offsets, and how many are of the log."""
    offsets = write(directory, list(range(1000, 1200)))
    write(directory, [5000 + number for number in range(newer)], start=offsets[106])
    return offsets, 106 + newer


def test_frames_of_a_removed_longer_log_are_not_taken_when_the_broker_is_asked(tmp_path: Path) -> None:
    offsets, kept = cut(tmp_path)
    named = Named(offsets[kept])
    read = Read(tmp_path, named).on()
    assert (read.offsets, read.unproven_from) == (offsets[:kept], None)
    assert set(named.asked) == {offsets[kept]}
    read.clock.now += 1.0
    assert read.on().reader.position == offsets[kept]
    assert not read.reader.is_undecided
    # It was the broker's last word: silent from now on, it did not make them its own.
    named.offset = None
    assert read.on().offsets == offsets[:kept]
    # What is written over them is read without it.
    write(tmp_path, [6000], start=offsets[kept])
    assert read.on().offsets[: kept + 1] == offsets[: kept + 1]


def test_behind_a_frame_that_was_passed_over_nobody_knows_what_is_of_the_log(tmp_path: Path) -> None:
    """The damaged frame may be the only one that was written after a cut: all behind it may be removed messages."""
    offsets, _ = cut(tmp_path)
    patch(tmp_path / f"{0:020d}", offsets[106] + 4, b"\0\0\0\1")
    read = Read(tmp_path, skip_corrupt=True, corrupt_after=0.05).on().on()
    assert (read.offsets, read.unproven_from) == (offsets[:106] + offsets[107:], offsets[107])
    write(tmp_path, [9000], start=offsets[-1] + offsets[1])
    assert read.on().unproven_from == offsets[107]  # a newer message behind them proves nothing
    read.reader.log_limit = Named(read.reader.position)
    assert (read.on().unproven_from, read.reader.newest_timestamp) == (None, 9000)


def test_a_frame_that_was_passed_over_may_be_the_first_of_its_segment(tmp_path: Path) -> None:
    offsets = write(tmp_path, list(range(1000, 1000 + SEGMENT_SIZE // 100)))
    base = offsets[-1] // SEGMENT_SIZE * SEGMENT_SIZE
    patch(tmp_path / f"{base:020d}", 4, b"\0\0\0\1")
    read = Read(tmp_path, skip_corrupt=True, corrupt_after=0.05).on().on()
    assert read.unproven_from == next(offset for offset in offsets if offset > base)


def test_what_the_broker_names_behind_a_frame_that_was_passed_over_is_no_suspect(tmp_path: Path) -> None:
    offsets = write(tmp_path, list(range(1000, 1100)))
    patch(tmp_path / f"{0:020d}", offsets[50] + 4, b"\0\0\0\1")
    read = Read(tmp_path, Named(2 * offsets[-1] - offsets[-2]), skip_corrupt=True, corrupt_after=0.05).on().on()
    assert (read.offsets, read.unproven_from) == (offsets[:50] + offsets[51:], None)


@pytest.mark.parametrize(
    ("times", "unproven"),
    [
        ([1000, 1000, *range(1000, 1100)], None),
        ([*range(5000, 5050), *range(4000, 4050)], 50),
        # A message that is not older proves all before it, and so does another segment.
        ([*range(5000, 5050), *range(4000, 4050), 5049, *range(4050, 4060)], 101),
        ([*range(5000, 5050), *range(4000, 4050), 5050], None),
        ([*range(5000, 5050), *range(4000, 4900)], None),
    ],
)
def test_what_nobody_can_prove(tmp_path: Path, times: list[int], unproven: int | None) -> None:
    offsets = write(tmp_path, times)
    read = Read(tmp_path).on()
    assert (read.offsets, read.unproven_from) == (offsets, None if unproven is None else offsets[unproven])
    if times == sorted(times):  # nobody is asked then
        assert Read(tmp_path, named := Named(0)).on().offsets == offsets
        assert not named.asked


def test_a_clock_that_went_back_and_a_broker_that_knows_some_of_these_messages_and_then_all(tmp_path: Path) -> None:
    offsets = write(tmp_path, [*range(5000, 5100), *range(1000, 1100)])
    named = Named(offsets[130])
    read = Read(tmp_path, named).on()
    assert (read.offsets, read.unproven_from) == (offsets[:130], None)
    named.offset = BIG
    assert (read.on().offsets, read.unproven_from) == (offsets, None)
    named.asked.clear()
    assert Read(tmp_path, named).on().offsets == offsets
    assert len(named.asked) <= 3


@pytest.mark.parametrize("knows", [True, False])
def test_a_broker_that_answers_later(tmp_path: Path, knows: bool) -> None:
    offsets, kept = cut(tmp_path)
    read = Read(tmp_path, named := Named()).on()
    assert (read.offsets[:kept], read.unproven_from) == (offsets[:kept], offsets[kept])
    named.offset = read.reader.position if knows else offsets[kept]
    if knows:
        assert read.on().unproven_from is None
    else:
        with pytest.raises(DisturbedError, match=str(offsets[kept])):
            read.on()


@pytest.mark.parametrize("step", [lambda n: -n, lambda n: -1000 * n, lambda n: n % 2, lambda n: 1000 * (n % 2)])
def test_times_that_fall_cost_no_settle_time_for_each_message(tmp_path: Path, step: Callable[[int], int]) -> None:
    """600 messages, each older than the one before, or rising and falling in turn."""
    offsets = write(tmp_path, [10**6 + step(number) for number in range(600)], size=BIG)
    read = Read(tmp_path, segment_size=BIG).on()
    assert read.offsets == offsets
    assert read.reader.counters.settled <= 12


def test_a_writer_at_work_does_not_hold_up_what_stands_there(tmp_path: Path) -> None:
    """The stretch that settles is that of the first look, however much is written behind it."""
    with CommitLogWriter(tmp_path, BIG) as writer:
        reader = open_reader(tmp_path, clock := Clock(), segment_size=BIG)
        number, read = 10**6, 0
        for _ in range(100):
            number -= 1
            writer.append(FrameSpec("T", b"x", {}, store_timestamp=number))
            found = reader.poll()
            read += found.rows if isinstance(found, DispatchBatch) else 0
            clock.now += 0.015625
        assert read > 90


# --- what the broker does not know ---


def look(reader: LogReader, clock: Clock) -> list[Any]:
    """What stands at the end, looked at until bytes that are none would be corrupt: each thing once."""
    found: list[Any] = []
    for _ in range(5):
        found.append(reader.poll())
        clock.now += 5.0
    return [item for number, item in enumerate(found) if item not in found[:number]]


def torn(directory: Path, kind: str) -> int:
    """30 messages; where the log of 20 ends that a broker's crash has left of them."""
    offsets = write(directory, list(range(1000, 1030)))
    path, at = directory / f"{0:020d}", offsets[20]
    size = offsets[21] - at
    damage = {"magic": (at + 4, bytes(4)), "half a frame": (at + 60, bytes(SEGMENT_SIZE - at - 60)),
              "a frame of zeros": (at, bytes(size)), "garbage": (at, b"\x7f" * 200)}[kind]  # fmt: skip
    patch(path, *damage)
    return at


TORN = ["magic", "half a frame", "a frame of zeros", "garbage"]


@pytest.mark.parametrize("kind", TORN)
@pytest.mark.parametrize("policy", [False, True])
def test_bytes_that_the_broker_does_not_know_are_the_end(tmp_path: Path, kind: str, policy: bool) -> None:
    end = torn(tmp_path, kind)
    clock = Clock()
    reader = open_reader(tmp_path, clock, position=end, skip_corrupt=policy)
    reader.log_limit = named = Named(end)
    nothing, told = look(reader, clock)
    head = (tmp_path / f"{0:020d}").read_bytes()[end : end + 76]
    assert (nothing, told.rows, told.end_offset, told.stale_head) == (NotYetWritten(end), 0, end, head)
    assert not reader.is_undecided
    # It said so once, and what stands there did not change since.
    named.offset = None
    assert look(reader, clock) == [NotYetWritten(end)]
    again = open_reader(tmp_path, clock, position=end, skip_corrupt=policy)
    again.deny(head)
    assert look(again, clock) == [NotYetWritten(end)]
    write(tmp_path, [6000], start=end)
    assert any(getattr(item, "newest_timestamp", 0) == 6000 for item in look(again, clock))


def test_bytes_that_the_broker_has_written_are_damage(tmp_path: Path) -> None:
    end = torn(tmp_path, "garbage")
    clock = Clock()
    reader = open_reader(tmp_path, clock, position=end)
    for offset in (BIG, None):
        reader.log_limit = Named(offset)
        assert any(isinstance(item, Corrupt) for item in look(reader, clock))


def test_an_answer_from_before_the_bytes_stood_there_settles_nothing(tmp_path: Path) -> None:
    offsets, kept = cut(tmp_path)
    named = Named(offsets[kept])
    named.is_fresh = False
    read = Read(tmp_path, named).on()
    assert read.offsets == offsets[:kept]
    for is_fresh in (False, True):
        read.clock.now += 1.0
        named.is_fresh = is_fresh
        assert read.reader.poll() == NotYetWritten(offsets[kept])
        assert read.reader.is_undecided
    read.clock.now += 1.0
    assert read.reader.poll().stale_head is not None
    assert not read.reader.is_undecided


def test_what_was_seen_and_is_gone_is_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros for a moment between the look along the heads and the reading of the frames."""
    offsets = write(tmp_path, list(range(1000, 1030)))
    reader = open_reader(tmp_path, time.monotonic, settle=0.001, corrupt_after=0.001)
    fill, calls = reader._cursor.fill, []

    def fill_once_with_zeros(offset: int, size: int) -> int:
        count = fill(offset, size)
        calls.append(offset)
        reader._cursor.buffer[:count] *= len(calls) != 2
        return count

    monkeypatch.setattr(reader._cursor, "fill", fill_once_with_zeros)
    assert sum(item.rows for item in WholeLog(reader) if isinstance(item, DispatchBatch)) == len(offsets)


# --- behind damage ---


def issue_log(directory: Path) -> list[int]:
    """3,500 messages, one stored an hour ahead of the others, and 20 behind it one without its magic."""
    times = [10**6 + 10 * number for number in range(3500)]
    times[3285] += 3_600_000
    offsets = write(directory, times, size=BIG)
    patch(directory / f"{0:020d}", offsets[3305] + 4, b"\xff\xff\xff\xff")
    return offsets


def whole(directory: Path, *, skip_corrupt: bool, size: int = SEGMENT_SIZE) -> tuple[LogReader, WholeLog, list[int]]:
    reader = open_reader(
        directory, time.monotonic, segment_size=size, settle=0.001, corrupt_after=0.001, skip_corrupt=skip_corrupt
    )
    log, offsets = WholeLog(reader), []
    for item in log:
        if isinstance(item, DispatchBatch):
            offsets += item.columns.phy_offset[: item.rows].tolist()
    return reader, log, offsets


def test_intact_frames_behind_damage_that_are_older_than_one_before_it_are_not_the_end(tmp_path: Path) -> None:
    offsets = issue_log(tmp_path)
    with pytest.raises(CorruptDataError, match=str(offsets[3305])):
        whole(tmp_path, skip_corrupt=False, size=BIG)
    reader, log, found = whole(tmp_path, skip_corrupt=True, size=BIG)
    assert found == offsets[:3305] + offsets[3306:]
    assert log.unreadable is None
    assert reader.unproven_from == offsets[3286]


@pytest.mark.parametrize("damage", [(4, b"\xff" * 4), (0, b"\xff" * 4), (28, b"\xff" * 8), (100, b"\xff")])
def test_a_damaged_frame_where_the_clock_went_back_is_not_the_end(tmp_path: Path, damage: tuple[int, bytes]) -> None:
    offsets = write(tmp_path, [*range(5000, 5100), *range(1000, 1100)])
    at, data = damage
    patch(tmp_path / f"{0:020d}", offsets[100] + at, data)
    with pytest.raises(CorruptDataError, match=str(offsets[100])):
        whole(tmp_path, skip_corrupt=False)
    _, log, found = whole(tmp_path, skip_corrupt=True)
    assert found == offsets[:100] + offsets[101:]
    assert log.unreadable is None


def test_a_daemon_passes_over_damage_to_older_frames_too(tmp_path: Path) -> None:
    offsets = issue_log(tmp_path)
    read = Read(tmp_path, segment_size=BIG, skip_corrupt=True, corrupt_after=0.0, rows_max=4000).on()
    assert isinstance(read.end, Skipped)
    assert read.on().offsets == offsets[:3305] + offsets[3306:]


def test_a_later_segment_whose_begin_is_blanked_still_ends_the_one_before(tmp_path: Path) -> None:
    """Who reads once looks through all of it: what stands there is the log's, and no end of it."""
    size = 1 << 12
    offsets = write(tmp_path, list(range(1000, 1100)), size=size)
    base = next(offset for offset in offsets if offset >= size) // size * size
    path = tmp_path / f"{base:020d}"
    kept = [offset for offset in offsets if base <= offset < base + size][3]
    patch(path, 0, bytes(kept - base))
    for later in [other for other in tmp_path.iterdir() if int(other.name) > base]:
        later.unlink()
    read = Read(tmp_path, take_older=True, segment_size=size, corrupt_after=0.05)
    ends = [read.on().end for _ in range(5)]
    assert (type(ends[-1]), read.reader.position) == (Corrupt, base)


# --- a broker that says how far its log goes: stale frames behind that are never believed ---


class Bounding(Named):
    """A broker whose word bounds all that is believed; ``newer`` is what it names when it is asked."""

    bounds = True

    newer: int | None = None

    def ask(self, position: int, head: bytes = b"") -> int | None:
        assert any(head)
        self.offset = self.newer
        return super().ask(position, head)


def appended(writer: CommitLogWriter, seed: int, count: int) -> list[int]:
    """Where each of so many more messages ends."""
    ends = []
    for spec in islice(messages(seed), count):
        writer.append(spec)
        ends.append(writer.max_offset)
    return ends


def write_small(store: Path, count: int) -> list[int]:
    """Messages, and where each ends."""
    with CommitLogWriter(store, SEGMENT_SIZE) as writer:
        return appended(writer, 3, count)


def read(reader: LogReader) -> list[int]:
    """Where the messages end that can be read now, the clock standing still."""
    ends = []
    while isinstance(found := reader.poll(), DispatchBatch):
        rows = [request_at(found, row) for row in range(found.rows)]
        ends += [row.commit_log_offset + row.msg_size for row in rows]
    assert isinstance(found, NotYetWritten)
    return ends


def bounded(directory: Path, offset: int | None, **options: Any) -> tuple[LogReader, Bounding]:
    reader, limit = open_reader(directory, **options), Bounding(offset)
    reader.log_limit, limit.newer = limit, offset
    return reader, limit


def test_nothing_behind_the_limit_is_read_and_what_was_named_need_not_settle(tmp_path: Path) -> None:
    ends = write_small(tmp_path, 50)
    reader, limit = bounded(tmp_path, ends[19])
    assert read(reader) == ends[:20]
    assert reader.position == ends[19]
    # Something stands there, so the broker is asked, and says the same.
    assert set(limit.asked) == {ends[19]}
    limit.newer = ends[-1]
    assert read(reader) == ends[20:]
    # A quiet log asks nothing.
    limit.asked.clear()
    assert [reader.poll() for _ in range(5)] == [NotYetWritten(ends[-1])] * 5
    assert limit.asked == []


def test_while_no_offset_was_named_the_bytes_decide(tmp_path: Path) -> None:
    ends = write_small(tmp_path, 20)
    reader, limit = bounded(tmp_path, None)
    assert read(reader) == ends[:-1]
    assert limit.asked[0] == 0
    limit.newer = ends[9]  # it answers at last: its log was cut before what was read
    assert read(reader) == []
    assert reader.position == ends[-2]


@pytest.mark.parametrize("is_behind", [False, True], ids=["before the blank record", "behind it"])
def test_a_limit_at_the_end_of_a_segment(tmp_path: Path, is_behind: bool) -> None:
    ends = [end for end in write_small(tmp_path, 1500) if end <= SEGMENT_SIZE]
    reader, limit = bounded(tmp_path, SEGMENT_SIZE if is_behind else ends[-1])
    assert read(reader) == ends
    assert reader.position <= (limit.offset or 0)


def test_stale_frames_behind_a_cut_are_read_once_they_are_written_anew(tmp_path: Path) -> None:
    ends = write_small(tmp_path / "old", 60)
    old = (tmp_path / "old" / f"{0:020d}").read_bytes()
    with CommitLogWriter(tmp_path / "new", SEGMENT_SIZE) as writer:
        assert appended(writer, 3, 20) == ends[:20]
        segment = tmp_path / "new" / f"{0:020d}"
        patch(segment, ends[19], old[ends[19] :])  # as it stands after a cut: nothing is wiped
        clock = Clock()
        reader, limit = bounded(tmp_path / "new", ends[19], clock=clock)
        assert read(open_reader(tmp_path / "new", clock))[-1] == ends[58]  # so they look
        for _ in range(5):
            clock.now += 10
            assert read(reader)[-1:] in ([], [ends[19]])
        assert reader.position == ends[19]
        fresh = appended(writer, 4, 5)
        limit.newer = writer.max_offset
        assert read(reader) == fresh


def test_skipping_goes_no_further_than_the_limit(tmp_path: Path) -> None:
    ends = write_small(tmp_path, 40)
    patch(tmp_path / f"{0:020d}", ends[9] + 4, b"\xff" * 4)
    reader, limit = bounded(tmp_path, ends[10], skip_corrupt=True, corrupt_after=0.0)
    reader.poll()
    assert reader.position == ends[9]
    corrupt = reader.poll()
    assert (type(corrupt), reader.position) == (Corrupt, ends[9])
    limit.offset = limit.newer = ends[-1]
    assert reader.poll() == Skipped(ends[9], ends[10], corrupt.reason)
    assert read(reader) == ends[11:]


@pytest.fixture(scope="module")
def named_log(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """A log of several segments, and where its messages end."""
    store = tmp_path_factory.mktemp("log")
    return store, write_small(store, 800)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 799), min_size=1, max_size=8), st.sampled_from([1 << 16, 1 << 17, 4 << 20]))
def test_whatever_is_named_all_of_it_is_read_and_no_more(
    named_log: tuple[Path, list[int]], steps: list[int], read_size: int
) -> None:
    store, ends = named_log
    reader, limit = bounded(store, 0, read_size=read_size)
    seen: list[int] = []
    for step in sorted(steps):
        limit.newer = ends[step]
        seen += read(reader)
        assert seen == ends[: step + 1]
