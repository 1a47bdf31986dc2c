"""status: a daemon that was stopped or killed, one that is not that far yet, none at all."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.daemon import Daemon, indexd
from support.small_log import SIZES
from support.status import MESSAGES, row_of, status, stopped, store

__all__ = ["stopped", "store"]


def test_one_that_was_stopped(stopped: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(stopped, data)
    row = row_of(data, code=1)
    assert (row["phase"], row["lastShutdownClean"], row["asked"]) == ("stopped", True, str(data / "frontier"))
    assert row["findings"] == ["no daemon runs: it was stopped"]
    assert (row["messages"], row["caughtUp"], row["indexFiles"]) == (MESSAGES, True, len(row["newestFiles"]))
    drawn = status(data, code=1)
    assert drawn.startswith("○ stopped\n")
    assert "all of the log" in drawn
    # A state that is left over counts for nothing.
    (data / "state").write_text('{"pid": 1, "phase": "running", "phyOffset": 5}')
    assert row_of(data, code=1)["phase"] == "stopped"


def test_one_that_was_killed(store: Path, tmp_path: Path) -> None:
    with Daemon(store, tmp_path / "data", *SIZES, env={"INDEXD_HTTP": "127.0.0.1:0"}) as daemon:
        daemon.wait_caught_up()
        daemon.kill()
        row = row_of(daemon.data, code=1)
    assert (row["phase"], row["lastShutdownClean"]) == ("crashed", False)
    assert row["findings"] == [
        "no daemon runs: it crashed or was killed; the next start recovers (the abort flag is there)"
    ]


def test_a_log_that_is_not_there_any_more(stopped: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(stopped, data)
    row = row_of(data, "--store", tmp_path / "none", code=1)
    assert "caughtUp" not in row
    (note,) = row["notes"]
    assert f"the log cannot be looked at: there is no commitlog at {tmp_path}/none/commitlog" in note
    drawn = status(data, "--store", tmp_path / "none", code=1)
    assert "durable to" in drawn
    assert "█ durable" not in drawn, "where the log ends is not known"


def test_no_index_at_all(tmp_path: Path) -> None:
    for data in (tmp_path, tmp_path / "none"):
        done = indexd("status", "--data", data)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert f"{data} holds no index yet" in done.stderr
    (tmp_path / "frontier").write_text("{")
    assert indexd("status", "--data", tmp_path).returncode == 4


@contextmanager
def held(data: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds the lock of a new data directory, and does nothing else there."""
    data.mkdir()
    code = (
        "import sys, time; from pathlib import Path; from indexd.storage.lock import DirectoryLock\n"
        "lock = DirectoryLock(Path(sys.argv[1])); lock.acquire(); print('held', flush=True); time.sleep(60)\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, data / "lock"], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        yield holder
    finally:
        holder.kill()
        holder.wait()
        if holder.stdout is not None:
            holder.stdout.close()


def test_a_recovery_is_drawn(tmp_path: Path) -> None:
    # What a recovering daemon writes down, with the lock held as it holds it.
    data = tmp_path / "data"
    with held(data) as holder:
        row = row_of(data, INDEXD_HTTP="off")
        assert (row["phase"], row["pid"], row["findings"]) == ("opening", holder.pid, [])
        progress = {"step": "compare", "unit": "bytes", "done": 3 << 20, "total": 6 << 20}
        state = {"pid": holder.pid, "phase": "recovering", "http": None, "recovering": progress}
        (data / "state").write_text(json.dumps(state))
        assert row_of(data)["recovering"] == progress
        drawn = status(data)
        assert drawn.startswith(f"◐ recovering  pid {holder.pid}\n")
        assert "50%  compare: 3.0 MiB of 6.0 MiB" in drawn
        del state["phase"]
        (data / "state").write_text(json.dumps(state))
        assert row_of(data)["phase"] == "recovering"


def test_one_that_stops_is_told_from_one_that_opens(tmp_path: Path) -> None:
    # In the order in which a daemon makes and removes them.
    data = tmp_path / "data"
    with held(data) as holder:
        assert row_of(data)["phase"] == "opening", "it has only taken the lock"
        (data / "starts").write_text("1\n")
        assert row_of(data)["phase"] == "opening", "the kernels are loaded"
        (data / "abort").touch()
        (data / "starts").unlink()
        assert row_of(data)["phase"] == "opening"
        (data / "abort").unlink()
        row = row_of(data)
        assert (row["phase"], row["pid"], row["findings"], row["notes"]) == ("stopping", holder.pid, [], [])
        assert status(data).startswith(f"◐ stopping  pid {holder.pid}\n")


def test_without_a_state_only_a_port_that_was_given_is_asked(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with held(data):
        assert row_of(data)["notes"] == []
        assert row_of(data, INDEXD_HTTP="127.0.0.1:1")["notes"] == ["HTTP at 127.0.0.1:1: Connection refused"]


def test_only_status_loads_what_draws() -> None:
    code = (
        "import sys; from indexd.cli.main import main\n"
        "try: main(['query-key', '-t', 'T', '-k', 'k', '--data', '/none'])\n"
        "except SystemExit: pass\n"
        "loaded = {'rich', 'ssl', 'http.client', 'indexd.cli.status_ask', 'numpy'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
