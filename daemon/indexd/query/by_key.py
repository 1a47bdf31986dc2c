"""The entries of one key hash in one index file, newest first: along the chain, or without trusting the slots.

The exact answer: every message that matches, none that does not, each once (ARCHITECTURE.md, decision 10).

The index says where to look; whether a message matches, the message itself says. So collisions and repeats fall out,
and no rule about time cuts a walk short, whatever the broker's clock did. What does end a walk early is ``bound``: a
physical offset before which no message has a store time that was asked for.

The broker's own answer: IndexService.queryOffset with its collisions, repeats and misses (spec 3.6, 3.7, 4.5).

What a program hands to the Python API, checked before it is used; UsageError says which argument is wrong.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from operator import index as to_int
from typing import NamedTuple

from indexd.commitlog.decoder import Message
from indexd.commitlog.format import FLAG_TRANSACTION_MASK
from indexd.errors import CorruptDataError, UsageError
from indexd.index.format import (
    ENTRY_SIZE,
    FileMark,
    Flavour,
    IndexEntry,
    IndexHeader,
    index_key_hash,
    unpack_entry,
    unpack_fields,
)
from indexd.index.reader import IndexFileReader
from indexd.query.answer import Answer, Hit, KeyQuery, LastUpdate
from indexd.query.by_time import TimeBound
from indexd.query.coverage import ABSENT, ABSENT_BEFORE, why_empty
from indexd.query.log import LogView, TimeUpError
from indexd.query.source import Look, OpenIndexFile, QueryIndex

_DIFF_MAX = 2**31 - 1
#: Behind every physical offset.
OFFSET_END = 2**63
# Beyond this a begin timestamp can make Java's subtraction wrap into a plausible difference.
_BEGIN_BELIEVED = 2**53
# A hot key's entries stand close together: after two within so many, one read brings these, and then up to 64 KiB.
_NEAR = 204
_ENTRIES_PER_READ = 16 * _NEAR
_ENTRIES_PER_SCAN = 52_428  # 1 MiB


class Wanted(NamedTuple):
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
    file: IndexFileReader, key_hash: int, wanted: Wanted, header: IndexHeader | None = None
) -> Iterator[tuple[int, IndexEntry | None]]:
    """(physical offset, entry) of the hash's slot, those of other keys included; no entry for one that is not wanted.

    Of those that are not wanted only one for each piece that is read comes, so that a caller can end the walk. Entry
    numbers fall strictly, so it ends by itself; a chain that breaks the rule raises CorruptDataError.
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
        fields = unpack_fields(data, (number - first) * ENTRY_SIZE)
        phy_offset = fields[1]
        if phy_offset < before and may_match(number, fields[2], least, largest):
            yield phy_offset, IndexEntry(*fields)
        elif is_read:
            yield phy_offset, None
        above, number = number, fields[3]


def scan(
    file: IndexFileReader, key_hash: int, wanted: Wanted, mark: FileMark
) -> Iterator[tuple[int, IndexEntry | None]]:
    """The same of the hash's entries among those that ``mark`` vouches for, read from the last to the first.

    For a file whose slots a crash may have left behind or ahead of its entries.
    """
    looked_for = struct.pack(">i", key_hash)
    end = min(mark.header.index_count, file.layout.index_num)
    least, largest = wanted.differences(mark.header)
    while end > 1:
        first, is_read = max(end - _ENTRIES_PER_SCAN, 1), True
        data = file.file.pread((end - first) * ENTRY_SIZE, file.layout.entry_position(first))
        position = data.rfind(looked_for)
        while position >= 0:
            number, rest = divmod(position, ENTRY_SIZE)
            if rest == 0:
                entry = unpack_entry(data[position : position + ENTRY_SIZE])
                if entry.phy_offset < wanted.before and may_match(first + number, entry.time_diff, least, largest):
                    yield entry.phy_offset, entry
                elif is_read:
                    yield entry.phy_offset, None
                number, is_read = number - 1, False
            # The next place that counts is the start of an entry: for hash 0 most bytes look like one.
            position = data.rfind(looked_for, 0, max(number * ENTRY_SIZE + len(looked_for), 0))
        end = first


