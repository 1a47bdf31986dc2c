"""The broker's ConsumeQueues held against the log: each message has its unit, and each unit its message.

Units stand in the order of the log, so each stretch looks after those that point into it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from indexd.audit.part import Part
from indexd.audit.plan import AuditPlan
from indexd.audit.queues.ground import FOLDER, look_at_queues
from indexd.audit.queues.seen import KINDS, Difference, QueueName, QueuesSeen
from indexd.config import Config
from indexd.consumequeue.format import UNIT_SIZE, file_name
from indexd.findings import Finding
from indexd.pages.wording import show_name
from indexd.storage.disk import Disk

_WORST_SAID = 3
_TOPIC_LONGEST = 60


@dataclass(frozen=True, slots=True)
class QueueFound:
    """A queue with differences: ``counts`` how many of each kind, ``findings`` the first of each."""

    topic: str
    queue_id: int
    counts: dict[str, int]
    findings: tuple[Finding, ...]

    @property
    def path(self) -> str:
        """Its folder inside the store, as it is shown: a long topic is cut."""
        return f"{FOLDER}/{show_name(self.topic, _TOPIC_LONGEST)}/{self.queue_id}"

    @property
    def total(self) -> int:
        """How many differences it has."""
        return sum(self.counts.values())

    def to_json(self) -> dict[str, Any]:
        """A line of ``--json``."""
        findings = [{"file": f.file, "position": f.position, "what": f.what, "text": f.text} for f in self.findings]
        row = {"kind": "queue", "topic": self.topic, "queueId": self.queue_id, "counts": self.counts}
        return row | {"differences": self.total, "findings": findings}


@dataclass(frozen=True, slots=True)
class QueuesAudit:
    """What all stretches came to. ``found`` are the queues with differences, the worst one first.

    ``seen`` holds the totals. ``queues`` were compared; ``lmq_queues`` and ``batch_topics`` are not. ``deleted``:
    messages of topics that the broker does not know any more, by topic; nothing is wrong with those. ``why_not`` says
    why nothing was compared at all.
    """

    queues: int
    lmq_queues: int
    batch_topics: int
    seen: QueuesSeen
    found: tuple[QueueFound, ...]
    counts: dict[str, int]
    deleted: dict[str, int]
    why_not: str | None

    @property
    def is_sound(self) -> bool:
        """Every message that was compared is in its queue, and nothing else is."""
        return not self.counts

    @property
    def findings(self) -> list[Finding]:
        """Of every queue the first of each kind, by file and position."""
        found = [finding for queue in self.found for finding in queue.findings]
        return sorted(found, key=lambda one: (one.file, one.position, one.what, one.text))

    def rows(self) -> list[dict[str, Any]]:
        """Lines of ``--json``: one a queue with differences, and the summary."""
        seen = self.seen
        summary = {
            "kind": "queues",
            "compared": self.why_not is None,
            "reason": self.why_not,
            "queues": self.queues,
            "messages": seen.messages,
            "units": seen.units,
            "expiredUnits": seen.expired_units,
            "leftOutUnits": seen.left_out_units,
            "extUnits": seen.ext_units,
            "batchTopics": self.batch_topics,
            "batchMessages": seen.batch_messages,
            "lmqQueues": self.lmq_queues,
            "lmqMessages": seen.lmq_messages,
            "namelessMessages": seen.nameless_messages,
            "deletedTopics": self.deleted,
            "queuesWithDifferences": len(self.found),
            "differences": sum(self.counts.values()),
            "counts": self.counts,
            "sound": self.is_sound,
        }
        return [*(queue.to_json() for queue in self.found), summary]

    def lines(self) -> list[str]:
        """For people: what they came to, the worst queues, and what was left out."""
        if self.why_not is not None:
            return [f"ConsumeQueues: not compared: {self.why_not}"]
        return [*self._verdict(), *self._left_out()]

    def _verdict(self) -> list[str]:
        seen = self.seen
        if self.is_sound:
            where = "is in its queue, and nothing else is" if seen.messages else "was to be found in them"
            return [f"ConsumeQueues: each of {seen.messages:,} messages {where}; {self.queues:,} queues"]
        kinds = ", ".join(f"{count:,} {what}" for what, count in self.counts.items())
        lines = [f"ConsumeQueues: {len(self.found):,} of {self.queues:,} queues differ from the log: {kinds}"]
        for queue in self.found[:_WORST_SAID]:
            first = queue.findings[0] if queue.findings else None
            where = ""
            if first is not None and first.what != "queue-missing":
                where = f"{first.file.rpartition('/')[2]} at byte {first.position}: "
            text = f", first {where}{first.text}" if first is not None else ""
            lines.append(f"  {queue.path}: {queue.total:,}{text}")
        if len(self.found) > _WORST_SAID:
            lines.append(f"  and {len(self.found) - _WORST_SAID:,} queues more")
        return lines

    def _left_out(self) -> list[str]:
        seen, rows = self.seen, []
        if self.batch_topics or seen.batch_messages:
            rows.append(f"{seen.batch_messages:,} messages of BatchConsumeQueues ({self.batch_topics:,} topics)")
        if self.lmq_queues or seen.lmq_messages:
            rows.append(f"{self.lmq_queues:,} LMQs")
        if seen.nameless_messages:
            rows.append(f"{seen.nameless_messages:,} messages of topics that no folder can be named after")
        if seen.ext_units:
            rows.append(f"{seen.ext_units:,} tags codes that stand in a ConsumeQueueExt")
        if seen.left_out_units:
            rows.append(f"{seen.left_out_units:,} units that point to where the log could not be read")
        lines = [f"  not compared: {'; '.join(rows)}"] if rows else []
        if self.deleted:
            number, topics = sum(self.deleted.values()), len(self.deleted)
            lines.append(f"  {number:,} messages of {topics:,} topics that have been deleted have no queue any more")
        return lines


def plan_queues(disk: Disk, config: Config, plan: AuditPlan) -> None:
    """Look at the queues, and give each task those that point into its stretch. Raises DiskError."""
    # After the index: what it holds then, a broker has put into the queues before.
    plan.queues = ground = look_at_queues(disk, config, plan.log_begin)
    plan.tasks = [replace(task, queues=ground.of(task.begin, task.end, is_tail=task.is_tail)) for task in plan.tasks]


def join_queues(plan: AuditPlan, parts: Sequence[Part]) -> QueuesAudit:
    """Put together what the stretches came to, and what was wrong with the queues whatever the log holds."""
    ground = plan.queues
    assert ground is not None
    seen = QueuesSeen()
    for one in (ground.seen, *(part.queues for part in parts)):
        if one is not None:
            seen.merge(one)
    deleted: Counter[str] = Counter()
    by_queue: defaultdict[QueueName, dict[str, int]] = defaultdict(dict)
    for (name, what), count in sorted(seen.counts.items()):
        if what == "queue-missing" and ground.topics is not None and name[0] not in ground.topics:
            deleted[name[0]] += count
        else:
            by_queue[name][what] = count
    counts: Counter[str] = Counter()
    for kinds in by_queue.values():
        counts.update(kinds)
    begins = {
        (queue.topic, queue.queue_id): [file.offset * UNIT_SIZE for file in queue.files] for queue in ground.queues
    }
    found = [
        QueueFound(*name, kinds, _findings(ground.file_size, begins.get(name, []), seen, name))
        for name, kinds in by_queue.items()
    ]
    return QueuesAudit(
        queues=len(begins.keys() | by_queue.keys()),
        lmq_queues=ground.lmq_queues,
        batch_topics=len(ground.batch_topics),
        seen=seen,
        found=tuple(sorted(found, key=lambda queue: (-queue.total, queue.topic, queue.queue_id))),
        counts=dict(sorted(counts.items())),
        deleted=dict(deleted),
        why_not=ground.why_not,
    )


def _findings(file_size: int, begins: Sequence[int], seen: QueuesSeen, name: QueueName) -> tuple[Finding, ...]:
    rows = [(what, one) for what, found in seen.kept.get(name, {}).items() for one in found]
    findings = [_finding(file_size, begins, name, what, one) for what, one in rows]
    return tuple(sorted(findings, key=lambda one: (one.file, one.position, one.what, one.text)))


def _finding(file_size: int, begins: Sequence[int], name: QueueName, what: str, one: Difference) -> Finding:
    folder, (at, text) = f"{FOLDER}/{name[0]}/{name[1]}", KINDS[what]
    words = text.format(**asdict(one))
    if what == "queue-missing":
        return Finding(folder, 0, what, words)
    position = one.offset * UNIT_SIZE
    if what in ("queue-file-size", "queue-file-name", "queue-file-gap"):
        return Finding(f"{folder}/{file_name(one.offset)}", 0, what, words)
    number = bisect_right(begins, position) - 1
    begin = (
        begins[number] if number >= 0 and position - begins[number] < file_size else position // file_size * file_size
    )
    return Finding(f"{folder}/{file_name(begin)}", position - begin + at, what, words)
