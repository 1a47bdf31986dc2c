"""The command ``stats``: counts on Spark what is in the log, and shows it on the terminal, as JSON or as a page."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from indexd.cli.output import (
    Parser,
    ProgressBar,
    add_command,
    count64,
    print_json,
    print_line,
    some_name,
    typed,
    wants_json,
)
from indexd.cli.rebuild import spark_session
from indexd.config import Config, parse_millis
from indexd.config.compiled import prepare_compiler
from indexd.config.load import check_outside
from indexd.config.units import parse_count, printable
from indexd.errors import UsageError
from indexd.query.message import TIME_MAX, TIME_MIN
from indexd.query.questions import check_times
from indexd.storage.disk import OutputDisk

if TYPE_CHECKING:
    from indexd.spark.stats.report import Report

_STAGES = {"count": "counting", "hot keys": "counting hot keys", "chains": "measuring chains"}


def register(commands: Any, common: Parser) -> None:
    """Add the command."""
    parser = add_command(commands, "stats", [common], "count what is in the log: topics, keys, sizes, clock, chains")
    parser.add_argument(
        "-t", "--topic", type=some_name, action="append", default=[], help="only this topic; may be given again"
    )
    parser.add_argument("-b", "--begin", type=count64, metavar="MS", help="first store time (default: none)")
    parser.add_argument("-e", "--end", type=count64, metavar="MS", help="last store time (default: none)")
    parser.add_argument(
        "--top", type=typed(parse_count, 1, 1000), default=20, metavar="N", help="how many of each list (default: 20)"
    )
    parser.add_argument(
        "--silence",
        type=typed(parse_millis, 1),
        default=60_000,
        metavar="TIME",
        help="so long without a message is one (default: 60s)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="read the log once: no chains, hot keys of a large log not recounted"
    )
    parser.add_argument("--report", metavar="FILE.html", help="also write a page with plots, for a browser")
    parser.set_defaults(function=stats)


def stats(args: argparse.Namespace, config: Config) -> int:
    """Count, and show what was found."""
    prepare_compiler()
    from indexd.recovery.open import check_store  # noqa: PLC0415 - loads numba

    # What is wrong with these need not wait for a session.
    check_store(config)
    if args.report is not None:
        if "://" in args.report:
            raise UsageError(
                f"--report {printable(args.report)} is no path of this machine", "write it here, and copy it there"
            )
        check_outside(config, Path(args.report), "--report")
    begin = args.begin if args.begin is not None else TIME_MIN
    end = args.end if args.end is not None else TIME_MAX
    check_times(begin, end)
    report = _collected(args, config, begin, end)
    from indexd.spark.stats.show import print_report, write_page  # noqa: PLC0415 - rich and jinja2 are optional

    if args.report is not None:
        write_page(report, OutputDisk(), Path(args.report), args.top)
    if wants_json(args):
        print_json(report.model_dump(by_alias=True))
        return 0
    print_report(report, args.top)
    if args.report is not None:
        print_line(f"written: {printable(args.report)}")
    return 0


def _collected(args: argparse.Namespace, config: Config, begin: int, end: int) -> Report:
    with spark_session(config, "indexd stats") as spark, ExitStack() as stack:
        from indexd.spark.stats.content import Selection  # noqa: PLC0415 - pyspark is optional
        from indexd.spark.stats.report import collect  # noqa: PLC0415 - pyspark is optional

        def progress(stage: str) -> Callable[[int, int], None]:
            stack.close()  # the bar of the stage before
            return stack.enter_context(ProgressBar(_STAGES[stage])).to

        selection = Selection(tuple(args.topic), begin, end, args.silence)
        return collect(spark, config, selection, top=args.top, quick=args.quick, progress=progress)
