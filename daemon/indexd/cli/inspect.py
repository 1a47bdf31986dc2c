"""inspect: what a file or directory of a store, or of indexd, holds. Reads only; needs neither daemon nor frontier."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from indexd.cli.inspect_records import (
    Report,
    inspect_index,
    inspect_queue,
    inspect_queue_ext,
    inspect_segments,
    inspect_sparse,
    queue_of,
    show_index_header,
    show_sparse_file,
    sparse_suffix,
)
from indexd.cli.output import Parser, add_command, show_bytes, show_time
from indexd.cli.query import count64, some_name
from indexd.commitlog.format import MAGIC_V1, MAGIC_V2
from indexd.commitlog.segments import Segment
from indexd.config import Config
from indexd.config.units import printable
from indexd.consumequeue.format import (
    BATCH_FOLDER,
    BATCH_UNIT,
    BATCH_UNIT_END,
    BATCH_UNIT_SIZE,
    EXT_FOLDER,
    UNIT,
    UNIT_SIZE,
    BatchUnit,
    Unit,
    file_offset,
    queue_id_of,
)
from indexd.errors import UsageError
from indexd.flush.frontier import CHECKPOINT_SIZE, StoreCheckpoint, read_frontier
from indexd.index.format import INDEX_TYPES, IndexLayout
from indexd.storage.disk import Disk
from indexd.storage.lock import owner_pid
from indexd.storage.names import is_index_name, segment_base

_FRAMES = 20
_EXIT_FINDINGS = 1
_QUEUE_FOLDER = "consumequeue"
# Units by which a file is known that no folder tells.
_UNITS_ASKED = 3


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
    report = Report(Disk(), args, config)
    for text in args.paths:
        path = Path(text)
        if text == "" or (report.disk.exists(path) and not (path.is_file() or path.is_dir())):
            raise UsageError(f"{text or 'an empty path'} is neither a file nor a directory")
        if not report.disk.exists(path):
            raise UsageError(f"there is nothing at {path}", "check the path")
    for path in map(Path, args.paths):
        (_inspect_directory if path.is_dir() else _inspect_file)(report, path)
    return _EXIT_FINDINGS if report.is_damaged else 0


def _inspect_file(report: Report, path: Path) -> None:
    base = segment_base(path.name)
    if is_index_name(path.name):
        inspect_index(report, path)
    elif sparse_suffix(path.name) is not None:
        inspect_sparse(report, path)
    elif path.name in _SMALL_FILES:
        _SMALL_FILES[path.name](report, path)
    elif base is not None:
        # Files of queues have the same names; those of a log are known by their first frame, or by nothing.
        kind = None if _first_offset(report.disk, path) == base else _queue_kind(report.disk, path)
        _inspect_numbered(report, path, base, kind)
    else:
        _inspect_by_content(report, path)


def _inspect_by_content(report: Report, path: Path) -> None:
    # A copy under another name: its size or its first bytes must tell.
    index = report.config.index
    with report.disk.open_read(path) as file:
        size = file.size()
    base = _first_offset(report.disk, path)
    kind = _queue_kind(report.disk, path) if base is None else None
    if size == IndexLayout(index.hash_slot_num, index.index_num).file_size:
        inspect_index(report, path)
    elif base is not None or kind is not None:
        _inspect_numbered(report, path, base or 0, kind)
    elif size == CHECKPOINT_SIZE:
        _show_checkpoint(report, path)
    else:
        raise UsageError(
            f"{path} of {size} bytes is neither a log segment, a queue file nor a checkpoint, nor an index file of "
            f"{index.hash_slot_num} slots and {index.index_num} entries",
            "for an index file give the --hash-slot-num and --index-num it was made with",
        )


def _inspect_numbered(report: Report, path: Path, base: int, kind: str | None) -> None:
    if kind is None:
        with report.disk.open_read(path) as file:
            size = file.size()
        inspect_segments(report, [Segment(base, size, path)])
    elif kind == EXT_FOLDER:
        inspect_queue_ext(report, path)
    else:
        inspect_queue(report, path, is_batch=kind == BATCH_FOLDER)


def _first_offset(disk: Disk, path: Path) -> int | None:
    # The physical offset in the head of a file's first frame, None where no frame begins.
    with disk.open_read(path) as file:
        head = file.pread(36, 0)
    is_frame = len(head) == 36 and int.from_bytes(head[4:8], "big") in (MAGIC_V1, MAGIC_V2)
    return int.from_bytes(head[28:36], "big") if is_frame else None


def _queue_kind(disk: Disk, path: Path) -> str | None:
    # The folder that says what a file of a queue is, by where it lies or else by its first units; None: neither.
    folders = path.absolute().parts
    if len(folders) > 3 and folders[-4] in (_QUEUE_FOLDER, BATCH_FOLDER, EXT_FOLDER):
        return folders[-4]
    with disk.open_read(path) as file:
        size, head = file.size(), file.pread(_UNITS_ASKED * BATCH_UNIT_SIZE, 0)
    if size and size % BATCH_UNIT_SIZE == 0 and head[38:BATCH_UNIT_SIZE] == BATCH_UNIT_END:
        return BATCH_FOLDER if BatchUnit(*BATCH_UNIT.unpack_from(head)).is_valid else None
    if size == 0 or size % UNIT_SIZE:
        return None
    units = [Unit(*numbers) for numbers in UNIT.iter_unpack(head[: min(size, _UNITS_ASKED * UNIT_SIZE)])]
    used = [unit for unit in units if unit != (0, 0, 0)]
    rises = all(one.is_blank or one.phy_offset + one.size <= two.phy_offset for one, two in pairwise(used))
    return _QUEUE_FOLDER if used and used == units[: len(used)] and all(u.is_valid for u in used) and rises else None


# --- directories


def _inspect_directory(report: Report, path: Path) -> None:
    disk = report.disk
    names = [name for name, _ in disk.list_dir(path)]
    numbered = [name for name in names if segment_base(name) is not None]
    if numbered:
        first = path / numbered[0]
        if _first_offset(disk, first) != segment_base(first.name) and _queue_kind(disk, first) is not None:
            _show_queue(report, path)
        else:
            _inspect_log(report, path)
        return
    found = _show_indexes(report, path)
    for name in ("frontier", "checkpoint", "abort", "state"):
        if name in names:
            _SMALL_FILES[name](report, path / name)
            found += 1
    if "frontier" in names or "lock" in names:
        pid = owner_pid(path / "lock")
        row = {"kind": "lock", "path": str(path / "lock"), "ownerPid": pid}
        report.say(row, f"lock: {'no indexd holds it' if pid is None else f'held by pid {pid}'}")
    for below in (path / "index", path / "sparse"):
        found += _show_indexes(report, below) if below.is_dir() else 0
    queues = path if path.name == _QUEUE_FOLDER else path / _QUEUE_FOLDER
    found += _show_queues(report, queues) if queues.is_dir() else 0
    if (path / "commitlog").is_dir():
        _inspect_log(report, path / "commitlog")
    elif not found:
        raise UsageError(f"{path} holds nothing of a store or of indexd", "name a store, a data directory or a file")


def _inspect_log(report: Report, directory: Path) -> None:
    rows = [(segment_base(name), size, directory / name) for name, size in report.disk.list_dir(directory)]
    segments = [Segment(base, size, path) for base, size, path in rows if base is not None and size]
    inspect_segments(report, sorted(segments, key=lambda segment: segment.base))


def _show_indexes(report: Report, directory: Path) -> int:
    # A line or a header for each index file and each sparse index of a folder; how many they are.
    names = [name for name, _ in report.disk.list_dir(directory)]
    found = 0
    for is_shown, show in ((is_index_name, show_index_header), (sparse_suffix, show_sparse_file)):
        for name in filter(is_shown, names):
            show(report, directory / name)
            found += 1
    return found


def _show_queue(report: Report, path: Path) -> None:
    for name, size in report.disk.list_dir(path):
        begin = file_offset(name)
        if begin is not None:
            row = {"kind": "queueFile", "path": str(path / name), "begin": begin, "size": size}
            text = f"queue file {path / name}: from byte {begin} of the queue, {show_bytes(size)}"
            report.say(row | queue_of(path / name)[0], text)


def _show_queues(report: Report, root: Path) -> int:
    disk = report.disk
    folders = [root / topic / name for topic in disk.list_dirs(root) for name in disk.list_dirs(root / topic)]
    queues = [folder for folder in folders if queue_id_of(folder.name) is not None]
    sizes = [size for queue in queues for name, size in disk.list_dir(queue) if file_offset(name) is not None]
    row = {"kind": "queues", "path": str(root), "queues": len(queues), "files": len(sizes), "size": sum(sizes)}
    report.say(row, f"queues {root}: {len(queues)} queues, {len(sizes)} files, {show_bytes(sum(sizes))}")
    return len(queues) + len(sizes)


# --- files of one record


def _show_checkpoint(report: Report, path: Path) -> None:
    read = StoreCheckpoint.unpack(report.disk.read(path), path)
    fields = {
        "physicMsgTimestamp": read.physic_msg_timestamp,
        "logicsMsgTimestamp": read.logics_msg_timestamp,
        "indexMsgTimestamp": read.index_msg_timestamp,
        "masterFlushedOffset": read.master_flushed_offset,
        "confirmPhyOffset": read.confirm_phy_offset,
    }
    times = {name: f" ({show_time(value)})" for name, value in fields.items() if name.endswith("Timestamp") and value}
    lines = [f"  {name:<20} {value}{times.get(name, '')}" for name, value in fields.items()]
    report.say({"kind": "checkpoint", "path": str(path)} | fields, f"checkpoint {path}", *lines)


def _show_frontier(report: Report, path: Path) -> None:
    frontier = read_frontier(report.disk, path)
    if frontier is None:
        return
    lines = [
        f"frontier {path}",
        f"  store        {printable(frontier.store)}, segments of {show_bytes(frontier.segment_size)}",
        f"  layout       {frontier.layout.hash_slot_num} slots, {frontier.layout.index_num} entries, "
        f"flavour {frontier.flavour}",
        f"  durable      log bytes {frontier.begin_offset} to {frontier.phy_offset}, {frontier.messages} messages, "
        f"the last at {show_time(frontier.store_timestamp)}",
        f"  index files  {len(frontier.index)}, {sum(mark.full for mark in frontier.index)} of them full",
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
    report.say({"kind": "frontier", "path": str(path), **json.loads(report.disk.read(path))}, *lines)


def _show_abort(report: Report, path: Path) -> None:
    text = report.disk.read(path)[:64].decode("ascii", "replace").strip()
    row = {"kind": "abort", "path": str(path), "pid": int(text) if text.isdecimal() else None}
    what = printable(f"written by pid {text}" if text else "empty")
    report.say(row, f"abort {path}: {what}; it runs, or did not stop cleanly")


def _show_state(report: Report, path: Path) -> None:
    try:
        row = json.loads(report.disk.read(path))
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise UsageError(f"{path} is no state of indexd", "name a data directory")
    text = ", ".join(f"{printable(str(name))} {printable(str(value))}" for name, value in row.items())
    report.say({"kind": "state", "path": str(path), **row}, f"state {path}: {text}")


_SMALL_FILES: dict[str, Callable[[Report, Path], None]] = {
    "checkpoint": _show_checkpoint,
    "frontier": _show_frontier,
    "abort": _show_abort,
    "state": _show_state,
}
