"""Queries by key: the exact answer, and the broker's own (spec 3.6, 3.7, 4.5; decision 10).

The exact answer: every message that matches, none that does not, each once. The index says where to look; whether a
message matches, the message itself says. So collisions and repeats fall out, and no rule about time cuts a walk short,
whatever the broker's clock did. What does end a walk early is a physical offset before which no message has a store
time that was asked for. The broker's own answer: IndexService.queryOffset with its collisions, repeats and misses.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from indexd.commitlog.decoder import Message
from indexd.commitlog.format import FLAG_TRANSACTION_MASK
from indexd.commitlog.lookup import TimeUpError
from indexd.errors import CorruptDataError, UsageError
from indexd.index.format import (
    ENTRY,
    ENTRY_SIZE,
    FileMark,
    Flavour,
    IndexHeader,
    index_key_hash,
)
from indexd.index.reader import IndexFileReader
from indexd.query.by_queue_and_time import time_bound
from indexd.query.message import TIME_MAX, HasHits, Hit
from indexd.query.source import ABSENT, ABSENT_BEFORE, NEVER_INDEXED, Coverage, IndexSnapshot, QueryIndex, why_empty

_DIFF_MAX = 2**31 - 1
#: Behind every physical offset.
OFFSET_END = 2**63
# Beyond this a begin timestamp can make Java's subtraction wrap into a plausible difference.
_BEGIN_BELIEVED = 2**53
# A hot key's entries stand close together: after two within so many, one read brings these, and then up to 64 KiB.
_NEAR = 204
_ENTRIES_PER_READ = 16 * _NEAR
_ENTRIES_PER_SCAN = 52_428  # 1 MiB


class KeyQuery(NamedTuple):
    """Times inclusive. ``index_type``: K a piece of KEYS, U the UNIQ_KEY, T the whole TAGS, None K or U.

    ``before``: only messages before this physical offset, such as an earlier answer's ``cursor``.
    """

    topic: str
    key: str
    max_num: int = 64
    begin: int = 0
    end: int = TIME_MAX
    index_type: str | None = None
    before: int | None = None


class LastUpdate(NamedTuple):
    """The end of the newest index file, which the broker sends with every answer; zeros without a file."""

    timestamp: int = 0
    phy_offset: int = 0


@dataclass(frozen=True, slots=True)
class Answer(HasHits[Hit]):
    """``hits`` newest first. ``truncated`` says what cut the answer off, None if nothing did.

    ``expired`` and ``unreadable`` count entries of the asked hash, and perhaps of the asked time, whose message is gone
    or is no message: they may or may not have been hits. ``why`` is there when an exact answer is empty.

    ``cursor``: the ``before`` of the query that goes on where this exact answer was cut off. New messages do not move
    it, so the pages together are the whole and hold nothing twice.
    """

    query: KeyQuery
    hits: tuple[Hit, ...]
    coverage: Coverage
    truncated: str | None = None
    expired: int = 0
    unreadable: int = 0
    why: str | None = None
    last_update: LastUpdate | None = None
    cursor: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """One object; members that do not apply are left out."""
        update = self.last_update
        row = {
            "topic": self.query.topic,
            "key": self.query.key,
            "indexType": self.query.index_type,
            "phyOffsets": [hit.phy_offset for hit in self.hits],
            "storeTimestamps": [hit.store_timestamp for hit in self.hits],
            "hits": [hit.to_dict() for hit in self.hits],
            "truncated": self.truncated is not None,
            "truncatedBy": self.truncated,
            "cursor": None if self.cursor is None else str(self.cursor),
            "expired": self.expired or None,
            "unreadable": self.unreadable or None,
            "why": self.why,
            "coverage": self.coverage.to_json(),
            "indexLastUpdateTimestamp": None if update is None else update.timestamp,
            "indexLastUpdatePhyoffset": None if update is None else update.phy_offset,
        }
        return {name: value for name, value in row.items() if value is not None}


class ChainFilter(NamedTuple):
    """What a walk looks for: store times of ``[begin, end]`` in ms, physical offsets below ``before``."""

    begin: int
    end: int
    before: int = OFFSET_END

    def differences(self, header: IndexHeader) -> tuple[int, int]:
        """The least and the largest time difference of such a store time, as ``may_match`` takes them."""
        base = header.begin_timestamp
        if not 0 < base < _BEGIN_BELIEVED:
            return 0, _DIFF_MAX
        return -((base + 999 - self.begin) // 1000), (self.end - base) // 1000


def may_match(number: int, time_diff: int, least: int, largest: int) -> bool:
    """Whether a message whose entry has this ``time_diff`` can have one of the wanted store times.

    Never False for one that has: a difference is cut to whole seconds and clamped into 0 .. 2**31-1, entry 1 of a
    rolled file is counted from the file before, and without a begin timestamp nothing is counted (spec 3.4).
    """
    if number == 1 or not 0 <= time_diff < _DIFF_MAX:
        return True
    return least <= time_diff and (time_diff == 0 or time_diff <= largest)


def chain(
    file: IndexFileReader, key_hash: int, wanted: ChainFilter, header: IndexHeader | None = None
) -> Iterator[tuple[int, bool]]:
    """(physical offset, whether hash and time are wanted) of the entries of the hash's slot.

    Of those of other times only one for each piece that is read comes, so that a caller can end the walk. Entry numbers
    fall strictly, so it ends by itself; a chain that breaks the rule raises CorruptDataError.
    """
    slot = file.layout.slot_of(key_hash)
    number, above = file.slot(slot), file.layout.index_num
    # After the slot, never before: the first put of a rolled file moves its begin timestamp.
    least, largest = wanted.differences(header or file.header()) if number > 0 else (0, 0)
    first, data, count, before = above, b"", 1, wanted.before
    while number > 0:
        if number >= above:
            raise CorruptDataError(
                f"index file {file.file.path}: the chain of slot {slot} goes up from entry {above} to {number}"
            )
        is_read = number < first
        if is_read:
            count = min(max(4 * count, _NEAR), _ENTRIES_PER_READ) if above - number < _NEAR else 1
            first = max(number - count + 1, 0)
            data = file.file.pread((number - first + 1) * ENTRY_SIZE, file.layout.entry_position(first))
        entry_hash, phy_offset, time_diff, previous = ENTRY.unpack_from(data, (number - first) * ENTRY_SIZE)
        is_wanted = phy_offset < before and may_match(number, time_diff, least, largest)
        if is_wanted or is_read:
            yield phy_offset, is_wanted and entry_hash == key_hash
        above, number = number, previous


def scan(file: IndexFileReader, key_hash: int, wanted: ChainFilter, mark: FileMark) -> Iterator[tuple[int, bool]]:
    """The same of the hash's entries among those that ``mark`` vouches for, read from the last to the first.

    For a file whose slots a crash may have left behind or ahead of its entries.
    """
    end = min(mark.header.index_count, file.layout.index_num)
    least, largest = wanted.differences(mark.header)
    stored = struct.pack(">i", key_hash)
    (looked_for,) = struct.unpack("=i", stored)
    while end > 1:
        first = max(end - _ENTRIES_PER_SCAN, 1)
        data = file.file.pread((end - first) * ENTRY_SIZE, file.layout.entry_position(first))
        # Most pieces have no such entry; the hashes of others are taken in the machine's byte order.
        hashes = memoryview(data).cast("i")[:: ENTRY_SIZE // 4].tolist() if stored in data else []
        for number in reversed([number for number, found in enumerate(hashes) if found == looked_for]):
            _, phy_offset, time_diff, _ = ENTRY.unpack_from(data, number * ENTRY_SIZE)
            yield phy_offset, phy_offset < wanted.before and may_match(first + number, time_diff, least, largest)
        end = first


def entries_of(index: QueryIndex, look: IndexSnapshot, query: KeyQuery) -> Iterator[tuple[int, bool]]:
    """What ``chain`` and ``scan`` give of all files, newest first, from before the query's ``before``."""
    wanted = ChainFilter(query.begin, query.end, OFFSET_END if query.before is None else query.before)
    key_hash = index_key_hash(query.topic, query.key, query.index_type)
    for reader, mark in index.newest_first(look):
        header = mark.header if mark is not None and mark.full else None
        if header is not None and header.begin_phy_offset >= wanted.before:
            continue
        entries = chain(reader, key_hash, wanted, header)
        if look.is_unclean and mark is not None and header is None:
            entries = scan(reader, key_hash, wanted, mark)
        for phy_offset, is_wanted in entries:
            index.log.check()
            if phy_offset < wanted.before:
                yield phy_offset, is_wanted


