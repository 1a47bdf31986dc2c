"""How far an index stands: by the word of the daemon that runs, else by its frontier."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from indexd.errors import DiskError
from indexd.flush.frontier import Frontier, Uncovered
from indexd.query.coverage import Behind
from indexd.storage.disk import Disk


def progress(
    frontier: Frontier, state: dict[str, Any], pid: int | None
) -> tuple[int, int, tuple[Uncovered, ...], int | None]:
    """Begin offset, end offset, what lies uncovered, and how far queues are published; None for the last: by marks."""
    if state.get("pid") != pid or not isinstance(state.get("phyOffset"), int):
        return frontier.begin_offset, frontier.phy_offset, frontier.uncovered, None
    begin = state.get("beginOffset", frontier.begin_offset)
    uncovered = frontier.uncovered
    if isinstance(state.get("uncovered"), list):
        uncovered = tuple(Uncovered(int(first), int(last), str(why)) for first, last, why in state["uncovered"])
    published = state["phyOffset"]
    if isinstance(state.get("filledOffset"), int):
        published = min(published, state["filledOffset"])
    elif frontier.filled_offset < frontier.phy_offset:
        published = min(published, frontier.filled_offset)
    return int(begin), state["phyOffset"], uncovered, published


def stands_at(state: dict[str, Any], pid: int | None) -> Behind | None:
    """Where the daemon that runs stands at bytes that are no frame; None if it does not."""
    corrupt = state.get("corrupt")
    if state.get("pid") != pid or not isinstance(corrupt, dict):
        return None
    return Behind(int(corrupt["offset"]), str(corrupt["reason"]))


def read_state(disk: Disk, path: Path) -> dict[str, Any]:
    """DATA/state. A hint only: whatever cannot be read says nothing."""
    try:
        row = json.loads(disk.read(path))
    except (DiskError, ValueError):
        return {}
    return row if isinstance(row, dict) else {}
