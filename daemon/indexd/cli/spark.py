"""doctor, export and stats, which run on Spark, and the session of Spark for every command that can.

What needs Spark or the compiler is imported when it is called: they are optional, or take a second.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from contextlib import AbstractContextManager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from indexd import __version__
from indexd.cli.output import (
    EXIT_FINDINGS,
    Parser,
    ProgressBar,
    add_command,
    count64,
    print_json,
    print_line,
    some_name,
    typed,
    until_reader_leaves,
    values,
    wants_json,
)
from indexd.config import Config, flag_name, parse_millis
from indexd.config.compiled import prepare_compiler
from indexd.config.load import check_outside
from indexd.config.units import parse_count, parse_path, parse_place, printable
from indexd.errors import UsageError
from indexd.pages.wording import show_size
from indexd.query.message import TIME_MAX, TIME_MIN
from indexd.query.questions import check_times
from indexd.storage.disk import OutputDisk

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from indexd.spark.export import Exported, ExportRequest
    from indexd.spark.session import SparkOptions

_PLACES = ("master", "remote", "conf")
_PACKAGES = ("pyspark", "pandas", "pyarrow", "numpy", "numba")
_INSTALL = "pip install 'rocketmq-indexd[spark]'"
_COMPRESSIONS = ("zstd", "snappy", "none")
_MODES = ("error", "overwrite")


def register(commands: Any, common: Parser) -> None:
    """Add the commands."""
    text = "say what Spark would run with: which Java, Python and packages, and what is missing"
    add_command(commands, "doctor", [common], text, function=doctor)
    _add_export(commands, common)
    text = "count what is in the log: topics, keys, sizes, clock"
    parser = add_command(commands, "stats", [common], text, function=stats)
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
    parser.add_argument("--quick", action="store_true", help="changes nothing: the log is always read once")
    parser.add_argument(
        "--report", type=typed(parse_path), metavar="FILE.html", help="also write a page with plots, for a browser"
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(some_name(word.strip()) for word in text.split(","))


def _add_export(commands: Any, common: Parser) -> None:
    parser = add_command(commands, "export", [common], "write messages as Parquet files, on Spark", function=export)
    parser.add_argument(
        "--to",
        type=typed(parse_place),
        required=True,
        metavar="DIR",
        help="a directory, or a URI such as s3://bucket/directory",
    )
    parser.add_argument("--format", choices=["parquet"], default="parquet", help="what is written (default: parquet)")
    parser.add_argument("--topics", type=_names, metavar="A,B", help="messages of these topics alone, by comma")
    parser.add_argument(
        "--columns", metavar="A,B", help="these columns alone, by comma; * is all (default: all but body)"
    )
    parser.add_argument("--body", action="store_true", help="the column body, too")
    parser.add_argument(
        "--partition-by",
        type=_names,
        default=(),
        metavar="topic,day",
        help="directories topic=NAME, day=YYYY-MM-DD (UTC, of the store time)",
    )
    parser.add_argument("-b", "--begin", type=count64, metavar="MS", help="first store time (default: none)")
    parser.add_argument("-e", "--end", type=count64, metavar="MS", help="last store time (default: none)")
    parser.add_argument("--compression", choices=_COMPRESSIONS, default="zstd", help="of the files (default: zstd)")
    parser.add_argument(
        "--max-records-per-file",
        type=count64,
        default=0,
        metavar="N",
        help="messages of a file, at most (default: all that a task has for it)",
    )
    parser.add_argument(
        "--mode",
        choices=_MODES,
        default="error",
        help="when DIR holds an export: stop, or replace it (default: error)",
    )


def uses_spark(config: Config) -> bool:
    """Whether rebuild or audit is to run on Spark; UsageError for a flag that says where and no word that it is to."""
    if config.spark.engine == "spark":
        return True
    for key in _PLACES:
        if config.provenance.get(key) == flag_name(key):
            raise UsageError(f"{flag_name(key)} is for Spark, and the engine is this process", "add --engine spark")
    return False


def spark_options(config: Config) -> SparkOptions:
    """Where the configuration's jobs run."""
    from indexd.spark.session import SparkOptions  # noqa: PLC0415 - no other command loads the package

    keys = config.spark
    return SparkOptions(keys.master, keys.remote, keys.conf, keys.java_home)


def spark_session(config: Config, app: str, memory: str = "1g") -> AbstractContextManager[SparkSession]:
    """A session, as :func:`indexd.spark.session.open_session` makes it, the kernels' cache being known by then."""
    prepare_compiler()
    from indexd.spark.session import open_session  # noqa: PLC0415 - no other command loads the package

    return open_session(spark_options(config), app, memory=memory)


def _check_places(config: Config, path: Path | None, flag: str) -> None:
    # What is wrong with these need not wait for a session.
    prepare_compiler()
    from indexd.recovery.open import check_store  # noqa: PLC0415 - loads numba

    check_store(config)
    if path is not None:
        check_outside(config, path, flag)


# --- doctor


def doctor(args: argparse.Namespace, config: Config) -> int:
    """Look and say; 1 if a job could not be started from here."""
    report = examine(config)
    with until_reader_leaves():
        if wants_json(args):
            print_json(report)
        else:
            for name, value in report.items():
                if name not in ("problems", "usable"):
                    print_line(f"{name:<13} {printable(values(value) if isinstance(value, dict) else str(value))}")
            for line in report["problems"]:
                print_line(f"missing: {printable(line)}")
            print_line("Spark can be used" if report["usable"] else "Spark cannot be used")
    return 0 if report["usable"] else EXIT_FINDINGS


