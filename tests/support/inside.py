"""The running daemon inside a test's own process: all its threads and tasks are real, and can be reached into.

::

    with opened_inside(store, data, drain_interval="0.05") as daemon:
        async with running(daemon):
            ...
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from indexd.config import Config, load
from indexd.flush.frontier import write_abort
from indexd.recovery.open import open_data
from indexd.serve.daemon_status import DaemonStatus
from indexd.service.daemon import Daemon
from indexd.service.instance import Instance, Notifier, Starts, configure_log
from indexd.storage.disk import Disk
from indexd.storage.lock import DirectoryLock
from indexd.storage.names import DataFiles
from support.small_log import HASH_SLOT_NUM, INDEX_NUM, QUEUE_FILE_SIZE, SEGMENT_SIZE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

_LEAVE_SECONDS = 60.0


def config_of(store: Path, data: Path, **keys: str) -> Config:
    """Small sizes, short intervals, no port, and then ``keys``."""
    flags: dict[str, Any] = {
        "store": str(store),
        "data": str(data),
        "segment_size": str(SEGMENT_SIZE),
        "hash_slot_num": str(HASH_SLOT_NUM),
        "index_num": str(INDEX_NUM),
        "consume_queue_file_size": str(QUEUE_FILE_SIZE),
        "drain_interval": "0.02",
        "flush_interval": "0.05",
        "http": "off",
        "disk_used_max": "1",
        "log_level": "error",
    }
    return load(flags | keys, None, {"HOME": "/nowhere"})


class FakeNotifier(Notifier):
    """Counts what a service manager would hear."""

    def __init__(self, watchdog_seconds: float | None = None) -> None:
        super().__init__(None, None)
        self.watchdog_seconds = watchdog_seconds
        self.pings = 0
        self.said: list[tuple[str, str]] = []

    def status(self, text: str) -> None:
        self.said.append(("status", text))

    def watchdog(self) -> None:
        self.pings += 1


def make_instance(config: Config, notifier: Notifier | None = None) -> Instance:
    """With a lock that is held."""
    disk, files, board = Disk(), DataFiles(config.store.data), DaemonStatus(config)
    disk.make_dir(files.data)
    lock = DirectoryLock(files.lock)
    lock.acquire()
    starts = Starts(disk, files.starts, config.recovery)
    log = configure_log(config.log, board.events.tap)
    return Instance(config, lambda: config, disk, files, lock, starts, board, notifier or FakeNotifier(), log)


@contextmanager
def opened_inside(store: Path, data: Path, *, watchdog: float | None = None, **keys: str) -> Iterator[Daemon]:
    """A daemon that is opened and not running yet."""
    config = config_of(store, data, **keys)
    instance = make_instance(config, FakeNotifier(watchdog))
    try:
        unclean = instance.disk.exists(instance.files.abort)
        write_abort(instance.disk, instance.files.abort)
        opened = open_data(config, instance.disk, instance.board.recovering, unclean=unclean)
        yield Daemon(instance, opened)
    finally:
        instance.lock.release()


@asynccontextmanager
async def running(daemon: Daemon) -> AsyncIterator[asyncio.Task[None]]:
    """The daemon's tasks, on the test's own event loop; a clean stop by a signal at the end."""
    task = asyncio.create_task(daemon.run())
    await asyncio.sleep(0)  # its signal handlers are there now
    try:
        yield task
    finally:
        if not task.done():
            os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(_LEAVE_SECONDS):
            await task
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            with suppress(ValueError):
                asyncio.get_running_loop().remove_signal_handler(number)


async def wait_until(holds: Callable[[], object], seconds: float = 60.0) -> None:
    """Look every few milliseconds; TimeoutError when it never holds."""
    async with asyncio.timeout(seconds):
        while not holds():  # noqa: ASYNC110 - what is looked at sets no event
            await asyncio.sleep(0.005)


def row_of(daemon: Daemon) -> dict[str, Any]:
    """What the outlets read."""
    return daemon._board.row()


def notifier_of(daemon: Daemon) -> FakeNotifier:
    """The end of it that the test holds."""
    found = daemon._notifier
    assert isinstance(found, FakeNotifier)
    return found
