"""Which RocketMQ wrote the entries, by the entries themselves: are unique keys there, are tags?

A broker that was upgraded goes on in the file it has open, so what is indexed may change at any message. A few messages
at both ends of each file are asked; where two answers differ, the message between them is searched by bisection. 4.0
and 4.7 index the same and differ in how a header counts, which the check of the file looks at; here both are 4.7.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from indexd.audit.ground import BrokerFile, phy_offsets
from indexd.commitlog.decoder import DecoderOptions, Message
from indexd.commitlog.lookup import MessageLookup
from indexd.config import Config
from indexd.index.format import IndexLayout
from indexd.index.key_hash import index_key_hash
from indexd.recovery.replay import first_entry_at, read_entries
from indexd.recovery.settings import frame_size_max
from indexd.storage.disk import Disk, DiskFile

_WINDOW = 64
# Windows that are asked, one behind the other, where messages have neither tags nor unique keys.
_TRIES = 8


@dataclass(frozen=True, slots=True)
class Era:
    """Messages from physical offset ``begin`` on, to the next era, were indexed as ``flavour`` says."""

    begin: int
    flavour: str


class Evidence:
    """Asks files and log; close it after use."""

    def __init__(self, disk: Disk, config: Config, folder: Path, layout: IndexLayout) -> None:
        self._disk, self._folder, self._layout = disk, folder, layout
        self._asks_all = False
        options = DecoderOptions(frame_size_max=frame_size_max(config), check_crc=False)
        store = config.store
        self._lookup = MessageLookup(disk, store.commit_log_directories, store.segment_size, options)

    def close(self) -> None:
        """Close what is open of the log."""
        self._lookup.close()

    def eras(self, files: Sequence[BrokerFile]) -> list[Era]:
        """Where what is indexed changes; empty when no message that has entries shows it."""
        found = self._eras(files)
        if not found:
            self._asks_all = True
            found = self._eras(files)
        return found

    def _eras(self, files: Sequence[BrokerFile]) -> list[Era]:
        log_begin = self._lookup.log.min_offset or 0
        eras: list[Era] = []
        for file in sorted(files, key=lambda file: (file.begin, file.name)):
            if not file.is_readable or file.entries == 0 or file.end < log_begin:
                continue
            with self._disk.open_read(self._folder / file.name) as opened:
                low = first_entry_at(opened, self._layout, 1, file.count, max(file.begin, log_begin))
                first = self._flavour_at(opened, file, low)
                last = self._flavour_at(opened, file, max(low, file.count - _WINDOW))
                if first is not None and (not eras or eras[-1].flavour != first):
                    eras.append(Era(file.begin if eras else 0, first))
                if last is not None and (not eras or eras[-1].flavour != last):
                    begin = 0 if first is None else self._switch(opened, file, low, first, last)
                    eras.append(Era(begin if eras else 0, last))
        return eras

    def _switch(self, opened: DiskFile, file: BrokerFile, low: int, before: str, behind: str) -> int:
        # The first message that was indexed as ``behind`` says; at ``low`` it still was ``before``.
        high = file.count
        while high - low > 2 * _WINDOW:
            middle = (low + high) // 2
            if self._flavour_at(opened, file, middle) == behind:
                high = middle
            else:
                low = middle
        votes = list(self._votes(opened, file, low, high + _WINDOW - low))
        costs = [
            sum(flavour == behind for _, flavour in votes[:split])
            + sum(flavour == before for _, flavour in votes[split:])
            for split in range(len(votes))
        ]
        return votes[costs.index(min(costs))][0] if votes else file.begin

    def _flavour_at(self, opened: DiskFile, file: BrokerFile, number: int) -> str | None:
        for _ in range(_TRIES):
            votes = Counter(flavour for _, flavour in self._votes(opened, file, number, _WINDOW))
            if votes:
                return votes.most_common(1)[0][0]
            number += _WINDOW
        return None

    def _votes(self, opened: DiskFile, file: BrokerFile, number: int, count: int) -> Iterator[tuple[int, str]]:
        # (physical offset, flavour) of each message with entries among these that shows how it was indexed.
        count = min(count, file.count - number)
        if count <= 0:
            return
        entries = read_entries(opened, self._layout, number, count)
        hashes = entries[:, 0].byteswap().tolist()
        by_message: dict[int, set[int]] = {}
        for phy_offset, key_hash in zip(phy_offsets(entries).tolist(), hashes, strict=True):
            by_message.setdefault(phy_offset, set()).add(key_hash)
        # Of the first and of the last message some entries may stand elsewhere, in another file even.
        for phy_offset in list(by_message) if self._asks_all else list(by_message)[1:-1]:
            message = self._lookup.at(phy_offset)
            flavour = _judge(message, by_message[phy_offset]) if isinstance(message, Message) else None
            if flavour is not None:
                yield phy_offset, flavour


def _judge(message: Message, hashes: set[int]) -> str | None:
    own = {index_key_hash(message.topic, key) for key in message.keys}
    uniq = None if message.uniq_key is None else index_key_hash(message.topic, message.uniq_key)
    tag = index_key_hash(message.topic, message.tags, "T") if message.tags else None
    if not hashes <= own | {uniq, tag}:
        return None  # entries of another message, which stood here before the log was cut
    if uniq is not None and uniq not in hashes:
        return "3.x"
    if tag is not None:
        return "5.4" if tag in hashes else "4.7"
    return None
