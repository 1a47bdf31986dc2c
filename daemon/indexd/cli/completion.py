"""completion: prints a script that completes indexd's words in bash, zsh or fish, made by shtab from argparse's data.

The scripts are static: to complete a word starts no Python.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from indexd.cli.output import add_command, print_line
from indexd.config import KEYS

SHELLS = ("bash", "zsh", "fish")
_PATH = re.compile(r"PATH|FILE|DIR")
_WORD = re.compile(r"[a-z0-9][a-z0-9.+-]*")


def register(commands: Any) -> None:
    """Add the command. It has no configuration keys: it prints what they are."""
    parser = add_command(
        commands, "completion", [], "print a script that completes indexd's words: for bash, zsh or fish"
    )
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help="bash, zsh or fish")


def completion(args: argparse.Namespace, program: argparse.ArgumentParser) -> int:
    """Print the script of all that ``program`` takes."""
    print_line(script(program, args.shell))
    return 0


def script(program: argparse.ArgumentParser, shell: str) -> str:
    """The script for one shell."""
    import shtab  # noqa: PLC0415 - no other command loads it

    for _, parser in parsers_of(program):
        for action in parser._actions:  # argparse has no other list of them
            _describe(action, shtab.FILE)
            if shell == "zsh" and isinstance(action.metavar, str):
                action.metavar = action.metavar.replace(":", " ")  # what zsh separates the parts by
    return shtab.complete(program, shell)


def parsers_of(
    parser: argparse.ArgumentParser, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """The program, ``()``, and every command below it with its words."""
    yield path, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from parsers_of(below, (*path, name))


def _describe(action: argparse.Action, file: Any) -> None:
    # What shtab cannot know: which values are paths, and the words of a setting such as exact|rocketmq.
    value = str(action.metavar or action.dest.upper())
    takes_value = action.nargs in (None, "+") or (isinstance(action.nargs, int) and action.nargs > 0)
    if action.help:
        action.help = action.help.split(" (default:")[0]
    if takes_value and (action.type is Path or _PATH.match(value)):
        action.complete = file  # type: ignore[attr-defined]  # shtab's own attribute
    elif action.choices is None and action.dest in KEYS and "|" in value:
        action.choices = [word for word in value.split("|") if _WORD.fullmatch(word)] or None
