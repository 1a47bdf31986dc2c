"""Standard output: words for people, one JSON object a line for programs.

How far a rebuild is: bytes, rate and time left, on standard error when that is a terminal.

The flags: one for every configuration key, on every command, plus what a command adds itself; and their help.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

from indexd.config import KEYS, SECTIONS, flag_name
from indexd.config.units import printable
from indexd.errors import UsageError

_LONE = re.compile("[\ud800-\udfff]")


def print_json(row: dict[str, Any]) -> None:
    """One object, one line; text in any script stays readable where standard output is UTF-8.

    A file's name that is no UTF-8 makes the whole line ASCII: a lone surrogate for each such byte, as ``os.fsencode``
    takes it back.
    """
    is_utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    line = json.dumps(row, ensure_ascii=not is_utf8, separators=(",", ":"))
    if _LONE.search(line):
        line = json.dumps(row, separators=(",", ":"))
    sys.stdout.write(line + "\n")


def print_line(text: str = "") -> None:
    """One line of words; a lone surrogate or what the terminal cannot show becomes an escape."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")


def until_reader_leaves() -> suppress:
    """For what is said when all is done: whoever reads may have enough of it, and the exit code stays what it is."""
    return suppress(BrokenPipeError)


def show_time(millis: int) -> str:
    """A time in ms as local time with its zone, or the bare number if no clock can show it."""
    try:
        local = time.localtime(millis // 1000)
        return f"{time.strftime('%Y-%m-%d %H:%M:%S', local)}.{millis % 1000:03d} {time.strftime('%Z', local)}"
    except (OverflowError, OSError, ValueError):
        return str(millis)


def show_bytes(size: float) -> str:
    """A size with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


# No thread of its own, which there may be no memory for.
tqdm.monitor_interval = 0


class ProgressBar:
    """A bar of bytes; shows nothing when standard error is no terminal."""

    def __init__(self, text: str) -> None:
        self._bar = tqdm(
            desc=text, unit="B", unit_scale=True, unit_divisor=1024, file=sys.stderr, disable=not sys.stderr.isatty()
        )

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def to(self, done: int, total: int) -> None:
        """``done`` of ``total`` bytes."""
        self._bar.total = max(total, done)
        self._bar.update(done - self._bar.n)


_EVERYWHERE = ("help", "help_all", "config", "json")


class Parser(argparse.ArgumentParser):
    """argparse whose complaints are UsageErrors, one line like every other error, and whose help is one screen."""

    #: The configuration keys whose flags ``--help`` shows; ``--help-all`` shows all.
    shown_keys: frozenset[str] = frozenset({"store", "data", "broker_conf"})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)
        if self.add_help:
            text = "show this help with every setting and exit"
            self.add_argument("--help-all", action=_HelpAll, nargs=0, default=argparse.SUPPRESS, help=text)

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage and exiting."""
        raise UsageError(message, f"see {self.prog} --help")

    def print_help(self, file: Any = None) -> None:
        """The command's own options, and of the settings ``shown_keys`` alone; ``format_help`` has all."""
        groups = [group for group in self._mutually_exclusive_groups if group.required]
        needed = [action for group in groups for action in group._group_actions]
        usage = [each for each in self._actions if each.required or not each.option_strings or each in needed]
        formatter = argparse.HelpFormatter(f"{self.prog} [OPTION ...]", max_help_position=28)
        formatter.add_usage(None, usage, groups)
        formatter.add_text(self.description)
        sections: dict[str, list[argparse.Action]] = {}
        for group in self._action_groups:
            for action in group._group_actions:
                if action.dest not in KEYS and action.dest not in _EVERYWHERE:
                    sections.setdefault(group.title or "", []).append(action)
        shared = [action for action in self._actions if action.dest in self.shown_keys or action.dest in _EVERYWHERE]
        for title, actions in (*sections.items(), ("options of every command", map(_shortened, shared))):
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        formatter.add_text(self.epilog)
        self._print_message(formatter.format_help(), file or sys.stdout)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if not isinstance(action, argparse._SubParsersAction) or value in action.choices:
            return super()._check_value(action, value)
        close = get_close_matches(value, action.choices) or [each for each in action.choices if each.startswith(value)]
        hint = f"did you mean {' or '.join(close)}?" if close else f"its commands are {', '.join(action.choices)}"
        raise UsageError(f"{self.prog} has no command {printable(value)!r}", hint)


class _HelpAll(argparse.Action):
    """``--help-all``."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser._print_message(parser.format_help(), sys.stdout)
        parser.exit()


def _shortened(action: argparse.Action) -> argparse.Action:
    # One line of what a setting is; what there is to add, --help-all says.
    key = KEYS.get(action.dest)
    if key is None or not (action.help or "").startswith(key.description):
        return action
    short = copy.copy(action)
    short.help = first_clause(key.description)
    return short


def first_clause(text: str) -> str:
    """What stands before the first comma, colon or semicolon."""
    return re.split("[,:;] ", text)[0]


def common_options() -> Parser:
    """The parent parser of every command: -c, --json and a flag for each key."""
    # Without defaults: those of a sub-command would overwrite what was given before it.
    parser = Parser(add_help=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("-c", "--config", metavar="FILE", help="indexd's configuration (TOML)")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of words")
    for section in SECTIONS:
        group = parser.add_argument_group(f"configuration keys of [{section}]")
        for key, info in KEYS.items():
            if info.section == section:
                text = f"{info.description} (default: {info.default})".replace("%", "%%")
                kind = info.type if "|" in info.type else info.type.upper().replace(" ", "_")
                action = "append" if info.repeats else "store"
                group.add_argument(flag_name(key), dest=key, metavar=kind, help=text, action=action)
    return parser


def given_flags(args: argparse.Namespace) -> dict[str, str | list[str] | None]:
    """The configuration keys that the command line gave."""
    return {key: getattr(args, key, None) for key in KEYS}


def config_file(args: argparse.Namespace) -> Path | None:
    """What -c named."""
    return Path(args.config) if getattr(args, "config", None) else None


def wants_json(args: argparse.Namespace) -> bool:
    """Whether --json was given."""
    return bool(getattr(args, "json", False))


def add_command(
    commands: Any, name: str, parents: Sequence[argparse.ArgumentParser], text: str, shows: Collection[str] = ()
) -> Parser:
    """A sub-command described by ``text``; ``shows``: keys that its help shows beside the usual ones."""
    parser: Parser = commands.add_parser(name, parents=list(parents), help=first_clause(text), description=text)
    parser.shown_keys = parser.shown_keys.union(shows)
    return parser
