"""World: one store with its writer, one data directory with its daemon, and the handles by which faults move them."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from soak import writer as log_writer
from soak.writer import SEGMENT_SIZE, Writer
from support.daemon import WAIT_SECONDS, Daemon

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


_GREATEST = {"rssAnonMax", "descriptorsMax"}


@dataclass(slots=True)
class Tally:
    """``tried`` counts, ``survived`` after a round held."""

    seed: int
    tried: Counter[str] = field(default_factory=Counter)
    survived: Counter[str] = field(default_factory=Counter)
    figures: Counter[str] = field(default_factory=Counter)
    failure: str | None = None

    def add(self, name: str, count: int = 1) -> None:
        """Count, or for what has a most, keep the greatest."""
        self.figures[name] = max(self.figures[name], count) if name in _GREATEST else self.figures[name] + count

    def round_held(self) -> None:
        """All that was tried so far is survived."""
        self.figures["rounds"] += 1
        self.survived = self.tried.copy()

    def to_json(self, seconds: float) -> str:
        """One object."""
        row: dict[str, Any] = {"seed": self.seed, "seconds": round(seconds, 1)}
        names = sorted(self.tried)
        row["faults"] = {name: {"tried": self.tried[name], "survived": self.survived[name]} for name in names}
        row |= {"entriesLost": 0, "entriesInvented": 0, "rebuildsCompared": 0} | self.figures
        return json.dumps(row | {"failure": self.failure})


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
_DISTURBED = 4
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
        #: Segments have been deleted since the data directory was made.
        self.has_expired = False
        #: Since the last round: the log was cut or files were touched.
        self.was_disturbed = False
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
        shutil.rmtree(self.data, ignore_errors=True)
        self.store = self.work / f"store-{number}"
        (self.store / "commitlog").mkdir(parents=True)
        self.has_expired = self.was_disturbed = False
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
        self.was_disturbed = False
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

    def terminate(self) -> None:
        """TERM, and a clean end; a daemon that has just found the log cut may end unclean, and says so."""
        self.look_after_daemon()
        self.daemon.wait_event("starting")
        code = self.daemon.terminate()
        self.note(f"daemon {self.daemon.pid} ended with {code} after TERM")
        words = self._last_lines()
        may_have = self.was_disturbed and ("the log was cut" in words or "by somebody else" in words)
        if code and not (code == _DISTURBED and may_have):
            raise SoakError(f"TERM ended {self.daemon} with {code}: {self._last_lines()}")

    def look_after_daemon(self) -> None:
        """SoakError if it has ended by itself, or holds more than it should."""
        code = self.daemon.ended_within(0)
        if code is not None:
            raise SoakError(f"{self.daemon} ended by itself with {code}: {self._last_lines()}")
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{self.daemon.pid}/status").read_text().splitlines())
        rss = int(fields["RssAnon"].split()[0]) << 10
        descriptors = len(list(Path(f"/proc/{self.daemon.pid}/fd").iterdir()))
        self.tally.add("rssAnonMax", rss)
        self.tally.add("descriptorsMax", descriptors)
        if rss > RSS_ANON_MAX or descriptors > DESCRIPTORS_MAX:
            raise SoakError(f"{self.daemon} holds {rss >> 20} MiB and {descriptors} open files")

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
        self._furthest = max(self._furthest, end)
        self.note(f"the writer {'was killed' if kill else 'stopped'}, the log ends at {end}")
        return end

    def finish_writing(self) -> int:
        """Stop the writer behind all that ever stood in this log; its end."""
        assert self._writer is not None
        end = self._writer.stop(self._furthest)
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

    def _last_lines(self) -> str:
        return "\n".join(self.daemon.log.read_text("utf-8").splitlines()[-20:])
