"""verify: all outputs read again and held against each other, with --deep against the log; changes nothing."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import TYPE_CHECKING, Any

from indexd.cli.output import Parser, add_command, print_json, print_line, show_bytes, until_reader_leaves, wants_json
from indexd.config import Config
from indexd.config.compiled import prepare_compiler
from indexd.config.units import printable
from indexd.storage.disk import Disk

if TYPE_CHECKING:
    from indexd.verify import Report

_LINES_PER_KIND = 20
_EXIT_FINDINGS = 1


def register(commands: Any, common: Parser) -> None:
    """Add the command."""
    parser = add_command(commands, "verify", [common], "check every output in a data directory, changing nothing")
    parser.add_argument("--deep", action="store_true", help="also compare every entry with the log, both ways")
    parser.set_defaults(function=verify)


def verify(args: argparse.Namespace, config: Config) -> int:
    """Check DATA; 1 if something does not hold."""
    prepare_compiler()
    from indexd.cli.output import ProgressBar  # noqa: PLC0415 - queries need no bar
    from indexd.verify import verify as check  # noqa: PLC0415 - loads numba

    with ProgressBar("verify") as bar:
        report = check(config, Disk(), deep=args.deep, on_progress=bar.to)
    with until_reader_leaves():
        if wants_json(args):
            for finding in report.findings.kept:
                row = {"file": finding.file, "position": finding.position, "what": finding.what, "text": finding.text}
                print_json({"kind": "finding", **row})
            print_json(report.to_json() | {"data": str(config.store.data)})
        else:
            _print_findings(report)
            _print_summary(report, str(config.store.data))
    return _EXIT_FINDINGS if len(report.findings) else 0


def _print_findings(report: Report) -> None:
    shown: Counter[str] = Counter()
    for finding in report.findings.kept:
        shown[finding.what] += 1
        if shown[finding.what] <= _LINES_PER_KIND:
            print_line(f"{finding.file} byte {finding.position}: {printable(finding.text)}")
    for what, count in report.findings.counts.items():
        more = count - min(shown[what], _LINES_PER_KIND)
        if more > 0:
            print_line(f"and {more:,} more of the kind {what}")


def _print_summary(report: Report, data: str) -> None:
    for note in report.notes:
        print_line(f"not checked: {printable(note)}")
    words = [f"{report.files} index files", f"{report.entries:,} entries", show_bytes(report.bytes)]
    if report.queues:
        words.append(f"{report.units:,} units of {report.queues:,} queues")
    if report.segments:
        words.append(f"sparse indexes of {report.segments:,} segment{'s' if report.segments > 1 else ''}")
    if report.compared is not None:
        compared = report.compared
        words.append(f"{compared.entries:,} entries compared with {compared.messages:,} messages of the log")
    else:
        words.append("not compared with the log (--deep)")
    count = len(report.findings)
    found = "no findings" if not count else f"{count:,} finding{'s' if count > 1 else ''}"
    print_line(f"{printable(data)}: {', '.join(words)}, in {report.seconds:.2f} s: {found}")
