"""The abort flag: there while the daemon runs, gone after a clean stop (spec rocketmq-store 6.2).

It holds the pid in ASCII without a newline, as RocketMQ's does since 5.0.
"""

from __future__ import annotations

import os
from pathlib import Path

from indexd.storage.disk import Disk


def write_abort(disk: Disk, path: Path) -> None:
    """From here on a stop is unclean until ``remove_abort``."""
    disk.write_atomically(path, str(os.getpid()).encode("ascii"))


def remove_abort(disk: Disk, path: Path) -> None:
    """Everything is durable: the stop is clean."""
    disk.unlink(path)
    disk.sync_dir(path.parent)
