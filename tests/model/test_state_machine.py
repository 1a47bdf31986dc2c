"""Any steps in any order: hypothesis looks for a world that breaks, and makes it short."""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from support.sim_daemon import Shape
from support.sim_fault import FaultMap
from support.simulation import World

_SEEDS = st.integers(0, 1 << 16)
_FAULTS = st.builds(
    "{}:{}#{}={}".format,
    st.sampled_from(["pwrite", "fsync", "allocate", "rename", "sync_dir", "create", "open_write", "unlink", "pread"]),
    st.sampled_from(["*", "index/*", "frontier*", "checkpoint*"]),
    st.integers(1, 6),
    st.sampled_from(["ENOSPC", "EIO", "EROFS", "crash", "crash-after"]),
)


def _up(machine: Machine) -> bool:
    return machine.world.is_up


def _down(machine: Machine) -> bool:
    return not machine.world.is_up


class Machine(RuleBasedStateMachine):
    """The steps of a World; it checks itself at each recovery and each query, and at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="model-"))

    @initialize(seed=_SEEDS)
    def begin(self, seed: int) -> None:
        self.world = World(self.root, seed, Shape.draw(random.Random(seed)))

    @rule(count=st.sampled_from([1, 2, 7, 30]))
    def append(self, count: int) -> None:
        self.world.log.append(count)

    @rule()
    def expire(self) -> None:
        self.world.expire()

    @rule(faults=_FAULTS)
    def fail(self, faults: str) -> None:
        self.world.disk.faults = FaultMap.parse(faults)

    @precondition(_down)
    @rule(forced=st.booleans())
    def start(self, *, forced: bool) -> None:
        self.world.start(forced=forced)

    @precondition(_down)
    @rule(changes=st.integers(0, 40))
    def crash_inside_a_recovery(self, changes: int) -> None:
        self.world.disk.crash_at = self.world.disk.changes + changes
        self.world.start()
        self.world.disk.crash_at = None

    @precondition(_up)
    @rule(polls=st.integers(1, 4))
    def read(self, polls: int) -> None:
        self.world.do(lambda daemon: daemon.read(polls))

    @precondition(_up)
    @rule()
    def catch_up(self) -> None:
        if self.world.catch_up():
            self.world.check_live()

    @precondition(_up)
    @rule()
    def send(self) -> None:
        self.world.do(lambda daemon: daemon.send())

    @precondition(_up)
    @rule()
    def persist(self) -> None:
        self.world.do(lambda daemon: daemon.persist())

    @precondition(_up)
    @rule()
    def persisted(self) -> None:
        self.world.do(lambda daemon: daemon.persisted())

    @precondition(_up)
    @rule()
    def stop(self) -> None:
        self.world.stop()

    @precondition(_up)
    @rule(seed=_SEEDS)
    def crash(self, seed: int) -> None:
        self.world.crash(random.Random(seed))

    @precondition(_up)
    @rule()
    def kill(self) -> None:
        self.world.kill()

    @rule()
    def query(self) -> None:
        self.world.query(live=self.world.is_up)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish()
            self.world.log.close()
        shutil.rmtree(self.root)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
