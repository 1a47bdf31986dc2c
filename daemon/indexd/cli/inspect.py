"""inspect: shows what a file or a directory of a store, or of indexd, holds: every record under its fields' names.

Reads only; needs neither daemon nor frontier. Text and JSON come from the same rows. What a file is, its name and its
folder say. Each record is judged by itself; whether they agree with each other and with the log, ``verify`` says.
"""

from __future__ import annotations

import argparse
import json
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from indexd.cli.output import (
    EXIT_FINDINGS,
    Parser,
    add_command,
    count64,
    print_json,
    print_line,
    show_bytes,
    show_time,
    some_name,
    wants_json,
)
from indexd.commitlog.decoder import Decoded, DecoderOptions, Message, decode_frame
from indexd.commitlog.format import HEAD_SIZE, MAGIC_V1, MAGIC_V2, Corrupt, EndOfFile, NotYetWritten
from indexd.commitlog.segments import Segment
from indexd.config import Config
from indexd.config.units import printable
from indexd.consumequeue.format import (
    BATCH_FOLDER,
    BATCH_UNIT,
    UNIT,
    BatchUnit,
    Unit,
    ext_address,
    file_offset,
    queue_folders,
    queue_id_of,
)
from indexd.errors import CorruptDataError, UsageError
from indexd.flush.frontier import StoreCheckpoint, read_frontier
from indexd.index.format import HEADER_SIZE, INDEX_TYPES, IndexEntry, IndexHeader, IndexLayout, index_key_hash
from indexd.index.reader import IndexFileReader
from indexd.sparse.format import INT32_MAX, OFFSET_SUFFIX, PASSING_SUFFIXES, TIME_SUFFIX, base_of_name
from indexd.sparse.sparse_index import OffsetIndex, TimeIndex
from indexd.storage.disk import Disk, DiskFile
from indexd.storage.lock import owner_pid
from indexd.storage.names import is_index_name, segment_base

Row = dict[str, Any]
_FRAMES = 20
_DEFAULT = "default"
_READ_SIZE = 1 << 20
_FRAME_READ = 4096
_QUEUE_FOLDER = "consumequeue"
_RANGE = re.compile(r"([0-9]{0,19}):([0-9]{0,19})", re.ASCII)
_NO_UNIT = "it can be no unit here"
_SLOT = struct.Struct(">i")
#: By the folder in which the files of a queue's units lie: what they are called, packed and unpacked.
UNITS: dict[str, tuple[str, struct.Struct, type[Unit] | type[BatchUnit]]] = {
    _QUEUE_FOLDER: ("consumeQueue", UNIT, Unit),
    BATCH_FOLDER: ("batchConsumeQueue", BATCH_UNIT, BatchUnit),
}
#: By what a file's name ends with.
SPARSE: dict[str, tuple[str, type[OffsetIndex] | type[TimeIndex]]] = {
    OFFSET_SUFFIX: ("offsetIndex", OffsetIndex),
    TIME_SUFFIX: ("timeIndex", TimeIndex),
}


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
        type=count64,
        default=_FRAMES,
        metavar="N",
        help=f"most frames, units or entries, 0 = all (default: {_FRAMES})",
    )
    parser.add_argument("--offset", type=count64, metavar="O", help="the physical offset of the first frame to show")
    parser.set_defaults(function=inspect)


def inspect(args: argparse.Namespace, config: Config) -> int:
    """Show each PATH; 1 if something in one of them is damaged."""
    if (args.topic is None) != (args.key is None):
        raise UsageError("--topic and --key belong together", "give both")
    report = Report(Disk(), args, config)
    for text in args.paths:
        path = Path(text)
        if not report.disk.exists(path):
            raise UsageError(f"there is nothing at {path}", "check the path")
        if text == "" or not (path.is_file() or path.is_dir()):
            raise UsageError(f"{text or 'an empty path'} is neither a file nor a directory")
    for path in map(Path, args.paths):
        (_directory if path.is_dir() else _file)(report, path)
    return EXIT_FINDINGS if report.is_damaged else 0


