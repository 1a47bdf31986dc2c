"""A rebuild on Spark: the files of the one process, by the command line."""

from __future__ import annotations

import json
from pathlib import Path

from pyspark.sql import SparkSession

from support.daemon import indexd_here
from support.reopened import config_for
from support.small_log import SIZES, write_log
from support.spark_rebuild import assert_same_data


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
    assert_same_data(config_for(store, tmp_path / "data"), out, tmp_path / "one")
