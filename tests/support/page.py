"""What the page's tests look at: a log that they write on, and the daemon beside it that serves the page."""

from __future__ import annotations

import time
from pathlib import Path
from urllib.parse import urlencode

from support.commitlog_writer import CommitLogWriter, FrameSpec
from support.daemon import Daemon
from support.small_log import SEGMENT_SIZE, SIZES

#: Odd offsets behind it are no doubles.
BEGIN = 2**53 + 3 * SEGMENT_SIZE
TOPIC = "OrderPaid"
BODY = '{"order": 7, "amount": 12.50, "id": 12345678901234567890, "lines": [{"sku": "A"}, []], "order": 8}'


class Beside:
    """A log that a test writes on, the daemon beside it, and where its page is."""

    def __init__(self, home: Path, **env: str) -> None:
        self.writer = CommitLogWriter(home / "store" / "commitlog", SEGMENT_SIZE, start_offset=BEGIN)
        self.offsets: dict[str, list[int]] = {}
        self._home, self._env = home, env
        self.daemon = self._daemon("127.0.0.1:0")

    def _daemon(self, http: str) -> Daemon:
        env = {"INDEXD_HTTP": http, **self._env}
        return Daemon(self._home / "store", self._home / "data", *SIZES, env=env)

    def write(self, topic: str, key: str, *, body: str = BODY, **properties: str) -> int:
        """One message, stored now; its physical offset."""
        now = int(time.time() * 1000)
        given = {"KEYS": key, "UNIQ_KEY": f"{len(self.offsets):032X}", **properties}
        spec = FrameSpec(topic, body=body.encode(), properties=given, born_timestamp=now, store_timestamp=now)
        offset = self.writer.append(spec)
        self.offsets.setdefault(key, []).append(offset)
        return offset

    def start(self, http: str = "127.0.0.1:0") -> None:
        """Start the daemon, caught up."""
        self.daemon = self._daemon(http)
        self.daemon.__enter__()
        self.caught_up()

    def caught_up(self) -> None:
        """Wait until all that was written is indexed."""
        self.daemon.wait_caught_up(self.writer.max_offset)

    @property
    def address(self) -> str:
        """Of the page."""
        return f"http://{self.daemon.state()['http']}/"

    def search(self, q: str, /, **more: str) -> str:
        """The address of a search."""
        return self.address + "?" + urlencode({"topic": TOPIC, "q": q} | more)
