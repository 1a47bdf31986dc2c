"""What the goldens hold about queues: the broker's answers by time, and how large its files are."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

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
