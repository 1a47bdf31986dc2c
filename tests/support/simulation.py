"""A world of its own: a broker's log, a disk that forgets, a daemon that lives and dies on it, and an oracle.

Each step is one method; after a step in which the daemon ended (``is_up`` is False) the next ``start`` recovers. What
is checked, and when:

- after each recovery: the files are those of an undisturbed build up to the offset at which reading goes on, and that
  offset is not below what a persist had said to be durable;
- at each query, also of a dead daemon's directory: all that the answer's coverage promises, nothing that the log does
  not hold, nothing twice;
- ``finish``: after catching up and a clean stop the directory holds the undisturbed build and nothing else."""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from indexd.errors import DiskError, DisturbedError, UnsafeStoreError, UsageError
from indexd.index.format import FileMark, IndexLayout
from indexd.query import Answer
from support.sim_checks import (
    Gaps,
    Oracle,
    RefusedError,
    SimLog,
    check_answer,
    check_beside,
    check_refusal,
    check_stopped,
    compare,
    draw_query,
    has_lost_refill,
)
from support.sim_daemon import Shape, SimClock, SimDaemon, ask, steered
from support.sim_disk import Fault, SimCrash, SimDisk

# One for what happened before, one for what is noticed then.
_STARTS_MAX = 3
_DRAINS = 6
_CALLS_PER_STEP_MAX = 20_000

# What crashed daemons leave holds itself, with the tens of megabytes of each reader. Where what is loaded by now is not
# looked at again, it is collected often.
gc.collect()
gc.freeze()
gc.collect()


