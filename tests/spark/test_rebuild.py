"""A rebuild on Spark: the files of the one process, by the command line and by the driver's function."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from support.daemon import indexd_here
from support.reopened import config_for
from support.small_log import SEGMENT_SIZE, SIZES, write_log
from support.spark_rebuild import assert_same_data, by_one

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_the_command_line(spark: SparkSession, tmp_path: Path) -> None:
    store, out = tmp_path / "store", tmp_path / "out"
    write_log(store, 3000)
    words = ("rebuild", "--store", store, "--data", tmp_path / "data", *SIZES, "--out")
    here = indexd_here(*words, tmp_path / "one", "--json")
    assert here.returncode == 0, here.stderr
    there = indexd_here(*words, out, "--json", "--engine", "spark", "--split-size", "100000")
    assert (there.returncode, there.stderr) == (0, "")
    one, found = json.loads(here.stdout), json.loads(there.stdout)
    assert (one.pop("engine"), found.pop("engine")) == ("process", "spark")
    assert found.pop("tasks") >= 9
    passing = {"out", "seconds", "processSeconds"}
    assert {key: found[key] for key in found.keys() - passing} == {key: one[key] for key in one.keys() - passing}
    config = config_for(store, tmp_path / "data")
    assert_same_data(config, out, tmp_path / "one")


def test_a_corrupt_log_is_passed_over_as_told(spark: SparkSession, tmp_path: Path) -> None:
    store, out = tmp_path / "store", tmp_path / "out"
    write_log(store, 3000)
    with (store / "commitlog" / f"{SEGMENT_SIZE:020d}").open("r+b") as file:
        file.seek(1000)
        file.write(bytes(range(1, 200)))
    words = ("rebuild", "--store", store, "--data", tmp_path / "data", *SIZES, "--engine", "spark", "--out", out)
    done = indexd_here(*words, "--split-size", "60000")
    assert done.returncode == 4
    assert done.stderr.count("\n") == 1
    assert "the log is corrupt at offset 263108 of" in done.stderr
    done = indexd_here(*words, "--split-size", "60000", "--on-corrupt", "skip")
    assert done.returncode == 0, done.stderr
    skipping = config_for(store, tmp_path / "data", on_corrupt="skip")
    by_one(skipping, tmp_path / "one")
    assert_same_data(skipping, out, tmp_path / "one")
