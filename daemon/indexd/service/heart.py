"""Heart: tells the service manager how it goes, and feeds its watchdog as long as every stage moves.

It beats on the event loop: a loop that hangs feeds nobody either. A stage that waits and has said so (for a disk with
room, for a log that is not mounted) is not stalled: to end the process would not help.
"""

from __future__ import annotations

import asyncio

from indexd.dispatch.queue import DispatchQueue
from indexd.dispatch.reput import pause
from indexd.errors import IndexdError
from indexd.service.instance import Instance
from indexd.service.pulse import Pulse
from indexd.service.state import DaemonState
from indexd.service.telling import Telling

_BEAT_SECONDS = 2.0
# A look at broker, disk and log's end is due every second and takes some two; so old it hangs.
_AROUND_SECONDS = 15.0


class Heart:
    """Of one Daemon: ``tailing`` at its first look at the log, ``stopping`` at the signal, ``run`` beside it all."""

    def __init__(
        self, instance: Instance, pulse: Pulse, state: DaemonState, queue: DispatchQueue, telling: Telling
    ) -> None:
        self._instance, self._board, self._notifier = instance, instance.board, instance.notifier
        self._pulse = pulse
        self._state = state
        self._queue = queue
        self._telling = telling
        self._is_tailing = self._is_stopping = False

    def tailing(self) -> None:
        """The log was looked at: ready, the first time."""
        if not self._is_tailing:
            self._is_tailing = True
            self._notifier.ready(self.status())

    def reloading(self) -> None:
        """A HUP is being followed."""
        if self._is_tailing:
            self._notifier.reloading()

    def reloaded(self) -> None:
        """It was, or could not be."""
        if self._is_tailing and not self._is_stopping:
            self._notifier.ready(self.status())

    def stopping(self) -> None:
        """A signal said stop."""
        self._is_stopping = True
        self._board.stopping()
        self._notifier.stopping()

    async def run(self, finished: asyncio.Event) -> None:
        """Until ``finished``; at least four times in the shortest limit."""
        seconds = min(_BEAT_SECONDS, self._pulse.limits["read"] / 4)
        while not finished.is_set():
            self.beat()
            await pause(finished, seconds)

    def beat(self) -> None:
        """Look at every stage; feed the watchdog if none is stalled. A look around that hangs is only said."""
        self._look_at_around()
        flusher, outputs = self._state.building.flusher, self._state.building.outputs
        self._pulse.watch("build", outputs.phy_offset)
        self._pulse.watch("flush", flusher.counters.files_synced)
        if self._queue.is_blocked:
            self._pulse.sign("read")  # it waits for the drain, and that has signs of its own
        stalled = self._pulse.stalled()
        self._telling.stalled(stalled)
        self._board.stalled = stalled
        if stalled:
            return
        self._notifier.watchdog()
        if self._is_stopping or not self._is_tailing:
            self._notifier.extend(self._pulse.limits["build"])
        elif self._is_tailing:
            self._notifier.status(self.status())

    def _look_at_around(self) -> None:
        looked, is_told = self._instance.looked_around, "around" in self._state.tally.problems
        is_old = looked is not None and self._instance.clock() - looked > _AROUND_SECONDS
        if is_old and not is_told:
            text = f"for {_AROUND_SECONDS:.0f} s and more no look at the broker, the disk and the log's end has ended"
            remedy = "see whether broker_conf, --store or --data is on a file system that hangs"
            self._telling.problem("around", IndexdError(text, remedy))
        elif is_told and not is_old:
            self._telling.problem("around", None)

    def status(self) -> str:
        """One line: how far behind, or what is in the way."""
        lag, tally, corrupt = self._state.lag(), self._state.tally, self._state.reput.corrupt
        behind = (
            f"{lag.bytes} bytes and {lag.milliseconds} ms behind, at offset {self._state.building.progress.phy_offset}"
        )
        for stage, error in tally.problems.items():
            return f"waiting ({stage}): {error.line()}; {behind}"
        if corrupt is not None:
            return f"standing at corrupt bytes at {corrupt.offset}: {corrupt.reason}; {behind}"
        return behind
