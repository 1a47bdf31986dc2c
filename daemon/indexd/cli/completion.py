"""completion: a script for bash, zsh or fish, made from the commands and options as they are.

The scripts are static: to complete a word starts no Python.
"""

from __future__ import annotations

import argparse
from typing import Any

from indexd.cli.options import add_command
from indexd.cli.output import print_line

SHELLS = ("bash", "zsh", "fish")


def register(commands: Any) -> None:
    """Add the command. It has no configuration keys: it prints what they are."""
    parser = add_command(
        commands, "completion", [], "print a script that completes indexd's words: for bash, zsh or fish"
    )
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help="bash, zsh or fish")


def completion(args: argparse.Namespace, program: argparse.ArgumentParser) -> int:
    """Print the script of all that ``program`` takes."""
    from indexd.cli.completion_scripts import SCRIPTS  # noqa: PLC0415 - texts that no other command needs
    from indexd.cli.completion_tree import commands_of  # noqa: PLC0415 - the same

    print_line(SCRIPTS[args.shell](list(commands_of(program))))
    return 0
