"""TERM and INT end the run by SystemExit, so that every ``finally`` has its turn."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_NUMBERS = (signal.SIGTERM, signal.SIGINT)


class Stop:
    """Listens from its making on. Inside ``held`` a signal waits, so that no process is started and not noted."""

    def __init__(self) -> None:
        self._held = False
        self._came = 0
        for number in _NUMBERS:
            signal.signal(number, self._on_signal)

    @contextmanager
    def held(self) -> Iterator[None]:
        """For a start and the note of it; blocking the signals instead would be inherited by who is started."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        if self._came:
            raise SystemExit(128 + self._came)

    def ignore(self) -> None:
        """From now on: cleaning up is not broken off."""
        for number in _NUMBERS:
            signal.signal(number, signal.SIG_IGN)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._came = number
        if not self._held:
            raise SystemExit(128 + number)
