"""The command ``indexd audit``: a broker's own index held against its log, strictly read-only."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from indexd.cli.output import (
    EXIT_FINDINGS,
    Parser,
    ProgressBar,
    add_command,
    print_json,
    print_line,
    show_bytes,
    show_time,
    typed,
    until_reader_leaves,
    wants_json,
)
from indexd.cli.rebuild import spark_session, uses_spark
from indexd.config import Config
from indexd.config.compiled import prepare_compiler
from indexd.config.units import RemotePath, parse_count, parse_path, printable
from indexd.errors import UsageError
from indexd.storage.disk import OutputDisk
from indexd.storage.remote import disk_for

if TYPE_CHECKING:
    from indexd.audit import AuditOptions, AuditReport


def register(commands: Any, common: Parser) -> None:
    """Add the command."""
    text = "hold a broker's own index against its log, changing nothing"
    parser = add_command(commands, "audit", [common], text)
    parser.add_argument("--queues", action="store_true", help="hold the broker's ConsumeQueues against the log, too")
    parser.add_argument(
        "--samples",
        type=typed(parse_count, 0, 100_000),
        metavar="N",
        help="try the keys of so many messages in time ranges; 0: none",
    )
    parser.add_argument("--report", type=typed(parse_path), metavar="FILE", help="write it all down as one HTML page")
    parser.add_argument(
        "--resume",
        type=typed(parse_path),
        metavar="FILE",
        help="keep what is finished in FILE, and go on with it if it is there",
    )
    parser.set_defaults(function=audit)


def audit(args: argparse.Namespace, config: Config) -> int:
    """Compare STORE/index with the log; 1 if a key is not findable or something does not hold.

    Raises UsageError for a FILE that cannot be written there, before anything is read.
    """
    _check_places(args, config)
    page = args.report.resolve() if args.report is not None else None
    prepare_compiler()
    from indexd.audit.page import audit_page, lines  # noqa: PLC0415 - loads numba, for which all is prepared now

    report = _on_spark(args, config) if uses_spark(config) else _here(args, config)
    with until_reader_leaves():
        if wants_json(args):
            for row in report.rows():
                print_json(row)
        else:
            for line in lines(report, show_bytes, show_time):
                print_line(line)
    if page is not None:
        # The last thing done: what was found is on standard output, whatever becomes of the page.
        OutputDisk().write_atomically(page, audit_page(report).encode("utf-8"))
    return 0 if report.is_sound else EXIT_FINDINGS


def _check_places(args: argparse.Namespace, config: Config) -> None:
    if args.report is not None and args.resume is not None and args.report.resolve() == args.resume.resolve():
        raise UsageError(f"--report and --resume are the same file: {printable(str(args.report))}", "name two files")
    for option in ("report", "resume"):
        path: Path | None = getattr(args, option)
        if path is not None:
            what, place = f"--{option} {printable(str(path))}", path.resolve()
            roots = [root for root in (config.store.store, *config.store.commit_log_directories) if root is not None]
            if any(place.is_relative_to(root.resolve()) for root in roots if not isinstance(root, RemotePath)):
                raise UsageError(f"{what} lies in the store, where audit writes nothing", "name a file elsewhere")
            # A device, a pipe: it would be replaced, not written to.
            if os.path.lexists(place) and not place.is_file():
                kind = "is a directory" if place.is_dir() else "is no plain file"
                raise UsageError(f"{what} {kind}", "name a file, or a name that nothing has")
            if not place.parent.is_dir():
                raise UsageError(f"{what}: there is no directory {printable(str(place.parent))}", "make it first")
            if not os.access(place.parent, os.W_OK | os.X_OK):
                parent = printable(str(place.parent))
                raise UsageError(f"{what}: this user may not write to {parent}", "name a file elsewhere")


def _options(args: argparse.Namespace) -> AuditOptions:
    from indexd.audit import AuditOptions  # noqa: PLC0415 - loads numba

    options = AuditOptions(queues=args.queues, kept=args.resume, yields=True)
    return options if args.samples is None else replace(options, samples=args.samples)


def _here(args: argparse.Namespace, config: Config) -> AuditReport:
    from indexd.audit import audit_here, load_kernels  # noqa: PLC0415 - loads numba

    load_kernels(config)
    with ProgressBar("audit") as bar:
        return audit_here(config, disk_for(config), _options(args), bar.to)


def _on_spark(args: argparse.Namespace, config: Config) -> AuditReport:
    with spark_session(config, "indexd audit", has_other_engine=True) as spark:
        from indexd.spark.audit import audit_on_spark  # noqa: PLC0415 - loads pyspark, which is optional

        with ProgressBar("audit") as bar:
            return audit_on_spark(spark, config, _options(args), bar.to)
