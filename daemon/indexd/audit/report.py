"""Composes an audit: plans it, has the tasks run by whatever runs them, and judges what they come to.

With a file to resume from, a finished task is a line of JSON in it, behind a first line that says of which audit they
are. A task counts as long as all that it was made from is as it was: its range of the log and the segments, the index
files and their headers. The range at the end of the log is always read again, as is what a line does not hold.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from indexd import __version__
from indexd.audit.causes import Cause, CrashCost, StoreState, crash_cost, hole_causes, look_at_store
from indexd.audit.plan import NEVER, AuditPlan, AuditTask, is_live, plan_audit, scattered
from indexd.audit.queues import QueuesAudit, join_queues, why_not
from indexd.audit.result import HOLES_MAX, MISSING, UNREADABLE, Audit, Gap, Holes, Orphans, Part, Totals
from indexd.audit.samples import Answers, ask, stride_for
from indexd.audit.task import audit_task
from indexd.commitlog.segments import list_segments
from indexd.compare.index import NOTED_MAX
from indexd.config import Config
from indexd.config.units import printable, show_size
from indexd.errors import BusyError, DiskError, UsageError
from indexd.findings import Finding, Findings
from indexd.storage.disk import Disk, OutputDisk, Stamp
from indexd.storage.lock import try_exclusive
from indexd.storage.names import absolute
from indexd.storage.page_cache import take_lowest_priority

SAMPLES = 200
#: With the number of entries.
NO_MESSAGE = "the log holds no message, and the index has {:,} entries: is the log's disk mounted?"
OnProgress = Callable[[int, int], None]
#: Tasks that are left, and what is to be called with each task and its part as they end; the parts in the same order.
RunTasks = Callable[[Sequence[AuditTask], Callable[[AuditTask, Part], None]], list[Part]]
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


@dataclass(frozen=True, slots=True)
class AuditReport:
    """``causes`` belong to ``audit.holes`` one by one; ``bytes_read`` of log and files in ``seconds``.

    ``resumed_tasks`` of the plan's tasks were taken over from an earlier run. ``manner`` says how gently it was read.
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
    manner: tuple[str, ...] = ()

    @property
    def is_sound(self) -> bool:
        """Every key is findable, all of the log was read and nothing is wrong; a crash's cost is no finding."""
        is_whole = self.audit.is_sound and not self.audit.gaps
        return is_whole and (self.queues is None or self.queues.is_sound)

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
                lock = self.state.lock
                row |= {"store": self.store, "broker": lock.how, "brokerAlive": lock.alive, "brokerPid": lock.pid}
                row |= {"resumedTasks": self.resumed_tasks, "manner": list(self.manner)}
                row |= {"bytesRead": self.bytes_read, "seconds": round(self.seconds, 3), "sound": self.is_sound}
            yield row


def audit_here(config: Config, disk: Disk, options: AuditOptions, on_progress: OnProgress) -> AuditReport:
    """Every task in this process, one after the other; ``on_progress`` gets (bytes done, bytes in all)."""
    done = total = 0

    def on_bytes(more: int) -> None:
        nonlocal done
        done += more
        on_progress(done, total)

    def run(tasks: Sequence[AuditTask], ended: Callable[[AuditTask, Part], None]) -> list[Part]:
        nonlocal total
        total = sum(task.size for task in tasks)
        parts = []
        for task in tasks:
            parts.append(audit_task(task, disk, config, workers=_WORKERS, on_bytes=on_bytes))
            ended(task, parts[-1])
        return parts

    store, manner, rate = config.store.store, [], config.limits.read_rate_max
    if options.yields and store is not None and is_live(store):
        take_lowest_priority()
        manner.append("at the lowest priority of CPU and disk")
    if rate:
        manner.append(f"at most {show_size(rate)} a second")
    file_size = 4 * config.index.hash_slot_num + 20 * config.index.index_num
    size = max(rate * _TASK_SECONDS if rate else _TASK_SIZE, _FILES_PER_TASK * file_size)
    # What is not kept need not be cut: each piece of a stretch reads its index file again.
    return run_audit(
        config, disk, options, lambda: plan_audit(disk, config, size=size if options.kept else None), run, manner
    )


