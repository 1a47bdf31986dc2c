"""The broker's own answer: IndexService.queryOffset with its collisions, repeats and misses (spec 3.6, 3.7, 4.5)."""

from __future__ import annotations

import struct

from indexd.commitlog.decoder import Message
from indexd.errors import CorruptDataError, UsageError
from indexd.index.key_hash import index_key_hash
from indexd.index.reader import IndexFileReader
from indexd.query.answer import Answer, Hit, KeyQuery, LastUpdate
from indexd.query.log import LogView
from indexd.query.source import QueryIndex


def query_rocketmq(index: QueryIndex, query: KeyQuery) -> Answer:
    """At most ``max_msgs_num_batch`` offsets, in the order in which the broker's service returns them.

    UsageError for a query that has a ``before``: the broker knows no pages.
    """
    if query.before is not None:
        raise UsageError("the broker's own answer has no pages", "ask for an exact one")
    look = index.look()
    has_tags = query.index_type == "T" and look.flavour.tags
    key_hash = index_key_hash(query.topic, query.key, "T" if has_tags else None)
    max_num = min(query.max_num, index.config.query.max_msgs_num_batch)
    found: list[int] = []
    last_update: LastUpdate | None = None
    for file, _ in index.newest_first(look):
        header = file.header()
        last_update = last_update or LastUpdate(header.end_timestamp, header.end_phy_offset)
        if file.is_time_matched(query.begin, query.end):
            found.extend(_select(file, key_hash, max_num - len(found), query))
        if header.begin_timestamp < query.begin or len(found) >= max_num:
            break
    return Answer(
        query,
        tuple(_hit(index.log, offset) for offset in found),
        look.coverage,
        truncated=f"max {max_num}" if found and len(found) >= max_num else None,
        last_update=last_update or LastUpdate(),
    )


def _select(file: IndexFileReader, key_hash: int, max_num: int, query: KeyQuery) -> list[int]:
    try:
        return file.select_phy_offset(key_hash, max_num, query.begin, query.end)
    except struct.error:
        raise CorruptDataError(f"index file {file.file.path} names an entry behind its last one") from None


def _hit(log: LogView, phy_offset: int) -> Hit:
    message = log.at(phy_offset)
    return Hit.of(message) if isinstance(message, Message) else Hit(phy_offset)
