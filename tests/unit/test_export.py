"""The command export before it starts anything: what cannot be asked for, and how places are named for Hadoop."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from indexd.cli.main import main
from indexd.config.units import parse_place
from indexd.spark.export import hadoop_uri
from support.small_log import write_log


@pytest.mark.parametrize(
    ("flags", "code", "text"),
    [
        (["--columns", "phyOffset,nothing"], 2, "no column 'nothing'"),
        (["--topics", "A,,B"], 2, "is no list of names"),
        (["--topics", "A,"], 2, "is no list of names"),
        (["-b", "2", "-e", "1"], 2, "is behind the last one"),
        (["--max-records-per-file", "-1"], 2, "is negative"),
        (["--partition-by", "hour"], 2, "hour is no partition"),
        (["--partition-by", "day,day"], 2, "given twice"),
        (["--columns", "topic", "--partition-by", "topic"], 2, "no column is left"),
        (["--mode", "replace"], 2, "replace"),
        (["--to", "ftp://h/x"], 2, "no place"),
        (["--to", "s3://key:secret@b/x"], 2, "s3://***@b/x holds options; give them to Hadoop"),
        (["--to", "STORE/x"], 3, "inside the store"),
        (["--to", "FILE"], 2, "is a file"),
        (["--store", "/nowhere"], 3, "no directory"),
    ],
)
def test_what_cannot_be_asked_for_is_one_line_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], code: int, text: str
) -> None:
    store, file = tmp_path / "store", tmp_path / "file"
    write_log(store, 10)
    file.touch()
    given = ["export", "--store", str(store), "--data", str(tmp_path / "data"), "--to", str(tmp_path / "out")]
    with (
        mock.patch("indexd.cli.spark.spark_session", side_effect=AssertionError("a session")),
        pytest.raises(SystemExit) as ended,
    ):
        main([*given, *(flag.replace("STORE", str(store)).replace("FILE", str(file)) for flag in flags)])
    said = capsys.readouterr().err
    assert (ended.value.code, said.count("\n")) == (code, 1)
    assert text in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("place", "uri"),
    [
        ("s3://bucket/a%20b/c", "s3a://bucket/a b/c"),
        ("hdfs://head:8020/x", "hdfs://head:8020/x"),
        ("file:///a%20b", "file:/a b"),
        ("/a b/%2F", "file:/a b/%2F"),
    ],
)
def test_places_are_named_as_hadoop_does(place: str, uri: str) -> None:
    assert hadoop_uri(parse_place(place)) == uri
