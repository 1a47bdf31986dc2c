"""The audit of a broker's index as Spark tasks: the tasks of ``indexd.audit``, one for one, and the same answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from indexd.audit import AuditOptions, AuditPlan, AuditReport, AuditTask, Part, audit_task, plan_audit, run_audit
from indexd.config import Config
from indexd.config.units import show_size
from indexd.spark.session import slots
from indexd.spark.tasks import run_tasks
from indexd.storage.disk import Disk
from indexd.storage.remote import disk_for

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from indexd.spark.tasks import Report

# So many in each slot: enough to keep it busy, and few enough that little is lost.
_TASKS_PER_WAVE = 4


def audit_on_spark(
    spark: SparkSession, config: Config, options: AuditOptions, progress: Report | None = None
) -> AuditReport:
    """Every task of the audit on whatever ``spark`` runs on; ``progress`` gets (bytes done, bytes in all).

    Raises what planning and the tasks raise, SparkError for anything else that ends the job.
    """
    disk, at_once = disk_for(config), slots(spark)
    shared = _share_rate(config, at_once)

    def run(tasks: Sequence[AuditTask], ended: Callable[[AuditTask, Part], None]) -> list[Part]:
        # What is to be kept comes back wave by wave: a job that is interrupted loses one of them.
        step = len(tasks) if options.kept is None else _TASKS_PER_WAVE * at_once
        parts: list[Part] = []
        done, total = 0, sum(task.size for task in tasks)
        for first in range(0, len(tasks), max(step, 1)):
            wave = list(tasks[first : first + step])
            sizes = [task.size for task in wave]
            told = partial(_tell, progress, done, total) if progress is not None else None
            fresh = run_tasks(spark, partial(_run, config=shared), wave, sizes=sizes, progress=told)
            for task, part in zip(wave, fresh, strict=True):
                ended(task, part)
            parts += fresh
            done += sum(sizes)
        return parts

    def make_plan(size: int | None) -> AuditPlan:
        return _plan(disk, config, at_once) if size is None else plan_audit(disk, config, size=size)

    rate = shared.limits.read_rate_max
    manner = [f"at most {show_size(rate)} a second in each of {at_once} slots"] if rate else []
    return run_audit(config, disk, options, make_plan, run, manner)


def _plan(disk: Disk, config: Config, slots: int) -> AuditPlan:
    # A task a file is few where files are few: then each is read by several tasks, which costs less than idle slots.
    plan = plan_audit(disk, config, size=config.spark.split_size or None)
    if config.spark.split_size or len(plan.tasks) >= 2 * slots:
        return plan
    size = (plan.log_end - plan.log_begin) // (2 * slots)
    return plan_audit(disk, config, size=max(size, config.store.segment_size))


def _share_rate(config: Config, slots: int) -> Config:
    # The tasks that run at once know nothing of each other.
    rate = config.limits.read_rate_max
    limits = config.limits.model_copy(update={"read_rate_max": -(-rate // slots)})
    return config.model_copy(update={"limits": limits})


def _tell(progress: Report, before: int, total: int, done: int, _: int) -> None:
    progress(before + done, total)


def _run(task: AuditTask, config: Config) -> Part:
    return audit_task(task, disk_for(config), config)