class World:
    """``root`` gets a real commitlog; the data directory is on ``disk`` alone."""

    def __init__(self, root: Path, seed: int, shape: Shape | None = None) -> None:
        self.shape = shape or Shape()
        self.rand = random.Random(seed)
        self.clock = SimClock(seed)
        self.log = SimLog(root / "store" / "commitlog", self.shape.segment_size, seed, rewrites=self.shape.rewrites)
        self.disk = SimDisk(root / "disk", seed)
        self.data = root / "disk" / "data"
        self.layout = IndexLayout(self.shape.hash_slot_num, self.shape.index_num)
        self.config = self.shape.config(root / "store", self.data)
        self.oracle = Oracle(self.log, self.layout, self.shape.flavour)
        self.daemon: SimDaemon | None = None
        self.pid = 1
        #: What the index covers: from here on, but for the gaps.
        self.begin = 0
        self.gaps: Gaps = ()
        #: Where the log began when a refill of the queues had been broken off before that: there they begin anew.
        self.anew: tuple[int, ...] = ()
        #: The log was rewritten and no daemon has seen it yet.
        self.is_outdated = False
        #: (begin, end) of what a persist that returned has promised.
        self.promised: tuple[int, int] | None = None
        self.tally: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"World({self.shape}, {self.log}, {self.daemon}, promised={self.promised}, {self.disk})"

    @property
    def is_up(self) -> bool:
        """Whether a daemon runs."""
        return self.daemon is not None

    @property
    def up(self) -> SimDaemon:
        """The daemon, which runs."""
        assert self.daemon is not None
        return self.daemon

    def fork(self) -> World:
        """The same world on a copy of the disk, after the death of the daemon; the log is shared."""
        if self.daemon is not None:
            self._note(self.daemon)
        twin = object.__new__(World)
        twin.__dict__.update(self.__dict__)
        twin.disk, twin.daemon = self.disk.fork(), None
        twin.rand = random.Random(self.rand.getrandbits(32))
        return twin

    # Ends.

    def crash(self, rand: random.Random | None = None) -> None:
        """Power off, power on."""
        self.tally["crashes"] += 1
        self.disk.crash(rand or self.rand)
        self.daemon = None

    def kill(self) -> None:
        """kill -9: the page cache is still there."""
        self.tally["kills"] += 1
        self.disk.kill()
        self.daemon = None

    def stop(self) -> bool:
        """TERM. True when the daemon stopped cleanly; then everything that was read is durable and nothing is open."""

        def step(daemon: SimDaemon) -> None:
            daemon.stop()
            assert not self.disk.still_open, f"after a clean stop these are still open: {self.disk.still_open}"

        return self.do(step, last=True)

    # What a daemon does.

    def start(self, *, forced: bool = False) -> bool:
        """Start, recover, check; True when it is up."""
        assert self.daemon is None
        before = self.disk.changes
        self.anew += (self.log.begin,) * has_lost_refill(self)
        self.pid += not self.shape.same_pid
        self.disk.limit = self.disk.operations + _CALLS_PER_STEP_MAX
        try:
            with steered(self.clock, self.pid, self.shape):
                self.daemon = SimDaemon(self.config, self.disk, pid=self.pid, forced=forced)
        except DiskError:
            self.tally["starts that failed"] += 1
            self.kill()
            return False
        except UnsafeStoreError:
            self.kill()
            self.tally["refused"] += 1
            raise check_refusal(self.disk, self.config, self.log.begin) from None
        except SimCrash:
            self.tally["crashes inside a recovery"] += self.disk.changes > before
            self.crash()
            return False
        self.tally["recoveries"] += 1
        self._check_start(self.daemon)
        return True

    def do(self, step: Callable[[SimDaemon], object], *, last: bool = False) -> bool:
        """One step of the daemon; False when it died of it."""
        daemon = self.up
        self.disk.limit = self.disk.operations + _CALLS_PER_STEP_MAX
        try:
            with steered(self.clock, self.pid, self.shape):
                step(daemon)
        except DiskError:
            self.tally["ends by an error"] += 1
            self._note(daemon)
            self.kill()
            return False
        except SimCrash:
            self._note(daemon)
            self.crash()
            return False
        except DisturbedError:
            self.tally["disturbed"] += 1
            self._note(daemon)
            daemon.give_way()
            self.daemon = None
            return False
        self._note(daemon)
        if last:
            self.disk.kill()
            self.daemon = None
        return True

    def catch_up(self) -> bool:
        """Read and build to the end of the log; False when it died of it or the disk is full."""
        built: list[bool] = []

        def step(daemon: SimDaemon) -> None:
            daemon.read()
            built.append(daemon.drain())

        return self.do(step) and all(built)

    def build(self, count: int) -> None:
        """Write so many messages and index them; nothing fails."""
        self.log.append(count)
        assert self.catch_up()

    def flush(self) -> bool:
        """A whole flush, nothing in between; False when the daemon died of it."""
        return all(self.do(step) for step in (SimDaemon.send, SimDaemon.persist, SimDaemon.persisted))

    def finish(self) -> None:
        """The disk is mended, the daemon catches up and stops: now everything must be as if nothing had been."""
        self.disk.faults = []
        self.disk.crash_at = self.disk.before_change = None
        for _ in range(_STARTS_MAX):
            assert self.daemon is not None or self.start(), "a start on a sound disk failed"
            self.clock.advance(60)
            # More than once: a log that was rewritten meanwhile is noticed at a later drain: all points have a turn.
            if all(self.catch_up() for _ in range(_DRAINS if self.shape.rewrites else 2)):
                break
            assert self.is_outdated, "building on a sound disk failed"
        self.is_outdated = False
        self.check_live()
        assert self.stop(), "a stop on a sound disk failed"
        check_stopped(self)

    def query(self, *, live: bool) -> None:
        """Ask for a key, most often one that is there, of the running daemon or of the directory as it lies there."""
        key = draw_query(self.rand, self.log)
        answer: list[Answer] = []
        if live:
            self.do(lambda daemon: answer.append(daemon.query(key)))
        else:
            try:
                with suppress(DiskError), steered(self.clock, self.pid, self.shape):
                    answer.append(ask(self.disk, self.config, key))
            except UsageError:  # there is no index yet
                assert self.promised is None, self
            except SimCrash:
                self.crash()
        self.tally["queries"] += len(answer)
        for one in answer:
            check_answer(one, self.log, self.gaps, self.shape.flavour)

    # The log.

    def expire(self, *, unread: bool = False) -> int:
        """Delete old segments: such as are durably indexed, or with ``unread`` any; how many."""
        if self.is_outdated:  # what was rewritten and then expired before anybody looked is known to nobody
            return 0
        before = self.promised[1] if self.promised is not None else 0
        gone = self.log.expire(self.log.end if unread else before)
        self.tally["expired segments"] += gone
        self.clock.advance(60)
        return gone

    def rewrite(self, most: int) -> None:
        """The broker loses the end of its log and writes on; what stood there is promised no more."""
        if self.log.rewrite(self.rand, most) is None:
            return
        self.tally["rewrites"] += 1
        self.is_outdated = True
        if self.promised is not None:
            # A recovery that is broken off while it rolls back leaves less than the log before the cut.
            self.promised = self.promised[0], 0

    # Checks.

    def check_files(self, end: int, marks: tuple[FileMark, ...]) -> None:
        """The files are those of an undisturbed build of the log up to ``end``."""
        wanted = self.oracle.files(self.begin, end, self.gaps)
        found = [(mark, self.disk.peek(self.data / "index" / mark.name)) for mark in marks]
        difference = compare(wanted, found, self.log.begin)
        assert difference is None, f"[{self.begin}, {end}) but for {self.gaps}: {difference}; {self}"

    def check_live(self) -> None:
        """The files of the running daemon, after a drain."""
        frontier = self.up.pipeline.progress.frontier
        if not self.up.is_waiting and not self.is_outdated:
            self.check_files(frontier.phy_offset, frontier.index)
            check_beside(self, frontier.phy_offset, frontier)

    def _check_start(self, daemon: SimDaemon) -> None:
        stood = daemon.pipeline.progress.frontier
        if self.promised is not None:
            begin, end = self.promised
            is_there = stood.begin_offset <= begin and end <= stood.phy_offset
            assert is_there, f"{self.promised} was said to be durable: {daemon.opened.recovered.reasons}; {self}"
        self.begin = stood.begin_offset
        self.gaps = tuple((gap[0], min(gap[1], end)) for gap in self.gaps if gap[0] < (end := stood.phy_offset))
        self.is_outdated = False
        self.check_files(stood.phy_offset, stood.index)
        check_beside(self, stood.phy_offset, stood)

    def _note(self, daemon: SimDaemon) -> None:
        # What this life has come to, for those after it.
        skipped = ((item.begin, item.end) for item in daemon.skipped if item.end <= daemon.pipeline.built.phy_offset)
        self.gaps = tuple(dict.fromkeys((*self.gaps, *skipped)))
        if daemon.pipeline.flushes:
            frontier = daemon.pipeline.frontier
            self.promised = frontier.begin_offset, 0 if self.is_outdated else frontier.phy_offset


