"""inspect: shows what a file or a directory of a store, or of indexd, holds: every record under its fields' names.

Reads only; needs neither daemon nor frontier. Text and JSON come from the same rows: for each file a row of its own and
then its records, of a directory the former alone. What a file is, its name and its folder say. Each record is judged by
itself; whether they agree with each other and with the log, ``verify`` says.
"""

from __future__ import annotations

import argparse
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from indexd.cli.output import (
    EXIT_FINDINGS,
    Parser,
    add_command,
    count64,
    print_fields,
    print_json,
    print_line,
    show_field,
    some_name,
    typed,
    wants_json,
)
from indexd.commitlog.decoder import DecoderOptions, Message, decode_frame
from indexd.commitlog.format import Corrupt, NotYetWritten
from indexd.config import Config
from indexd.consumequeue.format import BATCH_FOLDER, UNIT, Unit, queue_folders, queue_id_of
from indexd.errors import UsageError
from indexd.flush.frontier import StoreCheckpoint, read_frontier
from indexd.index.format import (
    ENTRY_SIZE,
    HEADER_SIZE,
    INDEX_TYPES,
    SLOT,
    SLOT_SIZE,
    IndexHeader,
    IndexLayout,
    index_key_hash,
    unpack_entry,
)
from indexd.index.reader import IndexFileReader
from indexd.query.message import message_fields
from indexd.query.source import read_state
from indexd.sparse.format import OFFSET_ENTRY, OFFSET_SUFFIX, TIME_ENTRY, TIME_SUFFIX, sanity_problem
from indexd.storage.disk import Disk, DiskFile
from indexd.storage.names import is_index_name, segment_base

Row = dict[str, Any]
_FRAMES = 20
_READ_SIZE = 1 << 20
_FRAME_READ = 4096
_FOLDERS = ("index", "sparse", "commitlog")
_SMALL_FILES = ("frontier", "checkpoint", "abort", "lock", "state")
# With or without what Kafka appends to it.
_SPARSE_NAME = re.compile(r"[0-9]{20}\.(time)?index(\.deleted|\.cleaned|\.swap)?", re.ASCII)
#: By what a file's name ends with: what it is called, its entry, the entry's members.
_SPARSE: dict[str, tuple[str, struct.Struct, tuple[str, str]]] = {
    OFFSET_SUFFIX: ("offsetIndex", OFFSET_ENTRY, ("offset", "position")),
    TIME_SUFFIX: ("timeIndex", TIME_ENTRY, ("timestamp", "offset")),
}


def _parse_range(text: str) -> tuple[int | None, int | None]:
    match = re.fullmatch(r"([0-9]{0,19}):([0-9]{0,19})", text, re.ASCII)
    if match is None:
        raise ValueError("is not A:B: give two entry numbers, such as 1:100")
    return int(match[1]) if match[1] else None, int(match[2]) if match[2] else None


def register(commands: Any, common: Parser) -> None:
    """Add the command."""
    parser = add_command(
        commands, "inspect", [common], "show what a file or directory holds: of a store, or of indexd", function=inspect
    )
    parser.add_argument(
        "paths",
        nargs="+",
        type=Path,
        metavar="PATH",
        help="an index, queue or log file, a checkpoint, or a directory of them",
    )
    parser.add_argument("--slots", action="store_true", help="every slot of an index file that is not empty")
    parser.add_argument(
        "--entries", type=typed(_parse_range), metavar="A:B", help="entries or units from number A up to B, B left out"
    )
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


def inspect(args: argparse.Namespace, config: Config) -> int:
    """Show each PATH; 1 if something in one of them is damaged."""
    if (args.topic is None) != (args.key is None):
        raise UsageError("--topic and --key belong together", "give both")
    inspector = _Inspector(args, config)
    missing = [path for path in args.paths if not inspector.disk.exists(path)]
    if missing:
        raise UsageError(f"there is nothing at {missing[0]}", "check the path")
    is_damaged = False
    for path in args.paths:
        for row in inspector.directory(path) if path.is_dir() else inspector.file(path):
            is_damaged |= "damage" in row
            if wants_json(args):
                print_json(row)
            else:
                _print(row, is_whole_file="path" in row and not path.is_dir())
    return EXIT_FINDINGS if is_damaged else 0