def run_audit(
    config: Config,
    disk: Disk,
    options: AuditOptions,
    make_plan: Callable[[], AuditPlan],
    run: RunTasks,
    manner: Sequence[str] = (),
) -> AuditReport:
    """Plan with ``make_plan``, have the tasks run by ``run``, and judge. Raises what planning and tasks raise.

    KeyboardInterrupt says what is kept, if anything is.
    """
    began, kept = time.monotonic(), None
    if options.kept is not None:
        kept = ResumeFile(disk, options.kept, config, {"samples": options.samples, "queues": options.queues})
    try:
        scattered_disk = scattered(disk)
        state = look_at_store(scattered_disk, config)
        plan = make_plan()
        queues = QueuesAudit(why_not(disk, config)) if options.queues else None
        with_queues = queues is not None and queues.why_not is None
        stride = stride_for(plan.written - plan.log_begin, options.samples)
        plan.tasks = [replace(task, stride=stride, queues=with_queues) for task in plan.tasks]
        found = [None] * len(plan.tasks) if kept is None else kept.begin(plan)
        left = [task for task, part in zip(plan.tasks, found, strict=True) if part is None]
        fresh = iter(run(left, kept.keep if kept is not None else lambda _task, _part: None))
        parts = [part if part is not None else next(fresh) for part in found]
    except KeyboardInterrupt:
        raise KeyboardInterrupt(*(kept.words() if kept is not None else ())) from None
    finally:
        if kept is not None:
            kept.close()
    audit = join(plan, parts)
    if with_queues:
        bounds, gaps = (audit.log_begin_now, audit.log_end), [(gap.begin, gap.end) for gap in audit.gaps]
        seen = [part.queues for part in parts if part.queues is not None]
        queues = join_queues(disk, config, bounds, gaps, seen, is_live=plan.is_live)
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
        manner=tuple(manner),
    )


def join(plan: AuditPlan, parts: Sequence[Part]) -> Audit:
    """Put the parts together; ``parts[i]`` is what ``plan.tasks[i]`` came to."""
    holes, gaps, expired = Holes(), _joined(part.gaps for part in parts), _joined(part.expired for part in parts)
    findings = Findings()
    findings.merge(plan.findings)
    for part in parts:
        holes.merge(part.holes)
        findings.merge(part.findings)
    for gap in gaps:
        entries = f"{gap.entries:,} {'entry names' if gap.entries == 1 else 'entries name'} messages there"
        text = f"up to {gap.end}: {gap.reason}; {entries}"
        findings.add("commitlog", gap.begin, MISSING if gap.is_missing else UNREADABLE, text)
    found = holes.found
    tail = found[-1] if holes.runs and holes.runs[-1] is not None else None
    kept = {*sorted(found, key=lambda hole: (-hole.keys, -hole.messages, hole.begin))[:HOLES_MAX]}
    log_begin, log_end, unreadable = _log_bounds(plan, parts)
    return Audit(
        **{one.name: sum(getattr(part, one.name) for part in parts) for one in fields(Totals)},
        log_begin=log_begin,
        log_end=log_end,
        log_begin_now=max([plan.log_begin, *(part.log_begin or 0 for part in parts)]),
        unreadable=unreadable,
        holes=tuple(hole for hole in found if hole in kept),
        hole_count=len(found) + holes.dropped,
        tail=tail,
        gaps=tuple(gaps),
        expired=tuple(gap for gap in expired if log_begin < gap.end <= log_end),
        files=tuple(sorted((file for part in parts for file in part.files), key=lambda file: file.name)),
        eras=plan.eras,
        is_flavour_given=plan.is_flavour_given,
        findings=_first(findings),
        counts=dict(sorted((+findings.counts).items())),
        orphans=_orphans(parts),
    )


def _first(findings: Findings) -> tuple[Finding, ...]:
    # Of each file and kind the first, however the log was cut.
    rooms, found = Counter[tuple[str, str]](), []
    for one in sorted(findings.kept, key=lambda one: (one.file, one.position, one.what, one.text)):
        rooms[one.file, one.what] += 1
        if rooms[one.file, one.what] <= NOTED_MAX:
            found.append(one)
    return tuple(found)