class Report:
    """Prints rows, as JSON lines or as text; ``is_damaged`` once one was wrong."""

    def __init__(self, disk: Disk, args: argparse.Namespace, config: Config) -> None:
        self.disk, self.args, self.config = disk, args, config
        self.is_damaged = False

    def file(self, kind: str, path: Path, members: Mapping[str, Any], damage: str | None = None) -> None:
        """What is said of a whole file: as text a line a member."""
        self.line(kind, {"path": str(path), **members}, damage, is_file=True)

    def line(
        self,
        kind: str,
        members: Mapping[str, Any],
        damage: str | None = None,
        indent: str = "  ",
        is_file: bool = False,
    ) -> None:
        """One record, known by its first member: as text one line."""
        self.is_damaged |= damage is not None
        row = {"kind": kind, **members} | ({} if damage is None else {"damage": damage})
        if wants_json(self.args):
            print_json(row)
            return
        (_, first), *rest = ((name, _shown(name, value)) for name, value in row.items() if name != "kind")
        if is_file:
            print_line(f"{kind} {first}")
            for name, text in rest:
                print_line(f"  {name:<20} {text}")
            return
        words = ", ".join(f"{name} {text}" for name, text in rest if name != "damage")
        end = f"  <- {printable(damage)}" if damage else ""
        print_line(f"{indent}{kind} {first}{': ' if words else ''}{words}{end}")

    def range(self, first: int, last: int) -> tuple[int, int, int]:
        """``--entries A:B``, else all from ``first`` to ``last``; with where ``--frames`` ends what is shown."""
        if self.args.entries is None:
            return first, last, min(last, first + self.args.frames) if self.args.frames else last
        match = _RANGE.fullmatch(self.args.entries)
        if match is None:
            raise UsageError(f"--entries {self.args.entries!r} is not A:B", "give two entry numbers, such as 1:100")
        first, last = int(match[1] or first), int(match[2] or last)
        return first, last, last


def _shown(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(key, each)}" for key, each in value.items())
    if isinstance(value, list):
        is_long = any(isinstance(each, list | dict) for each in value)
        return f"{len(value)} of them" if is_long else printable(" ".join(map(str, value))) or "-"
    if name.endswith("imestamp") and value:
        return f"{value} ({show_time(value)})"
    if name == "size":
        return f"{value} ({show_bytes(value)})"
    return "-" if value is None else printable(str(value))


def _members(fields: Mapping[str, Any]) -> Row:
    # ``phy_offset`` -> ``phyOffset``
    return {re.sub(r"_(.)", lambda match: match[1].upper(), name): value for name, value in fields.items()}


