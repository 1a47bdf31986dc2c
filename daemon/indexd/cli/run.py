"""run, --recover and rebuild. What needs the compiler is imported when it is called: queries share this program."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

from indexd.cli.compiler import prepare_compiler
from indexd.cli.options import Parser, add_command, config_file, given_flags, wants_json
from indexd.cli.output import print_json, print_line, show_bytes
from indexd.config import Config, load
from indexd.storage.disk import Disk


def register(commands: Any, common: Parser) -> None:
    """Add the commands."""
    add_command(commands, "run", [common], "follow the store and keep its index (the default)").set_defaults(
        function=run
    )
    parser = add_command(commands, "rebuild", [common], "build a whole data directory from the commitlog")
    parser.add_argument("--out", required=True, metavar="DIR", help="where to: an empty directory or none")
    parser.add_argument("--only", choices=["index"], help="build this output alone")
    parser.set_defaults(function=rebuild)


def run(args: argparse.Namespace, config: Config) -> int:
    """Run until a signal says stop."""
    prepare_compiler()
    from indexd.service import run_daemon  # noqa: PLC0415 - loads numba

    run_daemon(config, lambda: load(given_flags(args), config_file(args), os.environ))
    return 0


def recover(args: argparse.Namespace, config: Config) -> int:
    """Verify and mend the data directory, catch up with the log, and say what was done."""
    prepare_compiler()
    from indexd.service import recover_now  # noqa: PLC0415 - loads numba

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


def rebuild(args: argparse.Namespace, config: Config) -> int:
    """Build --out from the store."""
    process_started = time.monotonic()
    prepare_compiler()
    from indexd.cli.progress import ProgressBar  # noqa: PLC0415 - queries need no bar
    from indexd.recovery.rebuild import rebuild as build  # noqa: PLC0415 - loads numba

    with ProgressBar("rebuild") as bar:
        result = build(config, Disk(), Path(args.out), bar.to)
    if wants_json(args):
        print_json(
            {
                "out": args.out,
                "messages": result.messages,
                "entries": result.entries,
                "bytes": result.bytes,
                "seconds": round(result.seconds, 6),
                "processSeconds": round(time.monotonic() - process_started, 6),
                "files": result.files,
                "beginOffset": result.begin_offset,
                "phyOffset": result.phy_offset,
                "skippedBytes": result.skipped_bytes,
                "leftOutMessages": result.left_out_messages,
                "unreadableAt": result.unreadable and result.unreadable.offset,
            }
        )
        return 0
    rate = result.messages / result.seconds if result.seconds else 0
    print_line(
        f"{args.out}: {result.messages} messages, {result.entries} entries in {result.files} index files, "
        f"{show_bytes(result.bytes)} of log in {result.seconds:.2f} s ({rate:,.0f} messages/s)"
    )
    if result.skipped_bytes:
        print_line(
            f"{result.skipped_bytes} bytes of the log were passed over: see the uncovered ranges in {args.out}/frontier"
        )
    if result.left_out_messages:
        print_line(
            f"{result.left_out_messages} messages have no place in a ConsumeQueue: their topics have batch queues or "
            "are no folder's name, or --queues-max was reached"
        )
    if result.unreadable is not None:
        print_line(
            f"the log ends at offset {result.unreadable.offset} in bytes that are no frame: {result.unreadable.reason}"
        )
    return 0
