"""Keys that are asked for: messages drawn from all over the log before it is read, and what has their hashes in it.

``draw`` looks at single places of the log and needs no index. While the audit decodes the log anyway, SampleWatcher
writes down which messages have one of the drawn hashes: they are what is true when ``asking`` asks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from indexd.audit.part import Part
from indexd.audit.plan import AuditPlan
from indexd.audit.samples.kernel import ROWS_MAX, find_sampled, sieve_of
from indexd.audit.stretch import Rows
from indexd.commitlog.decoder import DecoderOptions, Message
from indexd.commitlog.evidence import MessageLookup
from indexd.commitlog.format import HEAD_SIZE, MAGIC_V1, MAGIC_V2
from indexd.commitlog.reader import Skipped
from indexd.commitlog.segments import Segment, log_end
from indexd.config import Config
from indexd.errors import DiskError
from indexd.index.format import FLAVOURS, Flavour, index_key_hash
from indexd.recovery.open import frame_size_max
from indexd.storage.disk import Disk

_WINDOW = 64 << 10
# A message begins within so many bytes of a place, unless messages are very large; then there are fewer samples.
_SEARCH_MAX = 4 << 20
# Messages at a place that are looked at for one that has keys.
_TRIES = 8
_MAGIC = re.compile(b"|".join(re.escape(magic.to_bytes(4, "big")) for magic in (MAGIC_V1, MAGIC_V2)))


@dataclass(frozen=True, slots=True)
class Sample:
    """A key that is asked for, and the message it was drawn from; ``index_type`` is T for a tag, else None."""

    topic: str
    key: str
    key_hash: int
    phy_offset: int
    store_timestamp: int
    index_type: str | None = None

    def is_key_of(self, message: Message, flavour: Flavour) -> bool:
        """Whether the message is a true hit: it has the very key, not one of the same hash, and is indexed by it."""
        if message.topic != self.topic or message.sys_flag & 0xC in flavour.skipped_types:
            return False
        if self.index_type == "T":
            return flavour.tags and message.tags == self.key
        return self.key in message.keys or (flavour.uniq_key and message.uniq_key == self.key)


def flavour_at(plan: AuditPlan, phy_offset: int) -> Flavour:
    """What the broker indexed when it came to this place of the log."""
    return FLAVOURS[[era.flavour for era in plan.eras if era.begin <= phy_offset][-1]]


def draw(disk: Disk, config: Config, plan: AuditPlan, count: int) -> tuple[Sample, ...]:
    """At most ``count`` keys of messages all over the log, the same at every run over the same log.

    Unique keys, user keys and tags in turn, each once, in the order of the log; of a log with fewer messages more than
    one a message. Raises DiskError.
    """
    finder = _Finder(disk, config)
    try:
        messages = list(finder.spread(plan, count))
    finally:
        finder.close()
    texts = [_names(message, flavour_at(plan, message.phy_offset), turn) for turn, message in enumerate(messages)]
    drawn: dict[tuple[str | None, str, str], Sample] = {}
    while any(texts):
        for message, names in zip(messages, texts, strict=True):
            while names and len(drawn) < count:
                index_type, key = names.pop()
                if (index_type, message.topic, key) not in drawn:
                    drawn[index_type, message.topic, key] = _sample(message, key, index_type)
                    break
        if len(drawn) >= count:
            break
    return tuple(sorted(drawn.values(), key=lambda sample: sample.phy_offset))


def _sample(message: Message, key: str, index_type: str | None) -> Sample:
    key_hash = index_key_hash(message.topic, key, index_type)
    return Sample(message.topic, key, key_hash, message.phy_offset, message.store_timestamp, index_type)


def _names(message: Message, flavour: Flavour, turn: int) -> list[tuple[str | None, str]]:
    # What it is indexed by, the one to be taken first at the end; ``turn`` says with which kind to begin.
    if message.sys_flag & 0xC in flavour.skipped_types:
        return []
    keys: list[tuple[str | None, str]] = [(None, key) for key in dict.fromkeys(message.keys)]
    begin = turn % max(len(keys), 1)
    kinds: list[list[tuple[str | None, str]]] = [
        [(None, message.uniq_key)] if flavour.uniq_key and message.uniq_key is not None else [],
        keys[begin:] + keys[:begin],
        [("T", message.tags)] if flavour.tags and message.tags else [],
    ]
    turn %= len(kinds)
    kinds = kinds[turn:] + kinds[:turn]
    return [name for names in zip_longest(*kinds) for name in names if name is not None][::-1]


class _Finder:
    # Messages at places of the log. What looks like one inside a body costs a sample: the audit will not see it.
    def __init__(self, disk: Disk, config: Config) -> None:
        store = config.store
        options = DecoderOptions(frame_size_max=frame_size_max(config))
        self._disk = disk
        self._lookup = MessageLookup(disk, store.commit_log_directories, store.segment_size, options)

    def close(self) -> None:
        self._lookup.close()

    def spread(self, plan: AuditPlan, count: int) -> Iterator[Message]:
        # Those that have keys.
        begin = plan.log_begin
        end = log_end(self._disk, self._lookup.log, begin)
        reach = min(max((end - begin) // count, _WINDOW), _SEARCH_MAX)
        behind = begin
        for number in range(count):
            behind = max(begin + (end - begin) * number // count, behind)
            for _ in range(_TRIES):
                message = self._first(behind, min(behind + reach, end))
                if message is None:
                    break
                behind = message.phy_offset + message.size
                if _names(message, flavour_at(plan, message.phy_offset), 0):
                    yield message
                    break

    def _first(self, place: int, limit: int) -> Message | None:
        log = self._lookup.log
        while place < limit:
            segment = log.at(place) or log.after(place)
            if segment is None:
                return None
            place = max(place, segment.base)
            for phy_offset in self._candidates(segment, place):
                found = self._lookup.at(phy_offset)
                if isinstance(found, Message):
                    return found
            # The heads that begin in this window and end behind it are seen in the next.
            place = segment.end if place + _WINDOW >= segment.end else place + _WINDOW - HEAD_SIZE
        return None

    def _candidates(self, segment: Segment, place: int) -> Sequence[int]:
        # Where a head says so itself.
        try:
            with self._disk.open_read(segment.path) as file:
                data = file.pread(min(_WINDOW, segment.end - place), place - segment.base)
        except DiskError as error:
            if not error.is_missing:
                raise
            return ()
        starts = (magic.start() - 4 for magic in _MAGIC.finditer(data))
        said = ((start, int.from_bytes(data[start + 28 : start + HEAD_SIZE], "big")) for start in starts if start >= 0)
        return [phy_offset for start, phy_offset in said if phy_offset == place + start]


class SampleWatcher:
    """Writes down into ``part.sampled`` the messages of a stretch that have one of the ``hashes``.

    Of each hash the first ROWS_MAX + 1, so that a part stays small: one with more of them all over the log is not
    asked for.
    """

    def __init__(self, part: Part, hashes: tuple[int, ...], flavour: str) -> None:
        self._part = part
        self._skip_mask = FLAVOURS[flavour].skip_mask
        self._hashes = np.array(sorted(set(hashes)), dtype=np.uint32)
        self._sieve = sieve_of(self._hashes)
        self._counts = np.zeros(len(self._hashes), dtype=np.int64)
        self._latest = np.full(len(self._hashes), -1, dtype=np.int64)
        self._found = np.empty((0, 2), dtype=np.int64)

    def take(self, rows: Rows) -> None:
        """The next messages."""
        columns = rows.batch.columns
        keys = int(columns.key_start[rows.last] - columns.key_start[rows.first])
        if len(self._found) < keys:
            self._found = np.empty((keys, 2), dtype=np.int64)
        pairs = find_sampled(
            columns,
            rows.first,
            rows.last,
            self._skip_mask,
            self._hashes,
            self._sieve,
            self._counts,
            self._latest,
            self._found,
        )
        if pairs:
            at, row = self._found[:pairs].T
            phy_offsets, timestamps = columns.phy_offset[row].tolist(), columns.store_timestamp[row].tolist()
            self._part.sampled += zip(self._hashes[at].tolist(), phy_offsets, timestamps, strict=True)
            # What has had its share is not searched for any more.
            self._sieve = sieve_of(self._hashes[self._counts <= ROWS_MAX])

    def skip(self, skipped: Skipped) -> None:
        """Log that could not be read has no messages."""

    def close(self) -> None:
        """The stretch is at its end."""