# Walks of no more entries than this are over before their bound would be found.
_BOUND_AFTER = 32


def query_exact(index: QueryIndex, query: KeyQuery) -> Answer:
    """Newest first, at most ``query.max_num``; UsageError if that is more than ``query_max_num``."""
    limit = index.config.query.query_max_num
    if query.max_num > limit:
        raise UsageError(f"a query may ask for {limit} messages, not {query.max_num}", "raise --query-max-num")
    look = index.look()
    never_indexed = not _is_indexed(look.flavour, query.index_type)
    search = _Search(look, query, index.log, index.config.query.query_walk_max, TimeBound(index, look))
    if not never_indexed:
        search.search(index.newest_first(look))
    coverage = replace(look.coverage, is_cut_off=search.is_cut_off)
    why = None
    if not search.hits and not search.has_more:
        # What a page leaves open is before its cursor: what came behind it, indexed or not, is none of it.
        why = why_empty(
            coverage if query.before is None else coverage.up_to(query.before),
            index.log,
            expired=search.expired,
            unreadable=search.unreadable,
            never_indexed=never_indexed,
        )
        if why == ABSENT and query.before is not None:
            why = ABSENT_BEFORE
    return Answer(
        query,
        tuple(search.hits),
        coverage,
        search.truncated,
        search.expired,
        search.unreadable,
        why,
        cursor=search.cursor,
    )


class _Search:
    """One query's walk over the files, and what it has come to."""

    def __init__(self, look: Look, query: KeyQuery, log: LogView, walk_max: int, bound: TimeBound) -> None:
        self._query = query
        self._wanted = Wanted(query.begin, query.end, OFFSET_END if query.before is None else query.before)
        self._flavour = look.flavour
        self._is_unclean = look.is_unclean
        self._log = log
        self._walk_max = walk_max
        self._walked = 0
        self._last_offset = -1
        self._seen: set[int] = set()
        self._key_hash = index_key_hash(query.topic, query.key, query.index_type)
        self._bound = bound
        self.hits: list[Hit] = []
        self.has_more = False
        self._is_over = False
        self.is_cut_off = False
        self.truncated: str | None = None
        self.cursor: int | None = None
        self.expired = 0
        self.unreadable = 0

    def search(self, files: Iterable[OpenIndexFile]) -> None:
        """Walk the hash's entries of the files, newest first; what was found when the time is up is kept."""
        try:
            for file in files:
                self._search_file(file)
                if self._is_over:
                    break
        except TimeUpError:
            if self._walked == 0:
                raise
            # The last message may not have been looked at: the next page begins with it, unless it is in this one.
            is_taken = bool(self.hits) and self.hits[-1].phy_offset == self._last_offset
            self._cut_off("time", self._last_offset + (not is_taken))

    def _search_file(self, file: OpenIndexFile) -> None:
        mark, before = file.mark, self._query.before
        header = mark.header if mark is not None and mark.full else None
        if before is not None and header is not None and header.begin_phy_offset >= before:
            return
        if self._is_unclean and mark is not None and not mark.full:
            entries = scan(file.reader, self._key_hash, self._wanted, mark)
        else:
            entries = chain(file.reader, self._key_hash, self._wanted, header)
        for phy_offset, entry in entries:
            self._log.check()
            if phy_offset >= self._wanted.before:
                continue
            if self._ends_before(phy_offset):
                return
            if entry is None or entry.key_hash != self._key_hash or phy_offset in self._seen:
                continue
            self._seen.add(phy_offset)
            self._take(phy_offset)
            if self.has_more:
                self.truncated, self.cursor = f"max {self._query.max_num}", phy_offset + 1
                self._is_over = True
                return

    def _ends_before(self, phy_offset: int) -> bool:
        # Whether the walk is over. Several entries of one message are walked together, so that a cursor can stand
        # between messages.
        if phy_offset != self._last_offset and self._walked >= self._walk_max:
            self._cut_off(f"walk {self._walk_max}", self._last_offset)
            return True
        self._walked += 1
        self._last_offset = phy_offset
        if self._walked > _BOUND_AFTER and self._bound.is_before(phy_offset, self._query.begin):
            self._is_over = True
        return self._is_over

    def _cut_off(self, by: str, cursor: int) -> None:
        self.truncated, self.cursor, self.is_cut_off, self._is_over = by, cursor, True, True

    def _take(self, phy_offset: int) -> None:
        message = self._log.at(phy_offset)
        if isinstance(message, Message):
            if is_match(message, self._query, self._flavour):
                if len(self.hits) >= self._query.max_num:
                    self.has_more = True
                else:
                    self.hits.append(Hit.of(message))
        elif message is None and self._log.has_expired(phy_offset):
            self.expired += 1
        else:
            self.unreadable += 1


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


