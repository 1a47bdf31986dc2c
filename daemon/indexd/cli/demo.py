"""demo: a live log in, answers out, with a kill -9 on the way."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from indexd.cli.output import Parser, add_command, given_flags
from indexd.config import KEYS, Config, flag_name
from indexd.demo import default_work_directory, run_demo

# What the demo sets itself.
_OWN_KEYS = ("store", "data")


def register(commands: Any, common: Parser) -> None:
    """Add the command."""
    parser = add_command(commands, "demo", [common], "show the whole of indexd in under a minute, on a log of its own")
    parser.add_argument("--work", metavar="DIR", help="where everything is written (default: a new directory)")
    parser.set_defaults(function=demo)


def demo(args: argparse.Namespace, config: Config) -> int:
    """Run the demo, on --store if one is given."""
    flags: list[str] = []
    for key, value in given_flags(args).items():
        if value is not None and key in KEYS and key not in _OWN_KEYS:
            for each in value if isinstance(value, list) else [value]:
                flags += [flag_name(key), each]
    work = Path(args.work) if args.work else default_work_directory()
    run_demo(config.store.store, tuple(flags), work)
    return 0
