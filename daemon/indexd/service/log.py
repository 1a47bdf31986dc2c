"""Log lines by structlog: words on a terminal, entries in the journal, else JSON; never one a message.

Event names are stable identifiers (``recovered``, ``rolled``, ``corrupt``, ...); CONTRIBUTING.md lists them.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from typing import Any

import structlog

from indexd.config import LogConfig
from indexd.service.journal import Journal, is_journal_stream, render_journal

Logger = Any
Processor = Callable[[Any, str, MutableMapping[str, Any]], MutableMapping[str, Any]]


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


class _LineLogger:
    """Writes lines to standard error. A line that cannot be written is lost: no full log disk stops the index."""

    def __init__(self, *_: Any) -> None:
        self._stream = sys.stderr

    def msg(self, message: str) -> None:
        """Write one line."""
        with suppress(OSError, ValueError, AttributeError):
            self._stream.write(message + "\n")
            self._stream.flush()

    log = debug = info = warning = warn = error = critical = exception = msg


def configure_log(config: LogConfig, tap: Processor | None = None) -> Logger:
    """Set up structlog for the process and return the logger; ``tap`` sees every line, also those below the level."""
    kind = _log_format(config)
    renderers: dict[str, Any] = {
        "console": structlog.dev.ConsoleRenderer(colors=_is_terminal()),
        "json": structlog.processors.JSONRenderer(ensure_ascii=False),
        "journal": render_journal,
    }
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=kind != "console"),
            structlog.processors.format_exc_info,
            *([] if tap is None else [tap]),
            functools.partial(_leave_out, _level(config)),
            renderers[kind],
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG if tap else _level(config)),
        logger_factory=_journal if kind == "journal" else _LineLogger,
        cache_logger_on_first_use=False,
    )
    return structlog.get_logger("indexd")


def _level(config: LogConfig) -> int:
    return logging.getLevelNamesMapping()[config.log_level.upper()]


def _leave_out(level: int, _: object, __: str, row: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    # Behind the tap: what is an event does not depend on how much is logged.
    if logging.getLevelNamesMapping()[row["level"].upper()] < level:
        raise structlog.DropEvent
    return row


def _log_format(config: LogConfig) -> str:
    if config.log_format != "auto":
        return config.log_format
    if _is_terminal():
        return "console"
    return "journal" if is_journal_stream(os.environ) else "json"


@functools.cache
def _journal(*_: object) -> Journal:
    # One for the process: structlog asks for a logger at every line.
    return Journal()
