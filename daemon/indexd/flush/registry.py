"""Which outputs there are, and which of them a configuration asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from indexd.config import Config
from indexd.consumequeue.store import ConsumeQueueStore
from indexd.index.file import IndexService
from indexd.output import Output
from indexd.sparse.service import SparseService
from indexd.storage.disk import Disk

#: The key index is the first: where it stands, all others are to stand. Another output is one more line here.
OUTPUTS: tuple[type[Output[Any]], ...] = (
    IndexService,
    ConsumeQueueStore,
    SparseService,
)


def make_outputs(config: Config, disk: Disk, data: Path) -> tuple[Output[Any], ...]:
    """Those that are asked for, empty."""
    return tuple(output for output, is_wanted in all_outputs(config, disk, data) if is_wanted)


def all_outputs(config: Config, disk: Disk, data: Path) -> list[tuple[Output[Any], bool]]:
    """Each, and whether it is asked for; the files of others go."""
    return [(kind.of(config, disk, data / kind.folder), kind.is_wanted(config)) for kind in OUTPUTS]
