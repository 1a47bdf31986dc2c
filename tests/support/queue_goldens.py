"""What the goldens hold about queues: the broker's answers by time, and how large its files are."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from indexd.consumequeue.format import UNIT, UNIT_SIZE, QueueMark
from indexd.consumequeue.reader import ConsumeQueueReader
from indexd.storage.disk import Disk

if TYPE_CHECKING:
    from support.goldens import Golden


def cq_times(golden: Golden) -> list[dict[str, Any]]:
    """200 rows of topic, queueId, timestamp, and the offsets lower and upper."""
    text = (golden.root / "cqtime.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.split("\n") if line]


def queue_file_size(golden: Golden) -> int:
    """Bytes of each file of a queue."""
    facts = json.loads((golden.root / "golden.json").read_text("utf-8"))
    return int(facts["mappedFileSizeConsumeQueue"])


def broker_queue(golden: Golden, topic: str, queue_id: int, file_size: int, log_begin: int) -> ConsumeQueueReader:
    """A broker's own queue with the bounds that it has after a start (spec rocketmq-store 5.3, 5.5)."""
    root = golden.root / "consumequeue"
    files = sorted((root / topic / str(queue_id)).iterdir())
    first, units = int(files[0].name) // UNIT_SIZE, b"".join(path.read_bytes() for path in files)
    count = next((at for at, unit in enumerate(UNIT.iter_unpack(units)) if unit[0] < 0 or unit[1] <= 0), None)
    end = first + (len(units) // UNIT_SIZE if count is None else count)
    queue = ConsumeQueueReader.of_mark(Disk(), root, QueueMark(topic, queue_id, first, first, end, -1), file_size)
    queue.correct_min_offset(log_begin)
    return queue
