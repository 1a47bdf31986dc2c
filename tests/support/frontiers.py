"""A frontier with some of its fields changed, those of its outputs by the names under which they are read."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from indexd.consumequeue.format import QueuesMark

if TYPE_CHECKING:
    from indexd.flush.frontier import Frontier


def changed(frontier: Frontier, **changes: Any) -> Frontier:
    """``replace`` that also takes index, queues, queue_file_size, queues_limit and sparse; None for not built."""
    parts: dict[str, Any] = {name: changes.pop(name) for name in ("index", "sparse") if name in changes}
    if changes.keys() & {"queues", "queue_file_size", "queues_limit"}:
        queues = changes.pop("queues", frontier.queues)
        size = changes.pop("queue_file_size", frontier.queue_file_size)
        limit = changes.pop("queues_limit", frontier.queues_limit)
        parts["consumeQueue"] = None if queues is None else QueuesMark(size, queues, limit)
    return replace(frontier.with_outputs(**parts), **changes)
