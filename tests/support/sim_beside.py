"""What queues and sparse indexes of a simulation must hold: written from the formats' description alone."""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from indexd.flush.frontier import read_frontier
from support.sim_checks import BrokenError

if TYPE_CHECKING:
    from pathlib import Path

    from indexd.flush.frontier import Frontier
    from support.naive import NaiveMessage
    from support.sim_disk import SimDisk
    from support.sim_oracle import Gaps
    from support.simulation import World

_UNIT = struct.Struct(">qiq")
_BLANK = _UNIT.pack(0, 2147483647, 0)
_OFFSET_ENTRY = struct.Struct(">ii")
_TIME_ENTRY = struct.Struct(">qi")
_PREPARED, _ROLLBACK = 4, 12
_FRAME_SIZE_MIN = 91


@dataclass(slots=True)
class _Queue:
    """``begin``: the number of the first unit of ``units``; ``phys`` are their physical offsets, 0 of a blank one."""

    begin: int
    units: list[bytes] = field(default_factory=list)
    phys: list[int] = field(default_factory=list)
    max_phy_offset: int = -1


def naive_queues(
    messages: list[NaiveMessage], file_units: int, gaps: Gaps, anew: tuple[int, ...]
) -> dict[tuple[str, int], _Queue]:
    """The ConsumeQueues after exactly these messages (spec rocketmq-store 5.2); behind what expired they begin anew."""
    queues: dict[tuple[str, int], _Queue] = {}
    ends = sorted({*(end for _, end in gaps), *anew}, reverse=True)
    for message in messages:
        while ends and message.phy_offset >= ends[-1]:
            ends.pop()
            queues.clear()
        if message.sys_flag & 12 in (_PREPARED, _ROLLBACK):
            continue
        name = message.topic, message.queue_id
        if name not in queues:
            blanks = message.cq_offset % file_units
            begin = message.cq_offset - blanks
            queues[name] = _Queue(begin, [_BLANK] * blanks, [0] * blanks)
        queue = queues[name]
        is_there = message.phy_offset + message.size <= queue.max_phy_offset
        if is_there or (message.cq_offset and message.cq_offset < queue.begin + len(queue.units)):
            continue
        queue.units.append(_UNIT.pack(message.phy_offset, message.size, message.tags_code))
        queue.phys.append(message.phy_offset)
        queue.max_phy_offset = message.phy_offset + message.size
    return queues


def naive_pair(messages: list[NaiveMessage], base: int, interval: int, *, sealed: bool) -> tuple[bytes, bytes]:
    """One segment's OffsetIndex and TimeIndex, trimmed (spec kafka-index 8)."""
    offsets, times = b"", b""
    since, largest, last = 0, (-1, 0), -1
    for ordinal, message in enumerate(messages):
        if message.store_timestamp > largest[0]:
            largest = message.store_timestamp, ordinal
        if since > interval:
            offsets += _OFFSET_ENTRY.pack(ordinal, message.phy_offset - base)
            if largest[0] > last:
                times += _TIME_ENTRY.pack(*largest)
                last = largest[0]
            since = 0
        since += message.size
    if sealed and largest[0] > last:
        times += _TIME_ENTRY.pack(*largest)
    return offsets, times


def check_beside(world: World, end: int, stood: Frontier) -> None:
    """Queues and sparse indexes are those of an undisturbed build of the log up to ``end``."""
    queues, sparse = stood.queues, stood.sparse
    assert queues is not None
    assert sparse is not None
    messages = world.oracle.messages(world.begin, end, world.gaps)
    _check_queues(world, messages, queues)
    segments: dict[int, list[NaiveMessage]] = defaultdict(list)
    for message in messages:
        segments[message.phy_offset - message.phy_offset % world.shape.segment_size].append(message)
    named = [segment.base for segment in sparse.segments]
    lost = [base for base in segments if base not in named and base + world.shape.segment_size > world.log.begin]
    if lost or set(named) - set(segments):
        raise BrokenError("lost" if lost else "invented", f"segments {named} of {sorted(segments)}; {world}")
    for base in named:
        sealed = base != named[-1]
        pair = naive_pair(segments[base], base, world.shape.sparse_interval, sealed=sealed)
        for suffix, wanted, size in zip((".index", ".timeindex"), pair, (8, 12), strict=True):
            found = world.disk.peek(world.data / "sparse" / f"{base:020d}{suffix}")
            if (found if sealed else found.rstrip(b"\0")) != (wanted if sealed else wanted.rstrip(b"\0")):
                raise BrokenError("differs", f"{base}{suffix}: {len(found) // size} of {len(wanted) // size}; {world}")


