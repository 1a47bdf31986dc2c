"""Log segments in words or JSON lines: which there are, and frame by frame what stands in them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from indexd.cli.options import wants_json
from indexd.cli.output import print_json, print_line, show_bytes, show_time
from indexd.commitlog.decoder import Decoded, DecoderOptions, Message, decode_frame
from indexd.commitlog.format import HEAD_SIZE, Corrupt, EndOfFile, NotYetWritten
from indexd.commitlog.segments import Segment
from indexd.config.units import printable
from indexd.errors import UsageError
from indexd.storage.disk import Disk, DiskFile
from indexd.storage.names import segment_base

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
