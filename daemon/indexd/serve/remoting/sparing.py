"""SparingLog: lines that others can bring about, each at most once a minute, with how many were left out."""

from __future__ import annotations

import time
from typing import Any

_SECONDS = 60.0


class SparingLog:
    """For the events of one outlet: their names are few and fixed, so nothing here grows."""

    def __init__(self, log: Any) -> None:
        self._log = log
        self._said: dict[str, tuple[float, int]] = {}  # event -> (when, left out since)

    def warning(self, event: str, **fields: object) -> None:
        """As structlog's, with ``left_out``: such lines since the one before, where there were any."""
        now = time.monotonic()
        at, left_out = self._said.get(event, (-_SECONDS, 0))
        if now - at < _SECONDS:
            self._said[event] = (at, left_out + 1)
            return
        self._said[event] = (now, 0)
        if left_out:
            fields["left_out"] = left_out
        self._log.warning(event, **fields)
