"""The queue that a query asks about, opened as it stands at one moment, or why there is none."""

from __future__ import annotations

from pathlib import Path

from indexd.consumequeue.format import is_topic_name
from indexd.consumequeue.reader import ConsumeQueueReader
from indexd.errors import DiskError, UsageError
from indexd.query.coverage import gaps_in_words
from indexd.query.source import Look, QueryIndex

NO_QUEUE = "no such queue"
BATCH_QUEUE = "a queue of batches (BatchConsumeQueue), which is not built"
NO_FOLDER = "a topic of that name has no ConsumeQueue: no folder can be named so"
_BATCH_FOLDER = "batchconsumequeue"


def open_queue(index: QueryIndex, look: Look, topic: str, queue_id: int) -> ConsumeQueueReader | None:
    """The queue, its minimum corrected to where the log begins; None if there is none. UsageError without any queue."""
    frontier = look.frontier
    if frontier.queues is None:
        raise UsageError(
            f"{index.files.data} holds no ConsumeQueues", "run the daemon with consume_queue = true to have them built"
        )
    if not is_topic_name(topic):
        return None
    root, mark = index.files.consumequeue, index.queue_mark(look, topic, queue_id)
    if mark is not None:
        queue = ConsumeQueueReader.of_mark(index.disk, root, mark, frontier.queue_file_size, look.published)
    elif look.published is not None:
        found = ConsumeQueueReader.of_new(index.disk, root, topic, queue_id, frontier.queue_file_size, look.published)
        if found is None:
            return None
        queue = found
    else:
        return None
    try:
        queue.correct_min_offset(look.coverage.log_begin or 0)
    except BaseException:
        queue.close()
        raise
    return queue


def topics_of(index: QueryIndex) -> list[str] | None:
    """Every topic with a ConsumeQueue, in order; None where no ConsumeQueues are built."""
    marks = index.look().frontier.queues
    if marks is None:
        return None
    try:
        folders = index.disk.list_dirs(index.files.consumequeue)
    except DiskError as error:
        if not error.is_missing:
            raise
        folders = []
    return sorted({mark.topic for mark in marks} | {name for name in folders if is_topic_name(name)})


def why_no_queue(index: QueryIndex, look: Look, topic: str) -> str:
    """Why a topic has no such queue, as far as can be told."""
    if not is_topic_name(topic):
        return NO_FOLDER
    batches = Path(look.frontier.store) / _BATCH_FOLDER / topic
    if look.frontier.store and index.disk.exists(batches):
        return BATCH_QUEUE
    reasons, limit = [NO_QUEUE], look.frontier.queues_limit
    if limit is not None:
        reasons.append(f"queues were left out when there were {limit} (queues_max)")
    return "; ".join(reasons + gaps_in_words(look.queue_coverage, index.log))
