"""The slow truth about the log, the index and ConsumeQueues, in plain Python, from the store spec alone.

Text, hashes, properties and frames; index files and what an exact query must find; ConsumeQueues (spec 2 to 5, 7, 11).
Nothing here is shared with the daemon, nothing is fast, and every function names the section it restates. All
integers on disk are big-endian and signed; times are epoch milliseconds; a physical offset is a byte offset.
"""

from __future__ import annotations

import ipaddress
import re
import struct
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

MAGIC_V1, MAGIC_V2, MAGIC_BLANK = -626843481, -626843477, -875286124
_DELAYS = [1, 5, 10, 30, *(60 * m for m in range(1, 11)), 1200, 1800, 3600, 7200]  # seconds, level 1 first


def java_utf8(data: bytes) -> str:
    """Spec 11.3: an encoded surrogate, whole or cut short, is one U+FFFD; the rest is as in Python."""
    return re.sub(rb"\xed[\xa0-\xbf][\x80-\xbf]?", b"\xef\xbf\xbd", data).decode("utf-8", "replace")


def java_hash(text: str) -> int:
    """String.hashCode: signed 32 bits over UTF-16 units."""
    units = text.encode("utf-16-be", "surrogatepass")
    h = 0
    for i in range(0, len(units), 2):
        h = (31 * h + (units[i] << 8) + units[i + 1]) & 0xFFFFFFFF
    return h - (1 << 32) if h >> 31 else h


def key_hash(text: str) -> int:
    """The absolute value of the Java hash, 0 where that overflows."""
    h = abs(java_hash(text))
    return 0 if h == 1 << 31 else h


def decode_properties(text: str) -> dict[str, str]:
    """Spec 2.4: empty names and values vanish, the last duplicate wins, further U+0001 stay in the value."""
    found = {}
    for segment in text.split("\x02"):
        name, _, value = segment.partition("\x01")
        if name and value:
            found[name] = value
    return found


def split_keys(keys: str | None) -> list[str]:
    """The indexed pieces of KEYS, in order, repeated ones too (spec 4.2 step 5)."""
    return [piece for piece in (keys or "").split(" ") if piece]


def _java_int(text: str, bits: int) -> int:
    """Integer.parseInt and kin: one sign, decimal digits of any script, no blanks; ValueError otherwise."""
    digits = text[1:] if text[:1] in ("+", "-") else text
    if not digits.isdecimal() or max(digits) > "\uffff":
        raise ValueError(text)
    value = -int(digits) if text[0] == "-" else int(digits)
    if not -(1 << (bits - 1)) <= value < 1 << (bits - 1):
        raise ValueError(text)
    return value


def java_wrap(value: int, bits: int = 64) -> int:
    """Java's silent overflow."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


@dataclass(frozen=True)
class NaiveMessage:
    """Every field of a frame, and what the frame check makes of them (spec 2.7)."""

    phy_offset: int
    size: int
    topic: str
    queue_id: int
    cq_offset: int
    tags_code: int
    store_timestamp: int
    sys_flag: int
    prepared_transaction_offset: int
    keys: str | None
    uniq_key: str | None
    tags: str | None
    magic: int
    body_crc: int
    flag: int
    born_timestamp: int
    born_host: tuple[str, int]
    store_host: tuple[str, int]
    reconsume_times: int
    body: bytes
    raw_topic: bytes
    raw_properties: bytes
    properties: dict[str, str] | None
    batch_base: int
    batch_size: int

    def hit(self) -> dict[str, Any]:
        """The message as a hit of a query's JSON."""
        return {
            "phyOffset": self.phy_offset, "topic": self.topic, "queueId": self.queue_id, "queueOffset": self.cq_offset,
            "storeTimestamp": self.store_timestamp, "bornTimestamp": self.born_timestamp, "tags": self.tags,
            "keys": self.keys, "uniqKey": self.uniq_key, "size": self.size, "sysFlag": self.sys_flag,
            "bornHost": "{}:{}".format(*self.born_host), "storeHost": "{}:{}".format(*self.store_host),
        }  # fmt: skip

    def row(self) -> dict[str, Any]:
        """The message as a line of messages.jsonl."""
        return {
            "phyOffset": self.phy_offset, "size": self.size, "topic": self.topic, "queueId": self.queue_id,
            "cqOffset": self.cq_offset, "tagsCode": self.tags_code, "storeTimestamp": self.store_timestamp,
            "sysFlag": self.sys_flag, "preparedTransactionOffset": self.prepared_transaction_offset,
            "keys": self.keys, "uniqKey": self.uniq_key, "tags": self.tags,
        }  # fmt: skip


