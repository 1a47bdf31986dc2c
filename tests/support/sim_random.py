"""One random run of a World, from one seed: what happens, in words, and what it comes to."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from support.sim_checks import RefusedError
from support.sim_daemon import Shape
from support.sim_fault import FaultMap
from support.simulation import World

_STEPS = 60
_FAULTS = (
    *("ENOSPC", "ENOSPC", "EIO", "EROFS", "EMFILE", "EDQUOT", "short", "crash", "crash-after"),
)  # fmt: skip
_FAULTY = (
    *("pwrite", "pwrite", "fsync", "allocate", "rename", "sync_dir", "create", "unlink", "truncate"),
    *("open_read", "open_write", "pread", "list_dir", "exists", "*"),
)
_WHERE = ("*", "index/*", "*.tmp", "frontier*", "checkpoint*", "abort*", "index")


class RandomRun:
    """``history`` says each step; ``go`` raises what is broken. ``faults`` is met from the first call on."""

    def __init__(self, root: Path, seed: int, *, rewrites: bool = False, faults: str = "", steps: int = _STEPS) -> None:
        self.rand = random.Random(seed)
        self.world = World(root, seed, Shape.draw(self.rand, rewrites=rewrites))
        self.steps = steps
        self.history: list[str] = [f"seed {seed}: {self.world.shape}"]
        self._given = faults
        if faults:
            self.world.disk.faults = FaultMap.parse(faults)

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
            (2, self._stop, True),
            (12, self._start, False),
            (2, self._expire, None),
            (2, self._arm, None),
            (3, self._fail, None),
            *([(6, self._rewrite, None)] if world.shape.rewrites else []),
        )
        for _ in range(self.steps):
            fitting = [step for step in steps if step[2] in (None, world.is_up)]
            step = self.rand.choices(fitting, [weight for weight, *_ in fitting])[0][1]
            self._say(step.__name__.strip("_"))
            step()
        self._say("finish")
        self._keep_faults(FaultMap())
        world.finish()
        world.start()
        world.finish()
        self._say("done")

    def tally(self) -> dict[str, int]:
        """What has happened, in numbers."""
        self._keep_faults(self.world.disk.faults)
        return dict(self.world.tally) | {"runs": 1, "disk operations": self.world.disk.operations}

    def _say(self, words: str) -> None:
        world = self.world
        self.history.append(f"{words}: changes={world.disk.changes} up={world.is_up} {world.log} {world.promised}")

    def _append(self) -> None:
        if self.rand.random() < 0.1:
            self.world.log.roll()
        else:
            self.world.log.append(self.rand.choice([1, 3, 10, 40]))

    def _poll(self) -> None:
        self.world.do(lambda daemon: daemon.read(self.rand.randint(1, 4)))

    def _drain(self) -> None:
        def step(daemon: object) -> None:
            self.world.up.read(self.rand.choice([0, 3, 10_000]))
            self.world.up.drain()

        if self.world.do(step):
            self.world.check_live()

    def _send(self) -> None:
        self.world.do(lambda daemon: daemon.send())

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
        self.world.do(lambda daemon: daemon.persisted())

    def _query(self) -> None:
        if not self.world.is_outdated:
            self.world.query(live=self.world.is_up)

    def _stop(self) -> None:
        self.world.stop()

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
        fault, operation = self.rand.choice(_FAULTS), self.rand.choice(_FAULTY)
        operation = "pwrite" if fault == "short" else operation
        where, which = self.rand.choice(_WHERE), f"#{self.rand.randint(1, 20)}"
        if self.rand.random() < 0.1 and not fault.startswith("crash"):
            which = "@all"
        self._keep_faults(FaultMap.parse(f"{operation}:{where}{which}={fault}; {self._given}"))
        self.history.append(f"  {operation}:{where}{which}={fault}")

    def _keep_faults(self, faults: FaultMap) -> None:
        for name, count in self.world.disk.faults.injected.items():
            self.world.tally[f"fault {name}"] += count
        self.world.disk.faults.injected.clear()
        self.world.disk.faults = faults