def examine(config: Config) -> dict[str, Any]:
    """Everything that is said, under its names in --json; ``problems`` are those that keep a job from starting."""
    prepare_compiler()
    from indexd.spark.session import (  # noqa: PLC0415 - no other command loads it
        INSTALL_HINT,
        JAVA_MIN,
        choose_java,
        missing_packages,
    )

    spark, java = config.spark, dict[str, Any]()
    conf, worker = dict(spark.conf), "the server's"
    problems = [f"{name} is not installed: {_INSTALL}" for name in missing_packages(spark.remote is not None)]
    if spark.remote is None:
        chosen, passed_over = choose_java(spark.java_home, os.environ)
        if chosen is None:
            problems.append(f"there is no Java {JAVA_MIN} or newer: {INSTALL_HINT}")
        else:
            java = {"home": str(chosen.home), "version": chosen.version, "from": chosen.source}
        java["passedOver"] = passed_over
        is_local = spark.master.startswith("local")
        worker = sys.executable if is_local else os.environ.get("PYSPARK_PYTHON", "python3 of each executor")
        worker = conf.get("spark.pyspark.python", worker)
        keys = ("spark.pyspark.python", "spark.pyspark.driver.python") if is_local else ()
        wrong = [key for key in keys if key in conf and shutil.which(conf[key]) is None]
        problems += [f"{key} is {conf[key]}, which is no program that can be started" for key in wrong]
    cache = Path(os.environ["NUMBA_CACHE_DIR"])
    return {
        "indexd": __version__,
        "runsOn": spark.remote or spark.master,
        "java": java or None,
        "python": {"version": ".".join(map(str, sys.version_info[:3])), "executable": sys.executable},
        "workerPython": worker,
        "packages": {name: _version(name) for name in _PACKAGES},
        # Else it is this process's own, for want of another: each one compiles anew, which takes seconds.
        "compiled": {"directory": str(cache), "writable": not cache.name.startswith("indexd-compiled-")},
        "problems": problems,
        "usable": not problems,
    }


def _version(name: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(name)
    return None


# --- export


def export(args: argparse.Namespace, config: Config) -> int:
    """Export the store to --to."""
    _check_places(config, args.to, "--to")
    with suppress(ImportError):  # which package is missing, the session says
        request = _export_request(args, config)
    with spark_session(config, "indexd export", memory="4g") as spark, ProgressBar("export") as bar:
        from indexd.spark.export import export as run  # noqa: PLC0415 - loads pyspark and pyarrow, which are optional

        found = run(spark, config, request, bar.to)
    if wants_json(args):
        print_json(_export_row(found, args.mode, str(args.to)))
    else:
        _print_export(found, str(args.to))
    return 0


def _export_request(args: argparse.Namespace, config: Config) -> ExportRequest:
    from indexd.spark.export import ExportRequest, check_request  # noqa: PLC0415 - the same
    from indexd.spark.source.columns import parse_columns  # noqa: PLC0415 - loads pyarrow, which is optional

    columns = parse_columns(args.columns)
    if args.body and "body" not in columns:
        columns += ("body",)
    request = ExportRequest(
        to=args.to,
        mode=args.mode,
        columns=columns,
        topics=None if args.topics is None else frozenset(args.topics),
        begin=args.begin,
        end=args.end,
        compression=args.compression,
        partition_by=args.partition_by,
        max_records_per_file=args.max_records_per_file,
        split_size=config.spark.split_size or None,
    )
    check_request(request)
    return request


def _export_row(found: Exported, mode: str, to: str) -> dict[str, Any]:
    return {
        "to": to,
        "mode": mode,
        "rows": found.rows,
        "files": found.files,
        "bytes": found.bytes,
        "partitions": found.partitions,
        "beginOffset": found.begin_offset,
        "endOffset": found.end_offset,
        "missingTopics": list(found.missing_topics),
        "seconds": round(found.seconds, 6),
    }


def _print_export(found: Exported, to: str) -> None:
    rate = found.rows / found.seconds if found.seconds else 0
    words = f"{found.rows:,} messages"
    if found.files is not None:
        words += f" in {found.files:,} files of {show_size(found.bytes or 0)}"
    if found.partitions is not None and found.partitions > 1:
        words += f" in {found.partitions:,} partitions"
    print_line(f"{printable(to)}: {words}, in {found.seconds:.2f} s ({rate:,.0f} messages/s)")
    print_line(f"  of log bytes {found.begin_offset} to {found.end_offset}")
    for topic in found.missing_topics:
        print_line(f"  no message of the topic {printable(topic)}")


# --- stats


def stats(args: argparse.Namespace, config: Config) -> int:
    """Count, and show what was found."""
    _check_places(config, args.report, "--report")
    begin = TIME_MIN if args.begin is None else args.begin
    end = TIME_MAX if args.end is None else args.end
    check_times(begin, end)
    with spark_session(config, "indexd stats") as spark, ProgressBar("stats") as bar:
        from indexd.spark.stats.content import Selection  # noqa: PLC0415 - pyspark is optional
        from indexd.spark.stats.report import collect  # noqa: PLC0415 - pyspark is optional

        selection = Selection(tuple(args.topic), begin, end, args.silence)
        report = collect(spark, config, selection, top=args.top, progress=bar.to)
    from indexd.spark.stats.show import print_report, write_page  # noqa: PLC0415 - no other command loads them

    if args.report is not None:
        write_page(report, OutputDisk(), args.report, args.top)
    if wants_json(args):
        print_json(report)
        return 0
    print_report(report, args.top)
    if args.report is not None:
        print_line(f"written: {printable(str(args.report))}")
    return 0
