"""Exports without Spark: what the files hold."""

from __future__ import annotations

from pathlib import Path
from unittest import mock
from urllib.parse import unquote

import pyarrow.parquet as pq
import pytest

from indexd.cli.main import main
from indexd.config import Config
from indexd.errors import UsageError
from indexd.spark.export import outputs
from indexd.spark.source.columns import ALL_COLUMNS, DEFAULT_COLUMNS
from support.exporting import (
    config_of,
    export_here,
    files_of,
    logged,
    parquet_of,
    row_of,
    rows_of,
    with_shape,
)
from support.odd_log import odd_messages, write_odd
from support.small_log import BASE_TIME, SEGMENT_SIZE, write_log

COUNT = 3000
LONG = "中" * 90


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of some segments."""
    found = tmp_path_factory.mktemp("store")
    write_log(found, COUNT)
    return found


@pytest.fixture
def config(store: Path, tmp_path: Path) -> Config:
    return config_of(store, tmp_path / "data")


def test_every_row_is_what_the_plain_decoder_says(store: Path, config: Config, tmp_path: Path) -> None:
    to = tmp_path / "out"
    found = export_here(config, to, columns=ALL_COLUMNS)
    assert rows_of(to) == [row_of(message) for message in logged(store)]
    assert (found.rows, found.missing_topics, found.partitions) == (COUNT, (), 1)
    assert found.files == len(parquet_of(to)) > 4
    assert found.bytes == sum(path.stat().st_size for path in parquet_of(to))
    assert [name for name in files_of(to) if not name.endswith(".parquet")] == ["_SUCCESS", "_manifest.json"]


def test_the_schema_and_its_version_are_in_every_file(config: Config, tmp_path: Path) -> None:
    to = tmp_path / "out"
    export_here(config, to)
    for path in parquet_of(to):
        schema = pq.read_schema(path)
        assert schema.names == list(DEFAULT_COLUMNS)
        assert schema.metadata[b"indexd.schema.version"] == b"1"


@pytest.mark.parametrize("compression", ["zstd", "snappy", "none"])
def test_files_and_row_groups_are_bounded(store: Path, config: Config, tmp_path: Path, compression: str) -> None:
    to = tmp_path / "out"
    shape = with_shape(compression=compression, file_size=128 << 10, row_group_size=32 << 10)
    export_here(config, to, shape=shape, columns=ALL_COLUMNS, split_size=None)
    for path in parquet_of(to):
        meta = pq.ParquetFile(path).metadata
        assert path.stat().st_size <= 1.1 * shape.file_size
        wanted = {"none": "UNCOMPRESSED"}.get(compression, compression.upper())
        for number in range(meta.num_row_groups):
            group = meta.row_group(number)
            assert group.column(0).compression == wanted
            assert group.total_byte_size <= 1.2 * shape.row_group_size
    assert len(parquet_of(to)) > len(list((store / "commitlog").iterdir()))


def test_topics_and_times_select(store: Path, config: Config, tmp_path: Path) -> None:
    begin, end = BASE_TIME + 4000, BASE_TIME + 30_000
    topics = frozenset({"OrderPaid", "订单主题", "NoSuchTopic"})
    columns = ("msgId", "phyOffset")
    found = export_here(config, tmp_path / "out", topics=topics, begin=begin, end=end, columns=columns)
    wanted = [
        {name: row_of(message)[name] for name in columns}
        for message in logged(store)
        if message.topic in topics and begin <= message.store_timestamp <= end
    ]
    assert any(message.store_timestamp == end for message in logged(store))
    assert rows_of(tmp_path / "out") == wanted
    assert found.missing_topics == ("NoSuchTopic",)


def test_topics_that_are_all_missing_write_nothing(config: Config, tmp_path: Path) -> None:
    to = tmp_path / "out"
    with pytest.raises(UsageError, match="no message of NoSuchTopic"):
        export_here(config, to, topics=frozenset({"NoSuchTopic"}))
    assert not to.exists()
    export_here(config, to)
    before = files_of(to)
    with pytest.raises(UsageError, match="no message of NoSuchTopic"):
        export_here(config, to, topics=frozenset({"NoSuchTopic"}), mode="overwrite")
    assert files_of(to) == before


def test_partitions_hold_what_they_say(store: Path, config: Config, tmp_path: Path) -> None:
    to = tmp_path / "out"
    found = export_here(config, to, shape=with_shape(partition_by=("topic", "day")))
    wanted: dict[str, list[int]] = {}
    for message in logged(store):
        wanted.setdefault(message.topic, []).append(message.phy_offset)
    seen: dict[str, list[int]] = {}
    for path in parquet_of(to):
        topic, day = path.relative_to(to).parts[:2]
        assert day == "day=2023-11-14"
        file = pq.ParquetFile(path)
        assert file.schema_arrow.names == [name for name in DEFAULT_COLUMNS if name != "topic"]
        seen.setdefault(unquote(topic.removeprefix("topic=")), []).extend(file.read()["phyOffset"].to_pylist())
    assert seen == wanted
    assert found.partitions == len(wanted)


def test_few_open_files_and_many_partitions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, to = tmp_path / "store", tmp_path / "out"
    write_odd(store, [m for m in odd_messages(2000, 14) if m.topic != LONG.encode()], SEGMENT_SIZE)
    monkeypatch.setattr(outputs.LocalFiles, "open_max", 3)
    config = config_of(store, tmp_path / "data")
    shape = with_shape(partition_by=("topic",), pending_size=4096, row_group_size=4096)
    found = export_here(config, to, shape=shape, topics=None)
    messages = logged(store)
    assert found.rows == len(messages)
    offsets = [row for path in parquet_of(to) for row in pq.ParquetFile(path).read()["phyOffset"].to_pylist()]
    assert sorted(offsets) == [message.phy_offset for message in messages]
    assert found.partitions == len({message.topic for message in messages}) == 12
    directories = {path.relative_to(to).parts for path in parquet_of(to)}
    assert all(len(parts) == 2 and parts[0].startswith("topic=") for parts in directories)


def test_a_topic_too_long_for_a_directory_is_refused_in_one_line(tmp_path: Path) -> None:
    store = tmp_path / "store"
    write_odd(store, odd_messages(300, 14), SEGMENT_SIZE)
    assert any(message.topic == LONG for message in logged(store))
    config = config_of(store, tmp_path / "data")
    with pytest.raises(UsageError, match="270 bytes is too long"):
        export_here(config, tmp_path / "out", shape=with_shape(partition_by=("topic",)))
    assert not (tmp_path / "out").exists()
    assert export_here(config, tmp_path / "out").rows == 300


def test_an_empty_log_gives_a_file_with_the_columns(tmp_path: Path) -> None:
    (tmp_path / "store/commitlog").mkdir(parents=True)
    config = config_of(tmp_path / "store", tmp_path / "data")
    found = export_here(config, tmp_path / "out")
    assert (found.rows, found.files, found.end_offset) == (0, 1, 0)
    (path,) = parquet_of(tmp_path / "out")
    assert pq.read_schema(path).names == list(DEFAULT_COLUMNS)
    found = export_here(config, tmp_path / "by", shape=with_shape(partition_by=("topic",)))
    assert files_of(tmp_path / "by") == ["_SUCCESS", "_manifest.json"]


def test_values_that_never_repeat_have_no_dictionary(config: Config, tmp_path: Path) -> None:
    export_here(config, tmp_path / "out", columns=ALL_COLUMNS, split_size=None)
    group = pq.ParquetFile(parquet_of(tmp_path / "out")[0]).metadata.row_group(0)
    leaves = {group.column(number).path_in_schema: group.column(number) for number in range(group.num_columns)}
    plain = {name for name, column in leaves.items() if "RLE_DICTIONARY" not in column.encodings}
    assert plain == {
        "phyOffset", "queueOffset", "keys.list.element", "uniqKey", "properties.key_value.value", "msgId", "body",
    }  # fmt: skip
    assert all(column.has_offset_index and column.is_stats_set for column in leaves.values() if column.num_values)


@pytest.mark.parametrize(
    ("flags", "code", "text"),
    [
        (["--columns", "phyOffset,nothing"], 2, "no column 'nothing'"),
        (["--topics", "A,,B"], 2, "is no list of names"),
        (["--topics", "A,"], 2, "is no list of names"),
        (["-b", "2", "-e", "1"], 2, "is behind the last one"),
        (["--file-size", "many"], 2, "is not a size"),
        (["--file-size", "10"], 2, "too small"),
        (["--partition-by", "hour"], 2, "hour is no partition"),
        (["--partition-by", "day,day"], 2, "given twice"),
        (["--columns", "topic", "--partition-by", "topic"], 2, "no column is left"),
        (["--mode", "replace"], 2, "replace"),
        (["--to", "ftp://h/x"], 2, "no place"),
        (["--to", "STORE/x"], 3, "inside the store"),
        (["--store", "/nowhere"], 3, "no directory"),
    ],
)
def test_what_cannot_be_asked_for_is_one_line_before_anything_starts(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], code: int, text: str
) -> None:
    given = ["export", "--store", str(store), "--data", str(tmp_path / "data"), "--to", str(tmp_path / "out")]
    with (
        mock.patch("indexd.cli.export.spark_session", side_effect=AssertionError("a session")),
        pytest.raises(SystemExit) as ended,
    ):
        main([*given, *(flag.replace("STORE", str(store)) for flag in flags)])
    said = capsys.readouterr().err
    assert (ended.value.code, said.count("\n")) == (code, 1)
    assert text in said
    assert not (tmp_path / "out").exists()
