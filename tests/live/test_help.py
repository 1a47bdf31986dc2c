"""Help in one screen, and completion in bash, zsh and fish."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import time
from pathlib import Path

import pytest

from indexd import __version__
from indexd.cli.main import main, make_parser
from indexd.cli.output import SHELLS, parsers_of
from indexd.cli.output import completion_script as script
from indexd.config import KEYS, flag_name
from support.daemon import indexd_here
from support.missing import need

SCREEN_LINES, SCREEN_COLUMNS = 42, 80


PARSERS = dict(parsers_of(make_parser()))


@pytest.fixture(autouse=True)
def screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(SCREEN_COLUMNS))


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    out, err = capsys.readouterr()
    assert (stopped.value.code or 0, err) == (0, "")
    return out


@pytest.mark.parametrize("path", PARSERS, ids=" ".join)
def test_help_is_one_screen_with_all_of_the_commands_own_options_and_help_all_shows_the_rest(
    capsys: pytest.CaptureFixture[str], path: tuple[str, ...]
) -> None:
    out, everything = said(capsys, *path, "--help"), said(capsys, *path, "--help-all")
    lines = out.splitlines()
    assert (len(lines) <= SCREEN_LINES, max(map(len, lines)) <= SCREEN_COLUMNS) == (True, True)
    names = {name for action in PARSERS[path]._actions for name in action.option_strings}
    own = names - {flag_name(key) for key in KEYS}
    assert ([name for name in own if name not in out], [name for name in names if name not in everything]) == ([], [])
    assert all(below[-1] in out for below in PARSERS if below[:-1] == path and below)
    if "--data" in names:
        assert [name in out for name in ("--store PATH", "--data PATH", "--mqtt-host")] == [True, True, False]
        assert out != everything
    assert said(capsys, "help", *path) == out


def test_what_is_said_of_one_alone(capsys: pytest.CaptureFixture[str]) -> None:
    for command, needed in (
        ("inspect", "PATH [PATH ...]"),
        ("message", "(-i ID | -o OFFSET)"),
        ("query-offset", "-o O"),
    ):
        usage = said(capsys, command, "-h").partition("\n\n")[0]
        assert (needed in usage, "--mqtt-host" in usage) == (True, False)
    assert "of --data, or of --http HOST:PORT" in " ".join(said(capsys, "status", "--help").split())
    assert said(capsys, "-V") == said(capsys, "--version") == f"indexd {__version__}\n"


SECONDS = 60


#: What is typed -> what may be typed on with, "..." for more than is written here.
ASKED = {
    "indexd kaf": {"kafka"},
    "indexd kafka ": {"check", "rebuild"},
    "indexd --data DIR kafka che": {"check"},
    "indexd --log-level de": {"debug"},
    "indexd --recover --json query-k": {"query-key"},
    "indexd status --wat": {"--watch"},
    "indexd status --watch 2 --js": {"--json"},
    "indexd status --watch --js": {"--json"},
    "indexd query-key --mode rocketmq --index-type ": {"K", "U", "T"},
    "indexd run --verify-crc t": {"true"},
    "indexd run --http o": {"off"},
    "indexd status --http o": {"off"},
    "indexd completion z": {"zsh"},
    "indexd kafka check --data": set(),
    "indexd demo --dee": set(),
    "indexd bogus --dee": set(),
}


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The script of each shell, in a file."""
    folder = tmp_path_factory.mktemp("scripts")
    found = {shell: folder / f"indexd.{shell}" for shell in SHELLS}
    for shell, path in found.items():
        path.write_text(script(make_parser(), shell), "utf-8")
    return found


