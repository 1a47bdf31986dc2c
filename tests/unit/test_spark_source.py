"""A DataFrame of the log: the splits that are planned, and rows that are the same whatever is pruned."""

from __future__ import annotations

import json
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark import cloudpickle
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes
from pyspark.sql.types import ArrayType, IntegerType, LongType, MapType, StringType, StructField, StructType

from indexd.errors import (
    CorruptDataError,
    DisturbedError,
    MissingStoreError,
    UnsafeStoreError,
    UsageError,
)
from indexd.spark.source.datasource import CommitLogSource, CommitLogStreamReader, parse_options
from indexd.spark.splits import plan_splits
from indexd.spark.stats.report import Selection, count_split
from indexd.storage.disk import Disk
from support.beside_log import DAMAGED_SEGMENT_SIZE, DAMAGES, damaged_log, rows_of_whole_log
from support.commitlog_writer import CommitLogWriter, blank_record
from support.data_directory import T0, spec
from support.queue_store import QueueStore
from support.rows import plain, rows_of_log
from support.small_log import SEGMENT_SIZE, write_log
from support.strategies import Sample, logs

ALL = ReadAllAvailable()
_dumps: Callable[[object], bytes] = cloudpickle.dumps  # it has no types


def source(store: Path, **options: Any) -> CommitLogSource:
    return CommitLogSource({"path": str(store), "settlems": "1"} | {name: str(text) for name, text in options.items()})


def reader(store: Path, **options: Any) -> DataSourceReader:
    made = source(store, **options)
    return made.reader(made.schema())


def read(reader: DataSourceReader) -> list[dict[str, Any]]:
    """Every row, as Spark would read it: the reader is pickled for each task."""
    found: list[dict[str, Any]] = []
    for partition in reader.partitions() or [InputPartition(None)]:
        copy = pickle.loads(_dumps(reader))
        for batch in copy.read(pickle.loads(_dumps(partition))):
            found += [plain(row) for row in batch.to_pylist()]
    return found


def stream(store: Path, **options: Any) -> CommitLogStreamReader:
    given = {"path": str(store), "settlems": "1", "columns": "phyOffset"}
    made_of = CommitLogSource(given | {name: str(text) for name, text in options.items()})
    made = made_of.streamReader(made_of.schema())
    assert isinstance(made, CommitLogStreamReader)
    return made


