"""Where the broker of a store listens, when ``broker_address`` does not say it.

Nothing is sent to a port that is not known to be the broker's own: its port for replicas takes any bytes for a
replica's acknowledgement. A broker listens on ``listenPort`` and, for what must not wait, on the port two below.
"""

from __future__ import annotations

from collections.abc import Callable

from indexd.commitlog.segments import SegmentList
from indexd.config import Config
from indexd.config.serving import is_peer
from indexd.errors import IndexdError
from indexd.service.broker_admin import BrokerAdmin, Offsets
from indexd.storage.broker_lock import BrokerLock
from indexd.storage.listening import listening

_FAST_PORT_BELOW = 2
_HINT = "set broker_address"


class BrokerFinder:
    """``find`` and ``offsets`` are for one thread at a time."""

    def __init__(
        self, config: Config, look_at_lock: Callable[[], BrokerLock], list_log: Callable[[], SegmentList]
    ) -> None:
        self._config = config
        self._look_at_lock = look_at_lock
        self._list_log = list_log
        self._admin: BrokerAdmin | None = None
        #: Where the broker answered last; None before the first time, and while it does not.
        self.address: str | None = None

    def offsets(self) -> Offsets | str:
        """What the broker of this store says, or why there is none to ask."""
        try:
            before = self._list_log()
            if self._admin is not None:
                answer = self._ask(before)
                if isinstance(answer, Offsets):
                    return answer
                self.close()
            address, why = self._candidate()
            if address is None:
                return why
            self.address, self._admin = address, BrokerAdmin(address)
            answer = self._ask(before)
        except IndexdError as error:
            answer = error.line()
        if isinstance(answer, str):
            self.close()
        return answer

    def close(self) -> None:
        """Close the connection; the next question looks for the broker again."""
        if self._admin is not None:
            self._admin.close()
        self._admin = self.address = None

    def _ask(self, before: SegmentList) -> Offsets | str:
        assert self._admin is not None
        answer = self._admin.offsets()
        if isinstance(answer, str):
            return f"the broker at {self.address}: {answer}"
        after = self._list_log()
        begin, end = before.min_offset or 0, after.segments[-1].end if after.segments else 0
        if begin <= max(answer.begin, 0) <= (after.min_offset or 0) and begin <= answer.end <= end:
            return answer
        return f"the broker at {self.address} is another store's: its log is [{answer.begin}, {answer.end})"

    def _candidate(self) -> tuple[str | None, str]:
        # Where to ask, or None and why not.
        if self._config.store.broker_conf is not None:
            facts = self._config.broker
            address = f"{facts.broker_ip1 or '127.0.0.1'}:{facts.listen_port}"
            return (address, "") if is_peer(address) else (None, f"{address}, of broker_conf, is no address: {_HINT}")
        lock = self._look_at_lock()
        if not lock.alive:
            return None, lock.why or "no broker runs here"
        if lock.pid is None:
            return None, f"{lock.why}: {_HINT}"
        try:
            ports = listening(lock.pid)
        except OSError as error:
            return None, f"where the broker, pid {lock.pid}, listens cannot be seen ({error.strerror}): {_HINT}"
        pairs = [port for port in sorted(ports) if port - _FAST_PORT_BELOW in ports]
        if len(pairs) != 1:
            what = "is not to be told from its other ports" if pairs else "is not there yet"
            return None, f"the listenPort of the broker, pid {lock.pid}, {what}: {_HINT}"
        return f"{ports[pairs[0]]}:{pairs[0]}", ""
