"""query-key, query-unique-key, query-offset, query-time, message: each question of ``QUESTIONS`` is a command.

Its options are made from its model. An answer is shown as JSON, or as a table of its hits with its other members below.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from indexd.cli.output import (
    EXIT_FINDINGS,
    Parser,
    add_command,
    print_fields,
    print_json,
    print_line,
    show_field,
    table_lines,
    wants_json,
)
from indexd.commitlog.decoder import Message
from indexd.config import Config, printable
from indexd.errors import UsageError
from indexd.flush.frontier import read_frontier
from indexd.pages.wording import show_local
from indexd.query import QUESTIONS, open_index, open_log
from indexd.query.message import NotFound, message_fields, unpack_body
from indexd.query.questions import ByKey, ByMessage, ByTime, Flags, Question, make_question
from indexd.query.source import Coverage, why_not_complete
from indexd.storage.disk import Disk
from indexd.storage.names import DataFiles

_LINE_SIZE_MAX = 1 << 20
_BATCH_FIELDS = ("topic", "key", "max", "begin", "end", "index_type")
#: Column of a table of hits -> its member.
_COLUMNS = {
    "STORE TIME": "storeTimestamp",
    "PHY OFFSET": "phyOffset",
    "QUEUE": "queueId",
    "OFFSET": "queueOffset",
    "SIZE": "size",
    "TAGS": "tags",
    "KEYS": "keys",
    "UNIQ_KEY": "uniqKey",
    "PROBLEM": "problem",
}
# Members of an answer that are in the table, or said in another way.
_ELSEWHERE = {"topic", "key", "indexType", "phyOffsets", "storeTimestamps", "hits", "messages", "coverage", "why"}


def register(commands: Any, common: Parser) -> None:
    """Add a command for each question."""
    for model in QUESTIONS:
        text = (model.__doc__ or "").strip()
        parser = add_command(commands, model.command, [common], text[:1].lower() + text[1:].removesuffix("."))
        fields = parser.add_mutually_exclusive_group(required=True) if model.is_by_one else parser
        for name, field in model.model_fields.items():
            flags, choices = _flags(field), _choices(field.annotation)
            # Without defaults: only what was given goes into the model, which has them.
            fields.add_argument(
                *flags.names,
                dest=name,
                default=argparse.SUPPRESS,
                required=field.is_required() and model is not ByKey,  # --batch brings them with it
                choices=choices,
                metavar=flags.metavar,
                help=field.description,
            )
        parser.set_defaults(function=query, model=model, batch=None, body=False)
        if model is ByKey:
            parser.add_argument(
                "--batch",
                metavar="FILE",
                help="ask every line of FILE (- is standard input): topic, key, max, begin, end[, index type], by tabs",
            )
        if model is ByTime:
            parser.add_argument(
                "--log", action="store_true", help="in the whole log: the first message of that time or later"
            )
        if model is ByMessage:
            parser.add_argument("--body", action="store_true", help="show the body too (JSON always holds it)")


def _flags(field: FieldInfo) -> Flags:
    return next(said for said in field.metadata if isinstance(said, Flags))


def _choices(annotation: Any) -> tuple[str, ...] | None:
    kinds = (annotation, *get_args(annotation))
    return next((get_args(kind) for kind in kinds if get_origin(kind) is Literal), None)


def _question(model: type[Question], given: dict[str, Any]) -> Question:
    fields = model.model_fields
    known = {name: given[name] for name in fields if given.get(name) is not None}
    hint = f"see indexd {model.command} --help"
    return make_question(model, known, lambda name: _flags(fields[name]).names[-1], hint=hint)


def query(args: argparse.Namespace, config: Config) -> int:
    """Ask what the command asks, or each line of --batch; 1 for a message that is not there."""
    given = vars(args)
    if args.batch is not None:
        if set(given) & set(ByKey.model_fields) - {"mode"}:
            raise UsageError("--batch brings all that is asked with it", "leave all but --mode out")
        return _batch(args, config)
    if args.model is ByTime and args.log != ("topic" not in given):
        raise UsageError("query-time asks about one queue, or about the whole log", "say -t TOPIC -i QUEUE, or --log")
    question = _question(args.model, given)
    disk, frontier = Disk(), DataFiles(config.store.data).frontier
    opened = open_index(disk, config) if question.needs_index else open_log(disk, config, read_frontier(disk, frontier))
    with closing(opened) as source:
        answer = question.answer(source)
    if isinstance(answer, NotFound):
        sys.stderr.write(f"indexd: {answer.reason}\n")
        return EXIT_FINDINGS
    if isinstance(answer, Message):
        _print_message(answer, args)
    elif wants_json(args):
        print_json(answer.to_dict())
    else:
        _print_answer(answer)
    return 0


def _batch(args: argparse.Namespace, config: Config) -> int:
    path = Path(args.batch)
    try:
        opened = nullcontext(sys.stdin.buffer) if args.batch == "-" else path.open("rb")
    except OSError as error:
        raise UsageError(f"cannot read {path} (from --batch): {error.strerror}", "check the path") from error
    with opened as file, closing(open_index(Disk(), config)) as index:
        for number, line in enumerate(iter(lambda: file.readline(_LINE_SIZE_MAX), b""), 1):
            try:
                answer = _batch_question(line, vars(args).get("mode")).answer(index)
            except UsageError as error:
                raise UsageError(f"line {number}: {error.args[0]}", error.hint) from error
            print_json(answer.to_dict())
            sys.stdout.flush()
    return 0


def _batch_question(line: bytes, mode: str | None) -> Question:
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
    return _question(ByKey, given | {"index_type": given.get("index_type") or None})


def _print_answer(answer: Any) -> None:
    row = answer.to_dict()
    hits = [
        hit | {"storeTimestamp": hit["storeTimestamp"] and show_local(hit["storeTimestamp"])} for hit in row["hits"]
    ]
    head = [name for name, member in _COLUMNS.items() if member != "problem" or any(member in hit for hit in hits)]
    if hits:
        for line in table_lines(head, [[hit.get(_COLUMNS[name]) for name in head] for hit in hits]):
            print_line(line)
    else:
        print_line(f"no message: {row.get('why') or 'cut off'}")
    members = {name: value for name, value in row.items() if name not in _ELSEWHERE and value is not False}
    if members:
        print_line(", ".join(f"{name} {show_field(name, value)}" for name, value in members.items()))
    print_line(coverage_line(answer.coverage))


def coverage_line(coverage: Coverage) -> str:
    """The last line of every answer."""
    rest = why_not_complete(coverage) or "all of the log"
    daemon = f"kept by pid {coverage.daemon_pid}" if coverage.daemon_pid is not None else "no daemon runs"
    return f"covered: log bytes {coverage.begin} to {coverage.end}, {rest}; {daemon}"


def _print_message(found: Message, args: argparse.Namespace) -> None:
    row = message_fields(found) | unpack_body(found).to_json()
    if wants_json(args):
        print_json(row)
        return
    properties, body = row.pop("properties"), row.pop("body")
    print_fields("message", row)
    for name, value in properties.items():
        print_line(f"  {printable(name)} = {printable(value)}")
    if args.body:
        print_line(f"body ({row['bodyEncoding']}):")
        print_line(body)
