"""From a configuration to a running daemon: the lock, the abort flag, recovery, the event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import uvloop

from indexd import __version__
from indexd.config import Config
from indexd.errors import IndexdError
from indexd.flush.abort import write_abort
from indexd.recovery.open import Opened, check_store, load_kernels, open_data
from indexd.service.daemon import Daemon
from indexd.service.log import Logger, configure_log
from indexd.service.progress import RecoveryProgress
from indexd.storage.disk import Disk
from indexd.storage.lock import DirectoryLock
from indexd.storage.names import DataFiles


def run_daemon(config: Config, reload_config: Callable[[], Config]) -> None:
    """Run until a signal says stop; raises IndexdError. ``reload_config`` is called for each HUP."""
    log = configure_log(config.log)
    disk = Disk()
    check_store(config)
    disk.make_dir(config.store.data)
    files = DataFiles(config.store.data)
    lock = DirectoryLock(files.lock)
    lock.acquire()
    try:
        opened = open_for_run(config, disk, files, log)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(Daemon(config, reload_config, disk, files, opened, log).run())
    except* IndexdError as group:
        raise first_error(group) from None
    finally:
        lock.release()


def first_error(group: BaseExceptionGroup[IndexdError]) -> IndexdError:
    """The one error of a group that the operator is shown."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, IndexdError)
    return error


def open_for_run(config: Config, disk: Disk, files: DataFiles, log: Logger, *, forced: bool = False) -> Opened:
    """Open the data directory with the abort flag up, and log what was found and done."""
    unclean = disk.exists(files.abort)
    created = not disk.exists(files.frontier)
    root = str(config.store.store or config.store.commit_log_directories[0].parent)
    log.info(
        "starting",
        version=__version__,
        pid=os.getpid(),
        store=root,
        data=str(files.data),
    )
    load_kernels(config)
    # Recovery changes files: a death inside it without this flag would look like a clean stop.
    write_abort(disk, files.abort)
    with RecoveryProgress(log, disk, files) as progress:
        opened = open_data(config, disk, progress, unclean=unclean, forced=forced)
    if opened.is_changed:
        opened.flusher.persist(opened.outputs.progress())
    event = "created" if created else "recovered" if unclean else "opened"
    if opened.damage is not None:
        log.error("frontier_unreadable", problem=opened.damage)
    recovered = opened.recovered
    log.info(
        event,
        phy_offset=opened.outputs.phy_offset,
        index_files=len(recovered.files),
        kept_entries=recovered.kept_entries,
        dropped_entries=recovered.dropped_entries,
        deleted_files=len(recovered.deleted_files),
        rewritten_files=len(recovered.rewritten_files),
        reasons=recovered.reasons,
        seconds=round(opened.seconds, 3),
    )
    return opened
