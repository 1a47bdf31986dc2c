"""Composes an audit: plans it, has the tasks run by whatever runs them, and judges what they come to.

With a file to resume from, a finished task is a line of JSON in it, behind a first line that says of which audit they
are. A task counts as long as all that it was made from is as it was: its range of the log and the segments, the index
files and their headers. The range at the end of the log is always read again, as is what a line does not hold.
"""

from __future__ import annotations

import hashlib
import json
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from indexd import __version__
from indexd.audit.causes import Cause, CrashCost, StoreState, crash_cost, hole_causes, look_at_store
from indexd.audit.plan import (
    AuditPlan,
    AuditTask,
    flavour_at,
    index_folder,
    indexed_keys,
    is_live,
    layout_of,
    list_index,
    plan_audit,
    scattered,
)
from indexd.audit.queues import QueuesAudit, first_of_each, join_queues, why_not
from indexd.audit.result import MISSING, UNREADABLE, Audit, Gap, Holes, Orphans, TaskResult, Totals, largest
from indexd.audit.task import audit_task
from indexd.commitlog.decoder import DecoderOptions, Message
from indexd.commitlog.lookup import LogView
from indexd.commitlog.segments import list_segments
from indexd.compare.index import NOTED_MAX
from indexd.config import Config
from indexd.config.units import printable
from indexd.errors import BusyError, CorruptDataError, DiskError, MissingOk, UsageError
from indexd.findings import Findings
from indexd.index.format import FLAVOURS, index_key_hash
from indexd.index.reader import IndexFileReader
from indexd.output import ProgressReporter
from indexd.query.message import TIME_MAX
from indexd.recovery.open import frame_size_max
from indexd.recovery.recover import NEVER
from indexd.storage.disk import Disk, DiskFile, OutputDisk, Stamp
from indexd.storage.lock import try_exclusive
from indexd.storage.names import absolute
from indexd.storage.page_cache import take_lowest_priority

SAMPLES = 200
#: The ranges that are asked around a message: what they are called, and how long they are, ms; None has no bounds.
WIDTHS: dict[str, int | None] = {"minute": 60_000, "day": 86_400_000, "all time": None}
# What mqadmin and the dashboard ask for.
_MAX_NUM = 64
# Each chain is a read or more at random places of the disk.
_SECONDS_MAX = 60.0
#: With the number of entries.
NO_MESSAGE = "the log holds no message, and the index has {:,} entries: is the log's disk mounted?"
OnProgress = Callable[[int, int], None]
#: Tasks that are left, and what is to be called with each task and its part as they end; the parts in the same order.
RunTasks = Callable[[Sequence[AuditTask], Callable[[AuditTask, TaskResult], None]], list[TaskResult]]
# Threads that read ahead where one process does it all.
_WORKERS = 2
# A task that can be kept is so much reading, and never so little that index files are read over and over for it.
_TASK_SECONDS, _TASK_SIZE, _FILES_PER_TASK = 120, 16 << 30, 8


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """``samples`` messages are asked for, none for 0; ``queues``: the ConsumeQueues, too; ``kept``: the resume file.

    ``yields``: beside a broker that runs this process takes the lowest priority, for the rest of its life.
    """

    samples: int = SAMPLES
    queues: bool = False
    kept: Path | None = None
    yields: bool = False


@dataclass(slots=True)
class Answers:
    """Of ``drawn`` messages ``asked`` were asked for; ``shares``, a row of ``--json`` a width, say what was not given:
    ``missed``, or ``cutOff`` for want of room.
    """

    drawn: int
    asked: int = 0
    shares: list[dict[str, Any]] = field(
        default_factory=lambda: [
            {"kind": "answers", "width": width, "rangeMs": span, "queries": 0, "missed": 0, "cutOff": 0}
            for width, span in WIDTHS.items()
        ]
    )

    def rows(self) -> list[dict[str, Any]]:
        """Lines of ``--json``: kind ``answers`` a width, and kind ``samples`` once."""
        return [*self.shares, {"kind": "samples", "drawn": self.drawn, "asked": self.asked}]

    def lines(self) -> list[str]:
        """For people: a line a width."""
        return [
            f"queries in time ranges of {share['width']}: the broker's own query misses {share['missed']:,} of "
            f"{share['queries']:,} messages, {share['cutOff']:,} for want of room"
            for share in self.shares
        ]


