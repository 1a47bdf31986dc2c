"""Runs one task of an audit: decodes a stretch of the log once and compares it with the files that point into it.

Each file is held against itself before that: its entries are put again into slots as putKey does it. Where every link
and every slot is as that leaves it, all entries are reachable. Else the chains are walked as selectPhyOffset walks
them, which takes some 20 bytes of memory an entry. Only what the header counts is judged: a broker may be writing.

It reads at a bounded rate, gives back what it brings into the page cache, and depends on nothing but its arguments: a
task may run here or on Spark. A file in log order, as brokers write them, is read window by window; one whose entries
stand elsewhere has those of the stretch sorted first: some 56 bytes an entry of them in memory meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from indexd.audit.plan import AuditTask, LogProbe, layout_of
from indexd.audit.queues import QueueMatcher
from indexd.audit.result import BrokerFile, Gap, Orphans, TaskResult
from indexd.commitlog.batcher import DispatchBatch
from indexd.commitlog.batcher import load_kernels as load_decoder
from indexd.commitlog.reader import Skipped
from indexd.compare.index import BEHIND_LOG, NO_KEYS, ComparedFile, Keys, Match, compare_files, keys_of
from indexd.config import Config
from indexd.errors import DiskError, MissingOk
from indexd.findings import Findings
from indexd.index.check_kernel import PHY_NEGATIVE, PHY_ORDER, PHY_OUTSIDE, walk_chains
from indexd.index.entries import ENTRIES_PER_READ, WalkedEntries, first_entry_at, read_entries, walk_entries
from indexd.index.file import check_slots, note_entries
from indexd.index.format import FLAVOURS, HEADER_SIZE, FileMark, IndexHeader, IndexLayout
from indexd.output import Condition
from indexd.recovery.open import LogRange, decode_rules
from indexd.recovery.recover import NEVER
from indexd.storage.disk import Disk, DiskFile
from indexd.storage.page_cache import ReadPages

# A burst that is not paid for.
_BURST_SECONDS = 0.1


# A broker writes entry, slot and header one after the other: what is seen in between is gone a moment later.
_LOOKS = 3
_LOOK_PAUSE = 0.05


class RateLimiter:
    """So many bytes a second at most, over all threads that ask; no limit for 0."""

    def __init__(
        self, rate: int, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], object] = time.sleep
    ) -> None:
        self._rate, self._clock, self._sleep = rate, clock, sleep
        self._lock = threading.Lock()
        # When all that was asked for until now would have been read at the allowed rate.
        self._paid_at = clock()

    def wait(self, size: int) -> None:
        """Wait until so many bytes more may be read."""
        if not self._rate:
            return
        with self._lock:
            now = self._clock()
            self._paid_at = max(self._paid_at, now - _BURST_SECONDS) + size / self._rate
            left = self._paid_at - now
        if left > 0:
            self._sleep(left)


def audit_task(
    task: AuditTask, disk: Disk, config: Config, *, workers: int = 0, on_bytes: Callable[[int], None] = lambda _: None
) -> TaskResult:
    """Decode the log of a task and compare; ``config`` is the one that the plan was made with.

    ``workers`` threads read ahead; ``on_bytes`` is told how many bytes more have been read. Raises what reading raises.
    With workers, the files' own checks run beside the comparison, which takes them for sound meanwhile: it is made
    again for the few that are not.
    """
    layout, wait = layout_of(config), RateLimiter(config.limits.read_rate_max).wait
    with ExitStack() as stack:
        for file in task.files:
            # What reading a full file brings into the page cache goes at the end; the newest files are the broker's.
            if config.limits.drop_cache and file.is_full and file.name != task.newest:
                with suppress(DiskError):
                    opened = stack.enter_context(disk.open_read(task.folder / file.name))
                    stack.callback(ReadPages(opened, layout.file_size).give_back, layout.file_size, is_last=True)
        pool, part = stack.enter_context(ThreadPoolExecutor(1, "check")), None
        pending = [
            pool.submit(check_file, disk, task.folder, layout, file, task.log_begin, wait) for file in task.files
        ]
        if workers:
            part = _compare(task, disk, config, [FileCheck() for _ in pending], wait, workers, on_bytes)
        checks = [one.result() for one in pending]
        if part is None or not all(check is not None and check.is_sound for check in checks):
            told = (lambda _: None) if workers else on_bytes
            part = _compare(task, disk, config, checks, wait, workers, told)
    for file, check in zip(task.files, checks, strict=True):
        if check is not None and check.seen is not None and file.name in task.owned:
            part.files.append(check.seen)
            part.expired_entries += check.seen.expired
            part.findings.merge(check.findings)
            on_bytes(layout.file_size)
    return part


def _compare(
    task: AuditTask,
    disk: Disk,
    config: Config,
    checks: list[FileCheck] | list[FileCheck | None],
    wait: Callable[[int], None],
    workers: int,
    on_bytes: Callable[[int], None],
) -> TaskResult:
    part, files = TaskResult(), list[ComparedFile]()
    for broker_file, check in zip(task.files, checks, strict=True):
        if check is not None:
            header, path = replace(broker_file.header, index_count=broker_file.count), task.folder / broker_file.name
            file = ComparedFile(disk, path, layout_of(config), header, wait, findable=check.findable)
            begin, end = max(task.begin, broker_file.begin), min(task.end, broker_file.end + 1)
            file.select(begin, end, is_ordered=check.is_ordered)
            files.append(file)
    log = LogRange(task.begin, task.end, task.aligned, task.flavour, task.queues, task.log_end)
    queues, done = QueueMatcher(disk, config, wait) if task.queues else None, task.begin
    for item in log.read(disk, config, workers):
        if isinstance(item, DispatchBatch):
            keys = keys_of(item, FLAVOURS[task.flavour].skip_mask)
            _count(part, task, keys, compare_files(keys, int(keys.phy_offset[-1]) + 1, files))
            if queues is not None:
                queues.take(item)
        else:
            _skip(part, files, item)
        wait(log.position - done)
        on_bytes(log.position - done)
        done = log.position
    part.log_begin, part.log_end = log.log_begin, log.log_end
    part.unreadable = log.unreadable.reason if log.unreadable is not None else None
    for file in files:
        compare_files(NO_KEYS, task.end if log.log_end is None else log.log_end, [file])
        behind = file.take_below(NEVER)
        if not task.is_live:  # else the broker has written on
            file.note(behind, BEHIND_LOG, behind.number, behind.number)
            file.compared += len(behind.number)
        file.judge_times(is_growing=task.is_live and file.name == f"index/{task.newest}")
        part.findings.merge(file.findings)
        part.entries += file.compared
        if file.strays:
            part.orphans.append(Orphans(file.name.removeprefix("index/"), file.low, file.high, file.strays))
    if queues is not None:
        part.queues = queues.finish()
    part.holes.prune()
    probe = LogProbe(disk, config)
    part.holes.runs = [
        None if hole is None else replace(hole, end=probe.frame_end(hole.last) or hole.last) for hole in part.holes.runs
    ]
    return part


def _count(part: TaskResult, task: AuditTask, keys: Keys, match: Match) -> None:
    messages = len(keys.phy_offset)
    counts = np.bincount(keys.row, minlength=messages)
    lost = np.bincount(keys.row[match.is_lost], minlength=messages)
    # Keys that have an entry which no walk reaches, and no other one.
    unreachable = np.bincount(keys.row[match.is_lost & ~match.is_missing], minlength=messages)
    keyed = np.flatnonzero(counts)
    part.messages += messages
    part.keyed_messages += len(keyed)
    part.keys += len(keys.row)
    part.missing_keys += int(lost.sum())
    part.unreachable_keys += int(unreachable.sum())
    offsets = keys.phy_offset[keyed]
    part.holes.add_rows(offsets, keys.timestamp[keyed], lost[keyed], unreachable[keyed])
    if task.stride and len(offsets):
        # The first message with keys behind each multiple of the stride, and behind the begin of the task.
        before = part.samples[-1] // task.stride if part.samples else -1
        part.samples += offsets[np.diff(offsets // task.stride, prepend=before) > 0].tolist()


def _skip(part: TaskResult, files: list[ComparedFile], skipped: Skipped) -> None:
    # Entries that point there stand for themselves; those before it have had their chance.
    compare_files(NO_KEYS, skipped.begin, files)
    passed = sum(len(file.take_below(skipped.end).number) for file in files)
    gap = Gap(skipped.begin, skipped.end, skipped.reason, passed)
    if skipped.is_expired:
        part.expired_entries += passed
        part.expired.append(gap)
    else:
        part.left_out_entries += passed
        part.gaps.append(gap)


@dataclass(frozen=True, slots=True)
class FileCheck:
    """What a file came to by itself.

    ``findable`` has a byte an entry number, 0 where no walk reaches; None when all are reached. ``is_ordered``: offsets
    never fall and all lie where the file points.
    """

    findable: NDArray[np.uint8] | None = None
    is_ordered: bool = True
    seen: BrokerFile | None = None
    findings: Findings = field(default_factory=Findings)

    @property
    def is_sound(self) -> bool:
        """Whether entries may be taken as they come: in the order of the log, and all of them reached by walks."""
        return self.is_ordered and self.findable is None


def check_file(
    disk: Disk,
    folder: Path,
    layout: IndexLayout,
    file: BrokerFile,
    log_begin: int,
    wait: Callable[[int], None] = lambda _: None,
) -> FileCheck | None:
    """Read a file from front to back and judge it; None if it has expired. Raises DiskError.

    ``wait`` is called with the bytes that are read next.
    """
    with MissingOk(), disk.open_read(folder / file.name) as opened:
        header = replace(file.header, begin_phy_offset=file.begin, end_phy_offset=file.end, index_count=file.count)
        mark = FileMark(file.name, header, full=file.is_full)
        # Where the header counts entries that were never written, slots that name them are wrong.
        is_growing = not file.is_full and file.header.index_count <= file.count
        condition = Condition.GROWING if is_growing else Condition.AT_REST
        walked = walk_entries(opened, layout, header, FLAVOURS["5.4"], wait)
        disorder = int(walked.counts[[PHY_ORDER, PHY_OUTSIDE, PHY_NEGATIVE]].sum())
        # An entry's order says nothing about a broker's file: it may hold the same messages twice.
        walked.counts[PHY_ORDER] = 0
        walked.found = walked.found[walked.found[:, 1] != PHY_ORDER]
        broken, findings = int(walked.counts.sum()), Findings()
        note_entries(mark, layout, walked, findings)
        wait(walked.slots.nbytes)
        for _ in range(_LOOKS):
            in_slots = Findings()
            wrong, values = check_slots(opened, file.path, file.count, layout, condition, walked, in_slots)
            if not (is_growing and len(wrong)):
                break
            time.sleep(_LOOK_PAUSE)
        findings.merge(in_slots)
        _check_header(opened, file, walked, findings)
        findable = None
        if len(findings) and (broken or len(wrong)):
            slots = walked.slots.byteswap().view(np.int32)
            slots[wrong] = values
            findable = _reach(opened, file.count, layout, slots)
        seen = replace(
            file,
            used_slots=walked.used_slot_count,
            expired=first_entry_at(opened, layout, 1, file.count, log_begin) - 1 if file.begin < log_begin else 0,
            unreachable=0 if findable is None else int(np.count_nonzero(findable[1:] == 0)),
            first_time_difference=walked.first.time_diff if walked.first is not None else 0,
        )
        return FileCheck(findable, disorder == 0, seen, findings)
    return None


def _check_header(opened: DiskFile, file: BrokerFile, walked: WalkedEntries, findings: Findings) -> None:
    header, first, last, used = file.header, walked.first, walked.last, walked.used_slot_count
    is_unchanged = IndexHeader.unpack(opened.pread(HEADER_SIZE, 0)) == header
    rows = [
        (
            header.index_count > file.count or (header.index_count != file.count and is_unchanged),
            36,
            "index-count",
            f"index count {header.index_count}, but the last entry that was put is {file.count - 1}",
        )
    ]
    if first is not None and last is not None:
        rows += [
            (
                header.begin_phy_offset != first.phy_offset,
                16,
                "begin-phy-offset",
                f"begin phy offset {header.begin_phy_offset}, but the entries say {first.phy_offset}",
            ),
            # A repair leaves one more, so that a broker that starts does not index its last message again.
            (
                is_unchanged and header.end_phy_offset not in (last.phy_offset, last.phy_offset + 1),
                24,
                "end-phy-offset",
                f"end phy offset {header.end_phy_offset}, but the entries say {last.phy_offset}",
            ),
            # Counted once a slot, before 4.7.1 at every put, and in between where a broker was upgraded meanwhile.
            (
                is_unchanged and not used <= header.used_slot_count <= file.entries,
                32,
                "used-slot-count",
                f"used slot count {header.used_slot_count}, but {file.entries} entries use {used} slots",
            ),
        ]
    for is_wrong, position, name, text in rows:
        if is_wrong:
            findings.add(file.path, position, f"header-{name}", text)


def _reach(opened: DiskFile, count: int, layout: IndexLayout, slots: NDArray[np.int32]) -> NDArray[np.uint8]:
    # Which entries walks from the slots come to.
    columns = np.zeros((3, count), dtype=np.uint32)  # key hash, previous entry and time difference, by number
    for number in range(1, count, ENTRIES_PER_READ):
        entries = read_entries(opened, layout, number, min(count - number, ENTRIES_PER_READ))
        columns[:, number : number + len(entries)] = entries[:, [0, 4, 3]].T.byteswap()
    previous, differences = columns[1].view(np.int32), columns[2].view(np.int32)
    stamps, findable = np.zeros(count, dtype=np.uint32), np.zeros(count, dtype=np.uint8)
    walk_chains(slots, columns[0], previous, differences, stamps, findable)
    return findable


def load_kernels(config: Config) -> None:
    """Compile the decoder, or load it from where it is kept: seconds, or half a second. The rest comes when needed."""
    load_decoder(decode_rules(config))
