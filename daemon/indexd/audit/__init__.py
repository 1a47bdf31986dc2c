"""``indexd audit``: a broker's own index files held against its log, read-only, whether the broker runs or not.

The log is cut into stretches, the index files are given to the stretches that they point into, and each stretch is a
task of its own: one process goes through them in order, Spark through many at once, and what they come to is the same.

``plan``     the index folder, which RocketMQ indexed each file, and tasks that together cover the whole log once
``task``     one stretch of the log, decoded and compared with files that are checked; the rate of reading
``queues``   the ConsumeQueues beside the messages
``result``   what a task came to, and all together: holes, findings, totals
``causes``   why the keys of a hole are not findable; what a crash right now would cost
``report``   all of it composed, parts put together; whether the broker's own query finds a sample of messages; finished
             tasks kept in a file, for an audit that is interrupted
``page``     all of it as sections of lines, for a terminal and for the HTML page
"""

from indexd.audit.plan import AuditPlan, AuditTask, plan_audit
from indexd.audit.report import SAMPLES, AuditOptions, AuditReport, audit_here, join, run_audit
from indexd.audit.result import Audit, TaskResult
from indexd.audit.task import audit_task, load_kernels

__all__ = [
    "SAMPLES",
    "Audit",
    "AuditOptions",
    "AuditPlan",
    "AuditReport",
    "AuditTask",
    "TaskResult",
    "audit_here",
    "audit_task",
    "join",
    "load_kernels",
    "plan_audit",
    "run_audit",
]
