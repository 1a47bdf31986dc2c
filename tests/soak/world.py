"""World: one store with its writer, one data directory with its daemon, and the handles by which faults move them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
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
    """``left_out``: faults that cannot be tried here, and why. ``tried`` counts, ``survived`` after a round held."""

    seed: int
    left_out: dict[str, str] = field(default_factory=dict)
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
        row: dict[str, Any] = {"seed": self.seed, "seconds": round(seconds, 1), "leftOut": self.left_out}
        names = sorted(self.tried)
        row["faults"] = {name: {"tried": self.tried[name], "survived": self.survived[name]} for name in names}
        row |= {"entriesLost": 0, "entriesInvented": 0, "rebuildsCompared": 0} | self.figures
        return json.dumps(row | {"failure": self.failure})


SIZE = 64 << 20
_FILLER = "filler"
_SECONDS = 30
_CHUNKS = (1 << 20, 4096)


class SmallDisk:
    """A tmpfs mounted at ``root``; where that may not be done, a plain directory, and ``why_not`` says why."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.why_not: str | None = None
        self._is_mounted = False
        root.mkdir(parents=True)
        self._mount()

    def renew(self) -> None:
        """Everything in it goes."""
        if self._is_mounted:
            self.unmount()
            self._mount()
        else:
            shutil.rmtree(self.root)
            self.root.mkdir()

    def fill(self) -> None:
        """Until nothing more can be written; only where it is a file system of its own."""
        assert self._is_mounted
        with (self.root / _FILLER).open("ab", buffering=0) as file:
            for size in _CHUNKS:
                with contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(size))

    def free(self) -> None:
        """Give back what ``fill`` took."""
        (self.root / _FILLER).unlink(missing_ok=True)

    def unmount(self) -> None:
        """If it is mounted; what was in it is gone, at the latest with whoever still looks into it."""
        if self._is_mounted:
            self._is_mounted = False
            subprocess.run(["umount", "--lazy", self.root], capture_output=True, timeout=_SECONDS, check=False)

    def _mount(self) -> None:
        if os.geteuid() != 0:
            self.why_not = "only root can mount a small file system to be filled"
            return
        command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "indexd-soak", str(self.root)]
        # Before the call: a signal may come between the mount and the note of it.
        self._is_mounted = True
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
        if done.returncode:
            self._is_mounted = False
            self.why_not = f"no small file system can be mounted: {' '.join(done.stderr.split())}"


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

    def close(self, *, keep: bool) -> None:
        """Nothing of it runs or is mounted any more; with ``keep`` the data directory is in the work directory."""
        self.end()
        kept = self.work / "kept"
        if keep:
            with contextlib.suppress(OSError, shutil.Error):
                shutil.copytree(self.data, kept, ignore=shutil.ignore_patterns(_FILLER))
            (self.work / "history").write_text("\n".join(self.history) + "\n", "utf-8")
        self.disk.unmount()

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
        if code and not self._may_have_ended(code):
            raise SoakError(f"TERM ended {self.daemon} with {code}: {self._last_lines()}")

    def look_after_daemon(self) -> None:
        """What a service manager does: start it again, if it ended by itself as it may on a full disk."""
        self._measure()
        code = self.daemon.ended_within(0)
        if code is None:
            return
        self.note(f"daemon {self.daemon.pid} ended by itself with {code}")
        if not (code == _NO_SPACE and self._may_have_ended(code)):
            raise SoakError(f"{self.daemon} ended by itself with {code}: {self._last_lines()}")
        self.tally.add("outOfSpace")
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
