"""From a configuration to a running daemon: the lock, the abort flag, recovery, the event loop."""

from __future__ import annotations

import errno
import faulthandler
import os
import resource
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import TypeVar

import uvloop

from indexd import __version__
from indexd.commitlog.segments import list_segments
from indexd.commitlog.tail import LogLimit
from indexd.config import Config
from indexd.config.compiled import mark_compiled, needs_compiling
from indexd.errors import BusyError, DiskError, DisturbedError, IndexdError, UnsafeStoreError, UsageError
from indexd.flush.frontier import remove_abort, write_abort
from indexd.recovery.open import Opened, check_store, load_kernels, open_data
from indexd.recovery.recover import NO_DAMAGE, Damage, DamagedError
from indexd.serve.board import Board
from indexd.serve.server import ServeThread
from indexd.service.daemon import Daemon
from indexd.service.instance import Instance, Starts
from indexd.service.log import Logger, Notifier, configure_log
from indexd.service.progress import STEP_SECONDS, RecoveryProgress
from indexd.service.state import write_state
from indexd.service.watchdog import Around
from indexd.storage.disk import Disk
from indexd.storage.lock import DirectoryLock
from indexd.storage.names import DataFiles

E = TypeVar("E", bound=BaseException)
_RETRY_SECONDS_MIN = 1.0
# The event loop alone fails without words when it has too few.
_DESCRIPTORS_MIN = 32


