"""One life of the daemon in a simulation: the steps of ``service/daemon.py`` in its order, one after the other.

The daemon's threads become calls, so a persist of an older progress between newer applies is a matter of the order in
which they are made. What an error leads to is decided as there: it is tried again at the next drain or flush, or it
comes out of here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

from indexd.commitlog.batcher import DispatchBatch
from indexd.commitlog.format import Corrupt, NotYetWritten
from indexd.commitlog.reader import LogReader, Skipped
from indexd.config import Config, load
from indexd.dispatch.reput import DispatchQueue, ReputState
from indexd.errors import DiskError, MissingStoreError
from indexd.flush.frontier import remove_abort
from indexd.flush.pipeline import BuildProgress, Item
from indexd.index.file import IndexService
from indexd.query import Answer, KeyQuery, open_index, query_exact
from indexd.recovery import open as open_module
from indexd.serve.daemon_status import DaemonStatus, Histogram
from indexd.service import start as start_module
from indexd.service.daemon import can_wait
from indexd.service.instance import Instance, Notifier, Starts
from indexd.service.start import open_for_run
from indexd.service.state import DaemonState, DirectoryWatch, EventReporter, write_state
from indexd.storage.disk import Disk
from indexd.storage.lock import DirectoryLock
from indexd.storage.names import DataFiles
from support.small_log import BASE_TIME


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a world; small, so that files roll and messages straddle them."""

    segment_size: int = 16 << 10
    hash_slot_num: int = 300
    index_num: int = 100
    flavour: str = "5.4"
    rewrites: bool = False
    #: Entries that are read or written at once.
    window: int = 1000
    recheck_size: int = 64 << 20
    #: Frames are noted this far apart, in bytes: segments are a ten-thousandth of a broker's, and so is this.
    note_every: int = 1 << 10
    #: Units of a ConsumeQueue file, and bytes of log between two entries of a sparse index.
    queue_units: int = 10
    sparse_interval: int = 1000
    #: As in a container, where each daemon is process 1.
    same_pid: bool = False

    @classmethod
    def draw(cls, rand: random.Random, *, rewrites: bool = False) -> Shape:
        """Any of them: slots and entries of less than a page and of several, files that roll at every few messages."""
        return cls(
            rand.choice([16, 32, 64]) << 10,
            rand.choice([1, 50, 500, 1500]),
            rand.choice([20, 60, 250, 400]),
            rand.choice(["5.4", "5.4", "4.7", "4.0", "3.x"]),
            rewrites,
            rand.choice([7, 50, 1000]),
            64 << 20 if rewrites else rand.choice([0, 8 << 10, 64 << 20]),
            queue_units=rand.choice([1, 3, 10, 300]),
            sparse_interval=rand.choice([0, 300, 1000, 4096]),
        )

    def config(self, store: Path, data: Path) -> Config:
        """What its daemon is given."""
        flags = {
            "store": store, "data": data, "segment_size": self.segment_size, "read_bytes": 64 << 10,
            "hash_slot_num": self.hash_slot_num, "index_num": self.index_num,
            "flavour": self.flavour, "settle_ms": 1, "corrupt_after_ms": 100,
            "consume_queue_file_size": 20 * self.queue_units, "sparse_interval": self.sparse_interval,
            "unclean_starts_max": 0, "recheck_bytes": self.recheck_size,
        }  # fmt: skip
        return load({key: str(value) for key, value in flags.items()}, None, {})


# A look takes longer than any settle time that a simulation sets, and far less than the log's list interval.
_LOOK_SECONDS = 0.03


class SimClock:
    """``monotonic`` only grows; ``wall``, which names the index files, is set back now and then."""

    def __init__(self, seed: int) -> None:
        self._rand = random.Random(seed)
        self._now = 1000.0
        self._offset = BASE_TIME / 1000

    def monotonic(self) -> float:
        """Seconds; each look takes a while."""
        self._now += _LOOK_SECONDS
        return self._now

    def wall(self) -> float:
        """Unix seconds, by a clock that somebody sets."""
        if self._rand.random() < 0.1:
            self._offset += self._rand.choice([-3600.0, -0.001, 5.0])
        return self.monotonic() + self._offset

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._now += seconds


def _no_progress(*_: object) -> Callable[..., object]:
    """A recovery that nobody watches: no bar, no DATA/state written by how long it takes."""
    return _no_progress


@contextmanager
def steered(clock: SimClock, pid: int, shape: Shape) -> Iterator[None]:
    """The daemon's own code, by this clock, in a process of that pid.

    The kernels are compiled already; a start need not ask for them. What is fixed to suit large files is scaled down.
    No Mock is made: to make one takes longer than a drain.
    """
    with (
        mock.patch.object(open_module, "LogReader", partial(LogReader, clock=clock.monotonic)),
        mock.patch.object(IndexService, "clock", staticmethod(clock.wall)),
        mock.patch.object(start_module, "load_kernels", _no_progress),
        mock.patch.object(start_module, "RecoveryProgress", _no_progress),
        mock.patch("indexd.index.file.ENTRIES_PER_WRITE", shape.window),
        mock.patch("indexd.index.entries.ENTRIES_PER_READ", shape.window),
        mock.patch("indexd.compare.index.ENTRIES_PER_WINDOW", shape.window),
        mock.patch("indexd.flush.pipeline.NOTE_EVERY", shape.note_every),
        mock.patch("os.getpid", partial(int, pid)),
        mock.patch("time.sleep", clock.advance),
    ):
        yield


