"""rebuild as a command: its own options, without Spark."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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


def interrupted(root: Path, *flags: object) -> str:
    """The whole of standard error; ``out`` is not there."""
    write_log(root / "store", 20)
    words = ("rebuild", "--store", root / "store", "--data", root / "d", *SIZES, "--out", root / "out", *flags)
    done = indexd_here(*words)
    assert (done.returncode, done.stdout) == (130, "")
    assert not (root / "out").exists()
    return done.stderr


def test_what_an_interrupted_rebuild_leaves_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("indexd.cli.rebuild._on_spark", interrupt)
    assert interrupted(tmp_path / "none", "--engine", "spark") == "", "there is nothing"
    monkeypatch.setattr("indexd.recovery.rebuild._build", interrupt)
    building = tmp_path / "one/out.building"
    assert interrupted(tmp_path / "one") == (
        f"indexd: interrupted; {building} is left: the next rebuild replaces it, or it can be removed\n"
    )
    assert building.exists()
    building = tmp_path / "spark/out.building"
    (building / "runs").mkdir(parents=True)
    (building / "runs/0.run").touch()
    assert interrupted(tmp_path / "spark", "--engine", "spark") == (
        f"indexd: interrupted; {building} keeps what is finished: --resume goes on with it; it can also be removed\n"
    )
