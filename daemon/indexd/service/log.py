"""Log lines by structlog on standard error: readable on a terminal, JSON otherwise; never one per message.

Event names are stable identifiers (``recovered``, ``rolled``, ``corrupt``, ...); CONTRIBUTING.md lists them.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from typing import Any

import structlog

from indexd.config import LogConfig

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
    """Set up structlog for the process and return the logger; ``tap`` sees every line that is logged."""
    console = config.log_format == "console" or (config.log_format == "auto" and _is_terminal())
    renderer: Any = (
        structlog.dev.ConsoleRenderer(colors=_is_terminal())
        if console
        else structlog.processors.JSONRenderer(ensure_ascii=False)
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=not console),
            structlog.processors.format_exc_info,
            *([] if tap is None else [tap]),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, config.log_level.upper())),
        logger_factory=_LineLogger,
        cache_logger_on_first_use=False,
    )
    return structlog.get_logger("indexd")