def run_shell(words: list[str], text: str, home: Path) -> str:
    """Standard output of a shell that reads ``text``; it may say nothing else."""
    environ = {"PATH": os.environ["PATH"], "HOME": str(home), "TERM": "xterm", "LC_ALL": "C.UTF-8"}
    done = subprocess.run(
        words, input=text, capture_output=True, encoding="utf-8", env=environ, timeout=SECONDS, cwd=home, check=False
    )
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("shell", SHELLS)
def test_the_command_prints_what_the_shell_takes(
    shell: str, scripts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need(shell)
    # A configuration that is wrong is nothing to it, nor is the terminal's width.
    monkeypatch.setenv("COLUMNS", "20")
    done = indexd_here("-c", "/none", "completion", shell)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.rstrip("\n") == scripts[shell].read_text("utf-8").rstrip("\n")
    assert run_shell([shell, "-n", str(scripts[shell])], "", tmp_path) == ""


def bash_answers(script: Path, home: Path, lines: list[str]) -> list[set[str]]:
    text = f"source {script}\n"
    text += 'ask() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()\n'
    text += '_shtab_indexd indexd "${@: -1}" "${@: -2:1}"; echo "@${COMPREPLY[*]}"; }\n'
    for line in lines:
        text += "ask " + " ".join(f"'{word}'" for word in line.split(" ")) + "\n"
    return [set(row[1:].split()) for row in run_shell(["bash", "--norc"], text, home).splitlines()]


def test_bash(scripts: dict[str, Path], tmp_path: Path) -> None:
    options = {name for action in PARSERS["run",]._actions for name in action.option_strings if name[:2] == "--"}
    asked = ASKED | {"indexd ": {path[0] for path in PARSERS if path}, "indexd run --": options}
    assert dict(zip(asked, bash_answers(scripts["bash"], tmp_path, list(asked)), strict=True)) == asked


def test_fish(scripts: dict[str, Path], tmp_path: Path) -> None:
    shell = need("fish")
    (tmp_path / "my-data").mkdir()
    asked = ASKED | {"indexd status --data my-d": {"my-data/"}, "indexd query-key --mode=r": {"--mode=rocketmq"}}
    text = f"source {scripts['fish']}\n" + "".join(f"echo @@; complete -C '{line}'\n" for line in asked)
    answers = run_shell([shell, "--no-config"], text, tmp_path).split("@@\n")[1:]
    found = [{row.split("\t")[0] for row in answer.splitlines()} for answer in answers]
    assert dict(zip(asked, found, strict=True)) == asked


def test_zsh(scripts: dict[str, Path], tmp_path: Path) -> None:
    shell = need("zsh")
    (tmp_path / "my-data").mkdir()
    typed = {line: f"{line.rpartition(' ')[0]} {next(iter(ends))}" for line, ends in ASKED.items() if len(ends) == 1}
    typed |= {line: line for line, ends in ASKED.items() if not ends}
    # zsh takes the slash away again where the line ends.
    typed |= {
        "indexd status --data my-d": "indexd status --data my-data",
        "indexd inspect my-d": "indexd inspect my-data",
        # An option of the program is completed as the program has it; a value that may be left out is waited for.
        "indexd status --http o": "indexd status --http off",
        "indexd status --watch --js": "indexd status --watch --js",
        "indexd query-key --mode exact --index-t": "indexd query-key --mode exact --index-type",
    }
    setup = f'autoload -Uz compinit; compinit -u -D; LISTMAX=10000; eval "$(<{scripts["zsh"]})"'
    found = type_lines([shell, "-f", "-i"], setup, tmp_path, list(typed), "print -r --")
    assert dict(zip(typed, (line.rstrip() for line in found), strict=True)) == typed
    # The same as a file of $fpath, which is run when it is first needed.
    (tmp_path / "_indexd").write_text(scripts["zsh"].read_text("utf-8"))
    setup = f"fpath=({tmp_path} $fpath); autoload -Uz compinit; compinit -u -D"
    assert type_lines([shell, "-f", "-i"], setup, tmp_path, ["indexd kaf"] * 2, "print -r --") == ["indexd kafka"] * 2


def type_lines(words: list[str], setup: str, home: Path, lines: list[str], echo: str) -> list[str]:
    """What becomes of each line when Tab is pressed behind it, in a terminal."""
    terminal, end = pty.openpty()
    environ = {"PATH": os.environ["PATH"], "HOME": str(home), "TERM": "dumb", "LC_ALL": "C.UTF-8", "PS1": ""}
    shell = subprocess.Popen(words, stdin=end, stdout=end, stderr=end, env=environ, cwd=home, close_fds=True)
    os.close(end)
    os.set_blocking(terminal, False)
    results, seen, until = home / "results", b"", time.monotonic() + SECONDS
    results.write_text("")
    try:
        os.write(terminal, f"{setup}\n".encode())
        for number, line in enumerate(lines, 1):
            # To the begin and to the end of the line: what stands there is written down instead of being run.
            os.write(terminal, f"{line}\t\x01{echo} '\x05' >> {results}\n".encode())
            while results.read_text().count("\n") < number:
                with contextlib.suppress(BlockingIOError):
                    seen += os.read(terminal, 65536)
                assert time.monotonic() < until, seen[-2000:]
                time.sleep(0.01)
        return [row.strip() for row in results.read_text().splitlines()]
    finally:
        shell.kill()
        shell.wait()
        os.close(terminal)
