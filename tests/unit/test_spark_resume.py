"""What a rebuild takes over from one that failed or was killed, and what it does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from indexd.commitlog.writer import CommitLogWriter
from indexd.config import Config
from indexd.errors import BusyError, CorruptDataError, IndexdError
from indexd.storage.names import building_of
from support.reopened import config_for
from support.small_log import SEGMENT_SIZE, messages, write_log
from support.spark_rebuild import SPLIT_SIZE, assert_same_data, by_one, by_tasks, fail


@pytest.fixture
def config(tmp_path: Path) -> Config:
    write_log(tmp_path / "store", 3000)
    return config_for(tmp_path / "store", tmp_path / "data")


@pytest.fixture
def one(config: Config, tmp_path: Path) -> Path:
    """What one process makes of the log."""
    by_one(config, tmp_path / "one")
    return tmp_path / "one"


KILLED = """
import sys, time
from pathlib import Path
from support.reopened import config_for
from support.spark_rebuild import by_tasks, run_here
root, stage = Path(sys.argv[1]), int(sys.argv[2])
def run(work, items, **more):
    global stage
    stage -= 1
    found = run_here(work, items[:-1] if stage == 0 else items, **more)
    if stage == 0:
        print("here", flush=True)
        time.sleep(60)
    return found
by_tasks(config_for(root / "store", root / "data"), root / "out", 60_000, run)
"""


@pytest.mark.parametrize("stage", [1, 2])
def test_a_job_that_is_killed_is_resumed(config: Config, one: Path, tmp_path: Path, stage: int) -> None:
    roots = [str(Path(__file__).resolve().parents[1]), *filter(None, sys.path)]
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(stage)]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(roots)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"here\n"
        with pytest.raises(BusyError):
            by_tasks(config, tmp_path / "out", SPLIT_SIZE, resume=True)
        process.send_signal(signal.SIGKILL)
    left = building_of(tmp_path / "out")
    assert (left / "attempts").exists()
    runs = list((left / "runs").iterdir())
    (left / "index").mkdir(exist_ok=True)
    (left / "index/20260101000000000").write_bytes(b"half")
    found = by_tasks(config, tmp_path / "out", SPLIT_SIZE, resume=True)
    assert found.resumed == len(runs) - (stage == 2) > 3
    assert_same_data(config, tmp_path / "out", one)


def flip(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ 0x40]))


def test_a_run_that_is_not_whole_is_made_again(config: Config, one: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    runs = fail(config, out, 8, IndexdError("x"))
    for path, place in zip(runs[:4], (9, 0.5, -60, -1), strict=True):
        size = path.stat().st_size
        flip(path, int(place * size) if isinstance(place, float) else place % size)
    os.truncate(runs[4], 100)
    runs[5].write_bytes(b"")
    runs[6].with_name("0-1.xyz.run").write_bytes(b"no run")
    assert by_tasks(config, out, SPLIT_SIZE, resume=True).resumed == 2
    assert_same_data(config, out, one)


def test_runs_of_another_configuration_or_another_log_are_not_taken_over(config: Config, tmp_path: Path) -> None:
    root = tmp_path
    other = {"flavour": "3.x", "message_delay_level": "1s 2s", "sparse": "false", "verify_crc": "true"}
    for key, value in other.items():
        assert fail(config, root / key, 5, IndexdError("x"))
        changed = config_for(root / "store", root / "data", **{key: value})
        assert by_tasks(changed, root / key, SPLIT_SIZE, resume=True).resumed == 0, key
    assert fail(config, root / "size", 5, IndexdError("x"))
    assert by_tasks(config, root / "size", SPLIT_SIZE // 2, resume=True).resumed == 0
    runs = fail(config, root / "log", 9, IndexdError("x"))
    # Two segments are written anew: whatever was built from them is no longer true.
    log = root / "store/commitlog"
    for path in sorted(log.iterdir())[1:]:
        path.unlink()
    with CommitLogWriter(log, SEGMENT_SIZE, start_offset=SEGMENT_SIZE) as writer:
        for spec in islice(messages(7), 1500):
            writer.append(replace(spec, store_timestamp=spec.store_timestamp + 10**7))
    found = by_tasks(config, root / "log", SPLIT_SIZE, resume=True)
    assert 0 < found.resumed < len(runs)
    by_one(config, root / "anew")
    assert_same_data(config, root / "log", root / "anew")


def test_what_was_read_before_a_corrupt_place_is_taken_over_by_one_that_may_skip_it(
    config: Config, tmp_path: Path
) -> None:
    with (tmp_path / "store/commitlog" / f"{SEGMENT_SIZE:020d}").open("r+b") as file:
        file.seek(1000)
        file.write(bytes(range(1, 200)))
    with pytest.raises(CorruptDataError) as expected:
        by_one(config, tmp_path / "one")
    with pytest.raises(CorruptDataError) as error:
        by_tasks(config, tmp_path / "out", SPLIT_SIZE)
    assert error.value.line() == f"{expected.value.line()}; --resume goes on with what is finished"
    skipping = config_for(tmp_path / "store", tmp_path / "data", on_corrupt="skip")
    found = by_tasks(skipping, tmp_path / "out", SPLIT_SIZE, resume=True)
    assert found.resumed > 5
    by_one(skipping, tmp_path / "skipped")
    assert_same_data(config, tmp_path / "out", tmp_path / "skipped")
