"""The audit in a session of this process: it says what one process says, and keeps what a job has done."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from indexd.audit import AuditOptions, audit_here
from indexd.index.format import IndexLayout
from indexd.spark.audit import audit_on_spark
from indexd.storage.disk import Disk
from support.auditing import VOLATILE, config_of_golden, index_log, restart_of_killed_broker
from support.auditing import config_for as audit_config
from support.daemon import indexd_here
from support.goldens import unpack
from support.small_log import SEGMENT_SIZE, write_log


def test_both_engines_say_the_same(spark: SparkSession, tmp_path: Path) -> None:
    golden = unpack("rocketmq-5.4-killed-open-index", tmp_path)
    restart_of_killed_broker(golden.root)
    index_log(config_of_golden(golden), begin=6 * golden.segment_size)
    (path,) = golden.index_files()
    data = bytearray(path.read_bytes())
    for position in range(4100, 60_000, 977):
        data[position] ^= 4
    path.write_bytes(data)

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


def test_what_a_job_has_kept_is_taken_over(spark: SparkSession, tmp_path: Path) -> None:
    store = tmp_path / "store"
    write_log(store, 4000)
    sizes = {"split_size": SEGMENT_SIZE, "read_rate_max": "20MiB"}
    config = audit_config(store, IndexLayout(500, 5000), SEGMENT_SIZE, **sizes)
    index_log(config)
    sorted((store / "index").iterdir())[1].unlink()
    done: list[tuple[int, int]] = []
    options = AuditOptions(samples=9, kept=tmp_path / "kept")
    first = audit_on_spark(spark, config, options, lambda *at: done.append(at))
    assert (first.resumed_tasks, done[-1][0]) == (0, done[-1][1])
    assert done == sorted(done)
    again = audit_on_spark(spark, config, options)
    assert again.resumed_tasks == len(first.plan.tasks) - 1
    here = audit_here(config, Disk(), AuditOptions(samples=9), lambda *_: None)
    found = [
        [{key: row[key] for key in row if key not in VOLATILE} for row in report.rows()]
        for report in (first, again, here)
    ]
    assert found[0] == found[1] == found[2]
