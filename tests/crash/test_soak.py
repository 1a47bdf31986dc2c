"""A short run of ``scripts/soak``: every kind of fault at least once, and nothing lost or invented."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from soak.faults import FAULTS
from support.daemon import compile_kernels

TESTS = Path(__file__).parents[1]
#: So many rounds deal every fault once.
ROUNDS = 2
#: scripts/soak draws its own.
SEED = 20260716
#: Nothing here takes so long, on however busy a machine, unless it hangs.
HANGS_SECONDS = 300


def soak(work: Path, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "soak", "--work", str(work), *flags]
    env = os.environ | {"PYTHONPATH": str(TESTS)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def wait_first_daemon(process: subprocess.Popen[str], work: Path) -> None:
    """Until it has written to its log; a run that ends before, or does not come so far, is ended and quoted."""
    deadline = time.monotonic() + HANGS_SECONDS
    while not any(log.stat().st_size for log in work.glob("soak-*/data-*.log")):
        if process.poll() is not None or time.monotonic() > deadline:
            process.terminate()
            out, errors = process.communicate(timeout=HANGS_SECONDS)
            raise AssertionError(f"no daemon has come up, exit code {process.returncode}: {out}{errors}")
        time.sleep(0.05)


def test_every_fault_is_survived(tmp_path: Path) -> None:
    compile_kernels()
    process = soak(tmp_path, "--seconds", "120", "--rounds", str(ROUNDS), "--queries", "2000", "--seed", str(SEED))
    out, errors = process.communicate(timeout=HANGS_SECONDS)
    print(errors)
    assert process.returncode == 0, out
    tally = json.loads(out)
    assert tally["seed"] == SEED
    assert tally["failure"] is None
    for name in FAULTS:
        assert 1 <= tally["faults"][name]["tried"] == tally["faults"][name]["survived"]
    assert (tally["rounds"], tally["verifications"]) == (ROUNDS, 2 * ROUNDS)
    assert (tally["entriesLost"], tally["entriesInvented"]) == (0, 0)
    assert tally["entriesChecked"] > 2000
    assert tally["filedEntriesChecked"] > 2000
    assert tally["unitsChecked"] > 2000
    assert tally["rebuildsCompared"] >= 1
    assert list(tmp_path.iterdir()) == []


def test_a_stop_ends_all_processes(tmp_path: Path) -> None:
    compile_kernels()
    process = soak(tmp_path)
    wait_first_daemon(process, tmp_path)
    time.sleep(random.uniform(0, 2))
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=HANGS_SECONDS)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert list(tmp_path.iterdir()) == []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert str(tmp_path).encode() not in path.read_bytes()
        except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            continue
