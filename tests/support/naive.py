"""The slow truth about the index: IndexFile, IndexService and what an exact query must find (spec 3, 4, 11).

In plain Python, from the store spec alone, with nothing of the daemon in it. The half about the log is in
``naive_log``; its names are here too, so that a test imports one module.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from support.naive_log import (
    NaiveMessage,
    decode_properties,
    java_hash,
    java_utf8,
    java_wrap,
    key_hash,
    naive_check,
    naive_frames,
    split_keys,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = [
    "NOT_INDEXED",
    "NaiveIndexFile",
    "NaiveIndexService",
    "NaiveMessage",
    "decode_properties",
    "exact_oracle",
    "java_hash",
    "java_utf8",
    "key_hash",
    "naive_check",
    "naive_frames",
    "split_keys",
]

#: Transaction bits whose messages a flavour leaves out. Here 3.x leaves out prepared messages, as this project
#: defines it; the spec's unverified note (4.8) and published 3.x sources leave out commit (0x8) ones instead.
NOT_INDEXED = {"3.x": {0x4, 0xC}, "4.0": {0xC}, "4.7": {0xC}, "5.4": {0xC}}


class NaiveIndexFile:
    """One index file in memory: ``hash_slot_num`` slots, entries 1 to ``index_num`` - 1 (spec 3)."""

    def __init__(
        self,
        hash_slot_num: int,
        index_num: int,
        end_phy: int = 0,
        end_ts: int = 0,
        every_put: bool = False,
    ) -> None:
        """``end_phy`` and ``end_ts`` are the previous file's (3.5); ``every_put`` counts slots as before 4.7.1."""
        self.index_num, self.every_put = index_num, every_put
        self.begin_timestamp = self.end_timestamp = max(end_ts, 0)
        self.begin_phy_offset = self.end_phy_offset = max(end_phy, 0)
        self.hash_slot_count, self.index_count = 0, 1
        self.slots = [0] * hash_slot_num
        self.entries = [(0, 0, 0, 0)]  # key hash, physical offset, seconds since begin, previous entry

    @classmethod
    def from_bytes(cls, data: bytes, hash_slot_num: int, index_num: int) -> NaiveIndexFile:
        """The file as a load reads it (3.1)."""
        file = cls(hash_slot_num, index_num)
        (file.begin_timestamp, file.end_timestamp, file.begin_phy_offset, file.end_phy_offset,
         file.hash_slot_count, count) = struct.unpack_from(">qqqqii", data)  # fmt: skip
        file.index_count = max(count, 1)
        file.slots = list(struct.unpack_from(f">{hash_slot_num}i", data, 40))
        file.entries = list(struct.iter_unpack(">iqii", data[40 + 4 * hash_slot_num :][: 20 * file.index_count]))
        return file

    def is_write_full(self) -> bool:
        return self.index_count >= self.index_num

    def put_key(self, key: str, phy_offset: int, store_timestamp: int) -> bool:
        """Spec 3.4; False when the file is full."""
        if self.is_write_full():
            return False
        h = key_hash(key)
        old = self.slots[h % len(self.slots)]
        if not 0 < old <= self.index_count:
            old = 0
        difference = java_wrap(store_timestamp - self.begin_timestamp)
        seconds = 0 if self.begin_timestamp <= 0 else min(max(difference, 0) // 1000, (1 << 31) - 1)
        self.entries[self.index_count :] = [(h, phy_offset, seconds, old)]
        self.slots[h % len(self.slots)] = self.index_count
        if self.index_count <= 1:
            self.begin_phy_offset, self.begin_timestamp = phy_offset, store_timestamp
        if old == 0 or self.every_put:
            self.hash_slot_count += 1
        self.index_count += 1
        self.end_phy_offset, self.end_timestamp = phy_offset, store_timestamp
        return True

    def is_time_matched(self, begin: int, end: int) -> bool:
        """Spec 3.6."""
        first, last = self.begin_timestamp, self.end_timestamp
        return (begin < first and end > last) or first <= begin <= last or first <= end <= last

    def select_phy_offset(self, out: list[int], key: str, max_num: int, begin: int, end: int) -> None:
        """Spec 3.7: appends to ``out``, newest first, until it holds ``max_num``."""
        h = key_hash(key)
        current = self.slots[h % len(self.slots)]
        if not 0 < current <= self.index_count or self.index_count <= 1:
            return
        while len(out) < max_num:
            # A slot may name the entry that is to be written next (spec 11.5): still zero.
            read = self.entries[current] if current < len(self.entries) else (0, 0, 0, 0)
            entry_hash, phy_offset, seconds, previous = read
            if seconds < 0:
                return
            time = java_wrap(self.begin_timestamp + seconds * 1000)
            if entry_hash == h and begin <= time <= end:
                out.append(phy_offset)
            if not 0 < previous <= self.index_count or previous == current or time < begin:
                return
            current = previous

    def to_bytes(self, flushed: bool = False) -> bytes:
        """The whole file. Before the first put its index count is 0, or 1 once flushed (3.1, 3.8)."""
        count = self.index_count if self.index_count > 1 or flushed else 0
        head = struct.pack(
            ">qqqqii", self.begin_timestamp, self.end_timestamp, self.begin_phy_offset, self.end_phy_offset,
            self.hash_slot_count, count,
        )  # fmt: skip
        body = struct.pack(f">{len(self.slots)}i", *self.slots) + b"".join(
            struct.pack(">iqii", *entry) for entry in self.entries
        )
        return (head + body).ljust(40 + 4 * len(self.slots) + 20 * self.index_num, b"\0")


class NaiveIndexService:
    """Builds and asks a list of index files (spec 4). ``index_msg_timestamp`` is the checkpoint's field (4.4)."""

    def __init__(self, hash_slot_num: int, index_num: int, flavour: str = "5.4", max_msgs_num_batch: int = 64) -> None:
        self.hash_slot_num, self.index_num, self.flavour = hash_slot_num, index_num, flavour
        self.max_msgs_num_batch, self.index_msg_timestamp = max_msgs_num_batch, 0
        self.files: list[NaiveIndexFile] = []

    def build_index(self, message: NaiveMessage) -> None:
        """Spec 4.2 and 4.3. Entries of one message may straddle two files."""
        if message.phy_offset < self._last_or_new().end_phy_offset:
            return
        if message.sys_flag & 0xC in NOT_INDEXED[self.flavour]:
            return
        texts = [f"{message.topic}#{piece}" for piece in split_keys(message.keys)]
        if self.flavour != "3.x" and message.uniq_key is not None:
            texts.insert(0, f"{message.topic}#{message.uniq_key}")
        if self.flavour == "5.4" and message.tags:
            texts.append(f"{message.topic}#T#{message.tags}")
        for text in texts:
            self._last_or_new().put_key(text, message.phy_offset, message.store_timestamp)

    def query_offset(
        self, topic: str, key: str, max_num: int, begin: int, end: int, index_type: str | None = None
    ) -> tuple[list[int], int, int]:
        """Spec 4.5: (physical offsets, last file's end time, its end physical offset)."""
        text = f"{topic}#T#{key}" if index_type == "T" and self.flavour == "5.4" else f"{topic}#{key}"
        found: list[int] = []
        max_num = min(max_num, self.max_msgs_num_batch)
        for file in reversed(self.files):
            if file.is_time_matched(begin, end):
                file.select_phy_offset(found, text, max_num, begin, end)
            if file.begin_timestamp < begin or len(found) >= max_num:
                break
        last = self.files[-1] if self.files else None
        return (found, last.end_timestamp, last.end_phy_offset) if last else (found, 0, 0)

    def _last_or_new(self) -> NaiveIndexFile:
        """Spec 4.4: the last file, or a successor that inherits a full one's end."""
        last = self.files[-1] if self.files else None
        if last is not None and not last.is_write_full():
            return last
        every = self.flavour in ("3.x", "4.0")
        ends = (last.end_phy_offset, last.end_timestamp) if last else (0, 0)
        if ends[1] > 0:
            self.index_msg_timestamp = ends[1]
        self.files.append(NaiveIndexFile(self.hash_slot_num, self.index_num, *ends, every_put=every))
        return self.files[-1]


def exact_oracle(
    rows: Iterable[Mapping[str, Any]], topic: str, key: str, begin: int, end: int,
    index_type: str | None = None, flavour: str = "5.4",
) -> set[int]:  # fmt: skip
    """The physical offsets that an exact query must return, from rows of messages.jsonl alone.

    ``index_type``: K a piece of KEYS, U the UNIQ_KEY, T the whole TAGS, None K or U.
    """
    found = set()
    for row in rows:
        if row["topic"] != topic or not begin <= row["storeTimestamp"] <= end:
            continue
        if row["sysFlag"] & 0xC in NOT_INDEXED[flavour]:
            continue
        by_key = index_type in (None, "K") and key in split_keys(row["keys"])
        by_uniq = index_type in (None, "U") and flavour != "3.x" and key == row["uniqKey"]
        by_tags = index_type == "T" and flavour == "5.4" and bool(key) and key == row["tags"]
        if by_key or by_uniq or by_tags:
            found.add(row["phyOffset"])
    return found
