"""What a process has from its lock to its end, however often it opens its data directory: Instance, and its parts.

StageLiveness says whether the stages move. A stage gives a sign after a step that really was one: a look at the log, a
drain that was built or that the disk refused, a flush; never because time has passed. Then its next sign is due within
a limit, and within the wait that it says it will make. A stage that is overdue is stalled.

Starts counts in DATA/starts the starts that have come to nothing, so that a crash loop ends by itself: one line a
start, Unix time in ms. The file goes as soon as the daemon has caught up with the log, or was stopped by somebody.

Logs are structlog's: words on a terminal, lines with a priority in the journal, so that ``journalctl -p err`` finds
them, else JSON. Event names are stable identifiers (``recovered``, ``rolled``, ``corrupt``, ...); CONTRIBUTING.md lists
them. Nothing is logged per message.

Notifier sends one datagram a message to $NOTIFY_SOCKET (sd_notify(3)). It never waits or raises: a service manager that
is busy, gone or was never there must not hold the index up. What starts a unit, ``READY=1``, is sent again with
whatever comes next until it has left.

``take_over`` follows a HUP: the keys that a running daemon takes over at once.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from indexd.config import Config, LogConfig, RecoveryConfig
from indexd.errors import CrashLoopError, IndexdError
from indexd.serve.daemon_status import DaemonStatus
from indexd.storage.disk import Disk
from indexd.storage.lock import DirectoryLock
from indexd.storage.names import DataFiles

# Keys that a HUP changes at once; any other needs a restart. Who a node is and where it listens, connects and
# publishes is settled for the life of a process.
RELOADABLE = frozenset(
    {
        "log_level", "log_format", "drain_interval", "flush_interval", "poll_min_ms", "poll_max_ms",
        "retry_max_seconds", "settle_ms", "corrupt_after_ms", "on_corrupt", "verify_crc",
        "broker_address", "broker_check_interval", "scrub_interval",
        "disk_used_max", "read_rate_max", "memory_max", "drop_cache",
    }
)  # fmt: skip
_SECTIONS = (
    "store", "reader", "queue", "index", "outputs", "flush", "recovery", "query", "log", "node", "http", "remoting",
    "mqtt", "limits",
)  # fmt: skip
#: The limit when no service manager watches.
LIMIT_SECONDS = 60.0
#: syslog(3), by the log's own levels.
PRIORITIES = {"critical": 2, "error": 3, "warning": 4, "info": 6, "debug": 7}
_PLAIN = re.compile(r"[^\s\"=]+")


def is_journal_stream(environ: Mapping[str, str]) -> bool:
    """Whether standard error leads to the journal: JOURNAL_STREAM holds its device and inode then."""
    try:
        found = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):
        return False
    return environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


Logger = Any
Processor = Callable[[Any, str, MutableMapping[str, Any]], MutableMapping[str, Any]]


class LineLogger:
    """Writes lines to standard error. A line that cannot be written is lost: no full log disk stops the index."""

    def msg(self, message: str) -> None:
        """Write one line."""
        with suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(message + "\n")
            sys.stderr.flush()

    log = debug = info = warning = warn = error = critical = exception = msg


def render_journal(_: object, level: str, row: MutableMapping[str, Any]) -> str:
    """``<PRIORITY>event key=value ...``, from which the journal takes the priority (sd-daemon(3)); it has the time."""
    row.pop("timestamp", None)
    event, priority = str(row.pop("event", "")), PRIORITIES.get(str(row.pop("level", level)), 6)
    trace = row.pop("exception", None)
    words = [event, *(f"{key}={_quoted(value)}" for key, value in row.items())]
    lines = [" ".join(words), *([] if trace is None else str(trace).splitlines())]
    return "\n".join(f"<{priority}>{line}" for line in lines)


def _quoted(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def configure_log(config: LogConfig, tap: Processor | None = None) -> Logger:
    """Set up structlog for the process and return the logger; ``tap`` sees every line, also those below the level."""
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    level, kind = logging.getLevelNamesMapping()[config.log_level.upper()], config.log_format
    if kind == "auto":
        kind = "console" if is_terminal else "journal" if is_journal_stream(os.environ) else "json"
        if kind == "journal":  # a socket of this unit alone: no journald that hangs stops the index
            os.set_blocking(sys.stderr.fileno(), False)
    renderers: dict[str, Any] = {
        "console": structlog.dev.ConsoleRenderer(colors=is_terminal),
        "json": structlog.processors.JSONRenderer(ensure_ascii=False),
        "journal": render_journal,
    }
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=kind != "console"),
            structlog.processors.format_exc_info,
            *([] if tap is None else [tap]),
            functools.partial(_leave_out, level),
            renderers[kind],
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG if tap else level),
        logger_factory=LineLogger,
        cache_logger_on_first_use=False,
    )
    return structlog.get_logger()


def _leave_out(level: int, _: object, __: str, row: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    # Behind the tap: what is an event does not depend on how much is logged.
    if logging.getLevelNamesMapping()[row["level"].upper()] < level:
        raise structlog.DropEvent
    return row


_USEC = 1_000_000
# systemd reads 4096 bytes of a datagram, and a character has four bytes at most.
_STATUS_MAX = 512


class Notifier:
    """Messages to one service manager; from any thread. ``watchdog_seconds`` is None when nobody watches."""

    def __init__(self, address: str | None, watchdog_seconds: float | None) -> None:
        self.watchdog_seconds = None if address is None else watchdog_seconds
        self._owed = ""
        self._socket: socket.socket | None = None
        if address is not None:
            # Linux's abstract names begin with a zero byte, which an environment cannot hold.
            self._address = b"\0" + os.fsencode(address[1:]) if address.startswith("@") else os.fsencode(address)
            with suppress(OSError):
                # Open from the start: later there may be no descriptor left, and that is when it is wanted.
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
                self._socket.setblocking(False)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Notifier:
        """By NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID; without the first it does nothing."""
        address = environ.get("NOTIFY_SOCKET", "")
        is_ours = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        usec = environ.get("WATCHDOG_USEC", "")
        seconds = int(usec) / _USEC if is_ours and usec.isascii() and usec.isdigit() and int(usec) > 0 else None
        # A path or an abstract name; a virtual machine's vsock has no tail loop to tell of.
        return cls(address if address[:1] in ("/", "@") and len(address) > 1 else None, seconds)

    def close(self) -> None:
        """Give the descriptor back; nothing is sent any more."""
        if self._socket is not None:
            self._socket.close()

    def ready(self, status: str) -> None:
        """The log is tailed (which is not: caught up), or a reload is over."""
        self._owed = "READY=1"
        self._send(self._watchdog_lines(), _status_line(status))

    def status(self, text: str) -> None:
        """One line for ``systemctl status``."""
        self._send(_status_line(text))

    def extend(self, seconds: float) -> None:
        """Work before READY goes on, and will be heard of again within ``seconds``.

        A daemon that opens its data again after READY feeds the watchdog by it too.
        """
        self._send(f"EXTEND_TIMEOUT_USEC={int(seconds * _USEC)}", self._watchdog_lines())

    def watchdog(self) -> None:
        """Real progress, or a look that found nothing to do; call it four times in the watchdog's time."""
        self._send(self._watchdog_lines())

    def stopping(self) -> None:
        """A signal said stop: the last drain and flush follow."""
        self._owed = ""
        self._send("STOPPING=1", _status_line("stopping: the last drain and flush"))

    def reloading(self) -> None:
        """A HUP is being looked at; ``ready`` must follow."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def _watchdog_lines(self) -> str:
        return "WATCHDOG=1" if self.watchdog_seconds is not None else ""

    def _send(self, *lines: str) -> None:
        owed = self._owed
        message = "\n".join(line for line in (owed, *lines) if line)
        if self._socket is None or not message:
            return
        with suppress(OSError):
            self._socket.sendto(message.encode("utf-8", "replace"), self._address)
            if self._owed == owed:
                self._owed = ""


def _status_line(text: str) -> str:
    return f"STATUS={' '.join(text.split())[:_STATUS_MAX]}"


class StageLiveness:
    """Signs of the stages ``read``, ``build`` and ``flush``. One thread writes a stage's, any may look.

    ``watchdog``: seconds after which a service manager ends a process that is not heard of. A drain and a flush may
    take so long without any progress; a look at the log, of which there are many a second, half of it.
    """

    def __init__(self, watchdog: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        limit = watchdog or LIMIT_SECONDS
        self.limits = {"read": limit / 2, "build": limit, "flush": limit}
        self._clock, now = clock, clock()
        #: Of each stage its last sign, when the next has to come (None: nothing is asked of it), and how far it was.
        self._signs: dict[str, tuple[float, float | None, int | None]]
        self._signs = {"read": (now, now + limit, None), "build": (now, now + limit, None), "flush": (now, None, None)}

    def sign(self, stage: str, wait: float = 0.0, progress: int | None = None) -> None:
        """A step is done, or refused; the next one begins after ``wait`` seconds at the latest.

        With ``progress`` a step begins that may take long: it is alive as long as ``watch`` finds it further on.
        """
        now = self._clock()
        self._signs[stage] = now, now + wait + self.limits[stage], progress

    def watch(self, stage: str, progress: int) -> None:
        """How far the step is that has begun. Of the thread that writes the stage's signs."""
        if self._signs[stage][2] not in (None, progress):
            self.sign(stage, progress=progress)

    def rest(self, stage: str) -> None:
        """Nothing is asked of the stage until its next sign."""
        self._signs[stage] = self._clock(), None, None

    def put_off(self, seconds: float) -> None:
        """Nothing is late because the process was stopped for so long (SIGSTOP, a frozen cgroup)."""
        for name, (at, due, progress) in tuple(self._signs.items()):
            self._signs[name] = at + seconds, None if due is None else due + seconds, progress

    def stalled(self) -> dict[str, float]:
        """Each stage that is overdue, with the seconds since its last sign."""
        now, signs = self._clock(), tuple(self._signs.items())
        return {stage: round(now - at, 1) for stage, (at, due, _) in signs if due is not None and now > due}


