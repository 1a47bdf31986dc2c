"""rebuild and verify: a whole data directory built, by this process or on Spark, and checked."""

from __future__ import annotations

import argparse
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from indexd.cli.output import (
    EXIT_FINDINGS,
    Parser,
    ProgressBar,
    add_command,
    print_findings,
    print_json,
    print_line,
    until_reader_leaves,
    wants_json,
)
from indexd.cli.spark import spark_session, uses_spark
from indexd.config import Config
from indexd.config.compiled import prepare_compiler
from indexd.config.units import printable
from indexd.pages.wording import counted, show_size
from indexd.storage.disk import Disk
from indexd.storage.names import building_of
from indexd.storage.remote import disk_for

if TYPE_CHECKING:
    from indexd.recovery.rebuild import Rebuilt
    from indexd.verify import Report


def register(commands: Any, common: Parser) -> None:
    """Add the commands."""
    text = "check every output in a data directory, changing nothing"
    parser = add_command(commands, "verify", [common], text, function=verify)
    parser.add_argument("--deep", action="store_true", help="also compare every entry with the log, both ways")
    parser = add_command(
        commands, "rebuild", [common], "build a whole data directory from the commitlog", function=rebuild
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="where to: an empty directory or none")
    parser.add_argument("--only", choices=["index"], help="build this output alone")


def rebuild(args: argparse.Namespace, config: Config) -> int:
    """Build --out from the store."""
    process_started = time.monotonic()
    if args.only is not None:
        outputs = config.outputs.model_copy(update={"consume_queue": False, "sparse": False})
        config = config.model_copy(update={"outputs": outputs})
    out, more = Path(args.out), dict[str, int]()
    try:
        if uses_spark(config):
            result, tasks = _on_spark(config, out)
            more = {"tasks": tasks}
        else:
            result = _here(config, out)
    except KeyboardInterrupt:
        building = building_of(out)
        way = "is left: the next rebuild replaces it, or it can be removed"
        raise KeyboardInterrupt(
            *([f"interrupted; {printable(str(building))} {way}"] if building.exists() else [])
        ) from None
    if wants_json(args):
        print_json(_row(args.out, result, time.monotonic() - process_started) | {"engine": config.spark.engine} | more)
    else:
        _print(args.out, result, more)
    return 0


def _here(config: Config, out: Path) -> Rebuilt:
    prepare_compiler()
    from indexd.recovery.rebuild import rebuild as build  # noqa: PLC0415 - loads numba
    from indexd.service.broker import suspects_limit  # noqa: PLC0415 - the same

    disk = Disk()
    with ProgressBar("rebuild") as bar, closing(suspects_limit(config, disk)) as limit:
        return build(config, disk, out, bar.to, limit)


def _on_spark(config: Config, out: Path) -> tuple[Rebuilt, int]:
    with spark_session(config, "indexd rebuild") as spark:
        from indexd.service.broker import suspects_limit  # noqa: PLC0415 - loads numba
        from indexd.spark.rebuild.job import rebuild as build  # noqa: PLC0415 - the same
        from indexd.spark.session import slots  # noqa: PLC0415 - optional packages
        from indexd.spark.tasks import run_tasks  # noqa: PLC0415 - the same

        disk, tasks = disk_for(config), partial(run_tasks, spark)
        with ProgressBar("rebuild") as bar, closing(suspects_limit(config, disk)) as limit:
            return build(config, disk, out, tasks, bar.to, slots=slots(spark), log_limit=limit)


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
        f"{show_size(result.bytes)} of log in {result.seconds:.2f} s ({rate:,.0f} messages/s)"
    )
    if more:
        print_line(f"{more['tasks']} tasks on Spark")
    left_out = (
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
    )
    for number, text in left_out:
        if number:
            print_line(f"{number} {text}")
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
    words = [f"{report.files} index files", f"{report.entries:,} entries", show_size(report.bytes)]
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
