"""rebuild, verify, export, stats, doctor and kafka: what reads a whole log or directory, here or on Spark.

What needs Spark or the compiler is imported when it is called: they are optional, or take a second.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from contextlib import AbstractContextManager, closing, suppress
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from indexd import __version__
from indexd.cli.output import (
    EXIT_FINDINGS,
    Parser,
    add_command,
    count64,
    print_findings,
    print_json,
    print_line,
    print_report,
    progress_bar,
    some_name,
    typed,
    values,
    wants_json,
)
from indexd.config import (
    Config,
    check_outside,
    flag_name,
    parse_count,
    parse_millis,
    parse_path,
    parse_place,
    printable,
)
from indexd.errors import UsageError
from indexd.pages.wording import counted, show_size
from indexd.query.message import TIME_MAX, TIME_MIN
from indexd.query.questions import check_times
from indexd.storage.disk import Disk, OutputDisk
from indexd.storage.names import building_of
from indexd.storage.remote import disk_for

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from indexd.kafka.format import KafkaReport
    from indexd.recovery.rebuild import Rebuilt
    from indexd.service.broker import BrokerLimit
    from indexd.spark.export import ExportRequest

_PACKAGES = ("pyspark", "pandas", "pyarrow", "numpy", "numba")


def register(commands: Any, common: Parser) -> None:
    """Add the commands."""
    parents = [common]
    parser = add_command(
        commands, "verify", parents, "check every output in a data directory, changing nothing", function=verify
    )
    parser.add_argument("--deep", action="store_true", help="also compare every entry with the log, both ways")
    parser = add_command(
        commands, "rebuild", parents, "build a whole data directory from the commitlog", function=rebuild
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="where to: an empty directory or none")
    parser.add_argument("--only", choices=["index"], help="build this output alone")
    _add_kafka(commands)
    add_command(
        commands,
        "doctor",
        parents,
        "say what Spark would run with: which Java, Python and packages, and what is missing",
        function=doctor,
    )
    _add_export(commands, common)
    parser = add_command(
        commands, "stats", parents, "count what is in the log: topics, keys, sizes, clock", function=stats
    )
    parser.add_argument(
        "-t", "--topic", type=some_name, action="append", default=[], help="only this topic; may be given again"
    )
    _add_times(parser)
    parser.set_defaults(begin=TIME_MIN, end=TIME_MAX)
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


def _add_times(parser: Parser) -> None:
    parser.add_argument("-b", "--begin", type=count64, metavar="MS", help="first store time (default: none)")
    parser.add_argument("-e", "--end", type=count64, metavar="MS", help="last store time (default: none)")


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
    _add_times(parser)
    parser.add_argument(
        "--compression", choices=("zstd", "snappy", "none"), default="zstd", help="of the files (default: zstd)"
    )
    parser.add_argument(
        "--max-records-per-file",
        type=count64,
        default=0,
        metavar="N",
        help="messages of a file, at most (default: all that a task has for it)",
    )
    parser.add_argument(
        "--mode",
        choices=("error", "overwrite"),
        default="error",
        help="when DIR holds an export: stop, or replace it (default: error)",
    )


def uses_spark(config: Config) -> bool:
    """Whether rebuild or audit is to run on Spark; UsageError for a flag that says where and no word that it is to."""
    if config.spark.engine == "spark":
        return True
    for key in ("master", "remote", "conf"):
        if config.provenance.get(key) == flag_name(key):
            raise UsageError(f"{flag_name(key)} is for Spark, and the engine is this process", "add --engine spark")
    return False


def spark_session(config: Config, app: str, memory: str = "1g") -> AbstractContextManager[SparkSession]:
    """A session, as :func:`indexd.spark.session.open_session` makes it."""
    from indexd.spark.session import open_session  # noqa: PLC0415 - no other command loads the package

    return open_session(config.spark, app, memory=memory)


def _check_places(config: Config, path: Path | None, flag: str) -> None:
    # What is wrong with these need not wait for a session.
    from indexd.recovery.open import check_store  # noqa: PLC0415 - loads numba

    check_store(config)
    if path is not None:
        check_outside(config, path, flag)


# --- doctor


def doctor(args: argparse.Namespace, config: Config) -> int:
    """Look and say; 1 if a job could not be started from here."""
    report = examine(config)
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
    from indexd.spark.session import (  # noqa: PLC0415 - no other command loads it
        INSTALL_HINT,
        JAVA_MIN,
        choose_java,
        missing_packages,
    )

    spark, java = config.spark, dict[str, Any]()
    conf, worker = dict(spark.conf), "the server's"
    problems = [
        f"{name} is not installed: pip install 'rocketmq-indexd[spark]'"
        for name in missing_packages(spark.remote is not None)
    ]
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
        problems += [
            f"{key} is {conf[key]}, which is no program that can be started"
            for key in keys
            if key in conf and shutil.which(conf[key]) is None
        ]
    cache = Path(os.environ["NUMBA_CACHE_DIR"])
    return {
        "indexd": __version__,
        "runsOn": spark.remote or spark.master,
        "java": java or None,
        "python": {"version": ".".join(map(str, sys.version_info[:3])), "executable": sys.executable},
        "workerPython": worker,
        "packages": {name: version(name) if find_spec(name) else None for name in _PACKAGES},
        # Else it is this process's own, for want of another: each one compiles anew, which takes seconds.
        "compiled": {"directory": str(cache), "writable": not cache.name.startswith("indexd-compiled-")},
        "problems": problems,
        "usable": not problems,
    }


# --- export


def export(args: argparse.Namespace, config: Config) -> int:
    """Export the store to --to."""
    _check_places(config, args.to, "--to")
    with suppress(ImportError):  # which package is missing, the session says
        request = _export_request(args)
    with spark_session(config, "indexd export", memory="4g") as spark, progress_bar("export") as bar:
        from indexd.spark.export import export as run  # noqa: PLC0415 - loads pyspark and pyarrow, which are optional

        found = run(spark, config, request, bar)
    row = {
        "to": str(args.to),
        "mode": args.mode,
        "rows": found.rows,
        "files": found.files,
        "bytes": found.bytes,
        "partitions": found.partitions,
        "beginOffset": found.begin_offset,
        "endOffset": found.end_offset,
        "missingTopics": list(found.missing_topics),
        "seconds": round(found.seconds, 6),
    }
    print_report(args, f"{args.to}: {found.rows:,} messages", row)
    return 0


def _export_request(args: argparse.Namespace) -> ExportRequest:
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
    )
    check_request(request)
    return request


# --- stats


def stats(args: argparse.Namespace, config: Config) -> int:
    """Count, and show what was found."""
    _check_places(config, args.report, "--report")
    check_times(args.begin, args.end)
    with spark_session(config, "indexd stats") as spark, progress_bar("stats") as bar:
        from indexd.spark.stats.report import Selection, collect  # noqa: PLC0415 - pyspark is optional

        selection = Selection(tuple(args.topic), args.begin, args.end, args.silence)
        report = collect(spark, config, selection, top=args.top, progress=bar)
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


# --- rebuild and verify


def rebuild(args: argparse.Namespace, config: Config) -> int:
    """Build --out from the store."""
    if args.only is not None:
        outputs = config.outputs.model_copy(update={"consume_queue": False, "sparse": False})
        config = config.model_copy(update={"outputs": outputs})
    out, build = Path(args.out), _on_spark if uses_spark(config) else _here
    from indexd.service.broker import BrokerLimit  # noqa: PLC0415 - loads numba

    disk = disk_for(config) if build is _on_spark else Disk()
    try:
        with closing(BrokerLimit(config, disk)) as limit:
            result, tasks = build(config, disk, out, limit)
    except KeyboardInterrupt:
        building = building_of(out)
        if not building.exists():
            raise
        way = "is left: the next rebuild replaces it, or it can be removed"
        raise KeyboardInterrupt(f"interrupted; {printable(str(building))} {way}") from None
    if wants_json(args):
        row = {
            "out": args.out,
            "messages": result.messages,
            "entries": result.entries,
            "bytes": result.bytes,
            "seconds": round(result.seconds, 6),
            "files": result.files,
            "beginOffset": result.begin_offset,
            "phyOffset": result.phy_offset,
            "skippedBytes": result.skipped_bytes,
            "unprovenBytes": result.unproven_bytes,
            "leftOutMessages": result.left_out_messages,
            "unreadableAt": result.unreadable and result.unreadable.offset,
            "engine": config.spark.engine,
        }
        print_json(row | ({} if tasks is None else {"tasks": tasks}))
    else:
        _print_rebuilt(args.out, result, tasks)
    return 0


def _here(config: Config, disk: Disk, out: Path, limit: BrokerLimit) -> tuple[Rebuilt, int | None]:
    from indexd.recovery.rebuild import rebuild as build  # noqa: PLC0415 - loads numba

    with progress_bar("rebuild") as bar:
        return build(config, disk, out, bar, limit), None


def _on_spark(config: Config, disk: Disk, out: Path, limit: BrokerLimit) -> tuple[Rebuilt, int | None]:
    with spark_session(config, "indexd rebuild") as spark, progress_bar("rebuild") as bar:
        from indexd.spark.rebuild.job import rebuild as build  # noqa: PLC0415 - loads numba
        from indexd.spark.session import slots  # noqa: PLC0415 - optional packages
        from indexd.spark.tasks import run_tasks  # noqa: PLC0415 - the same

        return build(config, disk, out, partial(run_tasks, spark), bar, slots=slots(spark), log_limit=limit)


def _print_rebuilt(out: str, result: Rebuilt, tasks: int | None) -> None:
    rate = result.messages / result.seconds if result.seconds else 0
    print_line(
        f"{out}: {result.messages} messages, {result.entries} entries in {result.files} index files, "
        f"{show_size(result.bytes)} of log in {result.seconds:.2f} s ({rate:,.0f} messages/s)"
    )
    for number, text in (
        (tasks, "tasks on Spark"),
        (result.skipped_bytes, f"bytes of the log were passed over: see the uncovered ranges in {out}/frontier"),
        (
            result.unproven_bytes,
            "bytes at the end of the log hold messages older than one before them: the clock went back, or they were "
            "removed, which the broker alone knows",
        ),
        (
            result.left_out_messages,
            "messages have no place in a ConsumeQueue: their topics have batch queues or are no folder's name, or "
            "--queues-max was reached",
        ),
    ):
        if number:
            print_line(f"{number} {text}")
    end = result.unreadable
    if end is not None:
        print_line(f"the log ends at offset {end.offset} in bytes that are no frame: {end.reason}")


def verify(args: argparse.Namespace, config: Config) -> int:
    """Check DATA; 1 if something does not hold."""
    from indexd.verify import verify as check  # noqa: PLC0415 - loads numba

    with progress_bar("verify") as bar:
        report = check(config, Disk(), deep=args.deep, on_progress=bar)
    with suppress(BrokenPipeError):  # the exit code stays what it is
        print_findings(report.findings, json_lines=wants_json(args))
        if wants_json(args):
            print_json(report.to_json() | {"data": str(config.store.data)})
            return EXIT_FINDINGS if len(report.findings) else 0
        for note in report.notes:
            print_line(f"not checked: {printable(note)}")
        both = report.compared
        compared = (
            "not compared with the log (--deep)"
            if both is None
            else f"{both.entries:,} entries compared with {both.messages:,} messages of the log"
        )
        print_line(
            f"{printable(str(config.store.data))}: {report.files} index files, {report.entries:,} entries, "
            f"{show_size(report.bytes)}, {report.units:,} units of {counted(report.queues, 'queue')}, sparse indexes "
            f"of {counted(report.segments, 'segment')}, {compared}, in {report.seconds:.2f} s: "
            f"{counted(len(report.findings), 'finding')}"
        )
    return EXIT_FINDINGS if len(report.findings) else 0


# --- kafka

_DIRECTORY = "a partition's directory, or a Kafka log directory with its partitions; no broker may be running on it"


def _add_kafka(commands: Any) -> None:
    # None of the settings is about Kafka's segments.
    interval = typed(parse_count, 0, 2**31 - 1)
    shared = Parser(add_help=False, argument_default=argparse.SUPPRESS)
    shared.add_argument("--json", action="store_true", help="one JSON object a line instead of words")
    shared.add_argument("directory", metavar="DIR", help=_DIRECTORY)
    inner = add_command(
        commands,
        "kafka",
        [],
        "check or rebuild the indexes of Kafka's own segments: .index, .timeindex; while no broker runs",
    ).add_subparsers(title="commands", dest="kafka_command", metavar="COMMAND", required=True, parser_class=Parser)
    parser = add_command(
        inner,
        "check",
        [shared],
        "hold every .index and .timeindex against its log, changing nothing",
        function=check_kafka,
    )
    parser.add_argument(
        "--interval",
        type=interval,
        metavar="BYTES",
        help="also say which files differ from a rebuild with this interval",
    )
    parser = add_command(
        inner,
        "rebuild",
        [shared],
        "make every .index and .timeindex anew, as Kafka's recovery makes them; never changes a log",
        function=rebuild_kafka,
    )
    parser.add_argument("--out", metavar="DIR2", help="write the files there and leave DIR as it is")
    parser.add_argument(
        "--interval",
        type=interval,
        default=4096,
        metavar="BYTES",
        help="the topic's index.interval.bytes (default: 4096)",
    )
    parser.add_argument(
        "--max-index-size",
        type=typed(parse_count, 12, 2**31 - 1),
        default=10485760,
        metavar="BYTES",
        help="the topic's segment.index.bytes, which no index may exceed (default: 10485760)",
    )


def check_kafka(args: argparse.Namespace, config: Config) -> int:  # noqa: ARG001 - the settings are RocketMQ's store's
    """Check DIR; 1 if something does not hold."""
    from indexd.kafka.indexes import check  # noqa: PLC0415 - loads numba

    with progress_bar("kafka check") as bar:
        report = check(Path(args.directory), Disk(), interval=args.interval, on_progress=bar)
    figures = report.figures
    what = f"{counted(figures['batches'], 'batch')}, {counted(figures['entries'], 'index entry')}"
    return _say(args, "finding", report, what)


def rebuild_kafka(args: argparse.Namespace, config: Config) -> int:  # noqa: ARG001 - the settings are RocketMQ's store's
    """Rebuild DIR's indexes; 1 if a segment was refused, or its log cannot be read to the end."""
    from indexd.kafka.indexes import rebuild as rebuild_directory  # noqa: PLC0415 - loads numba

    with progress_bar("kafka rebuild") as bar:
        report = rebuild_directory(
            Path(args.directory),
            OutputDisk(),
            out=None if args.out is None else Path(args.out),
            interval=args.interval,
            max_index_size=args.max_index_size,
            on_progress=bar,
        )
    place = "in place" if args.out is None else f"in {printable(args.out)}"
    return _say(args, "problem", report, f"{report.figures['changed']} of them written {place}")


def _say(args: argparse.Namespace, kind: str, report: KafkaReport, what: str) -> int:
    # The findings and the notes, then for programs a row a segment, then the summary.
    print_findings(report.findings, json_lines=wants_json(args), kind=kind)
    notes = [{"kind": "note", "file": note.file, "what": note.what, "text": note.text} for note in report.notes]
    if wants_json(args):
        given = {name: getattr(args, name) for name in ("directory", "out") if name in args}
        rows = [{"kind": "segment"} | row for row in report.rows]
        for row in (*notes, *rows, report.to_json() | given):
            print_json(row)
    else:
        for note in notes:
            print_line(f"note: {printable(note['file'])}: {printable(note['text'])}")
        words = f"{counted(report.partitions, 'partition')}, {counted(report.figures['segments'], 'segment')}, {what}"
        size = f"{show_size(report.figures['bytes'])} in {report.seconds:.2f} s"
        print_line(printable(f"{args.directory}: {words}, {size}: {counted(len(report.findings), kind)}"))
    return EXIT_FINDINGS if len(report.findings) else 0