@dataclass(frozen=True, slots=True)
class AuditReport:
    """``causes`` belong to ``audit.holes`` one by one; ``bytes_read`` of log and files in ``seconds``.

    ``resumed_tasks`` of the plan's tasks were taken over from an earlier run.
    """

    store: str
    plan: AuditPlan
    audit: Audit
    state: StoreState
    causes: tuple[Cause, ...]
    crash: CrashCost
    answers: Answers | None
    queues: QueuesAudit | None
    bytes_read: int
    seconds: float
    resumed_tasks: int = 0

    @property
    def is_sound(self) -> bool:
        """Every key is findable, all of the log was read and nothing is wrong; a crash's cost is no finding."""
        return self.audit.is_sound and not self.audit.gaps and (self.queues is None or self.queues.is_sound)

    @property
    def entries_without_log(self) -> int:
        """How many entries the index has beside a log without one message: its disk is perhaps not mounted. Else 0."""
        if self.audit.messages or self.audit.expired:
            return 0
        return sum(max(file.entries, 0) for file in self.plan.files if file.is_readable)

    def rows(self) -> Iterator[dict[str, Any]]:
        """The lines of ``--json``: files, holes, findings, queues, answers, the crash, and the summary last."""
        causes = iter(self.causes)
        for row in self.audit.rows():
            if row["kind"] == "hole":
                cause = next(causes)
                row |= {"cause": cause.what, "evidence": list(cause.evidence)}
            if row["kind"] == "summary":
                yield from self.queues.rows() if self.queues is not None else ()
                yield from self.answers.rows() if self.answers is not None else ()
                yield self.crash.to_json()
                row |= {
                    "store": self.store,
                    "broker": self.state.lock.how,
                    "brokerAlive": self.state.lock.alive,
                    "brokerPid": self.state.lock.pid,
                    "flavourGiven": self.plan.is_flavour_given,
                    "resumedTasks": self.resumed_tasks,
                    "bytesRead": self.bytes_read,
                    "seconds": round(self.seconds, 3),
                    "sound": self.is_sound,
                }
            yield row


def audit_here(config: Config, disk: Disk, options: AuditOptions, on_progress: OnProgress) -> AuditReport:
    """Every task in this process, one after the other; ``on_progress`` gets (bytes done, bytes in all)."""

    def run(tasks: Sequence[AuditTask], ended: Callable[[AuditTask, TaskResult], None]) -> list[TaskResult]:
        parts, on_bytes = list[TaskResult](), ProgressReporter(on_progress, sum(task.size for task in tasks))
        for task in tasks:
            parts.append(audit_task(task, disk, config, workers=_WORKERS, on_bytes=on_bytes))
            ended(task, parts[-1])
        return parts

    rate = config.limits.read_rate_max
    if options.yields and is_live(index_folder(config).parent):
        take_lowest_priority()
    size = max(rate * _TASK_SECONDS if rate else _TASK_SIZE, _FILES_PER_TASK * layout_of(config).file_size)
    # What is not kept need not be cut: each piece of a stretch reads its index file again.
    make_plan = partial(plan_audit, disk, config, size=size if options.kept else None)
    return run_audit(config, disk, options, make_plan, run)


