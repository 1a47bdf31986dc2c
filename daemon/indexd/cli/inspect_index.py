"""An index file in words or JSON lines: its header, its slots, its entries, one chain, one key."""

from __future__ import annotations

import argparse
import re
import struct
from collections.abc import Iterator
from pathlib import Path

from indexd.cli.output import print_json, print_line, show_bytes, show_time, wants_json
from indexd.config import Config
from indexd.errors import CorruptDataError, UsageError
from indexd.flush.frontier import read_frontier
from indexd.index.format import ENTRY_SIZE, HEADER_SIZE, SLOT_SIZE, IndexEntry, IndexHeader, IndexLayout, index_key_hash
from indexd.index.reader import IndexFileReader
from indexd.storage.disk import Disk

_DEFAULT = "default"
_ENTRIES_PER_SLOT = 4  # RocketMQ's own defaults, and most settings made after them
_SLOTS_PER_READ = 16384
_RANGE = re.compile(r"([0-9]{0,19}):([0-9]{0,19})", re.ASCII)
_EXIT_FINDINGS = 1


def inspect_index(path: Path, disk: Disk, args: argparse.Namespace, config: Config) -> int:
    """Show one index file as the flags ask; 1 if a chain that was shown is broken."""
    if (args.topic is None) != (args.key is None):
        raise UsageError("--topic and --key belong together", "give both")
    with disk.open_read(path) as file:
        size = file.size()
        layout = _layout(path, size, disk, config)
        show_header(path, size, file.pread(HEADER_SIZE, 0), layout, json_lines=wants_json(args))
        view = _IndexView(IndexFileReader(file, layout), json_lines=wants_json(args))
        if args.slots:
            view.show_slots()
        if args.entries is not None:
            view.show_entries(args.entries)
        if args.chain is not None:
            if not 0 <= args.chain < layout.hash_slot_num:
                raise UsageError(f"--chain {args.chain} is no slot of 0 to {layout.hash_slot_num - 1}")
            view.show_chain(args.chain, None)
        if args.topic is not None:
            key_hash = index_key_hash(args.topic, args.key, args.index_type)
            view.show_chain(layout.slot_of(key_hash), key_hash)
    return _EXIT_FINDINGS if view.is_damaged else 0


def show_header(path: Path, size: int, head: bytes, layout: IndexLayout | None, *, json_lines: bool) -> None:
    """The header of one file; with ``layout`` also how full it is."""
    if len(head) < HEADER_SIZE:
        header, note = IndexHeader(), f"cut off: {size} bytes"
    else:
        header, note = IndexHeader.unpack(head), ""
    if json_lines:
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
        if layout is not None:
            row |= {"hashSlotNum": layout.hash_slot_num, "indexNum": layout.index_num}
            row["full"] = header.index_count >= layout.index_num
        if note:
            row["damage"] = note
        print_json(row)
        return
    print_line(f"index {path}, {show_bytes(size)}{'; ' + note if note else ''}")
    capacity = f" of {layout.index_num - 1}" if layout is not None else ""
    slots = f" of {layout.hash_slot_num}" if layout is not None else ""
    print_line(f"  entries  {header.entries}{capacity}, used slots {header.used_slot_count}{slots}")
    print_line(f"  times    {show_time(header.begin_timestamp)} to {show_time(header.end_timestamp)}")
    print_line(f"  offsets  {header.begin_phy_offset} to {header.end_phy_offset}")


def entry_range(text: str, first: int, last: int) -> tuple[int, int]:
    """The two numbers of ``--entries A:B``; ``first`` and ``last`` stand in for those that are left out."""
    match = _RANGE.fullmatch(text)
    if match is None:
        raise UsageError(f"--entries {text!r} is not A:B", "give two entry numbers, such as 1:100")
    return int(match[1] or first), int(match[2] or last)


