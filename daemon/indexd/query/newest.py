"""The newest messages of a topic, over all its queues: a look at what comes in, without a key.

Annotations here are read when the module runs, to build the validators: no postponed annotations in this file.
"""

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from indexd.commitlog.decoder import Message
from indexd.consumequeue.reader import ConsumeQueueReader
from indexd.query.message import HasHits, Hit
from indexd.query.questions import Flags, Name, Question, Whole
from indexd.query.source import Coverage, IndexSnapshot, QueryIndex, why_no_queue, with_queue


@dataclass(frozen=True, slots=True)
class NewestAnswer(HasHits[Hit]):
    """The newest first; ``why`` says why there are none."""

    topic: str
    hits: tuple[Hit, ...]
    coverage: Coverage
    why: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """One object; ``why`` only where it applies."""
        row = {"topic": self.topic, "hits": [hit.to_dict() for hit in self.hits]}
        return row | ({} if self.why is None else {"why": self.why}) | {"coverage": self.coverage.to_json()}


class Newest(Question):
    """Show the newest messages of a topic."""

    command = "query-newest"
    path = "newest"
    topic: Annotated[Name, Flags(("-t", "--topic"))] = Field(description="the topic")
    max: Annotated[Whole, Flags(("-m", "--max"), "MAX")] = Field(
        10, ge=1, le=1000, description="most messages (default: 10)"
    )

    def answer(self, index: QueryIndex) -> NewestAnswer:
        """Of the last units of each of its queues those that were stored last."""

        def last(_: IndexSnapshot, queue: ConsumeQueueReader | None) -> list[Hit]:
            units = [] if queue is None else queue.get(max(queue.max_offset - self.max, queue.min_offset), self.max)
            found = (index.log.at(unit.phy_offset) for unit in units if not unit.is_blank)
            return [Hit.of(one) for one in found if isinstance(one, Message)]

        look = index.look()
        queues = [mark.queue_id for mark in look.frontier.queues or () if mark.topic == self.topic]
        hits = [hit for queue_id in queues for hit in with_queue(index, self.topic, queue_id, last)]
        hits.sort(key=lambda hit: hit.phy_offset, reverse=True)
        why = None if hits else why_no_queue(index, look, self.topic)
        return NewestAnswer(self.topic, tuple(hits[: self.max]), look.queue_coverage, why)