class Starts:
    """Counts for one data directory. Raises DiskError, and CrashLoopError when there were too many."""

    def __init__(self, disk: Disk, path: Path, config: RecoveryConfig, clock: Callable[[], float] = time.time) -> None:
        self._disk, self._path, self._config, self._clock = disk, path, config, clock

    def begin(self) -> None:
        """Count a start; CrashLoopError if so many others within the time have come to nothing."""
        most, seconds = self._config.unclean_starts_max, self._config.unclean_starts_seconds
        if not most:
            return
        now = int(self._clock() * 1000)
        # One from the future is of a clock that was set back since: how old it is nobody knows.
        recent = [at for at in self._read() if now - seconds * 1000 <= at <= now]
        if len(recent) >= most:
            raise CrashLoopError(
                f"{len(recent)} unclean starts within {seconds:g} s ended before they had caught up with the "
                f"log, so this one is not tried ({self._path})",
                f"look at the log for what ended them; then run indexd --recover, or remove {self._path}",
            )
        self._write([*recent, now])

    def take_back(self) -> None:
        """This start was refused for a reason that was said: no crash."""
        self._write(self._read()[:-1])

    def forget(self) -> None:
        """It has caught up, or was stopped on purpose: what happened before does not count any more."""
        if self._disk.exists(self._path):
            self._disk.unlink(self._path)

    def _write(self, times: list[int]) -> None:
        if times:
            self._disk.write_atomically(self._path, "".join(f"{at}\n" for at in times).encode("ascii"))
        else:
            self.forget()

    def _read(self) -> list[int]:
        if not self._disk.exists(self._path):
            return []
        return [int(word) for word in self._disk.read(self._path).split() if word.isdigit() and len(word) < 20]


