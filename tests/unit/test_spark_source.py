"""A DataFrame of the log: the splits that are planned, and rows that are the same whatever is pruned."""

from __future__ import annotations

import json
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.datasource import DataSourceReader
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadMaxBytes
from pyspark.sql.types import ArrayType, IntegerType, LongType, MapType, StringType, StructField, StructType

from indexd.errors import (
    CorruptDataError,
    DisturbedError,
    MissingStoreError,
    UnsafeStoreError,
    UsageError,
)
from indexd.spark.source.columns import ALL_COLUMNS, DEFAULT_COLUMNS, SCHEMA, spark_schema
from indexd.spark.source.datasource import CommitLogSource
from indexd.spark.source.options import check_names, parse_options
from indexd.spark.splits import check_chain, plan_splits
from indexd.spark.stats.content import Selection, count_split
from indexd.storage.disk import Disk
from support.beside_log import DAMAGED_SEGMENT_SIZE, DAMAGES, damaged_log, rows_of_whole_log
from support.commitlog_writer import CommitLogWriter, blank_record
from support.data_directory import T0, spec
from support.queue_store import QueueStore
from support.rows import rows_of_log
from support.small_log import SEGMENT_SIZE, messages, write_log
from support.spark_source import ALL, kept, read, reader, rows_between, run, source, stream
from support.strategies import Sample, logs


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source")
    write_log(path, 4000)
    return path


@pytest.fixture(scope="module")
def rows(store: Path) -> list[dict[str, Any]]:
    return rows_of_log(store / "commitlog")


# --- schema ---


def test_the_schema_of_spark_is_that_of_the_batches(tmp_path: Path) -> None:
    for columns in (ALL_COLUMNS, DEFAULT_COLUMNS, ("body", "size")):
        found = source(tmp_path, columns=",".join(columns)).schema()
        assert to_arrow_schema(found, timezone="UTC").equals(spark_arrow(columns))
    assert not spark_schema(("keys",))["keys"].dataType.containsNull
    assert not spark_schema(("properties",))["properties"].dataType.valueContainsNull


def spark_arrow(columns: tuple[str, ...]) -> Any:
    import pyarrow as pa

    return pa.schema([SCHEMA.field(name) for name in columns])


def test_a_schema_of_ones_own_chooses_columns_and_allows_nulls(store: Path, rows: list[dict[str, Any]]) -> None:
    wanted = StructType(
        [
            StructField("TAGS", StringType()),
            StructField("phyOffset", LongType()),
            StructField("keys", ArrayType(StringType())),
            StructField("properties", MapType(StringType(), StringType())),
        ]
    )
    made = source(store)
    found = made.reader(wanted)
    assert all(
        batch.schema.equals(to_arrow_schema(wanted, timezone="UTC")) for batch in found.read(found.partitions()[0])
    )
    expected = [
        {"TAGS": row["tags"], **{name: row[name] for name in ("phyOffset", "keys", "properties")}} for row in rows
    ]
    assert read(found) == expected
    with pytest.raises(UsageError, match="there is no column 'sise'"):
        made.reader(StructType([StructField("sise", IntegerType())]))


# --- what is planned and read ---


