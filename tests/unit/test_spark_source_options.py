"""What may be said to the data source, in which words, and what is said of what may not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from indexd.errors import IndexdError, MissingStoreError, UnsafeStoreError, UsageError
from indexd.spark.source.datasource import CommitLogSource
from indexd.spark.source.options import OPTIONS_HINT, check_names, explained, parse_options
from support.small_log import SEGMENT_SIZE, write_log


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source")
    write_log(path, 100)
    return path


def source(store: Path, **options: Any) -> CommitLogSource:
    return CommitLogSource({"path": str(store)} | {name: str(text) for name, text in options.items()})


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
        ("startOffset", "-1", "startOffset = '-1' is negative"),
        ("endTime", "yesterday", "endTime = 'yesterday' is not a whole number"),
        ("endTime", str(2**63), "is not in 64 bits"),
        ("corrupt", "ignore", "is not one of fail, skip"),
        ("splitSize", "0", "is less than 1"),
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


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        ("give --on-corrupt skip to go on", "give the option corrupt=skip to go on"),
        ("give --segment-size 65536, or its own file with --broker-conf",
         "give the option segmentSize=65536, or its own file with the option brokerConf"),
        ("check --store", "check the option path"),
        ("run indexd --recover", "run indexd --recover"),
        ("see indexd --help", OPTIONS_HINT),
    ],
)  # fmt: skip
def test_hints_name_options_where_the_command_line_has_flags(hint: str, expected: str) -> None:
    with pytest.raises(UsageError) as error, explained(), explained():
        raise UsageError("wrong", hint)
    assert (error.value.hint, error.value.__notes__) == (expected, [expected])


def test_no_hint_of_the_source_names_a_flag(store: Path) -> None:
    for wrong in ({"qqqqqqqqq": "1"}, {"startOffset": "-1"}, {"segmentSize": 2 * SEGMENT_SIZE}, {"path": store / "no"}):
        with pytest.raises(IndexdError) as error:
            partitions(source(store, **wrong))
        assert "--" not in error.value.hint
        assert "indexd.spark" not in error.value.hint


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


def partitions(source: CommitLogSource) -> Any:
    return source.reader(source.schema()).partitions()
