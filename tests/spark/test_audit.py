"""``indexd audit --engine spark``: the same lines as by one process, however many tasks there are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from indexd.cli import broker_index as command
from indexd.config import Config
from support.auditing import config_of_golden, index_log, restart_of_killed_broker
from support.daemon import indexd_here
from support.goldens import unpack

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_both_engines_say_the_same(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = unpack("rocketmq-5.4-killed-open-index", tmp_path)
    restart_of_killed_broker(golden.root)
    index_log(config_of_golden(golden), begin=6 * golden.segment_size)
    (path,) = golden.index_files()
    data = bytearray(path.read_bytes())
    for position in range(4100, 60_000, 977):
        data[position] ^= 4
    path.write_bytes(data)

    @contextmanager
    def session(_config: Config, _app: str, **_: object) -> Iterator[SparkSession]:
        yield spark

    monkeypatch.setattr(command, "spark_session", session)
    words = (
        *("audit", "--json", "--queues", "--store", golden.root, "--segment-size", golden.segment_size),
        *("--hash-slot-num", golden.hash_slot_num, "--index-num", golden.index_num),
        *("--consume-queue-file-size", golden.queue_file_size),
    )

    def lines(*more: object) -> list[dict[str, Any]]:
        done = indexd_here(*words, *more)
        assert done.returncode == 1, done.stderr
        assert done.stderr == ""
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        assert rows[-1].pop("seconds") > 0
        assert rows[-1].pop("bytesRead") > 0  # a file that several tasks share is read by each
        return rows

    here = lines()
    assert {row["kind"] for row in here} == {
        "file",
        "hole",
        "finding",
        "queues",
        "samples",
        "answers",
        "crash",
        "summary",
    }
    assert here[-1]["missingKeys"] > 10_858
    assert lines("--engine", "spark", "--split-size", golden.segment_size) == here
