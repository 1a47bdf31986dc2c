"""run and --recover. What needs the compiler is imported when it is called: queries share this program."""

from __future__ import annotations

import argparse
import os
from typing import Any

from indexd.cli.output import Parser, add_command, config_file, given_flags, print_json, print_line, wants_json
from indexd.config import Config, load
from indexd.config.compiled import prepare_compiler


def register(commands: Any, common: Parser) -> None:
    """Add the command."""
    add_command(commands, "run", [common], "follow the store and keep its index (the default)", ["http"]).set_defaults(
        function=run
    )


def run(args: argparse.Namespace, config: Config) -> int:
    """Run until a signal says stop."""
    prepare_compiler()
    from indexd.service.start import run_daemon  # noqa: PLC0415 - loads numba

    run_daemon(config, lambda: load(given_flags(args), config_file(args), os.environ))
    return 0


def recover(args: argparse.Namespace, config: Config) -> int:
    """Verify and mend the data directory, catch up with the log, and say what was done."""
    prepare_compiler()
    from indexd.service.recovering import recover_now  # noqa: PLC0415 - loads numba

    report = recover_now(config)
    if wants_json(args):
        print_json(report)
        return 0
    print_line(f"{config.store.data}: {'; '.join(report['reasons'])}")
    print_line(f"  kept      {report['keptEntries']} entries in {report['keptFiles']} files")
    print_line(f"  dropped   {report['droppedEntries']} entries, {len(report['deletedFiles'])} files removed")
    print_line(f"  rewritten {len(report['rewrittenFiles'])} files whose slots or header did not hold")
    if report["refilledBytes"]:
        print_line(f"  filled    queues and sparse indexes from {report['refilledBytes']} bytes of log")
    print_line(f"  rebuilt   {report['rebuiltEntries']} entries of {report['rebuiltMessages']} messages from the log")
    print_line(f"  covered   log bytes {report['beginOffset']} to {report['phyOffset']}")
    if report["unreadableAt"] is not None:
        print_line(f"  the log ends at offset {report['unreadableAt']} in bytes that are no frame")
    print_line(f"  took      {report['seconds']:.2f} s")
    return 0
