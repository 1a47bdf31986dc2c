"""Log lines by structlog on standard error: readable on a terminal, JSON otherwise; never one per message.

Event names are stable identifiers (``recovered``, ``rolled``, ``corrupt``, ...); CONTRIBUTING.md lists them.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog

from indexd.config import LogConfig

Logger = Any


def configure_log(config: LogConfig) -> Logger:
    """Set up structlog for the process and return the logger."""
    console = config.log_format == "console" or (config.log_format == "auto" and sys.stderr.isatty())
    renderer: Any = (
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
        if console
        else structlog.processors.JSONRenderer(ensure_ascii=False)
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=not console),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, config.log_level.upper())),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )
    return structlog.get_logger("indexd")
