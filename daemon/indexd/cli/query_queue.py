"""query-offset and query-time: messages by their place in a queue, places by store time."""

from __future__ import annotations

import argparse
from contextlib import closing
from typing import Any

from indexd.cli.output import Parser, add_command, print_json, print_line, show_time, wants_json
from indexd.cli.query import cell, count64, coverage_line, int64, print_table, queue_id, some_name
from indexd.config import Config
from indexd.errors import UsageError
from indexd.query import (
    LogTimeAnswer,
    OffsetAnswer,
    OffsetQuery,
    QueueHit,
    QueueTimeAnswer,
    open_index,
    query_log_time,
    query_offset,
    query_time,
)
from indexd.query.by_time import BOUNDARIES
from indexd.storage.disk import Disk

_MAX_NUM = 32
_HEAD = ("QUEUE OFFSET", "STORE TIME", "PHY OFFSET", "SIZE", "TAGS", "KEYS", "UNIQ_KEY", "PROBLEM")


def register(commands: Any, common: Parser) -> None:
    """Add the commands."""
    parser = add_command(commands, "query-offset", [common], "show the messages of a queue from a queue offset on")
    parser.add_argument("-t", "--topic", required=True, type=some_name, help="the topic")
    parser.add_argument("-i", "--queue-id", required=True, type=queue_id, metavar="QUEUE", help="the queue's number")
    parser.add_argument("-o", "--offset", required=True, type=count64, metavar="OFFSET", help="the first queue offset")
    parser.add_argument(
        "-m", "--max", type=int64, default=_MAX_NUM, metavar="MAX", help=f"most messages (default: {_MAX_NUM})"
    )
    parser.set_defaults(function=by_offset)
    parser = add_command(
        commands, "query-time", [common], "find the queue offset of a store time, or with --log the physical offset"
    )
    parser.add_argument("-t", "--topic", type=some_name, help="the topic")
    parser.add_argument("-i", "--queue-id", type=queue_id, metavar="QUEUE", help="the queue's number")
    parser.add_argument("-s", "--timestamp", required=True, type=count64, metavar="MS", help="the store time")
    parser.add_argument(
        "--boundary",
        choices=BOUNDARIES,
        help="lower: the first message of that time or later (default); upper: the last of that time or earlier",
    )
    parser.add_argument("--log", action="store_true", help="in the whole log: the first message of that time or later")
    parser.set_defaults(function=by_time)


def by_offset(args: argparse.Namespace, config: Config) -> int:
    """Answer query-offset."""
    if args.max < 1:
        raise UsageError(f"-m {args.max} asks for nothing", "ask for at least 1")
    query = OffsetQuery(args.topic, args.queue_id, args.offset, args.max)
    with closing(open_index(Disk(), config)) as index:
        answer = query_offset(index, query)
    if wants_json(args):
        print_json(answer.to_json())
    else:
        _print_offset(answer)
    return 0


def by_time(args: argparse.Namespace, config: Config) -> int:
    """Answer query-time, in a queue or in the log."""
    given = (args.topic, args.queue_id, args.boundary)
    if args.log and given != (None, None, None):
        raise UsageError("--log asks about the whole log", "leave -t, -i and --boundary out")
    if not args.log and None in given[:2]:
        raise UsageError("query-time needs a topic and a queue", "say -t TOPIC -i QUEUE, or --log")
    answer: QueueTimeAnswer | LogTimeAnswer
    with closing(open_index(Disk(), config)) as index:
        if args.log:
            answer = query_log_time(index, args.timestamp)
        else:
            answer = query_time(index, args.topic, args.queue_id, args.timestamp, args.boundary or BOUNDARIES[0])
    if wants_json(args):
        print_json(answer.to_json())
    elif isinstance(answer, LogTimeAnswer):
        _print_log_time(answer)
    else:
        _print_queue_time(answer)
    return 0


def _print_offset(answer: OffsetAnswer) -> None:
    if answer.hits:
        head = _HEAD if answer.problems else _HEAD[:-1]
        print_table(head, [_row(hit)[: len(head)] for hit in answer.hits])
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
    print_line(coverage_line(answer.coverage))


def _row(hit: QueueHit) -> tuple[str, ...]:
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
    print_line(coverage_line(answer.coverage))


def _print_log_time(answer: LogTimeAnswer) -> None:
    if answer.phy_offset is None or answer.store_timestamp is None:
        print_line(f"no message: {answer.why}")
    else:
        print_line(f"physical offset {answer.phy_offset}: stored at {show_time(answer.store_timestamp)}")
    if answer.unreadable:
        print_line(f"{answer.unreadable} places of the log hold what is no message")
    print_line(coverage_line(answer.coverage))
