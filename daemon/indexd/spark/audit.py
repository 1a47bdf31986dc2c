"""The audit of a broker's index as Spark tasks: the tasks of ``indexd.audit``, one for one, and the same answer."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from indexd.audit import Audit, AuditPlan, AuditTask, Part, audit_task, join, plan_audit
from indexd.config import Config
from indexd.spark.session import slots
from indexd.spark.tasks import run_tasks
from indexd.storage.disk import Disk
from indexd.storage.remote import disk_for

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from indexd.spark.progress import Report


def audit_on_spark(spark: SparkSession, config: Config, progress: Report | None = None) -> Audit:
    """Every task of the audit on whatever ``spark`` runs on; ``progress`` gets (bytes done, bytes in all).

    Raises what planning and the tasks raise, SparkError for anything else that ends the job.
    """
    plan = _plan(disk_for(config), config, slots(spark))
    sizes = [task.size for task in plan.tasks]
    return join(plan, run_tasks(spark, partial(_run, config=config), plan.tasks, sizes=sizes, progress=progress))


def _plan(disk: Disk, config: Config, slots: int) -> AuditPlan:
    # A task a file is few where files are few: then each is read by several tasks, which costs less than idle slots.
    plan = plan_audit(disk, config, size=config.spark.split_size or None)
    if config.spark.split_size or len(plan.tasks) >= 2 * slots:
        return plan
    size = (plan.log_end - plan.log_begin) // (2 * slots)
    return plan_audit(disk, config, size=max(size, config.store.segment_size))


def _run(task: AuditTask, config: Config) -> Part:
    return audit_task(task, disk_for(config), config)
