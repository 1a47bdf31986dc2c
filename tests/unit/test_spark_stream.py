"""The stream's offsets, as Spark asks for them: nothing lost, nothing twice, and a log that changes is an error."""

from __future__ import annotations

import tempfile
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.streaming.datasource import ReadMaxBytes

from indexd.errors import CorruptDataError, DisturbedError, UsageError
from support.commitlog_writer import CommitLogWriter, blank_record
from support.rows import rows_of_log
from support.small_log import SEGMENT_SIZE, messages, write_log
from support.spark_source import ALL, kept, rows_between, run, stream
from support.strategies import Sample, logs


def offsets_of(store: Path) -> list[int]:
    return [row["phyOffset"] for row in rows_of_log(store / "commitlog")]


@settings(max_examples=20)
@given(st.data(), logs(max_size=25), st.booleans())
def test_any_log_by_any_limits_and_restarts(data: st.DataObject, samples: list[Sample], prop_crc: bool) -> None:
    with tempfile.TemporaryDirectory() as directory:
        store = Path(directory)
        writer = CommitLogWriter(store / "commitlog", 1 << 15, prop_crc=prop_crc)
        reader, rows, at = stream(store), [], 0
        start = reader.initialOffset()
        while at < len(samples):
            step = data.draw(st.integers(1, len(samples)))
            for sample in samples[at : at + step]:
                sample.append(writer)
            at += step
            limit = data.draw(st.sampled_from([ALL, ReadMaxBytes(1), ReadMaxBytes(500), ReadMaxBytes(1 << 20)]))
            if data.draw(st.booleans()):
                reader = stream(store, splitSize=data.draw(st.sampled_from([300, 1 << 20])))
            start, found = run(reader, kept(start), limit)
            rows += found
        writer.close(clean=data.draw(st.booleans()))
        assert rows == offsets_of(store)


def test_a_log_that_grows_over_segments(tmp_path: Path) -> None:
    endless = messages(5)
    with CommitLogWriter(tmp_path / "commitlog", SEGMENT_SIZE) as writer:
        reader, rows = stream(tmp_path), []
        start = reader.initialOffset()
        assert start == {"offset": 0}
        for count in (0, 1, 300, 2000, 0, 5000):
            for spec in islice(endless, count):
                writer.append(spec)
            reported = reader.reportLatestOffset()
            start, found = run(reader, start, ReadMaxBytes(100_000))
            rows += found
            assert start["offset"] == writer.max_offset
            assert reported == {"offset": writer.max_offset}
            assert reader.reportLatestOffset() == reported
        assert rows == offsets_of(tmp_path)


def test_a_batch_is_the_same_when_it_is_asked_for_again(tmp_path: Path) -> None:
    write_log(tmp_path, 2000)
    first = stream(tmp_path)
    start = first.initialOffset()
    middle = first.latestOffset(start, ReadMaxBytes(SEGMENT_SIZE + 5000))
    end = first.latestOffset(middle, ReadMaxBytes(50_000))
    write_log(tmp_path, 3000)
    again = stream(tmp_path, splitSize=10_000, maxBytesPerTrigger="1KiB")
    assert rows_between(again, start, middle) + rows_between(again, middle, end) == [
        offset for offset in offsets_of(tmp_path) if offset < end["offset"]
    ]
    assert rows_between(again, end, end) == []


def test_available_now_ends_where_the_log_ended(tmp_path: Path) -> None:
    end = write_log(tmp_path, 1000)
    reader = stream(tmp_path)
    reader.prepareForTriggerAvailableNow()
    write_log(tmp_path, 2000)
    stood, rows = run(reader, reader.initialOffset(), ReadMaxBytes(30_000))
    assert stood["offset"] == end
    assert rows == [offset for offset in offsets_of(tmp_path) if offset < end]
    # A query whose checkpoint is behind that has nothing to do.
    behind = stream(tmp_path).latestOffset({"offset": 0}, ALL)
    assert reader.latestOffset(behind, ALL) == behind


def test_where_a_query_begins(tmp_path: Path) -> None:
    end = write_log(tmp_path, 2000)
    offsets = offsets_of(tmp_path)
    assert stream(tmp_path).initialOffset() == {"offset": 0}
    assert stream(tmp_path, startingOffset="latest").initialOffset()["offset"] == end
    assert stream(tmp_path, startingOffset=offsets[70]).initialOffset() == {"offset": offsets[70]}
    assert stream(tmp_path, startingOffset=offsets[70] + 1).initialOffset() == {"offset": offsets[71]}
    assert stream(tmp_path, startingOffset=end).initialOffset() == {"offset": end}
    with pytest.raises(UsageError, match=f"startingOffset is {end + 1}, and the log ends at {end}"):
        stream(tmp_path, startingOffset=end + 1).initialOffset()
    with pytest.raises(UsageError, match="startOffset is no option of a stream"):
        stream(tmp_path, startOffset=1)
    rows = rows_of_log(tmp_path / "commitlog")
    late = rows[1900]["storeTimestamp"]
    # The clock was set back once: before that, messages are of that time, too.
    assert stream(tmp_path, startTime=late).initialOffset() == {"offset": 0}
    of_that_time = [row["phyOffset"] for row in rows if row["storeTimestamp"] >= late]
    assert run(stream(tmp_path, startTime=late), {"offset": 0})[1] == of_that_time != offsets[1900:]


