"""World: one store with its writer, one data directory with its daemon, and the handles by which faults move them."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

from soak import writer as log_writer
from soak.small_disk import SmallDisk
from soak.stop import Stop
from soak.tally import Tally
from soak.writer import SEGMENT_SIZE, Writer
from support.daemon import WAIT_SECONDS, Daemon

HASH_SLOT_NUM = 5000
INDEX_NUM = 20_000
QUEUE_FILE_SIZE = 10_000
SIZES = (
    *("--segment-size", str(SEGMENT_SIZE)),
    *("--hash-slot-num", str(HASH_SLOT_NUM)),
    *("--index-num", str(INDEX_NUM)),
    *("--consume-queue-file-size", str(QUEUE_FILE_SIZE)),
)
RSS_ANON_MAX = 300 << 20
DESCRIPTORS_MAX = 100
_NO_SPACE, _DISTURBED = 70, 4
_RECHECKED = (256 << 10, 4 << 20, 64 << 20)


class SoakError(AssertionError):
    """Something that has to hold does not."""


class World:
    """Made anew by ``renew``. Everything is started and ended here; ``history`` says what happened, for a failure."""

    def __init__(self, work: Path, rand: random.Random, tally: Tally, stop: Stop) -> None:
        self.work, self.rand, self.tally = work, rand, tally
        self.data = work / "data"
        self.store = work / "store"
        self.history: list[str] = []
        self.disk = SmallDisk(self.data)
        #: Segments have been deleted since the data directory was made.
        self.has_expired = False
        #: Since the last round: the log was cut or files were touched; the disk was full.
        self.was_disturbed = self.was_full = False
        self._stop = stop
        self._started = time.monotonic()
        self._daemon: Daemon | None = None
        self._writer: Writer | None = None
        self._env: dict[str, str] = {}
        self._furthest = 0

    @property
    def daemon(self) -> Daemon:
        """The one that runs."""
        assert self._daemon is not None
        return self._daemon

    def renew(self, number: int) -> None:
        """An empty log and an empty data directory; the log of a random place, as that of an old broker."""
        self.end()
        self.disk.renew()
        self.store = self.work / f"store-{number}"
        (self.store / "commitlog").mkdir(parents=True)
        self.has_expired = self.was_disturbed = self.was_full = False
        begin = self.rand.choice([0, 7, 40_000]) * SEGMENT_SIZE
        self._furthest = begin
        recheck = self.rand.choice(_RECHECKED)
        self._env = {
            "INDEXD_CORRUPT_AFTER_MS": "200",
            "INDEXD_RETRY_MAX_SECONDS": "1",
            "INDEXD_RECHECK_BYTES": str(recheck),
        }
        self.tally.add("freshStarts")
        self.note(f"{self.store.name}: begins at {begin}, {recheck} bytes are compared at a start")
        self.write_from(begin)
        self.start()

    def begin_again(self) -> None:
        """The next round on the same log and data directory."""
        self.was_disturbed = self.was_full = False
        self.write_from(self._furthest)
        self.start()

    def note(self, text: str) -> None:
        """A line of the history."""
        self.history.append(f"{time.monotonic() - self._started:8.3f} s  {text}")

    def end(self) -> None:
        """Kill both, on whatever way out; harmless when they do not run."""
        if self._daemon is not None:
            self._daemon.kill()
        if self._writer is not None:
            self._writer.kill()

    # The daemon.

    def start(self) -> None:
        """Start it; whether it comes far is for others to see."""
        daemon = Daemon(self.store, self.data, *SIZES, env=self._env)
        with self._stop.held():
            self._daemon = daemon.__enter__()
        self.tally.add("starts")
        self.note(f"daemon {daemon.pid} started")

    def kill(self) -> None:
        """kill -9."""
        self.look_after_daemon()
        self.daemon.kill()
        self.note(f"daemon {self.daemon.pid} killed")
        self._take_down_events()

    def terminate(self) -> None:
        """TERM, and a clean end; a daemon that has just found the log cut may end unclean, and says so."""
        self.look_after_daemon()
        self.daemon.wait_event("starting")
        code = self.daemon.terminate()
        self.note(f"daemon {self.daemon.pid} ended with {code} after TERM")
        if code and not self._may_have_ended(code):
            raise SoakError(f"TERM ended {self.daemon} with {code}: {self._last_lines()}")
        self._take_down_events()

    def look_after_daemon(self) -> None:
        """What a service manager does: start it again, if it ended by itself as it may on a full disk."""
        self._measure()
        try:
            code = self.daemon.wait(0)
        except AssertionError:
            return
        self.note(f"daemon {self.daemon.pid} ended by itself with {code}")
        if not (code == _NO_SPACE and self._may_have_ended(code)):
            raise SoakError(f"{self.daemon} ended by itself with {code}: {self._last_lines()}")
        self.tally.add("outOfSpace")
        self._take_down_events()
        self.start()

    def signal(self, number: signal.Signals) -> None:
        """Send one."""
        os.kill(self.daemon.pid, number)
        self.note(f"daemon {self.daemon.pid}: {number.name}")

    # The writer.

    def write_from(self, begin: int) -> None:
        """Start a writer there."""
        with self._stop.held():
            self._writer = Writer(self.store, begin, self.rand.randrange(1 << 32))
        self.note(f"writes from {begin} on")

    def stop_writing(self, *, kill: bool = False) -> int:
        """Stop or kill the writer; where the log ends then for a broker that starts again."""
        assert self._writer is not None
        if kill:
            self._writer.kill()
            end = log_writer.end_of(self.store, self._writer.begin)
        else:
            end = self._writer.stop()
        self._count_messages(self._writer.begin, end)
        self._furthest = max(self._furthest, end)
        self.note(f"the writer {'was killed' if kill else 'stopped'}, the log ends at {end}")
        return end

    def finish_writing(self) -> int:
        """Stop the writer behind all that ever stood in this log; its end."""
        assert self._writer is not None
        end = self._writer.stop(self._furthest)
        self._count_messages(self._writer.begin, end)
        self._furthest = end
        self.note(f"the log ends at {end}")
        return end

    # Waiting.

    def wait_segments(self, least: int) -> list[Path]:
        """The segments, as soon as there are so many; the writer runs."""
        deadline = time.monotonic() + WAIT_SECONDS
        while len(found := log_writer.segments(self.store)) < least:
            if time.monotonic() > deadline:
                raise SoakError(f"the writer does not come on: {found}")
            time.sleep(0.02)
        return found

    def sleep(self, least: float, most: float) -> None:
        """A random while."""
        time.sleep(self.rand.uniform(least, most))

    # Looking.

    def _measure(self) -> None:
        try:
            status = Path(f"/proc/{self.daemon.pid}/status").read_text("ascii")
            descriptors = len(list(Path(f"/proc/{self.daemon.pid}/fd").iterdir()))
        except (FileNotFoundError, ProcessLookupError):
            return
        fields = dict(line.split(":", 1) for line in status.splitlines())
        rss = int(fields.get("RssAnon", "0 kB").split()[0]) << 10
        self.tally.add("rssAnonMax", rss)
        self.tally.add("descriptorsMax", descriptors)
        if rss > RSS_ANON_MAX or descriptors > DESCRIPTORS_MAX:
            raise SoakError(f"{self.daemon} holds {rss >> 20} MiB and {descriptors} open files")

    def _may_have_ended(self, code: int) -> bool:
        words = self._last_lines()
        return (code == _NO_SPACE and self.was_full and "No space left on device" in words) or (
            code == _DISTURBED and self.was_disturbed and ("the log was cut" in words or "by somebody else" in words)
        )

    def _last_lines(self) -> str:
        return "\n".join(self.daemon.log.read_text("utf-8").splitlines()[-20:])

    def _take_down_events(self) -> None:
        for row in self.daemon.events():
            if row["event"] == "recovered":
                self.tally.add("recoveries")
                self.tally.add("rollBacks", int(row["dropped_entries"] > 0))
            elif row["event"] == "disturbed":
                self.tally.add("disturbances")
            elif row["event"] == "degraded":
                self.tally.add("degraded")

    def _count_messages(self, begin: int, end: int) -> None:
        # Before a cut takes some of them away again. Those that expired meanwhile are not counted.
        first = int(log_writer.segments(self.store)[0].name)
        self.tally.add("messages", log_writer.count(self.store, max(begin, first), end))
