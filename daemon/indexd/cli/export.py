"""The command export: messages of the log as Parquet, by Spark."""

from __future__ import annotations

import argparse
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from indexd.cli.output import (
    Parser,
    ProgressBar,
    add_command,
    count64,
    print_json,
    print_line,
    show_bytes,
    typed,
    wants_json,
)
from indexd.cli.rebuild import spark_session
from indexd.config import Config
from indexd.config.compiled import prepare_compiler
from indexd.config.load import check_outside
from indexd.config.units import parse_place, printable
from indexd.errors import UsageError

if TYPE_CHECKING:
    from indexd.spark.export import Exported, ExportRequest

_COMPRESSIONS = ("zstd", "snappy", "none")
_MODES = ("error", "overwrite", "append")
_ON_EXPIRED = ("fail", "skip")


def register(commands: Any, common: Parser) -> None:
    """Add the command."""
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
        help="when DIR holds an export: stop; replace it; or add what the log has behind the last export of the same "
        "store, with the same topics and times (default: error)",
    )
    parser.add_argument(
        "--on-expired",
        choices=_ON_EXPIRED,
        default="fail",
        help="when messages expired behind the export that --mode append goes on with: stop, or go on without them "
        "(default: fail)",
    )
    parser.set_defaults(function=export)


def export(args: argparse.Namespace, config: Config) -> int:
    """Export the store to --to."""
    prepare_compiler()
    from indexd.recovery.open import check_store  # noqa: PLC0415 - loads numba

    # What is wrong with these need not wait for a session.
    to: Path = args.to
    check_store(config)
    check_outside(config, to, "--to")
    with suppress(ImportError):  # which package is missing, the session says
        request = _request(args, config, to)
    with spark_session(config, "indexd export", memory="4g") as spark:
        from indexd.spark.export import export as run  # noqa: PLC0415 - loads pyspark and pyarrow, which are optional

        with ProgressBar("export") as bar:
            found = run(spark, config, request, bar.to)
    if wants_json(args):
        print_json(_row(found, args.mode, str(to)))
    else:
        _print(found, str(to))
    return 0


def _request(args: argparse.Namespace, config: Config, to: Path) -> ExportRequest:
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
        on_expired=args.on_expired,
    )
    check_request(request)
    return request


def _words(text: str, flag: str) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    if not all(words) or any("\ud800" <= c <= "\udfff" for c in text):
        raise UsageError(f"{flag} {printable(text)} is no list of names", "write names with commas between them")
    return words


def _row(found: Exported, mode: str, to: str) -> dict[str, Any]:
    return {
        "to": to,
        "mode": mode,
        "job": found.job,
        "rows": found.rows,
        "files": found.files,
        "bytes": found.bytes,
        "partitions": found.partitions,
        "beginOffset": found.begin_offset,
        "endOffset": found.end_offset,
        "expiredBytes": found.expired[1] - found.expired[0] if found.expired else 0,
        "missingTopics": list(found.missing_topics),
        "seconds": round(found.seconds, 6),
    }


def _print(found: Exported, to: str) -> None:
    rate = found.rows / found.seconds if found.seconds else 0
    words = f"{found.rows:,} messages"
    if found.files is not None:
        words += f" in {found.files:,} files of {show_bytes(found.bytes or 0)}"
    if found.partitions is not None and found.partitions > 1:
        words += f" in {found.partitions:,} partitions"
    print_line(f"{printable(to)}: {words}, in {found.seconds:.2f} s ({rate:,.0f} messages/s)")
    print_line(f"  of log bytes {found.begin_offset} to {found.end_offset}")
    if found.expired:
        begin, end = found.expired
        print_line(f"  log bytes {begin} to {end} had expired before they were exported: their messages are missing")
    for topic in found.missing_topics:
        print_line(f"  no message of the topic {printable(topic)}")