def script(world: World) -> None:
    """A first start, drains, rolls, an older persist between newer drains, expiry, a stop, a crash, a kill, a stop."""
    assert world.start()
    for count in (12, 30, 5):
        world.build(count)
    world.do(SimDaemon.send)
    world.build(25)
    world.do(SimDaemon.persist)
    world.build(8)
    world.do(SimDaemon.persisted)
    assert world.flush()
    world.expire()
    world.build(20)
    assert world.flush()
    world.build(3)
    assert world.stop()
    for end in (world.crash, world.kill):
        assert world.start()
        world.build(15)
        assert world.flush()
        world.build(10)
        end()
    world.finish()


def at_every_change(world: World, look: Callable[[World, int], None]) -> int:
    """Run the script; before each change of the disk, ``look`` gets a copy of the world that is about to lose power.

    The number of changes.
    """
    seen = 0

    def before(operation: str, path: Path) -> None:
        nonlocal seen
        seen += 1
        look(world.fork(), seen)

    world.disk.before_change = before
    script(world)
    return seen


def crash_and_recover(world: World, seed: int) -> World:
    """Lose power with these pages kept, look at what lies there, start, catch up, stop; all of it is checked."""
    world.disk.crash(random.Random(seed))
    world.query(live=False)
    world.finish()
    return world


_STEPS = 60
_ERRORS = ("ENOSPC", "ENOSPC", "EIO", "EROFS", "EMFILE", "EDQUOT", "short", "crash", "crash")
_FAULTY = (
    *("pwrite", "pwrite", "fsync", "allocate", "rename", "sync_dir", "create", "unlink", "truncate"),
    *("open_read", "open_write", "pread", "list_dir", "exists", "*"),
)
_WHERE = ("*", "index/*", "*.tmp", "frontier*", "checkpoint*", "abort*", "index")