@dataclass(slots=True)
class Instance:
    """``config`` and ``log`` are replaced by a HUP; ``reload_config`` is what a HUP calls."""

    config: Config
    reload_config: Callable[[], Config]
    disk: Disk
    files: DataFiles
    lock: DirectoryLock
    starts: Starts
    board: DaemonStatus
    notifier: Notifier
    log: Logger = field(repr=False)
    #: A HUP came while nobody could follow it.
    is_reload_due: bool = False


def take_over(instance: Instance) -> bool:
    """What can be of a configuration that is read anew; False, and said so, if there is none."""
    instance.is_reload_due, before = False, instance.config
    try:
        found = instance.reload_config()
    except Exception as error:  # noqa: BLE001 - said; the configuration stays
        problem = error.line() if isinstance(error, IndexdError) else repr(error)
        instance.log.error("reload_refused", problem=problem)  # noqa: TRY400 - a line, no trace
        return False
    changed = changed_keys(before, found)
    instance.config = merge_reloadable(before, found)
    instance.log = configure_log(instance.config.log, instance.board.events.tap)
    instance.log.info("reloaded", changed=sorted(changed & RELOADABLE), needs_restart=sorted(changed - RELOADABLE))
    return True


def changed_keys(old: Config, new: Config) -> set[str]:
    """Keys of a daemon whose values differ between two configurations."""
    pairs = [(getattr(old, section), getattr(new, section)) for section in _SECTIONS]
    return {key for before, fresh in pairs for key in type(fresh).model_fields if vars(before)[key] != vars(fresh)[key]}


def merge_reloadable(old: Config, new: Config) -> Config:
    """``old`` with the reloadable keys of ``new``; a section in which none of them differs stays the same object."""
    changed, merged = changed_keys(old, new) & RELOADABLE, {}
    for section in _SECTIONS:
        fresh = getattr(new, section)
        if update := {key: getattr(fresh, key) for key in changed & set(type(fresh).model_fields)}:
            merged[section] = getattr(old, section).model_copy(update=update)
    return old.model_copy(update=merged)
