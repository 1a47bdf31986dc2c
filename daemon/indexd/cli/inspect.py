"""Log segments in words or JSON lines: which there are, and frame by frame what stands in them.

inspect: what a file or directory of a store, or of ours, holds. Reads only; needs neither daemon nor frontier.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from indexd.cli.inspect_index import inspect_index, show_header
from indexd.cli.inspect_queue import (
    QUEUE_FOLDER,
    inspect_queue,
    inspect_sparse,
    is_sparse_name,
    queue_kind,
    show_queue_folder,
    show_queues,
    show_sparse_folder,
)
from indexd.cli.output import Parser, add_command, print_json, print_line, show_bytes, show_time, wants_json
from indexd.cli.query import count64, some_name
from indexd.commitlog.decoder import Decoded, DecoderOptions, Message, decode_frame
from indexd.commitlog.format import HEAD_SIZE, MAGIC_V1, MAGIC_V2, Corrupt, EndOfFile, NotYetWritten
from indexd.commitlog.segments import Segment
from indexd.config import Config
from indexd.config.units import printable
from indexd.errors import UsageError
from indexd.flush.frontier import CHECKPOINT_SIZE, StoreCheckpoint, read_frontier
from indexd.index.format import INDEX_TYPES, IndexLayout
from indexd.storage.disk import Disk, DiskFile
from indexd.storage.lock import owner_pid
from indexd.storage.names import is_index_name, segment_base

_READ_SIZE = 1 << 20
_EXIT_FINDINGS = 1


def inspect_segment(path: Path, base: int, disk: Disk, args: argparse.Namespace) -> int:
    """Show one segment; 1 if bytes in it are corrupt."""
    with disk.open_read(path) as file:
        return _show([Segment(base, file.size(), path)], disk, args)


def inspect_directory(directory: Path, disk: Disk, args: argparse.Namespace) -> int:
    """Show the segments of a commitlog directory, in log order; 1 if bytes in them are corrupt."""
    found = []
    for name, size in disk.list_dir(directory):
        base = segment_base(name)
        if base is not None and size:
            found.append(Segment(base, size, directory / name))
    return _show(sorted(found, key=lambda segment: segment.base), disk, args)


def read_frames(file: DiskFile, segment: Segment, start: int, options: DecoderOptions) -> Iterator[Decoded]:
    """What stands in ``segment`` from physical offset ``start`` on, up to and with the first that is no message."""
    position, first, data = start - segment.base, 0, b""
    while position < segment.size:
        if position + HEAD_SIZE > first + len(data):
            first, data = position, file.pread(_READ_SIZE, position)
        offset = segment.base + position
        found = decode_frame(data, position - first, offset, segment.end, options)
        if isinstance(found, NotYetWritten) and position + found.needed > first + len(data):
            first, data = position, file.pread(max(_READ_SIZE, found.needed), position)
            found = decode_frame(data, 0, offset, segment.end, options)
        yield found
        if not isinstance(found, Message):
            return
        position += found.size


def _show(segments: list[Segment], disk: Disk, args: argparse.Namespace) -> int:
    start = args.offset if args.offset is not None else (segments[0].base if segments else 0)
    if args.offset is not None and not any(segment.base <= start < segment.end for segment in segments):
        raise UsageError(
            f"physical offset {start} is in no segment of {' or '.join(args.paths)}",
            "see the segments without --offset",
        )
    for segment in segments:
        row = {"kind": "segment", "path": str(segment.path), "base": segment.base, "size": segment.size}
        text = f"segment {segment.path}: physical offsets {segment.base} to {segment.end}, {show_bytes(segment.size)}"
        _say(row, text, json_lines=wants_json(args))
    shown, damaged = 0, False
    for segment in segments:
        if segment.end <= start:
            continue
        with disk.open_read(segment.path) as file:
            for found in read_frames(file, segment, max(start, segment.base), DecoderOptions()):
                if args.frames and shown >= args.frames:
                    row = {"kind": "more", "phyOffset": _offset_of(found)}
                    _say(
                        row, f"  and more from {_offset_of(found)} on (--frames, --offset)", json_lines=wants_json(args)
                    )
                    return _EXIT_FINDINGS if damaged else 0
                _say(*_frame(found), json_lines=wants_json(args))
                damaged |= isinstance(found, Corrupt)
                shown += 1
    return _EXIT_FINDINGS if damaged else 0


def _offset_of(found: Decoded) -> int:
    return found.phy_offset if isinstance(found, Message) else found.offset


def _frame(found: Decoded) -> tuple[dict[str, Any], str]:
    if isinstance(found, Message):
        return _message(found)
    row: dict[str, Any] = {"kind": "frame", "phyOffset": found.offset}
    if isinstance(found, EndOfFile):
        return row | {"outcome": "endOfFile"}, f"  {found.offset}: end of the segment"
    if isinstance(found, NotYetWritten):
        claims = f", but for the head of a frame of {found.needed} bytes" if found.needed else ""
        row |= {"outcome": "notYetWritten", "needed": found.needed}
        return row, f"  {found.offset}: not yet written{claims}"
    return row | {"outcome": "corrupt", "reason": found.reason}, f"  {found.offset}: corrupt: {found.reason}"


def _message(found: Message) -> tuple[dict[str, Any], str]:
    row = {
        "kind": "frame",
        "phyOffset": found.phy_offset,
        "outcome": "message",
        "size": found.size,
        "topic": found.topic,
        "queueId": found.queue_id,
        "queueOffset": found.queue_offset,
        "storeTimestamp": found.store_timestamp,
        "sysFlag": found.sys_flag,
        "keys": found.keys,
        "uniqKey": found.uniq_key,
        "tags": found.tags,
        "bodySize": len(found.body),
    }
    keys = printable(" ".join(found.keys)) or "-"
    text = (
        f"  {found.phy_offset}: {found.size} bytes, {show_time(found.store_timestamp)}, "
        f"topic {printable(found.topic)}, queue {found.queue_id}/{found.queue_offset}, keys {keys}, "
        f"uniq key {printable(found.uniq_key or '-')}, tags {printable(found.tags or '-')}"
    )
    return row, text


def _say(row: dict[str, Any], text: str, *, json_lines: bool) -> None:
    if json_lines:
        print_json(row)
    else:
        print_line(text)


_FRAMES = 20


def register(commands: Any, common: Parser) -> None:
    """Add the command."""
    parser = add_command(commands, "inspect", [common], "show what a file or directory holds: of a store, or of indexd")
    parser.add_argument(
        "paths", nargs="+", metavar="PATH", help="an index, queue or log file, a checkpoint, or a directory of them"
    )
    parser.add_argument("--slots", action="store_true", help="every slot of an index file that is not empty")
    parser.add_argument("--entries", metavar="A:B", help="entries or units from number A up to B, B left out")
    parser.add_argument("--chain", type=count64, metavar="SLOT", help="the entries of one slot, newest first")
    parser.add_argument(
        "--topic", type=some_name, metavar="T", help="with --key: the entries of an index file for that key"
    )
    parser.add_argument("--key", type=some_name, metavar="K", help="see --topic")
    parser.add_argument("--index-type", choices=INDEX_TYPES, help="what the key is; T: the tags")
    parser.add_argument(
        "--frames",
        type=int,
        default=_FRAMES,
        metavar="N",
        help=f"most frames, units or entries, 0 = all (default: {_FRAMES})",
    )
    parser.add_argument("--offset", type=count64, metavar="O", help="the physical offset of the first frame to show")
    parser.set_defaults(function=inspect)


def inspect(args: argparse.Namespace, config: Config) -> int:
    """Show each PATH; 1 if something in one of them is damaged."""
    if args.frames < 0:
        raise UsageError(f"--frames {args.frames} shows nothing", "0 shows all")
    disk = Disk()
    for text in args.paths:
        path = Path(text)
        if text == "" or (disk.exists(path) and not (path.is_file() or path.is_dir())):
            raise UsageError(f"{text or 'an empty path'} is neither a file nor a directory")
        if not disk.exists(path):
            raise UsageError(f"there is nothing at {path}", "check the path")
    return max([_inspect(Path(text), disk, args, config) for text in args.paths])


def _inspect(path: Path, disk: Disk, args: argparse.Namespace, config: Config) -> int:
    if path.is_dir():
        return _directory(path, disk, args)
    if is_index_name(path.name):
        return inspect_index(path, disk, args, config)
    if is_sparse_name(path.name):
        return inspect_sparse(path, disk, args)
    base = segment_base(path.name)
    if base is not None:
        # Files of queues have the same names; those of a log are known by their first frame, or by nothing.
        kind = None if _is_log(path, disk) else queue_kind(path, disk)
        return inspect_segment(path, base, disk, args) if kind is None else inspect_queue(path, kind, disk, args)
    for name, show in (("checkpoint", _checkpoint), ("frontier", _frontier), ("abort", _abort), ("state", _state)):
        if path.name == name:
            show(path, disk, json_lines=wants_json(args))
            return 0
    return _by_content(path, disk, args, config)


def _by_content(path: Path, disk: Disk, args: argparse.Namespace, config: Config) -> int:
    # A copy under another name: its size or its first bytes must tell.
    with disk.open_read(path) as file:
        size, head = file.size(), file.pread(36, 0)
    if size == IndexLayout(config.index.hash_slot_num, config.index.index_num).file_size:
        return inspect_index(path, disk, args, config)
    if _is_log(path, disk):
        return inspect_segment(path, int.from_bytes(head[28:36], "big"), disk, args)
    kind = queue_kind(path, disk)
    if kind is not None:
        return inspect_queue(path, kind, disk, args)
    if size == CHECKPOINT_SIZE:
        _checkpoint(path, disk, json_lines=wants_json(args))
        return 0
    raise UsageError(
        f"{path} of {size} bytes is neither a log segment, a queue file nor a checkpoint, nor an index file of "
        f"{config.index.hash_slot_num} slots and {config.index.index_num} entries",
        "for an index file give the --hash-slot-num and --index-num it was made with",
    )


def _is_log(path: Path, disk: Disk) -> bool:
    # By the head of its first frame, which says where it stands.
    with disk.open_read(path) as file:
        head = file.pread(36, 0)
    base = segment_base(path.name)
    place = int.from_bytes(head[28:36], "big")
    return len(head) == 36 and int.from_bytes(head[4:8], "big") in (MAGIC_V1, MAGIC_V2) and base in (None, place)


def _directory(path: Path, disk: Disk, args: argparse.Namespace) -> int:
    names = [name for name, _ in disk.list_dir(path)]
    numbered = [name for name in names if segment_base(name) is not None]
    if numbered and not _is_log(path / numbered[0], disk) and queue_kind(path / numbered[0], disk) is not None:
        show_queue_folder(path, disk, json_lines=wants_json(args))
        return 0
    if numbered:
        return inspect_directory(path, disk, args)
    found = _index_files(path, disk, args) + show_sparse_folder(path, disk, json_lines=wants_json(args))
    for name, show in (("frontier", _frontier), ("checkpoint", _checkpoint), ("abort", _abort), ("state", _state)):
        if name in names:
            show(path / name, disk, json_lines=wants_json(args))
            found += 1
    if "frontier" in names or "lock" in names:
        pid = owner_pid(path / "lock")
        _inspect_say(
            {"kind": "lock", "path": str(path / "lock"), "ownerPid": pid},
            f"lock: {'no indexd holds it' if pid is None else f'held by pid {pid}'}",
            json_lines=wants_json(args),
        )
    if (path / "index").is_dir():
        found += _index_files(path / "index", disk, args)
    if (path / "sparse").is_dir():
        found += show_sparse_folder(path / "sparse", disk, json_lines=wants_json(args))
    if (path / QUEUE_FOLDER).is_dir():
        found += show_queues(path / QUEUE_FOLDER, disk, json_lines=wants_json(args))
    elif path.name == QUEUE_FOLDER:
        found += show_queues(path, disk, json_lines=wants_json(args))
    if (path / "commitlog").is_dir():
        return inspect_directory(path / "commitlog", disk, args)
    if not found:
        raise UsageError(f"{path} holds nothing of a store or of indexd", "name a store, a data directory or a file")
    return 0


def _index_files(directory: Path, disk: Disk, args: argparse.Namespace) -> int:
    rows = [(name, size) for name, size in disk.list_dir(directory) if is_index_name(name)]
    for name, size in rows:
        with disk.open_read(directory / name) as file:
            show_header(directory / name, size, file.pread(40, 0), None, json_lines=wants_json(args))
    return len(rows)


def _checkpoint(path: Path, disk: Disk, *, json_lines: bool) -> None:
    read = StoreCheckpoint.unpack(disk.read(path), path)
    row: dict[str, Any] = {
        "kind": "checkpoint",
        "path": str(path),
        "physicMsgTimestamp": read.physic_msg_timestamp,
        "logicsMsgTimestamp": read.logics_msg_timestamp,
        "indexMsgTimestamp": read.index_msg_timestamp,
        "masterFlushedOffset": read.master_flushed_offset,
        "confirmPhyOffset": read.confirm_phy_offset,
    }
    lines = [f"checkpoint {path}"]
    for name, value in list(row.items())[2:]:
        lines.append(f"  {name:<20} {value}{f' ({show_time(value)})' if name.endswith('Timestamp') and value else ''}")
    _inspect_say(row, "\n".join(lines), json_lines=json_lines)


def _frontier(path: Path, disk: Disk, *, json_lines: bool) -> None:
    frontier = read_frontier(disk, path)
    if frontier is None:
        return
    row = json.loads(disk.read(path)) if json_lines else {}
    full = sum(mark.full for mark in frontier.index)
    lines = [
        f"frontier {path}",
        f"  store        {printable(frontier.store)}, segments of {show_bytes(frontier.segment_size)}",
        f"  layout       {frontier.layout.hash_slot_num} slots, {frontier.layout.index_num} entries, "
        f"flavour {frontier.flavour}",
        f"  durable      log bytes {frontier.begin_offset} to {frontier.phy_offset}, {frontier.messages} messages, "
        f"the last at {show_time(frontier.store_timestamp)}",
        f"  index files  {len(frontier.index)}, {full} of them full",
    ]
    if frontier.queues is not None:
        units = sum(mark.max_offset - mark.min_offset for mark in frontier.queues)
        lines.append(
            f"  queues       {len(frontier.queues)}, {units} units, files of {show_bytes(frontier.queue_file_size)}"
        )
    if frontier.sparse is not None:
        pairs, interval = len(frontier.sparse.segments), frontier.sparse.interval
        lines.append(f"  sparse       {pairs} pairs, an entry in {show_bytes(interval)} of log")
    if frontier.refill_offset is not None:
        lines.append(f"  refill       queues and sparse indexes are filled up to {frontier.refill_offset}")
    lines += [
        f"  uncovered    log bytes {gap.begin} to {gap.end}: {printable(gap.reason)}" for gap in frontier.uncovered
    ]
    _inspect_say({"kind": "frontier", "path": str(path), **row}, "\n".join(lines), json_lines=json_lines)


def _abort(path: Path, disk: Disk, *, json_lines: bool) -> None:
    text = disk.read(path)[:64].decode("ascii", "replace").strip()
    what = f"written by pid {text}" if text else "empty"
    _inspect_say(
        {"kind": "abort", "path": str(path), "pid": int(text) if text.isdecimal() else None},
        f"abort {path}: {printable(what)}; it runs, or did not stop cleanly",
        json_lines=json_lines,
    )


def _state(path: Path, disk: Disk, *, json_lines: bool) -> None:
    try:
        row = json.loads(disk.read(path))
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise UsageError(f"{path} is no state of indexd", "name a data directory")
    text = ", ".join(f"{printable(str(name))} {printable(str(value))}" for name, value in row.items())
    _inspect_say({"kind": "state", "path": str(path), **row}, f"state {path}: {text}", json_lines=json_lines)


def _inspect_say(row: dict[str, Any], text: str, *, json_lines: bool) -> None:
    if json_lines:
        print_json(row)
        return
    for line in text.split("\n"):
        print_line(line)