def test_no_filters_are_taken_from_spark(store: Path) -> None:
    # In Spark 4.3.0 what was pushed for one query is used for the next one.
    assert type(reader(store)).pushFilters is DataSourceReader.pushFilters


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
                "splitSize": st.sampled_from([5000, SEGMENT_SIZE // 2, 1 << 30]),
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


@pytest.mark.parametrize("step", [3 * 3_600_000, -3 * 3_600_000])
def test_a_clock_that_steps_inside_segments_loses_no_rows(tmp_path: Path, step: int) -> None:
    # Right where each segment begins and off in its middle: first messages alone tell nothing of what lies between.
    built = QueueStore(tmp_path)
    with built.writer as writer:
        for number in range(400):
            is_off = 1000 < writer.max_offset % built.segment < 3000
            writer.append(spec(T0 + 60_000 * number + (step if is_off else 0), size=100))
    built.build()
    bound = T0 + 60_000 * 200
    late = [m.phy_offset for m in built.messages() if m.store_timestamp >= bound]
    early = [m.phy_offset for m in built.messages() if m.store_timestamp < bound]
    for options in ({}, {"data": built.data}):
        for name, expected in (("startTime", late), ("endTime", early)):
            found = read(reader(built.root, columns="phyOffset", **{name: bound}, **options))
            assert [row["phyOffset"] for row in found] == expected


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
        for start in {*times, T0 - 100, T0 + 100}:
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


def test_a_log_that_was_cut_gives_no_rows(tmp_path: Path) -> None:
    write_log(tmp_path, 100)
    offsets = [row["phyOffset"] for row in rows_of_log(tmp_path / "commitlog")]
    planned = reader(tmp_path)
    (partition,) = planned.partitions()
    with (tmp_path / "commitlog" / f"{0:020d}").open("r+b") as file:
        file.seek(offsets[50])
        file.write(bytes(SEGMENT_SIZE - offsets[50]))
    with pytest.raises(DisturbedError, match=f"and end at {offsets[50]}"):
        list(planned.read(partition))


def test_a_log_whose_last_bytes_are_no_frame_ends_before_them(tmp_path: Path) -> None:
    end = write_log(tmp_path, 100)
    with (tmp_path / "commitlog" / f"{0:020d}").open("r+b") as file:
        file.seek(end)
        file.write(b"\xff" * 50)
    assert len(read(reader(tmp_path, columns="phyOffset"))) == 100


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
        assert check_chain(splits, [json.loads(row["text"])["next"] for row in counts if row["kind"] == "split"]) == []
        assert sum(row["amount"] for row in counts if row["kind"] == "messages") == len(expected)
    with pytest.raises(CorruptDataError) as error:
        read(reader(tmp_path))
    assert error.value.__notes__ == ["give --on-corrupt skip to go on at the next frame that proves itself"]


# --- options ---


def partitions(made_of: CommitLogSource) -> Any:
    return made_of.reader(made_of.schema()).partitions()


def test_options_go_by_any_spelling(store: Path) -> None:
    found = parse_options(
        {
            "PATH": str(store), "Start_Offset": "5", "endoffset": "7", "starttime": "-3", "endTime": "9",
            "splitsize": "1MiB", "TOPICS": "a, b", "corrupt": "SKIP", "read_bytes": "1MiB",
            "verifyCrc": "true",
        },
        is_stream=False,
    )  # fmt: skip
    assert (found.start_offset, found.end_offset, found.start_time, found.end_time) == (5, 7, -3, 9)
    assert (found.split_size, found.topics) == (1 << 20, frozenset({"a", "b"}))
    assert found.config.store.store == store
    assert (found.config.reader.on_corrupt, found.config.reader.read_bytes) == ("skip", 1 << 20)
    assert found.config.reader.verify_crc
    # What the log's files say, as nobody else has.
    assert found.config.store.segment_size == SEGMENT_SIZE
    assert not found.has_data
    assert (found.starting_offset, found.on_expired, found.max_bytes_per_trigger) == ("earliest", "fail", None)


def test_a_configuration_file_is_read(store: Path, tmp_path: Path) -> None:
    file = tmp_path / "indexd.toml"
    file.write_text(f'[store]\nstore = "{store}"\ndata = "{tmp_path}/data"\n[spark]\nsplit_size = "3MiB"\n')
    found = parse_options({"config": str(file)}, is_stream=False)
    assert (found.config.store.store, found.split_size, found.has_data) == (store, 3 << 20, True)


@pytest.mark.parametrize(
    ("option", "text", "message"),
    [
        ("startOfset", "1", "there is no option 'startOfset' of rocketmq_commitlog"),
        ("startOffset", "-1", "startOffset = '-1': Input should be greater than or equal to 0"),
        ("endTime", "yesterday", "endTime = 'yesterday': Input should be a valid integer"),
        ("endTime", str(2**63), "Input should be less than"),
        ("corrupt", "ignore", "Input should be 'fail' or 'skip'"),
        ("splitSize", "0", "greater than or equal to 1"),
        ("splitSize", "big", "is not a size"),
        ("columns", "bodi", "there is no column 'bodi'"),
        ("startingOffset", "earliest", "startingOffset is no option of a batch"),
        ("segmentSize", "5", "segment_size"),
    ],
)
def test_options_that_are_wrong(store: Path, option: str, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_options({"path": str(store), option: text}, is_stream=False)


def test_an_option_of_another_name_is_found_before_anything_is_read() -> None:
    with pytest.raises(UsageError) as error:
        check_names({"colums": "x"})
    assert error.value.hint == "did you mean columns?"


def test_several_stores_are_not_loaded_at_a_time() -> None:
    # What Spark makes of load([a, b]).
    with pytest.raises(UsageError, match="one store is loaded at a time") as error:
        check_names({"paths": '["/a","/b"]'})
    assert "union" in error.value.hint


def test_the_hint_is_shown_with_the_traceback(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        source(tmp_path, columns="bodi").schema()
    assert error.value.__notes__ == ["did you mean body?"]


def test_stores_that_cannot_be_read(tmp_path: Path, store: Path) -> None:
    with pytest.raises(MissingStoreError, match="there is no commitlog"):
        partitions(source(tmp_path / "nothing"))
    with pytest.raises(UnsafeStoreError, match="segment_size"):
        partitions(source(store, segmentSize=2 * SEGMENT_SIZE))
    with pytest.raises(UsageError, match="no store is given"):
        partitions(CommitLogSource({}))


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
    for one in (stream(tmp_path), stream(tmp_path, onExpired="skip", corrupt="skip")):
        with pytest.raises(DisturbedError, match=r"the log was cut.* before") as error:
            one.latestOffset(kept(end), ALL)
        assert "new checkpointLocation" in error.value.__notes__[0]
        with pytest.raises(DisturbedError):
            one.partitions({"offset": 0}, kept(end))
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
