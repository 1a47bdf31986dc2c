"""The index folder of a broker's store, and the plan of an audit: stretches of the log with the files to compare.

The header is read before anything else of a file, and only what it counts is ever judged: a broker may be writing.

Flavours differ in the keys that they index: 3.x has no unique keys, 5.4 has tags, too. A sampled message whose entries
are exactly those that some flavours write speaks for these. A file gets the flavour that most of its messages speak
for, and one whose messages do not tell that of the next newer file. So a broker that was upgraded changes flavour at
the begin of a file. 4.0 and 4.7 index the same keys; both are 4.7 here.

Stretches cover the log exactly once. One ends where an index file begins and where the flavour changes: so there is a
task a file, as a rule, with one file to read, and the message that straddles two files belongs to the second of them.
Where no file points, a segment is a task. Of a broker at work the end of the log is fixed first, then it is given a
moment to index what stands before that, and only then the index is looked at: so what is missing is not only late.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby, islice, pairwise
from pathlib import Path
from statistics import median

import numpy as np

from indexd.audit.result import BrokerFile, FlavourRange
from indexd.commitlog import segments
from indexd.commitlog.decoder import DecoderOptions, Message
from indexd.commitlog.lookup import FrameReader, LogView
from indexd.commitlog.segments import list_segments
from indexd.compare.index import numbered
from indexd.config import Config
from indexd.errors import DiskError, MissingOk, UnsafeStoreError, UsageError
from indexd.findings import Findings
from indexd.index.entries import ENTRIES_PER_READ, first_entry_at, phy_offset_of, read_entries
from indexd.index.format import (
    FLAVOURS,
    HEADER_SIZE,
    SLOT,
    SLOT_SIZE,
    Flavour,
    IndexHeader,
    IndexLayout,
    index_key_hash,
)
from indexd.recovery.open import frame_size_max
from indexd.recovery.recover import NEVER
from indexd.storage.disk import Disk, DiskFile
from indexd.storage.lock import look_at_lock
from indexd.storage.names import INDEX_DIGITS

_SAMPLES = 64


class ScatteredDisk(Disk):
    """For reads here and there: the kernel brings no more into the page cache than what is asked for.

    It reads ahead by megabytes else, and what is in the cache before a file is read for good is never given back.
    """

    def open_read(self, path: Path) -> DiskFile:
        """Open for reading only."""
        file = super().open_read(path)
        with suppress(OSError):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        return file


def scattered(disk: Disk) -> Disk:
    """``disk`` for reads here and there; what is no disk of this machine has no page cache."""
    return ScatteredDisk() if type(disk) is Disk else disk


class LogProbe:
    """Looks at single places of the log: whether a frame begins there, and where it ends."""

    def __init__(self, disk: Disk, config: Config) -> None:
        self._disk = disk
        self.log = list_segments(disk, config.store.commit_log_directories, config.store.segment_size)

    def frame_end(self, phy_offset: int) -> int | None:
        """Where the frame at ``phy_offset`` ends; None when none stands there that says so itself."""
        segment = self.log.at(phy_offset)
        with FrameReader(self._disk, self.log) as frames:
            frame = frames.evidence(phy_offset)
        is_frame = segment is not None and frame is not None and phy_offset + frame.size <= segment.end
        return phy_offset + frame.size if is_frame and frame is not None else None

    def aligned(self, phy_offset: int) -> int:
        """From where messages at ``phy_offset`` and behind are read: there, if a frame is, else from its segment on."""
        segment = self.log.at(phy_offset)
        return phy_offset if segment is None or self.frame_end(phy_offset) is not None else segment.base


def index_folder(config: Config) -> Path:
    """The broker's index folder. Raises UsageError without a store, UnsafeStoreError for one that is not read."""
    store = config.store.store
    if store is None:
        raise UsageError("no store is given", "say --store DIR (the broker's storePathRootDir), or --broker-conf FILE")
    if config.broker.enable_dledger_commit_log:
        raise UnsafeStoreError(
            "the broker keeps a DLedger log (enableDLegerCommitLog), which is not read",
            "point --store at a broker that runs without it",
        )
    return store / "index"


def layout_of(config: Config) -> IndexLayout:
    """Slots and entries as the broker has them configured."""
    return IndexLayout(config.index.hash_slot_num, config.index.index_num)