class _Cursor:
    """Reads fields off ``data``. Running out of it, or a piece longer than the frame, is a ValueError (2.7 step 4)."""

    def __init__(self, data: bytes, position: int, total: int) -> None:
        self.data, self.position, self.total = data, position, total

    def number(self, form: str) -> int:
        return int(struct.unpack(">" + form, self.piece(struct.calcsize(form)))[0])

    def piece(self, size: int) -> bytes:
        self.position += size
        if not 0 <= size <= self.total or self.position > len(self.data):
            raise ValueError("no such piece")
        return self.data[self.position - size : self.position]

    def host(self, v6: bool) -> tuple[str, int]:
        return str(ipaddress.ip_address(self.piece(16 if v6 else 4))), self.number("i")


def naive_check(data: bytes, position: int = 0, check_crc: bool = True) -> tuple[bool, int, NaiveMessage | None]:
    """Spec 2.7: (True, size, message), (True, 0) for blank, (False, -1) for no frame, (False, size) for bad lengths.

    ``data`` ends where the readable bytes end; ``position`` is where in it the frame starts.
    """
    if len(data) - position < 8:
        return False, -1, None
    total, magic = struct.unpack_from(">ii", data, position)
    if len(data) - position < total:
        return False, -1, None
    if magic == MAGIC_BLANK:
        return True, 0, None
    if magic not in (MAGIC_V1, MAGIC_V2):
        return False, -1, None
    try:
        message, length = _walk(_Cursor(data, position + 8, total), total, magic, check_crc)
        if length != total:
            return False, total, None
        base, size = (message.properties or {}).get("INNER_BASE"), (message.properties or {}).get("INNER_NUM")
        if base is not None and size is not None:
            message = replace(message, batch_base=_java_int(base, 64), batch_size=_java_int(size, 16))
        return True, total, message
    except ValueError:
        return False, -1, None


def _walk(cursor: _Cursor, total: int, magic: int, check_crc: bool) -> tuple[NaiveMessage, int]:
    """The fields in their order (spec 2.1) and the length they add up to."""
    body_crc, queue_id, flag = cursor.number("i"), cursor.number("i"), cursor.number("i")
    cq_offset, phy_offset, sys_flag = cursor.number("q"), cursor.number("q"), cursor.number("i")
    born_timestamp, born_host = cursor.number("q"), cursor.host(bool(sys_flag & 0x10))
    store_timestamp, store_host = cursor.number("q"), cursor.host(bool(sys_flag & 0x20))
    reconsume_times, prepared = cursor.number("i"), cursor.number("q")
    body = cursor.piece(max(cursor.number("i"), 0))
    if check_crc and body and zlib.crc32(body) & 0x7FFFFFFF != body_crc:
        raise ValueError("body CRC")
    raw_topic = cursor.piece(cursor.number("b" if magic == MAGIC_V1 else "h"))
    raw_properties = cursor.piece(max(cursor.number("h"), 0))
    topic = java_utf8(raw_topic)
    properties = decode_properties(java_utf8(raw_properties)) if raw_properties else None
    hosts = (16 if sys_flag & 0x10 else 4) + (16 if sys_flag & 0x20 else 4) + 8
    pieces = len(body) + len(raw_topic) + len(raw_properties)
    message = NaiveMessage(
        phy_offset, total, topic, queue_id, cq_offset, _tags_code(topic, properties, store_timestamp),
        store_timestamp, sys_flag, prepared, "" if properties is None else properties.get("KEYS"),
        (properties or {}).get("UNIQ_KEY"), (properties or {}).get("TAGS"), magic, body_crc, flag, born_timestamp,
        born_host, store_host, reconsume_times, body, raw_topic, raw_properties, properties, cq_offset, 1,
    )  # fmt: skip
    return message, 74 + hosts + (1 if magic == MAGIC_V1 else 2) + pieces


def _tags_code(topic: str, properties: dict[str, str] | None, store_timestamp: int) -> int:
    """Spec 2.7 steps 6 and 7: the hash of TAGS, or when a delayed message is due."""
    properties = properties or {}
    if topic == "SCHEDULE_TOPIC_XXXX" and "DELAY" in properties:
        level = min(_java_int(properties["DELAY"], 32), len(_DELAYS))
        if level > 0:
            return java_wrap(store_timestamp + 1000 * _DELAYS[level - 1])
    return java_hash(properties.get("TAGS", ""))


def naive_frames(paths: Path | Iterable[Path], segment_size: int, start: int | None = None) -> Iterator[NaiveMessage]:
    """Every message of the segments in ``paths`` (files, directories or one directory), as recovery scans (spec 7.4).

    Starts at physical offset ``start`` (the first segment's own if None), ends at the first thing that is no frame.
    """
    paths = [paths] if isinstance(paths, Path) else paths
    files = sorted(path for given in paths for path in (given.iterdir() if given.is_dir() else [given]))
    for file in files:
        base = int(file.name)
        if start is not None and base + segment_size <= start:
            continue
        data = file.read_bytes()[:segment_size]
        position = max(start - base, 0) if start is not None else 0
        while True:
            ok, size, message = naive_check(data, position)
            if not ok:
                return
            if message is None:
                break
            yield message
            position += size


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