# Walks of no more entries than this are over before their bound would be found.
_BOUND_AFTER = 32


def query_exact(index: QueryIndex, query: KeyQuery) -> Answer:
    """Newest first, at most ``query.max_num``; UsageError if that is more than ``query_max_num``."""
    limits, log, look = index.config.query, index.log, index.look()
    if query.max_num > limits.query_max_num:
        what = f"a query may ask for {limits.query_max_num} messages, not {query.max_num}"
        raise UsageError(what, "raise --query-max-num")
    is_indexed = {"T": look.flavour.tags, "U": look.flavour.uniq_key}.get(query.index_type or "", True)
    hits: list[Hit] = []
    seen: set[int] = set()
    # Entries that were walked, those of other hashes included, and where the last one leads.
    count, last, bound, expired, unreadable = 0, -1, 0, 0, 0
    truncated: str | None = None
    cursor: int | None = None
    is_cut_off = False
    try:
        for phy_offset, is_wanted in entries_of(index, look, query) if is_indexed else ():
            if phy_offset != last and count >= limits.query_walk_max:  # between two messages: a cursor can stand there
                truncated, cursor, is_cut_off = f"walk {limits.query_walk_max}", last, True
                break
            count, last = count + 1, phy_offset
            if count == _BOUND_AFTER + 1:
                bound = time_bound(index, look, query.begin)
            if 0 <= phy_offset < bound:
                break
            if not is_wanted or phy_offset in seen:
                continue
            seen.add(phy_offset)
            message = log.at(phy_offset)
            if not isinstance(message, Message):
                is_gone = message is None and log.has_expired(phy_offset)
                expired, unreadable = expired + is_gone, unreadable + (not is_gone)
            elif is_match(message, query, look.flavour):
                if len(hits) >= query.max_num:
                    truncated, cursor = f"max {query.max_num}", phy_offset + 1
                    break
                hits.append(Hit.of(message))
    except TimeUpError:
        if count == 0:
            raise
        # The last message may not have been looked at: the next page begins with it, unless it is in this one.
        is_taken = bool(hits) and hits[-1].phy_offset == last
        truncated, cursor, is_cut_off = "time", last + (not is_taken), True
    coverage = replace(look.coverage, is_cut_off=is_cut_off)
    why = None
    if not hits and truncated != f"max {query.max_num}":
        # What a page leaves open is before its cursor: what came behind it, indexed or not, is none of it.
        open_to = coverage if query.before is None else coverage.up_to(query.before)
        why = why_empty(open_to, expired=expired, unreadable=unreadable) if is_indexed else NEVER_INDEXED
        if why == ABSENT and query.before is not None:
            why = ABSENT_BEFORE
    return Answer(query, tuple(hits), coverage, truncated, expired, unreadable, why, cursor=cursor)