def run_audit(
    config: Config, disk: Disk, options: AuditOptions, make_plan: Callable[[], AuditPlan], run: RunTasks
) -> AuditReport:
    """Plan with ``make_plan``, have the tasks run by ``run``, and judge. Raises what planning and tasks raise.

    KeyboardInterrupt says where what is finished is kept, if it is.
    """
    began, kept, scattered_disk = time.monotonic(), None, scattered(disk)
    with ExitStack() as stack:
        if options.kept is not None:
            asked = {"samples": options.samples, "queues": options.queues}
            kept = stack.enter_context(resume_file(disk, options.kept, config, asked))
        state, plan = look_at_store(scattered_disk, config), make_plan()
        queues = QueuesAudit(why_not(disk, config)) if options.queues else None
        with_queues = queues is not None and queues.why_not is None
        # Bytes of the log between two messages that are noted, 0 for none; a log that grows keeps it.
        most = options.samples
        stride = 1 << max(((plan.written - plan.log_begin) // most).bit_length() - 1, 0) if most else 0
        plan.tasks = [replace(task, stride=stride, queues=with_queues) for task in plan.tasks]
        found = [None] * len(plan.tasks) if kept is None else kept.begin(plan)
        left = [task for task, part in zip(plan.tasks, found, strict=True) if part is None]
        fresh = iter(run(left, kept.keep if kept is not None else lambda _task, _part: None))
        parts = [part if part is not None else next(fresh) for part in found]
    audit = join(plan, parts)
    if with_queues:
        seen = [part.queues for part in parts if part.queues is not None]
        queues = join_queues(disk, config, audit, seen, is_live=plan.is_live)
    return AuditReport(
        store=str(config.store.store),
        plan=plan,
        audit=audit,
        state=state,
        causes=hole_causes(audit, state, config),
        crash=crash_cost(scattered_disk, config, plan, state),
        answers=ask(scattered_disk, config, plan, parts, options.samples) if options.samples else None,
        queues=queues,
        bytes_read=sum(task.size for task in left),
        seconds=time.monotonic() - began,
        resumed_tasks=len(parts) - len(left),
    )


def join(plan: AuditPlan, parts: Sequence[TaskResult]) -> Audit:
    """Put the parts together; ``parts[i]`` is what ``plan.tasks[i]`` came to."""
    holes, gaps, expired = Holes(), _joined(part.gaps for part in parts), _joined(part.expired for part in parts)
    findings = Findings()
    findings.merge(plan.findings)
    for part in parts:
        holes.merge(part.holes)
        findings.merge(part.findings)
    for gap in gaps:
        text = f"up to {gap.end}: {gap.reason}; {gap.entries:,} entries name messages there"
        findings.add("commitlog", gap.begin, MISSING if gap.is_missing else UNREADABLE, text)
    found, kept = holes.found, largest(holes.found)
    # The first place where a task met the end, and behind which none met a message.
    last = max((number for number, part in enumerate(parts) if part.messages), default=0)
    ends = [(part.log_end, part.unreadable) for part in parts[last:] if part.log_end is not None]
    log_end, unreadable = ends[0] if ends else (plan.log_end, None)
    is_begin_gone = expired and expired[0].begin <= plan.log_begin
    log_begin = min(expired[0].end if is_begin_gone else plan.log_begin, log_end)
    return Audit(
        **{one.name: sum(getattr(part, one.name) for part in parts) for one in fields(Totals)},
        log_begin=log_begin,
        log_end=log_end,
        log_begin_now=max([plan.log_begin, *(part.log_begin or 0 for part in parts)]),
        unreadable=unreadable,
        holes=tuple(hole for hole in found if hole in kept),
        hole_count=len(found) + holes.dropped,
        tail=holes.runs[-1] if holes.runs else None,
        gaps=tuple(gaps),
        expired=tuple(gap for gap in expired if log_begin < gap.end <= log_end),
        files=tuple(sorted((file for part in parts for file in part.files), key=lambda file: file.name)),
        eras=plan.eras,
        findings=tuple(first_of_each(findings.kept, NOTED_MAX, by_file=True)),
        counts=dict(sorted((+findings.counts).items())),
        orphans=_orphans(parts),
    )


def _joined(parts: Iterable[list[Gap]]) -> list[Gap]:
    # Gaps in log order; those that a cut between two tasks has parted are put together again.
    found: list[Gap] = []
    for gap in (gap for gaps in parts for gap in gaps):
        last = found[-1] if found else None
        if last is not None and (last.end, last.reason) == (gap.begin, gap.reason):
            found[-1] = Gap(last.begin, gap.end, gap.reason, last.entries + gap.entries)
        else:
            found.append(gap)
    return found


def _orphans(parts: Sequence[TaskResult]) -> tuple[Orphans, ...]:
    found: dict[str, Orphans] = {}
    for one in (one for part in parts for one in part.orphans):
        other = found.get(one.name, replace(one, count=0))
        found[one.name] = Orphans(one.name, min(one.low, other.low), max(one.high, other.high), one.count + other.count)
    return tuple(found[name] for name in sorted(found))


_PART = TypeAdapter(TaskResult)


@contextmanager
def resume_file(disk: Disk, path: Path, config: Config, asked: dict[str, Any]) -> Iterator[ResumeFile]:
    """The file at ``path``, made if there is none, and locked; ``asked`` are the options of this audit.

    Raises UsageError for a file that does not begin as one of this audit does, BusyError while another audit has it.
    """
    path, hint = absolute(path), "give another FILE to --resume, or remove it"
    try:
        opened = OutputDisk().open_write(path, create=not path.exists())
    except DiskError as error:
        raise UsageError(str(error), hint) from error
    with opened:
        if not try_exclusive(opened.fileno()):
            raise BusyError(f"{path} is in use by another audit", "wait for its end, or give another FILE to --resume")
        try:
            yield ResumeFile(disk, opened, config, asked)
        except KeyboardInterrupt:
            text = f"{printable(str(path))} keeps what is finished: the same command goes on with the rest"
            raise KeyboardInterrupt(f"interrupted; {text}") from None


class ResumeFile:
    """What finished tasks of an earlier run came to. Raises UsageError as ``resume_file`` does."""

    def __init__(self, disk: Disk, file: DiskFile, config: Config, asked: dict[str, Any]) -> None:
        self._disk, self._store, self._file = disk, config.store, file
        of = {
            "store": str(config.store.store),
            "commitLog": [str(path) for path in config.store.commit_log_directories],
            "segmentSize": config.store.segment_size,
            "hashSlotNum": config.index.hash_slot_num,
            "indexNum": config.index.index_num,
            "maxMessageSize": config.reader.max_message_size,
            "verifyCrc": config.reader.verify_crc,
            "delayLevels": list(config.store.delay_levels_ms),
            "consumeQueueFileSize": config.store.consume_queue_file_size,
        }
        head = json.dumps({"format": "indexd audit", "indexd": __version__, "of": of | asked}).encode() + b"\n"
        self._parts: dict[str, Any] = {}
        self._digests: dict[int, str] = {}
        data = file.pread(file.size(), 0)
        if data[: len(head)] != head[: len(data)]:
            text = f"{file.path} is not of this audit: of another store, other options or version"
            raise UsageError(text, "give another FILE to --resume, or remove it")
        # A last line that is cut off was being written by a process that was killed.
        whole = data[: data.rfind(b"\n") + 1]
        file.truncate(len(whole))
        if not whole:
            self._append(head)
        for line in whole.splitlines()[1:]:
            with suppress(ValueError, KeyError, TypeError):
                row = json.loads(line)
                self._parts[row["task"]] = row["part"]

    def begin(self, plan: AuditPlan) -> list[TaskResult | None]:
        """What each task came to in an earlier run, if that still holds."""
        found, stamps = list[TaskResult | None](), self._stamps(plan.folder)
        for task in plan.tasks:
            digest = self._digests[id(task)] = self._digest(task, stamps)
            try:
                found.append(_PART.validate_python(self._parts[digest]))
            except (KeyError, ValidationError):
                found.append(None)
        return found

    def keep(self, task: AuditTask, part: TaskResult) -> None:
        """Write it down, durably, unless what it was made from has changed meanwhile."""
        digest = self._digests[id(task)]
        if digest and digest == self._digest(task, self._stamps(task.folder)):
            row = {"task": digest, "part": _PART.dump_python(part, mode="json")}
            self._append(json.dumps(row).encode() + b"\n")

    def _append(self, data: bytes) -> None:
        self._file.pwrite(data, self._file.size())
        self._file.fsync()

    def _stamps(self, folder: Path) -> dict[Path, Stamp]:
        # The files that tasks are made from, as they stand now.
        found = dict[Path, Stamp]()
        for directory in (*self._store.commit_log_directories, folder):
            with suppress(DiskError):
                found |= {directory / name: stamp for name, stamp in self._disk.stamps(directory).items()}
        return found

    def _digest(self, task: AuditTask, stamps: dict[Path, Stamp]) -> str:
        # Of all that its part depends on; "" for one that is always done again, or whose files are gone.
        log = list_segments(self._disk, self._store.commit_log_directories, self._store.segment_size)
        segments = [one for one in log.segments if one.base < task.end and one.end > task.aligned]
        paths = [task.folder / file.name for file in task.files]
        paths += [segment.path for segment in segments] if task.begin < task.end else []
        if task.end == NEVER or not all(path in stamps for path in paths):
            return ""
        # How many entries of a file have expired is what its owner counts; what other files there are is nothing to it.
        is_expiring = any(file.begin < task.log_begin for file in task.files if file.name in task.owned)
        what = replace(task, newest="", is_live=False, log_end=0, log_begin=task.log_begin if is_expiring else 0)
        inputs = [repr(what), *((str(path), stamps[path]) for path in paths)]
        return hashlib.sha256(repr(inputs).encode()).hexdigest()


def ask(disk: Disk, config: Config, plan: AuditPlan, parts: Sequence[TaskResult], count: int) -> Answers:
    """Ask for at most ``count`` of the messages that the parts have noted, for a minute at most. Raises DiskError.

    Each by one of its keys, in ranges of time around it: whether IndexService.queryOffset (spec rocketmq-store 3.6,
    3.7, 4.5) gives it.
    """
    store, stride = config.store, max(plan.tasks[0].stride, 1)
    # Where two tasks meet, both have noted one.
    noted = [offset for part in parts for offset in part.samples]
    offsets = sorted({offset // stride: offset for offset in reversed(noted)}.values())
    offsets = [offsets[at * len(offsets) // count] for at in range(count)] if len(offsets) > count else offsets
    options = DecoderOptions(frame_size_max=frame_size_max(config), check_crc=False)
    answers, deadline = Answers(len(offsets)), time.monotonic() + _SECONDS_MAX
    with ExitStack() as stack:
        lookup = stack.enter_context(LogView(disk, store.commit_log_directories, store.segment_size, options))
        files = []
        for name in reversed(list_index(disk, plan.folder)):
            with suppress(CorruptDataError), MissingOk():
                opened = stack.enter_context(disk.open_read(plan.folder / name))
                files.append(IndexFileReader(opened, layout_of(config)))
        for turn, offset in enumerate(offsets):
            message = lookup.at(offset)
            if not isinstance(message, Message) or time.monotonic() > deadline:
                continue
            keys = indexed_keys(message, FLAVOURS[flavour_at(plan.eras, offset)])
            if not keys:  # another message stands there now
                continue
            index_type, key = keys[turn % len(keys)]
            answers.asked += 1
            for share in answers.shares:
                width = share["rangeMs"] or TIME_MAX
                begin = max(message.store_timestamp - width // 2, 0)
                found = select(files, index_key_hash(message.topic, key, index_type), begin, begin + width - 1)
                share["queries"] += 1
                if offset not in found:
                    share["missed" if len(found) < _MAX_NUM else "cutOff"] += 1
    return answers


def select(files: Sequence[IndexFileReader], key_hash: int, begin: int, end: int) -> list[int]:
    """IndexService.queryOffset over the files, newest first; a walk into what is no entry ends there, as in Java."""
    found: list[int] = []
    for file in files:
        header = file.header()
        if header.is_time_matched(begin, end):
            with suppress(CorruptDataError, struct.error):
                found += file.select_phy_offset(key_hash, _MAX_NUM - len(found), begin, end)
        if header.begin_timestamp < begin or len(found) >= _MAX_NUM:
            break
    return found
