"""The commands on a cluster that loses an executor, on a JVM that is killed, and through Connect."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow.dataset as ds
import pytest

from support.daemon import indexd_here
from support.reopened import config_for
from support.rows import rows_of_log
from support.small_log import SIZES, write_log
from support.spark_cluster import (
    FRUGAL,
    WAIT_SECONDS,
    connect_server,
    kill_executor,
    output_of,
    standalone,
    start,
    wait_for,
)
from support.spark_rebuild import assert_same_data

MESSAGES = 6000
INDEXD = Path(sys.executable).with_name("indexd")


@pytest.fixture(scope="module")
def connect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    with connect_server(tmp_path_factory.mktemp("connect")) as flags:
        yield flags


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


def test_a_rebuild_on_a_cluster_that_loses_an_executor(tmp_path: Path) -> None:
    write_log(tmp_path / "store", MESSAGES)
    out, building = tmp_path / "out", tmp_path / "out.building"
    with standalone(tmp_path) as (flags, workers):
        words = ("--engine", "spark", "--split-size", "25000", *flags)
        process = start(INDEXD, "rebuild", *common(tmp_path), "--out", out, *words)
        try:
            wait_for("runs", lambda: len(list(building.glob("runs/*"))) >= 10 or process.poll() is not None)
            assert process.poll() is None, "it was over before anybody could be killed"
            kill_executor(workers[0])
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


def test_a_rebuild_and_an_export_through_connect(connect: list[str], tmp_path: Path) -> None:
    write_log(tmp_path / "store", MESSAGES)
    flags = ("--engine", "spark", "--split-size", "200000", *connect)
    found = rows_of(start(INDEXD, "rebuild", *common(tmp_path), "--out", tmp_path / "out", *flags))
    assert found["messages"] == MESSAGES
    assert_same_data(config_for(tmp_path / "store", tmp_path / "data"), tmp_path / "out", one_process(tmp_path))
    target = tmp_path / "parquet"
    found = rows_of(start(INDEXD, "export", *common(tmp_path), "--to", target, "--topics", "OrderPaid", *connect))
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


def test_tasks_through_connect(connect: list[str], tmp_path: Path) -> None:
    marks, store = tmp_path / "marks", tmp_path / "store"
    marks.mkdir()
    write_log(store, 500)
    seen = json.loads(output_of(start(sys.executable, "-c", SCRIPT, marks, store, *connect)))
    rows = [[row["phyOffset"], row["topic"], row["keys"]] for row in rows_of_log(store / "commitlog")]
    assert seen["source"] == rows
    assert (seen["slots"], seen["local"], seen["java"]) == (2, False, False)
    assert seen["squares"] == [0, 1, 4, 9, 16]
    corrupt, internal = seen["errors"]
    assert (corrupt[0], corrupt[2]) == ("CorruptDataError", "look at it")
    assert corrupt[1].startswith("split 1 does not hold (on executor ")
    assert internal[:2] == ["SparkError", "a job on Spark failed: KeyError: 'a key that nobody has'"]
    assert seen["told"][-1] == 80
    assert seen["told"] == sorted(seen["told"])
    assert seen["interrupted"] < 15
    assert 0 < seen["begun"] == seen["later"] < 40
