"""A short run of scripts/soak: every fault at least once, and nothing lost or invented."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from soak.__main__ import FAULTS
from support.daemon import compile_kernels

TESTS = Path(__file__).parents[1]
#: So many rounds deal every fault once.
ROUNDS = 2
#: scripts/soak draws its own.
SEED = 20260716
#: Nothing here takes so long, on however busy a machine, unless it hangs.
HANGS_SECONDS = 300


def test_every_fault_is_survived(tmp_path: Path) -> None:
    compile_kernels()
    flags = ("--seconds", "120", "--rounds", str(ROUNDS), "--queries", "2000", "--seed", str(SEED))
    command = [sys.executable, "-m", "soak", "--work", str(tmp_path), *flags]
    env = os.environ | {"PYTHONPATH": str(TESTS)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=HANGS_SECONDS, check=False)
    print(done.stderr)
    assert done.returncode == 0, done.stdout
    tally = json.loads(done.stdout)
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
