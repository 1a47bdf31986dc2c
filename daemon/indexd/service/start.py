"""From a configuration to a running daemon: the lock, the abort flag, recovery, the event loop; and ``--recover``."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

from pydantic.alias_generators import to_camel

from indexd import __version__
from indexd.commitlog.segments import NOBODY, LogLimit, list_segments
from indexd.config import Config
from indexd.config.compiled import needs_compiling
from indexd.errors import (
    BusyError,
    CorruptDataError,
    DiskError,
    DisturbedError,
    IndexdError,
    UnsafeStoreError,
    UsageError,
)
from indexd.flush.frontier import remove_abort, write_abort
from indexd.recovery.open import Opened, check_store, load_kernels, open_data, reader_options
from indexd.recovery.recover import NO_DAMAGE, Damage, DamagedError, WholeLog, once
from indexd.serve.daemon_status import DaemonStatus
from indexd.serve.server import ServeThread
from indexd.service.broker import Around, BrokerLimit
from indexd.service.daemon import Daemon
from indexd.service.instance import Instance, Notifier, Starts, configure_log
from indexd.service.state import write_state
from indexd.storage.disk import Disk
from indexd.storage.lock import DirectoryLock
from indexd.storage.names import DataFiles

_PROGRESS_EVERY_SECONDS = 2.0
#: So long nothing may be heard of a recovery until its next step: a file of the largest size on a slow disk.
STEP_SECONDS = 300.0
_COMPILING = "once: later starts load what is compiled now"


def _instance_of(config: Config, reload_config: Callable[[], Config], notifier: Notifier) -> Instance:
    # With the lock; a store without a log is refused before a port is open or anything is made.
    board, disk, files = DaemonStatus(config), Disk(), DataFiles(config.store.data)
    log = configure_log(config.log, board.events.tap)
    check_store(config)
    list_segments(disk, config.store.commit_log_directories, config.store.segment_size)
    disk.make_dir(config.store.data)
    lock = DirectoryLock(files.lock)
    lock.acquire()
    starts = Starts(disk, files.starts, config.recovery)
    return Instance(config, reload_config, disk, files, lock, starts, board, notifier, log)


def run_daemon(config: Config, reload_config: Callable[[], Config]) -> None:
    """Run until a signal says stop; raises IndexdError. ``reload_config`` is called for each HUP.

    When the log was rewritten, or somebody touched our files, it recovers as after a crash and goes on.
    """
    with suppress(OSError, ValueError, AttributeError):  # standard error is closed, or none of the system's
        faulthandler.enable()  # where every thread stood when the watchdog's SIGABRT came
    instance = _instance_of(config, reload_config, Notifier.from_environment(os.environ))
    try:
        _listen(instance)
        with ServeThread(config, instance.board, instance.log), Around(instance) as around:
            damage: Damage | None = NO_DAMAGE
            while damage is not None:
                damage = _run_once(instance, around, damage)
            instance.board.leaving()
    except _StoppedError:
        # Nothing that was durable is touched by an opening that is broken off; the flag stays, the next start recovers.
        instance.starts.forget()
        instance.log.info("stopped", phy_offset=None, messages=None)
    finally:
        instance.lock.release()


class _StoppedError(BaseException):
    """TERM or INT before the tasks run."""


def _listen(instance: Instance) -> None:
    # Until an event loop takes the signals, and again when it has left them: a stop ends the opening wherever it is,
    # as a kill would, and a HUP is remembered until it runs.
    def on_signal(number: int, _: object) -> None:
        if number == signal.SIGHUP:
            instance.is_reload_due = True
            return
        for other in (signal.SIGTERM, signal.SIGINT):
            signal.signal(other, signal.SIG_IGN)
        instance.board.leaving()
        instance.notifier.stopping()
        raise _StoppedError

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, on_signal)


def _run_once(instance: Instance, around: Around, damage: Damage) -> Damage | None:
    # None after a stop, or what another opening has to mend.
    daemon = None
    try:
        instance.lock.renew()
        instance.starts.begin()
        opened = open_for_run(instance, damage=damage, log_limit=around.log_limit)
        daemon = Daemon(instance, opened)
        around.follow(opened.reader, daemon.state.meter)
        try:
            asyncio.run(daemon.run())
        finally:
            _listen(instance)
    except OSError as error:  # descriptors for the event loop
        raise DiskError("run beside", instance.files.data, error) from error
    except DisturbedError as error:
        if daemon is not None:
            if daemon.is_stopping:
                raise
            daemon.pipeline.close()
            daemon.reader.close()
        instance.board.leaving("opening")
        instance.log.error("disturbed", problem=str(error))  # noqa: TRY400 - a line, no trace
        return error.damage if isinstance(error, DamagedError) else NO_DAMAGE
    except IndexdError as error:
        is_refusal = isinstance(error, (UnsafeStoreError, UsageError, BusyError))
        if is_refusal or (isinstance(error, DiskError) and error.is_transient):
            with suppress(DiskError):  # the error itself is what has to be said
                instance.starts.take_back()  # said, it is no crash, however often it is tried again
        raise
    finally:
        around.unfollow()
    return None


def open_for_run(
    instance: Instance,
    *,
    forced: bool = False,
    damage: Damage = NO_DAMAGE,
    log_limit: LogLimit = NOBODY,
) -> Opened:
    """Open the data directory with the abort flag up, mend ``damage``, and log what was found and done."""
    config, disk, files, board = instance.config, instance.disk, instance.files, instance.board
    unclean, created = disk.exists(files.abort), not disk.exists(files.frontier)
    root = str(config.store.store or config.store.commit_log_directories[0].parent)
    instance.log.info("starting", version=__version__, pid=os.getpid(), store=root, data=str(files.data))
    # One that a dead process left: in a container this one may well have the same pid.
    disk.unlink(files.state)
    board.last_shutdown_clean = not unclean
    instance.notifier.extend(STEP_SECONDS)  # kernels may have to be compiled
    instance.notifier.status("opening")
    _load_kernels(instance)
    # Recovery changes files: a death inside it without this flag would look like a clean stop.
    write_abort(disk, files.abort)
    progress = RecoveryProgress(instance)
    try:
        opened = open_data(config, disk, progress, unclean=unclean, forced=forced, damage=damage, log_limit=log_limit)
    except (UnsafeStoreError, UsageError):
        if not unclean:  # and nothing was changed
            remove_abort(disk, files.abort)
        raise
    if opened.is_changed:
        opened.pipeline.persist(opened.pipeline.progress)
    if opened.damage is not None:
        instance.log.error("frontier_unreadable", problem=opened.damage)
    event, recovered = "created" if created else "recovered" if unclean else "opened", opened.recovered
    facts = {
        "phy_offset": opened.pipeline.built.phy_offset,
        "index_files": len(recovered.files),
        "kept_entries": recovered.kept_entries,
        "dropped_entries": recovered.dropped_entries,
        "deleted_files": len(recovered.deleted_files),
        "rewritten_files": len(recovered.rewritten_files),
        "refilled_bytes": opened.refilled_bytes,
        "reasons": recovered.reasons,
        "seconds": round(opened.seconds, 3),
    }
    instance.log.info(event, **facts)
    board.recovered(event, {to_camel(key): value for key, value in facts.items()})
    return opened


def _load_kernels(instance: Instance) -> None:
    # The first start of a version compiles them, for a minute or two on a slow machine: that is no hang.
    board = instance.board
    board.is_compiling = needs_compiling()
    if board.is_compiling:
        instance.log.info("compiling", hint=_COMPILING, folder=os.environ["NUMBA_CACHE_DIR"])
        instance.notifier.status(f"compiling, {_COMPILING}")
        _show(instance)
    load_kernels(instance.config)
    if board.is_compiling:
        board.is_compiling = False
        instance.disk.unlink(instance.files.state)


def _show(instance: Instance) -> None:
    with suppress(DiskError):  # a courtesy; the opening itself meets and reports a failing disk
        write_state(instance.disk, instance.files, instance.board.row())


class RecoveryProgress:
    """Callable as ``progress(step, done, total)``: every few seconds in the log, for systemd and in DATA/state."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._told = time.monotonic()

    def __call__(self, step: str, done: int, total: int) -> None:
        instance, now = self._instance, time.monotonic()
        instance.board.recovering(step, done, total)
        if now - self._told >= _PROGRESS_EVERY_SECONDS:
            self._told = now
            instance.notifier.extend(STEP_SECONDS)
            instance.log.info("recovering", step=step, done=done, total=total)
            instance.notifier.status(f"recovering: {step} {done} of {total} ({done / max(total, 1):.0%})")
            _show(instance)