def fitting_layouts(size: int, wanted: IndexLayout) -> list[IndexLayout]:
    """Layouts of ``size`` bytes that share a number with ``wanted``, or have RocketMQ's four entries a slot."""
    body = size - HEADER_SIZE
    tries = [
        (wanted.hash_slot_num, (body - SLOT_SIZE * wanted.hash_slot_num) // ENTRY_SIZE),
        ((body - ENTRY_SIZE * wanted.index_num) // SLOT_SIZE, wanted.index_num),
    ]
    slots = body // (SLOT_SIZE + ENTRY_SIZE * _ENTRIES_PER_SLOT)
    tries.append((slots, _ENTRIES_PER_SLOT * slots))
    layouts = [IndexLayout(slots, entries) for slots, entries in tries if slots >= 1 and entries >= 2]
    return [layout for layout in dict.fromkeys(layouts) if layout.file_size == size]


def _layout(path: Path, size: int, disk: Disk, config: Config) -> IndexLayout:
    # What the flags say, else what a frontier beside or above the file says, else the default.
    layout = IndexLayout(config.index.hash_slot_num, config.index.index_num)
    source = "the configuration"
    if all(config.provenance.get(key, _DEFAULT) == _DEFAULT for key in ("hash_slot_num", "index_num")):
        for folder in (path.absolute().parent.parent, path.absolute().parent):
            frontier = read_frontier(disk, folder / "frontier")
            if frontier is not None:
                layout, source = frontier.layout, str(folder / "frontier")
                break
    if layout.file_size == size:
        return layout
    text = (
        f"index file {path} has {size} bytes, but {layout.hash_slot_num} slots and {layout.index_num} entries "
        f"(from {source}) make {layout.file_size}"
    )
    fits = fitting_layouts(size, layout)
    tries = " or ".join(f"--hash-slot-num {fit.hash_slot_num} --index-num {fit.index_num}" for fit in fits)
    hint = (
        f"try {tries}"
        if fits
        else "give the broker's maxHashSlotNum and maxIndexNum as --hash-slot-num and --index-num"
    )
    if source.endswith("frontier"):
        raise CorruptDataError(text, f"run indexd --recover; or, if it is another's file, {hint}")
    raise UsageError(text, hint)


class _IndexView:
    """Shows parts of one file; ``is_damaged`` once something shown was wrong."""

    def __init__(self, file: IndexFileReader, *, json_lines: bool) -> None:
        self._file = file
        self._layout = file.layout
        self._header = file.header()
        self._json_lines = json_lines
        self.is_damaged = False

    def show_slots(self) -> None:
        """Every slot that is not 0, and what is wrong with it."""
        for first in range(0, self._layout.hash_slot_num, _SLOTS_PER_READ):
            count = min(_SLOTS_PER_READ, self._layout.hash_slot_num - first)
            data = self._file.file.pread(SLOT_SIZE * count, self._layout.slot_position(first))
            for slot, number in enumerate(struct.unpack(f">{len(data) // SLOT_SIZE}i", data), first):
                if number == 0:
                    continue
                damage = None if 0 < number < self._header.index_count else "it names no entry that is counted"
                self._show("slot", {"slot": slot, "index": number}, f"slot {slot}: entry {number}", damage)

    def show_entries(self, text: str) -> None:
        """Entries ``A:B``, those behind the index count too."""
        first, last = entry_range(text, 1, self._header.index_count)
        for number in range(first, min(last, self._layout.index_num)):
            self._show_entry(number, self._file.entry(number))

    def show_chain(self, slot: int, key_hash: int | None) -> None:
        """The entries of a slot, newest first; with ``key_hash`` those of that hash alone."""
        newest = self._file.slot(slot)
        row = {"slot": slot, "index": newest} | ({} if key_hash is None else {"keyHash": key_hash})
        words = f"slot {slot}" if key_hash is None else f"key hash {key_hash}, slot {slot}"
        self._show("chain", row, f"{words}: {f'newest entry {newest}' if newest else 'empty'}", None)
        for number, entry in self._walk(slot, newest):
            if key_hash is None or entry.key_hash == key_hash:
                self._show_entry(number, entry)

    def _walk(self, slot: int, number: int) -> Iterator[tuple[int, IndexEntry]]:
        above = self._layout.index_num
        while number != 0:
            if not 0 < number < above:
                row = {"slot": slot, "index": number}
                self._show("damage", row, f"slot {slot}", f"the chain goes from entry {above} to {number}")
                return
            entry = self._file.entry(number)
            yield number, entry
            above, number = number, entry.prev_index

    def _show_entry(self, number: int, entry: IndexEntry) -> None:
        time = self._header.begin_timestamp + entry.time_diff * 1000
        row = {
            "number": number,
            "keyHash": entry.key_hash,
            "slot": entry.key_hash % self._layout.hash_slot_num,
            "phyOffset": entry.phy_offset,
            "timeDiff": entry.time_diff,
            "prevIndex": entry.prev_index,
        }
        text = (
            f"entry {number}: hash {entry.key_hash}, offset {entry.phy_offset}, +{entry.time_diff} s "
            f"({show_time(time)}), previous {entry.prev_index}"
        )
        damage = None if number < self._header.index_count else "behind the index count"
        self._show("entry", row, text, damage)

    def _show(self, kind: str, row: dict[str, int], text: str, damage: str | None) -> None:
        self.is_damaged |= damage is not None
        if self._json_lines:
            print_json({"kind": kind, **row} | ({} if damage is None else {"damage": damage}))
        else:
            print_line(f"  {text}{'' if damage is None else f'  <- {damage}'}")
