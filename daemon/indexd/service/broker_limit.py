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
# A reader whose questions bring nothing leaves them to whoever watches the broker, and asks if nobody does.
_SLACK_SECONDS = 2.0
# So many looks, a second from each other, a genuine offset may be behind the bytes.
_LOOKS = 3
_REMEDY = "correct broker_address and send HUP"


class BrokerLimit:
    """``ask`` is for the reader's thread, ``refresh`` for whoever watches the broker."""

    #: Nothing behind ``offset`` is believed.
    bounds = True

    def __init__(self, address: str, retry_max: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._address = address
        self._admin = BrokerAdmin(address)
        self._clock = clock
        self._lock = threading.Lock()
        self._retry_max = max(retry_max, _RETRY_SECONDS_MIN)
        self._retry = _RETRY_SECONDS_MIN
        self._asked = self._next_ask = 0.0
        # Where the reader waits and what stands there, and how long it leaves between two questions about that.
        self._waits_for: tuple[int, bytes] | None = None
        self._pause = _ASK_SECONDS
        self._position: int | None = None
        # Where the reader was at the last look, at how many looks in turn it could not go on, and what stood there.
        self._stood = (-1, 0)
        self._has_messages = False
        #: What the broker named last; None before the first time.
        self.offset: int | None = None
        #: Why there was no answer to the last question; None when there was one.
        self.silence: str | None = "it was not asked yet"

    def ask(self, position: int, head: bytes = b"") -> int | None:
        """The offset, asked for anew when the last question is some time ago; a reader waits at ``position``.

        While ``head``, which stands there, is the same and the answers bring nothing, it is asked later each time.
        """
        self._position = position
        if self._waits_for != (position, head):
            self._waits_for = (position, head)
            if self.silence is None:
                self._next_ask = min(self._next_ask, self._asked + _ASK_SECONDS)
            self._pause = _ASK_SECONDS
        if self._clock() >= self._next_ask and self._lock.acquire(blocking=False):  # else it is just being asked
            try:
                self._question()
                if self.offset is not None and self.offset <= position:
                    self._pause = min(2 * self._pause, self._retry_max + _SLACK_SECONDS)
            finally:
                self._lock.release()
        return self.offset

    def compare(self, position: int, *, is_waiting: bool, has_messages: bool) -> bool:
        """Every second or so, with the log as it is on disk: whether the offset holds the reader back for long.

        The reader is at ``position``; ``is_waiting``: it finds nothing there that it may take. ``has_messages``: whole
        ones stand there.
        """
        offset = self.offset
        is_odd = is_waiting and offset is not None and (has_messages or position < offset)
        looks = self._stood[1] + 1 if is_odd and position == self._stood[0] else int(is_odd)
        self._stood, self._position, self._has_messages = (position, looks), position, has_messages
        return looks > _LOOKS and has_messages

    def refresh(self) -> None:
        """Ask now."""
        with self._lock:
            self._question()

    def unsafe(self, *, is_expected: bool) -> list[str]:
        """What is wrong with the offset, and what follows; ``is_expected``: the broker runs, so it should answer."""
        position = self._position  # before the offset: the reader may be asking, and goes on behind a later one
        offset = self.offset
        if self.silence is not None and is_expected:
            silent = f"the broker at {self._address} does not say how far its log goes ({self.silence})"
            if offset is None:
                return [f"{silent}: what is read is not bounded by it; see broker_address"]
            return [f"{silent}: nothing behind {offset} is indexed until it does; see broker_address"]
        if self.silence is not None or offset is None:
            return []
        says = f"the broker at {self._address} says that its log ends at {offset}"
        if self._stood[1] > _LOOKS:
            return [f"{says}, {self._contradiction(offset)}: it is another broker's, so {_REMEDY}"]
        if position is not None and offset < position:
            cut = f"{says} and it was read up to {position}, so it was cut"
            return [f"{cut}, and entries behind its end stay until something is written there; if not, {_REMEDY}"]
        return []

    def _contradiction(self, offset: int) -> str:
        position = self._stood[0]
        if not self._has_messages:
            return f"but on disk there is no message at {position}"
        if offset > position:
            return f"but the message at {position} goes beyond that"
        return f"but whole messages stand at {position} (not indexed; or the log was cut and they are left of it)"

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._admin.close()

    def _question(self) -> None:
        answer = self._admin.max_offset()
        self._asked = self._clock()
        if isinstance(answer, int):
            self.offset, self.silence, self._retry = answer, None, _RETRY_SECONDS_MIN
            self._next_ask = self._asked + self._pause
        else:
            self.silence = answer
            self._next_ask = self._asked + self._retry
            self._retry = min(2 * self._retry, self._retry_max)