def is_index_file(name: str) -> bool:
    """17 digits, in whatever script the broker's locale writes them (spec rocketmq-store 1.2)."""
    return len(name) == INDEX_DIGITS and name.isdecimal()


def list_index(disk: Disk, folder: Path, notes: Findings | None = None) -> dict[str, int]:
    """Names and sizes of the index files, in the broker's order; whatever else is there into ``notes``.

    DiskError where something else stands than a folder.
    """
    if not disk.exists(folder):
        return {}
    sizes = {name: stamp.size for name, stamp in disk.stamps(folder).items()}
    names = [*sizes, *(f"{name}/" for name in disk.list_dirs(folder))]
    if notes is not None:
        for name in names:
            if not is_index_file(name):
                notes.add(f"index/{name.rstrip('/')}", 0, "file-foreign", "no index file; move it elsewhere")
    return {name: size for name, size in sorted(sizes.items()) if is_index_file(name)}


def look_at(
    disk: Disk, folder: Path, sizes: dict[str, int], layout: IndexLayout, probe: LogProbe, *, is_layout_given: bool
) -> list[BrokerFile]:
    """Each file's header, and what it may hold; one that expires meanwhile is left out.

    UnsafeStoreError when none of them has the size of ``layout``: it is not the broker's, or, if somebody has said that
    it is, those files look as if they were of another one.
    """
    found = []
    for name in sizes:
        with MissingOk(), disk.open_read(folder / name) as file:
            found.append(_look(file, name, layout, probe))
    if found and not any(file.is_readable for file in found):
        cut = [size for size in sizes.values() if HEADER_SIZE < size < layout.file_size]
        if not is_layout_given or max(sizes.values()) > layout.file_size or len(set(cut)) < len(cut):
            raise UnsafeStoreError(
                f"no index file in {folder} has the {layout.file_size} bytes that {layout.hash_slot_num} slots and "
                f"{layout.index_num} entries make; {found[-1].name} has {sizes[found[-1].name]}",
                "so these are not the broker's numbers; if they are, move the files of other sizes away"
                if is_layout_given
                else "give --hash-slot-num and --index-num as the broker has them, or its own file with --broker-conf",
            )
    return found


def note_names(files: Sequence[BrokerFile], sizes: dict[str, int], layout: IndexLayout, notes: Findings) -> None:
    """Note files of another size, and names whose order is not that of the log."""
    latest: BrokerFile | None = None
    for file in files:
        if not file.is_readable:
            size = sizes[file.name]
            text = f"{size} bytes, not {layout.file_size}: the broker takes its slots and entries for others"
            notes.add(file.path, min(size, layout.file_size), "file-size", text)
        elif file.entries:
            # One that begins before it and ends behind it holds messages twice; that is another matter.
            if latest is not None and file.end < latest.end:
                text = f"its entries end at {file.end}, those of {latest.name} at {latest.end}"
                notes.add(file.path, 0, "file-order", f"the name sorts behind that of a newer file: {text}")
            else:
                latest = file


def _look(file: DiskFile, name: str, layout: IndexLayout, probe: LogProbe) -> BrokerFile:
    header = IndexHeader.unpack(file.pread(HEADER_SIZE, 0).ljust(HEADER_SIZE, b"\0"))
    count = min(header.index_count, layout.index_num)
    if file.size() != layout.file_size:
        return BrokerFile(name, header, count, 0, -1, is_full=False, is_readable=False)
    count = _written(file, layout, count)
    if count < layout.index_num:
        # Of a put that a crash cut short the slot may name the entry and the header not count it. A query finds it.
        entry = read_entries(file, layout, count, 1)
        key_hash = int(entry.byteswap().view(np.int32)[0, 0])
        if entry.any() and key_hash >= 0:
            slot = file.pread(SLOT_SIZE, layout.slot_position(layout.slot_of(key_hash)))
            count += SLOT.unpack(slot)[0] == count
    begin, end = _points_to(file, layout, header, count, probe) if count > 1 else (0, -1)
    return BrokerFile(name, header, count, begin, end, is_full=count >= layout.index_num)


def _written(file: DiskFile, layout: IndexLayout, count: int) -> int:
    # A header may count entries that were never written: those are zeros, to the end of what it counts.
    while count > 2:
        first = max(count - _WINDOW_ENTRIES, 1)
        written = np.flatnonzero(read_entries(file, layout, first, count - first).any(axis=1))
        if len(written):
            return first + int(written[-1]) + 1
        count = max(first, 2)
    return count


