"""query-key, query-unique-key, query-offset, query-time, message: asked on the command line, answered as text or JSON.

The options of a query are made from its model in ``indexd.query.questions``.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from indexd.cli.output import Parser, add_command, print_json, print_line, show_bytes, show_time, wants_json
from indexd.commitlog.decoder import Message
from indexd.config import Config
from indexd.config.units import printable
from indexd.errors import UsageError
from indexd.flush.frontier import read_frontier
from indexd.query import (
    Answer,
    Hit,
    LogTimeAnswer,
    OffsetAnswer,
    QueryIndex,
    QueueHit,
    QueueTimeAnswer,
    open_index,
    open_log,
)
from indexd.query.coverage import Coverage, why_not_complete
from indexd.query.message import NotFound, find_by_id, find_by_offset, message_fields, parse_message_id, unpack_body
from indexd.query.questions import ByKey, ByQueueOffset, ByTime, ByUniqueKey, Flags, check_times
from indexd.storage.disk import Disk
from indexd.storage.names import DataFiles

__all__ = ["check_times", "count64", "int64", "register", "some_name"]

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


def some_name(text: str) -> str:
    """A topic or a key, for argparse."""
    if not text:
        raise argparse.ArgumentTypeError("an empty text names nothing")
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise argparse.ArgumentTypeError(f"{printable(text)} is not UTF-8")
    return text


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


_Question = ByKey | ByUniqueKey | ByQueueOffset | ByTime
_Answer = Answer | OffsetAnswer | QueueTimeAnswer | LogTimeAnswer
_LINE_SIZE_MAX = 1 << 20
_BATCH_FIELDS = ("topic", "key", "max", "begin", "end", "index_type")
_HEAD = ("STORE TIME", "PHY OFFSET", "QUEUE/OFFSET", "SIZE", "TAGS", "KEYS", "UNIQ_KEY")
_QUEUE_HEAD = ("QUEUE OFFSET", "STORE TIME", "PHY OFFSET", "SIZE", "TAGS", "KEYS", "UNIQ_KEY", "PROBLEM")
_EXIT_FINDINGS = 1


def register(commands: Any, common: Parser) -> None:
    """Add the commands."""
    parser = _query_command(commands, common, "query-key", "find the messages of a topic that have a key", ByKey)
    parser.add_argument(
        "--batch",
        metavar="FILE",
        help="ask every line of FILE (- is standard input): topic, key, max, begin, end[, index type], by tabs",
    )
    parser.set_defaults(function=query_key)
    text = "find the message that a producer gave a unique key"
    _query_command(commands, common, "query-unique-key", text, ByUniqueKey)
    text = "show the messages of a queue from a queue offset on"
    _query_command(commands, common, "query-offset", text, ByQueueOffset)
    text = "find the queue offset of a store time, or with --log the physical offset"
    parser = _query_command(commands, common, "query-time", text, ByTime)
    parser.add_argument("--log", action="store_true", help="in the whole log: the first message of that time or later")
    parser.set_defaults(function=query_time)
    parser = add_command(commands, "message", [common], "show one message")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("-i", "--msg-id", metavar="ID", help="its offset message id, 32 or 56 hex digits")
    which.add_argument("-o", "--offset", type=count64, metavar="OFFSET", help="its physical offset")
    parser.add_argument("--body", action="store_true", help="show the body too (JSON always holds it)")
    parser.set_defaults(function=message)


def _query_command(commands: Any, common: Parser, name: str, text: str, model: type[_Question]) -> Parser:
    # Without defaults: only what was given goes into the model, which has them.
    parser = add_command(commands, name, [common], text)
    for field_name, field in model.model_fields.items():
        flags = _flags(field)
        choices = next((get_args(kind) for kind in _kinds(field) if get_origin(kind) is Literal), None)
        parser.add_argument(
            *flags.names,
            dest=field_name,
            default=argparse.SUPPRESS,
            required=field.is_required() and model is not ByKey,  # --batch brings them with it
            choices=choices,
            type=str if choices else some_name if str in _kinds(field) else int64,
            metavar=flags.metavar,
            help=field.description,
        )
    parser.set_defaults(function=lambda args, config: _ask_once(args, config, _question(model, dict(vars(args)))))
    return parser


def _kinds(field: FieldInfo) -> tuple[Any, ...]:
    # The types that a field may have, without what is said of them.
    if get_origin(field.annotation) is Literal:
        return (field.annotation,)
    kinds = get_args(field.annotation) or (field.annotation,)
    return tuple(get_args(kind)[0] if hasattr(kind, "__metadata__") else kind for kind in kinds)


def _flags(field: FieldInfo) -> Flags:
    kinds = get_args(field.annotation)
    metadata = [*field.metadata, *(said for kind in kinds for said in getattr(kind, "__metadata__", ()))]
    return next(said for said in metadata if isinstance(said, Flags))


def _question(model: type[_Question], given: dict[str, Any]) -> _Question:
    try:
        return model(**{name: given[name] for name in model.model_fields if given.get(name) is not None})
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)[0]
        name = _flags(model.model_fields[str(found["loc"][0])]).names[-1]
        if found["type"] == "missing":
            raise UsageError(f"{name} is missing", f"say {name}") from None
        said = found["msg"][:1].lower() + found["msg"][1:]
        raise UsageError(f"{name} {printable(str(found['input']))}: {said}", "see --help") from None


def query_key(args: argparse.Namespace, config: Config) -> int:
    """Answer one query, or each line of --batch."""
    given = {name for name in ByKey.model_fields if name in vars(args)}
    if args.batch is not None:
        if given - {"mode"}:
            raise UsageError("--batch brings all that is asked with it", "leave all but --mode out")
        return _batch(args, config)
    if not {"topic", "key"} <= given:
        raise UsageError("query-key needs a topic and a key", "say -t TOPIC -k KEY, or --batch FILE")
    return _ask_once(args, config, _question(ByKey, vars(args)))


def query_time(args: argparse.Namespace, config: Config) -> int:
    """Answer query-time, in a queue or in the log."""
    given = {name for name in ("topic", "queue", "boundary") if name in vars(args)}
    if args.log and given:
        raise UsageError("--log asks about the whole log", "leave -t, -i and --boundary out")
    if not args.log and not {"topic", "queue"} <= given:
        raise UsageError("query-time needs a topic and a queue", "say -t TOPIC -i QUEUE, or --log")
    return _ask_once(args, config, _question(ByTime, vars(args)))


def _ask_once(args: argparse.Namespace, config: Config, question: _Question) -> int:
    with closing(open_index(Disk(), config)) as index:
        answer = question.ask(index)
    if wants_json(args):
        print_json(answer.to_json())
    elif isinstance(answer, Answer):
        _print_answer(answer)
    elif isinstance(answer, OffsetAnswer):
        _print_offset(answer)
    elif isinstance(answer, LogTimeAnswer):
        _print_log_time(answer)
    else:
        _print_queue_time(answer)
    if not wants_json(args):
        print_line(coverage_line(answer.coverage))
    return 0


def _batch(args: argparse.Namespace, config: Config) -> int:
    mode = vars(args).get("mode")
    with closing(open_index(Disk(), config)) as index:
        if args.batch == "-":
            _answer_lines(sys.stdin.buffer, index, mode)
            return 0
        path = Path(args.batch)
        try:
            file = path.open("rb")
        except OSError as error:
            raise UsageError(f"cannot read {path} (from --batch): {error.strerror}", "check the path") from error
        with file:
            _answer_lines(file, index, mode)
    return 0


def _answer_lines(file: BinaryIO, index: QueryIndex, mode: str | None) -> None:
    number = 0
    while line := file.readline(_LINE_SIZE_MAX):
        number += 1
        try:
            answer = _batch_question(line, mode).ask(index)
        except (UsageError, argparse.ArgumentTypeError) as error:
            raise UsageError(f"line {number}: {error.args[0]}", getattr(error, "hint", "")) from error
        print_json(answer.to_json())
        sys.stdout.flush()


def _batch_question(line: bytes, mode: str | None) -> _Question:
    # ``topic TAB key TAB max TAB begin TAB end [TAB indexType]``
    if len(line) == _LINE_SIZE_MAX:
        raise UsageError(f"it has more than {_LINE_SIZE_MAX} bytes")
    try:
        fields = line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8").split("\t")
    except UnicodeDecodeError:
        raise UsageError("it is not UTF-8") from None
    if not 5 <= len(fields) <= 6:
        raise UsageError(f"it has {len(fields)} fields by tabs", "topic, key, max, begin, end[, index type]")
    given: dict[str, Any] = dict(zip(_BATCH_FIELDS, fields, strict=False)) | {"mode": mode}
    given |= {name: int64(given[name]) for name in ("max", "begin", "end")}
    given["index_type"] = given.get("index_type") or None
    return _question(ByKey, given)


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


def _print_offset(answer: OffsetAnswer) -> None:
    if answer.hits:
        head = _QUEUE_HEAD if answer.problems else _QUEUE_HEAD[:-1]
        print_table(head, [_queue_row(hit)[: len(head)] for hit in answer.hits])
    else:
        print_line(f"no message: {answer.why}")
    if answer.status == "OFFSET_TOO_SMALL":
        if answer.begins_late:
            print_line(f"the queue begins at offset {answer.min_offset}")
        else:
            print_line(f"before offset {answer.min_offset} nothing is left of the queue")
    if answer.expired:
        print_line(f"{answer.expired} messages have expired and were passed over")
    if answer.problems:
        print_line(f"{answer.problems} units name what is not their message")
    if answer.truncated:
        print_line(f"more: -o {answer.next_offset}")
    print_line(f"queue: offsets {answer.min_offset} to {answer.max_offset}")


def _queue_row(hit: QueueHit) -> tuple[str, ...]:
    found, unit = hit.hit, hit.unit
    time = "-" if found is None or found.store_timestamp is None else show_time(found.store_timestamp)
    texts = (None, None, None) if found is None else (found.tags, found.keys, found.uniq_key)
    return (
        str(hit.queue_offset),
        time,
        str(unit.phy_offset),
        str(unit.size),
        *(cell(text) for text in texts),
        cell(hit.problem),
    )


def _print_queue_time(answer: QueueTimeAnswer) -> None:
    if answer.queue_offset is None:
        print_line(f"no offset: {answer.why}")
    else:
        place = f"queue offset {answer.queue_offset}"
        if answer.phy_offset is None:
            print_line(f"{place}, where no message stands: {answer.why}")
        else:
            time = "unknown" if answer.store_timestamp is None else show_time(answer.store_timestamp)
            print_line(f"{place}: stored at {time}, physical offset {answer.phy_offset}")
        print_line(f"queue: offsets {answer.min_offset} to {answer.max_offset}")


def _print_log_time(answer: LogTimeAnswer) -> None:
    if answer.phy_offset is None or answer.store_timestamp is None:
        print_line(f"no message: {answer.why}")
    else:
        print_line(f"physical offset {answer.phy_offset}: stored at {show_time(answer.store_timestamp)}")
    if answer.unreadable:
        print_line(f"{answer.unreadable} places of the log hold what is no message")
