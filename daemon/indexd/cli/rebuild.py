"""rebuild, verify and doctor: a whole data directory built, checked, and what Spark would build one with.

Also the session of Spark for every command that runs on it. What needs the compiler or Spark is imported when called.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from indexd import __version__
from indexd.cli.output import (
    EXIT_FINDINGS,
    Parser,
    ProgressBar,
    add_command,
    counted,
    print_findings,
    print_json,
    print_line,
    show_bytes,
    until_reader_leaves,
    values,
    wants_json,
)
from indexd.config import Config, flag_name
from indexd.config.compiled import prepare_compiler
from indexd.config.units import printable
from indexd.errors import SparkMissingError, UsageError
from indexd.storage.disk import Disk
from indexd.storage.names import building_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from indexd.recovery.rebuild import Rebuilt
    from indexd.spark.rebuild.job import SparkRebuilt
    from indexd.spark.session import SparkOptions
    from indexd.verify import Report

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


def register(commands: Any, common: Parser) -> None:
    """Add the commands."""
    text = "say what Spark would run with: which Java, Python and packages, and what is missing"
    add_command(commands, "doctor", [common], text).set_defaults(function=doctor)
    parser = add_command(commands, "verify", [common], "check every output in a data directory, changing nothing")
    parser.add_argument("--deep", action="store_true", help="also compare every entry with the log, both ways")
    parser.set_defaults(function=verify)
    parser = add_command(commands, "rebuild", [common], "build a whole data directory from the commitlog")
    parser.add_argument("--out", required=True, metavar="DIR", help="where to: an empty directory or none")
    parser.add_argument("--only", choices=["index"], help="build this output alone")
    parser.add_argument(
        "--resume", action="store_true", help="on Spark: go on with what a rebuild that failed has finished"
    )
    parser.set_defaults(function=rebuild)


def rebuild(args: argparse.Namespace, config: Config) -> int:
    """Build --out from the store."""
    process_started = time.monotonic()
    if args.only is not None:
        outputs = config.outputs.model_copy(update={"consume_queue": False, "sparse": False})
        config = config.model_copy(update={"outputs": outputs})
    on_spark = uses_spark(config)
    if args.resume and not on_spark:
        raise UsageError("--resume is for Spark, and the engine is this process", "add --engine spark")
    more: dict[str, int] = {}
    try:
        if on_spark:
            found = _on_spark(config, Path(args.out), resume=args.resume)
            result, more = found.rebuilt, {"tasks": found.tasks, "resumedTasks": found.resumed}
        else:
            result = _here(config, Path(args.out))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(*_left(building_of(Path(args.out)))) from None
    if wants_json(args):
        print_json(_row(args.out, result, time.monotonic() - process_started) | {"engine": config.spark.engine} | more)
    else:
        _print(args.out, result, more)
    return 0


def _left(building: Path) -> list[str]:
    """The line about what a rebuild that is interrupted leaves; none when it leaves nothing."""
    if any((building / "runs").glob("*")):
        way = "keeps what is finished: --resume goes on with it; it can also be removed"
    elif building.exists():
        way = "is left: the next rebuild replaces it, or it can be removed"
    else:
        return []
    return [f"interrupted; {printable(str(building))} {way}"]


def _here(config: Config, out: Path) -> Rebuilt:
    prepare_compiler()
    from indexd.recovery.rebuild import rebuild as build  # noqa: PLC0415 - loads numba
    from indexd.service.broker_watch import suspects_limit  # noqa: PLC0415 - the same

    disk = Disk()
    with ProgressBar("rebuild") as bar, closing(suspects_limit(config, disk)) as limit:
        return build(config, disk, out, bar.to, limit)


def _on_spark(config: Config, out: Path, *, resume: bool) -> SparkRebuilt:
    with spark_session(config, "indexd rebuild", has_other_engine=True) as spark:
        from indexd.service.broker_watch import suspects_limit  # noqa: PLC0415 - loads numba
        from indexd.spark.rebuild.job import rebuild as build  # noqa: PLC0415 - the same
        from indexd.spark.session import slots  # noqa: PLC0415 - optional packages
        from indexd.spark.tasks import run_tasks  # noqa: PLC0415 - the same
        from indexd.storage.remote import disk_for  # noqa: PLC0415 - the same

        disk = disk_for(config)
        with ProgressBar("rebuild") as bar, closing(suspects_limit(config, disk)) as limit:
            tasks = partial(run_tasks, spark)
            return build(config, disk, out, tasks, bar.to, slots=slots(spark), resume=resume, log_limit=limit)


def _row(out: str, result: Rebuilt, process_seconds: float) -> dict[str, Any]:
    return {
        "out": out,
        "messages": result.messages,
        "entries": result.entries,
        "bytes": result.bytes,
        "seconds": round(result.seconds, 6),
        "processSeconds": round(process_seconds, 6),
        "files": result.files,
        "beginOffset": result.begin_offset,
        "phyOffset": result.phy_offset,
        "skippedBytes": result.skipped_bytes,
        "unprovenBytes": result.unproven_bytes,
        "leftOutMessages": result.left_out_messages,
        "unreadableAt": result.unreadable and result.unreadable.offset,
    }


def _print(out: str, result: Rebuilt, more: dict[str, int]) -> None:
    rate = result.messages / result.seconds if result.seconds else 0
    print_line(
        f"{out}: {result.messages} messages, {result.entries} entries in {result.files} index files, "
        f"{show_bytes(result.bytes)} of log in {result.seconds:.2f} s ({rate:,.0f} messages/s)"
    )
    if more:
        resumed = f", {more['resumedTasks']} of them taken over" if more["resumedTasks"] else ""
        print_line(f"{more['tasks']} tasks on Spark{resumed}")
    if result.skipped_bytes:
        print_line(
            f"{result.skipped_bytes} bytes of the log were passed over: see the uncovered ranges in {out}/frontier"
        )
    if result.unproven_bytes:
        print_line(
            f"{result.unproven_bytes} bytes at the end of the log hold messages older than one before them: the clock "
            "went back, or they were removed, which the broker alone knows"
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


# --- verify


def verify(args: argparse.Namespace, config: Config) -> int:
    """Check DATA; 1 if something does not hold."""
    prepare_compiler()
    from indexd.verify import verify as check  # noqa: PLC0415 - loads numba

    with ProgressBar("verify") as bar:
        report = check(config, Disk(), deep=args.deep, on_progress=bar.to)
    with until_reader_leaves():
        print_findings(report.findings, json_lines=wants_json(args))
        if wants_json(args):
            print_json(report.to_json() | {"data": str(config.store.data)})
        else:
            _print_summary(report, str(config.store.data))
    return EXIT_FINDINGS if len(report.findings) else 0


def _print_summary(report: Report, data: str) -> None:
    for note in report.notes:
        print_line(f"not checked: {printable(note)}")
    words = [f"{report.files} index files", f"{report.entries:,} entries", show_bytes(report.bytes)]
    if report.queues:
        words.append(f"{report.units:,} units of {report.queues:,} queues")
    if report.segments:
        words.append(f"sparse indexes of {counted(report.segments, 'segment')}")
    if report.compared is not None:
        compared = report.compared
        words.append(f"{compared.entries:,} entries compared with {compared.messages:,} messages of the log")
    else:
        words.append("not compared with the log (--deep)")
    found = counted(len(report.findings), "finding")
    print_line(f"{printable(data)}: {', '.join(words)}, in {report.seconds:.2f} s: {found}")


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
