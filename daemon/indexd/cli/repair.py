"""repair: a stopped broker's own index mended in place, and the way back. What needs the compiler is loaded late."""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from indexd.cli.output import (
    Parser,
    add_command,
    print_json,
    print_line,
    show_bytes,
    show_time,
    until_reader_leaves,
    wants_json,
)
from indexd.config import Config
from indexd.config.compiled import prepare_compiler
from indexd.config.units import parse_seconds, printable, shown
from indexd.errors import UsageError
from indexd.storage.disk import Disk

if TYPE_CHECKING:
    from indexd.repair.run import Planned, Repaired, RepairOptions

_EXIT_LEFT = 1


class _Bars(ExitStack):
    """One bar after the other."""

    def open(self, text: str) -> None:
        """Show this one from now on."""
        from indexd.cli.output import ProgressBar  # noqa: PLC0415 - queries need no bar

        self.close()
        self._bar = self.enter_context(ProgressBar(text))

    def to(self, done: int, total: int) -> None:
        """As that of a bar."""
        self._bar.to(done, total)


def register(commands: Any, common: Parser) -> None:
    """Add the command."""
    text = "mend the index of a stopped broker: what is missing is built, checked, and exchanged in one step"
    parser = add_command(commands, "repair", [common], text)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--plan", action="store_true", help="say what it would do and how long, and change nothing")
    what.add_argument("--undo", action="store_true", help="put back the index that the newest repair replaced")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--all", action="store_true", help="build everything again, sound files, too")
    parser.add_argument(
        "--time-limit",
        metavar="SECONDS",
        help="begin nothing that would end later: 600, 10m, 2h; the newest comes first",
    )
    parser.set_defaults(function=repair)


def repair(args: argparse.Namespace, config: Config) -> int:
    """Mend STORE/index; 1 if there is something to do, or left to do."""
    if args.undo and (args.all or args.time_limit is not None):
        raise UsageError("--undo puts back what was there: --all and --time-limit are for a repair")
    seconds_max = _seconds_max(args)
    if not args.plan and not args.yes and not (sys.stdin is not None and sys.stdin.isatty()):
        raise UsageError("indexd repair changes the store, and there is no terminal to ask", "say --yes, or --plan")
    prepare_compiler()
    from indexd.repair.run import RepairOptions  # noqa: PLC0415 - loads numba

    options = RepairOptions(args.all, seconds_max)
    if args.plan:
        return _plan(args, config, options)
    try:
        return _undo(args, config) if args.undo else _repair(args, config, options)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted; nothing is half done: the index is as before, or the new one") from None


def _seconds_max(args: argparse.Namespace) -> float | None:
    if args.time_limit is None:
        return None
    try:
        seconds = parse_seconds(args.time_limit)
    except ValueError as error:
        raise UsageError(f"--time-limit {shown(args.time_limit)} {error}") from None
    if seconds <= 0:
        raise UsageError(f"--time-limit {shown(args.time_limit)} leaves no time at all")
    return seconds


def _plan(args: argparse.Namespace, config: Config, options: RepairOptions) -> int:
    from indexd.audit import load_kernels  # noqa: PLC0415 - loads numba
    from indexd.repair.run import look  # noqa: PLC0415 - loads numba

    load_kernels(config)
    with _Bars() as bars:
        bars.open("audit")
        planned = look(Disk(), config, options, bars.to)
    with until_reader_leaves():
        if wants_json(args):
            print_json(_plan_row(planned))
        else:
            _print_plan(planned)
    return _EXIT_LEFT if planned.is_needed or planned.plan.keys_behind else 0


