"""What the commands that query share: numbers and names as they are typed, tables, and what an answer covers.

query-key, query-unique-key and message: what is asked on the command line, answered in words or as JSON lines.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO

from indexd.cli.output import Parser, add_command, print_json, print_line, show_bytes, show_time, wants_json
from indexd.commitlog.decoder import Message
from indexd.config import Config
from indexd.config.units import printable
from indexd.errors import UsageError
from indexd.flush.frontier import read_frontier
from indexd.index.format import INDEX_TYPES
from indexd.query import (
    TIME_MAX,
    TIME_MIN,
    Answer,
    Hit,
    KeyQuery,
    QueryIndex,
    open_index,
    open_log,
    query_exact,
    query_rocketmq,
)
from indexd.query.coverage import Coverage, why_not_complete
from indexd.query.message import NotFound, find_by_id, find_by_offset, message_fields, parse_message_id, unpack_body
from indexd.storage.disk import Disk
from indexd.storage.names import DataFiles

_INT64 = re.compile(r"-?[0-9]{1,19}", re.ASCII)


def int64(text: str) -> int:
    """A whole number of 64 bits, for argparse."""
    if not _INT64.fullmatch(text) or not -(2**63) <= int(text) < 2**63:
        raise argparse.ArgumentTypeError(f"{printable(text)!r} is no whole number of 64 bits")
    return int(text)


def count64(text: str) -> int:
    """An offset or a time: a whole number of 64 bits that is not negative, for argparse."""
    number = int64(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number} is negative: offsets, and times in ms since 1970, begin at 0")
    return number


def queue_id(text: str) -> int:
    """A queue's number, for argparse."""
    number = int64(text)
    if not 0 <= number < 2**31:
        raise argparse.ArgumentTypeError(f"{number} is no queue: they are numbered from 0 to {2**31 - 1}")
    return number


def some_name(text: str) -> str:
    """A topic or a key, for argparse."""
    if not text:
        raise argparse.ArgumentTypeError("an empty text names nothing")
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise argparse.ArgumentTypeError(f"{printable(text)} is not UTF-8")
    return text


def check_times(begin: int, end: int) -> None:
    """UsageError if the first store time is behind the last one."""
    if begin > end:
        raise UsageError(f"the first store time, {begin}, is behind the last one, {end}", "exchange them")


def cell(value: object) -> str:
    """A value of a table: ``-`` for none, and nothing that a terminal would obey."""
    return "-" if value is None or value == "" else printable(str(value))


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as their widest cell."""
    table = [head, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    for row in table:
        print_line("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def coverage_line(coverage: Coverage) -> str:
    """The last line of every answer."""
    rest = why_not_complete(coverage) or "all of the log"
    daemon = f"kept by pid {coverage.daemon_pid}" if coverage.daemon_pid is not None else "no daemon runs"
    return f"covered: log bytes {coverage.begin} to {coverage.end}, {rest}; {daemon}"


_MODES = {"exact": query_exact, "rocketmq": query_rocketmq}
_MAX_NUM = 64
_LINE_SIZE_MAX = 1 << 20
_HEAD = ("STORE TIME", "PHY OFFSET", "QUEUE/OFFSET", "SIZE", "TAGS", "KEYS", "UNIQ_KEY")
_EXIT_FINDINGS = 1


def register(commands: Any, common: Parser) -> None:
    """Add the commands."""
    parser = _query_command(commands, common, "query-key", "find the messages of a topic that have a key")
    parser.add_argument("-t", "--topic", type=some_name, help="the topic")
    parser.add_argument("-k", "--key", type=some_name, help="one of the message's keys")
    parser.add_argument(
        "--index-type", choices=INDEX_TYPES, help="K: a key, U: the unique key, T: the tags; default K or U"
    )
    parser.add_argument(
        "--batch",
        metavar="FILE",
        help="ask every line of FILE (- is standard input): topic, key, max, begin, end[, index type], by tabs",
    )
    parser.set_defaults(function=query_key)
    parser = _query_command(commands, common, "query-unique-key", "find the message that a producer gave a unique key")
    parser.add_argument("-t", "--topic", required=True, type=some_name, help="the topic")
    parser.add_argument(
        "-i", "--msg-id", required=True, type=some_name, metavar="MSGID", help="the unique key (UNIQ_KEY)"
    )
    parser.set_defaults(function=query_unique_key)
    parser = add_command(commands, "message", [common], "show one message")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("-i", "--msg-id", metavar="ID", help="its offset message id, 32 or 56 hex digits")
    which.add_argument("-o", "--offset", type=count64, metavar="OFFSET", help="its physical offset")
    parser.add_argument("--body", action="store_true", help="show the body too (JSON always holds it)")
    parser.set_defaults(function=message)


def query_key(args: argparse.Namespace, config: Config) -> int:
    """Answer one query, or each line of --batch."""
    if args.batch is not None:
        given = (args.topic, args.key, args.begin, args.max, args.index_type, args.cursor)
        if any(value is not None for value in given) or args.end != TIME_MAX:
            raise UsageError("--batch brings all that is asked with it", "leave all but --mode out")
        return _batch(args, config)
    if args.topic is None or args.key is None:
        raise UsageError("query-key needs a topic and a key", "say -t TOPIC -k KEY, or --batch FILE")
    return _one(args, config, _query(args, args.key, _MAX_NUM, args.index_type))


def query_unique_key(args: argparse.Namespace, config: Config) -> int:
    """Answer one query for a UNIQ_KEY; the broker's cap for those holds in rocketmq mode."""
    query = _query(args, args.msg_id, _MAX_NUM, "U")
    if args.mode == "rocketmq":
        query = query._replace(max_num=config.query.default_query_max_num)
    return _one(args, config, query)


