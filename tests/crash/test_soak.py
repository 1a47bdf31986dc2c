"""A short run of scripts/soak: every fault at least once, and nothing lost or invented; repair killed at any moment."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from soak.__main__ import FAULTS
from support.auditing import lost_keys
from support.daemon import compile_kernels, environment
from support.forked import start
from support.repairing import folders_of, holed_store, index_of, index_timestamp, newest_end, words_of

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


#: Of a repair's and an undo's time: at the very begin, far behind the end, and in between.
SHARES = (0.01, 3.0, 0.3, 0.6, 0.8, 0.95)


def test_kills_at_any_moment_of_a_repair_and_of_its_undo(tmp_path: Path) -> None:
    compile_kernels()
    config = holed_store(store := tmp_path / "store")
    before, checkpoint = index_of(store), (store / "checkpoint").read_bytes()
    old_time = index_timestamp(store)
    states: Counter[str] = Counter()

    def repair(*more: str, kill_after: float | None = None) -> float:
        """Seconds until its end; killed after so many, it may have ended before."""
        began = time.monotonic()
        words = ("repair", *words_of(config), "--yes", *more)
        process = start(words, environment(None), tmp_path / "out", tmp_path / "errors")
        if kill_after is not None:
            time.sleep(kill_after)
            process.kill()
        assert process.wait(60) in ((0,) if kill_after is None else (0, -signal.SIGKILL))
        return time.monotonic() - began

    repair()  # the first ones are slower
    repair("--undo")
    shutil.rmtree(store / folders_of(store)[0])
    seconds = repair()
    after, new_time = index_of(store), newest_end(store / "index")
    assert not lost_keys(config, "5.4")
    undo_seconds = repair("--undo")

    def check() -> str:
        # The checkpoint is written behind the exchange of either, so for a moment it is that of the other index.
        index, stamp = index_of(store), index_timestamp(store)
        assert index in (before, after)
        assert stamp in (old_time, new_time)
        return "before" if index == before else "between" if stamp == old_time else "after"

    for share in SHARES:
        for path in folders_of(store):
            shutil.rmtree(store / path)
        repair(kill_after=share * seconds)
        states[f"repair: {check()}"] += 1
        repair()
        assert (check(), len(folders_of(store))) == ("after", 1)
        repair("--undo", kill_after=share * undo_seconds)
        states[f"undo: {check()}"] += 1
        repair()  # it finishes what was begun, and repairs what is not repaired then
        assert check() == "after"
        repair("--undo")
        assert check() == "before"
        assert (store / "checkpoint").read_bytes() == checkpoint
    print(f"{seconds:.2f} s a repair, {undo_seconds:.2f} s an undo: {dict(states)}")
    assert {"repair: before", "repair: after"} <= states.keys()
