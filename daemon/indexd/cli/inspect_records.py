"""Prints what an index file, a log segment, a ConsumeQueue file or a sparse index holds, record by record."""

from __future__ import annotations

import argparse
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from indexd.cli.output import print_json, print_line, show_bytes, show_time, wants_json
from indexd.commitlog.decoder import Decoded, DecoderOptions, Message, decode_frame
from indexd.commitlog.format import HEAD_SIZE, Corrupt, EndOfFile, NotYetWritten
from indexd.commitlog.segments import Segment
from indexd.config import Config
from indexd.config.units import printable
from indexd.consumequeue.format import (
    BATCH_UNIT,
    BATCH_UNIT_SIZE,
    EXT_END,
    EXT_HEAD,
    EXT_HEAD_SIZE,
    UNIT,
    UNIT_SIZE,
    BatchUnit,
    Unit,
    ext_address,
    file_offset,
    queue_id_of,
)
from indexd.errors import CorruptDataError, UsageError
from indexd.flush.frontier import read_frontier
from indexd.index.format import (
    ENTRY_SIZE,
    HEADER_SIZE,
    SLOT_SIZE,
    IndexEntry,
    IndexHeader,
    IndexLayout,
    index_key_hash,
)
from indexd.index.reader import IndexFileReader
from indexd.sparse.format import (
    INT32_MAX,
    OFFSET_SUFFIX,
    PASSING_SUFFIXES,
    TIME_SUFFIX,
    OffsetPosition,
    TimestampOffset,
    base_of_name,
)
from indexd.sparse.sparse_index import OffsetIndex, TimeIndex
from indexd.storage.disk import Disk, DiskFile

_DEFAULT = "default"
_ENTRIES_PER_SLOT = 4  # RocketMQ's own defaults, and most settings made after them
_SLOTS_PER_READ = 16384
_UNITS_PER_READ = 1 << 14
_READ_SIZE = 1 << 20
_RANGE = re.compile(r"([0-9]{0,19}):([0-9]{0,19})", re.ASCII)
_NO_UNIT = "it can be no unit here"
_SPARSE: dict[str, tuple[str, str, type[OffsetIndex] | type[TimeIndex]]] = {
    OFFSET_SUFFIX: ("offsetIndex", "offset index", OffsetIndex),
    TIME_SUFFIX: ("timeIndex", "time index", TimeIndex),
}


class Report:
    """What one call of ``inspect`` prints, as JSON lines or as text; ``is_damaged`` once a record was wrong."""

    def __init__(self, disk: Disk, args: argparse.Namespace, config: Config) -> None:
        self.disk, self.args, self.config = disk, args, config
        self.is_damaged = False

    def say(self, row: dict[str, Any], *lines: str) -> None:
        """Print ``row`` as JSON, or ``lines``."""
        if wants_json(self.args):
            print_json(row)
        else:
            for line in lines:
                print_line(line)

    def record(self, row: dict[str, Any], line: str, damage: str | None) -> None:
        """Print one record, and what is wrong with it."""
        self.is_damaged |= damage is not None
        self.say(
            row if damage is None else row | {"damage": damage}, f"  {line}" + (f"  <- {damage}" if damage else "")
        )

    def head(self, row: dict[str, Any], lines: list[str], damage: str | None) -> None:
        """Print what is said of a whole file, and what is wrong with it."""
        self.is_damaged |= damage is not None
        if damage is None:
            self.say(row, *lines)
        else:
            self.say(row | {"damage": damage}, *lines, f"  damage   {damage}")

    def range(self, first: int, last: int) -> tuple[int, int, int]:
        """``--entries A:B``, else all from ``first`` to ``last``; with where ``--frames`` ends what is shown."""
        if self.args.entries is None:
            return first, last, min(last, first + self.args.frames) if self.args.frames else last
        match = _RANGE.fullmatch(self.args.entries)
        if match is None:
            raise UsageError(f"--entries {self.args.entries!r} is not A:B", "give two entry numbers, such as 1:100")
        first, last = int(match[1] or first), int(match[2] or last)
        return first, last, last


