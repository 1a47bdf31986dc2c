"""A short run of each fuzz target, 5 s or INDEXD_FUZZ_SECONDS; longer runs are started by hand."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

from support.missing import missing

HERE = Path(__file__).resolve().parent
SECONDS = int(os.environ.get("INDEXD_FUZZ_SECONDS", "5"))


def test_decoders_agree_on_whatever_the_fuzzer_finds(tmp_path: Path) -> None:
    if importlib.util.find_spec("atheris") is None:
        missing("there is no atheris for this Python; PYTHON=python3.13 scripts/test, or an older one")
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    options = [f"-max_total_time={SECONDS}", "-max_len=8192", "-timeout=20", f"-artifact_prefix={tmp_path}/"]
    done = subprocess.run(
        [sys.executable, str(HERE / "fuzz_decode.py"), str(corpus), *options],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        timeout=SECONDS + 180,
        check=False,
    )
    kept = {path.name: path.read_bytes()[:600].hex() for path in tmp_path.glob("crash-*")}
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{kept}"
    runs = re.search(r"Done (\d+) runs", done.stdout)
    assert runs is not None, done.stdout[-2000:]
    assert int(runs[1]) > 200
    assert len(list(corpus.iterdir())) > 100
