"""kafka check, kafka rebuild: the indexes of Kafka's own segments held against their logs, and made anew."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from indexd.cli.output import Parser, add_command, print_json, print_line, show_bytes, wants_json
from indexd.config import Config
from indexd.config.compiled import prepare_compiler
from indexd.config.units import printable
from indexd.storage.disk import Disk, OutputDisk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from indexd.findings import Findings
    from indexd.kafka.check import CheckReport
    from indexd.kafka.format import Note
    from indexd.kafka.rebuild import RebuildReport

_LINES_PER_KIND = 20
_EXIT_FINDINGS = 1
_DIRECTORY = "a partition's directory, or a Kafka log directory with its partitions; no broker may be running on it"


def register(commands: Any, common: Parser) -> None:  # noqa: ARG001 - none of the settings is about Kafka's segments
    """Add ``kafka`` with its two commands."""
    shared = Parser(add_help=False, argument_default=argparse.SUPPRESS)
    shared.add_argument("--json", action="store_true", help="one JSON object a line instead of words")
    text = "check or rebuild the indexes of Kafka's own segments: .index, .timeindex; while no broker runs"
    kafka = add_command(commands, "kafka", [], text)
    inner = kafka.add_subparsers(
        title="commands", dest="kafka_command", metavar="COMMAND", required=True, parser_class=Parser
    )

    parser = add_command(inner, "check", [shared], "hold every .index and .timeindex against its log, changing nothing")
    parser.add_argument("directory", metavar="DIR", help=_DIRECTORY)
    parser.add_argument(
        "--interval", type=int, metavar="BYTES", help="also say which files differ from a rebuild with this interval"
    )
    parser.set_defaults(function=check)

    text = "make every .index and .timeindex anew, as Kafka's recovery makes them; never changes a log"
    parser = add_command(inner, "rebuild", [shared], text)
    parser.add_argument("directory", metavar="DIR", help=_DIRECTORY)
    parser.add_argument("--out", metavar="DIR2", help="write the files there and leave DIR as it is")
    parser.add_argument(
        "--interval", type=int, default=4096, metavar="BYTES", help="the topic's index.interval.bytes (default: 4096)"
    )
    parser.add_argument(
        "--max-index-size",
        type=int,
        default=10485760,
        metavar="BYTES",
        help="the topic's segment.index.bytes, which no index may exceed (default: 10485760)",
    )
    parser.set_defaults(function=rebuild)


def check(args: argparse.Namespace, config: Config) -> int:  # noqa: ARG001 - the settings are RocketMQ's store's
    """Check DIR; 1 if something does not hold."""
    prepare_compiler()
    from indexd.cli.output import ProgressBar  # noqa: PLC0415 - queries need no bar
    from indexd.kafka.check import check as check_directory  # noqa: PLC0415 - loads numba

    with ProgressBar("kafka check") as bar:
        report = check_directory(Path(args.directory), Disk(), interval=args.interval, on_progress=bar.to)
    _print_rows("finding", report.findings, report.notes, json_lines=wants_json(args))
    if wants_json(args):
        print_json(report.to_json() | {"directory": args.directory})
    else:
        _print_check(report, args.directory)
    return _EXIT_FINDINGS if len(report.findings) else 0


def rebuild(args: argparse.Namespace, config: Config) -> int:  # noqa: ARG001 - the settings are RocketMQ's store's
    """Rebuild DIR's indexes; 1 if a segment was refused, or its log cannot be read to the end."""
    prepare_compiler()
    from indexd.cli.output import ProgressBar  # noqa: PLC0415 - queries need no bar
    from indexd.kafka.rebuild import rebuild as rebuild_directory  # noqa: PLC0415 - loads numba

    with ProgressBar("kafka rebuild") as bar:
        report = rebuild_directory(
            Path(args.directory),
            OutputDisk(),
            out=None if args.out is None else Path(args.out),
            interval=args.interval,
            max_index_size=args.max_index_size,
            on_progress=bar.to,
        )
    _print_rows("problem", report.findings, report.notes, json_lines=wants_json(args))
    if wants_json(args):
        for segment in report.segments:
            print_json({"kind": "segment"} | segment.to_json())
        print_json(report.to_json() | {"directory": args.directory, "out": args.out})
    else:
        _print_rebuild(report, args.directory, args.out)
    return _EXIT_FINDINGS if len(report.findings) else 0


def _print_rows(kind: str, findings: Findings, notes: Sequence[Note], *, json_lines: bool) -> None:
    if json_lines:
        for found in findings.kept:
            row = {"file": found.file, "position": found.position, "what": found.what, "text": found.text}
            print_json({"kind": kind} | row)
        for note in notes:
            print_json({"kind": "note", "file": note.file, "what": note.what, "text": note.text})
        return
    shown: Counter[str] = Counter()
    for found in findings.kept:
        shown[found.what] += 1
        if shown[found.what] <= _LINES_PER_KIND:
            print_line(f"{printable(found.file)} byte {found.position}: {printable(found.text)}")
    for what, count in findings.counts.items():
        more = count - min(shown[what], _LINES_PER_KIND)
        if more > 0:
            print_line(f"and {more:,} more of the kind {what}")
    for note in notes:
        print_line(f"note: {printable(note.file)}: {printable(note.text)}")


def _print_check(report: CheckReport, directory: str) -> None:
    words = [_count(report.partitions, "partition"), _count(report.segments, "segment")]
    words += [_count(report.batches, "batch", "es"), _count(report.entries, "index entr", "ies", "y")]
    words += [f"{show_bytes(report.bytes)} in {report.seconds:.2f} s"]
    found = _count(len(report.findings), "finding") if report.findings else "no findings"
    print_line(f"{printable(directory)}: {', '.join(words)}: {found}")


def _print_rebuild(report: RebuildReport, directory: str, out: str | None) -> None:
    summary = report.to_json()
    place = "in place" if out is None else f"in {printable(out)}"
    words = [_count(report.partitions, "partition"), _count(summary["segments"], "segment")]
    words += [f"{summary['changed']} of them written {place}"]
    words += [f"{show_bytes(summary['bytes'])} in {report.seconds:.2f} s"]
    found = _count(len(report.findings), "problem") if report.findings else "no problems"
    print_line(f"{printable(directory)}: {', '.join(words)}: {found}")


def _count(number: int, word: str, several: str = "s", one: str = "") -> str:
    return f"{number:,} {word}{one if number == 1 else several}"
