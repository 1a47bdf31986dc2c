"""The whole audit, composed: plan, tasks by whatever runs them, and what they come to in an operator's terms."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from indexd.audit.causes.judge import Cause, hole_causes
from indexd.audit.crash import CrashCost, crash_cost
from indexd.audit.gentle import ScatteredDisk, lower_priority, paced, piece_size
from indexd.audit.live import is_live
from indexd.audit.part import Part
from indexd.audit.plan import AuditPlan, AuditTask, plan_audit
from indexd.audit.queues_found import QueuesAudit, join_queues, plan_queues
from indexd.audit.resume import ResumeFile
from indexd.audit.samples.answers import Answers
from indexd.audit.samples.asking import ask
from indexd.audit.samples.draw import draw
from indexd.audit.standing import Standing, look_around
from indexd.audit.task import audit_task
from indexd.audit.whole import Audit, join
from indexd.config import Config
from indexd.config.units import show_size
from indexd.storage.disk import Disk

SAMPLES = 200
OnProgress = Callable[[int, int], None]
#: Tasks that are left, and what is to be called with each task and its part as they end; the parts in the same order.
RunTasks = Callable[[Sequence[AuditTask], Callable[[AuditTask, Part], None]], list[Part]]
#: A plan whose stretches are cut after so many bytes, as in the run that is gone on with; None: there was none.
MakePlan = Callable[[int | None], AuditPlan]
# Threads that read ahead where one process does it all.
_WORKERS = 2


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """``samples`` queries are tried, none for 0; ``queues``: the ConsumeQueues, too; ``kept``: where parts are kept.

    ``yields``: beside a broker that runs this process takes the lowest priority, for the rest of its life.
    """

    samples: int = SAMPLES
    queues: bool = False
    kept: Path | None = None
    yields: bool = False


@dataclass(frozen=True, slots=True)
class AuditReport:
    """``causes`` belong to ``audit.holes`` one by one; ``bytes_read`` of log and files in ``seconds``.

    ``missing`` are (begin, end, keys) of stretches with keys that are not findable, holes that are not kept included.
    ``resumed_tasks`` of the plan's tasks were taken over from an earlier run. ``manner`` says how gently it was read.
    """

    store: str
    plan: AuditPlan
    audit: Audit
    standing: Standing
    causes: tuple[Cause, ...]
    crash: CrashCost
    answers: Answers | None
    queues: QueuesAudit | None
    bytes_read: int
    seconds: float
    missing: tuple[tuple[int, int, int], ...] = ()
    resumed_tasks: int = 0
    manner: tuple[str, ...] = ()

    @property
    def is_sound(self) -> bool:
        """Every key is findable, all of the log was read and nothing is wrong; a crash's cost is no finding."""
        is_whole = self.audit.is_sound and not self.audit.gaps
        return is_whole and (self.queues is None or self.queues.is_sound)

    @property
    def homeless_entries(self) -> int:
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
                lock = self.standing.lock
                row |= {"store": self.store, "broker": lock.how, "brokerAlive": lock.alive, "brokerPid": lock.pid}
                row |= {"resumedTasks": self.resumed_tasks, "manner": list(self.manner)}
                row |= {"bytesRead": self.bytes_read, "seconds": round(self.seconds, 3), "sound": self.is_sound}
            yield row


def run_audit(
    config: Config, disk: Disk, options: AuditOptions, make_plan: MakePlan, run: RunTasks, manner: Sequence[str] = ()
) -> AuditReport:
    """Plan with ``make_plan``, have the tasks run by ``run``, and judge. Raises what planning and tasks raise.

    KeyboardInterrupt says what is kept, if anything is.
    """
    if options.kept is None:
        return _audit(config, disk, options, make_plan, run, None, manner)
    asked = {"samples": options.samples, "queues": options.queues}
    kept = ResumeFile(disk, options.kept, config, asked)
    try:
        return _audit(config, disk, options, make_plan, run, kept, manner)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(*kept.words()) from None
    finally:
        kept.close()


def audit_here(config: Config, disk: Disk, options: AuditOptions, on_progress: OnProgress) -> AuditReport:
    """Every task in this process, one after the other; ``on_progress`` gets (bytes done, bytes in all)."""
    disk = paced(disk, config)
    done = total = 0

    def on_bytes(more: int) -> None:
        nonlocal done
        done += more
        on_progress(done, total)

    def make_plan(size: int | None) -> AuditPlan:
        # What is not kept need not be cut: each piece of a stretch reads its index file again.
        if size is None and options.kept is not None:
            size = piece_size(config)
        return plan_audit(disk, config, size=size)

    def run(tasks: Sequence[AuditTask], ended: Callable[[AuditTask, Part], None]) -> list[Part]:
        nonlocal total
        total = sum(task.size for task in tasks)
        parts = []
        for task in tasks:
            parts.append(audit_task(task, disk, config, workers=_WORKERS, on_bytes=on_bytes))
            ended(task, parts[-1])
        return parts

    store, manner = config.store.store, []
    if options.yields and store is not None and is_live(disk, store):
        manner.append(lower_priority())
    if config.limits.read_rate_max:
        manner.append(f"at most {show_size(config.limits.read_rate_max)} a second")
    return run_audit(config, disk, options, make_plan, run, manner)


def _audit(
    config: Config,
    disk: Disk,
    options: AuditOptions,
    make_plan: MakePlan,
    run: RunTasks,
    kept: ResumeFile | None,
    manner: Sequence[str],
) -> AuditReport:
    began = time.monotonic()
    scattered = ScatteredDisk(disk)
    standing = look_around(scattered, config)
    plan = make_plan(None if kept is None else kept.piece_size)
    # Drawn again from a log that has grown, they would be others, and nothing that was kept would count.
    samples = kept.samples if kept is not None else None
    if samples is None:
        samples = draw(scattered, config, plan, options.samples) if options.samples else ()
    hashes = tuple(sorted({sample.key_hash for sample in samples}))
    plan.tasks = [replace(task, samples=hashes) for task in plan.tasks]
    if options.queues:
        plan_queues(disk, config, plan)
    if kept is not None:
        kept.begin(plan, samples)
    found = [kept.get(task) if kept is not None else None for task in plan.tasks]
    left = [task for task, part in zip(plan.tasks, found, strict=True) if part is None]
    fresh = iter(run(left, kept.keep if kept is not None else _forget))
    parts = [part if part is not None else next(fresh) for part in found]
    resumed = len(parts) - len(left)
    audit = join(plan, parts)
    return AuditReport(
        store=str(config.store.store),
        plan=plan,
        audit=audit,
        standing=standing,
        causes=hole_causes(audit, standing, config),
        crash=crash_cost(scattered, config, plan, standing),
        answers=ask(scattered, config, plan, samples, parts) if samples else None,
        queues=join_queues(plan, parts) if options.queues else None,
        bytes_read=sum(task.size for task in left),
        seconds=time.monotonic() - began,
        missing=tuple((part.begin, part.end, part.missing_keys) for part in parts if part.missing_keys),
        resumed_tasks=resumed,
        manner=tuple(manner),
    )


def _forget(_task: AuditTask, _part: Part) -> None:
    pass