def _is_indexed(flavour: Flavour, index_type: str | None) -> bool:
    return not (index_type == "T" and not flavour.tags) and not (index_type == "U" and not flavour.uniq_key)


def query_rocketmq(index: QueryIndex, query: KeyQuery) -> Answer:
    """At most ``max_msgs_num_batch`` offsets, in the order in which the broker's service returns them.

    UsageError for a query that has a ``before``: the broker knows no pages.
    """
    if query.before is not None:
        raise UsageError("the broker's own answer has no pages", "ask for an exact one")
    look = index.look()
    max_num = min(query.max_num, index.config.query.max_msgs_num_batch)
    found, last_update = query_offsets(index, look, query, max_num, query.end)
    return Answer(
        query,
        tuple(_hit(index.log, offset) for offset in found),
        look.coverage,
        truncated=f"max {max_num}" if found and len(found) >= max_num else None,
        last_update=last_update,
    )


def query_offsets(
    index: QueryIndex, look: Look, query: KeyQuery, max_num: int, end: int
) -> tuple[list[int], LastUpdate]:
    """The physical offsets, newest first, of at most ``max_num`` entries from ``query.begin`` to ``end``."""
    key_hash = hash_of(look, query)
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
                left = max_num - len(found)
                found += reader.select_phy_offset(key_hash, left, begin, end, header, newest, check)
            except struct.error:
                raise CorruptDataError(f"index file {reader.file.path} ends before its slots do") from None
        if header.begin_timestamp < begin or len(found) >= max_num:
            break
    return found, last_update or LastUpdate()


def hash_of(look: Look, query: KeyQuery) -> int:
    """The key hash that the broker's service would look for."""
    has_tags = query.index_type == "T" and look.flavour.tags
    return index_key_hash(query.topic, query.key, "T" if has_tags else None)


def _hit(log: LogView, phy_offset: int) -> Hit:
    message = log.at(phy_offset)
    return Hit.of(message) if isinstance(message, Message) else Hit(phy_offset)


_HINT = "see help(indexd.query.Data)"


def whole(name: str, value: object, *, at_least: int | None = None) -> int:
    """``value`` as an int: one, or what numpy and the like have for it; True and False are none."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = to_int(value)  # type: ignore[arg-type]  # that is what is being asked
    except TypeError:
        raise UsageError(f"{name} has to be a whole number, not {value!r}", _HINT) from None
    if at_least is not None and number < at_least:
        raise UsageError(f"{name} has to be at least {at_least}, not {number}", _HINT)
    return number


def text(name: str, value: object) -> str:
    """``value`` if it is a str that is not empty."""
    if not isinstance(value, str):
        raise UsageError(f"{name} has to be text, not {value!r}", _HINT)
    if not value:
        raise UsageError(f"{name} is empty", _HINT)
    return value


def one_of(name: str, value: object, choices: Collection[str | None]) -> None:
    """Nothing, if ``value`` is one of ``choices``."""
    if not isinstance(value, str | None) or value not in choices:
        raise UsageError(f"{name} has to be one of {', '.join(map(repr, choices))}, not {value!r}", _HINT)
