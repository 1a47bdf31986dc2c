"""BrokerLimit: the LogLimit of a running daemon. It asks the broker, seldom and with patience.

The reader believes nothing behind the offset that the broker named last. While it does not answer, that offset stays,
however long: what a broker that died left behind it is told from a longer, older log by the broker alone, when it is
back. A broker that never answered bounds nothing, so that one that is down does not keep a first index from being
built. What such a broker cuts afterwards is found as without an address, by what the index stands on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from indexd.service.broker_admin import BrokerAdmin

# Between two questions of a reader that waits for the answer, and after the first question without one.
_ASK_SECONDS = 0.02
_RETRY_SECONDS_MIN = 0.5


class BrokerLimit:
    """``ask`` is for the reader's thread, ``refresh`` for whoever watches the broker."""

    def __init__(self, address: str, retry_max: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._address = address
        self._admin = BrokerAdmin(address)
        self._clock = clock
        self._lock = threading.Lock()
        self._retry_max = max(retry_max, _RETRY_SECONDS_MIN)
        self._retry = _RETRY_SECONDS_MIN
        self._next_ask = 0.0
        self._position: int | None = None
        #: What the broker named last; None before the first time.
        self.offset: int | None = None
        #: Why there was no answer to the last question; None when there was one.
        self.silence: str | None = "it was not asked yet"

    def ask(self, position: int) -> int | None:
        """The offset, asked for anew when the last question is some time ago; a reader waits at ``position``."""
        self._position = position
        if self._clock() >= self._next_ask and self._lock.acquire(blocking=False):  # else it is just being asked
            try:
                self._question()
            finally:
                self._lock.release()
        return self.offset

    def refresh(self) -> None:
        """Ask now."""
        with self._lock:
            self._question()

    def unsafe(self, *, is_expected: bool) -> list[str]:
        """What is wrong with the offset, and what follows; ``is_expected``: the broker runs, so it should answer."""
        offset, position = self.offset, self._position
        if self.silence is not None and is_expected:
            silent = f"the broker at {self._address} does not say how far its log goes ({self.silence})"
            if offset is None:
                return [f"{silent}: what is read is not bounded by it; see broker_address"]
            return [f"{silent}: nothing behind {offset} is indexed until it does; see broker_address"]
        if self.silence is None and offset is not None and position is not None and offset < position:
            cut = f"the broker's log ends at {offset} and was read up to {position}, so it was cut"
            return [f"{cut}: entries behind its end stay until something else is written there"]
        return []

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._admin.close()

    def _question(self) -> None:
        answer = self._admin.max_offset()
        if isinstance(answer, int):
            self.offset, self.silence, self._retry = answer, None, _RETRY_SECONDS_MIN
            self._next_ask = self._clock() + _ASK_SECONDS
        else:
            self.silence = answer
            self._next_ask = self._clock() + self._retry
            self._retry = min(2 * self._retry, self._retry_max)