# --- index files


def inspect_index(report: Report, path: Path) -> None:
    """Show one index file as the flags ask."""
    args = report.args
    if (args.topic is None) != (args.key is None):
        raise UsageError("--topic and --key belong together", "give both")
    with report.disk.open_read(path) as file:
        layout = _layout(report, path, file.size())
        show_index_header(report, path, layout)
        view = _IndexRecords(report, IndexFileReader(file, layout))
        if args.slots:
            view.show_slots()
        if args.entries is not None:
            view.show_entries()
        if args.chain is not None:
            if not 0 <= args.chain < layout.hash_slot_num:
                raise UsageError(f"--chain {args.chain} is no slot of 0 to {layout.hash_slot_num - 1}")
            view.show_chain(args.chain, None)
        if args.topic is not None:
            key_hash = index_key_hash(args.topic, args.key, args.index_type)
            view.show_chain(layout.slot_of(key_hash), key_hash)


def show_index_header(report: Report, path: Path, layout: IndexLayout | None = None) -> None:
    """The header of one index file; with ``layout`` also how full it is."""
    with report.disk.open_read(path) as file:
        size, head = file.size(), file.pread(HEADER_SIZE, 0)
    is_whole = len(head) >= HEADER_SIZE
    header = IndexHeader.unpack(head) if is_whole else IndexHeader()
    note = "" if is_whole else f"cut off: {size} bytes"
    row = {
        "kind": "index",
        "path": str(path),
        "size": size,
        "beginTimestamp": header.begin_timestamp,
        "endTimestamp": header.end_timestamp,
        "beginPhyOffset": header.begin_phy_offset,
        "endPhyOffset": header.end_phy_offset,
        "usedSlotCount": header.used_slot_count,
        "indexCount": header.index_count,
    }
    capacity = slots = ""
    if layout is not None:
        row |= {"hashSlotNum": layout.hash_slot_num, "indexNum": layout.index_num}
        row["full"] = header.index_count >= layout.index_num
        capacity, slots = f" of {layout.index_num - 1}", f" of {layout.hash_slot_num}"
    report.say(
        row | ({"damage": note} if note else {}),
        f"index {path}, {show_bytes(size)}{'; ' + note if note else ''}",
        f"  entries  {header.entries}{capacity}, used slots {header.used_slot_count}{slots}",
        f"  times    {show_time(header.begin_timestamp)} to {show_time(header.end_timestamp)}",
        f"  offsets  {header.begin_phy_offset} to {header.end_phy_offset}",
    )


