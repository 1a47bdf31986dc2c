"""Recovers what was built: the key index from its own entries and the log, then the other outputs to where that stands.

Only the frontier is believed. Index files that it does not name were made after it and are made again from the log. One
that it names but that is missing or has another size ends what can be kept; so does everything behind it. Deciding is
pure (``plan_recovery``): nothing is read or written by it, so every case is a row of a test.

Every step of carrying out leaves a directory that the same recovery would bring to the same end: what the frontier says
is made true again first; where it is not to be true any more, it is replaced before the files change.

KnownLog holds what was noted of the log against what it says today (decision 7). WholeLog is the log from where a
reader stands to where it ends now, for commands that do not wait for more.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from indexd.commitlog.batcher import DispatchBatch
from indexd.commitlog.decoder import Message
from indexd.commitlog.format import Corrupt, NotYetWritten
from indexd.commitlog.lookup import WATCHED_SIZE, Evidence, FrameReader, LogView, newest
from indexd.commitlog.reader import LogReader, ReaderOptions, Skipped
from indexd.compare.log import Comparison, LogComparison, compare_with_log
from indexd.errors import CorruptDataError, DisturbedError, UnsafeStoreError
from indexd.flush.frontier import Frontier
from indexd.index.entries import (
    Replayed,
    first_entry_at,
    phy_offset_of,
    read_entries,
    read_slots,
    replay_file,
    write_back,
)
from indexd.index.format import FLAVOURS, HEADER_SIZE, FileMark, IndexHeader, unpack_entry
from indexd.storage.disk import Disk, Stamp
from indexd.storage.names import DataFiles, is_index_name


@dataclass(frozen=True, slots=True)
class OnDisk:
    """What a data directory holds: the abort flag, the frontier; stamp and header of each index file.

    ``log_begin`` is the first physical offset that the log still has. ``damaged`` are names of files that are not what
    their checksums say.
    """

    abort: bool
    frontier: Frontier | None
    stamps: Mapping[str, Stamp]
    headers: Mapping[str, IndexHeader | None]
    log_begin: int = 0
    damaged: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """``keep`` as they are, ``replay`` to their marks, ``delete``; go on at ``phy_offset`` (None: the log's begin).

    ``cut`` is True when not all that the frontier names is kept: where files are lost (``lost_entries`` in them), to
    the last kept message, and ``phy_offset`` is None; where there are more entries than it covers, to ``phy_offset``.
    """

    keep: tuple[FileMark, ...]
    replay: tuple[FileMark, ...]
    delete: tuple[str, ...]
    phy_offset: int | None
    cut: bool
    reason: str
    lost_entries: int = 0

    @property
    def is_clean(self) -> bool:
        """Nothing has to be done."""
        return not self.replay and not self.delete and not self.cut


def plan_recovery(disk: OnDisk, *, forced: bool = False) -> RecoveryPlan:
    """Decide; ``forced`` (indexd --recover) replays every file, not only those that a crash can have touched."""
    if disk.frontier is None:
        return RecoveryPlan((), (), tuple(sorted(disk.stamps)), None, cut=False, reason="there is no frontier")
    reason = "abort is there" if disk.abort else "the last stop was clean"
    sizes, size = {name: stamp.size for name, stamp in disk.stamps.items()}, disk.frontier.layout.file_size
    marks = disk.frontier.index
    while marks and marks[0].name not in sizes and marks[0].header.end_phy_offset < disk.log_begin:
        marks = marks[1:]  # it pointed to expired messages only, and may well be gone
    whole = next((number for number, mark in enumerate(marks) if sizes.get(mark.name) != size), len(marks))
    cut, offset = whole < len(marks), None if whole < len(marks) else disk.frontier.phy_offset
    if cut:
        name = marks[whole].name
        found = f"has {sizes[name]} bytes" if name in sizes else "is missing"
        reason = f"index file {name} {found}"
    elif disk.damaged:
        reason = f"index file {min(disk.damaged)} is not what its checksums say"
    elif any(mark.header.entries and mark.header.end_phy_offset >= disk.frontier.phy_offset for mark in marks):
        cut, reason = True, f"the frontier's phyOffset {disk.frontier.phy_offset} lies before what its files hold"
    lost = sum(mark.header.entries for mark in marks[whole:])
    marks = marks[:whole]
    keep: list[FileMark] = []
    replay: list[FileMark] = []
    for mark in marks:
        is_ours = mark.mtime_ns in (0, disk.stamps[mark.name].mtime_ns)
        sound = disk.headers.get(mark.name) == mark.header and is_ours and mark.name not in disk.damaged
        # An open file is written between flushes: after a crash only its durable prefix is known.
        touched = disk.abort and not mark.full
        (replay if forced or touched or not sound else keep).append(mark)
    kept = {mark.name for mark in marks}
    delete = tuple(sorted(name for name in sizes if name not in kept))
    return RecoveryPlan(tuple(keep), tuple(replay), delete, offset, cut, "--recover" if forced else reason, lost)


OnProgress = Callable[[str, int, int], None]


@dataclass(slots=True)
class RecoveryResult:
    """The files as they now are, and where building goes on (None: at the log's begin)."""

    files: tuple[FileMark, ...]
    phy_offset: int | None
    compared: LogComparison = field(default_factory=LogComparison)
    kept_entries: int = 0
    dropped_entries: int = 0
    deleted_files: tuple[str, ...] = ()
    rewritten_files: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


def look(
    disk: Disk,
    files: DataFiles,
    frontier: Frontier | None,
    *,
    unclean: bool,
    log_begin: int,
    damaged: frozenset[str] = frozenset(),
) -> OnDisk:
    """What the data directory holds; reads headers only, and the slots of a file that will be written on."""
    stamps = {name: stamp for name, stamp in disk.stamps(files.index).items() if is_index_name(name)}
    headers: dict[str, IndexHeader | None] = {}
    for name, stamp in stamps.items():
        with disk.open_read(files.index / name) as file:
            headers[name] = IndexHeader.unpack(file.pread(HEADER_SIZE, 0)) if stamp.size >= HEADER_SIZE else None
    if frontier is not None and frontier.index and not unclean:
        mark = frontier.index[-1]
        is_whole = mark.name in stamps and stamps[mark.name].size == frontier.layout.file_size
        if is_whole and not mark.full and mark.slots_crc is not None:
            with disk.open_read(files.index / mark.name) as file:
                if zlib.crc32(read_slots(file, frontier.layout).data) != mark.slots_crc:
                    damaged |= {mark.name}
    return OnDisk(unclean, frontier, stamps, headers, log_begin, damaged)


class IndexRecovery:
    """Does what ``plan`` says; then cuts off what the log, as far as it is compared, does not say any more.

    ``known`` says how the files are laid out. ``lookup`` finds messages of the log, which begins at ``log_begin``.
    """

    def __init__(
        self,
        disk: Disk,
        directory: Path,
        known: Frontier,
        plan: RecoveryPlan,
        lookup: LogView,
        log_begin: int,
        on_progress: OnProgress,
    ) -> None:
        self._disk, self._directory, self._plan = disk, directory, plan
        self._layout, self._flavour = known.layout, FLAVOURS[known.flavour]
        self._lookup, self._log_begin, self._on_progress = lookup, log_begin, on_progress
        self._marks = sorted((*plan.keep, *plan.replay), key=lambda mark: mark.name)
        self._recovered = RecoveryResult((), plan.phy_offset, reasons=[plan.reason])

    def carry_out(
        self, compare_before: Callable[[int], Comparison], commit: Callable[[RecoveryResult], object]
    ) -> RecoveryResult:
        """``compare_before`` says what to compare of the log before a physical offset.

        Where entries are cut off, ``commit`` first makes a frontier durable that does without them: else the next
        recovery would take a cut that was broken off for damage, and cut once more.
        """
        recovered, plan = self._recovered, self._plan
        sound = self._replay_all()
        is_cut = plan.cut or sound != self._marks
        if is_cut:
            if plan.phy_offset is None or sound != self._marks:
                # The message of the last entry may have more keys than are in: it is indexed again, whole.
                recovered.phy_offset = self._last_message(sound)
            sound = self._before(sound, recovered.phy_offset or 0)
        if recovered.phy_offset is not None:
            comparison = compare_before(recovered.phy_offset)
            begin = comparison.reader.position
            agreed = compare_with_log(
                self._disk, self._directory, self._layout, self._flavour, tuple(sound), comparison,
                lambda offset: self._on_progress("compare", offset - begin, comparison.end - begin),
            )  # fmt: skip
            recovered.compared = agreed.compared
            recovered.reasons += [agreed.reason] if agreed.reason else []
            if agreed.phy_offset is not None:
                is_cut, recovered.phy_offset = True, agreed.phy_offset
                sound = self._before(sound, agreed.phy_offset)
        last = self._cut_last(sound[-1]) if is_cut and sound and not sound[-1].full else None
        recovered.files = (*sound[:-1], last.mark) if last else tuple(sound)
        recovered.kept_entries = sum(mark.header.entries for mark in sound)
        before = plan.lost_entries + sum(mark.header.entries for mark in self._marks)
        recovered.dropped_entries = before - recovered.kept_entries
        if is_cut:
            commit(recovered)
        # Only now do files become less than the frontier before said of them.
        kept = {mark.name for mark in recovered.files}
        recovered.deleted_files = tuple(sorted({*plan.delete, *(mark.name for mark in self._marks)} - kept))
        for name in recovered.deleted_files:
            self._disk.unlink(self._directory / name)
        if last is not None:
            with self._disk.open_write(self._directory / last.mark.name) as file:
                write_back(file, last, self._layout)
        self._disk.sync_dir(self._directory)
        stamps = self._disk.stamps(self._directory)
        recovered.files = tuple(replace(mark, mtime_ns=stamps[mark.name].mtime_ns) for mark in recovered.files)
        return recovered

    def _replay_all(self) -> list[FileMark]:
        # The marks that hold, oldest first; the last one may be shorter, and then what is behind it is gone.
        sound: list[FileMark] = []
        for done, mark in enumerate(self._marks):
            self._on_progress("replay", done, len(self._marks))
            if mark in self._plan.keep:
                sound.append(mark)
                continue
            with self._disk.open_write(self._directory / mark.name) as file:
                replayed = replay_file(file, mark, self._layout, self._flavour)
                sound.append(replayed.mark)
                if replayed.mark.header.entries < mark.header.entries:
                    entry = replayed.mark.header.index_count
                    self._recovered.reasons.append(f"index file {mark.name}: entry {entry} is not what its chain says")
                    break
                if write_back(file, replayed, self._layout):
                    self._recovered.rewritten_files.append(mark.name)
        return sound

    def _store_timestamp(self, phy_offset: int) -> int | None:
        found = self._lookup.at(phy_offset)
        return found.store_timestamp if isinstance(found, Message) else None

    def _last_message(self, marks: list[FileMark]) -> int | None:
        # The physical offset of the last entry at which a message stands, or has expired; None when there is none.
        # Where a chain is broken, the entry before may be, too: reading the log must not go on between two frames.
        for mark in reversed(marks):
            with self._disk.open_read(self._directory / mark.name) as file:
                for number in range(mark.header.index_count - 1, 0, -1):
                    phy_offset = phy_offset_of(read_entries(file, self._layout, number, 1)[0])
                    if phy_offset < self._log_begin or self._store_timestamp(phy_offset) is not None:
                        return phy_offset
        return None

    def _before(self, marks: list[FileMark], phy_offset: int) -> list[FileMark]:
        # The entries of messages before phy_offset. Those of one message may straddle files: go back file by file.
        for number in range(len(marks) - 1, -1, -1):
            mark = marks[number]
            with self._disk.open_read(self._directory / mark.name) as file:
                count = first_entry_at(file, self._layout, 1, mark.header.index_count, phy_offset)
            if count > 1:
                if count < mark.header.index_count:
                    mark = replace(mark, header=replace(mark.header, index_count=count), full=False)
                return [*marks[:number], mark]
        return []

    def _cut_last(self, mark: FileMark) -> Replayed:
        # What the last file comes to with the entries that its mark has left.
        with self._disk.open_read(self._directory / mark.name) as file:
            last = unpack_entry(read_entries(file, self._layout, mark.header.index_count - 1, 1)[0].tobytes())
            # The entry knows whole seconds only; the message, if it is still there, knows the millisecond.
            exact = self._store_timestamp(last.phy_offset)
            end = mark.header.begin_timestamp + last.time_diff * 1000 if exact is None else exact
            header = replace(mark.header, end_phy_offset=last.phy_offset, end_timestamp=end)
            return replay_file(file, replace(mark, header=header), self._layout, self._flavour)


@dataclass(frozen=True, slots=True)
class Damage:
    """``files``: names of index files to be replayed; from ``recheck_from`` on, entries are compared with the log.

    ``is_secondary``: other outputs than the key index, which are filled again from the log's begin.
    """

    files: frozenset[str] = frozenset()
    recheck_from: int | None = None
    is_secondary: bool = False


NO_DAMAGE = Damage()


class DamagedError(DisturbedError):
    """A file is not as it was written, whoever did that."""

    def __init__(self, text: str, damage: Damage) -> None:
        super().__init__(text)
        self.damage = damage


class KnownLog:
    """The evidence of one frontier held against the log that ``reader`` has listed.

    ``recheck_size``: so many bytes before the end are compared even if every point agrees, because a rewritten stretch
    may lie between two points.
    """

    def __init__(
        self, disk: Disk, reader: LogReader, frontier: Frontier, recheck_size: int, *, is_forced: bool
    ) -> None:
        self._disk, self._reader = disk, reader
        self._recheck_size, self._is_forced = recheck_size, is_forced
        begin = reader.log.min_offset or 0
        self._evidence = frontier.evidence
        self._points = tuple(point for point in frontier.evidence if point.phy_offset >= begin)
        self._agrees, self._differs = self._agreement(2 * frontier.segment_size)
        self._anchor: Evidence | None = None
        self._has_expired = begin > frontier.begin_offset

    def _agreement(self, near: int) -> tuple[Evidence | None, Evidence | None]:
        # The last point that agrees, and the first behind it that does not, looked for among those within ``near``
        # bytes of the last one. A log is cut by removing whole segments, and by writing over the rest of one: stale
        # frames behind that may still agree, but only in that segment. So if the oldest of the near points agrees (two
        # segments), older ones do. Points before the log's begin say nothing.
        agrees = None
        with FrameReader(self._disk, self._reader.log) as frames:
            recent = newest(self._points, near) if self._points else ()
            for point in recent if recent and frames.holds(recent[0]) else self._points:
                if not frames.holds(point):
                    return agrees, point
                agrees = point
        return agrees, None

    def check_same_store(self, data: Path, frontier: Frontier) -> None:
        """Raise UnsafeStoreError if nothing of what was indexed is in this log, though it should be."""
        if not self._reader.log.segments and frontier.phy_offset > frontier.begin_offset:
            what = "its commitlog is empty"
        elif self._differs is not None and self._agrees is None:
            what = f"none of the {len(self._points)} messages that were noted is where it was"
        else:
            return
        raise UnsafeStoreError(
            f"{frontier.store} is not the store that {data} was built from: {what}",
            "mount or give the right --store; if this one is right, give a fresh --data or remove the old one",
        )

    @property
    def is_same_log(self) -> bool:
        """All that was noted, and has not expired, is as it was."""
        return self._differs is None and self._agrees is not None

    @property
    def doubtful_from(self) -> int | None:
        """Behind this physical offset the log was rewritten; None if all evidence agrees."""
        if self._differs is None:
            return None
        return self._agrees.phy_offset if self._agrees is not None else 0

    def comparison(self, end: int) -> Comparison:
        """What to compare of the log before ``end``; the reader is put where it begins."""
        base = None if self._is_forced else self._newest_before(end)
        self._reader.position = base.phy_offset if base else self._reader.log.min_offset or 0
        self._anchor = base or next(iter(self._points), None)
        return Comparison(
            self._reader,
            end,
            self._first_behind,
            is_whole=self._is_forced,
            has_expired=self._has_expired,
            anchor=self._anchor.phy_offset if self._anchor else 0,
        )

    def messages_counted(self, compared: LogComparison, phy_offset: int) -> int:
        """How many messages are counted before ``phy_offset``, up to which the comparison agreed; expired ones too."""
        if compared.since is not None:
            return compared.since.messages + compared.messages - compared.before_anchor
        if self._anchor is None:
            # All of it has expired.
            before = (point.messages for point in self._evidence if point.phy_offset <= phy_offset)
            return compared.messages + max(before, default=0)
        return self._anchor.messages + compared.messages - compared.before_anchor

    def evidence_before(self, phy_offset: int) -> tuple[Evidence, ...]:
        """The points before ``phy_offset`` that are still true."""
        before = tuple(point for point in self._points if point.phy_offset < phy_offset)
        doubtful = before
        if before and self._differs is None:
            doubtful = newest(before, WATCHED_SIZE)  # a segment in the middle may be gone
        with FrameReader(self._disk, self._reader.log) as frames:
            return (*before[: len(before) - len(doubtful)], *(point for point in doubtful if frames.holds(point)))

    def _newest_before(self, end: int) -> Evidence | None:
        # The point at which to begin: a frame begins there, and what lies before it is not in doubt.
        last, limit = self._agrees, end - self._recheck_size
        if last is None:
            return None
        if self._differs is not None:
            # It was cut somewhere in the segment of the last point that agrees: that one may be stale, and others too.
            segment = self._reader.log.at(last.phy_offset)
            limit = min(limit, segment.base if segment else 0)
        sound = [point for point in self._points if point.phy_offset <= min(last.phy_offset, end)]
        return next((point for point in reversed(sound) if point.phy_offset <= limit), None)

    def _first_behind(self, phy_offset: int, store_timestamp: int) -> Evidence | None:
        behind = next((point for point in self._points if point.phy_offset > phy_offset), None)
        if behind is None or behind.store_timestamp < store_timestamp:
            # Nothing is known of it, or it is older than what stands before: left behind by a longer log.
            return None
        with FrameReader(self._disk, self._reader.log) as frames:
            return behind if frames.holds(behind) else None


#: Behind every offset.
NEVER = (1 << 63) - 1
_PAUSE = 0.002
# Bytes at the end that are no frame are given so long to become one; the daemon, which has time, gives them more.
_CORRUPT_AFTER = 0.25


def once(options: ReaderOptions) -> ReaderOptions:
    """Options for reading a log once."""
    return replace(options, corrupt_after=min(options.corrupt_after, _CORRUPT_AFTER))


class WholeLog:
    """Iterates over a log, up to ``end`` where it goes on behind that; what is read last may reach farther.

    ``unreadable`` is set when its last bytes are no frame, as after a crash of the broker. Raises CorruptDataError for
    unreadable bytes behind which the log goes on, unless the reader may skip them. ``patience``: seconds that it waits
    in all for what stands at the end of the log to be decided.
    """

    def __init__(self, reader: LogReader, end: int = NEVER, patience: float = math.inf) -> None:
        self._reader, self._end, self._patience = reader, end, patience
        self.unreadable: Corrupt | None = None

    def __iter__(self) -> Iterator[DispatchBatch | Skipped]:
        reader = self._reader
        while reader.position < self._end:
            found = reader.poll()
            if not isinstance(found, (Corrupt, NotYetWritten)):
                yield found
            elif isinstance(found, NotYetWritten) and reader.is_undecided and self._patience > 0:
                self._patience -= _PAUSE
                time.sleep(_PAUSE)
            else:
                self.unreadable = found if isinstance(found, Corrupt) else None
                break
        corrupt = self.unreadable
        if corrupt is not None and (corrupt.path is None or reader.frames_follow()):
            where = f" of {corrupt.path}" if corrupt.path else ""
            raise CorruptDataError(
                f"the log is corrupt at offset {corrupt.offset}{where}: {corrupt.reason}",
                "give --on-corrupt skip to go on at the next frame that proves itself",
            )