class RandomRun:
    """``history`` says each step; ``go`` raises what is broken."""

    def __init__(self, root: Path, seed: int, *, rewrites: bool = False) -> None:
        self.rand = random.Random(seed)
        self.world = World(root, seed, Shape.draw(self.rand, rewrites=rewrites))
        self.history: list[str] = [f"seed {seed}: {self.world.shape}"]

    def go(self) -> None:
        """All steps, then the end."""
        try:
            with suppress(RefusedError):
                self._go()
        finally:
            if self.world.is_up:
                self.world.kill()
            self.world.log.close()

    def _go(self) -> None:
        world = self.world
        steps: tuple[tuple[int, Callable[[], object], bool | None], ...] = (
            (8, self._append, None),
            (3, self._poll, True),
            (6, self._drain, True),
            (5, self._send, True),
            (5, self._persist, True),
            (4, self._persisted, True),
            (3, self._query, None),
            (2, world.crash, True),
            (2, world.kill, True),
            (2, world.stop, True),
            (12, self._start, False),
            (2, self._expire, None),
            (2, self._arm, None),
            (3, self._fail, None),
            *([(6, self._rewrite, None)] if world.shape.rewrites else []),
        )
        for _ in range(_STEPS):
            fitting = [step for step in steps if step[2] in (None, world.is_up)]
            step = self.rand.choices(fitting, [weight for weight, *_ in fitting])[0][1]
            self.history.append(f"{step.__name__.strip('_')}: {world}")
            step()
        world.finish()
        world.start()
        world.finish()

    @property
    def tally(self) -> dict[str, int]:
        """What has happened, in numbers."""
        faults = {f"fault {name}": count for name, count in self.world.disk.injected.items()}
        return dict(self.world.tally) | faults | {"runs": 1, "disk operations": self.world.disk.operations}

    def _append(self) -> None:
        if self.rand.random() < 0.1:
            self.world.log.roll()
        else:
            self.world.log.append(self.rand.choice([1, 3, 10, 40]))

    def _poll(self) -> None:
        self.world.do(lambda daemon: daemon.read(self.rand.randint(1, 4)))

    def _drain(self) -> None:
        if self.world.do(lambda daemon: (daemon.read(self.rand.choice([0, 3, 10_000])), daemon.drain())):
            self.world.check_live()

    def _send(self) -> None:
        self.world.do(SimDaemon.send)

    def _persist(self) -> None:
        # Now and then the building thread drains between two calls of the flusher.
        disk = self.world.disk
        at = disk.changes + self.rand.randint(0, 12)

        def drain(operation: str, path: Path) -> None:
            if disk.changes == at:
                disk.before_change = None
                self.world.up.drain()

        if self.rand.random() < 0.5:
            disk.before_change = drain
        try:
            self.world.do(lambda daemon: daemon.persist())
        finally:
            disk.before_change = None

    def _persisted(self) -> None:
        self.world.do(SimDaemon.persisted)

    def _query(self) -> None:
        if not self.world.is_outdated:
            self.world.query(live=self.world.is_up)

    def _start(self) -> None:
        if self.world.start(forced=self.rand.random() < 0.15) and self.rand.random() < 0.7:
            self.world.catch_up()

    def _expire(self) -> None:
        self.world.expire(unread=self.rand.random() < 0.2)

    def _rewrite(self) -> None:
        self.world.rewrite(self.rand.choice([1, 5, 50]))

    def _arm(self) -> None:
        # A crash at one of the next changes, whoever makes it: most often a recovery.
        self.world.disk.crash_at = self.world.disk.changes + self.rand.randint(0, 40)

    def _fail(self) -> None:
        error, operation = self.rand.choice(_ERRORS), self.rand.choice(_FAULTY)
        operation = "pwrite" if error == "short" else operation
        where, nth = self.rand.choice(_WHERE), self.rand.randint(1, 20)
        if self.rand.random() < 0.1 and error != "crash":
            nth = 0
        fault = Fault(operation, error, where, nth)
        self.world.disk.faults = [fault]
        self.history.append(f"  {fault}")