def run_daemon(config: Config, reload_config: Callable[[], Config]) -> None:
    """Run until a signal says stop; raises IndexdError. ``reload_config`` is called for each HUP.

    When the log was rewritten, or somebody touched our files, it recovers as after a crash and goes on.
    """
    with suppress(OSError, ValueError, AttributeError):  # standard error is closed, or none of the system's
        faulthandler.enable()  # where every thread stood when the watchdog's SIGABRT came
    notifier = Notifier.from_environment(os.environ)
    board = Board(config)
    log = configure_log(config.log, board.events.tap)
    disk = Disk()
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < _DESCRIPTORS_MIN:
        raise DiskError("run in", config.store.data, OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
    check_store(config)
    # A store without a log is refused before a port is open or anything is made.
    list_segments(disk, config.store.commit_log_directories, config.store.segment_size)
    disk.make_dir(config.store.data)
    files = DataFiles(config.store.data)
    lock = DirectoryLock(files.lock)
    lock.acquire()
    starts = Starts(disk, files.starts, config.recovery)
    instance = Instance(config, reload_config, disk, files, lock, starts, board, notifier, log)
    try:
        wish = _StopWish(instance)
        with ServeThread(config, board, log), Around(instance) as around:
            damage = NO_DAMAGE
            while (disturbed := _run_once(instance, around, wish, damage)) is not None:
                damage = disturbed.damage if isinstance(disturbed, DamagedError) else NO_DAMAGE
                board.leaving("opening")
                instance.log.error("disturbed", problem=str(disturbed))
            board.leaving()
    except _StoppedError:
        # Nothing that was durable is touched by an opening that is broken off; the flag stays, the next start recovers.
        starts.forget()
        instance.log.info("stopped", phy_offset=None, messages=None)
    finally:
        lock.release()


class _StoppedError(Exception):
    """TERM or INT before the tasks run."""


class _StopWish:
    """Remembers a signal until the opening comes to a point where it can be broken off, and a HUP until it runs."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self.number = 0
        self.listen()

    def listen(self) -> None:
        """From now on, and again after an event loop has taken the signals and left them."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGHUP, self._on_reload)

    def check(self) -> None:
        if self.number:
            raise _StoppedError

    def pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.check()
            self._instance.notifier.extend(STEP_SECONDS)
            time.sleep(0.1)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self.number = number
        self._instance.board.leaving()
        self._instance.notifier.stopping()

    def _on_reload(self, _: int, __: FrameType | None) -> None:
        self._instance.is_reload_due = True


def _run_once(instance: Instance, around: Around, wish: _StopWish, damage: Damage) -> DisturbedError | None:
    # None after a stop, or what makes another opening necessary.
    daemon = None
    try:
        if not instance.lock.is_held():
            instance.lock.renew()
        opened = _open_patiently(instance, around, wish, damage)
        daemon = Daemon(instance, opened)
        around.follow(opened.reader, daemon.state.meter)
        _run_on_loop(daemon, wish)
    except* OSError as group:
        data = instance.files.data
        raise DiskError("run beside", data, first_error(group)) from group  # descriptors for the event loop
    except* IndexdError as group:
        error = first_error(group)
        if not isinstance(error, DisturbedError) or (daemon is not None and daemon.is_stopping):
            _take_back(instance.starts, error)
            raise error from None
        if daemon is not None:
            daemon.pipeline.close()
            daemon.reader.close()
        disturbed = error
    else:
        return None
    finally:
        around.unfollow()
    return disturbed


def _run_on_loop(daemon: Daemon, wish: _StopWish) -> None:
    loop = uvloop.new_event_loop()
    try:
        loop.run_until_complete(daemon.run())
    finally:
        # Without a free descriptor uvloop cannot be closed; the process ends soon, or the next loop is another.
        with suppress(RuntimeError):
            loop.close()
        wish.listen()


def _take_back(starts: Starts, error: IndexdError) -> None:
    # What was refused and said is no crash, however often it is tried again.
    if isinstance(error, (UnsafeStoreError, UsageError, BusyError)) or (
        isinstance(error, DiskError) and error.is_transient
    ):
        with suppress(DiskError):  # the error itself is what has to be said
            starts.take_back()


def _open_patiently(instance: Instance, around: Around, wish: _StopWish, damage: Damage) -> Opened:
    # A full disk is waited for: whoever started this would only start it again.
    say = instance.log.error
    seconds, is_counted, has_waited = _RETRY_SECONDS_MIN, False, False
    while True:
        try:
            if not is_counted:
                instance.starts.begin()
                is_counted = True
            opened = open_for_run(
                instance.config, instance.disk, instance.files, instance.log,
                damage=damage, check_stop=wish.check, board=instance.board, notifier=instance.notifier,
                log_limit=around.log_limit,
            )  # fmt: skip
        except DiskError as error:
            if not error.is_full:
                raise
            say("degraded", stage="open", problem=error.line(), retry_seconds=seconds)
            instance.notifier.status(f"waiting (open): {error.line()}")
            instance.board.waiting("open", error.line())
            wish.pause(seconds)
            has_waited = True
            seconds = min(2 * seconds, instance.config.reader.retry_max_seconds)
        else:
            if has_waited:
                instance.log.info("healed", stage="open")
            wish.check()
            return opened


def first_error(group: BaseExceptionGroup[E]) -> E:
    """The one error of a group that the operator is shown."""
    first = group.exceptions[0]
    return first_error(first) if isinstance(first, BaseExceptionGroup) else first


def open_for_run(
    config: Config,
    disk: Disk,
    files: DataFiles,
    log: Logger,
    *,
    forced: bool = False,
    damage: Damage = NO_DAMAGE,
    check_stop: Callable[[], None] = lambda: None,
    board: Board | None = None,
    notifier: Notifier | None = None,
    log_limit: LogLimit | None = None,
) -> Opened:
    """Open the data directory with the abort flag up, mend ``damage``, and log what was found and done.

    ``check_stop`` is called now and then and may raise: what was durable stays so.
    """
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
    # One that a dead process left: in a container this one may well have the same pid.
    disk.unlink(files.state)
    if board is not None:
        board.last_shutdown_clean = not unclean
    if notifier is not None:
        notifier.extend(STEP_SECONDS)  # kernels may have to be compiled
        notifier.status("opening")
    _load_kernels(config, disk, files, log, board, notifier)
    check_stop()
    # Recovery changes files: a death inside it without this flag would look like a clean stop.
    write_abort(disk, files.abort)
    try:
        with RecoveryProgress(log, disk, files, check_stop, board, notifier) as progress:
            opened = open_data(
                config, disk, progress, unclean=unclean, forced=forced, damage=damage, log_limit=log_limit
            )
    except (UnsafeStoreError, UsageError):
        if not unclean:  # and nothing was changed
            remove_abort(disk, files.abort)
        raise
    if opened.is_changed:
        try:
            opened.pipeline.persist(opened.pipeline.progress)
        except DiskError:
            opened.pipeline.close()
            raise
    _say_opened("created" if created else "recovered" if unclean else "opened", opened, log, board)
    return opened


def _load_kernels(
    config: Config, disk: Disk, files: DataFiles, log: Logger, board: Board | None, notifier: Notifier | None
) -> None:
    # The first start of a version compiles them, for a minute or two on a slow machine: that is no hang.
    is_first = needs_compiling()
    if is_first:
        log.info("compiling", hint="once: later starts load what is compiled now", folder=os.environ["NUMBA_CACHE_DIR"])
        if notifier is not None:
            notifier.status("compiling, once: later starts load what is compiled now")
        row = {"pid": os.getpid(), "phase": "opening", "compiling": True}
        if board is not None:
            board.is_compiling = True
            row = board.row()
        with suppress(DiskError):  # a courtesy; the opening itself meets and reports a failing disk
            write_state(disk, files, row)
    load_kernels(config)
    if is_first:
        mark_compiled()
        if board is not None:
            board.is_compiling = False
        with suppress(DiskError):
            disk.unlink(files.state)


def _say_opened(event: str, opened: Opened, log: Logger, board: Board | None) -> None:
    if opened.damage is not None:
        log.error("frontier_unreadable", problem=opened.damage)
    recovered = opened.recovered
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
    log.info(event, **facts)
    if board is not None:
        board.recovered(event, {_camel(key): value for key, value in facts.items()})


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)
