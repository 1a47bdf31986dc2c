"""The broker's own answer: IndexService.queryOffset with its collisions, repeats and misses (spec 3.6, 3.7, 4.5)."""

from __future__ import annotations

import struct

from indexd.commitlog.decoder import Message
from indexd.errors import CorruptDataError, UsageError
from indexd.index.key_hash import index_key_hash
from indexd.query.answer import Answer, Hit, KeyQuery, LastUpdate
from indexd.query.log import LogView
from indexd.query.source import Look, QueryIndex


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