def rows_between(reader: CommitLogStreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[int]:
    found: list[int] = []
    for partition in reader.partitions(start, end):
        for batch in reader.read(partition):
            found += batch["phyOffset"].to_pylist()
    return found


def run(
    reader: CommitLogStreamReader, start: dict[str, Any], limit: ReadLimit = ALL
) -> tuple[dict[str, Any], list[int]]:
    """Batches until there is no more: where it stands then, and the rows."""
    rows: list[int] = []
    while (end := reader.latestOffset(start, limit)) != start:
        end = json.loads(json.dumps(end))  # as out of the checkpoint
        assert end["offset"] > start["offset"]
        found = rows_between(reader, start, end)
        if isinstance(limit, ReadMaxBytes) and len(found) > 1:
            assert found[-1] - found[0] < limit.max_bytes
        rows += found
        start = end
    return end, rows


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source")
    write_log(path, 1200)
    return path


@pytest.fixture(scope="module")
def rows(store: Path) -> list[dict[str, Any]]:
    return rows_of_log(store / "commitlog")


# --- schema ---


def test_a_schema_of_ones_own_chooses_columns_and_allows_nulls(store: Path, rows: list[dict[str, Any]]) -> None:
    wanted = StructType(
        [
            StructField("TAGS", StringType()),
            StructField("phyOffset", LongType()),
            StructField("keys", ArrayType(StringType())),
            StructField("properties", MapType(StringType(), StringType())),
        ]
    )
    found = source(store).reader(wanted)
    schema = to_arrow_schema(wanted, timezone="UTC")
    assert all(batch.schema.equals(schema) for batch in found.read(found.partitions()[0]))
    names = ("phyOffset", "keys", "properties")
    assert read(found) == [{"TAGS": row["tags"], **{name: row[name] for name in names}} for row in rows]
    with pytest.raises(UsageError, match="there is no column 'sise'"):
        source(store).reader(StructType([StructField("sise", IntegerType())]))


# --- what is planned and read ---


def test_an_empty_log(tmp_path: Path) -> None:
    (tmp_path / "commitlog").mkdir()
    assert reader(tmp_path).partitions() == []
    assert read(reader(tmp_path)) == []
    CommitLogWriter(tmp_path / "commitlog", SEGMENT_SIZE).close(clean=False)
    assert read(reader(tmp_path)) == []


@settings(max_examples=30)
@given(st.data())
def test_offsets_topics_and_times(store: Path, rows: list[dict[str, Any]], data: st.DataObject) -> None:
    end = rows[-1]["phyOffset"] + rows[-1]["size"]
    offsets = st.one_of(st.sampled_from([row["phyOffset"] for row in rows]), st.integers(0, end + SEGMENT_SIZE))
    times = st.one_of(st.sampled_from([row["storeTimestamp"] for row in rows]), st.sampled_from([0, 2**62, -(2**62)]))
    chosen = data.draw(
        st.fixed_dictionaries(
            {},
            optional={
                "startOffset": offsets, "endOffset": offsets, "startTime": times, "endTime": times,
                "topics": st.sampled_from(["TopicTest", "订单主题,OrderPaid", "none"]),
                "splitSize": st.sampled_from([30_000, SEGMENT_SIZE // 2, 1 << 30]),
            },
        )
    )  # fmt: skip
    expected = [
        row["phyOffset"]
        for row in rows
        if chosen.get("startOffset", 0) <= row["phyOffset"] < chosen.get("endOffset", 2**62)
        and chosen.get("startTime", -(2**63)) <= row["storeTimestamp"] < chosen.get("endTime", 2**63)
        and ("topics" not in chosen or row["topic"] in chosen["topics"].split(","))
    ]
    assert [row["phyOffset"] for row in read(reader(store, columns="phyOffset", **chosen))] == expected


@settings(max_examples=25)
@given(st.lists(st.integers(T0 - 30, T0 + 30) | st.sampled_from([-5, 0, 1, 2**40]), min_size=1, max_size=80), st.data())
def test_sparse_indexes_say_where_a_time_begins(times: list[int], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as directory:
        store = QueueStore(Path(directory))
        with store.writer as writer:
            for number, time in enumerate(times):
                writer.append(spec(time, size=number * 37 % 400))
        messages = store.messages()
        store.build(upto=data.draw(st.sampled_from([m.phy_offset for m in messages[1:]] or [None])))
        start = data.draw(st.sampled_from([*times, T0 - 100, T0 + 100]))
        found = reader(store.root, data=store.data, startTime=start, columns="phyOffset", topics="T")
        expected = [m.phy_offset for m in messages if m.store_timestamp >= start]
        assert [row["phyOffset"] for row in read(found)] == expected


# --- a log that changes ---


def test_a_plan_ends_where_the_log_ended(tmp_path: Path) -> None:
    end = write_log(tmp_path, 100)
    planned = reader(tmp_path, columns="phyOffset")
    partitions = planned.partitions()
    write_log(tmp_path, 200)
    assert partitions[-1].value.end == end
    assert sum(batch.num_rows for part in partitions for batch in planned.read(part)) == 100
    assert len(read(reader(tmp_path, columns="phyOffset"))) == 200


def test_a_log_that_was_cut_gives_no_rows_and_one_that_ends_in_no_frame_ends_before_it(tmp_path: Path) -> None:
    end = write_log(tmp_path, 100)
    offsets = offsets_of(tmp_path)
    overwrite(tmp_path, end, b"\xff" * 50)
    planned = reader(tmp_path, columns="phyOffset")
    assert len(read(planned)) == 100
    (partition,) = planned.partitions()
    zero_from(tmp_path, offsets[50])
    with pytest.raises(DisturbedError, match=f"and end at {offsets[50]}"):
        list(planned.read(partition))


@pytest.mark.parametrize("damage", DAMAGES)
def test_segments_that_are_wholly_unreadable_are_passed_over_as_by_a_rebuild(
    tmp_path: Path, damage: tuple[str, ...]
) -> None:
    damaged_log(tmp_path, damage)
    expected = rows_of_whole_log(tmp_path)
    assert len(expected) > 900
    for size in (DAMAGED_SEGMENT_SIZE, 20_000):
        found = read(reader(tmp_path, columns="phyOffset", corrupt="skip", splitSize=size))
        assert [row["phyOffset"] for row in found] == expected
        # The same chain is what counts and exports are held against.
        config = parse_options({"path": str(tmp_path), "corrupt": "skip", "settlems": "1"}, is_stream=False).config
        splits = plan_splits(Disk(), config, size=size)
        batches = [batch for split in splits for batch in count_split(config, Selection(), split)]
        counts = [row for batch in batches for row in batch.to_pylist()]
        ends = [json.loads(row["text"])["next"] for row in counts if row["kind"] == "split"]
        assert ends[:-1] == [split.end for split in splits[:-1]]
        assert sum(row["amount"] for row in counts if row["kind"] == "messages") == len(expected)
    with pytest.raises(CorruptDataError) as error:
        read(reader(tmp_path))
    assert error.value.__notes__ == ["give --on-corrupt skip to go on at the next frame that proves itself"]


# --- options ---


def test_options_go_by_any_spelling(store: Path) -> None:
    found = parse_options(
        {
            "PATH": str(store), "Start_Offset": "5", "endoffset": "7", "starttime": "-3", "endTime": "9",
            "splitsize": "1MiB", "TOPICS": "a, b", "corrupt": "SKIP", "read_bytes": "1MiB",
            "verifyCrc": "true",
        },
        is_stream=False,
    )  # fmt: skip
    wanted = {
        "start_offset": 5, "end_offset": 7, "start_time": -3, "end_time": 9, "split_size": 1 << 20,
        "topics": frozenset({"a", "b"}), "starting_offset": "earliest", "on_expired": "fail",
    }  # fmt: skip
    assert {name: getattr(found, name) for name in wanted} == wanted
    config = found.config.reader
    assert (config.on_corrupt, config.read_bytes, config.verify_crc) == ("skip", 1 << 20, True)
    # The segment size is what the log's files say, as nobody else has.
    assert (found.config.store.store, found.config.store.segment_size) == (store, SEGMENT_SIZE)


def test_a_configuration_file_is_read(store: Path, tmp_path: Path) -> None:
    file = tmp_path / "indexd.toml"
    file.write_text(f'[store]\nstore = "{store}"\ndata = "{tmp_path}/data"\n[spark]\nsplit_size = "3MiB"\n')
    found = parse_options({"config": str(file)}, is_stream=False)
    assert (found.config.store.store, found.split_size) == (store, 3 << 20)
    assert found.config.store.data == tmp_path / "data"


@pytest.mark.parametrize(
    ("option", "text", "message"),
    [
        ("startOfset", "1", "there is no option 'startOfset' of rocketmq_commitlog"),
        ("startOffset", "-1", 'startOffset "-1" should be greater than or equal to 0'),
        ("endTime", "yesterday", 'endTime "yesterday" should be a valid integer'),
        ("endTime", str(2**63), "should be less than"),
        ("corrupt", "ignore", "should be 'fail' or 'skip'"),
        ("splitSize", "0", "greater than or equal to 1"),
        ("splitSize", "big", "is not a size"),
        ("columns", "bodi", "there is no column 'bodi'"),
        ("startingOffset", "earliest", "startingOffset is no option of a batch"),
        ("startOffset", "1", "startOffset is no option of a stream"),
        ("segmentSize", "5", "segment_size"),
    ],
)
def test_options_that_are_wrong(store: Path, option: str, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_options({"path": str(store), option: text}, is_stream="stream" in message)


@pytest.mark.parametrize(
    ("option", "text", "hint"),
    [
        ("colums", "x", "did you mean columns?"),
        # What Spark makes of load([a, b]).
        (
            "paths",
            '["/a","/b"]',
            "load each and union them; the directories of one store's log are the option commitLogPaths",
        ),
        ("columns", "bodi", "did you mean body?"),
    ],
)
def test_an_option_of_another_name_is_found_before_anything_is_read(option: str, text: str, hint: str) -> None:
    """And the hint is shown with the traceback."""
    with pytest.raises(UsageError) as error:
        CommitLogSource({option: text}).schema()
    assert (error.value.hint, error.value.__notes__) == (hint, [hint])


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"path": "STORE/nothing"}, MissingStoreError, "there is no commitlog"),
        ({"path": "STORE", "segmentSize": str(2 * SEGMENT_SIZE)}, UnsafeStoreError, "segment_size"),
        ({}, UsageError, "no store is given"),
    ],
)
def test_stores_that_cannot_be_read(store: Path, options: dict[str, str], error: type[Exception], says: str) -> None:
    made = CommitLogSource({name: text.replace("STORE", str(store)) for name, text in options.items()})
    with pytest.raises(error, match=says):
        made.reader(made.schema()).partitions()


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
            start, found = run(reader, start, limit)
            rows += found
        writer.close(clean=data.draw(st.booleans()))
        assert rows == offsets_of(store)


def test_available_now_ends_where_the_log_ended(tmp_path: Path) -> None:
    end = write_log(tmp_path, 1000)
    reader = stream(tmp_path)
    reader.prepareForTriggerAvailableNow()
    grown = write_log(tmp_path, 2000)
    assert reader.reportLatestOffset() == {"offset": grown}
    stood, rows = run(reader, reader.initialOffset(), ReadMaxBytes(30_000))
    assert (stood["offset"], rows) == (end, [offset for offset in offsets_of(tmp_path) if offset < end])
    # A query whose checkpoint is behind that has nothing to do.
    behind = stream(tmp_path).latestOffset({"offset": 0}, ALL)
    assert reader.latestOffset(behind, ALL) == behind


def test_where_a_query_begins(tmp_path: Path) -> None:
    end = write_log(tmp_path, 2000)
    offsets = offsets_of(tmp_path)
    starts = {offsets[70]: offsets[70], offsets[70] + 1: offsets[71], end: end, "earliest": 0, "latest": end}
    for where, begin in starts.items():
        assert stream(tmp_path, startingOffset=where).initialOffset()["offset"] == begin
    with pytest.raises(UsageError, match=f"startingOffset is {end + 1}, and the log ends at {end}"):
        stream(tmp_path, startingOffset=end + 1).initialOffset()
    rows = rows_of_log(tmp_path / "commitlog")
    late = rows[1900]["storeTimestamp"]
    # The clock was set back once: before that, messages are of that time, too.
    assert stream(tmp_path, startTime=late).initialOffset() == {"offset": 0}
    of_that_time = [row["phyOffset"] for row in rows if row["storeTimestamp"] >= late]
    assert run(stream(tmp_path, startTime=late), {"offset": 0})[1] == of_that_time != offsets[1900:]


# --- a log that changes behind the query's back ---


def test_what_expired_before_it_was_read(tmp_path: Path) -> None:
    write_log(tmp_path, 2000)
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
    # What was planned before, too; and a query that has read all of it does not mind.
    assert rows == rows_between(skipping, start, end) == remaining
    (tmp_path / "commitlog" / f"{SEGMENT_SIZE:020d}").unlink()
    assert stream(tmp_path).latestOffset(end, ALL) == end


def overwrite(store: Path, offset: int, data: bytes) -> None:
    base = offset - offset % SEGMENT_SIZE
    with (store / "commitlog" / f"{base:020d}").open("r+b") as file:
        file.seek(offset - base)
        file.write(data)


def zero_from(store: Path, offset: int) -> None:
    overwrite(store, offset, bytes(SEGMENT_SIZE - offset % SEGMENT_SIZE))


@pytest.mark.parametrize("by", ["zeros", "other messages", "segments"])
def test_a_log_that_was_cut_ends_the_query(tmp_path: Path, by: str) -> None:
    write_log(tmp_path, 2500)
    offsets = offsets_of(tmp_path)
    end, _ = run(stream(tmp_path), {"offset": 0})
    cut = next(offset for offset in offsets if offset > SEGMENT_SIZE + 5000)
    for path in sorted((tmp_path / "commitlog").iterdir())[1 if by == "segments" else 2 :]:
        path.unlink()
    if by != "segments":
        zero_from(tmp_path, cut)
    if by == "other messages":
        write_log(tmp_path, 2500, seed=2, start_offset=cut)
    for one in (stream(tmp_path), stream(tmp_path, onExpired="skip", corrupt="skip")):
        with pytest.raises(DisturbedError, match=r"the log was cut.* before") as error:
            one.latestOffset(end, ALL)
        assert "new checkpointLocation" in error.value.__notes__[0]
        with pytest.raises(DisturbedError):
            one.partitions({"offset": 0}, end)
    assert stream(tmp_path).reportLatestOffset() is not None


def test_a_segment_that_is_over_before_the_next_one_begins(tmp_path: Path) -> None:
    end = write_log(tmp_path, 100)
    overwrite(tmp_path, end, blank_record(SEGMENT_SIZE - end))
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
    overwrite(tmp_path, offsets[400] + 4, b"\xff")
    reader = stream(tmp_path)
    end = reader.latestOffset({"offset": 0}, ReadMaxBytes(offsets[500]))
    assert end["offset"] == offsets[400]
    assert rows_between(reader, {"offset": 0}, end) == offsets[:400]
    with pytest.raises(CorruptDataError, match=f"corrupt at offset {offsets[400]}") as error:
        reader.latestOffset(end, ReadMaxBytes(1000))
    assert "corrupt=skip" in error.value.__notes__[0]
    assert run(stream(tmp_path, corrupt="skip"), end)[1] == offsets[401:]
