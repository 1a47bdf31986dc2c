"""Logs of which whole segments are unreadable, and what a reader that passes over them finds."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

from indexd.commitlog.reader import LogReader, Skipped
from indexd.recovery.open import decode_rules, reader_options
from indexd.recovery.whole_log import WholeLog
from indexd.storage.disk import Disk
from support.commitlog_writer import CommitLogWriter
from support.rows import config_of
from support.small_log import messages

DAMAGED_SEGMENT_SIZE = 64 << 10
#: What becomes of segments 2, 4 and 6 of ``damaged_log``.
DAMAGES = [("random",), ("missing",), ("zeros",), ("two zeros",), ("random", "missing", "zeros")]
_COUNT = 1600


def damaged_log(store: Path, damages: tuple[str, ...]) -> int:
    """Write a log of eight segments and more, and damage every second from the third on; where the log ends."""
    with CommitLogWriter(store / "commitlog", DAMAGED_SEGMENT_SIZE) as writer:
        for spec in islice(messages(1), _COUNT):
            writer.append(spec)
    for number, damage in enumerate(damages, 1):
        path = store / "commitlog" / f"{2 * number * DAMAGED_SEGMENT_SIZE:020d}"
        if damage == "two zeros":
            following = store / "commitlog" / f"{(2 * number + 1) * DAMAGED_SEGMENT_SIZE:020d}"
            following.write_bytes(bytes(following.stat().st_size))
        if damage == "missing":
            path.unlink()
        else:
            is_random = damage == "random"
            path.write_bytes(
                random.Random(1).randbytes(DAMAGED_SEGMENT_SIZE) if is_random else bytes(path.stat().st_size)
            )
    return writer.max_offset


def rows_of_whole_log(store: Path) -> list[int]:
    """The physical offsets that one reader finds, as that of a rebuild in one process with ``--on-corrupt skip``."""
    config = config_of(store, DAMAGED_SEGMENT_SIZE, on_corrupt="skip")
    directories = config.store.commit_log_directories
    reader = LogReader(Disk(), directories, decode_rules(config), reader_options(config))
    found: list[int] = []
    for batch in WholeLog(reader):
        if not isinstance(batch, Skipped):
            found += batch.columns.phy_offset[: batch.rows].tolist()
    reader.close()
    return found
