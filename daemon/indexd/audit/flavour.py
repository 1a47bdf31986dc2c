"""Detects which RocketMQ indexed each file, by a plain sample of its entries.

Flavours differ in the keys that they index: 3.x has no unique keys, 5.4 has tags, too. A sampled message whose entries
are exactly those that some flavours write speaks for these; a file gets the flavour that most of its messages speak
for, the newest of several. So a broker that was upgraded changes flavour at the begin of a file: messages of the one
file that it wrote in both ways are judged as most of that file. 4.0 and 4.7 index the same keys; both are 4.7 here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from indexd.audit.ground import BrokerFile, phy_offsets
from indexd.commitlog.decoder import DecoderOptions, Message
from indexd.commitlog.evidence import MessageLookup
from indexd.config import Config
from indexd.errors import DiskError
from indexd.index.entries import first_entry_at, read_entries
from indexd.index.format import FLAVOURS, IndexLayout, index_key_hash
from indexd.recovery.open import frame_size_max
from indexd.storage.disk import Disk

#: From the oldest to the newest.
NAMES = ("3.x", "4.7", "5.4")
# Windows that are sampled in all, but so many of each file at least and at most.
_WINDOWS, _WINDOWS_MIN, _WINDOWS_MAX = 512, 2, 8
# Entries of a window; the larger one where messages have so many keys that none is whole in the smaller.
_WINDOW_SIZES = (64, 4096)


@dataclass(frozen=True, slots=True)
class FlavourRange:
    """Messages from physical offset ``begin`` on, to the next range, were indexed as ``flavour`` says."""

    begin: int
    flavour: str


def detect_flavours(
    disk: Disk, config: Config, folder: Path, layout: IndexLayout, files: Sequence[BrokerFile]
) -> list[FlavourRange]:
    """Ranges of the log by flavour, the first from 0 on; empty when no sampled message shows any. Raises DiskError."""
    options = DecoderOptions(frame_size_max=frame_size_max(config), check_crc=False)
    lookup = MessageLookup(disk, config.store.commit_log_directories, config.store.segment_size, options)
    found: list[FlavourRange] = []
    try:
        log_begin = lookup.log.min_offset or 0
        readable = [file for file in files if file.is_readable and file.entries and file.end >= log_begin]
        windows = min(max(_WINDOWS // max(len(readable), 1), _WINDOWS_MIN), _WINDOWS_MAX)
        counts = [
            (file, _sample(disk, folder, layout, file, lookup, windows))
            for file in sorted(readable, key=lambda file: (file.begin, file.name))
        ]
    finally:
        lookup.close()
    told = [(file, [name for name in NAMES if votes[name] == max(votes.values())]) for file, votes in counts if votes]
    for number, (file, names) in enumerate(told):
        if found and found[-1].flavour in names:
            continue
        # Where a file may have several, a later one may tell which.
        both = ([name for name in names if name in later] for _, later in told[number:])
        only = next((one for one in both if len(one) == 1), names)
        found.append(FlavourRange(file.begin if found else 0, only[-1]))
    return found


def _sample(
    disk: Disk, folder: Path, layout: IndexLayout, file: BrokerFile, lookup: MessageLookup, windows: int
) -> Counter[str]:
    # How many of the sampled messages speak for each flavour.
    votes: Counter[str] = Counter()
    try:
        with disk.open_read(folder / file.name) as opened:
            low = first_entry_at(opened, layout, 1, file.count, max(file.begin, lookup.log.min_offset or 0))
            for number in range(windows):
                for size in _WINDOW_SIZES:
                    first = low + max(file.count - low - size, 0) * number // max(windows - 1, 1)
                    entries = read_entries(opened, layout, first, min(size, file.count - first))
                    pairs = zip(phy_offsets(entries).tolist(), entries[:, 0].byteswap().tolist(), strict=True)
                    if _count(list(pairs), lookup, votes):
                        break
                if first + size >= file.count and first == low:
                    break
    except DiskError as error:
        if not error.is_missing or error.path != folder / file.name:
            raise  # else the broker has removed it meanwhile
    return votes


def _count(pairs: Sequence[tuple[int, int]], lookup: MessageLookup, votes: Counter[str]) -> bool:
    # Whether any message is whole: the first and the last may go on beside the window, and so may one beside an entry
    # that belongs to no message, for that entry may have been its own.
    runs = [(offset, [key_hash for _, key_hash in run]) for offset, run in groupby(pairs, key=lambda pair: pair[0])]
    messages = [lookup.at(offset) if offset >= 0 else None for offset, _ in runs]
    wanted = [_keys(one) if isinstance(one, Message) else None for one in messages]
    is_own = [keys is not None and set(run) <= set(keys[-1]) for (_, run), keys in zip(runs, wanted, strict=True)]
    for at in range(1, len(runs) - 1):
        offset, keys = runs[at][0], wanted[at]
        if keys is not None and all(is_own[at - 1 : at + 2]) and runs[at - 1][0] < offset < runs[at + 1][0]:
            fits = [name for name, hashes in zip(NAMES, keys, strict=True) if hashes == runs[at][1]]
            votes.update(fits if len(fits) < len(NAMES) else ())
    return len(runs) > 2


def _keys(message: Message) -> list[list[int]]:
    # The key hashes that each of NAMES writes, in the order in which it does (spec rocketmq-store 4.2, 4.3).
    uniq = [index_key_hash(message.topic, message.uniq_key)] if message.uniq_key is not None else []
    keys = [index_key_hash(message.topic, key) for key in message.keys]
    tags = [index_key_hash(message.topic, message.tags, "T")] if message.tags else []
    kinds = [FLAVOURS[name] for name in NAMES]
    return [
        [*(uniq if kind.uniq_key else []), *keys, *(tags if kind.tags else [])]
        if message.sys_flag & 0xC not in kind.skipped_types
        else []
        for kind in kinds
    ]
