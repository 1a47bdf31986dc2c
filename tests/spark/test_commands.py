"""The commands and the audit on a cluster that loses an executor, in a session of this process, and through Connect."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pyarrow.dataset as ds
import pytest

from indexd.audit import AuditOptions, audit_here
from indexd.cli import broker_index as command
from indexd.config import Config
from indexd.index.format import IndexLayout
from indexd.spark.audit import audit_on_spark
from indexd.storage.disk import Disk
from support.auditing import VOLATILE, config_of_golden, index_log, restart_of_killed_broker
from support.auditing import config_for as audit_config
from support.daemon import indexd_here
from support.goldens import unpack
from support.reopened import config_for
from support.rows import rows_of_log
from support.small_log import SEGMENT_SIZE, SIZES, write_log
from support.spark_cluster import FRUGAL, WAIT_SECONDS, ConnectServer, Standalone, output_of, start, wait_for
from support.spark_rebuild import assert_same_data

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


MESSAGES = 6000
INDEXD = Path(sys.executable).with_name("indexd")


def rows_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What it says with --json."""
    found: dict[str, Any] = json.loads(output_of(process).splitlines()[-1])
    return found


def common(root: Path) -> tuple[object, ...]:
    return ("--store", root / "store", "--data", root / "data", *SIZES, "--json")


def one_process(root: Path) -> Path:
    done = indexd_here("rebuild", *common(root), "--out", root / "one")
    assert done.returncode == 0, done.stderr
    return root / "one"


def test_a_rebuild_on_a_cluster_that_loses_an_executor(standalone: Standalone, tmp_path: Path) -> None:
    write_log(tmp_path / "store", MESSAGES)
    out = tmp_path / "out"
    flags = ("--engine", "spark", "--split-size", "25000", *standalone.flags)
    process = start(INDEXD, "rebuild", *common(tmp_path), "--out", out, *flags)
    building = tmp_path / "out.building"
    try:
        wait_for("runs", lambda: len(list(building.glob("runs/*"))) >= 10 or process.poll() is not None)
        assert process.poll() is None, "it was over before anybody could be killed"
        standalone.kill_executor(standalone.workers[0])
        found = rows_of(process)
    finally:
        process.kill()
    assert found["messages"] == MESSAGES
    assert found["tasks"] > 50
    assert_same_data(config_for(tmp_path / "store", tmp_path / "data"), out, one_process(tmp_path))
    assert not building.exists()


def test_a_rebuild_whose_jvm_is_killed_says_so_in_one_line(tmp_path: Path) -> None:
    write_log(tmp_path / "store", MESSAGES)
    out, building = tmp_path / "out", tmp_path / "out.building"
    words = ("rebuild", *common(tmp_path), "--out", out, "--engine", "spark", "--master", "local[2]")
    words += ("--split-size", "25000", "--conf", f"spark.driver.extraJavaOptions={FRUGAL}")
    process = start(INDEXD, *words)
    try:
        wait_for("runs", lambda: len(list(building.glob("runs/*"))) >= 5 or process.poll() is not None)
        (jvm,) = (child for child in psutil.Process(process.pid).children() if "java" in child.name())
        jvm.kill()
        said, errors = process.communicate(timeout=WAIT_SECONDS)
    finally:
        process.kill()
    assert (process.returncode, said) == (70, "")
    assert re.fullmatch(r"indexd: Spark's JVM has ended \(SIGKILL\); .*\n", errors), errors
    assert not out.exists()


def test_a_rebuild_and_an_export_through_connect(connect_server: ConnectServer, tmp_path: Path) -> None:
    write_log(tmp_path / "store", MESSAGES)
    flags = ("--engine", "spark", "--split-size", "200000", *connect_server.flags)
    found = rows_of(start(INDEXD, "rebuild", *common(tmp_path), "--out", tmp_path / "out", *flags))
    assert found["messages"] == MESSAGES
    assert_same_data(config_for(tmp_path / "store", tmp_path / "data"), tmp_path / "out", one_process(tmp_path))
    target = tmp_path / "parquet"
    found = rows_of(
        start(INDEXD, "export", *common(tmp_path), "--to", target, "--topics", "OrderPaid", *connect_server.flags)
    )
    table = ds.dataset(target, partitioning="hive").to_table(columns=["topic"])
    assert 0 < found["rows"] == table.num_rows < MESSAGES
    assert set(table["topic"].to_pylist()) == {"OrderPaid"}


SCRIPT = """
import json, os, signal, sys, threading, time
from functools import partial
from pathlib import Path
from support import spark_work
from support.spark_cluster import read_source, session_of
from indexd.errors import CorruptDataError, SparkError

folder, store = map(Path, sys.argv[1:3])
with session_of(sys.argv[3:]) as spark:
    from indexd.spark.session import slots
    from indexd.spark.tasks import is_local, run_tasks

    seen = {"slots": slots(spark), "local": is_local(spark), "errors": []}
    seen["squares"] = run_tasks(spark, spark_work.square, range(5))
    for work in (spark_work.raise_corrupt, spark_work.raise_internal):
        try:
            run_tasks(spark, work, range(3))
        except (CorruptDataError, SparkError) as error:
            seen["errors"].append([type(error).__name__, str(error), error.hint])
    seen["source"] = read_source(spark, store, 20000)
    told = []
    work = partial(spark_work.wait, seconds=0.4)
    run_tasks(spark, work, range(8), sizes=[10] * 8, progress=lambda done, size: told.append(done))
    seen["told"] = told
    threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    started = time.monotonic()
    try:
        run_tasks(spark, partial(spark_work.touch_then_wait, folder, seconds=0.5), range(60))
    except KeyboardInterrupt:
        seen["interrupted"] = time.monotonic() - started
    seen["begun"] = len(os.listdir(folder))
    time.sleep(1.5)
    seen["later"] = len(os.listdir(folder))
    seen["java"] = any("java" in process.name() for process in __import__("psutil").Process().children(recursive=True))
print(json.dumps(seen))
"""


def test_tasks_through_connect(connect_server: ConnectServer, tmp_path: Path) -> None:
    marks, store = tmp_path / "marks", tmp_path / "store"
    marks.mkdir()
    write_log(store, 500)
    seen = json.loads(output_of(start(sys.executable, "-c", SCRIPT, marks, store, *connect_server.flags)))
    rows = [[row["phyOffset"], row["topic"], row["keys"]] for row in rows_of_log(store / "commitlog")]
    assert seen["source"]["rows"] == rows
    assert str(store / "nothing") in seen["source"]["missing"]
    assert (seen["slots"], seen["local"], seen["java"]) == (2, False, False)
    assert seen["squares"] == [0, 1, 4, 9, 16]
    corrupt, internal = seen["errors"]
    assert corrupt[0] == "CorruptDataError"
    assert corrupt[1].startswith("split 1 does not hold (on executor ")
    assert corrupt[2] == "look at it"
    assert internal[:2] == ["SparkError", "a job on Spark failed: KeyError: 'a key that nobody has'"]
    assert seen["told"][-1] == 80
    assert seen["told"] == sorted(seen["told"])
    assert seen["interrupted"] < 15
    assert 0 < seen["begun"] == seen["later"] < 40


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
