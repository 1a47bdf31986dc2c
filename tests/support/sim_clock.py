"""Time for a simulation: it passes only when it is looked at, so that one seed is one run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

from indexd.commitlog.reader import LogReader
from indexd.index.file import IndexService
from indexd.recovery import open as open_module
from indexd.service import start as start_module
from support.sim_shape import Shape
from support.small_log import BASE_TIME

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


class _NoProgress:
    """A recovery that nobody watches: no bar, no DATA/state written by how long it takes."""

    def __init__(self, *_: object) -> None:
        return

    def __call__(self, step: str, done: int, total: int) -> None:
        return


@contextmanager
def steered(clock: SimClock, pid: int, shape: Shape) -> Iterator[None]:
    """The daemon's own code, by this clock, in a process of that pid.

    The kernels are compiled already; a start need not ask for them. What is fixed to suit large files is scaled down.
    No Mock is made: to make one takes longer than a drain.
    """
    with (
        mock.patch.object(open_module, "LogReader", partial(LogReader, clock=clock.monotonic)),
        mock.patch.object(IndexService, "clock", staticmethod(clock.wall)),
        mock.patch.object(start_module, "load_kernels", _NoProgress),
        mock.patch.object(start_module, "RecoveryProgress", _NoProgress),
        mock.patch("indexd.index.file.ENTRIES_PER_WRITE", shape.window),
        mock.patch("indexd.index.entries.ENTRIES_PER_READ", shape.window),
        mock.patch("indexd.compare.index.ENTRIES_PER_READ", shape.window),
        mock.patch("indexd.flush.watch._NOTE_EVERY", shape.note_every),
        mock.patch("os.getpid", partial(int, pid)),
        mock.patch("time.sleep", clock.advance),
    ):
        yield