def recover_now(config: Config) -> dict[str, Any]:
    """``indexd --recover``: verify every file against its header and the log, mend, catch up with the log, and end.

    Says what was done; raises IndexdError. The data directory is as after a clean stop then.
    """
    instance = _instance_of(config, lambda: config, Notifier(None, None))
    started, disk, files, problem = time.monotonic(), instance.disk, instance.files, None
    try:
        with closing(BrokerLimit(config, disk)) as limit:
            opened = open_for_run(instance, forced=True, log_limit=limit)
            reader, pipeline, progress = opened.reader, opened.pipeline, RecoveryProgress(instance)
            reader.options = replace(once(reader_options(config)), take_older=True)
            reader.log_limit = limit
            log_left, begin, messages = WholeLog(reader), reader.position, pipeline.built.messages
            try:
                for item in log_left:
                    pipeline.build(item)
                    total = reader.log.segments[-1].end - begin if reader.log.segments else 0
                    progress("index", pipeline.built.phy_offset - begin, total)
            except CorruptDataError as error:
                problem = CorruptDataError(f"{error}; everything before it is indexed", error.hint)
            finally:
                reader.close()
        pipeline.finish()
        remove_abort(disk, files.abort)
        disk.unlink(files.state)
        disk.unlink(files.starts)
        if problem is not None:
            raise problem
        recovered = opened.recovered
        return {
            "data": str(files.data),
            "reasons": recovered.reasons,
            "keptFiles": len(recovered.files),
            "keptEntries": recovered.kept_entries,
            "droppedEntries": recovered.dropped_entries,
            "deletedFiles": list(recovered.deleted_files),
            "rewrittenFiles": recovered.rewritten_files,
            "refilledBytes": opened.refilled_bytes,
            "rebuiltEntries": pipeline.outputs[0].figures()["indexEntries"],
            "rebuiltMessages": pipeline.built.messages - messages,
            "beginOffset": pipeline.built.begin_offset,
            "phyOffset": pipeline.built.phy_offset,
            "unreadableAt": log_left.unreadable and log_left.unreadable.offset,
            "seconds": round(time.monotonic() - started, 3),
        }
    finally:
        instance.lock.release()
