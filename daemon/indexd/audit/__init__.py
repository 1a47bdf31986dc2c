"""``indexd audit``: a broker's own index files held against its log, read-only, whether the broker runs or not.

The log is cut into stretches, the index files are given to the stretches that they point into, and each stretch is a
task of its own: one process goes through them in order, Spark through many at once, and what they come to is the same.

``ground``    the index folder as it stands: files, foreign ones, headers, which part of the log each file points into
``flavour``   which RocketMQ indexed each file, by a plain sample of its entries
``plan``      tasks that together cover the whole log exactly once
``task``      one stretch of the log, decoded and compared
``stretch``   the messages of a stretch, and where the log ends
``chains``    one file against itself: links, slots, header; what the broker's walk does not reach
``checked``   that, and what is written down of it
``entries``   the entries of a file that point into a stretch, in the order of the log
``match``     messages and entries side by side
``kernel``    the two loops of that, compiled
``covered``   which part of the log was read; what is missing or unreadable in it
``holes``     ranges of the log whose keys are not findable
``notes``     what does not hold, bounded, the same however the log was cut; what each kind means
``part``      what one task came to
``whole``     parts put together
``standing``  what stands around the index: lock, abort, checkpoint, where segments begin
``causes``    why the keys of a hole are not findable
``crash``     what a crash right now would cost
``samples``   keys asked in time ranges as the broker asks, and what is true
``queues``    the ConsumeQueues as they stand, and their units beside messages
``queue_watch``  that, for all queues of a stretch
``queues_found``  what all stretches came to there
``resume``    finished tasks in a file of JSON lines, for an audit that is interrupted
``gentle``    how it is read: at a rate, without taking memory from the broker, at the lowest priority
``report``    all of it composed
``verdict``   all of it in words: the verdict, the broker, what was covered
``page``      all of it as one HTML page
``strip``     the log drawn for that page
``live``      whether a broker is at work
``loading``   the kernels, before there is work for them
"""

from indexd.audit.loading import load_kernels
from indexd.audit.part import Part
from indexd.audit.plan import AuditPlan, AuditTask, plan_audit
from indexd.audit.report import AuditOptions, AuditReport, audit_here, run_audit
from indexd.audit.task import audit_task
from indexd.audit.whole import Audit, join

__all__ = [
    "Audit",
    "AuditOptions",
    "AuditPlan",
    "AuditReport",
    "AuditTask",
    "Part",
    "audit_here",
    "audit_task",
    "join",
    "load_kernels",
    "plan_audit",
    "run_audit",
]
