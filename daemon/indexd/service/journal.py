"""Journal: log lines as entries of journald, each with its fields, so that ``journalctl EVENT=degraded`` finds them.

One datagram an entry in journald's native protocol (systemd.io/JOURNAL_NATIVE_PROTOCOL). Where none gets through, the
line goes to standard error with its priority in front (sd-daemon(3)); where that is full too, it is lost and counted.
"""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import sys
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

JOURNAL_SOCKET = Path("/run/systemd/journal/socket")
IDENTIFIER = "indexd"
#: syslog(3), by the log's own levels.
PRIORITIES = {"critical": 2, "error": 3, "warning": 4, "info": 6, "debug": 7}
# What journald or its readers give a meaning of their own; ours of that name gets a prefix.
_TAKEN = re.compile(r"MESSAGE(_ID)?|PRIORITY|EVENT|LOST_LINES|(CODE|SYSLOG|OBJECT|COREDUMP|UNIT|USER_UNIT|ERRNO|TID).*")
_NAME_MAX = 64
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_PLAIN = re.compile(r"[^\s\"=]+")


def is_journal_stream(environ: Mapping[str, str]) -> bool:
    """Whether standard error leads to the journal: JOURNAL_STREAM holds its device and inode then."""
    try:
        found = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):
        return False
    return environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


class Journal:
    """A structlog logger. Never raises and never waits: no journald that hangs stops the index."""

    def __init__(self, path: Path = JOURNAL_SOCKET) -> None:
        self.path = path
        self.lost = 0
        self._socket = self._stream = None
        with suppress(OSError):
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)
        with suppress(OSError, ValueError, AttributeError):
            number = sys.stderr.fileno()
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                self._stream = socket.socket(fileno=os.dup(number))

    def __repr__(self) -> str:
        return f"Journal({self.path}, lost={self.lost})"

    def close(self) -> None:
        """Give the descriptors back."""
        for end in (self._socket, self._stream):
            if end is not None:
                end.close()

    def msg(self, message: str, priority: int, fields: Mapping[str, str]) -> None:
        """Hand one entry over; ``fields`` have the journal's names."""
        lost = {"LOST_LINES": str(self.lost)} if self.lost else {}
        entry = encode_entry(
            {"MESSAGE": message, "PRIORITY": str(priority), "SYSLOG_IDENTIFIER": IDENTIFIER, **fields, **lost}
        )
        if self._send(entry) or self._write(f"<{priority}>{message}\n"):
            self.lost = 0
        else:
            self.lost += 1

    log = debug = info = warning = warn = error = critical = exception = msg

    def _send(self, entry: bytes) -> bool:
        if self._socket is None:
            return False
        try:
            self._socket.sendto(entry, str(self.path))
        except OSError:
            return False
        return True

    def _write(self, line: str) -> bool:
        try:
            if self._stream is not None:
                return self._stream.send(line.encode("utf-8", "replace"), socket.MSG_DONTWAIT) > 0
            sys.stderr.write(line)
            sys.stderr.flush()
        except (OSError, ValueError, AttributeError):
            return False
        return True


def render_journal(_: object, level: str, row: MutableMapping[str, Any]) -> Mapping[str, Any]:
    """The last processor: the arguments of ``Journal.msg``. The text is ``event key=value ...``."""
    event = str(row.pop("event", ""))
    severity = str(row.pop("level", level))
    row.pop("timestamp", None)  # the journal has its own
    texts = {key: _text(value) for key, value in row.items()}
    words = [event, *(f"{key}={_quoted(text)}" for key, text in texts.items() if key != "exception")]
    fields = {"EVENT": event, **{field_name(key): text for key, text in texts.items()}}
    return {"message": " ".join(words), "priority": PRIORITIES.get(severity, 6), "fields": fields}


def field_name(key: str) -> str:
    """``indexingWhy`` as INDEXING_WHY: A to Z, 0 to 9 and ``_``, a letter first, 64 characters at most."""
    name = re.sub(r"[^A-Z0-9_]", "_", _HUMP.sub("_", key).upper())
    if not name[:1].isalpha() or _TAKEN.fullmatch(name):
        name = f"INDEXD_{name}"
    return name[:_NAME_MAX]


def encode_entry(fields: Mapping[str, str]) -> bytes:
    """The datagram: ``NAME=value`` lines; a value of several lines by its length, 8 bytes little-endian."""
    parts = bytearray()
    for name, value in fields.items():
        data = value.encode("utf-8", "replace")
        if b"\n" in data:
            parts += name.encode() + b"\n" + len(data).to_bytes(8, "little") + data + b"\n"
        else:
            parts += name.encode() + b"=" + data + b"\n"
    return bytes(parts)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _quoted(text: str) -> str:
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)
