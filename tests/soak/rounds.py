"""Rounds: faults are dealt from a shuffled deck, so that each comes up before any comes again; then all is checked."""

from __future__ import annotations

import contextlib
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from soak.checks import check
from soak.faults import ENDS_WHOLENESS, FAULTS, NEED_SMALL_DISK
from soak.stop import Stop
from soak.tally import Tally
from soak.world import World
from support.daemon import compile_kernels

WORDS = {name: words for name, (words, _) in FAULTS.items()}
_FAULTS_A_ROUND = 6
# The truth about the log is slow: after so many rounds log and data directory are made anew.
_ROUNDS_A_WORLD = 3
_PAUSE_MAX = 0.5


class Rounds:
    """``work`` is a directory of its own. ``close`` ends all processes and unmounts; it has to be called."""

    def __init__(self, work: Path, tally: Tally, stop: Stop, progress: Callable[[str], None]) -> None:
        self._tally = tally
        self._progress = progress
        self._rand = random.Random(tally.seed)
        self._deck: list[str] = []
        self._world = World(work, self._rand, tally, stop)
        if self._world.disk.why_not is not None:
            tally.left_out = dict.fromkeys(sorted(NEED_SMALL_DISK), self._world.disk.why_not)

    def compile(self) -> None:
        """The daemon's inner loops, once, before the time counts."""
        compile_kernels()

    def run(self, deadline: float, rounds: int | None, queries: int) -> None:
        """Until the time or the rounds are over."""
        number = 0
        while time.monotonic() < deadline and (rounds is None or number < rounds):
            if number % _ROUNDS_A_WORLD == 0:
                self._world.renew(number)
            else:
                self._world.begin_again()
            dealt = self._deal(is_first=number % _ROUNDS_A_WORLD == 0)
            self._go(number, dealt, queries)
            number += 1

    def close(self, *, keep: bool) -> None:
        """Nothing of it runs or is mounted any more; with ``keep`` the data directory is in the work directory."""
        world = self._world
        world.end()
        kept = world.work / "kept"
        if keep:
            with contextlib.suppress(OSError, shutil.Error):
                shutil.copytree(world.data, kept, ignore=shutil.ignore_patterns("filler"))
            (world.work / "history").write_text("\n".join(world.history) + "\n", "utf-8")
        world.disk.unmount()
        if kept.exists():
            shutil.rmtree(world.data, ignore_errors=True)
            kept.rename(world.data)

    def _deal(self, *, is_first: bool) -> list[str]:
        dealt: list[str] = []
        while len(dealt) < _FAULTS_A_ROUND:
            fits = [name for name in self._deck if not (is_first and name in ENDS_WHOLENESS)]
            if fits:
                self._deck.remove(fits[0])
                dealt.append(fits[0])
            else:
                fresh = [name for name in FAULTS if name not in self._tally.left_out]
                self._deck += self._rand.sample(fresh, len(fresh))
        return dealt

    def _go(self, number: int, dealt: list[str], queries: int) -> None:
        world = self._world
        world.note(f"round {number + 1}: {', '.join(dealt)}")
        begun = time.monotonic()
        for name in dealt:
            world.sleep(0, _PAUSE_MAX)
            world.look_after_daemon()
            self._tally.tried[name] += 1
            world.note(f"-- {name}")
            FAULTS[name][1](world)
        faulted = time.monotonic()
        check(world, queries)
        self._tally.round_held()
        checked = time.monotonic() - faulted
        self._progress(
            f"round {number + 1} held: {', '.join(dealt)}; {faulted - begun:.1f} s, checked in {checked:.1f} s"
        )
