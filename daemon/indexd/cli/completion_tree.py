"""The commands and their options as a list, read off argparse's parsers."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from indexd.config import KEYS

_PATH = re.compile(r"PATH|FILE|DIR")
_WORD = re.compile(r"[a-z0-9][a-z0-9.+-]*")


@dataclass(frozen=True, slots=True)
class Option:
    """An option, or an argument without ``names``. Its value is one of ``words``, a path, or anything; or it has none.

    ``value`` is what help calls it. A value that may be left out is not waited for.
    """

    names: tuple[str, ...]
    text: str
    value: str
    takes_value: bool
    may_take_value: bool
    words: tuple[str, ...]
    is_path: bool


@dataclass(frozen=True, slots=True)
class Command:
    """What stands behind ``indexd``, ``()`` for the program itself; ``below`` are names and texts of its commands."""

    path: tuple[str, ...]
    options: tuple[Option, ...]
    below: tuple[tuple[str, str], ...]


def commands_of(parser: argparse.ArgumentParser, path: tuple[str, ...] = ()) -> Iterator[Command]:
    """The program and every command below it, each before those below it."""
    options: list[Option] = []
    below: dict[str, tuple[argparse.ArgumentParser, str]] = {}
    for action in parser._actions:  # argparse has no other list of them
        if isinstance(action, argparse._SubParsersAction):
            texts = {each.dest: each.help or "" for each in action._choices_actions}
            below = {name: (inner, texts.get(name, "")) for name, inner in action.choices.items()}
        elif action.help != argparse.SUPPRESS:
            options.append(_option(action))
    yield Command(path, tuple(options), tuple((name, text) for name, (_, text) in below.items()))
    for name, (inner, _) in below.items():
        yield from commands_of(inner, (*path, name))


def _option(action: argparse.Action) -> Option:
    value = str(action.metavar or action.dest.upper())
    words: tuple[str, ...] = ()
    if action.choices is not None:
        words = tuple(str(choice) for choice in action.choices)
    elif action.dest in KEYS and "|" in value:  # in HOST:PORT|off the word is off
        words = tuple(part for part in value.split("|") if _WORD.fullmatch(part))
    takes_value = action.nargs in (None, "+") or (isinstance(action.nargs, int) and action.nargs > 0)
    text = (action.help or "").replace("%%", "%").split(" (default:")[0]
    is_path = takes_value and (action.type is Path or _PATH.match(value) is not None)
    return Option(tuple(action.option_strings), text, value, takes_value, action.nargs == "?", words, is_path)
