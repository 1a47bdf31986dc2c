"""The flags: one for every configuration key, on every command, plus what a command adds itself."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from indexd.config import KEYS, SECTIONS, flag_name
from indexd.errors import UsageError


class Parser(argparse.ArgumentParser):
    """argparse whose complaints are UsageErrors: one line, like every other error."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage and exiting."""
        raise UsageError(message, f"see {self.prog} --help")


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
    commands: Any, name: str, parents: Sequence[argparse.ArgumentParser], text: str
) -> argparse.ArgumentParser:
    """A sub-command whose first help line is ``text``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, parents=list(parents), help=text, description=text, formatter_class=argparse.HelpFormatter
    )
    return parser