def _points_to(
    file: DiskFile, layout: IndexLayout, header: IndexHeader, count: int, probe: LogProbe
) -> tuple[int, int]:
    # The smallest and the largest offset that entries may be believed. One wrong entry must not stretch that.
    numbers = sorted({*np.linspace(1, count - 1, _SAMPLES).astype(int).tolist(), *range(1, min(4, count))})
    offsets = [phy_offset_of(read_entries(file, layout, number, 1)[0]) for number in numbers]
    begin = _believed(offsets[0], header.begin_phy_offset, probe, median(offsets[:3]), is_begin=True)
    end = _believed(offsets[-1], header.end_phy_offset, probe, median(offsets[-3:]), is_begin=False)
    if begin <= end and sum(not begin <= offset <= end for offset in offsets) <= len(offsets) // _SAMPLES + 1:
        return begin, end
    # Entries that are not in the order of the log: all of them have to be asked.
    low, high = (1 << 63) - 1, -1
    for number in range(1, count, ENTRIES_PER_READ):
        found = numbered(read_entries(file, layout, number, min(count - number, ENTRIES_PER_READ)), number).phy_offset
        found = found[found >= 0]
        if len(found):
            low, high = min(low, int(found.min())), max(high, int(found.max()))
    return (low, high) if high >= 0 else (0, -1)


def _believed(entry: int, header: int, probe: LogProbe, beside: float, *, is_begin: bool) -> int:
    # The first or last entry's offset, or what the header says of it: that one which a frame stands at, if they differ.
    if entry == header:
        return entry
    fits = [offset for offset in (entry, header) if offset == beside or (offset <= beside) == is_begin]
    fits = [offset for offset in fits if offset >= 0]
    return next((offset for offset in fits if probe.frame_end(offset) is not None), fits[0] if fits else entry)


#: From the oldest to the newest.
FLAVOUR_NAMES = ("3.x", "4.7", "5.4")
# Windows that are sampled in all, but so many of each file at least and at most.
_WINDOWS, _WINDOWS_MIN, _WINDOWS_MAX = 512, 2, 8
# Entries of a window, of which so many messages are looked at.
_WINDOW_ENTRIES, _WINDOW_MESSAGES = 4096, 32


def flavour_at(eras: Sequence[FlavourRange], phy_offset: int) -> str:
    """What the broker indexed when it came to this place of the log."""
    return [era.flavour for era in eras if era.begin <= phy_offset][-1]


