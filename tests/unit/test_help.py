"""Help is one screen, and says the rest when it is asked to."""

from __future__ import annotations

import pytest

from indexd import __version__
from indexd.cli.completion import parsers_of
from indexd.cli.main import main, make_parser
from indexd.config import KEYS, flag_name

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
def test_help_is_one_screen_with_all_of_the_commands_own_options(
    capsys: pytest.CaptureFixture[str], path: tuple[str, ...]
) -> None:
    out = said(capsys, *path, "--help")
    lines = out.splitlines()
    assert len(lines) <= SCREEN_LINES
    assert max(map(len, lines)) <= SCREEN_COLUMNS
    names = {name for action in PARSERS[path]._actions for name in action.option_strings}
    settings = {flag_name(key) for key in KEYS}
    assert [name for name in sorted(names - settings) if name not in out] == []
    assert all(below[-1] in out for below in PARSERS if below[:-1] == path and below)
    if "--data" in names:
        assert "--store PATH" in out
        assert "--data PATH" in out
        assert "--mqtt-host" not in out
    assert said(capsys, "help", *path) == out


@pytest.mark.parametrize("path", PARSERS, ids=" ".join)
def test_help_all_shows_the_rest(capsys: pytest.CaptureFixture[str], path: tuple[str, ...]) -> None:
    out = said(capsys, *path, "--help-all")
    names = {name for action in PARSERS[path]._actions for name in action.option_strings}
    assert [name for name in names if name not in out] == []
    assert out != said(capsys, *path, "--help") or "--data" not in out


def test_whom_status_asks_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--http HOST:PORT        the daemon to ask" in said(capsys, "status", "--help")


def test_what_has_to_be_given_is_in_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for command, usage in (
        ("inspect", "usage: indexd inspect [OPTION ...] PATH [PATH ...]"),
        ("message", "usage: indexd message [OPTION ...] (-i ID | -o OFFSET)"),
        ("query-offset", "usage: indexd query-offset [OPTION ...] -t TOPIC -i QUEUE -o OFFSET"),
    ):
        assert said(capsys, command, "-h").splitlines()[0] == usage


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "-V") == said(capsys, "--version") == f"indexd {__version__}\n"
