"""The exact answer: every message that matches, none that does not, each once (ARCHITECTURE.md, decision 10).

The index says where to look; whether a message matches, the message itself says. So collisions and repeats fall out,
and no rule about time cuts a walk short, whatever the broker's clock did. What does end a walk early is ``bound``: a
physical offset before which no message has a store time that was asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from indexd.commitlog.decoder import Message
from indexd.commitlog.format import FLAG_TRANSACTION_MASK
from indexd.errors import UsageError
from indexd.index.flavour import Flavour
from indexd.index.key_hash import index_key_hash
from indexd.query.answer import Answer, Hit, KeyQuery
from indexd.query.bound import TimeBound
from indexd.query.coverage import ABSENT, ABSENT_BEFORE, why_empty
from indexd.query.log import LogView, TimeUpError
from indexd.query.source import Look, OpenIndexFile, QueryIndex
from indexd.query.walk import OFFSET_END, Wanted, chain, scan

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