# --- a log that changes behind the query's back ---


def test_what_expired_before_it_was_read(tmp_path: Path) -> None:
    write_log(tmp_path, 4000)
    reader = stream(tmp_path)
    start = reader.latestOffset(reader.initialOffset(), ReadMaxBytes(1000))
    (tmp_path / "commitlog" / f"{0:020d}").unlink()
    remaining = offsets_of(tmp_path)
    with pytest.raises(
        DisturbedError, match=f"expired before they were read: the log begins at {SEGMENT_SIZE}"
    ) as error:
        reader.latestOffset(start, ALL)
    assert "onExpired=skip" in error.value.__notes__[0]
    skipping = stream(tmp_path, onExpired="skip")
    end, rows = run(skipping, start)
    assert rows == remaining
    # What was planned before, too; and a query that has read all of it does not mind.
    assert rows_between(skipping, start, end) == remaining
    assert rows_between(skipping, start, {"offset": remaining[0]}) == []
    (tmp_path / "commitlog" / f"{SEGMENT_SIZE:020d}").unlink()
    assert stream(tmp_path).latestOffset(end, ALL) == end


def zero_from(store: Path, offset: int) -> None:
    base = offset - offset % SEGMENT_SIZE
    with (store / "commitlog" / f"{base:020d}").open("r+b") as file:
        file.seek(offset - base)
        file.write(bytes(SEGMENT_SIZE - (offset - base)))


@pytest.mark.parametrize("by", ["zeros", "other messages", "segments"])
def test_a_log_that_was_cut_ends_the_query(tmp_path: Path, by: str) -> None:
    write_log(tmp_path, 4000)
    offsets = offsets_of(tmp_path)
    end, _ = run(stream(tmp_path), {"offset": 0})
    cut = next(offset for offset in offsets if offset > SEGMENT_SIZE + 5000)
    if by == "segments":
        for path in sorted((tmp_path / "commitlog").iterdir())[1:]:
            path.unlink()
    else:
        for path in sorted((tmp_path / "commitlog").iterdir())[2:]:
            path.unlink()
        zero_from(tmp_path, cut)
        if by == "other messages":
            write_log(tmp_path, 4000, seed=2, start_offset=cut)
    for reader in (stream(tmp_path), stream(tmp_path, onExpired="skip", corrupt="skip")):
        with pytest.raises(DisturbedError, match=r"the log was cut.* before") as error:
            reader.latestOffset(kept(end), ALL)
        assert "new checkpointLocation" in error.value.__notes__[0]
        with pytest.raises(DisturbedError):
            reader.partitions({"offset": 0}, kept(end))
    assert stream(tmp_path).reportLatestOffset() is not None


def test_a_segment_that_is_over_before_the_next_one_begins(tmp_path: Path) -> None:
    end = write_log(tmp_path, 100)
    with (tmp_path / "commitlog" / f"{0:020d}").open("r+b") as file:
        file.seek(end)
        file.write(blank_record(SEGMENT_SIZE - end))
    reader = stream(tmp_path)
    before = reader.latestOffset({"offset": 0}, ReadMaxBytes(end))
    assert before["offset"] == end
    behind = reader.latestOffset(before, ALL)
    assert behind["offset"] == end, "a blank record counts once the next segment is in use"
    assert rows_between(reader, before, behind) == []
    assert rows_between(reader, {"offset": 0}, behind) == offsets_of(tmp_path)
    write_log(tmp_path, 300, start_offset=SEGMENT_SIZE)
    assert run(reader, behind)[1] == [offset for offset in offsets_of(tmp_path) if offset >= SEGMENT_SIZE]
    assert run(stream(tmp_path), before)[1] == [offset for offset in offsets_of(tmp_path) if offset >= SEGMENT_SIZE]


def test_corrupt_bytes_end_the_query_where_they_stand(tmp_path: Path) -> None:
    write_log(tmp_path, 1000)
    offsets = offsets_of(tmp_path)
    with (tmp_path / "commitlog" / f"{0:020d}").open("r+b") as file:
        file.seek(offsets[400] + 4)
        file.write(b"\xff")
    reader = stream(tmp_path)
    end = reader.latestOffset({"offset": 0}, ReadMaxBytes(offsets[500]))
    assert end["offset"] == offsets[400]
    assert rows_between(reader, {"offset": 0}, end) == offsets[:400]
    with pytest.raises(CorruptDataError, match=f"corrupt at offset {offsets[400]}") as error:
        reader.latestOffset(end, ReadMaxBytes(1000))
    assert "corrupt=skip" in error.value.__notes__[0]
    assert run(stream(tmp_path, corrupt="skip"), end)[1] == offsets[401:]


def test_the_end_of_the_log_is_reported(tmp_path: Path) -> None:
    end = write_log(tmp_path, 1)
    assert stream(tmp_path).reportLatestOffset() == {"offset": end}