def message(args: argparse.Namespace, config: Config) -> int:
    """Show one message; 1 if there is none."""
    wanted = None if args.msg_id is None else parse_message_id(args.msg_id)
    disk = Disk()
    frontier = read_frontier(disk, DataFiles(config.store.data).frontier)
    with closing(open_log(disk, config, frontier, check_crc=True)) as log:
        found = find_by_offset(log, args.offset) if wanted is None else find_by_id(log, wanted)
    if isinstance(found, NotFound):
        sys.stderr.write(f"indexd: {found.reason}\n")
        return _EXIT_FINDINGS
    if wants_json(args):
        print_json(message_fields(found) | unpack_body(found).to_json())
    else:
        _print_message(found, with_body=args.body)
    return 0


def _query_command(commands: Any, common: Parser, name: str, text: str) -> argparse.ArgumentParser:
    parser = add_command(commands, name, [common], text)
    parser.add_argument(
        "--mode",
        choices=sorted(_MODES),
        default="exact",
        help="exact: every message that matches, once; rocketmq: what the broker itself would answer",
    )
    parser.add_argument(
        "-b", "--begin", type=count64, metavar="MS", help="first store time (default: none; in mode rocketmq 0)"
    )
    parser.add_argument(
        "-e", "--end", type=count64, default=TIME_MAX, metavar="MS", help="last store time (default: none)"
    )
    parser.add_argument("-m", "--max", type=int64, metavar="MAX", help="most messages, the newest first (default: 64)")
    parser.add_argument(
        "--cursor", type=count64, metavar="CURSOR", help="go on behind an exact answer that was cut off: its cursor"
    )
    return parser


def _query(args: argparse.Namespace, key: str, max_num: int, index_type: str | None) -> KeyQuery:
    begin = args.begin if args.begin is not None else (0 if args.mode == "rocketmq" else TIME_MIN)
    most = max_num if args.max is None else args.max
    if most < 1 and args.mode == "exact":
        raise UsageError(f"-m {most} asks for nothing", "ask for at least 1")
    if args.cursor is not None and args.mode != "exact":
        raise UsageError("--cursor goes on behind an exact answer, and the broker's own has none", "leave --mode out")
    check_times(begin, args.end)
    return KeyQuery(args.topic, key, most, begin, args.end, index_type, args.cursor)


def _one(args: argparse.Namespace, config: Config, query: KeyQuery) -> int:
    with closing(open_index(Disk(), config)) as index:
        answer = _MODES[args.mode](index, query)
    if wants_json(args):
        print_json(answer.to_json())
    else:
        _print_answer(answer)
    return 0