def _log_bounds(plan: AuditPlan, parts: Sequence[Part]) -> tuple[int, int, str | None]:
    """From where to where the log was read, and what stands at its end if that is no frame."""
    # The first place where a task met the end, and behind which none met a message.
    last = max((number for number, part in enumerate(parts) if part.messages), default=0)
    ends = [(part.log_end, part.unreadable) for part in parts[last:] if part.log_end is not None]
    log_end, unreadable = ends[0] if ends else (plan.log_end, None)
    expired = _joined(part.expired for part in parts)
    log_begin = expired[0].end if expired and expired[0].begin <= plan.log_begin else plan.log_begin
    return min(log_begin, log_end), log_end, unreadable


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


def _orphans(parts: Sequence[Part]) -> tuple[Orphans, ...]:
    found: dict[str, Orphans] = {}
    for one in (one for part in parts for one in part.orphans):
        other = found.get(one.name, replace(one, count=0))
        found[one.name] = Orphans(one.name, min(one.low, other.low), max(one.high, other.high), one.count + other.count)
    return tuple(found[name] for name in sorted(found))


@lru_cache
def _part_type() -> TypeAdapter[Part]:
    return TypeAdapter(Part)


class ResumeFile:
    """The file at ``path``: made if there is none, locked, and read; then ``begin``, ``keep`` and ``close``.

    ``asked`` are the options of this audit. Raises UsageError for a file that does not begin as one of this audit does,
    BusyError while another audit has it.
    """

    def __init__(self, disk: Disk, path: Path, config: Config, asked: dict[str, Any]) -> None:
        self._disk, self._store, self._path = disk, config.store, absolute(path)
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
        hint = "give another FILE to --resume, or remove it"
        if self._path.exists() and not self._path.is_file():
            raise UsageError(f"{self._path} is no plain file", hint)
        with ExitStack() as stack:
            try:
                self._file = stack.enter_context(OutputDisk().open_write(self._path, create=not self._path.exists()))
            except DiskError as error:
                raise UsageError(str(error), hint) from error
            if not try_exclusive(self._file.fileno()):
                hint = "wait for its end, or give another FILE to --resume"
                raise BusyError(f"{self._path} is in use by another audit", hint)
            data = self._file.pread(self._file.size(), 0)
            if data[: len(head)] != head[: len(data)]:
                raise UsageError(f"{self._path} is not of this audit: of another store, other options or version", hint)
            # A last line that is cut off was being written by a process that was killed.
            whole = data[: data.rfind(b"\n") + 1]
            self._file.truncate(len(whole))
            if not whole:
                self._append(head)
            for line in whole.splitlines()[1:]:
                with suppress(ValueError, KeyError, TypeError):
                    row = json.loads(line)
                    self._parts[row["task"]] = row["part"]
            stack.pop_all()

    def begin(self, plan: AuditPlan) -> list[Part | None]:
        """What each task came to in an earlier run, if that still holds."""
        found, stamps = list[Part | None](), self._stamps(plan.folder)
        for task in plan.tasks:
            digest = self._digests[id(task)] = self._digest(task, stamps)
            try:
                found.append(_part_type().validate_python(self._parts[digest]))
            except (KeyError, ValidationError):
                found.append(None)
        return found

    def keep(self, task: AuditTask, part: Part) -> None:
        """Write it down, durably, unless what it was made from has changed meanwhile."""
        digest = self._digests[id(task)]
        if digest and digest == self._digest(task, self._stamps(task.folder)):
            row = {"task": digest, "part": _part_type().dump_python(part, mode="json")}
            self._append(json.dumps(row).encode() + b"\n")
            self._parts[digest] = row

    def words(self) -> list[str]:
        """The line about what Ctrl-C leaves; none before anything was begun."""
        done, count, path = sum(one in self._parts for one in self._digests.values()), len(self._digests), self._path
        text = f"{printable(str(path))} keeps {done} of {count} tasks: the same command goes on with the rest"
        return [f"interrupted; {text}"] if count else []

    def close(self) -> None:
        """Close the file, which stays: it can be removed when nobody needs it."""
        self._file.close()

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
