"""rebuild as a command: its own options, without Spark."""

from __future__ import annotations

import json
from pathlib import Path

from support.daemon import indexd_here
from support.small_log import SIZES, write_log


def test_the_key_index_alone(tmp_path: Path) -> None:
    write_log(tmp_path / "store", 200)
    words = ("rebuild", "--store", tmp_path / "store", "--data", tmp_path / "d", *SIZES, "--out", tmp_path / "out")
    done = indexd_here(*words, "--only", "index", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["engine"] == "process"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["checkpoint", "frontier", "index"]
    frontier = json.loads((tmp_path / "out/frontier").read_bytes())
    assert (frontier["consumeQueue"], frontier["sparse"]) == (None, None)


def test_what_only_spark_does_is_refused_without_it(tmp_path: Path) -> None:
    write_log(tmp_path / "store", 20)
    words = ("rebuild", "--store", tmp_path / "store", "--data", tmp_path / "d", *SIZES, "--out", tmp_path / "out")
    done = indexd_here(*words, "--resume")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "add --engine spark" in done.stderr
    assert not (tmp_path / "out").exists()