BLANK = (0, 2147483647, 0)


class QueueMessage(NamedTuple):
    """What putMessagePositionInfo is told of a message."""

    topic: str
    queue_id: int
    queue_offset: int
    phy_offset: int
    size: int
    tags_code: int
    sys_flag: int = 0

    @classmethod
    def of(cls, message: NaiveMessage) -> QueueMessage:
        """What is told of a message of a log."""
        place = message.topic, message.queue_id, message.cq_offset, message.phy_offset, message.size
        return cls(*place, message.tags_code, message.sys_flag)


@dataclass
class NaiveConsumeQueue:
    """One queue; ``units`` from unit ``first`` on, the begin of its oldest file."""

    file_units: int
    begin: int = 0
    first: int = 0
    minimum: int = 0
    units: list[tuple[int, int, int]] = field(default_factory=list)
    max_phy_offset: int = -1
    moved_from: int = -1

    @property
    def end(self) -> int:
        return self.first + len(self.units)

    def put(self, message: QueueMessage) -> str:
        """Spec 5.2; what has become of the message: unit, repeat or gap (which is a unit, too)."""
        if message.phy_offset + message.size <= self.max_phy_offset:
            return "repeat"
        expect = message.queue_offset
        if not self.units:
            self.begin = expect
            self.first = expect - expect % self.file_units
            if expect != 0:
                self.minimum = expect
                self.units = [BLANK] * (expect % self.file_units)
        kind = "unit"
        if expect != self.end and self.moved_from < 0:
            self.moved_from = message.phy_offset
        if expect != 0:
            # RocketMQ makes the next file even for a repeat, if the last one is full; here an empty file is none.
            if expect < self.end:
                return "repeat"
            if expect != self.end:
                kind = "gap"
        self.max_phy_offset = message.phy_offset + message.size
        self.units.append((message.phy_offset, message.size, message.tags_code))
        return kind

    def delete_expired(self, min_phy_offset: int) -> int:
        """Spec 5.8, then 5.5; the number of files that went."""
        count = 0
        while len(self.units) > self.file_units and self.units[self.file_units - 1][0] < min_phy_offset:
            del self.units[: self.file_units]
            self.first += self.file_units
            count += 1
        if self.minimum < self.end:
            if self.units[-1][0] < min_phy_offset:
                self.minimum = self.end
            else:
                at = max(self.minimum, self.first)
                while self.units[at - self.first][0] < min_phy_offset:
                    at += 1
                self.minimum = at
        return count

    def files(self) -> dict[str, bytes]:
        """The files by name, zeros behind the last unit."""
        files = {}
        for at in range(0, len(self.units), self.file_units):
            data = b"".join(struct.pack(">qiq", *unit) for unit in self.units[at : at + self.file_units])
            files[f"{(self.first + at) * 20:020d}"] = data.ljust(20 * self.file_units, b"\0")
        return files


class NaiveConsumeQueueStore:
    """All queues, at most ``queues_max``, in order of first appearance."""

    def __init__(self, file_units: int, queues_max: int = 1 << 30) -> None:
        self.file_units, self.queues_max = file_units, queues_max
        self.queues: dict[tuple[str, int], NaiveConsumeQueue] = {}
        self.kinds: dict[str, int] = {}

    def put(self, message: QueueMessage) -> None:
        """Spec 5.2: only transaction types none and commit; an inner batch belongs to a BatchConsumeQueue."""
        kind = self._kind(message)
        self.kinds[kind] = self.kinds.get(kind, 0) + 1

    def delete_expired(self, min_phy_offset: int) -> int:
        """Of every queue; the number of files that went."""
        return sum(queue.delete_expired(min_phy_offset) for queue in self.queues.values())

    def marks(self) -> list[tuple[str, int, int, int, int, int, int, int]]:
        """As QueueMark: topic, queue id, first unit of the oldest file, first that counts, next unit, ..."""
        return [
            (*name, queue.first, queue.minimum, queue.end, queue.max_phy_offset, queue.begin, queue.moved_from)
            for name, queue in self.queues.items()
        ]

    def tree(self) -> dict[str, bytes]:
        """Every file by its path."""
        return {
            f"{topic}/{queue_id}/{name}": data
            for (topic, queue_id), queue in self.queues.items()
            for name, data in queue.files().items()
        }

    def _kind(self, message: QueueMessage) -> str:
        if message.sys_flag & 0xC in (0x4, 0xC):
            return "transaction"
        if message.sys_flag & 0x80:
            return "batch"
        if message.topic in ("", ".", "..") or "/" in message.topic or "\0" in message.topic:
            return "nameless"
        name = (message.topic, message.queue_id)
        if name not in self.queues:
            if len(self.queues) >= self.queues_max or not 0 <= message.queue_offset < 1 << 57:
                return "left out"
            self.queues[name] = NaiveConsumeQueue(self.file_units)
        return self.queues[name].put(message)
