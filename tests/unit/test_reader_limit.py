"""A reader whose broker says how far its log goes: stale frames behind that are never believed."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexd.commitlog.batcher import DispatchBatch
from indexd.commitlog.format import Corrupt, NotYetWritten
from indexd.commitlog.reader import LogReader, Skipped
from support.commitlog_writer import CommitLogWriter
from support.reading import SEGMENT_SIZE, Clock, open_reader, patch
from support.small_log import messages
from support.twins import request_at


class Named:
    """A broker that has named an offset; ``newer`` is what it names when it is asked."""

    bounds = True

    def __init__(self, offset: int | None, newer: int | None = None) -> None:
        self.offset = offset
        self.newer = offset if newer is None else newer
        self.asked: list[int] = []

    def ask(self, position: int, head: bytes = b"") -> int | None:
        assert any(head)
        self.asked.append(position)
        self.offset = self.newer
        return self.offset

    def ends_at(self, position: int, head: bytes) -> bool:
        return self.offset == position


def write(store: Path, count: int) -> list[int]:
    """Messages, and where each ends."""
    ends = []
    with CommitLogWriter(store, SEGMENT_SIZE) as writer:
        for spec in islice(messages(3), count):
            writer.append(spec)
            ends.append(writer.max_offset)
    return ends


def read(reader: LogReader) -> list[int]:
    """Where the messages end that can be read now, the clock standing still."""
    ends = []
    while isinstance(found := reader.poll(), DispatchBatch):
        rows = [request_at(found, row) for row in range(found.rows)]
        ends += [row.commit_log_offset + row.msg_size for row in rows]
    assert isinstance(found, NotYetWritten)
    return ends


def test_nothing_behind_the_limit_is_read(tmp_path: Path) -> None:
    ends = write(tmp_path, 50)
    reader = open_reader(tmp_path)
    reader.log_limit = limit = Named(ends[19])
    assert read(reader) == ends[:20]
    assert reader.position == ends[19]
    # Something stands there, so the broker is asked, and says the same.
    assert set(limit.asked) == {ends[19]}
    limit.newer = ends[34]
    assert read(reader) == ends[20:35]
    reader.close()


def test_what_the_broker_has_named_need_not_settle(tmp_path: Path) -> None:
    ends = write(tmp_path, 20)
    reader = open_reader(tmp_path)
    assert read(reader) == ends[:-1]  # the newest stands for a while before it is believed
    reader.log_limit = Named(ends[-1])
    assert read(reader) == ends[-1:]
    reader.close()


def test_a_quiet_log_asks_nothing(tmp_path: Path) -> None:
    ends = write(tmp_path, 20)
    reader = open_reader(tmp_path)
    reader.log_limit = limit = Named(ends[-1])
    assert read(reader) == ends
    assert [reader.poll() for _ in range(5)] == [NotYetWritten(ends[-1])] * 5
    assert limit.asked == []
    reader.close()


def test_while_no_offset_was_named_the_bytes_decide(tmp_path: Path) -> None:
    ends = write(tmp_path, 20)
    reader = open_reader(tmp_path)
    reader.log_limit = limit = Named(None)
    assert read(reader) == ends[:-1]
    assert limit.asked[0] == 0
    limit.newer = ends[9]  # it answers at last: its log was cut before what was read
    assert read(reader) == []
    assert reader.position == ends[-2]
    reader.close()


def test_a_limit_in_a_segment_that_others_follow(tmp_path: Path) -> None:
    ends = write(tmp_path, 1500)
    assert ends[-1] > 3 * SEGMENT_SIZE
    cut = next(end for end in ends if end > SEGMENT_SIZE + 1000)
    reader = open_reader(tmp_path)
    reader.log_limit = limit = Named(cut)
    assert read(reader) == [end for end in ends if end <= cut]
    limit.newer = ends[-1]
    assert read(reader) == [end for end in ends if end > cut]
    reader.close()


def test_a_limit_at_the_end_of_a_segment(tmp_path: Path) -> None:
    ends = write(tmp_path, 1500)
    last = max(end for end in ends if end <= SEGMENT_SIZE)
    for offset in (last, SEGMENT_SIZE):  # before the blank record, and behind it
        reader = open_reader(tmp_path)
        reader.log_limit = Named(offset)
        assert read(reader) == [end for end in ends if end <= SEGMENT_SIZE]
        assert reader.position <= offset
        reader.close()


def test_stale_frames_behind_a_cut_are_read_once_they_are_written_anew(tmp_path: Path) -> None:
    ends = write(tmp_path / "old", 60)
    old = (tmp_path / "old" / f"{0:020d}").read_bytes()
    with CommitLogWriter(tmp_path / "new", SEGMENT_SIZE) as writer:
        for spec in islice(messages(3), 20):
            writer.append(spec)
        assert writer.max_offset == ends[19]
        segment = tmp_path / "new" / f"{0:020d}"
        patch(segment, ends[19], old[ends[19] :])  # as it stands after a cut: nothing is wiped
        clock = Clock()
        believing, reader = open_reader(tmp_path / "new", clock), open_reader(tmp_path / "new", clock)
        reader.log_limit = limit = Named(ends[19])
        assert read(believing)[-1] == ends[58]  # so they look
        for _ in range(5):
            clock.now += 10
            assert read(reader)[-1:] in ([], [ends[19]])
        assert reader.position == ends[19]
        fresh = []
        for spec in islice(messages(4), 5):
            writer.append(spec)
            fresh.append(writer.max_offset)
        limit.newer = writer.max_offset
        assert read(reader) == fresh
        believing.close()
        reader.close()


def test_skipping_goes_no_further_than_the_limit(tmp_path: Path) -> None:
    ends = write(tmp_path, 40)
    patch(tmp_path / f"{0:020d}", ends[9] + 4, b"\xff" * 4)
    clock = Clock()
    reader = open_reader(tmp_path, clock, skip_corrupt=True, corrupt_after=0.0)
    reader.log_limit = limit = Named(ends[10])
    assert isinstance(reader.poll(), DispatchBatch)
    assert reader.position == ends[9]
    corrupt = reader.poll()
    assert isinstance(corrupt, Corrupt)
    assert corrupt.offset == ends[9]
    limit.offset = limit.newer = ends[-1]
    assert reader.poll() == Skipped(ends[9], ends[10], corrupt.reason)
    assert read(reader) == ends[11:]
    reader.close()


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """A log of several segments, and where its messages end."""
    store = tmp_path_factory.mktemp("log")
    return store, write(store, 800)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 799), min_size=1, max_size=8), st.sampled_from([1 << 16, 1 << 17, 4 << 20]))
def test_whatever_is_named_all_of_it_is_read_and_no_more(
    log: tuple[Path, list[int]], steps: list[int], read_size: int
) -> None:
    store, ends = log
    reader = open_reader(store, read_size=read_size)
    reader.log_limit = limit = Named(0)
    seen: list[int] = []
    for step in sorted(steps):
        limit.newer = ends[step]
        seen += read(reader)
        assert seen == ends[: step + 1]
    reader.close()
