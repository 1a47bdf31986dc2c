"""Kafka's OffsetIndex and TimeIndex in words or JSON lines, Kafka's own files and ours."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from indexd.cli.inspect_index import entry_range
from indexd.cli.options import wants_json
from indexd.cli.output import print_json, print_line, show_bytes, show_time
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
from indexd.sparse.offset_index import OffsetIndex
from indexd.sparse.time_index import TimeIndex
from indexd.storage.disk import Disk, DiskFile

_READ_SIZE = 1 << 20
_EXIT_FINDINGS = 1
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
    _say(row, "\n".join(_head(row)), json_lines=wants_json(args))
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
            _say({"kind": "entry", "number": number} | entry._asdict() | unused, words, json_lines=wants_json(args))
    if stop < end:
        more = {"kind": "more", "number": stop}
        _say(more, f"  and more from entry {stop} on (--frames, --entries)", json_lines=wants_json(args))
    return _EXIT_FINDINGS if "damage" in row else 0


def show_sparse_folder(path: Path, disk: Disk, *, json_lines: bool) -> int:
    """A line for each index below a folder; how many they are."""
    names = [name for name, _ in disk.list_dir(path) if is_sparse_name(name)]
    for name in names:
        row = describe(path / name, disk)
        _say(row, _head(row)[0] + f", {row['entries']} entries" + _damage(row, "; damage: "), json_lines=json_lines)
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


def _say(row: dict[str, Any], text: str, *, json_lines: bool) -> None:
    if json_lines:
        print_json(row)
        return
    for line in text.split("\n"):
        print_line(line)
