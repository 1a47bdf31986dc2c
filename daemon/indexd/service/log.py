"""Logs by structlog: words on a terminal, lines with a priority in the journal, else JSON; and what systemd is told.

Event names are stable identifiers (``recovered``, ``rolled``, ``corrupt``, ...); CONTRIBUTING.md lists them. Nothing is
logged per message.

What goes to the journal has its priority in front of each line, so that ``journalctl -p err`` finds it.

Notifier sends one datagram a message to $NOTIFY_SOCKET (sd_notify(3)). It never waits or raises: a service manager that
is busy, gone or was never there must not hold the index up. What starts a unit, ``READY=1``, is sent again with
whatever comes next until it has left.
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
from typing import Any

import structlog

from indexd.config import LogConfig

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

    def __init__(self, *_: Any) -> None:
        self._stream = sys.stderr

    def msg(self, message: str) -> None:
        """Write one line."""
        with suppress(OSError, ValueError, AttributeError):
            self._stream.write(message + "\n")
            self._stream.flush()

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
    return structlog.get_logger("indexd")


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