def _batch(args: argparse.Namespace, config: Config) -> int:
    with closing(open_index(Disk(), config)) as index:
        if args.batch == "-":
            _answer_lines(sys.stdin.buffer, index, args.mode)
            return 0
        path = Path(args.batch)
        try:
            file = path.open("rb")
        except OSError as error:
            raise UsageError(f"cannot read {path} (from --batch): {error.strerror}", "check the path") from error
        with file:
            _answer_lines(file, index, args.mode)
    return 0


def _answer_lines(file: BinaryIO, index: QueryIndex, mode: str) -> None:
    number = 0
    while line := file.readline(_LINE_SIZE_MAX):
        number += 1
        if len(line) == _LINE_SIZE_MAX:
            raise UsageError(f"line {number} has more than {_LINE_SIZE_MAX} bytes")
        query = parse_batch_line(line, number)
        try:
            check_times(query.begin, query.end)
            answer = _MODES[mode](index, query)
        except UsageError as error:
            raise UsageError(f"line {number}: {error.args[0]}", error.hint) from error
        print_json(answer.to_json())
        sys.stdout.flush()


def parse_batch_line(line: bytes, number: int) -> KeyQuery:
    """``topic TAB key TAB max TAB begin TAB end [TAB indexType]``; UsageError names the line."""
    try:
        fields = line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8").split("\t")
    except UnicodeDecodeError:
        raise UsageError(f"line {number} is not UTF-8") from None
    if not 5 <= len(fields) <= 6:
        raise UsageError(f"line {number} has {len(fields)} fields by tabs", "topic, key, max, begin, end[, index type]")
    index_type = fields[5] if len(fields) == 6 else ""
    if index_type and index_type not in INDEX_TYPES:
        raise UsageError(f"line {number}: index type {index_type!r} is not one of {', '.join(INDEX_TYPES)}")
    try:
        topic, key = some_name(fields[0]), some_name(fields[1])
        max_num, begin, end = int64(fields[2]), count64(fields[3]), count64(fields[4])
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"line {number}: {error}") from None
    return KeyQuery(topic, key, max_num, begin, end, index_type or None)


def _print_answer(answer: Answer) -> None:
    if answer.hits:
        print_table(_HEAD, [_row(hit) for hit in answer.hits])
    else:
        print_line(f"no message{': ' + answer.why if answer.why else ''}")
    if answer.truncated is not None:
        print_line(f"cut off by {answer.truncated}: there may be more (-m, or --query-walk-max)")
    if answer.cursor is not None:
        print_line(f"more: --cursor {answer.cursor}")
    if answer.expired:
        print_line(f"{answer.expired} entries of this key's hash point to messages that have expired")
    if answer.unreadable:
        print_line(f"{answer.unreadable} entries of this key's hash point to what is no message")
    if answer.last_update is not None:
        print_line(
            f"index last updated at {show_time(answer.last_update.timestamp)}, offset {answer.last_update.phy_offset}"
        )
    print_line(coverage_line(answer.coverage))


def _print_message(found: Message, *, with_body: bool) -> None:
    body = unpack_body(found)
    fields = message_fields(found)
    properties = fields.pop("properties")
    for name in ("storeTimestamp", "bornTimestamp"):
        fields[name] = f"{fields[name]} ({show_time(fields[name])})"
    fields["keys"] = " ".join(fields["keys"])
    fields["body"] = show_bytes(len(body.data))
    if body.compression is not None:
        unpacked = f"unpacked from {len(found.body)} bytes" if body.is_unpacked else "as stored, not unpacked"
        fields["body"] += f", {body.compression}, {unpacked}"
    for name, value in fields.items():
        print_line(f"{name:<26} {cell(value)}")
    for name, value in properties.items():
        print_line(f"  {cell(name)} = {cell(value)}")
    if with_body:
        row = body.to_json()
        print_line(f"body ({row['bodyEncoding']}):")
        print_line(row["body"])


def _row(hit: Hit) -> tuple[str, ...]:
    time = "-" if hit.store_timestamp is None else show_time(hit.store_timestamp)
    queue = "-" if hit.queue_id is None else f"{hit.queue_id}/{hit.queue_offset}"
    size = "-" if hit.size is None else str(hit.size)
    return (time, str(hit.phy_offset), queue, size, cell(hit.tags), cell(hit.keys), cell(hit.uniq_key))