def fitting_layouts(size: int, wanted: IndexLayout) -> list[IndexLayout]:
    """Layouts of ``size`` bytes that share a number with ``wanted``, or have RocketMQ's four entries a slot."""
    body = size - HEADER_SIZE
    slots = body // (SLOT_SIZE + ENTRY_SIZE * _ENTRIES_PER_SLOT)
    tries = [
        (wanted.hash_slot_num, (body - SLOT_SIZE * wanted.hash_slot_num) // ENTRY_SIZE),
        ((body - ENTRY_SIZE * wanted.index_num) // SLOT_SIZE, wanted.index_num),
        (slots, _ENTRIES_PER_SLOT * slots),
    ]
    layouts = [IndexLayout(slots, entries) for slots, entries in tries if slots >= 1 and entries >= 2]
    return [layout for layout in dict.fromkeys(layouts) if layout.file_size == size]


def _layout(report: Report, path: Path, size: int) -> IndexLayout:
    # What the flags say, else what a frontier beside or above the file says, else the default.
    config, folder = report.config, path.absolute().parent
    layout, source = IndexLayout(config.index.hash_slot_num, config.index.index_num), "the configuration"
    if all(config.provenance.get(key, _DEFAULT) == _DEFAULT for key in ("hash_slot_num", "index_num")):
        for at in (folder.parent / "frontier", folder / "frontier"):
            frontier = read_frontier(report.disk, at)
            if frontier is not None:
                layout, source = frontier.layout, str(at)
                break
    if layout.file_size == size:
        return layout
    text = (
        f"index file {path} has {size} bytes, but {layout.hash_slot_num} slots and {layout.index_num} entries "
        f"(from {source}) make {layout.file_size}"
    )
    fits = fitting_layouts(size, layout)
    tries = " or ".join(f"--hash-slot-num {fit.hash_slot_num} --index-num {fit.index_num}" for fit in fits)
    no_fit = "give the broker's maxHashSlotNum and maxIndexNum as --hash-slot-num and --index-num"
    hint = f"try {tries}" if fits else no_fit
    if source.endswith("frontier"):
        raise CorruptDataError(text, f"run indexd --recover; or, if it is another's file, {hint}")
    raise UsageError(text, hint)


class _IndexRecords:
    """The slots and entries of one index file."""

    def __init__(self, report: Report, file: IndexFileReader) -> None:
        self._report, self._file, self._layout = report, file, file.layout
        self._header = file.header()

    def show_slots(self) -> None:
        """Every slot that is not 0, and what is wrong with it."""
        for first in range(0, self._layout.hash_slot_num, _SLOTS_PER_READ):
            count = min(_SLOTS_PER_READ, self._layout.hash_slot_num - first)
            data = self._file.file.pread(SLOT_SIZE * count, self._layout.slot_position(first))
            for slot, number in enumerate(struct.unpack(f">{len(data) // SLOT_SIZE}i", data), first):
                if number != 0:
                    damage = None if 0 < number < self._header.index_count else "it names no entry that is counted"
                    row = {"kind": "slot", "slot": slot, "index": number}
                    self._report.record(row, f"slot {slot}: entry {number}", damage)

    def show_entries(self) -> None:
        """The entries of ``--entries``, those behind the index count too."""
        first, last, _ = self._report.range(1, self._header.index_count)
        for number in range(first, min(last, self._layout.index_num)):
            self._show_entry(number, self._file.entry(number))

    def show_chain(self, slot: int, key_hash: int | None) -> None:
        """The entries of a slot, newest first; with ``key_hash`` those of that hash alone."""
        number, above = self._file.slot(slot), self._layout.index_num
        row = {"kind": "chain", "slot": slot, "index": number} | ({} if key_hash is None else {"keyHash": key_hash})
        words = f"slot {slot}" if key_hash is None else f"key hash {key_hash}, slot {slot}"
        self._report.record(row, f"{words}: {f'newest entry {number}' if number else 'empty'}", None)
        while number != 0:
            if not 0 < number < above:
                row = {"kind": "damage", "slot": slot, "index": number}
                self._report.record(row, f"slot {slot}", f"the chain goes from entry {above} to {number}")
                return
            entry = self._file.entry(number)
            if key_hash is None or entry.key_hash == key_hash:
                self._show_entry(number, entry)
            above, number = number, entry.prev_index

    def _show_entry(self, number: int, entry: IndexEntry) -> None:
        row = {
            "kind": "entry",
            "number": number,
            "keyHash": entry.key_hash,
            "slot": entry.key_hash % self._layout.hash_slot_num,
            "phyOffset": entry.phy_offset,
            "timeDiff": entry.time_diff,
            "prevIndex": entry.prev_index,
        }
        text = (
            f"entry {number}: hash {entry.key_hash}, offset {entry.phy_offset}, +{entry.time_diff} s "
            f"({show_time(self._header.begin_timestamp + entry.time_diff * 1000)}), previous {entry.prev_index}"
        )
        self._report.record(row, text, None if number < self._header.index_count else "behind the index count")


# --- log segments


def inspect_segments(report: Report, segments: list[Segment]) -> None:
    """Show segments in log order, and what stands in them from ``--offset`` on."""
    args = report.args
    start = args.offset if args.offset is not None else (segments[0].base if segments else 0)
    if args.offset is not None and not any(segment.base <= start < segment.end for segment in segments):
        where = f"physical offset {start} is in no segment of {' or '.join(args.paths)}"
        raise UsageError(where, "see the segments without --offset")
    for segment in segments:
        row = {"kind": "segment", "path": str(segment.path), "base": segment.base, "size": segment.size}
        text = f"segment {segment.path}: physical offsets {segment.base} to {segment.end}, {show_bytes(segment.size)}"
        report.say(row, text)
    shown = 0
    for segment in segments:
        if segment.end <= start:
            continue
        with report.disk.open_read(segment.path) as file:
            for offset, found in _frames(file, segment, max(start, segment.base)):
                if args.frames and shown >= args.frames:
                    more = f"  and more from {offset} on (--frames, --offset)"
                    report.say({"kind": "more", "phyOffset": offset}, more)
                    return
                row, text = _frame(found)
                report.say({"kind": "frame", "phyOffset": offset} | row, f"  {offset}: {text}")
                report.is_damaged |= isinstance(found, Corrupt)
                shown += 1


def _frames(file: DiskFile, segment: Segment, start: int) -> Iterator[tuple[int, Decoded]]:
    # What stands in the segment from ``start`` on, up to and with the first that is no message.
    options, position, first, data = DecoderOptions(), start - segment.base, 0, b""
    while position < segment.size:
        if position + HEAD_SIZE > first + len(data):
            first, data = position, file.pread(_READ_SIZE, position)
        offset = segment.base + position
        found = decode_frame(data, position - first, offset, segment.end, options)
        if isinstance(found, NotYetWritten) and position + found.needed > first + len(data):
            first, data = position, file.pread(max(_READ_SIZE, found.needed), position)
            found = decode_frame(data, 0, offset, segment.end, options)
        yield offset, found
        if not isinstance(found, Message):
            return
        position += found.size


def _frame(found: Decoded) -> tuple[dict[str, Any], str]:
    if isinstance(found, EndOfFile):
        return {"outcome": "endOfFile"}, "end of the segment"
    if isinstance(found, NotYetWritten):
        claims = f", but for the head of a frame of {found.needed} bytes" if found.needed else ""
        return {"outcome": "notYetWritten", "needed": found.needed}, f"not yet written{claims}"
    if isinstance(found, Corrupt):
        return {"outcome": "corrupt", "reason": found.reason}, f"corrupt: {found.reason}"
    row = {
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
        f"{found.size} bytes, {show_time(found.store_timestamp)}, "
        f"topic {printable(found.topic)}, queue {found.queue_id}/{found.queue_offset}, keys {keys}, "
        f"uniq key {printable(found.uniq_key or '-')}, tags {printable(found.tags or '-')}"
    )
    return row, text


# --- ConsumeQueues


def queue_of(path: Path) -> tuple[dict[str, Any], str]:
    """The topic and the queue that the folders of a queue's file name, as members of a row and as text."""
    folders = path.absolute().parts
    queue_id = queue_id_of(folders[-2]) if len(folders) > 3 else None
    if queue_id is None:
        return {}, ""
    return {"topic": folders[-3], "queueId": queue_id}, f", topic {printable(folders[-3])}, queue {queue_id}"


def _is_blank(unit: Unit | BatchUnit) -> bool:
    return isinstance(unit, Unit) and unit.is_blank


@dataclass(slots=True)
class _Scan:
    # What a file came to: units before the free room; blank ones; the first message's unit, where in the log it stands
    # and where the last one ends; how many units can be none, and the first of them.
    used: int = 0
    blank: int = 0
    first_message: int = -1
    begin: int = -1
    end: int = -1
    damaged: int = 0
    first_damaged: int = -1

    def add(self, number: int, unit: Unit | BatchUnit) -> None:
        # A unit that is not all zeros; zeros before it are damage.
        if number > self.used:
            self._damage(self.used, number - self.used)
        self.used = number + 1
        self.blank += _is_blank(unit)
        if self.is_wrong(number, unit, self.end):
            self._damage(number, 1)
        if unit.is_valid and not _is_blank(unit):
            if self.first_message < 0:
                self.first_message, self.begin = number, unit.phy_offset
            # Also of one that stands too high or too low: the next one is judged by it alone.
            self.end = unit.phy_offset + unit.size

    def is_wrong(self, number: int, unit: Unit | BatchUnit, end: int) -> bool:
        """Whether it can be no unit there; the message before it ends at ``end``."""
        if _is_blank(unit):
            return 0 <= self.first_message < number
        return number < self.used and (not unit.is_valid or unit.phy_offset < end)

    def _damage(self, number: int, count: int) -> None:
        self.first_damaged = number if self.damaged == 0 else self.first_damaged
        self.damaged += count


def inspect_queue(report: Report, path: Path, *, is_batch: bool) -> None:
    """Show one file of a ConsumeQueue or a BatchConsumeQueue."""
    kind, unit_size = ("batchConsumeQueue", BATCH_UNIT_SIZE) if is_batch else ("consumeQueue", UNIT_SIZE)
    with report.disk.open_read(path) as file:
        places, rest = divmod(file.size(), unit_size)
        begin, scan = (file_offset(path.name) or 0) // unit_size, _scan(file, unit_size)
        row: dict[str, Any] = {"kind": kind, "path": str(path), "size": file.size(), "firstUnit": begin}
        place, where = queue_of(path)
        row |= place | {"units": scan.used, "blankUnits": scan.blank, "places": places}
        row |= {"beginPhyOffset": scan.begin, "endPhyOffset": scan.end, "damagedUnits": scan.damaged}
        text = [f"{'batch ' if is_batch else ''}consume queue {path}, {show_bytes(file.size())}{where}"]
        text.append(f"  units    {begin} to {begin + scan.used}, {scan.used} of {places} places")
        if scan.blank:
            text[-1] += f", the first {scan.blank} blank: the queue begins at {begin + scan.blank}"
        if scan.begin >= 0:
            text.append(f"  offsets  messages from {scan.begin} to {scan.end} of the log")
        damage = f"{rest} bytes behind the last whole unit" if rest else None
        if scan.damaged:
            damage = f"{scan.damaged} units that can be none, unit {begin + scan.first_damaged} first"
        report.head(row, text, damage)
        first, end, stop = report.range(begin, begin + scan.used)
        first, end, stop = max(first, begin), min(end, begin + places), min(stop, begin + places)
        before = -1
        for number, unit in _units(file, unit_size, first - begin, stop - begin):
            row, words = _unit(unit)
            row = {"kind": f"{kind}Unit", "unit": begin + number} | row
            report.record(
                row, f"unit {begin + number}: {words}", _NO_UNIT if scan.is_wrong(number, unit, before) else None
            )
            before = unit.phy_offset + unit.size if unit.is_valid and not _is_blank(unit) else before
        if stop < end:
            report.say({"kind": "more", "unit": stop}, f"  and more from unit {stop} on (--frames, --entries)")


def _scan(file: DiskFile, unit_size: int) -> _Scan:
    scan, first, places = _Scan(), 0, file.size() // unit_size
    # Most of the room that is free was never written, and needs no look at the disk.
    while first < places and (first := file.next_data(first * unit_size) // unit_size) < places:
        stop = min(first + _UNITS_PER_READ, places)
        for number, unit in _units(file, unit_size, first, stop):
            if any(unit):
                scan.add(number, unit)
        first = stop
    return scan


def _units(file: DiskFile, unit_size: int, first: int, stop: int) -> Iterator[tuple[int, Unit | BatchUnit]]:
    for start in range(first, stop, _UNITS_PER_READ):
        data = file.pread(min(stop - start, _UNITS_PER_READ) * unit_size, start * unit_size)
        data = data[: len(data) // unit_size * unit_size]
        if unit_size == UNIT_SIZE:
            yield from enumerate((Unit(*numbers) for numbers in UNIT.iter_unpack(data)), start)
        else:
            yield from enumerate((BatchUnit(*numbers) for numbers in BATCH_UNIT.iter_unpack(data)), start)


def _unit(unit: Unit | BatchUnit) -> tuple[dict[str, Any], str]:
    row: dict[str, Any] = {"phyOffset": unit.phy_offset, "size": unit.size, "tagsCode": unit.tags_code}
    if _is_blank(unit):
        return row | {"blank": True}, "blank"
    words, address = f"phy offset {unit.phy_offset}, size {unit.size}, ", ext_address(unit.tags_code)
    if address is None:
        words += f"tags code {unit.tags_code}"
    else:
        row["extAddress"], words = address, f"{words}tags code in ConsumeQueueExt, at {address}"
    if isinstance(unit, BatchUnit):
        row |= {"storeTimestamp": unit.store_timestamp, "baseOffset": unit.base_offset, "batchSize": unit.batch_size}
        words += f", queue offsets {unit.base_offset} to {unit.base_offset + unit.batch_size}"
        words += f", {show_time(unit.store_timestamp)}"
    return row, words


def inspect_queue_ext(report: Report, path: Path) -> None:
    """Count the units of a ConsumeQueueExt, which are found by the addresses in a ConsumeQueue and go in order."""
    units, position, first, last, is_ended, damage = 0, 0, 0, 0, False, None
    with report.disk.open_read(path) as file:
        size, data, start = file.size(), b"", 0
        while position + 2 <= size:
            if position + EXT_HEAD_SIZE > start + len(data):
                start, data = position, file.pread(_READ_SIZE, position)
            head = data[position - start : position - start + EXT_HEAD_SIZE]
            length = int.from_bytes(head[:2], "big", signed=True)
            is_ended = length == EXT_END
            if is_ended or length == 0:
                break
            bitmap = int.from_bytes(head[18:], "big", signed=True) if len(head) == EXT_HEAD_SIZE else -1
            if bitmap < 0 or length != EXT_HEAD_SIZE + bitmap or position + length > size:
                damage = f"at byte {position} a unit says that it has {length} bytes, {bitmap} of them a bitmap"
                break
            _, _, last, _ = EXT_HEAD.unpack(head)
            first = first or last
            units, position = units + 1, position + length
    place, where = queue_of(path)
    row: dict[str, Any] = {"kind": "consumeQueueExt", "path": str(path), "size": size} | place
    row |= {"units": units, "end": position, "ended": is_ended, "beginTimestamp": first, "endTimestamp": last}
    text = [f"consume queue extension {path}, {show_bytes(size)}{where}"]
    text.append(f"  units    {units} in {position} bytes{', and the mark of the end' if is_ended else ''}")
    text += [f"  times    {show_time(first)} to {show_time(last)}"] if units else []
    report.head(row, text, damage)


# --- sparse indexes


def sparse_suffix(name: str) -> str | None:
    """``.index`` or ``.timeindex`` of a file named so, with or without what Kafka appends to it; None for others."""
    try:
        base_of_name(name)
    except ValueError:
        return None
    for passing in PASSING_SUFFIXES:
        name = name.removesuffix(passing)
    return next((suffix for suffix in _SPARSE if name.endswith(suffix)), None)


def inspect_sparse(report: Report, path: Path) -> None:
    """Show one OffsetIndex or TimeIndex."""
    row, text, damage = _describe(report.disk, path)
    report.head(row, text, damage)
    entries = int(row["entries"])
    first, end, stop = report.range(0, entries)
    end = min(end, int(row["slots"])) if "last" in row else 0
    stop = min(stop, end)
    _, _, kind = _SPARSE[sparse_suffix(path.name) or OFFSET_SUFFIX]
    with kind.load(report.disk, path, int(row["base"]), max(stop, entries) if stop > first else 0) as index:
        for number in range(first, stop):
            entry, unused = index.entry(number), number >= entries
            entry_row = {"kind": "entry", "number": number} | entry._asdict() | ({"unused": True} if unused else {})
            report.say(entry_row, f"  entry {number}: {_entry(entry)}{', unused' if unused else ''}")
    if stop < end:
        report.say({"kind": "more", "number": stop}, f"  and more from entry {stop} on (--frames, --entries)")


def show_sparse_file(report: Report, path: Path) -> None:
    """One line for an OffsetIndex or TimeIndex of a folder."""
    row, text, damage = _describe(report.disk, path)
    row |= {} if damage is None else {"damage": damage}
    report.say(row, f"{text[0]}, {row['entries']} entries{'' if damage is None else f'; damage: {damage}'}")


def _describe(disk: Disk, path: Path) -> tuple[dict[str, Any], list[str], str | None]:
    # The entries before a tail of unused slots, and what Kafka's sanity check says of them: damage. "check" is that of
    # the file as it is, every slot counting, which a tail of a TimeIndex does not pass.
    name, title, kind = _SPARSE[sparse_suffix(path.name) or OFFSET_SUFFIX]
    base = base_of_name(path.name)
    with disk.open_read(path) as file:
        size, entries = file.size(), _entries_before_tail(file, kind.entry_size)
    slots = size // kind.entry_size
    row: dict[str, Any] = {"kind": name, "path": str(path), "size": size, "base": base, "entries": entries}
    row |= {"slots": slots, "tail": slots - entries}
    text = [f"{title} {path}, {show_bytes(size)}", f"  base     {base}", f"  entries  {entries} of {slots} slots"]
    check, damage = "not asked", f"{size} bytes, more than can be mapped"
    if size <= INT32_MAX:
        with kind.open(disk, path, base, writable=False) as index:
            check = _sanity(index)
        with kind.load(disk, path, base, entries) as index:
            damage = _sanity(index)
            ends = {"first": index.entry(0), "last": index.entry(entries - 1)} if entries else {}
        row |= {"check": check} | {where: entry._asdict() for where, entry in ends.items()}
        text += [f"  {where:<8} {_entry(entry)}" for where, entry in ends.items()]
    text += [f"  tail     {slots - entries} unused slots: it grows, or was not trimmed"] if slots > entries else []
    text.append(f"  check    Kafka's sanity check: {check}")
    return row | {"check": check}, text, None if damage == "passed" else damage


def _sanity(index: OffsetIndex | TimeIndex) -> str:
    try:
        index.sanity_check()
    except CorruptDataError as error:
        return error.line().partition(": ")[2] or error.line()
    return "passed"


def _entries_before_tail(file: DiskFile, width: int) -> int:
    # Slots up to the last one that is not all zeros, whatever stands between them.
    last, position, size = 0, 0, file.size() // width * width
    while (position := file.next_data(position) // width * width) < size:
        data = file.pread(min(_READ_SIZE // width * width, size - position), position)
        used = len(data.rstrip(b"\0"))
        last = -(-(position + used) // width) if used else last
        position += max(len(data), width)
    return last


def _entry(entry: OffsetPosition | TimestampOffset) -> str:
    if isinstance(entry, OffsetPosition):
        return f"offset {entry.offset} at position {entry.position}"
    return f"{entry.timestamp} ({show_time(entry.timestamp)}) first at offset {entry.offset}"
