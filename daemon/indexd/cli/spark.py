"""doctor, export and stats, which run on Spark, and the session of Spark for every command that can.

What needs Spark or the compiler is imported when it is called: they are optional, or take a second.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
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
    show_bytes,
    some_name,
    typed,
    until_reader_leaves,
    values,
    wants_json,
)
from indexd.config import Config, flag_name, parse_millis
from indexd.config.compiled import prepare_compiler
from indexd.config.load import check_outside
from indexd.config.units import parse_count, parse_place, printable
from indexd.errors import SparkMissingError, UsageError
from indexd.query.message import TIME_MAX, TIME_MIN
from indexd.query.questions import check_times
from indexd.storage.disk import OutputDisk

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from indexd.spark.export import Exported, ExportRequest
    from indexd.spark.session import SparkOptions
    from indexd.spark.stats.report import Report

_PLACES = ("master", "remote", "conf")
# What pyproject.toml asks for under [spark]; a part of the versions is enough to tell what does not work.
_Wanted = Mapping[str, tuple[tuple[int, ...], tuple[int, ...] | None]]  # name -> at least, and below
_NEEDED: _Wanted = {
    "pyspark": ((4, 2), (5,)),
    "pandas": ((2, 2), (3,)),
    "pyarrow": ((18,), None),
    "numpy": ((2,), None),
    "numba": ((0, 61), None),
}
_FOR_CONNECT: _Wanted = {
    "grpcio": ((1,), None),
    "grpcio-status": ((1,), None),
    "googleapis-common-protos": ((1,), None),
}
_FOR_PAGES: _Wanted = {"jinja2": ((3,), None), "rich": ((14,), None)}
_INSTALL = "pip install 'rocketmq-indexd[spark]'"
_NO_PROGRAM = "which is no program that can be started"
_COMPRESSIONS = ("zstd", "snappy", "none")
_MODES = ("error", "overwrite")
_STAGES = {"count": "counting", "chains": "measuring chains"}


def register(commands: Any, common: Parser) -> None:
    """Add the commands."""
    text = "say what Spark would run with: which Java, Python and packages, and what is missing"
    add_command(commands, "doctor", [common], text).set_defaults(function=doctor)
    _add_export(commands, common)
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
    parser.add_argument("--quick", action="store_true", help="read the log once: no chains")
    parser.add_argument("--report", metavar="FILE.html", help="also write a page with plots, for a browser")
    parser.set_defaults(function=stats)


def _add_export(commands: Any, common: Parser) -> None:
    parser = add_command(commands, "export", [common], "write messages as Parquet files, on Spark")
    parser.add_argument(
        "--to",
        type=typed(parse_place),
        required=True,
        metavar="DIR",
        help="a directory, or a URI such as s3://bucket/directory",
    )
    parser.add_argument("--format", choices=["parquet"], default="parquet", help="what is written (default: parquet)")
    parser.add_argument("--topics", metavar="A,B", help="messages of these topics alone, by comma")
    parser.add_argument(
        "--columns", metavar="A,B", help="these columns alone, by comma; * is all (default: all but body)"
    )
    parser.add_argument("--body", action="store_true", help="the column body, too")
    parser.add_argument(
        "--partition-by", metavar="topic,day", help="directories topic=NAME, day=YYYY-MM-DD (UTC, of the store time)"
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
    parser.set_defaults(function=export)


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


@contextmanager
def spark_session(
    config: Config,
    app: str,
    *,
    memory: str = "1g",
    warm: Callable[[], object] | None = None,
    has_other_engine: bool = False,
) -> Iterator[SparkSession]:
    """A session for the body, as :func:`indexd.spark.session.open_session`, the kernels' cache being known by then.

    `warm` compiles the kernels of the workers, or loads them: once here, while the JVM starts, in place of once in each
    of them at the same time. It is not called where the workers are on other machines. With `has_other_engine` the
    command can do without Spark, and says so where that is missing.
    """
    prepare_compiler()
    from indexd.spark.session import open_session  # noqa: PLC0415 - no other command loads the package

    options = spark_options(config)
    with ThreadPoolExecutor(1) as warming:
        warmed = warming.submit(warm) if warm is not None and options.is_local else None
        try:
            with open_session(options, app, memory=memory) as spark:
                if warmed is not None:
                    warmed.result()
                yield spark
        except SparkMissingError as error:
            error.hint += ", or give --engine process" if has_other_engine else ""
            raise


# --- doctor


def doctor(args: argparse.Namespace, config: Config) -> int:
    """Look and say; 1 if a job could not be started from here."""
    report = examine(config)
    with until_reader_leaves():
        if wants_json(args):
            print_json(report)
            return 0 if report["usable"] else EXIT_FINDINGS
        for name, value in report.items():
            if name not in ("notes", "problems", "usable"):
                text = value or "none needed"
                print_line(f"{name:<13} {printable(values(text) if isinstance(text, dict) else str(text))}")
        for sign, lines in (("note", report["notes"]), ("missing", report["problems"])):
            for line in lines:
                print_line(f"{sign}: {printable(line)}")
        print_line("Spark can be used" if report["usable"] else "Spark cannot be used")
    return 0 if report["usable"] else EXIT_FINDINGS


def examine(config: Config) -> dict[str, Any]:
    """Everything that is said, under its names in --json; ``problems`` are those that keep a job from starting."""
    prepare_compiler()
    spark, problems = config.spark, list[str]()
    packages = _packages({**_NEEDED, **(_FOR_CONNECT if spark.remote else {})}, problems)
    notes: list[str] = []
    packages |= _packages(_FOR_PAGES, notes)
    java = None if spark.remote else _java(config, problems)
    conf, is_local = dict(spark.conf), spark.master.startswith("local")
    worker = conf.get("spark.pyspark.python")
    if spark.remote is not None:
        worker = "the server's"
    elif not is_local:
        worker = worker or os.environ.get("PYSPARK_PYTHON", "python3 of each executor")
    else:
        # On this machine what is named for a Python has to be one; a session sets these variables itself.
        keys = ("spark.pyspark.python", "spark.pyspark.driver.python")
        problems += [f"{key} is {conf[key]}, {_NO_PROGRAM}" for key in keys if key in conf and not _runs(conf[key])]
        given = {name: os.environ.get(name) for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON")}
        notes += [f"{key} is {to}, {_NO_PROGRAM}; not used here" for key, to in given.items() if to and not _runs(to)]
    cache = Path(os.environ["NUMBA_CACHE_DIR"])
    there = next(path for path in (cache, *cache.absolute().parents) if path.exists())
    # Else it is this process's own, for want of another.
    is_lasting = not cache.name.startswith("indexd-compiled-") and os.access(there, os.W_OK | os.X_OK)
    if not is_lasting:
        notes.append("the kernels are compiled anew in each process, which takes seconds: make its cache writable")
    return {
        "indexd": __version__,
        "runsOn": spark.remote or spark.master,
        "java": java,
        "python": {"version": ".".join(map(str, sys.version_info[:3])), "executable": sys.executable},
        "workerPython": worker or sys.executable,
        "packages": packages,
        "compiled": {"directory": str(cache), "writable": is_lasting},
        "problems": problems,
        "notes": notes,
        "usable": not problems,
    }


def _runs(program: str) -> bool:
    return shutil.which(program) is not None


def _packages(wanted: _Wanted, problems: list[str]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name, (least, below) in wanted.items():
        found[name] = text = _version(name)
        if text is None:
            problems.append(f"{name} is not installed: {_INSTALL}")
            continue
        numbers = tuple(map(int, re.findall(r"\d+", text)[:3]))
        if numbers < least or (below is not None and numbers >= below):
            limit = f" and below {_dotted(below)}" if below else ""
            problems.append(f"{name} {text} does not fit, it has to be {_dotted(least)} or newer{limit}: {_INSTALL}")
    return found


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        # The client of Connect alone is a package of its own.
        return _version("pyspark-client") if name == "pyspark" else None


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def _java(config: Config, problems: list[str]) -> dict[str, Any]:
    from indexd.spark.session import INSTALL_HINT, JAVA_MIN, choose_java  # noqa: PLC0415 - no other command loads it

    choice = choose_java(config.spark.java_home, os.environ)
    taken = choice.java
    if taken is None:
        problems.append(f"there is no Java {JAVA_MIN} or newer: {INSTALL_HINT}")
    known = (str(taken.home), taken.version, taken.source) if taken else (None, None, None)
    return {**dict(zip(("home", "version", "from"), known, strict=True)), "passedOver": list(choice.passed_over)}


# --- export


def export(args: argparse.Namespace, config: Config) -> int:
    """Export the store to --to."""
    prepare_compiler()
    from indexd.recovery.open import check_store  # noqa: PLC0415 - loads numba

    # What is wrong with these need not wait for a session.
    to: Path = args.to
    check_store(config)
    check_outside(config, to, "--to")
    with suppress(ImportError):  # which package is missing, the session says
        request = _export_request(args, config, to)
    with spark_session(config, "indexd export", memory="4g") as spark:
        from indexd.spark.export import export as run  # noqa: PLC0415 - loads pyspark and pyarrow, which are optional

        with ProgressBar("export") as bar:
            found = run(spark, config, request, bar.to)
    if wants_json(args):
        print_json(_export_row(found, args.mode, str(to)))
    else:
        _print_export(found, str(to))
    return 0


def _export_request(args: argparse.Namespace, config: Config, to: Path) -> ExportRequest:
    from indexd.spark.export import ExportRequest, check_request  # noqa: PLC0415 - the same
    from indexd.spark.source.columns import parse_columns  # noqa: PLC0415 - loads pyarrow, which is optional

    columns = parse_columns(args.columns)
    if args.body and "body" not in columns:
        columns += ("body",)
    topics = None if args.topics is None else frozenset(_words(args.topics, "--topics"))
    request = ExportRequest(
        to=to,
        mode=args.mode,
        columns=columns,
        topics=topics,
        begin=args.begin,
        end=args.end,
        compression=args.compression,
        partition_by=() if args.partition_by is None else tuple(_words(args.partition_by, "--partition-by")),
        max_records_per_file=args.max_records_per_file,
        split_size=config.spark.split_size or None,
    )
    check_request(request)
    return request


def _words(text: str, flag: str) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    if not all(words) or any("\ud800" <= c <= "\udfff" for c in text):
        raise UsageError(f"{flag} {printable(text)} is no list of names", "write names with commas between them")
    return words


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
        words += f" in {found.files:,} files of {show_bytes(found.bytes or 0)}"
    if found.partitions is not None and found.partitions > 1:
        words += f" in {found.partitions:,} partitions"
    print_line(f"{printable(to)}: {words}, in {found.seconds:.2f} s ({rate:,.0f} messages/s)")
    print_line(f"  of log bytes {found.begin_offset} to {found.end_offset}")
    for topic in found.missing_topics:
        print_line(f"  no message of the topic {printable(topic)}")


# --- stats


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
        print_json(report)
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