def is_match(message: Message, query: KeyQuery, flavour: Flavour) -> bool:
    """Whether ``message`` is what ``query`` asks for and the flavour indexes it."""
    if message.topic != query.topic or not query.begin <= message.store_timestamp <= query.end:
        return False
    if message.sys_flag & FLAG_TRANSACTION_MASK in flavour.skipped_types:
        return False
    if query.index_type == "T":
        return flavour.tags and message.tags == query.key
    by_key = query.index_type in (None, "K") and query.key in message.keys
    return by_key or (query.index_type in (None, "U") and flavour.uniq_key and message.uniq_key == query.key)


def query_rocketmq(index: QueryIndex, query: KeyQuery) -> Answer:
    """At most ``max_msgs_num_batch`` offsets, in the order in which the broker's service returns them, and no pages."""
    look = index.look()
    max_num = min(query.max_num, index.config.query.max_msgs_num_batch)
    found, last_update = query_offsets(index, look, query, max_num, query.end)
    messages = [index.log.at(offset) for offset in found]
    return Answer(
        query,
        tuple(
            Hit.of(message) if isinstance(message, Message) else Hit(offset)
            for offset, message in zip(found, messages, strict=True)
        ),
        look.coverage,
        truncated=f"max {max_num}" if found and len(found) >= max_num else None,
        last_update=last_update,
    )


def query_offsets(
    index: QueryIndex, look: IndexSnapshot, query: KeyQuery, max_num: int, end: int
) -> tuple[list[int], LastUpdate]:
    """The physical offsets, newest first, of at most ``max_num`` entries from ``query.begin`` to ``end``."""
    has_tags = query.index_type == "T" and look.flavour.tags
    key_hash = index_key_hash(query.topic, query.key, "T" if has_tags else None)
    begin, check = query.begin, index.log.check
    found: list[int] = []
    last_update: LastUpdate | None = None
    for reader, mark in index.newest_first(look):
        newest: int | None = None
        if mark is not None and mark.full:
            header = mark.header
        else:
            # Of a file that grows the header is read behind the slot: it counts what that names.
            newest = reader.slot(reader.layout.slot_of(key_hash))
            header = reader.header()
        if last_update is None:
            last_update = LastUpdate(header.end_timestamp, header.end_phy_offset)
        if header.is_time_matched(begin, end):
            try:
                found += reader.select_phy_offset(key_hash, max_num - len(found), begin, end, header, newest, check)
            except struct.error:
                raise CorruptDataError(f"index file {reader.file.path} ends before its slots do") from None
        if header.begin_timestamp < begin or len(found) >= max_num:
            break
    return found, last_update or LastUpdate()
