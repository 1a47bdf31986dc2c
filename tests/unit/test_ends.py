"""How a command ends that nobody lets come to its end: the reader leaves, Ctrl-C comes at once, the store is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.daemon import COMMAND, Daemon, compile_kernels, environment, indexd
from support.small_log import SIZES, write_log


def without_reader(*words: object) -> tuple[int, str]:
    """Exit code and standard error where whoever reads the output has gone before the first byte."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [COMMAND, *map(str, words)], stdout=writing, stderr=subprocess.PIPE, text=True, check=False, env=environment()
    )
    os.close(writing)
    return done.returncode, done.stderr


@pytest.mark.parametrize("extra", [(), ("--json",), ("--watch",)])
def test_status_keeps_its_exit_code_when_its_reader_leaves(tmp_path: Path, extra: tuple[str, ...]) -> None:
    compile_kernels()
    store, data = tmp_path / "store", tmp_path / "data"
    write_log(store, 50)
    with Daemon(store, data, *SIZES) as daemon:
        daemon.wait_caught_up()
        assert indexd("status", "--data", data).returncode == 0
        assert without_reader("status", "--data", data, *extra) == (0, "")
        assert daemon.terminate() == 0
    assert indexd("status", "--data", data).returncode == 1, "it is stopped"
    assert without_reader("status", "--data", data, *extra) == (1, "")


@pytest.mark.parametrize("words", [("doctor",), ("--help",), ("query-key", "--help"), ("--version",)])
def test_so_do_others(words: tuple[str, ...]) -> None:
    assert without_reader(*words) == (indexd(*words).returncode, "")


def test_a_store_without_a_log_is_refused_before_a_port_is_open(tmp_path: Path) -> None:
    for command in ("run", "--recover"):
        done = indexd(command, "--store", "/etc", "--data", tmp_path / "data", env={"INDEXD_HTTP": "127.0.0.1:0"})
        assert (done.returncode, done.stdout) == (3, "")
        assert done.stderr.splitlines() == [
            "indexd: there is no commitlog at /etc/commitlog; give the broker's storePathRootDir as --store, or its "
            "storePathCommitLog as --commit-log-paths"
        ]
        assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    "module", ["indexd.cli.main", "argparse", "indexd.config.model", "pydantic_core", "indexd.cli.status", "ssl"]
)
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
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment(), timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_that_is_ignored_stays_so() -> None:
    code = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from indexd.__main__ import main; sys.argv = ['indexd', '--version']; os.kill(os.getpid(), 2); main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment())
    assert (done.returncode, done.stderr) == (0, "")


def test_the_command_begins_there() -> None:
    assert "from indexd.__main__ import main" in COMMAND.read_text("utf-8")