def _print(row: Mapping[str, Any], *, is_whole_file: bool) -> None:
    (_, kind), (name, first), *rest = row.items()
    title = f"{kind} {show_field(name, first)}"
    if is_whole_file:
        print_fields(title, dict(rest))
    else:
        words = ", ".join(f"{name} {show_field(name, value)}" for name, value in rest)
        print_line(f"{'' if 'path' in row else '  '}{title}{words and ': '}{words}")


def _members(fields: Mapping[str, Any]) -> Row:
    # ``phy_offset`` -> ``phyOffset``
    return {re.sub(r"_(.)", lambda match: match[1].upper(), name): value for name, value in fields.items()}


def _damage(is_damaged: bool, text: str) -> Row:
    return {"damage": text} if is_damaged else {}


def _records(file: DiskFile, size: int, first: int, stop: int, at: int = 0) -> Iterator[tuple[int, bytes]]:
    # (number, bytes) of records ``[first, stop)``, record 0 standing at byte ``at``; fewer where the file ends.
    count = _READ_SIZE // size
    for start in range(first, stop, count):
        data = file.pread(min(stop - start, count) * size, at + start * size)
        for number in range(len(data) // size):
            yield start + number, data[number * size : (number + 1) * size]


def _used_records(file: DiskFile, size: int) -> Iterator[tuple[int, bytes]]:
    # Those that are not all zeros.
    return (found for found in _records(file, size, 0, file.size() // size) if any(found[1]))


class _Inspector:
    """The rows of files and directories, as the options ask for them."""

    def __init__(self, args: argparse.Namespace, config: Config) -> None:
        self.args, self.config, self.disk = args, config, Disk()

    def file(self, path: Path) -> Iterator[Row]:
        """The row of a file, ``path`` its first member, and those of its records."""
        rows = self._rows_of(path)
        if rows is None:
            raise UsageError(
                f"{path} has the name of no file of a store or of indexd", "give a copy the name that it had"
            )
        return rows

    def _rows_of(self, path: Path) -> Iterator[Row] | None:
        if path.name in _SMALL_FILES:
            return self._small(path)
        if is_index_name(path.name):
            return self._index(path)
        if _SPARSE_NAME.fullmatch(path.name):
            return self._sparse(path)
        if segment_base(path.name) is None or BATCH_FOLDER in path.absolute().parts:
            return None
        # Files of queues are named as segments are.
        is_queue = path.absolute().parts[-4:-3] == ("consumequeue",)
        return self._queue(path) if is_queue else self._segment(path)

    def directory(self, path: Path) -> Iterator[Row]:
        """The row of every file in it, in its folders of indexes and in its log; of queues their number."""
        below = self.disk.list_dirs(path) if path.absolute().parent.name == "consumequeue" else _FOLDERS
        folders = [path, *(path / name for name in below if (path / name).is_dir())]
        places = [folder / name for folder in folders for name, _ in self.disk.list_dir(folder)]
        known = [rows for place in places if (rows := self._rows_of(place)) is not None]
        queues = path if path.name == "consumequeue" else path / "consumequeue"
        if not known and not queues.is_dir():
            raise UsageError(f"{path} holds nothing of a store or of indexd", "name a store, a data directory, a file")
        offset = self.args.offset
        for rows in known:
            yield (head := next(rows))
            if offset is not None and head["kind"] == "segment" and 0 <= offset - head["base"] < head["size"]:
                offset = None
                yield from rows
        if queues.is_dir():
            folders_of_queues = queue_folders(self.disk, queues)
            sizes = [size for files in folders_of_queues.values() for size in files.values()]
            totals = {"queues": len(folders_of_queues), "files": len(sizes), "size": sum(sizes)}
            yield {"kind": "queues", "path": str(queues), **totals}
        if offset is not None:
            raise UsageError(f"physical offset {offset} is in no segment of {path}", "see them without --offset")

    def _chosen(self, used: int, first: int = 0) -> tuple[int, int]:
        # The numbers ``[begin, end)`` of --entries, else the first of those that are used.
        begin, end = self.args.entries or (None, None)
        if self.args.entries is None and self.args.frames:
            end = first + min(used, self.args.frames)
        return max(begin or 0, first), first + used if end is None else end

    def _small(self, path: Path) -> Iterator[Row]:
        if path.name == "frontier":
            read_frontier(self.disk, path)  # which says what is wrong with it
        data = self.disk.read(path)
        if path.name == "checkpoint":
            row = _members(asdict(StoreCheckpoint.unpack(data, path)))
        elif path.name in ("abort", "lock"):
            row = {"pid": data[:64].decode("ascii", "replace").strip()}
        else:
            row = read_state(self.disk, path)
        if not row:
            raise UsageError(f"{path} is no state of indexd", "name a data directory")
        yield {"kind": path.name, "path": str(path), **row}

    def _index(self, path: Path) -> Iterator[Row]:
        args = self.args
        with self.disk.open_read(path) as opened:
            size, head = opened.size(), opened.pread(HEADER_SIZE, 0)
            if len(head) < HEADER_SIZE:
                yield {"kind": "index", "path": str(path), "size": size, "damage": f"cut off: {size} bytes"}
                return
            header = IndexHeader.unpack(head)
            yield {"kind": "index", "path": str(path), "size": size, **_members(asdict(header))}
            file = IndexFileReader(opened, self._layout(path, size))
            layout, key_hash, chain = file.layout, None, args.chain
            slots = _records(opened, SLOT_SIZE, 0, layout.hash_slot_num, layout.slot_position(0)) if args.slots else ()
            for slot, raw in slots:
                (number,) = SLOT.unpack(raw)
                wrong = _damage(not 0 < number < header.index_count, "it names no entry that is counted")
                if number != 0:
                    yield {"kind": "slot", "slot": slot, "index": number, **wrong}
            if args.entries is not None:
                first, stop = self._chosen(header.index_count - 1, 1)
                for number, raw in _records(
                    opened, ENTRY_SIZE, first, min(stop, layout.index_num), layout.entry_position(0)
                ):
                    yield _entry(file, number, raw)
            if args.topic is not None:
                key_hash = index_key_hash(args.topic, args.key, args.index_type)
                chain = layout.slot_of(key_hash)
            if chain is not None:
                yield from _chain(file, chain, key_hash)

    def _layout(self, path: Path, size: int) -> IndexLayout:
        # That of a frontier beside or above the file, or of the configuration: the one that fits.
        frontiers = [read_frontier(self.disk, folder / "frontier") for folder in path.absolute().parents[:2]]
        configured = IndexLayout(self.config.index.hash_slot_num, self.config.index.index_num)
        layouts = [*(frontier.layout for frontier in frontiers if frontier is not None), configured]
        return next((layout for layout in layouts if layout.file_size == size), layouts[0])

    def _segment(self, path: Path) -> Iterator[Row]:
        base, size, shown, options = segment_base(path.name) or 0, self.disk.stamp(path).size, 0, DecoderOptions()
        yield {"kind": "segment", "path": str(path), "base": base, "size": size}
        offset = base if self.args.offset is None else self.args.offset
        if not 0 <= offset - base <= size:
            raise UsageError(f"physical offset {offset} is not in {path}", "see the segments without --offset")
        with self.disk.open_read(path) as file:
            while offset < base + size:
                if self.args.frames and shown >= self.args.frames:
                    yield {"kind": "more", "phyOffset": offset}
                    return
                found = decode_frame(file.pread(_FRAME_READ, offset - base), 0, offset, base + size, options)
                if isinstance(found, NotYetWritten) and found.needed > _FRAME_READ:
                    found = decode_frame(file.pread(found.needed, offset - base), 0, offset, base + size, options)
                outcome = type(found).__name__
                row = {"kind": "frame", "phyOffset": offset, "outcome": outcome[:1].lower() + outcome[1:]}
                shown += 1
                if not isinstance(found, Message):
                    yield row | ({"damage": found.reason} if isinstance(found, Corrupt) else {})
                    return
                yield row | message_fields(found)
                offset += found.size

    def _queue(self, path: Path) -> Iterator[Row]:
        folders, used, damaged = path.absolute().parts, 0, 0
        with self.disk.open_read(path) as file:
            for number, raw in _used_records(file, UNIT.size):
                damaged += number - used + (not Unit(*UNIT.unpack(raw)).is_valid)  # those passed over are zeros
                used = number + 1
            begin, size = (segment_base(path.name) or 0) // UNIT.size, file.size()
            yield {
                "kind": "consumeQueue",
                "path": str(path),
                "size": size,
                "firstUnit": begin,
                "topic": folders[-3],
                "queueId": queue_id_of(folders[-2]),
                "units": used,
                "places": size // UNIT.size,
                **_damage(size % UNIT.size > 0, f"{size % UNIT.size} bytes behind the last whole unit"),
                **_damage(damaged > 0, f"{damaged} units that can be none"),
            }
            first, stop = self._chosen(used, begin)
            for number, raw in _records(file, UNIT.size, first - begin, stop - begin):
                unit = Unit(*UNIT.unpack(raw))
                wrong = _damage(number < used and not unit.is_valid, "it can be no unit here")
                yield {"kind": "consumeQueueUnit", "unit": begin + number, **_members(unit._asdict()), **wrong}

    def _sparse(self, path: Path) -> Iterator[Row]:
        # The entries before a tail of unused slots, and what Kafka's sanity check says of them.
        kind, packed, names = _SPARSE[TIME_SUFFIX if TIME_SUFFIX in path.name else OFFSET_SUFFIX]
        base, entries = int(path.name.partition(".")[0]), 0
        with self.disk.open_read(path) as file:
            size = file.size()
            for number, _ in _used_records(file, packed.size):
                entries = number + 1
            row = {"kind": kind, "path": str(path), "size": size, "base": base, "entries": entries}
            problem = sanity_problem(file, base, entries, packed)
            yield row | _damage(problem is not None, problem or "") | {"slots": size // packed.size}
            for number, raw in _records(file, packed.size, *self._chosen(entries)):
                entry = dict(zip(names, packed.unpack(raw), strict=True))
                entry["offset"] += base
                yield {"kind": "entry", "number": number, **entry}


def _chain(file: IndexFileReader, slot: int, key_hash: int | None) -> Iterator[Row]:
    # The entries of a slot, newest first; with ``key_hash`` those of that hash alone.
    if not 0 <= slot < file.layout.hash_slot_num:
        raise UsageError(f"--chain {slot} is no slot of 0 to {file.layout.hash_slot_num - 1}", "give one of them")
    number, above = file.slot(slot), file.layout.index_num
    while number != 0:
        if not 0 < number < above:
            damage = f"the chain goes from entry {above} to {number}"
            yield {"kind": "damage", "slot": slot, "index": number, "damage": damage}
            return
        raw = file.file.pread(ENTRY_SIZE, file.layout.entry_position(number))
        entry = unpack_entry(raw)
        if key_hash is None or entry.key_hash == key_hash:
            yield _entry(file, number, raw)
        above, number = number, entry.prev_index


def _entry(file: IndexFileReader, number: int, raw: bytes) -> Row:
    entry = unpack_entry(raw)
    return {
        "kind": "entry",
        "number": number,
        "slot": file.layout.slot_of(entry.key_hash),
        **_members(asdict(entry)),
        **_damage(number >= file.header().index_count, "behind the index count"),
    }
