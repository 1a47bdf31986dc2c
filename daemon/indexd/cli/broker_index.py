"""audit and repair: a broker's own index held against its log, strictly read-only; mended in place, and the way back.

What needs the compiler is imported when it is called.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from indexd.cli.jobs import spark_session, uses_spark
from indexd.cli.output import (
    EXIT_FINDINGS,
    Parser,
    add_command,
    print_json,
    print_line,
    progress_bar,
    typed,
    wants_json,
)
from indexd.config import Config, check_outside, parse_count, parse_path, parse_seconds, printable
from indexd.errors import UsageError
from indexd.pages.wording import counted, show_size
from indexd.storage.disk import Disk, OutputDisk
from indexd.storage.names import absolute
from indexd.storage.remote import disk_for

if TYPE_CHECKING:
    from indexd.repair.run import PlannedRepair, Repaired


def register(commands: Any, common: Parser) -> None:
    """Add the commands."""
    parser = add_command(
        commands, "audit", [common], "hold a broker's own index against its log, changing nothing", function=audit
    )
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
    parser = add_command(
        commands,
        "repair",
        [common],
        "mend the index of a stopped broker: what is missing is built, checked, and exchanged in one step",
        function=repair,
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--plan", action="store_true", help="say what it would do and how long, and change nothing")
    what.add_argument("--undo", action="store_true", help="put back the index that the newest repair replaced")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--all", action="store_true", help="build everything again, sound files, too")
    parser.add_argument(
        "--time-limit",
        type=typed(parse_seconds, 0.001),
        metavar="SECONDS",
        help="begin nothing that would end later: 600, 10m, 2h; the newest comes first",
    )


def audit(args: argparse.Namespace, config: Config) -> int:
    """Compare STORE/index with the log; 1 if a key is not findable or something does not hold.

    Raises UsageError for a FILE that cannot be written there, before anything is read.
    """
    places = {flag: path for flag, path in (("--report", args.report), ("--resume", args.resume)) if path is not None}
    if len({path.resolve() for path in places.values()}) < len(places):
        raise UsageError(f"--report and --resume are the same file: {printable(str(args.report))}", "name two files")
    for flag, path in places.items():
        _check_place(path, flag, config)
    from indexd.audit import SAMPLES, AuditOptions, audit_here, load_kernels  # noqa: PLC0415 - loads numba, as those below
    from indexd.audit.page import audit_page, lines  # noqa: PLC0415 - the same

    samples = SAMPLES if args.samples is None else args.samples
    options = AuditOptions(samples=samples, queues=args.queues, kept=args.resume, yields=True)
    if uses_spark(config):
        with spark_session(config, "indexd audit") as spark, progress_bar("audit") as bar:
            from indexd.spark.audit import audit_on_spark  # noqa: PLC0415 - loads pyspark, which is optional

            report = audit_on_spark(spark, config, options, bar)
    else:
        load_kernels(config)
        with progress_bar("audit") as bar:
            report = audit_here(config, disk_for(config), options, bar)
    with suppress(BrokenPipeError):  # the exit code stays what it is
        if wants_json(args):
            for row in report.rows():
                print_json(row)
        else:
            for line in lines(report):
                print_line(line)
    if args.report is not None:
        # The last thing done: what was found is on standard output, whatever becomes of the page.
        OutputDisk().write_atomically(absolute(args.report), audit_page(report).encode("utf-8"))
    return 0 if report.is_sound else EXIT_FINDINGS


def _check_place(path: Path, flag: str, config: Config) -> None:
    check_outside(config, path, flag)
    what = f"{flag} {printable(str(path))}"
    # A link: whoever made it says where root writes. A device, a pipe: it would be replaced, not written to.
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise UsageError(f"{what} is no plain file", "name a file, or a name that nothing has")
    if not os.access(absolute(path).parent, os.W_OK | os.X_OK):
        raise UsageError(f"{what}: there is no directory that this user may write to", "name a file elsewhere")


# --- repair


def repair(args: argparse.Namespace, config: Config) -> int:
    """Mend STORE/index; 1 if there is something to do, or left to do."""
    if args.undo and (args.all or args.time_limit is not None):
        raise UsageError("--undo puts back what was there: --all and --time-limit are for a repair")
    if not args.plan and not args.yes and not (sys.stdin is not None and sys.stdin.isatty()):
        raise UsageError("indexd repair changes the store, and there is no terminal to ask", "say --yes, or --plan")
    from indexd.audit import load_kernels  # noqa: PLC0415 - loads numba
    from indexd.repair.run import look  # noqa: PLC0415 - the same

    try:
        if args.undo:
            return _undo(args, config)
        load_kernels(config)
        if not args.plan:
            return _repair(args, config)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted; nothing is half done: the index is as before, or the new one") from None
    with progress_bar("audit") as bar:
        planned = look(Disk(), config, bar, everything=args.all)
    _show_plan(args, planned)
    return EXIT_FINDINGS if planned.is_needed or planned.plan.keys_behind else 0


def _repair(args: argparse.Namespace, config: Config) -> int:
    from indexd.repair.run import repair as mend  # noqa: PLC0415 - loads numba

    def confirm(planned: PlannedRepair) -> bool:
        with tqdm.external_write_mode(sys.stderr):  # the bar gives way to the question
            _show_plan(args, planned)
            return bool(args.yes) or _says_yes("repair it now?")

    with progress_bar("repair") as bar:
        done = mend(Disk(), config, confirm, bar, everything=args.all, seconds_max=args.time_limit)
    with suppress(BrokenPipeError):  # the exit code stays what it is
        if wants_json(args):
            print_json(done.to_json())
        else:
            _print_done(done)
    is_left = done.planned.plan.is_needed and (done.folder is None or done.left)
    return EXIT_FINDINGS if is_left or done.is_declined or done.planned.plan.keys_behind else 0


def _undo(args: argparse.Namespace, config: Config) -> int:
    from indexd.repair.run import take_back  # noqa: PLC0415 - loads numba

    def confirm(folder: Path, entries: int) -> bool:
        if entries and not wants_json(args):
            print_line(
                f"the broker has indexed {entries:,} keys since: they go with its index, and a start does not build "
                "them again; indexd repair does"
            )
        return bool(args.yes) or _says_yes(f"put back the index of {folder.name}?")

    folder, entries = take_back(Disk(), config, confirm)
    if wants_json(args):
        print_json({"kind": "undo", "folder": None if folder is None else str(folder), "entriesSince": entries})
    elif folder is not None:
        print_line(f"the old index is back; the one that was there is in {printable(str(folder / 'index'))}")
    return EXIT_FINDINGS if folder is None else 0


def _says_yes(question: str) -> bool:
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _show_plan(args: argparse.Namespace, planned: PlannedRepair) -> None:
    with suppress(BrokenPipeError):  # the exit code stays what it is
        if wants_json(args):
            more = {"needed": planned.is_needed, "notes": [*planned.notes, *planned.unfinished]}
            print_json(planned.plan.to_json() | more)
        else:
            _print_plan(planned)


def _print_plan(planned: PlannedRepair) -> None:
    audit, plan = planned.report.audit, planned.plan
    share = 100 * audit.findable_keys / audit.keys if audit.keys else 100.0
    # Rounded down: what is not whole must not look so.
    print_line(
        f"{printable(planned.report.store)}: {int(share * 100) / 100:.2f} % of {audit.keys:,} keys findable, "
        f"{counted(audit.hole_count, 'hole')}, {counted(audit.index_findings, 'finding')}"
    )
    lines = plan.lines() if plan.is_needed else [] if planned.is_needed else ["nothing to do"]
    for line in (*planned.notes, *planned.unfinished, *lines, *plan.behind_lines()):
        print_line(printable(line))
    if plan.is_needed:
        print_line(
            f"about {max(plan.estimated_seconds, 1):.0f} s; {show_size(plan.bytes_to_write)} are written in a folder "
            "beside the index, which gets the old index in exchange"
        )


def _print_done(done: Repaired) -> None:
    planned = done.planned
    for line in done.settled:
        print_line(printable(line))
    if done.folder is None:
        if done.is_declined:
            print_line("nothing was changed: as you say")
        elif planned.plan.is_needed:
            print_line("nothing was changed: there is not even time for the newest part")
        elif not planned.is_needed:
            _print_plan(planned)
        return
    keys = sum(built.entries for built in done.built)
    files = sum(len(built.files) for built in done.built)
    what = f"{keys:,} keys in {counted(files, 'new file')}, checked against the log"
    print_line(f"repaired in {done.seconds:.1f} s: {what if files else 'no new file was needed'}")
    for gap in done.gaps:
        where = f"log bytes {gap.begin} to {gap.end} ({show_size(gap.end - gap.begin)})"
        print_line(f"{where} could not be read: {printable(gap.reason)}")
    for line in planned.plan.behind_lines():
        print_line(printable(line))
    if done.left:
        print_line(f"{counted(len(done.left), 'older part')} not reached in time, as before: run it again")
    print_line(
        f"the old index is in {printable(str(done.folder))}: indexd repair --undo puts it back; else remove it some day"
    )
