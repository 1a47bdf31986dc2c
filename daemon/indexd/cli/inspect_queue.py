"""Files of queues in words or JSON lines: ConsumeQueue, ours or a broker's, BatchConsumeQueue and ConsumeQueueExt.

Kafka's OffsetIndex and TimeIndex in words or JSON lines, Kafka's own files and ours.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from indexd.cli.inspect_index import entry_range
from indexd.cli.output import print_json, print_line, show_bytes, show_time, wants_json
from indexd.config.units import printable
from indexd.consumequeue.format import (
    BATCH_FOLDER,
    BATCH_UNIT,
    BATCH_UNIT_END,
    BATCH_UNIT_SIZE,
    EXT_END,
    EXT_FOLDER,
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
from indexd.errors import CorruptDataError
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

QUEUE_FOLDER = "consumequeue"
_UNITS_PER_READ = 1 << 14
_EXT_READ = 1 << 20
_EXIT_FINDINGS = 1
# Units by which a file is known that no folder tells.
_UNITS_ASKED = 3
_DAMAGE = "it can be no unit here"


def queue_kind(path: Path, disk: Disk) -> str | None:
    """The folder that says what a file of a queue is, by where it lies or else by its first units; None: neither."""
    folders = path.absolute().parts
    if len(folders) > 3 and folders[-4] in (QUEUE_FOLDER, BATCH_FOLDER, EXT_FOLDER):
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
    return QUEUE_FOLDER if used and used == units[: len(used)] and all(u.is_valid for u in used) and rises else None


def inspect_queue(path: Path, kind: str, disk: Disk, args: argparse.Namespace) -> int:
    """Show one file; 1 if something in it cannot be."""
    with disk.open_read(path) as file:
        if kind == EXT_FOLDER:
            return _inspect_ext(file, args)
        view = _BATCH if kind == BATCH_FOLDER else _PLAIN
        return view.show(file, args)


def show_queue_folder(path: Path, disk: Disk, *, json_lines: bool) -> None:
    """A line for each file of a queue, without a look into it."""
    for name, size in disk.list_dir(path):
        begin = file_offset(name)
        if begin is not None:
            row = {"kind": "queueFile", "path": str(path / name), "begin": begin, "size": size} | _place(path / name)
            _say(row, f"queue file {path / name}: from byte {begin} of the queue, {show_bytes(size)}", json_lines)


def show_queues(root: Path, disk: Disk, *, json_lines: bool) -> int:
    """How many queues and files lie below the folder of all queues; how many of both."""
    queues, files, size = 0, 0, 0
    for topic in disk.list_dirs(root):
        for name in disk.list_dirs(root / topic):
            if queue_id_of(name) is None:
                continue
            rows = [size for file, size in disk.list_dir(root / topic / name) if file_offset(file) is not None]
            queues, files, size = queues + 1, files + len(rows), size + sum(rows)
    row = {"kind": "queues", "path": str(root), "queues": queues, "files": files, "size": size}
    _say(row, f"queues {root}: {queues} queues, {files} files, {show_bytes(size)}", json_lines)
    return queues + files


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
        if isinstance(unit, Unit) and unit.is_blank:
            self.blank += 1
        if self.is_wrong(number, unit, self.end):
            self._damage(number, 1)
        if unit.is_valid and not (isinstance(unit, Unit) and unit.is_blank):
            if self.first_message < 0:
                self.first_message, self.begin = number, unit.phy_offset
            # Also of one that stands too high or too low: the next one is judged by it alone.
            self.end = unit.phy_offset + unit.size

    def is_wrong(self, number: int, unit: Unit | BatchUnit, end: int) -> bool:
        """Whether it can be no unit there; the message before it ends at ``end``."""
        if isinstance(unit, Unit) and unit.is_blank:
            return 0 <= self.first_message < number
        return number < self.used and (not unit.is_valid or unit.phy_offset < end)

    def _damage(self, number: int, count: int) -> None:
        self.first_damaged = number if self.damaged == 0 else self.first_damaged
        self.damaged += count


@dataclass(frozen=True, slots=True)
class _View:
    # Units of one size.
    kind: str
    title: str
    unit_size: int
    unpack: Callable[[bytes], Iterator[Unit | BatchUnit]]
    show_unit: Callable[[Unit | BatchUnit], tuple[dict[str, Any], str]]

    def show(self, file: DiskFile, args: argparse.Namespace) -> int:
        json_lines, places = wants_json(args), file.size() // self.unit_size
        begin, scan = (file_offset(file.path.name) or 0) // self.unit_size, self._scan(file, places)
        self._show_head(file, begin, scan, json_lines=json_lines)
        first, end = begin, begin + scan.used
        if args.entries is not None:
            first, end = entry_range(args.entries, first, end)
        first, end = max(first, begin), min(end, begin + places)
        stop = end if args.entries is not None or not args.frames else min(end, first + args.frames)
        before = -1
        for number, unit in self._units(file, first - begin, stop - begin):
            row, words = self.show_unit(unit)
            if scan.is_wrong(number, unit, before):
                row, words = row | {"damage": _DAMAGE}, f"{words}  <- {_DAMAGE}"
            before = unit.phy_offset + unit.size if unit.is_valid and "blank" not in row else before
            row = {"kind": f"{self.kind}Unit", "unit": begin + number} | row
            _say(row, f"  unit {begin + number}: {words}", json_lines)
        if stop < end:
            _say({"kind": "more", "unit": stop}, f"  and more from unit {stop} on (--frames, --entries)", json_lines)
        return _EXIT_FINDINGS if scan.damaged or file.size() % self.unit_size else 0

    def _show_head(self, file: DiskFile, begin: int, scan: _Scan, *, json_lines: bool) -> None:
        path, size = file.path, file.size()
        places, rest = divmod(size, self.unit_size)
        row: dict[str, Any] = {"kind": self.kind, "path": str(path), "size": size, "firstUnit": begin} | _place(path)
        row |= {"units": scan.used, "blankUnits": scan.blank, "places": places}
        row |= {"beginPhyOffset": scan.begin, "endPhyOffset": scan.end, "damagedUnits": scan.damaged}
        text = [f"{self.title} {path}, {show_bytes(size)}{_where(path)}"]
        text.append(f"  units    {begin} to {begin + scan.used}, {scan.used} of {places} places")
        if scan.blank:
            text[-1] += f", the first {scan.blank} blank: the queue begins at {begin + scan.blank}"
        if scan.begin >= 0:
            text.append(f"  offsets  messages from {scan.begin} to {scan.end} of the log")
        if scan.damaged:
            row["damage"] = f"{scan.damaged} units that can be none, unit {begin + scan.first_damaged} first"
        elif rest:
            row["damage"] = f"{rest} bytes behind the last whole unit"
        text += [f"  damage   {row['damage']}"] if "damage" in row else []
        _say(row, "\n".join(text), json_lines)

    def _scan(self, file: DiskFile, places: int) -> _Scan:
        scan, first = _Scan(), 0
        # Most of the room that is free was never written, and needs no look at the disk.
        while first < places and (first := file.next_data(first * self.unit_size) // self.unit_size) < places:
            stop = min(first + _UNITS_PER_READ, places)
            for number, unit in self._units(file, first, stop):
                if any(unit):
                    scan.add(number, unit)
            first = stop
        return scan

    def _units(self, file: DiskFile, first: int, stop: int) -> Iterator[tuple[int, Unit | BatchUnit]]:
        while first < stop:
            count = min(stop - first, _UNITS_PER_READ)
            data = file.pread(count * self.unit_size, first * self.unit_size)
            data = data[: len(data) // self.unit_size * self.unit_size]
            yield from enumerate(self.unpack(data), first)
            if len(data) < count * self.unit_size:
                return
            first += count


def _plain_unit(unit: Unit | BatchUnit) -> tuple[dict[str, Any], str]:
    row = {"phyOffset": unit.phy_offset, "size": unit.size, "tagsCode": unit.tags_code}
    if isinstance(unit, Unit) and unit.is_blank:
        return row | {"blank": True}, "blank"
    address = ext_address(unit.tags_code)
    tags = f"tags code {unit.tags_code}"
    if address is not None:
        row["extAddress"], tags = address, f"tags code in ConsumeQueueExt, at {address}"
    return row, f"phy offset {unit.phy_offset}, size {unit.size}, {tags}"


def _batch_unit(unit: Unit | BatchUnit) -> tuple[dict[str, Any], str]:
    assert isinstance(unit, BatchUnit)
    row, words = _plain_unit(unit)
    row |= {
        "storeTimestamp": unit.store_timestamp,
        "baseOffset": unit.base_offset,
        "batchSize": unit.batch_size,
    }
    queue = f"queue offsets {unit.base_offset} to {unit.base_offset + unit.batch_size}"
    return row, f"{words}, {queue}, {show_time(unit.store_timestamp)}"


_PLAIN = _View(
    "consumeQueue",
    "consume queue",
    UNIT_SIZE,
    lambda data: (Unit(*numbers) for numbers in UNIT.iter_unpack(data)),
    _plain_unit,
)
_BATCH = _View(
    "batchConsumeQueue",
    "batch consume queue",
    BATCH_UNIT_SIZE,
    lambda data: (BatchUnit(*numbers) for numbers in BATCH_UNIT.iter_unpack(data)),
    _batch_unit,
)


def _inspect_ext(file: DiskFile, args: argparse.Namespace) -> int:
    # A summary: its units are found by the addresses in a ConsumeQueue, and go in order.
    units, position, first, last, is_ended, damage = 0, 0, 0, 0, False, ""
    size, data, start = file.size(), b"", 0
    while position + 2 <= size:
        if position + EXT_HEAD_SIZE > start + len(data):
            start, data = position, file.pread(_EXT_READ, position)
        length = int.from_bytes(data[position - start : position - start + 2], "big", signed=True)
        is_ended = length == EXT_END
        if is_ended or length == 0:
            break
        head = data[position - start : position - start + EXT_HEAD_SIZE]
        bitmap = int.from_bytes(head[18:], "big", signed=True) if len(head) == EXT_HEAD_SIZE else -1
        if bitmap < 0 or length != EXT_HEAD_SIZE + bitmap or position + length > size:
            damage = f"at byte {position} a unit says that it has {length} bytes, {bitmap} of them a bitmap"
            break
        _, _, last, _ = EXT_HEAD.unpack(head)
        first = first or last
        units, position = units + 1, position + length
    row: dict[str, Any] = {"kind": "consumeQueueExt", "path": str(file.path), "size": size} | _place(file.path)
    row |= {"units": units, "end": position, "ended": is_ended, "beginTimestamp": first, "endTimestamp": last}
    text = [f"consume queue extension {file.path}, {show_bytes(size)}{_where(file.path)}"]
    text.append(f"  units    {units} in {position} bytes{', and the mark of the end' if is_ended else ''}")
    text += [f"  times    {show_time(first)} to {show_time(last)}"] if units else []
    if damage:
        row["damage"] = damage
        text.append(f"  damage   {damage}")
    _say(row, "\n".join(text), wants_json(args))
    return _EXIT_FINDINGS if damage else 0


def _place(path: Path) -> dict[str, Any]:
    folders = path.absolute().parts
    queue_id = queue_id_of(folders[-2]) if len(folders) > 3 else None
    return {} if queue_id is None else {"topic": folders[-3], "queueId": queue_id}


def _where(path: Path) -> str:
    place = _place(path)
    return f", topic {printable(place['topic'])}, queue {place['queueId']}" if place else ""


def _say(row: dict[str, Any], text: str, json_lines: bool) -> None:
    if json_lines:
        print_json(row)
        return
    for line in text.split("\n"):
        print_line(line)


_READ_SIZE = 1 << 20
_KINDS: dict[str, tuple[str, type[OffsetIndex] | type[TimeIndex]]] = {
    OFFSET_SUFFIX: ("offsetIndex", OffsetIndex),
    TIME_SUFFIX: ("timeIndex", TimeIndex),
}


def is_sparse_name(name: str) -> bool:
    """Whether a file of that name is one of these: a base, ``.index`` or ``.timeindex``, what Kafka appends to it."""
    try:
        base_of_name(name)
    except ValueError:
        return False
    return _suffix(name) is not None


def inspect_sparse(path: Path, disk: Disk, args: argparse.Namespace) -> int:
    """Show one file; 1 if what it holds cannot be."""
    row = describe(path, disk)
    _inspect_sparse_say(row, "\n".join(_head(row)), json_lines=wants_json(args))
    entries = int(row["entries"])
    first, end = (0, entries) if args.entries is None else entry_range(args.entries, 0, entries)
    end = min(end, int(row["slots"])) if "last" in row else 0
    stop = end if args.entries is not None or not args.frames else min(end, first + args.frames)
    _, kind = _KINDS[_suffix(path.name) or OFFSET_SUFFIX]
    with kind.load(disk, path, int(row["base"]), max(stop, entries) if stop > first else 0) as index:
        for number in range(first, stop):
            entry = index.entry(number)
            unused = {"unused": True} if number >= entries else {}
            words = f"  entry {number}: {_words(entry)}{', unused' if unused else ''}"
            _inspect_sparse_say(
                {"kind": "entry", "number": number} | entry._asdict() | unused, words, json_lines=wants_json(args)
            )
    if stop < end:
        more = {"kind": "more", "number": stop}
        _inspect_sparse_say(more, f"  and more from entry {stop} on (--frames, --entries)", json_lines=wants_json(args))
    return _EXIT_FINDINGS if "damage" in row else 0


def show_sparse_folder(path: Path, disk: Disk, *, json_lines: bool) -> int:
    """A line for each index below a folder; how many they are."""
    names = [name for name, _ in disk.list_dir(path) if is_sparse_name(name)]
    for name in names:
        row = describe(path / name, disk)
        _inspect_sparse_say(
            row, _head(row)[0] + f", {row['entries']} entries" + _damage(row, "; damage: "), json_lines=json_lines
        )
    return len(names)


def describe(path: Path, disk: Disk) -> dict[str, Any]:
    """The file's own word: its entries before a tail of unused slots, and what Kafka's sanity check says of them.

    ``damage``: that check fails for the entries, or the length is not of whole ones. ``check`` is the check of the file
    as it is, every slot counting, which a tail of a TimeIndex does not pass.
    """
    kind, index_type = _KINDS[_suffix(path.name) or OFFSET_SUFFIX]
    base = base_of_name(path.name)
    with disk.open_read(path) as file:
        size, entries = file.size(), _entries_before_tail(file, index_type.entry_size)
    row: dict[str, Any] = {"kind": kind, "path": str(path), "size": size, "base": base, "entries": entries}
    row["slots"] = size // index_type.entry_size
    row["tail"] = int(row["slots"]) - entries
    if size > INT32_MAX:
        return row | {"check": "not asked", "damage": f"{size} bytes, more than can be mapped"}
    with index_type.open(disk, path, base, writable=False) as index:
        row["check"] = _check(index)
    with index_type.load(disk, path, base, entries) as index:
        damage = _check(index)
        if entries:
            row["first"] = index.entry(0)._asdict()
            row["last"] = index.entry(entries - 1)._asdict()
    return row if damage == "passed" else row | {"damage": damage}


def _check(index: OffsetIndex | TimeIndex) -> str:
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


def _suffix(name: str) -> str | None:
    for passing in PASSING_SUFFIXES:
        name = name.removesuffix(passing)
    return next((suffix for suffix in _KINDS if name.endswith(suffix)), None)


def _head(row: dict[str, Any]) -> list[str]:
    title = "offset index" if row["kind"] == "offsetIndex" else "time index"
    text = [f"{title} {row['path']}, {show_bytes(row['size'])}", f"  base     {row['base']}"]
    text.append(f"  entries  {row['entries']} of {row['slots']} slots")
    if "first" in row:
        kind = OffsetPosition if row["kind"] == "offsetIndex" else TimestampOffset
        text.append(f"  first    {_words(kind(**row['first']))}")
        text.append(f"  last     {_words(kind(**row['last']))}")
    if row["tail"]:
        text.append(f"  tail     {row['tail']} unused slots: it grows, or was not trimmed")
    text.append(f"  check    Kafka's sanity check: {row['check']}")
    return text + ([f"  damage   {row['damage']}"] if "damage" in row else [])


def _damage(row: dict[str, Any], before: str) -> str:
    return f"{before}{row['damage']}" if "damage" in row else ""


def _words(entry: OffsetPosition | TimestampOffset) -> str:
    if isinstance(entry, OffsetPosition):
        return f"offset {entry.offset} at position {entry.position}"
    return f"{entry.timestamp} ({show_time(entry.timestamp)}) first at offset {entry.offset}"


def _inspect_sparse_say(row: dict[str, Any], text: str, *, json_lines: bool) -> None:
    if json_lines:
        print_json(row)
        return
    for line in text.split("\n"):
        print_line(line)
