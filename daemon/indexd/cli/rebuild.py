"""From the configuration to a session of Spark: what the commands share that run on it.

rebuild, in this process or on Spark. What needs the compiler or Spark is imported when it is called.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from indexd.cli.output import Parser, add_command, print_json, print_line, show_bytes, wants_json
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

_PLACES = ("master", "remote", "conf")


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
    """Add the command."""
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
    from indexd.cli.output import ProgressBar  # noqa: PLC0415 - queries need no bar
    from indexd.recovery.rebuild import rebuild as build  # noqa: PLC0415 - loads numba
    from indexd.service.broker_watch import suspects_limit  # noqa: PLC0415 - the same

    disk = Disk()
    with ProgressBar("rebuild") as bar, closing(suspects_limit(config, disk)) as limit:
        return build(config, disk, out, bar.to, limit)


def _on_spark(config: Config, out: Path, *, resume: bool) -> SparkRebuilt:
    with spark_session(config, "indexd rebuild", has_other_engine=True) as spark:
        from indexd.cli.output import ProgressBar  # noqa: PLC0415 - queries need no bar
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
