"""The exact answer: every message that matches, none that does not, each once (ARCHITECTURE.md, decision 10).

The index says where to look; whether a message matches, the message itself says. So collisions and repeats fall out,
and no rule about time cuts a walk short, whatever the broker's clock did.
"""

from __future__ import annotations

from indexd.commitlog.decoder import Message
from indexd.commitlog.format import FLAG_TRANSACTION_MASK
from indexd.errors import UsageError
from indexd.index.flavour import Flavour
from indexd.index.format import FileMark
from indexd.index.key_hash import index_key_hash
from indexd.index.reader import IndexFileReader
from indexd.query.answer import Answer, Hit, KeyQuery
from indexd.query.coverage import why_empty
from indexd.query.log import LogView
from indexd.query.source import Look, QueryIndex
from indexd.query.walk import chain, may_match, scan


def query_exact(index: QueryIndex, query: KeyQuery) -> Answer:
    """Newest first, at most ``query.max_num``; UsageError if that is more than ``query_max_num``."""
    limit = index.config.query.query_max_num
    if query.max_num > limit:
        raise UsageError(f"a query may ask for {limit} messages, not {query.max_num}", "raise --query-max-num")
    look = index.look()
    never_indexed = not _is_indexed(look.flavour, query.index_type)
    search = _Search(look, query, index.log, index.config.query.query_walk_max)
    if not never_indexed:
        for file, mark in index.newest_first(look):
            search.search_file(file, mark)
            if search.truncated is not None:
                break
    why = None
    if not search.hits and not search.has_more:
        why = why_empty(
            look.coverage,
            expired=search.expired,
            unreadable=search.unreadable,
            cut_off=search.truncated is not None,
            never_indexed=never_indexed,
        )
    return Answer(query, tuple(search.hits), look.coverage, search.truncated, search.expired, search.unreadable, why)


class _Search:
    """One query's walk over the files, and what it has come to."""

    def __init__(self, look: Look, query: KeyQuery, log: LogView, walk_max: int) -> None:
        self._query = query
        self._flavour = look.flavour
        self._is_unclean = look.is_unclean
        self._log = log
        self._walk_max = walk_max
        self._walked = 0
        self._seen: set[int] = set()
        self._key_hash = index_key_hash(query.topic, query.key, query.index_type)
        self.hits: list[Hit] = []
        self.has_more = False
        self.truncated: str | None = None
        self.expired = 0
        self.unreadable = 0

    def search_file(self, file: IndexFileReader, mark: FileMark | None) -> None:
        """Walk the hash's entries of one file; ends early when ``truncated`` is set."""
        header = None
        if self._is_unclean and mark is not None and not mark.full:
            entries, header = scan(file, self._key_hash, mark), mark.header
        else:
            entries = chain(file, self._key_hash)
        for number, entry in entries:
            if self._walked >= self._walk_max:
                self.truncated = f"walk {self._walk_max}"
                return
            self._walked += 1
            # After the slot, never before: the first put of a rolled file moves its begin timestamp.
            header = header or file.header()
            if entry.key_hash != self._key_hash or entry.phy_offset in self._seen:
                continue
            if not may_match(number, entry.time_diff, header, self._query.begin, self._query.end):
                continue
            self._seen.add(entry.phy_offset)
            self._take(entry.phy_offset)
            if self.has_more:
                self.truncated = f"max {self._query.max_num}"
                return

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