def _records(file: DiskFile, packed: struct.Struct, first: int, stop: int, at: int = 0) -> Iterator[tuple[int, Any]]:
    # (number, fields) of records ``[first, stop)``, record 0 standing at byte ``at``; fewer where the file ends.
    count = max(_READ_SIZE // packed.size, 1)
    for start in range(first, stop, count):
        data = file.pread(min(stop - start, count) * packed.size, at + start * packed.size)
        yield from enumerate(packed.iter_unpack(data[: len(data) // packed.size * packed.size]), start)


def _used_records(file: DiskFile, packed: struct.Struct) -> Iterator[tuple[int, Any]]:
    # Those that are not all zeros; room that was never written needs no look at the disk.
    first, count, size = 0, _READ_SIZE // packed.size, file.size() // packed.size
    while first < size and (first := file.next_data(first * packed.size) // packed.size) < size:
        yield from (found for found in _records(file, packed, first, min(first + count, size)) if any(found[1]))
        first += count


# --- what a path is


def _file(report: Report, path: Path) -> None:
    base, folders = segment_base(path.name), path.absolute().parts
    if is_index_name(path.name):
        _index(report, path)
    elif _sparse_suffix(path.name) is not None:
        _sparse(report, path)
    elif path.name in _SMALL_FILES:
        _SMALL_FILES[path.name](report, path)
    elif base is None:
        raise UsageError(f"{path} has the name of no file of a store or of indexd", "give a copy the name that it had")
    # Files of queues have the same names; those of a log are known by their first frame, or by nothing.
    elif len(folders) > 3 and folders[-4] in UNITS and _first_offset(report.disk, path) != base:
        _queue(report, path, *UNITS[folders[-4]])
    else:
        _segments(report, [Segment(base, path.stat().st_size, path)])


def _first_offset(disk: Disk, path: Path) -> int | None:
    # The physical offset in the head of a file's first frame, None where no frame begins.
    with disk.open_read(path) as file:
        head = file.pread(36, 0)
    is_frame = len(head) == 36 and int.from_bytes(head[4:8], "big") in (MAGIC_V1, MAGIC_V2)
    return int.from_bytes(head[28:36], "big") if is_frame else None


def _directory(report: Report, path: Path) -> None:
    files = report.disk.list_dir(path)
    numbered = [path / name for name, _ in files if segment_base(name) is not None]
    if numbered:
        folders = numbered[0].absolute().parts
        is_log = _first_offset(report.disk, numbered[0]) == segment_base(numbered[0].name)
        if is_log or len(folders) < 4 or folders[-4] not in UNITS:
            return _log(report, path)
        for name, size in files:
            place = {"path": str(path / name), "begin": file_offset(name), "size": size} | _queue_of(path / name)
            report.line("queueFile", place, indent="")
        return None
    found = _index_files(report, path)
    names = {name for name, _ in files}
    for name in ("frontier", "checkpoint", "abort", "state"):
        if name in names:
            _SMALL_FILES[name](report, path / name)
            found += 1
    if names & {"frontier", "lock"}:
        report.line("lock", {"path": str(path / "lock"), "ownerPid": owner_pid(path / "lock")}, indent="")
    for below in (path / "index", path / "sparse"):
        found += _index_files(report, below) if below.is_dir() else 0
    queues = path if path.name == _QUEUE_FOLDER else path / _QUEUE_FOLDER
    if queues.is_dir():
        counted = queue_folders(report.disk, queues)
        sizes = [size for sizes in counted.values() for size in sizes.values()]
        totals = {"queues": len(counted), "files": len(sizes), "size": sum(sizes)}
        report.line("queues", {"path": str(queues), **totals}, indent="")
        found += len(counted)
    if (path / "commitlog").is_dir():
        _log(report, path / "commitlog")
    elif not found:
        raise UsageError(f"{path} holds nothing of a store or of indexd", "name a store, a data directory or a file")
    return None


def _log(report: Report, directory: Path) -> None:
    rows = [(segment_base(name), size, directory / name) for name, size in report.disk.list_dir(directory)]
    segments = [Segment(base, size, path) for base, size, path in rows if base is not None and size]
    _segments(report, sorted(segments, key=lambda segment: segment.base))


def _index_files(report: Report, directory: Path) -> int:
    # A line for each index file and each sparse index of a folder; how many they are.
    found = 0
    for has_name, members_of in ((is_index_name, _index_members), (_sparse_suffix, _sparse_members)):
        for name in (name for name, _ in report.disk.list_dir(directory) if has_name(name)):
            kind, members, damage = members_of(report.disk, directory / name)
            report.line(kind, {"path": str(directory / name), **members}, damage, indent="")
            found += 1
    return found


# --- small files


def _checkpoint(report: Report, path: Path) -> None:
    report.file("checkpoint", path, _members(asdict(StoreCheckpoint.unpack(report.disk.read(path), path))))


def _frontier(report: Report, path: Path) -> None:
    read_frontier(report.disk, path)  # which says what is wrong with it
    row = json.loads(report.disk.read(path))
    report.file("frontier", path, row)
    for begin, end, reason in row.get("uncovered", []) if not wants_json(report.args) else []:
        print_line(f"  uncovered            log bytes {begin} to {end}: {printable(reason)}")


def _abort(report: Report, path: Path) -> None:
    text = report.disk.read(path)[:64].decode("ascii", "replace").strip()
    report.file("abort", path, {"pid": int(text) if text.isdecimal() else None})


def _state(report: Report, path: Path) -> None:
    try:
        report.file("state", path, dict(json.loads(report.disk.read(path)).items()))
    except (ValueError, AttributeError):
        raise UsageError(f"{path} is no state of indexd", "name a data directory") from None


_SMALL_FILES: dict[str, Callable[[Report, Path], None]] = {
    "checkpoint": _checkpoint,
    "frontier": _frontier,
    "abort": _abort,
    "state": _state,
}


# --- index files


def _index(report: Report, path: Path) -> None:
    args = report.args
    with report.disk.open_read(path) as opened:
        layout = _layout(report, path, opened.size())
        _, members, damage = _index_members(report.disk, path)
        members |= {"hashSlotNum": layout.hash_slot_num, "indexNum": layout.index_num}
        report.file("index", path, members | {"full": members["indexCount"] >= layout.index_num}, damage)
        file = IndexFileReader(opened, layout)
        slots = _records(opened, _SLOT, 0, layout.hash_slot_num if args.slots else 0, layout.slot_position(0))
        for slot, (number,) in slots:
            if number != 0:
                damage = None if 0 < number < members["indexCount"] else "it names no entry that is counted"
                report.line("slot", {"slot": slot, "index": number}, damage)
        if args.entries is not None:
            first, last, _ = report.range(1, members["indexCount"])
            for number in range(first, min(last, layout.index_num)):
                _entry(report, file, number, file.entry(number))
        if args.chain is not None:
            if not 0 <= args.chain < layout.hash_slot_num:
                raise UsageError(f"--chain {args.chain} is no slot of 0 to {layout.hash_slot_num - 1}")
            _chain(report, file, args.chain, None)
        if args.topic is not None:
            key_hash = index_key_hash(args.topic, args.key, args.index_type)
            _chain(report, file, layout.slot_of(key_hash), key_hash)


def _index_members(disk: Disk, path: Path) -> tuple[str, Row, str | None]:
    with disk.open_read(path) as file:
        size, head = file.size(), file.pread(HEADER_SIZE, 0)
    is_whole = len(head) >= HEADER_SIZE
    header = IndexHeader.unpack(head) if is_whole else IndexHeader()
    return "index", {"size": size, **_members(asdict(header))}, None if is_whole else f"cut off: {size} bytes"


def _chain(report: Report, file: IndexFileReader, slot: int, key_hash: int | None) -> None:
    # The entries of a slot, newest first; with ``key_hash`` those of that hash alone.
    number, above = file.slot(slot), file.layout.index_num
    report.line("chain", {"slot": slot, "index": number} | ({} if key_hash is None else {"keyHash": key_hash}))
    while number != 0:
        if not 0 < number < above:
            damage = f"the chain goes from entry {above} to {number}"
            return report.line("damage", {"slot": slot, "index": number}, damage)
        entry = file.entry(number)
        if key_hash is None or entry.key_hash == key_hash:
            _entry(report, file, number, entry)
        above, number = number, entry.prev_index
    return None


def _entry(report: Report, file: IndexFileReader, number: int, entry: IndexEntry) -> None:
    row = {"number": number, "slot": file.layout.slot_of(entry.key_hash), **_members(asdict(entry))}
    report.line("entry", row, None if number < file.header().index_count else "behind the index count")


def _layout(report: Report, path: Path, size: int) -> IndexLayout:
    # What the flags say, else what a frontier beside or above the file says, else the default.
    config, folder = report.config, path.absolute().parent
    layout, source = IndexLayout(config.index.hash_slot_num, config.index.index_num), "the configuration"
    if all(config.provenance.get(key, _DEFAULT) == _DEFAULT for key in ("hash_slot_num", "index_num")):
        for at in (folder / "frontier", folder.parent / "frontier"):
            frontier = read_frontier(report.disk, at)
            if frontier is not None:
                layout, source = frontier.layout, str(at)
    if layout.file_size == size:
        return layout
    text = (
        f"index file {path} has {size} bytes, but {layout.hash_slot_num} slots and {layout.index_num} entries "
        f"(from {source}) make {layout.file_size}"
    )
    hint = "give the broker's maxHashSlotNum and maxIndexNum as --hash-slot-num and --index-num"
    if source.endswith("frontier"):
        raise CorruptDataError(text, f"run indexd --recover; or, if it is another's file, {hint}")
    raise UsageError(text, hint)


# --- the log


def _segments(report: Report, segments: list[Segment]) -> None:
    # Segments in log order, and what stands in them from ``--offset`` on.
    args = report.args
    start = args.offset if args.offset is not None else (segments[0].base if segments else 0)
    if args.offset is not None and not any(segment.base <= start < segment.end for segment in segments):
        where = f"physical offset {start} is in no segment of {' or '.join(args.paths)}"
        raise UsageError(where, "see the segments without --offset")
    for segment in segments:
        place = {"path": str(segment.path), "base": segment.base, "size": segment.size}
        report.line("segment", place, indent="")
    shown = 0
    for segment in segments:
        with report.disk.open_read(segment.path) as file:
            for offset, found in _frames(file, segment, max(start, segment.base)):
                if args.frames and shown >= args.frames:
                    return report.line("more", {"phyOffset": offset})
                damage = found.reason if isinstance(found, Corrupt) else None
                report.line("frame", {"phyOffset": offset} | _frame(found), damage)
                shown += 1
    return None


def _frames(file: DiskFile, segment: Segment, start: int) -> Iterator[tuple[int, Decoded]]:
    # What stands in the segment from ``start`` on, up to and with the first that is no message.
    options, offset = DecoderOptions(), start
    while offset < segment.end:
        data = file.pread(_FRAME_READ, offset - segment.base)
        found = decode_frame(data, 0, offset, segment.end, options)
        if isinstance(found, NotYetWritten) and found.needed > len(data) >= HEAD_SIZE:
            found = decode_frame(file.pread(found.needed, offset - segment.base), 0, offset, segment.end, options)
        yield offset, found
        if not isinstance(found, Message):
            return
        offset += found.size


def _frame(found: Decoded) -> Row:
    if isinstance(found, EndOfFile):
        return {"outcome": "endOfFile"}
    if isinstance(found, NotYetWritten):
        return {"outcome": "notYetWritten", "needed": found.needed}
    if isinstance(found, Corrupt):
        return {"outcome": "corrupt", "reason": found.reason}
    return {
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


# --- queues


def _queue(
    report: Report, path: Path, kind: str, packed: struct.Struct, unit_type: type[Unit] | type[BatchUnit]
) -> None:
    with report.disk.open_read(path) as file:
        places, rest = divmod(file.size(), packed.size)
        begin = (file_offset(path.name) or 0) // packed.size
        used = blank = damaged = 0
        begin_offset = end_offset = first_damaged = -1
        for number, fields in _used_records(file, packed):
            unit = unit_type(*fields)
            wrong = number - used + (not unit.is_valid)  # those passed over are zeros
            if wrong and not damaged:
                first_damaged = min(number, used)
            used, damaged, blank = number + 1, damaged + wrong, blank + _is_blank(unit)
            if unit.is_valid and not _is_blank(unit):
                begin_offset = unit.phy_offset if begin_offset < 0 else begin_offset
                end_offset = unit.phy_offset + unit.size
        members: Row = {"size": file.size(), "firstUnit": begin, **_queue_of(path)}
        members |= {"units": used, "blankUnits": blank, "places": places}
        members |= {"beginPhyOffset": begin_offset, "endPhyOffset": end_offset, "damagedUnits": damaged}
        damage = f"{rest} bytes behind the last whole unit" if rest else None
        if damaged:
            damage = f"{damaged} units that can be none, unit {begin + first_damaged} first"
        report.file(kind, path, members, damage)
        first, end, stop = report.range(begin, begin + used)
        first, end, stop = max(first, begin) - begin, min(end - begin, places), min(stop - begin, places)
        for number, fields in _records(file, packed, first, stop):
            unit = unit_type(*fields)
            row = {"unit": begin + number} | _members(unit._asdict())
            address = ext_address(unit.tags_code)
            if _is_blank(unit):
                row["blank"] = True
            elif address is not None:
                row["extAddress"] = address
            report.line(f"{kind}Unit", row, _NO_UNIT if number < used and not unit.is_valid else None)
        if stop < end:
            report.line("more", {"unit": begin + stop})


def _is_blank(unit: Unit | BatchUnit) -> bool:
    return isinstance(unit, Unit) and unit.is_blank


def _queue_of(path: Path) -> Row:
    # The topic and the queue that the folders of a queue's file name.
    folders = path.absolute().parts
    queue_id = queue_id_of(folders[-2]) if len(folders) > 3 else None
    return {} if queue_id is None else {"topic": folders[-3], "queueId": queue_id}


# --- sparse indexes


def _sparse_suffix(name: str) -> str | None:
    # ``.index`` or ``.timeindex``, with or without what Kafka appends to it; None for other names.
    try:
        base_of_name(name)
    except ValueError:
        return None
    for passing in PASSING_SUFFIXES:
        name = name.removesuffix(passing)
    return next((suffix for suffix in SPARSE if name.endswith(suffix)), None)


def _sparse(report: Report, path: Path) -> None:
    kind, members, damage = _sparse_members(report.disk, path)
    report.file(kind, path, members, damage)
    entries = int(members["entries"])
    first, end, stop = report.range(0, entries)
    end = min(end, int(members["slots"])) if "last" in members else 0
    stop = min(stop, end)
    load = SPARSE[_sparse_suffix(path.name) or OFFSET_SUFFIX][1].load
    with load(report.disk, path, int(members["base"]), max(stop, entries) if stop > first else 0) as index:
        for number in range(first, stop):
            unused = {"unused": True} if number >= entries else {}
            report.line("entry", {"number": number} | index.entry(number)._asdict() | unused)
    if stop < end:
        report.line("more", {"number": stop})


def _sparse_members(disk: Disk, path: Path) -> tuple[str, Row, str | None]:
    # The entries before a tail of unused slots, and what Kafka's sanity check says of them.
    kind, index_type = SPARSE[_sparse_suffix(path.name) or OFFSET_SUFFIX]
    base, entries = base_of_name(path.name), 0
    with disk.open_read(path) as file:
        size = file.size()
        for number, _ in _used_records(file, struct.Struct(f"{index_type.entry_size}B")):
            entries = number + 1
    slots = size // index_type.entry_size
    row: Row = {"size": size, "base": base, "entries": entries, "slots": slots, "tail": slots - entries}
    if size > INT32_MAX:
        return kind, row | {"check": "not asked"}, f"{size} bytes, more than can be mapped"
    damage = None
    with index_type.load(disk, path, base, entries) as index:
        try:
            index.sanity_check()
        except CorruptDataError as error:
            damage = error.line().partition(": ")[2] or error.line()
        row["check"] = damage or "passed"
        if entries:
            row |= {"first": index.entry(0)._asdict(), "last": index.entry(entries - 1)._asdict()}
    return kind, row, damage
