"""The kernels once more, interpreted and with their bounds checked, in processes of their own.

Interpreted (NUMBA_DISABLE_JIT=1), what they do is what Python does: a type that only the compiler changes shows.
With NUMBA_BOUNDSCHECK=1, an index outside its array raises instead of reading or writing what is there; compiled with
few optimisations (NUMBA_OPT=1), for compiling is what takes the time.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[1] / "unit"
MODES = ["NUMBA_DISABLE_JIT", "NUMBA_BOUNDSCHECK"]


@pytest.mark.skipif(any(mode in os.environ for mode in MODES), reason="this run is one of those modes")
@pytest.mark.parametrize("mode", MODES)
def test_the_kernel_tests_hold(mode: str) -> None:
    files = sorted(str(path) for path in HERE.glob("test_*kernel*.py"))
    assert len(files) >= 4
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(
        command,
        cwd=HERE.parent.parent,
        env=os.environ | {mode: "1", "NUMBA_OPT": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout
