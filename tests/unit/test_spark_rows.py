"""Rows of splits: each message of the log once, whatever the splits, the filters and the columns are."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexd.errors import CorruptDataError, DisturbedError, UsageError
from indexd.spark.source.columns import ALL_COLUMNS, DEFAULT_COLUMNS, SCHEMA, VERSION_KEY, arrow_schema, parse_columns
from indexd.spark.source.rows import Keep, RowReader
from indexd.spark.splits import Split, plan_splits
from indexd.storage.disk import Disk
from support.commitlog_writer import CommitLogWriter, FrameSpec
from support.goldens import GOLDENS, unpack
from support.rows import config_of, plain, record_batches, rows_of_log
from support.small_log import SEGMENT_SIZE, write_log
from support.strategies import Sample, logs

SMALL = 1 << 15


def rows_of_splits(
    store: Path, splits: list[Split], columns: tuple[str, ...], keep: Keep | None = None, segment_size: int = SMALL
) -> list[dict[str, Any]]:
    config = config_of(store, segment_size)
    found: list[dict[str, Any]] = []
    for split in splits:
        for batch in record_batches(Disk(), config, split, columns, keep):
            batch.validate(full=True)
            assert batch.num_rows
            assert batch.schema.equals(arrow_schema(columns), check_metadata=True)
            found += [plain(row) for row in batch.to_pylist()]
    return found


@settings(max_examples=25)
@given(st.data(), logs(max_size=25), st.booleans())
def test_rows_are_the_messages(data: st.DataObject, samples: list[Sample], prop_crc: bool) -> None:
    with tempfile.TemporaryDirectory() as directory:
        store = Path(directory)
        with CommitLogWriter(store / "commitlog", SMALL, prop_crc=prop_crc) as writer:
            for sample in samples:
                sample.append(writer)
        splits = plan_splits(Disk(), config_of(store, SMALL), size=data.draw(st.integers(100, 2 * SMALL)))
        expected = rows_of_log(store / "commitlog")
        assert len(expected) == len(samples)
        assert rows_of_splits(store, splits, ALL_COLUMNS) == expected
        topics = data.draw(st.none() | st.frozensets(st.sampled_from([row["topic"] for row in expected] or ["T"])))
        times = [row["storeTimestamp"] for row in expected] or [0]
        bounds = [data.draw(st.none() | st.sampled_from(times)) for _ in range(2)]
        columns = tuple(data.draw(st.permutations(ALL_COLUMNS)))[: data.draw(st.integers(1, len(ALL_COLUMNS)))]
        kept = [
            {name: row[name] for name in columns}
            for row in expected
            if (topics is None or row["topic"] in topics)
            and (bounds[0] is None or row["storeTimestamp"] >= bounds[0])
            and (bounds[1] is None or row["storeTimestamp"] < bounds[1])
        ]
        assert rows_of_splits(store, splits, columns, Keep(topics, *bounds)) == kept


@pytest.mark.parametrize("name", GOLDENS)
def test_what_rocketmq_wrote(name: str, tmp_path: Path) -> None:
    golden = unpack(name, tmp_path)
    config = config_of(golden.root, golden.segment_size)
    splits = plan_splits(Disk(), config, size=golden.segment_size // 3)
    columns = ("phyOffset", "size", "topic", "queueId", "queueOffset", "storeTimestamp", "sysFlag", "tagsCode", "keys")
    columns += ("uniqKey", "tags", "preparedTransactionOffset")
    read = rows_of_splits(golden.root, splits, columns, segment_size=golden.segment_size)
    said = golden.messages()
    assert [row["phyOffset"] for row in read] == [row["phyOffset"] for row in said]
    for found, row in zip(read, said, strict=True):
        assert found["keys"] == [key for key in (row["keys"] or "").split(" ") if key]
        assert (found["topic"], found["queueId"], found["size"]) == (row["topic"], row["queueId"], row["size"])
        assert (found["queueOffset"], found["tagsCode"]) == (row["cqOffset"], row["tagsCode"])
        assert (found["uniqKey"], found["tags"], found["sysFlag"]) == (row["uniqKey"], row["tags"], row["sysFlag"])
        assert found["storeTimestamp"] == row["storeTimestamp"]
        assert found["preparedTransactionOffset"] == row["preparedTransactionOffset"]


def test_topics_beyond_what_a_table_holds_at_first(tmp_path: Path) -> None:
    with CommitLogWriter(tmp_path / "commitlog", 1 << 20) as writer:
        for number in range(5000):
            writer.append(FrameSpec(f"topic-{number % 2500}"))
    splits = plan_splits(Disk(), config_of(tmp_path, 1 << 20), size=200_000)
    read = rows_of_splits(tmp_path, splits, ("topic",), segment_size=1 << 20)
    assert [row["topic"] for row in read] == [f"topic-{number % 2500}" for number in range(5000)]
    kept = rows_of_splits(tmp_path, splits, ("topic",), Keep(frozenset({"topic-2400"})), segment_size=1 << 20)
    assert [row["topic"] for row in kept] == ["topic-2400"] * 2


def test_a_split_that_ends_elsewhere_is_an_error(tmp_path: Path) -> None:
    write_log(tmp_path, 3000)
    config = config_of(tmp_path, SEGMENT_SIZE)
    first, second = plan_splits(Disk(), config, size=SEGMENT_SIZE // 2)[:2]
    with pytest.raises(DisturbedError, match="the log has changed"):
        list(record_batches(Disk(), config, Split(first.begin, second.begin + 1)))


def test_unreadable_bytes_are_an_error_or_passed_over(tmp_path: Path) -> None:
    write_log(tmp_path, 3000)
    rows = rows_of_log(tmp_path / "commitlog")
    victim = rows[100]
    with (tmp_path / "commitlog" / f"{0:020d}").open("r+b") as file:
        file.seek(victim["phyOffset"] + 4)
        file.write(b"\xff")
    config = config_of(tmp_path, SEGMENT_SIZE)
    (split, *_) = plan_splits(Disk(), config, size=SEGMENT_SIZE)
    with pytest.raises(CorruptDataError, match=f"corrupt at offset {victim['phyOffset']}"):
        list(record_batches(Disk(), config, split))
    skipping = config_of(tmp_path, SEGMENT_SIZE, on_corrupt="skip")
    batches = list(record_batches(Disk(), skipping, split, ("phyOffset",)))
    expected = [row["phyOffset"] for row in rows if row["phyOffset"] < SEGMENT_SIZE and row is not victim]
    assert [row["phyOffset"] for batch in batches for row in batch.to_pylist()] == expected


def test_a_row_reader_says_where_it_ended(tmp_path: Path) -> None:
    end = write_log(tmp_path, 100)
    config = config_of(tmp_path, SEGMENT_SIZE)
    reader = RowReader(Disk(), config, Split(0, SEGMENT_SIZE))
    assert sum(batch.num_rows for batch in reader) == 100
    assert (reader.split_reader.next_offset, reader.split_reader.ends_log) == (end, True)
    assert reader.schema.names == list(DEFAULT_COLUMNS)
    assert "Split" in repr(reader)


# --- columns ---


def test_the_schema_is_version_1() -> None:
    # What others have written down: a change here is a new version.
    assert SCHEMA.metadata == {VERSION_KEY: b"1"}
    assert [f"{field.name} {field.type}{'' if field.nullable else ' not null'}" for field in SCHEMA] == [
        "phyOffset int64 not null",
        "size int32 not null",
        "topic string not null",
        "queueId int32 not null",
        "queueOffset int64 not null",
        "storeTimestamp int64 not null",
        "bornTimestamp int64 not null",
        "bornHost string not null",
        "storeHost string not null",
        "sysFlag int32 not null",
        "transactionType string not null",
        "reconsumeTimes int32 not null",
        "preparedTransactionOffset int64 not null",
        "keys list<element: string not null> not null",
        "uniqKey string",
        "tags string",
        "tagsCode int64 not null",
        "properties map<string, string> not null",
        "msgId string not null",
        "body binary not null",
    ]
    assert not SCHEMA.field("properties").type.item_field.nullable


def test_columns_are_named_in_any_case_and_order() -> None:
    assert parse_columns(None) == DEFAULT_COLUMNS
    assert "body" not in DEFAULT_COLUMNS
    assert parse_columns("*") == ALL_COLUMNS
    assert parse_columns(" BODY, phyoffset") == ("body", "phyOffset")
    assert arrow_schema(("body",)).field("body").type == pa.binary()


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("bodi", "there is no column 'bodi'", "did you mean body"),
        ("", "there is no column ''", "there are phyOffset"),
        ("size,size", "the column size is given twice", "once"),
        ("body,*", "the column body is given twice", "once"),
    ],
)
def test_columns_that_there_are_not(text: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        parse_columns(text)
    assert hint in error.value.hint