def detect_flavours(
    disk: Disk, config: Config, folder: Path, layout: IndexLayout, files: Sequence[BrokerFile]
) -> list[FlavourRange]:
    """Ranges of the log by flavour, the first from 0 on; empty when no sampled message shows any. Raises DiskError."""
    options = DecoderOptions(frame_size_max=frame_size_max(config), check_crc=False)
    found: list[FlavourRange] = []
    names, begin = list(FLAVOUR_NAMES), 0
    with LogView(disk, config.store.commit_log_directories, config.store.segment_size, options) as lookup:
        log_begin = lookup.log.min_offset or 0
        readable = [file for file in files if file.is_readable and file.entries and file.end >= log_begin]
        windows = min(max(_WINDOWS // max(len(readable), 1), _WINDOWS_MIN), _WINDOWS_MAX)
        for file in sorted(readable, key=_order, reverse=True):
            votes = _sample(disk, folder, layout, file, lookup, windows)
            told = [name for name in FLAVOUR_NAMES if votes and votes[name] == max(votes.values())]
            if told and not set(told) & set(names):
                found.insert(0, FlavourRange(begin, names[-1]))
                names = list(FLAVOUR_NAMES)
            names, begin = [name for name in names if not told or name in told], file.begin
    # One that shows nothing leaves all of them.
    return [FlavourRange(0, names[-1]), *found] if found or len(names) < len(FLAVOUR_NAMES) else []


def _sample(
    disk: Disk, folder: Path, layout: IndexLayout, file: BrokerFile, lookup: LogView, windows: int
) -> Counter[str]:
    # How many of the sampled messages speak for each flavour.
    votes: Counter[str] = Counter()
    with MissingOk(), disk.open_read(folder / file.name) as opened:
        low = first_entry_at(opened, layout, 1, file.count, max(file.begin, lookup.log.min_offset or 0))
        for first in sorted({*np.linspace(low, max(file.count - _WINDOW_ENTRIES, low), windows, dtype=int).tolist()}):
            entries = numbered(read_entries(opened, layout, first, min(_WINDOW_ENTRIES, file.count - first)), first)
            pairs = zip(entries.phy_offset.tolist(), entries.key_hash.tolist(), strict=True)
            runs = groupby(pairs, key=lambda pair: pair[0])
            found = [(offset, [key_hash for _, key_hash in run]) for offset, run in islice(runs, _WINDOW_MESSAGES)]
            _count(found, lookup, votes)
    return votes


def _count(runs: Sequence[tuple[int, list[int]]], lookup: LogView, votes: Counter[str]) -> None:
    # The first and the last message may go on beside the window, and so may one beside an entry that belongs to no
    # message, for that entry may have been its own: they say nothing.
    messages = [lookup.at(offset) if offset >= 0 else None for offset, _ in runs]
    kinds = [FLAVOURS[name] for name in FLAVOUR_NAMES]
    wanted = [[_key_hashes(one, kind) for kind in kinds] if isinstance(one, Message) else None for one in messages]
    is_own = [keys is not None and set(run) <= set(keys[-1]) for (_, run), keys in zip(runs, wanted, strict=True)]
    for at in range(1, len(runs) - 1):
        offset, keys = runs[at][0], wanted[at]
        if keys is not None and all(is_own[at - 1 : at + 2]) and runs[at - 1][0] < offset < runs[at + 1][0]:
            fits = [name for name, hashes in zip(FLAVOUR_NAMES, keys, strict=True) if hashes == runs[at][1]]
            votes.update(fits if len(fits) < len(FLAVOUR_NAMES) else ())


def indexed_keys(message: Message, flavour: Flavour) -> list[tuple[str | None, str]]:
    """Index types and keys that a message is indexed by, in RocketMQ's order (spec rocketmq-store 4.2, 4.3)."""
    if message.sys_flag & 0xC in flavour.skipped_types:
        return []
    uniq = [(None, message.uniq_key)] if flavour.uniq_key and message.uniq_key is not None else []
    tags = [("T", message.tags)] if flavour.tags and message.tags else []
    return [*uniq, *((None, key) for key in message.keys), *tags]


def _key_hashes(message: Message, flavour: Flavour) -> list[int]:
    return [index_key_hash(message.topic, key, kind) for kind, key in indexed_keys(message, flavour)]


# A broker dispatches a message some milliseconds after it was written.
_PATIENCE = 2.0
_PAUSE = 0.05


@dataclass(frozen=True, slots=True)
class AuditTask:
    """Messages that start in ``[begin, end)``; the first of them stands at ``aligned`` or is reached from there.

    ``files`` may point into it; ``owned`` are the names of those whose own check belongs to this task; ``newest`` is
    the last file of all. ``size`` is what there is to read, roughly: bytes. A message every ``stride`` bytes is noted
    for the sample, none with 0; ``queues``: its ConsumeQueue units are compared, too.
    """

    begin: int
    end: int
    aligned: int
    log_begin: int
    log_end: int
    flavour: str
    files: tuple[BrokerFile, ...]
    owned: tuple[str, ...]
    newest: str
    size: int
    folder: Path
    is_live: bool
    stride: int = 0
    queues: bool = False


@dataclass(slots=True)
class AuditPlan:
    """``tasks`` in the order of the log; ``files`` in the broker's order, that of their names.

    ``log_end`` is where the log of a broker at work (``is_live``) ended, or where the last segment does; ``written`` is
    about where its bytes end. ``findings`` are
    about names and sizes.
    """

    folder: Path
    log_begin: int
    log_end: int
    written: int
    files: tuple[BrokerFile, ...]
    eras: tuple[FlavourRange, ...]
    is_flavour_given: bool
    layout: IndexLayout
    is_live: bool = False
    tasks: list[AuditTask] = field(default_factory=list)
    findings: Findings = field(default_factory=Findings)


def is_live(store: Path) -> bool:
    """Whether a broker is at work, or may be: it locks STORE/lock, which is asked for and never taken."""
    return look_at_lock(store / "lock").alive is not False


def plan_audit(
    disk: Disk,
    config: Config,
    *,
    size: int | None = None,
    cuts: Sequence[int] = (),
    folder: Path | None = None,
    eras: Sequence[FlavourRange] = (),
) -> AuditPlan:
    """Look at index and log, and cut the work into tasks; ``folder`` holds the index files, else STORE/index does.

    With ``size`` (bytes) long stretches with a file are cut at segments, too; each piece reads its file again. ``cuts``
    are further offsets at which messages begin; ``eras``, if given, are not asked for. Raises UsageError,
    UnsafeStoreError, MissingStoreError, DiskError.
    """
    layout, disk, live = layout_of(config), scattered(disk), is_live(index_folder(config).parent)
    folder = folder or index_folder(config)
    probe = LogProbe(disk, config)
    log = probe.log
    log_begin, log_end = log.min_offset or 0, log.segments[-1].end if log.segments else 0
    written = segments.log_end(disk, log, log_begin)
    if live:
        _wait_for_dispatch(disk, folder, written)
    findings = Findings()
    sizes = list_index(disk, folder, findings)
    is_given = config.is_given("hash_slot_num") and config.is_given("index_num")
    files = look_at(disk, folder, sizes, layout, probe, is_layout_given=is_given)
    note_names(files, sizes, layout, findings)
    if live:
        # The last indexed message may lack some of its keys still.
        log_end = min(max([written, *(file.end for file in files)]), log_end)
    given = config.is_given("flavour")
    if not (eras or given):
        eras = detect_flavours(disk, config, folder, layout, files)
    eras = eras or (FlavourRange(0, config.index.flavour),)
    plan = AuditPlan(
        folder, log_begin, log_end, written, tuple(files), tuple(eras), given, layout, is_live=live, findings=findings
    )
    _cut(plan, probe, size, cuts)
    return plan


def _wait_for_dispatch(disk: Disk, folder: Path, log_end: int) -> None:
    # Until the newest index file reaches there.
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        for name in list(list_index(disk, folder))[-1:]:
            with suppress(DiskError), disk.open_read(folder / name) as file:  # it may expire
                header = IndexHeader.unpack(file.pread(HEADER_SIZE, 0).ljust(HEADER_SIZE, b"\0"))
                if header.end_phy_offset >= log_end:
                    return
        time.sleep(_PAUSE)


def _cut(plan: AuditPlan, probe: LogProbe, size: int | None, cuts: Sequence[int]) -> None:
    files = [file for file in plan.files if file.is_readable and file.entries]
    # Where a stretch begins, and from where its first message is reached.
    aligned = {plan.log_begin: plan.log_begin}
    for offset in (*(file.begin for file in files), *(era.begin for era in plan.eras), *cuts):
        if plan.log_begin < offset < plan.log_end:
            aligned[offset] = probe.aligned(offset)
    for segment in probe.log.segments:
        before = max(begin for begin in aligned if begin <= segment.base)
        wanted = size if any(file.points_into(segment.base, segment.end) for file in files) else 0
        if wanted is not None and segment.base - before >= wanted and segment.base < plan.log_end:
            aligned.setdefault(segment.base, segment.base)
    owned: set[str] = set()
    last = max(plan.log_end, plan.log_begin) if plan.is_live else NEVER
    for begin, end in pairwise([*sorted(aligned), last]):
        inside = tuple(sorted((file for file in plan.files if file.points_into(begin, end)), key=_order))
        fresh = tuple(file.name for file in inside if file.name not in owned)
        owned.update(fresh)
        plan.tasks.append(
            AuditTask(
                begin=begin,
                end=end,
                aligned=aligned[begin],
                log_begin=plan.log_begin,
                log_end=plan.log_end,
                flavour=flavour_at(plan.eras, begin),
                files=inside,
                owned=fresh,
                newest=plan.files[-1].name if plan.files else "",
                size=max(min(end, plan.log_end) - begin, 0) + len(fresh) * plan.layout.file_size,
                folder=plan.folder,
                is_live=plan.is_live,
            )
        )
    # Files that point to no part of the log are checked by themselves.
    alone = sorted((file for file in plan.files if file.is_readable and file.name not in owned), key=_order)
    plan.tasks[:0] = [
        replace(plan.tasks[0], end=plan.log_begin, files=(file,), owned=(file.name,), size=plan.layout.file_size)
        for file in alone
    ]


def _order(file: BrokerFile) -> tuple[int, str]:
    return file.begin, file.name
