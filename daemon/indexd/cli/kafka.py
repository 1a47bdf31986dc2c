"""kafka check, kafka rebuild: the indexes of Kafka's own segments held against their logs, and made anew."""

from __future__ import annotations

import argparse
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
    wants_json,
)
from indexd.config import Config
from indexd.config.compiled import prepare_compiler
from indexd.config.units import printable
from indexd.pages.wording import counted, show_size
from indexd.storage.disk import Disk, OutputDisk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from indexd.findings import Findings
    from indexd.kafka.check import CheckReport
    from indexd.kafka.format import Note
    from indexd.kafka.rebuild import RebuildReport

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

    text = "hold every .index and .timeindex against its log, changing nothing"
    parser = add_command(inner, "check", [shared], text, function=check)
    parser.add_argument("directory", metavar="DIR", help=_DIRECTORY)
    parser.add_argument(
        "--interval", type=int, metavar="BYTES", help="also say which files differ from a rebuild with this interval"
    )

    text = "make every .index and .timeindex anew, as Kafka's recovery makes them; never changes a log"
    parser = add_command(inner, "rebuild", [shared], text, function=rebuild)
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


def check(args: argparse.Namespace, config: Config) -> int:  # noqa: ARG001 - the settings are RocketMQ's store's
    """Check DIR; 1 if something does not hold."""
    prepare_compiler()
    from indexd.kafka.check import check as check_directory  # noqa: PLC0415 - loads numba

    with ProgressBar("kafka check") as bar:
        report = check_directory(Path(args.directory), Disk(), interval=args.interval, on_progress=bar.to)
    _print_rows("finding", report.findings, report.notes, json_lines=wants_json(args))
    if wants_json(args):
        print_json(report.to_json() | {"directory": args.directory})
    else:
        words = [counted(report.partitions, "partition"), counted(report.segments, "segment")]
        words += [counted(report.batches, "batch"), counted(report.entries, "index entry")]
        _print_summary(args.directory, words, report, counted(len(report.findings), "finding"))
    return EXIT_FINDINGS if len(report.findings) else 0


def rebuild(args: argparse.Namespace, config: Config) -> int:  # noqa: ARG001 - the settings are RocketMQ's store's
    """Rebuild DIR's indexes; 1 if a segment was refused, or its log cannot be read to the end."""
    prepare_compiler()
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
        place = "in place" if args.out is None else f"in {printable(args.out)}"
        words = [counted(report.partitions, "partition"), counted(len(report.segments), "segment")]
        words.append(f"{report.to_json()['changed']} of them written {place}")
        _print_summary(args.directory, words, report, counted(len(report.findings), "problem"))
    return EXIT_FINDINGS if len(report.findings) else 0


def _print_rows(kind: str, findings: Findings, notes: Sequence[Note], *, json_lines: bool) -> None:
    print_findings(findings, json_lines=json_lines, kind=kind)
    for note in notes:
        if json_lines:
            print_json({"kind": "note", "file": note.file, "what": note.what, "text": note.text})
        else:
            print_line(f"note: {printable(note.file)}: {printable(note.text)}")


def _print_summary(directory: str, words: list[str], report: CheckReport | RebuildReport, found: str) -> None:
    size = show_size(report.to_json()["bytes"])
    print_line(f"{printable(directory)}: {', '.join(words)}, {size} in {report.seconds:.2f} s: {found}")
