"""The audit of a broker's index as Spark tasks: the tasks of ``indexd.audit``, one for one, and the same answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from pyspark.sql import SparkSession

from indexd.audit import AuditOptions, AuditPlan, AuditReport, AuditTask, TaskResult, audit_task, plan_audit, run_audit
from indexd.config import Config
from indexd.spark.session import slots
from indexd.spark.tasks import Report, run_tasks
from indexd.storage.remote import disk_for

# So many in each slot: enough to keep it busy, and few enough that little is lost.
_TASKS_PER_WAVE = 4


def audit_on_spark(
    spark: SparkSession, config: Config, options: AuditOptions, progress: Report = lambda *_: None
) -> AuditReport:
    """Every task of the audit on whatever ``spark`` runs on; ``progress`` gets (bytes done, bytes in all).

    Raises what planning and the tasks raise, SparkError for anything else that ends the job.
    """
    disk, at_once = disk_for(config), slots(spark)
    # The tasks that run at once know nothing of each other.
    rate = -(-config.limits.read_rate_max // at_once)
    shared = config.model_copy(update={"limits": config.limits.model_copy(update={"read_rate_max": rate})})

    def make_plan() -> AuditPlan:
        plan, wanted = plan_audit(disk, config, size=config.spark.split_size or None), config.spark.split_size
        if wanted or len(plan.tasks) >= 2 * at_once:
            return plan
        # Few files make few tasks: each file is read by several of them then, which costs less than idle slots.
        size = (plan.log_end - plan.log_begin) // (2 * at_once)
        return plan_audit(disk, config, size=max(size, config.store.segment_size))

    def run(tasks: Sequence[AuditTask], ended: Callable[[AuditTask, TaskResult], None]) -> list[TaskResult]:
        # What is to be kept comes back wave by wave: a job that is interrupted loses one of them.
        step = max(len(tasks) if options.kept is None else _TASKS_PER_WAVE * at_once, 1)
        parts: list[TaskResult] = []
        done, total = 0, sum(task.size for task in tasks)
        for first in range(0, len(tasks), step):
            wave = list(tasks[first : first + step])
            sizes = [task.size for task in wave]
            fresh = run_tasks(
                spark,
                partial(_run, config=shared),
                wave,
                sizes=sizes,
                progress=lambda now, _: progress(done + now, total),  # noqa: B023 - over before the next wave
            )
            for task, part in zip(wave, fresh, strict=True):
                ended(task, part)
            parts += fresh
            done += sum(sizes)
        return parts

    return run_audit(config, disk, options, make_plan, run)


def _run(task: AuditTask, config: Config) -> TaskResult:
    return audit_task(task, disk_for(config), config)