def _check_queues(world: World, messages: list[NaiveMessage], marks: tuple[tuple[object, ...], ...]) -> None:
    units = world.shape.queue_units
    wanted = naive_queues(messages, units, world.gaps, world.anew)
    for topic, queue_id, first, _, end, max_phy_offset, *_ in marks:
        assert isinstance(first, int)
        queue = wanted.pop((str(topic), int(str(queue_id))), None)
        name = f"queue {topic}/{queue_id}"
        if queue is None:
            raise BrokenError("invented", f"{name} is of no message; {world}")
        ends = queue.begin + len(queue.units), queue.max_phy_offset
        # Where all of it has expired nobody knows where the last one ended.
        if end != ends[0] or (end > first and max_phy_offset != ends[1]):
            raise BrokenError("lost", f"{name} ends at {end, max_phy_offset}, not {ends}; {world}")
        if any(phy >= world.log.begin for phy in queue.phys[: first - queue.begin]):
            raise BrokenError("lost", f"{name} begins at unit {first}; {world}")
        for begin in range(first, queue.begin + len(queue.units), units):
            path = world.data / "consumequeue" / str(topic) / str(queue_id) / f"{begin * 20:020d}"
            bytes_ = b"".join(queue.units[begin - queue.begin :][:units]).ljust(units * 20, b"\0")
            if world.disk.peek(path) != bytes_:
                raise BrokenError("differs", f"{name} differs in {path.name}; {world}")
    lost = [name for name, queue in wanted.items() if any(phy >= world.log.begin for phy in queue.phys)]
    if lost:
        raise BrokenError("lost", f"queues {lost} are not there; {world}")


def has_lost_refill(world: World) -> bool:
    """Whether queues were being filled again, and what they had not come to has expired."""
    path = world.data / "frontier"
    if not world.disk.is_there(path):
        return False
    try:
        refill_offset = json.loads(world.disk.peek(path))["refillOffset"]
    except ValueError:  # torn, where the code is made wrong on purpose: nothing of it is believed
        return False
    return refill_offset is not None and refill_offset < world.log.begin


def check_stopped_beside(world: World) -> None:
    """What a clean stop leaves: the files that the frontier names, and no other."""
    frontier = read_frontier(world.disk, world.data / "frontier")
    assert frontier is not None
    check_beside(world, frontier.phy_offset, frontier)
    assert frontier.queues is not None
    assert frontier.sparse is not None
    size = world.shape.queue_units
    wanted = {
        f"consumequeue/{mark.topic}/{mark.queue_id}/{begin * 20:020d}"
        for mark in frontier.queues
        for begin in range(mark.first_offset // size * size, mark.max_offset, size)
    }
    wanted |= {f"sparse/{segment.base:020d}{suffix}" for segment in frontier.sparse.segments for suffix in _SUFFIXES}
    found = {f"{name}/{path}" for name in ("consumequeue", "sparse") for path in _walk(world.disk, world.data / name)}
    if found != wanted:
        raise BrokenError("other", f"too many: {sorted(found - wanted)}, missing: {sorted(wanted - found)}; {world}")


_SUFFIXES = (".index", ".timeindex")


def _walk(disk: SimDisk, path: Path) -> list[str]:
    below = [f"{name}/{file}" for name in disk.list_dirs(path) for file in _walk(disk, path / name)]
    return [*(name for name, _ in disk.list_dir(path)), *below]