def _repair(args: argparse.Namespace, config: Config, options: RepairOptions) -> int:
    from indexd.audit import load_kernels  # noqa: PLC0415 - loads numba
    from indexd.repair.run import repair as mend  # noqa: PLC0415 - loads numba

    def confirm(planned: Planned) -> bool:
        bars.close()
        with until_reader_leaves():
            if wants_json(args):
                print_json(_plan_row(planned))
            else:
                _print_plan(planned)
        is_wanted = bool(args.yes) or _says_yes("repair it now?")
        if is_wanted:
            bars.open("repair")
        return is_wanted

    load_kernels(config)
    with _Bars() as bars:
        bars.open("audit")
        done = mend(Disk(), config, options, confirm, bars.to)
    with until_reader_leaves():
        if wants_json(args):
            print_json(done.to_json())
        else:
            _print_done(done)
    is_left = done.planned.plan.is_needed and (done.folder is None or done.left)
    return _EXIT_LEFT if is_left or done.is_declined or done.planned.plan.keys_behind else 0


def _undo(args: argparse.Namespace, config: Config) -> int:
    from indexd.repair.run import take_back  # noqa: PLC0415 - loads numba

    def confirm(folder: Path, entries: int) -> bool:
        if entries and not wants_json(args):
            print_line(
                f"the broker has indexed {entries:,} keys since: they go with its index, and a start does not build "
                "them again; indexd repair does"
            )
        return bool(args.yes) or _says_yes(f"put back the index of {folder.name}?")

    undone = take_back(Disk(), config, confirm)
    if wants_json(args):
        folder = None if undone is None else str(undone.folder)
        print_json({"kind": "undo", "folder": folder, "entriesSince": undone.entries if undone else 0})
    elif undone is not None:
        print_line(f"the old index is back; the one that was there is in {printable(str(undone.folder / 'index'))}")
    return _EXIT_LEFT if undone is None else 0


def _says_yes(question: str) -> bool:
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _plan_row(planned: Planned) -> dict[str, Any]:
    return planned.plan.to_json() | {"needed": planned.is_needed, "notes": [*planned.notes, *planned.unfinished]}


def _print_plan(planned: Planned) -> None:
    audit, plan = planned.report.audit, planned.plan
    share = 100 * audit.findable_keys / audit.keys if audit.keys else 100.0
    # Rounded down: what is not whole must not look so.
    print_line(
        f"{printable(planned.report.store)}: {int(share * 100) / 100:.2f} % of {audit.keys:,} keys findable, "
        f"{_count(audit.hole_count, 'hole')}, {_count(audit.index_findings, 'finding')}"
    )
    lines = plan.lines() if plan.is_needed else [] if planned.is_needed else ["nothing to do"]
    for line in (*planned.notes, *planned.unfinished, *lines, *plan.behind_lines()):
        print_line(printable(line))
    if plan.is_needed:
        print_line(
            f"about {max(plan.estimated_seconds, 1):.0f} s; {show_bytes(plan.bytes_to_write)} are written in a folder "
            "beside the index, which gets the old index in exchange"
        )


def _print_done(done: Repaired) -> None:
    planned = done.planned
    for line in done.settled:
        print_line(printable(line))
    if not planned.plan.is_needed and not done.is_declined:
        if not planned.is_needed:
            _print_plan(planned)
        return
    if done.folder is None:
        why = "as you say" if done.is_declined else "there is not even time for the newest part"
        print_line(f"nothing was changed: {why}")
        return
    keys = sum(built.entries for built in done.built)
    files = sum(len(built.files) for built in done.built)
    what = "no new file was needed"
    if files:
        what = f"{keys:,} keys in {_count(files, 'new file')}, checked against the log"
    print_line(f"repaired in {done.seconds:.1f} s: {what}")
    for gap in done.gaps:
        size = show_bytes(gap.end - gap.begin)
        print_line(f"log bytes {gap.begin} to {gap.end} ({size}) could not be read: {printable(gap.reason)}")
    for line in planned.plan.behind_lines():
        print_line(printable(line))
    if done.left:
        print_line(f"{_count(len(done.left), 'older part')} not reached in time, as before: run it again")
    if done.index_timestamp:
        print_line(f"the checkpoint vouches for the index up to {show_time(done.index_timestamp)}")
    print_line(
        f"the old index is in {printable(str(done.folder))}: indexd repair --undo puts it back; else remove it some day"
    )
    if done.folders > 1:
        print_line(
            f"{done.folders} repairs can be undone, the newest first: once content, remove all indexd-repair-* folders"
        )


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}" if number else f"no {what}s"
