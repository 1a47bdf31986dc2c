"""The file that an audit keeps its parts in: cut off, damaged, another's, of another audit, in use."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from indexd.audit.resume import ResumeFile
from indexd.config import Config
from indexd.errors import BusyError, UsageError
from indexd.storage.disk import Disk
from support.audit_runs import Runs, wrong_store


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Much is wrong in it; not to be changed."""
    return wrong_store(tmp_path_factory.mktemp("wrong") / "store")


def refused(config: Config, kept: Path, asked: dict[str, Any] | None = None) -> str:
    with pytest.raises(UsageError) as error:
        ResumeFile(Disk(), kept, config, asked or {"samples": 0, "queues": False})
    assert "\n" not in error.value.line()
    return error.value.line()


@pytest.fixture
def kept(wrong: Config, tmp_path: Path) -> Path:
    """A finished one."""
    Runs(wrong).rows(tmp_path / "kept")
    return tmp_path / "kept"


def test_a_line_that_was_cut_off_costs_one_task(wrong: Config, kept: Path) -> None:
    data = kept.read_bytes()
    last = data.rindex(b"\n", 0, len(data) - 1) + 1
    wanted = Runs(wrong).rows(None)
    for end in (last + 1, last + 9, (last + len(data)) // 2, len(data) - 1):
        kept.write_bytes(data[:end])
        run = Runs(wrong)
        assert run.rows(kept) == wanted
        assert len(run.tasks) == 2
        assert sorted(kept.read_bytes().splitlines()) == sorted(data.splitlines())
    # A crash of the machine may leave zeros there.
    for torn in (data[: last + 5] + bytes(90), data[: last + 40] + bytes(len(data) - last - 41) + b"\n"):
        kept.write_bytes(torn)
        assert Runs(wrong).rows(kept) == wanted
    # So may one that came before anything was written down.
    for end in (0, 4, 30):
        kept.write_bytes(data[:end])
        assert Runs(wrong).rows(kept) == wanted


def test_what_is_not_ours_is_refused_and_left_alone(wrong: Config, kept: Path, tmp_path: Path) -> None:
    data = kept.read_bytes()
    lines = data.splitlines(keepends=True)
    foreign = [b"hello\n", b"{}\n" * 3, b"\x7fELF\0\0", b"x", bytes(100), json.dumps([1]).encode()]
    for bad in foreign:
        kept.write_bytes(bad)
        assert "does not hold what an audit keeps" in refused(wrong, kept)
        assert kept.read_bytes() == bad
    for position in (len(lines[0]) + 40, len(lines[0]) + len(lines[1]) + 4):
        kept.write_bytes(data[:position] + b"\n" + data[position + 1 :])
        assert "is damaged at byte" in refused(wrong, kept)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "pipe"):
        assert "is no plain file" in refused(wrong, tmp_path / name)
    assert "cannot create" in refused(wrong, tmp_path / "none" / "kept")


def lines_of(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_what_says_it_is_another_audit(wrong: Config, kept: Path) -> None:
    head, *parts = [json.loads(line) for line in kept.read_text().splitlines()]
    for name, value in (("store", "/other"), ("segmentSize", 1), ("indexd", "0.0.1"), ("samples", 9), ("queues", True)):
        lines_of(kept, [head | {"of": head["of"] | {name: value}}, *parts])
        assert f"is of another audit: {name} was {value}" in refused(wrong, kept)
    assert "made by another version" in refused(wrong, lines_of(kept, [head | {"version": 1}]))
    for bad in ({}, [], 5, head | {"format": "x"}, head | {"version": "1"}):
        assert "does not hold what an audit keeps" in refused(wrong, lines_of(kept, [bad]))
    for bad in (head | {"piece": None}, head | {"of": 1}, head | {"samples": [[1]]}):
        assert "is damaged at byte 0" in refused(wrong, lines_of(kept, [bad]))
    for bad in (7, {"task": 1}, []):
        assert "is damaged at byte" in refused(wrong, lines_of(kept, [head, bad, *parts]))
    for bad in (None, [], {}, parts[0]["part"] | {"begin": "x"}):
        lines_of(kept, [head, {"task": parts[0]["task"], "part": bad}])
        with pytest.raises(UsageError, match="is damaged"):
            Runs(wrong).rows(kept)
    lines_of(kept, [head, {"task": parts[0]["task"]}])
    with pytest.raises(UsageError, match="is damaged"):
        Runs(wrong).rows(kept)


def test_one_at_a_time(wrong: Config, kept: Path) -> None:
    first = ResumeFile(Disk(), kept, wrong, {"samples": 0, "queues": False})
    with pytest.raises(BusyError, match="is in use by another audit"):
        ResumeFile(Disk(), kept, wrong, {"samples": 0, "queues": False})
    first.close()
    ResumeFile(Disk(), kept, wrong, {"samples": 0, "queues": False}).close()
