"""One mutant: a log and a data directory, damage to either, and whether any answer afterwards is silent.

A mutant of the log: part of it is written, perhaps indexed by a daemon that then runs on, stops or is killed; damage;
the broker writes on; the log is indexed by that daemon, another, ``--recover`` or ``rebuild``. A mutant of the data
directory: the same without damage to the log. After each step every intact message is asked for. Bytes that changed
in place are noticed by no start and no query (ARCHITECTURE.md, decision 8), but by the daemon's scrub: behind the first
one nothing may be left of them, whatever they were.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from indexd.errors import DiskError, DisturbedError, IndexdError
from indexd.index.format import IndexLayout
from indexd.query import open_data
from indexd.recovery.rebuild import rebuild
from indexd.recovery.recover import NO_DAMAGE, Damage, DamagedError
from indexd.storage.disk import Disk
from indexd.storage.lock import DirectoryLock
from indexd.storage.names import DataFiles
from indexd.verify.scrub import Scrub
from support.mutant_data import IN_PLACE, damage_data
from support.mutant_log import MutantLog
from support.mutant_oracle import Oracle, SilentError, command_surface, http_surface, python_surface
from support.serving import Serving
from support.sim_clock import SimClock, steered
from support.sim_daemon import SimDaemon
from support.sim_shape import Shape

_STARTS_MAX = 4
_SCRUBS_MAX = 10
_DRAINS = 4
#: One mutant in so many is also asked over HTTP, and one by the command line.
_HTTP_EVERY, _COMMAND_EVERY = 12, 25
_FEW = 4


class MutantRun:
    """``go`` raises SilentError, or whatever else comes out that is no IndexdError; ``history`` says what was done."""

    def __init__(self, root: Path, seed: int) -> None:
        self.rand = rand = random.Random(seed)
        self.store, self.data = root / "store", root / "data"
        drawn = replace(Shape.draw(rand), recheck_size=64 << 20)  # as by default: a log may be cut
        self.policy = rand.choice(["stop", "skip"])
        self.config = drawn.config(self.store, self.data)
        reader = self.config.reader.model_copy(update={"on_corrupt": self.policy, "corrupt_after_ms": 5})
        self.config = self.config.model_copy(update={"reader": reader})
        self.shape = drawn
        self.log = MutantLog(self.store / "commitlog", drawn.segment_size, rand)
        self.history = [f"{drawn}, on_corrupt = {self.policy}"]
        self.counts: Counter[str] = Counter(mutants=1)
        self._clock = SimClock(seed)
        self._daemon: SimDaemon | None = None
        self._lock = DirectoryLock(DataFiles(self.data).lock)
        self._surfaces = [name for name, every in (("http", _HTTP_EVERY), ("command", _COMMAND_EVERY))
                          if rand.randrange(every) == 0]  # fmt: skip
        self._layout = IndexLayout(drawn.hash_slot_num, drawn.index_num)
        #: No daemon has looked since the log was cut: what it has removed is still in the index.
        self._is_outdated = False
        #: Bytes of a data directory were changed in place.
        self._is_in_place = False

    def go(self) -> None:
        """Run it to its end."""
        try:
            if self.rand.random() < 0.7:
                self._damage_log()
            else:
                self._damage_data()
        finally:
            self._leave()
            self.log.close()

    def tally(self) -> Counter[str]:
        """How many of what; ``silent`` is counted by whoever catches the error."""
        return self.counts

    # The two kinds.

    def _damage_log(self) -> None:
        count = self.rand.randrange(20, 220)
        early = self.rand.choice([0, 0, count // 2, count])
        if early:
            self._append(early)
            self._index()
            self.rand.choice([self._stop, self._kill, self._stay])()
        self._append(count - early)
        for _ in range(self.rand.choice([1, 1, 1, 2, 3])):
            self._say(self.log.damage())
        self._is_outdated = bool(self.log.removed)
        if early and not self._is_outdated:
            self._ask("damaged, and nobody has looked yet")
        self._append(self.rand.choice([0, 0, 1, 10, 60]))
        if early or self.rand.random() < 0.6:
            self._index(forced=bool(early) and self.rand.random() < 0.2)
        else:
            self._rebuild()
        self._ask("indexed")
        self.rand.choice([self._stop, self._kill])()
        self._ask("stopped")
        self._append(self.rand.choice([0, 0, 30]))
        self._index()
        self._ask("indexed again")

    def _damage_data(self) -> None:
        self._append(self.rand.randrange(20, 220))
        self._index()
        self.rand.choice([self._stop, self._kill, self._stay])()
        for _ in range(self.rand.choice([1, 1, 2])):
            self._say(what := damage_data(self.data, self._layout, self.rand))
            self._is_in_place = self._is_in_place or what.startswith(IN_PLACE)
        if self._daemon is None:
            self._ask("damaged, and nobody has looked yet", is_scrubbed=False)
        self._append(self.rand.choice([0, 10]))
        self._index(forced=self._daemon is None and self.rand.random() < 0.3)
        self._ask("indexed, and not scrubbed yet", is_scrubbed=False)
        self._scrub()
        self._ask("scrubbed")
        self.rand.choice([self._stop, self._kill])()
        self._ask("stopped")
        self._index(forced=True)
        self._ask("recovered")

    # Steps.

    def _say(self, words: str) -> None:
        self.history.append(words)

    def _append(self, count: int) -> None:
        if count:
            self.log.append(count)
            self._say(f"{count} messages written")

    def _index(self, *, forced: bool = False, damage: Damage = NO_DAMAGE) -> None:
        """Catch up, with the daemon that runs or a new one, as often as something disturbs it."""
        for _ in range(_STARTS_MAX):
            try:
                with self._steered():
                    if self._daemon is None:
                        self._start(forced=forced, damage=damage)
                    for _ in range(_DRAINS):
                        self._catch_up()
                self._is_outdated = False
                return
            except DisturbedError as error:
                self._say(f"disturbed: {error}")
                if self._daemon is not None:
                    self._daemon.give_way()
                self._daemon = None
            except IndexdError as error:
                self._say(f"ends with {error.exit_code}: {error.line()}")
                self.counts[f"daemon ends with {error.exit_code}"] += 1
                self._leave()
                return
        self._say("disturbed again and again")
        raise SilentError("every opening is disturbed again")

    def _scrub(self) -> None:
        """As the daemon does it once a day: what is damaged ends it, and the opening that follows mends that."""
        for _ in range(_SCRUBS_MAX):
            if self._daemon is None:
                return
            try:
                _scrub(self._daemon)
                return
            except DamagedError as error:
                self._say(f"scrubbed: {error}")
                self.counts["mended by the scrub"] += 1
                self._daemon.give_way()
                self._daemon = None
                self._index(damage=error.damage)
        raise SilentError("every scrub finds damage")

    def _start(self, *, forced: bool, damage: Damage) -> None:
        disk = Disk()
        disk.make_dir(self.data)
        self._lock.release()
        self._lock.acquire()
        self._daemon = SimDaemon(self.config, disk, pid=os.getpid(), forced=forced, damage=damage)
        self._say("started with --recover" if forced else "started")

    def _catch_up(self) -> None:
        assert self._daemon is not None
        self._clock.advance(60)
        self._daemon.read()
        self._daemon.drain()
        self._daemon.send()
        self._daemon.persist()
        self._daemon.persisted()

    def _rebuild(self) -> None:
        try:
            found = rebuild(self.config, Disk(), self.data, lambda *_: None)
        except IndexdError as error:
            self._say(f"rebuild ends with {error.exit_code}: {error.line()}")
            self.counts[f"rebuild ends with {error.exit_code}"] += 1
            return
        self._say(f"rebuilt: {found.messages} messages, unreadable: {found.unreadable}")
        lost = [m.phy_offset for m in self.log.intact() if m.phy_offset >= found.phy_offset]
        if lost and self.policy == "stop":
            raise SilentError(f"rebuild ends with 0, {found}, and leaves out the intact messages {lost[:5]}")

    def _stop(self) -> None:
        if self._daemon is None:
            return
        self._say("stopped")
        try:
            with self._steered():
                self._daemon.stop()
            self._daemon = None
        except IndexdError as error:
            self._say(f"stops with {error.line()}")
        self._leave()

    def _kill(self) -> None:
        self._say("killed")
        self._leave()

    def _stay(self) -> None:
        """The daemon runs on."""

    def _leave(self) -> None:
        # As the kernel does it with a process that is gone.
        if self._daemon is not None:
            with suppress(DiskError):
                self._daemon.give_way()
            self._daemon = None
        self._lock.release()

    @contextmanager
    def _steered(self) -> Iterator[None]:
        with steered(self._clock, os.getpid(), self.shape):
            yield

    # Questions.

    def _ask(self, when: str, *, is_scrubbed: bool = True) -> None:
        removed = () if self._is_outdated else self.log.removed
        written = [frame.message for frame in self.log.frames]
        oracle = Oracle(self.log.intact(), removed, self.shape.flavour, written)
        try:
            self._ask_all(oracle)
        except SilentError as error:
            if is_scrubbed or not self._is_in_place:
                raise SilentError(f"{when}: {error}") from None
            self._say(f"{when}: silent")
            self.counts["silent until it is scrubbed"] += 1

    def _ask_all(self, oracle: Oracle) -> None:
        few = self.rand.sample(oracle.wanted, min(_FEW, len(oracle.wanted))) + oracle.wanted[-1:]
        with ExitStack() as stack:
            try:
                data = stack.enter_context(open_data(self.data))
            except IndexdError as error:
                self.counts[f"no index to ask: {error.exit_code}"] += 1
                return
            data.index.look_seconds = 60.0
            surface = python_surface(data)
            oracle.check(surface, oracle.questions(), self.counts)
            oracle.check_times(surface, few, self.counts)
        if "command" in self._surfaces:
            oracle.check(command_surface(self.data), oracle.questions(few), self.counts)
            oracle.check_times(command_surface(self.data), few, self.counts)
            self.counts["asked by command"] += 1
        if "http" in self._surfaces:
            with Serving(self.data, self.store) as server:
                server.log.lines.clear()
                oracle.check(http_surface(server), oracle.questions(few), self.counts)
                oracle.check_times(http_surface(server), few, self.counts)
                server.log.lines.clear()
            self.counts["asked over HTTP"] += 1


def _scrub(daemon: SimDaemon) -> None:
    pipeline = daemon.pipeline
    Scrub(daemon.disk, daemon.files, pipeline.outputs, lambda: pipeline.frontier, lambda _: None, lambda _: None).run()
