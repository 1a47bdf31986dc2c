"""Asks a broker's index for keys of a sample of messages, as the broker does, and counts what it finds of them.

A task notes a message every so many bytes of its stretch. Each is asked for by one of its keys, in ranges of time
around it: whether IndexService.queryOffset (spec rocketmq-store 3.6, 3.7, 4.5) gives it.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from indexd.audit.plan import AuditPlan, flavour_at, layout_of, list_index
from indexd.audit.result import Part
from indexd.commitlog.decoder import DecoderOptions, Message
from indexd.commitlog.lookup import LogView
from indexd.config import Config
from indexd.errors import CorruptDataError, MissingOk
from indexd.index.format import FLAVOURS, Flavour, index_key_hash
from indexd.index.reader import IndexFileReader
from indexd.query.message import TIME_MAX
from indexd.recovery.open import frame_size_max
from indexd.storage.disk import Disk

#: The ranges that are asked around a message: what they are called, and how long they are, ms; None has no bounds.
WIDTHS: dict[str, int | None] = {"minute": 60_000, "day": 86_400_000, "all time": None}
# What mqadmin and the dashboard ask for.
_MAX_NUM = 64
# Each chain is a read or more at random places of the disk.
_SECONDS_MAX = 60.0


@dataclass(slots=True)
class Answers:
    """Of ``drawn`` messages ``asked`` were asked for; ``shares``, a row of ``--json`` a width, say what was not given:
    ``missed``, or ``cutOff`` for want of room.
    """

    drawn: int
    asked: int = 0
    shares: list[dict[str, Any]] = field(
        default_factory=lambda: [
            {"kind": "answers", "width": width, "rangeMs": span, "queries": 0, "missed": 0, "cutOff": 0}
            for width, span in WIDTHS.items()
        ]
    )

    def rows(self) -> list[dict[str, Any]]:
        """Lines of ``--json``: kind ``answers`` a width, and kind ``samples`` once."""
        return [*self.shares, {"kind": "samples", "drawn": self.drawn, "asked": self.asked}]

    def lines(self) -> list[str]:
        """For people: a line a width."""
        if not self.asked:
            return ["queries: no key of the log could be asked for"]
        lines = []
        for share in self.shares:
            where = "without bounds of time" if share["rangeMs"] is None else f"in time ranges of a {share['width']}"
            missed = (
                f"misses {share['missed']:,} of {self.asked:,} messages" if share["missed"] else "misses no message"
            )
            cut = f", {share['cutOff']:,} more for want of room" if share["cutOff"] else ""
            lines.append(f"queries {where}: the broker's own query {missed}{cut}")
        return lines


def stride_for(size: int, count: int) -> int:
    """Bytes of a log of ``size`` between two messages that are noted, 0 for none; one that grows keeps it."""
    return 1 << max((size // count).bit_length() - 1, 0) if count else 0


def ask(disk: Disk, config: Config, plan: AuditPlan, parts: Sequence[Part], count: int) -> Answers:
    """Ask for at most ``count`` of the messages that the parts have noted, for a minute at most. Raises DiskError."""
    store, layout, stride = config.store, layout_of(config), max(plan.tasks[0].stride, 1)
    # Where two tasks meet, both have noted one.
    noted = [offset for part in parts for offset in part.samples]
    offsets = sorted({offset // stride: offset for offset in reversed(noted)}.values())
    offsets = [offsets[at * len(offsets) // count] for at in range(count)] if len(offsets) > count else offsets
    options = DecoderOptions(frame_size_max=frame_size_max(config), check_crc=False)
    answers, deadline = Answers(len(offsets)), time.monotonic() + _SECONDS_MAX
    with ExitStack() as stack:
        lookup = LogView(disk, store.commit_log_directories, store.segment_size, options)
        stack.callback(lookup.close)
        files = []
        for name, size in reversed(list_index(disk, plan.folder).items()):
            if size == layout.file_size:
                with suppress(CorruptDataError), MissingOk():
                    files.append(IndexFileReader(stack.enter_context(disk.open_read(plan.folder / name)), layout))
        for turn, offset in enumerate(offsets):
            message = lookup.at(offset)
            names = _names(message, FLAVOURS[flavour_at(plan.eras, offset)]) if isinstance(message, Message) else []
            if not isinstance(message, Message) or not names or time.monotonic() > deadline:
                continue
            index_type, key = names[turn % len(names)]
            answers.asked += 1
            for share in answers.shares:
                begin, end = range_around(message.store_timestamp, share["rangeMs"])
                found = select(files, index_key_hash(message.topic, key, index_type), begin, end)
                share["queries"] += 1
                if offset not in found:
                    share["missed" if len(found) < _MAX_NUM else "cutOff"] += 1
    return answers


def range_around(timestamp: int, width: int | None) -> tuple[int, int]:
    """First and last millisecond of the range of ``width`` ms with the timestamp in its middle; None: all time."""
    begin = 0 if width is None else max(timestamp - width // 2, 0)
    return begin, TIME_MAX if width is None else begin + width - 1


def select(files: Sequence[IndexFileReader], key_hash: int, begin: int, end: int) -> list[int]:
    """IndexService.queryOffset over the files, newest first; a walk into what is no entry ends there, as in Java."""
    found: list[int] = []
    for file in files:
        header = file.header()
        if header.is_time_matched(begin, end):
            with suppress(CorruptDataError, struct.error):
                found += file.select_phy_offset(key_hash, _MAX_NUM - len(found), begin, end)
        if header.begin_timestamp < begin or len(found) >= _MAX_NUM:
            break
    return found


def _names(message: Message, flavour: Flavour) -> list[tuple[str | None, str]]:
    # What it is indexed by: types and keys.
    if message.sys_flag & 0xC in flavour.skipped_types:
        return []
    uniq = [(None, message.uniq_key)] if flavour.uniq_key and message.uniq_key else []
    tags = [("T", message.tags)] if flavour.tags and message.tags else []
    return [*uniq, *((None, key) for key in dict.fromkeys(message.keys)), *tags]