_POLLS_MAX = 100_000


class SilentLog:
    """Takes the daemon's log events; the names of all of them in order."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def info(self, event: str, **_: object) -> None:
        self.events.append(event)

    debug = warning = error = info


class _HeldLock(DirectoryLock):
    """The lock is real files and no disk's matter: in a simulation there is one daemon at a time."""

    def renew(self) -> bool:
        return False


class SimDaemon:
    """From a start to a stop, a crash or an error. Raises DiskError where the daemon would end, and DisturbedError.

    ``pid`` is what its files say; in a container it is the same one in each life.
    """

    def __init__(self, config: Config, disk: Disk, *, pid: int = 1, forced: bool = False) -> None:
        self.pid = pid
        self.config, self.disk = config, disk
        self.files = DataFiles(config.store.data)
        self.log = SilentLog()
        disk.make_dir(self.files.data)
        self.starts = Starts(disk, self.files.starts, config.recovery)
        if disk.exists(self.files.abort):
            self.starts.begin()
        lock = _HeldLock(self.files.lock)
        own = lock, self.starts, DaemonStatus(config), Notifier(None, None), self.log
        instance = Instance(config, lambda: config, disk, self.files, *own)
        self.opened = open_for_run(instance, forced=forced)
        self.watch = DirectoryWatch(disk, self.files, self.opened.pipeline.frontier)
        self.pipeline, self.reader = self.opened.pipeline, self.opened.reader
        #: Read and not built yet; the parts of it that a drain has taken are done first.
        self.queue: list[Item] = []
        self.skipped: list[Skipped] = []
        #: What the flusher works at, and whether it has come to its end.
        self.sent: BuildProgress | None = None
        self.is_persisted = False
        #: A drain waits to be tried again: the files may hold more than the progress says.
        self.is_waiting = False
        self.must_flush = False
        self._state = DaemonState(
            self.reader, self.pipeline, DispatchQueue(1, 1), ReputState(), EventReporter(lambda: self.log), Histogram()
        )

    def read(self, polls: int = _POLLS_MAX) -> bool:
        """Poll so often, or until the log's end; True at the end."""
        for _ in range(polls):
            try:
                found = self.reader.poll()
            except (DiskError, MissingStoreError):
                return False  # tried again at the next read
            if isinstance(found, DispatchBatch | Skipped):
                self.queue.append(found)
            elif isinstance(found, Corrupt):
                return True
            else:
                assert isinstance(found, NotYetWritten)
                if not self.reader.is_undecided:
                    return True
        return False

    def drain(self, *, stopping: bool = False) -> bool:
        """Build what was read; False when it has to wait, and the rest stays for the next time."""
        try:
            self._build()
        except (DiskError, MissingStoreError) as error:
            if not can_wait(error) or stopping:
                raise
            self.is_waiting = True
            return False
        self.is_waiting = False
        return True

    def _build(self) -> None:
        if not self.is_waiting:
            self.watch.check_index(self.pipeline)
            self.watch.check_beside(self.pipeline)
        self.pipeline.detector.check()
        restored = self.watch.restore(self.pipeline)
        self.must_flush = self.must_flush or bool(set(restored) & set(self.pipeline.written))
        skipped = [item for item in self.queue if isinstance(item, Skipped)]
        try:
            self.pipeline.apply(self.queue, self.reader.log.min_offset or 0)
            self.pipeline.detector.remember_tail(self.pipeline.built.phy_offset)
        finally:
            self.skipped += [item for item in skipped if item not in self.queue]
            with suppress(DiskError):  # queries then go by the frontier
                write_state(self.disk, self.files, self._state.row())
        self.starts.forget()

    def send(self) -> BuildProgress | None:
        """Hand what has been built to the flusher, unless it is at work or there is nothing to do."""
        progress = self.pipeline.progress
        if self.sent is not None or not (self.pipeline.is_ahead or self.must_flush):
            return None
        self.must_flush = False
        self.sent, self.is_persisted = progress, False
        return progress

    def persist(self) -> bool:
        """The flusher's part; False when it has to wait: the next flush tries again."""
        if self.sent is None or self.is_persisted:
            return False
        try:
            self.pipeline.persist(self.sent)
        except DiskError as error:
            if not can_wait(error):
                raise
            self.sent = None
            self.must_flush = True
            return False
        self.is_persisted = True
        return True

    def persisted(self) -> None:
        """The building thread hears of it."""
        if self.sent is not None and self.is_persisted:
            self.pipeline.persisted(self.sent)
            self.sent = None

    def stop(self) -> None:
        """TERM: what was read is built, all is made durable, the abort flag goes."""
        self.drain(stopping=True)
        for _ in range(2):  # what the flusher works at, and what has been built since
            self.send()
            self.persist()
            self.persisted()
        self.pipeline.finish()
        self.reader.close()
        remove_abort(self.disk, self.files.abort)
        self.starts.forget()
        self.disk.unlink(self.files.state)

    def give_way(self) -> None:
        """Something was disturbed: what is open is closed, and the same process opens anew."""
        self.pipeline.close()
        self.reader.close()

    def query(self, query: KeyQuery) -> Answer:
        """Asked beside the running daemon, which holds the lock."""
        with mock.patch("indexd.query.source.owner_pid", return_value=self.pid):
            return ask(self.disk, self.config, query)


def ask(disk: Disk, config: Config, query: KeyQuery) -> Answer:
    """One exact answer, as a process of its own would get it."""
    with closing(open_index(disk, config)) as index:
        return query_exact(index, query)
